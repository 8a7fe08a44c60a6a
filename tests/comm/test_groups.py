"""Process groups: which backend serves a device, how few there are, and that making one needs its members only."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm import agreements, groups
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.groups import backend_for, make_group
from tests.harness import on_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@on_ranks(2)
def test_each_kind_of_device_may_have_a_backend_of_its_own() -> None:
    expected = {
        "cpu:gloo,cuda:nccl": ("gloo", "nccl"),
        "cpu:gloo,cuda:gloo": ("gloo", "gloo"),
        "cuda:nccl": ("gloo", "nccl"),  # what is not named has the default of the group
    }
    for config, backends in expected.items():
        with mock.patch.object(dist, "get_backend_config", lambda group, config=config: config):
            assert (backend_for(dist.group.WORLD, CPU), backend_for(dist.group.WORLD, GPU)) == backends


@on_ranks(2)
def test_a_group_is_made_without_a_split_of_the_default_group() -> None:
    """Ranks that are not in it would have to take part."""
    default: Any = dist.distributed_c10d._get_default_group()
    seen: list[Any] = []
    new_group = dist.new_group

    def made(*args: Any, **kwargs: Any) -> Any:
        seen.append(default.bound_device_id)
        return new_group(*args, **kwargs)

    default.bound_device_id = torch.device("cpu", 0)
    try:
        with mock.patch.object(dist, "new_group", made):
            make_group([0, 1], "a test", "gloo")
        assert seen == [None] and default.bound_device_id == torch.device("cpu", 0)
    finally:
        default.bound_device_id = None


@pytest.mark.parametrize(("stall_timeout_s", "expected"), [(300.0, 3600.0), (7200.0, 14400.0)])
def test_messages_on_a_device_may_wait_as_long_as_hosts_do(stall_timeout_s: float, expected: float) -> None:
    """torch's own timeout of NCCL's groups is ten minutes: it would end ranks that wait with patience."""
    with (
        mock.patch.object(groups, "_made_when_used", contextlib.nullcontext),
        mock.patch.object(dist, "new_group", lambda *_, **__: "group"),
        mock.patch.object(dist.distributed_c10d, "_set_pg_timeout") as set_timeout,
    ):
        make_group([0, 1], "a test", "nccl", stall_timeout_s)
    set_timeout.assert_called_once_with(timedelta(seconds=expected), "group")


@on_ranks(2)
def test_what_was_done_is_undone_where_the_other_ranks_cannot_be_asked() -> None:
    comm = Communicator(dist.group.WORLD, CPU)
    undone: list[str] = []
    cut_off = mock.patch.object(agreements, "gather_objects", side_effect=ConnectionError)
    with cut_off, pytest.raises(ConnectionError):
        comm.together("a test", lambda: "a file", undo=undone.append)
    assert undone == ["a file"]
    comm.close()
