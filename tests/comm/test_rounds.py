"""Small messages are combined in rounds among few ranks, not in one ring of all."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist

from lightning_zero.planning.topology import rounds_of
from lightning_zero.ranks.waits import StallError
from tests.comm.test_communicator import communicator
from tests.harness import on_ranks


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
