"""Simulated scale: engines as first and last rank of 4096, from a small model up to the sizes of the benchmark."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from benchmarks.bench_scale import Case, Result, measure
from lightning_zero.planning.layout import SHARD_ALIGN
from lightning_zero.planning.topology import rounds_of

SMALL = {"vocab_size": 96, "n_layer": 3, "n_head": 4, "d_model": 64, "block_size": 64}
BUCKETS = 3 * 2 + 2  # of a block: norms, the rest; of the root: norm, the rest
RANKS = 4096
SHARD = SHARD_ALIGN  # elements of every bucket on every rank: the model is that small
LAST = RANKS - 1
OWNED = (BUCKETS - 1) * SHARD + 2 * 64  # elements of rank 0: the root's norm is smaller than a shard


def small(stage: int, rank: int, world_size: int = RANKS) -> Case:
    return Case("small", SMALL, stage, world_size, rank)


@pytest.fixture(scope="module")
def worker() -> Iterator[Callable[[Case], Result]]:
    """Measures many cases in one process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        pool.submit(int).result()  # its thread belongs to no test
        yield lambda case: pool.submit(measure, case, 0).result()


GATHERS = 2 + 2 * 2 * 2 + 2  # at stage 3: the root and the last block once, the others in forward and backward


@pytest.mark.mainly(lambda stage: stage == 3)
@pytest.mark.parametrize(
    ("stage", "counts"),
    [
        (0, {"all_reduce": BUCKETS}),
        (1, {"all_gather": BUCKETS, "reduce_scatter": BUCKETS}),
        (2, {"all_gather": BUCKETS, "reduce_scatter": BUCKETS}),
        (3, {"all_gather": GATHERS, "reduce_scatter": BUCKETS}),
    ],
)
def test_steps_of_first_and_last_rank(stage: int, counts: dict[str, int], worker: Callable[[Case], Result]) -> None:
    first, last = worker(small(stage, 0)), worker(small(stage, LAST))
    assert first.counts == last.counts == counts
    assert first.units == last.units == 4
    assert first.buckets == last.buckets == BUCKETS
    assert first.padded_numel == last.padded_numel == BUCKETS * RANKS * SHARD
    assert first.nbytes["grad"] == last.nbytes["grad"]
    assert first.exchanges == last.exchanges  # the order is agreed on in the first step only, and only at stage 3
    assert bool(first.exchanges[0]) == (stage == 3)
    assert first.exchanges[1] == 0
    if stage == 0:
        assert first.nbytes == last.nbytes
        assert last.owned_numel == last.parameters
    else:
        assert first.owned_numel == OWNED
        assert first.nbytes["optim_state"] == 2 * 4 * OWNED
        assert (last.owned_numel, last.fragments, last.nbytes["optim_state"]) == (0, 0, 0)  # it holds padding
    if stage == 3:
        whole = sum(first.nbytes[role] for role in ("compute_param", "master_param", "grad"))
        assert whole == sum(last.nbytes[role] for role in ("compute_param", "master_param", "grad"))
        assert whole == BUCKETS * SHARD * (4 + 4)  # master and gradient, both fp32


@pytest.mark.full
def test_growth_with_the_number_of_ranks_is_flat(worker: Callable[[Case], Result]) -> None:
    worlds = (8, 64, 512, RANKS)
    results = [worker(small(3, 0, world)) for world in worlds]

    def same(result: Result) -> tuple[object, ...]:
        return result.units, result.buckets, result.counts, result.exchanges

    assert len({str(same(r)) for r in results}) == 1
    # Of functions in a step, without those of an agreement's rounds: a loop over ranks would show.
    calls = [r.calls - 26 * len(rounds_of(0, world)) for r, world in zip(results, worlds, strict=True)]
    for few, many in (calls[:2], calls[2:]):  # with an all-to-all of gradients, and without
        assert max(few, many) <= 1.001 * min(few, many), calls
    assert max(calls) <= 1.001 * calls[0], calls
    assert [r.norm_table_nbytes for r in results] == [8 * world for world in worlds]
    rest = [sum(r.nbytes.values()) for r in results]
    assert rest == sorted(rest, reverse=True)
