"""Transports agree, operations are counted, groups are few and used again, small messages go in rounds of few ranks."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm import agreements, groups
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.groups import backend_for, make_group
from lightning_zero.comm.reduction import Pending, Reduction
from lightning_zero.comm.transports import (
    DIRECT_MAX_RANKS,
    DirectTransport,
    HostTransport,
    Members,
    PlainTransport,
    Sent,
    Transport,
    choose_transport,
)
from lightning_zero.planning.topology import EXCHANGE_MAX_RANKS, Ranks, by_part, over_nodes, rounds_of
from lightning_zero.ranks.verdict import StallError
from lightning_zero.ranks.waits import Waits
from tests.engine.support import places_posted_often
from tests.harness import on_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]
TRANSPORTS = [DirectTransport(), PlainTransport(exchanges=True)]


@contextmanager
def communicator(transport: Transport | None = None, **settings: Any) -> Iterator[Communicator]:
    comm = Communicator(dist.group.WORLD, CPU, **settings)
    comm._transport = transport or comm._transport
    try:
        yield comm
    finally:
        comm.close()


def _input(rank: int, world: int, dtype: torch.dtype, n: int = 512) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(world * n, generator=generator, dtype=torch.float64) * 3
    return values.to(dtype)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("transport", TRANSPORTS, ids=["direct", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_fills_every_slice_in_place(transport: Transport, dtype: torch.dtype) -> None:
    with communicator(transport) as comm:
        full = torch.zeros(comm.world_size * 512, dtype=dtype)
        own = slice(comm.rank * 512, (comm.rank + 1) * 512)
        full[own] = _input(comm.rank, comm.world_size, dtype)[own]
        result = comm.all_gather(full, "x").wait()
        assert result is full
        parts = [_input(rank, comm.world_size, dtype).view(-1, 512)[rank] for rank in range(comm.world_size)]
        assert torch.equal(full, torch.cat(parts))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transports_reduce_alike(dtype: torch.dtype) -> None:
    found = []
    for transport in TRANSPORTS:
        with communicator(transport) as comm:
            world, rank = comm.world_size, comm.rank
            found.append(comm.reduce(_input(rank, world, dtype), "x").finish().clone())
    own = slice(rank * 512, (rank + 1) * 512)
    first, *others = (_input(other, world, dtype) for other in range(world))
    assert torch.equal(found[0], sum(others, first)[own])  # in rank order
    if world <= 2:
        assert torch.equal(found[0], found[1])
    elif dtype is not torch.bfloat16:  # where one rounding is a hundredth
        torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


@on_ranks(1)
def test_one_rank_sends_and_counts_nothing_and_has_no_thread() -> None:
    with communicator() as comm:
        full = torch.arange(512.0)
        assert comm.all_gather(full, "a").wait() is full
        assert comm.reduce(full, "a").finish() is full
        assert comm.reduce(full, "a", whole=True).finish() is full
        assert comm.exchange(7, 8) == [[7], [8]]
        assert comm.all_gather_objects("x", "a test") == ["x"]
        assert comm.max_(torch.ones(1)).item() == 1
        comm.exchange(0)
        assert not comm.counts
        assert threading.active_count() == 1


@on_ranks(2, 3)
def test_small_values_are_agreed_on_by_all_ranks() -> None:
    with communicator() as comm:
        rank, world = comm.rank, comm.world_size
        assert comm.exchange(10 + rank, -rank) == [[10 + r for r in range(world)], [-r for r in range(world)]]
        assert comm.all_gather_objects({"rank": rank}, "a test") == [{"rank": r} for r in range(world)]
        values = torch.full((4,), float(rank))
        comm.broadcast(values)
        assert values.tolist() == [0.0] * 4


@on_ranks(2)
def test_device_tensors_over_a_host_backend_go_through_copies() -> None:
    """The messages and results are those of the transport inside. Nobody waits where it sends."""
    transport = HostTransport(DirectTransport())
    among = Members(dist.get_rank(), 2, dist.group.WORLD)

    def result(sent: Sent) -> Tensor:
        for work in sent.works:
            work.wait()
        return sent.finish()

    fulls = [torch.zeros(512), torch.zeros(128)]
    for full in fulls:
        full.view(2, -1)[among.rank] = among.rank + 1
    sent = transport.gather_all(fulls, among)
    assert sent.works and not fulls[0].view(2, -1)[1 - among.rank].any()
    assert result(sent) is fulls[0]
    assert all(full.unique().tolist() == [1.0, 2.0] for full in fulls)
    assert result(transport.reduce(torch.ones(512), among)).unique().tolist() == [2.0]
    out = torch.zeros(4)
    assert result(transport.exchange(out, torch.full((4,), among.rank + 1.0), [2, 2], [2, 2], among.group)) is out
    assert out.tolist() == [1.0, 1.0, 2.0, 2.0]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["gather", "reduction"])
def test_copies_through_host_memory_wait_no_longer_than_others(kind: str) -> None:
    with places_posted_often():
        comm = Communicator(dist.group.WORLD, CPU, stall_timeout_s=0.5)
        comm._transport = HostTransport(DirectTransport())
        if comm.rank == 0:
            issue = comm.all_gather if kind == "gather" else comm.reduce
            sent: Any = issue(torch.zeros(512), "x")
            with pytest.raises(StallError, match="x"):
                sent.wait() if kind == "gather" else sent.finish()
        else:
            time.sleep(1.5)  # never comes
        comm.waits.close()  # messages were lost on these groups: they are not given back


def test_transport_is_chosen_by_backend_and_ranks() -> None:
    expected = {
        ("gloo", DIRECT_MAX_RANKS, "cpu"): (DirectTransport, True),
        ("gloo", DIRECT_MAX_RANKS + 1, "cpu"): (PlainTransport, True),
        ("gloo", EXCHANGE_MAX_RANKS + 1, "cpu"): (PlainTransport, False),
        ("gloo", 2, "cuda"): (HostTransport, True),
        ("nccl", EXCHANGE_MAX_RANKS, "cuda"): (PlainTransport, True),
        ("nccl", EXCHANGE_MAX_RANKS + 1, "cuda"): (PlainTransport, False),
    }
    for (backend, world, device), found in expected.items():
        transport = choose_transport(backend, world, torch.device(device))
        assert (type(transport), transport.exchanges) == found


# -- what a closed communicator leaves --------------------------------------------------------------------------------


@on_ranks(2)
def test_closing_ends_the_thread_and_gives_the_groups_to_the_next() -> None:
    before = set(threading.enumerate())
    with communicator() as comm:
        groups = comm._groups
        assert any(t.name == "lightning_zero-places" for t in set(threading.enumerate()) - before)
    assert not set(threading.enumerate()) - before
    with communicator() as again:
        assert again._groups is groups
        with communicator() as other:
            assert other._groups is not groups


@on_ranks(2)
def test_groups_of_a_communicator_that_was_forgotten_are_used_again() -> None:
    first: Communicator | None = Communicator(dist.group.WORLD, CPU)
    groups = first._groups
    dist.barrier()
    if dist.get_rank() == 0:
        first = None  # the garbage collectors of two ranks do not work at the same time
    with communicator() as other:
        assert other._groups is not groups
    first = None
    with communicator() as again:
        assert again._groups is groups


@on_ranks(2)
def test_as_many_operations_of_other_kinds_are_not_the_same() -> None:
    """One rank has issued a gather that the other has not, and that one a sum."""
    for ends in ("resume", "close"):
        with communicator() as comm:
            groups = comm._groups
            assert groups is not None
            own = torch.zeros(2 * comm.world_size)
            pending = comm.all_gather(own, "x") if comm.rank else comm.reduce(own, "x")
            pending.abandon(time.monotonic())
            if ends == "resume":
                comm.resume()
                assert comm._groups is not groups
                full = torch.full((comm.world_size,), float(comm.rank))
                assert comm.all_gather(full, "x").wait().tolist() == [0.0, 1.0]
        with communicator() as again:
            assert again._groups is not groups


def test_only_what_all_ranks_have_issued_is_waited_for() -> None:
    """After an exception: the second phase of a reduction is issued when the first has been found complete."""
    comm = Communicator(None, CPU)
    for lands in (False, True):
        work = mock.Mock()
        first = Pending(comm.streams, comm.waits, "first", [] if lands else [work], lambda: torch.zeros(1))
        reduction = Reduction(
            first, lambda _, work=work: Pending(comm.streams, comm.waits, "later", [work], lambda: torch.zeros(1))
        )
        assert not (lands and reduction.land())
        reduction.abandon(time.monotonic() + 3600)
        ((limit,), _) = work.wait.call_args
        assert limit.total_seconds() < 1 if lands else limit.total_seconds() > 3000


# -- sums of narrower parts -------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("chunk", [100, 512, 1 << 18])
@pytest.mark.parametrize("transport", TRANSPORTS, ids=["direct", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parts_are_added_in_rank_order(transport: Transport, dtype: torch.dtype, chunk: int) -> None:
    os.environ["LIGHTNING_ZERO_EVEN_ALONE"] = "1"
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = [_input(r, world, torch.bfloat16).float() for r in range(world)]
    expected = sum(inputs[1:], inputs[0]) * 0.25
    own = slice(rank * 512, (rank + 1) * 512)
    for inner in (transport, HostTransport(transport)):
        with communicator(inner) as comm, mock.patch("lightning_zero.comm.transports.SUM_CHUNK", chunk):
            assert comm.exchanges
            full = inputs[rank].to(dtype, copy=True)
            part = comm.reduce(full, "x", factor=0.25, total_dtype=torch.float32).finish()
            assert torch.equal(part, expected[own])
            full = inputs[rank].to(dtype, copy=True)
            total = comm.reduce(full, "x", whole=True, factor=0.25, total_dtype=torch.float32).finish()
            assert torch.equal(total, expected)


@on_ranks(4, 6, full=(8,))
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parts_are_added_within_nodes_and_then_between_them(dtype: torch.dtype, host: bool) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = 2 if world == 8 else 1  # where tensor parallelism splits parameters, every second rank shares shards
    ranks = Ranks.locate(
        rank, by_part(over_nodes([str(r // (2 * parts)) for r in range(world)], exchanges=True), parts)
    )
    group, index = ranks.shard.ranks, ranks.shard.index
    nodes, own = len(group) // 2, slice(index * 512, (index + 1) * 512)
    terms = {r: _input(r, len(group), dtype).float() for r in group}
    sums = [(terms[first] + terms[second]) * 0.25 for first, second in zip(group[::2], group[1::2], strict=True)]
    expected = functools.reduce(torch.add, sums)
    with communicator(ranks=ranks) as comm:
        transport = HostTransport(comm._transport) if host else comm._transport
        with mock.patch.object(comm, "_transport", mock.Mock(wraps=transport, waits_on_host=host)) as sent:
            for whole in (False, True):
                full = terms[rank].to(dtype, copy=True)
                total = comm.reduce(full, "x", whole=whole, factor=0.25, total_dtype=torch.float32).finish()
                assert torch.equal(total, expected if whole else expected[own])
        # Each node gets the sums of its slices alone, in fp32; all that is narrower stays within a node.
        reduced = [(call.args[0].dtype, call.args[0].numel(), call.args[1].size) for call in sent.reduce.mock_calls]
        assert reduced == 2 * [*[(dtype, 2 * 512, 2)] * nodes, (torch.float32, nodes * 512, nodes)]


# -- rounds among few ranks, not one ring of all ----------------------------------------------------------------------


@pytest.mark.parametrize("world", [*range(1, 21), 48, 97, 1000, 1024])
def test_after_all_rounds_each_rank_has_the_values_of_all(world: int) -> None:
    known = {rank: {rank} for rank in range(world)}
    rounds = [rounds_of(rank, world) for rank in range(world)]
    for number in range(len(rounds[0])):
        groups = {tuple(of_rank[number]) for of_rank in rounds}
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        joined = {group: set().union(*(known[rank] for rank in group)) for group in groups}
        known = {rank: joined[group] for group in groups for rank in group}
    assert all(values == set(range(world)) for values in known.values())
    assert math.prod(map(len, rounds[0])) == world
    if world == 1024:
        assert sum(2 * (len(group) - 1) for group in rounds[0]) == 30


@pytest.mark.sample
@on_ranks(6, full=(2, 3, 4, 8))
def test_a_maximum_and_a_sum_are_those_of_all_ranks() -> None:
    with communicator() as comm:
        world = comm.world_size
        rows = torch.tensor([[(7 * rank + 3 * column) % 11 for column in range(5)] for rank in range(world)])
        for _ in range(2):
            assert torch.equal(comm.max_(rows[comm.rank].clone()), rows.amax(0))
            assert torch.equal(comm.sum_(rows[comm.rank].clone()), rows.sum(0))


@pytest.mark.full
@on_ranks(6)
def test_groups_are_replaced_after_an_exception_in_the_midst_of_the_rounds() -> None:
    """Rank 5 comes late: its neighbour has given up in the first round, and the others in the second."""
    with communicator(stall_timeout_s=1.0) as comm:
        groups = comm._groups
        late = comm.rank == 5
        if late:
            time.sleep(2.5)
            comm.max_(torch.tensor([5]))
        else:
            with pytest.raises(StallError):
                comm.max_(torch.tensor([comm.rank]))
        comm.resume()
        assert comm._groups is not groups
        assert comm.max_(torch.tensor([-comm.rank])).item() == 0
    dist.barrier()


# -- process groups ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_each_kind_of_device_may_have_a_backend_of_its_own() -> None:
    expected = {
        "cpu:gloo,cuda:nccl": ("gloo", "nccl"),
        "cpu:gloo,cuda:gloo": ("gloo", "gloo"),
        "cuda:nccl": ("gloo", "nccl"),  # what is not named has the default of the group
    }
    for config, backends in expected.items():
        with mock.patch.object(dist, "get_backend_config", lambda group, config=config: config):
            assert tuple(backend_for(dist.group.WORLD, device) for device in (CPU, GPU)) == backends


@on_ranks(2)
def test_a_group_is_made_without_a_split_of_the_default_group() -> None:
    """Ranks that are not in it would have to take part."""
    default: Any = dist.distributed_c10d._get_default_group()
    seen, new_group = list[Any](), dist.new_group

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


@on_ranks(4)
def test_a_large_group_opens_no_socket_before_its_first_message() -> None:
    opened = []
    for eager in (4, 3):
        with mock.patch.object(groups, "EAGER_RANKS", eager):
            before = len(os.listdir("/proc/self/fd"))
            group = make_group(range(4), "a test", "gloo")
            opened.append(len(os.listdir("/proc/self/fd")) - before)
        assert agreements.gather_on(group, dist.get_rank(), Waits(group, stall_timeout_s=60), "a test") == [0, 1, 2, 3]
    assert opened[1] < opened[0] and "TORCH_GLOO_LAZY_INIT" not in os.environ


@pytest.mark.parametrize(("stall_timeout_s", "expected"), [(300.0, 3600.0), (7200.0, 14400.0)])
def test_messages_on_a_device_may_wait_as_long_as_hosts_do(stall_timeout_s: float, expected: float) -> None:
    """torch's own timeout of NCCL's groups is ten minutes: it would end ranks that wait with patience."""
    with (
        mock.patch.object(groups, "_connected_when_used", contextlib.nullcontext),
        mock.patch.object(dist, "new_group", lambda *_, **__: "group"),
        mock.patch.object(dist.distributed_c10d, "_set_pg_timeout") as set_timeout,
    ):
        make_group([0, 1], "a test", "nccl", stall_timeout_s)
    set_timeout.assert_called_once_with(timedelta(seconds=expected), "group")


@on_ranks(2)
def test_what_was_done_is_undone_where_the_other_ranks_cannot_be_asked() -> None:
    undone: list[str] = []
    cut_off = mock.patch.object(agreements, "gather_objects", side_effect=ConnectionError)
    with communicator() as comm, cut_off, pytest.raises(ConnectionError):
        comm.together("a test", lambda: "a file", undo=undone.append)
    assert undone == ["a file"]
