"""What ranks send each other comes back as it was, a stranger's messages are not run; what all say is said once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm.agreements import broadcast_object, collect_objects, gather_objects, open_waits
from lightning_zero.planning.boxes import Box
from lightning_zero.ranks import mailbox
from lightning_zero.ranks.mailbox import Mailbox
from lightning_zero.ranks.messages import dumps, loads
from lightning_zero.settings import Stage
from lightning_zero.trainer.memory.auto_row import Decision
from tests.engine.support import assert_equal
from tests.harness import on_ranks

VALUES = [
    None,
    [True, 1, -(2**70), 0.1, float("inf"), "a\udcff"],
    ((1, 2), [3, (4,)], {5, 6}, frozenset("a")),
    {1: "int", "1": "text", (2, "a"): None, "tuple": ["tag"]},
    OrderedDict([("b", 1), ("a", 2)]),
    b"\x00\xff",
    Path("a/b"),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    Stage.zero3,
    Box((0,), (3,), 7),
    Decision("zero3", "cpu", "it fits", None),
]


def test_a_value_comes_back_as_it_was() -> None:
    for value in VALUES:
        found = loads(dumps(value))
        assert found == value and repr(found) == repr(value)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        tensors = {"0-d": torch.randn(()), "empty": torch.randn(0, 2), "strided": torch.randn(3, 2).t()}
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        assert_equal(loads(dumps(tensors)), tensors)


class Runs:
    """As a pickle: makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def forged(name: str, *parts: Any) -> bytes:
    return json.dumps({"ours": [*name.split(":"), *parts]}).encode()


def test_what_a_stranger_sends_is_not_run(tmp_path: Path) -> None:
    ran = str(tmp_path / "ran")
    messages = [
        pickle.dumps(Runs(tmp_path / "ran")),
        forged("os:mkdir", ran),
        forged("lightning_zero.ranks.messages:sys.modules", ran),  # what a module of ours has imported
        forged("lightning_zero.checkpoint.durable:os", ran),
        forged("lightning_zero.checkpoint.durable:written_aside", ran),  # a function
        forged("lightning_zero.strategy:ZeroStrategy"),  # a class that does more than hold values
        forged("lightning_zero.tiers.aio:Syscalls", None),  # it can be changed
        b'{"dtype": "load"}',
        b'{"Tensor": [1]}',
        b'{"a": 1, "b": 2}',
        b"[" * 100_000,
        b"",
    ]
    for message in messages:
        with pytest.raises(ValueError, match="expected a message of another rank"):
            loads(message)
    assert not (tmp_path / "ran").exists()


class Unknown:
    pass


@on_ranks(2)
def test_what_lies_in_the_store_is_not_run(tmp_path: Path) -> None:
    mail = Mailbox(1, dist.get_rank(), 2)
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="expected a message of another rank"):
            mail.collect(lambda *_: "")
    else:  # a stranger, who reaches the store as well
        dist.distributed_c10d._get_default_store().set("lightning_zero/mail/1/1", pickle.dumps(Runs(tmp_path / "ran")))
    dist.barrier()
    assert not (tmp_path / "ran").exists()


@on_ranks(2)
def test_what_comes_from_a_socket_is_not_run(tmp_path: Path) -> None:
    waits = open_waits(dist.group.WORLD, torch.device("cpu"), 30)
    evil = mock.patch("lightning_zero.comm.agreements.dumps", lambda _: pickle.dumps(Runs(tmp_path / "ran")))
    with evil, pytest.raises(ValueError, match="expected a message of another rank"):
        gather_objects(dist.group.WORLD, 1, waits, "a test")
    assert not (tmp_path / "ran").exists()
    waits.close()


@on_ranks(2)
def test_what_cannot_be_sent_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """None waits for the rank that has it."""
    world = dist.group.WORLD
    waits = open_waits(world, torch.device("cpu"), 30)
    value = Unknown() if waits.rank == 0 else 1
    for send in (
        lambda: gather_objects(world, value, waits, "a test"),
        lambda: collect_objects(world, value, waits, "a test"),
        lambda: broadcast_object(world, value, 0, waits),
    ):
        with pytest.raises(TypeError, match=r"rank 0: expected .* got a .*Unknown. Send what it is made of"):
            send()
    assert broadcast_object(world, {"a": (waits.rank,)}, 1, waits) == {"a": (1,)}
    assert collect_objects(world, waits.rank, waits, "a test") == ([0, 1] if waits.rank == 0 else None)
    waits.close()


def printed(text: str) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        mailbox.say_once(text)
    return said.getvalue()


@on_ranks(2, 3)
def test_a_text_of_all_ranks_is_printed_once_and_any_other_by_each() -> None:
    rank = dist.get_rank()
    assert printed("all ranks fail alike") == ("" if rank else "all ranks fail alike\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailbox, "SAID_S", 0.2)
        assert printed(f"rank {rank} fails") == f"rank {rank} fails\n"
        if rank == 1:
            assert printed("this rank alone fails") == "this rank alone fails\n"
