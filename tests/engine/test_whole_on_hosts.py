"""The whole module between runs where ranks are on several hosts: each host has a copy, and what is missing is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero.engine.whole import whole_params
from tests.engine.sides import Sharded
from tests.engine.works import language_work, train
from tests.harness import on_ranks
from tests.models import Model

HOSTS: dict[str, Sequence[int]] = {"one each": (0, 1, 2), "two and one": (0, 0, 1), "the last first": (1, 0, 1)}


@contextlib.contextmanager
def on_hosts(hosts: Sequence[int], available: Sequence[int] | None = None) -> Iterator[None]:
    """Inside, this rank takes itself for one on a host of these, by rank."""
    rank = dist.get_rank()
    machine = mock.patch.object(whole_params, "machine", lambda: f"host {hosts[rank]}")
    free = available[rank] if available is not None else 1 << 40
    with machine, mock.patch.object(whole_params, "available_host_memory", lambda: free):
        yield


def whole(side: Sharded) -> list[torch.Tensor]:
    with lightning_zero.gather(side.module):
        return [param.detach().clone() for param in side.module.parameters()]


@on_ranks(3)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("hosts", list(HOSTS))
def test_each_host_has_all_values(stage: int, hosts: str) -> None:
    with on_hosts(HOSTS[hosts]), Sharded(Model(), stage=stage) as side:
        bias = side.module.head.bias
        for step in range(2):
            train(side, [step])
            expected = whole(side)
            assert whole_params.show_whole(side.engine)
            assert all(map(torch.equal, side.module.parameters(), expected))
            with torch.no_grad():
                bias.add_(float(dist.get_rank()))  # of this rank alone
                dist.barrier()
                assert torch.equal(bias, expected[-1] + dist.get_rank())
                bias.fill_(7.0 + step)  # of all
            assert whole_params.shard_again(side.engine, keep=bool(step))
            assert whole(side)[-1].eq(7.0 + step).all()
            assert all(map(torch.equal, whole(side)[:-1], expected[:-1]))
        kept = side.engine.host_copy
        assert whole_params.show_whole(side.engine)  # the copy that was kept, with what was written
        assert side.engine.host_copy is kept is not None
        assert bias.eq(8.0).all()
        whole_params.shard_again(side.engine)


@on_ranks(3)
def test_one_host_without_room_is_named_by_all() -> None:
    says = r"stays sharded.*on the host of ranks 2, got 1,000 bytes"
    warns = pytest.warns(UserWarning, match=says) if dist.get_rank() == 0 else contextlib.nullcontext()
    with on_hosts((0, 0, 1), (1 << 40, 1 << 40, 1000)), Sharded(Model(), stage=3) as side:
        with warns:
            assert not whole_params.show_whole(side.engine)
        language_work(side, 0)


@on_ranks(3)
def test_writes_of_rank_0_count_on_all_hosts_and_each_rank_shows_them() -> None:
    with on_hosts((0, 0, 1)), Sharded(Model(), stage=3) as side:
        before = whole(side)
        assert whole_params.show_whole(side.engine)
        head = side.module.head
        with torch.no_grad():
            head.bias.fill_(float(dist.get_rank()))
            if dist.get_rank():
                head.weight.data = torch.full_like(head.weight, 7.0)
        whole_params.take_writes_over(side.engine)
        assert head.bias.eq(0.0).all() and torch.equal(head.weight, before[-2])
        whole_params.shard_again(side.engine)
        assert all(map(torch.equal, whole(side), [*before[:-1], torch.zeros_like(before[-1])]))
