"""What a step costs on a device: where the host waits, what is copied, queued and sent, what memory is held.

A table is what the engine does now: another wait fails, and one that is gone is to be taken out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lightning_zero.planning.placement import OFFLOADS, Tier
from lightning_zero.settings import Offload
from tests.device import timed
from tests.device.machine import Wait
from tests.device.simulate import FLAT, MIXED, PLAIN, Case, Step
from tests.device.test_races import SMALL, Trained
from tests.rows import OFFLOADED

BUCKETS = 4  # three blocks and the root, fp32
HOWS = {"plain": PLAIN, "two micro-batches": (Step(2),) * 3, "clipped": (Step(clips=True),) * 3}

ARRIVED = Wait("engine/units/grad_store.py: _wait", "event", main=False)
LANDED = Wait("tiers/pinned.py: Landing._land", "event", main=False)
TO_WRITE = Wait("engine/units/master_storage.py: HostStorage.open", "event", main=False)
SENT = Wait("tiers/pinned.py: Sender.send", "event", main=False)
READ_INTO = Wait("tiers/pinned.py: ReadAhead.take_buffer", "event")

# In one step at stage 3 that repeats what is known. The worst case: the device is behind, and steps are begun late.
# Threads wait. The main thread does, too, for memory that the disk is about to write to.
STEPS = {"plain": {ARRIVED: 1}, "two micro-batches": {LANDED: 4}, "clipped": {ARRIVED: 2}}
ROWS: dict[str, dict[Wait, int]] = {
    "optimizer_cpu": {TO_WRITE: 1},
    "cpu": {TO_WRITE: 1},
    "optimizer_nvme": {SENT: 3},
    "optimizer_cpu_param_nvme": {TO_WRITE: 1},
    "nvme": {},
}


@pytest.mark.parametrize("steps", [pytest.param(HOWS[how], id=how) for how in HOWS])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_the_host_waits_for_nothing_where_all_is_on_the_device(
    stage: int, precision: str, steps: tuple[Step, ...], trained: Trained
) -> None:
    found = trained(Case(stage, precision=precision, steps=steps))
    assert [dict(step.waits) for step in found.steps[1:]] == [{}] * (len(steps) - 1)
    assert not any(step.copies for step in found.steps)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("row", OFFLOADED)
def test_the_host_waits_where_the_table_says(row: str, how: str, trained: Trained) -> None:
    waits = dict(trained(Case(3, row, steps=HOWS[how])).steps[-1].waits)
    in_files = OFFLOADS[Offload(row)].compute_param is Tier.nvme
    assert waits.pop(READ_INTO, 0) <= 2 * BUCKETS * HOWS[how][-1].micro_batches * in_files
    # What another wait has heard of, by chance or not, takes none of its own.
    assert waits.keys() - ROWS[row].keys() == STEPS[how].keys()
    assert all(times <= (STEPS[how] | ROWS[row])[wait] for wait, times in waits.items())


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("row", ["optimizer_cpu", "cpu", "optimizer_nvme"])
@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 1), ("bf16", 1), ("bf16", 4)])
def test_the_main_thread_waits_only_for_parameters_in_files(
    ranks: int, precision: str, row: str, how: str, trained: Trained
) -> None:
    found = trained(Case(3, row, precision=precision, ranks=ranks, steps=HOWS[how]))
    assert not [wait for wait in found.steps[-1].waits if wait.main]


def of_model(function: str) -> bool:
    """Whether autograd asks for it: the engine calls ``loss.backward()`` there."""
    return function.startswith("the model") or function == "engine/passes/passes.py: Passes.backward"


@pytest.mark.parametrize(("stage", "row"), [(1, "optimizer_cpu"), (1, "optimizer_nvme"), *((3, row) for row in ROWS)])
def test_gradients_go_to_the_host_once_and_parameters_come_back_as_often_as_they_are_gathered(
    stage: int, row: str, trained: Trained
) -> None:
    found = trained(Case(stage, row))
    step = found.steps[-1]
    gathers = step.collectives["gather", "all_gather_single"]
    times = 1 if row in ("optimizer_cpu", "optimizer_nvme") else gathers / BUCKETS
    for to_host, expected in ((True, found.shard_nbytes), (False, times * found.shard_nbytes)):
        assert sum(nbytes for copy, nbytes in step.copied.items() if copy.to_host is to_host) == expected


# For a block in one step, with one unit gathered ahead. A block is one bucket, as it is one group of FSDP2's: norms
# that keep fp32 lie in the root. Under bf16 a rank receives the parts of its slice, and adds them.
NAMES = ("kernels", "collectives", "recorded", "waited", "allocations", "host_waits")
BLOCKS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "fp32": ({}, dict(zip(NAMES, (8, 3, 6, 6, 4, 0), strict=True))),
    "bf16": ({"precision": "bf16"}, dict(zip(NAMES, (9, 3, 6, 6, 5, 0), strict=True))),
    "bf16, zero0": ({"precision": "bf16", "stage": 0}, {"collectives": 2, "recorded": 2}),
    "bf16, zero1": ({"precision": "bf16", "stage": 1}, {"collectives": 2, "recorded": 4}),
    "bf16, zero2": ({"precision": "bf16", "stage": 2}, {"collectives": 2, "recorded": 4}),
    "zero1, optimizer_cpu": ({"stage": 1, "row": "optimizer_cpu"}, {"kernels": 7, "collectives": 2}),
    "optimizer_cpu": ({"row": "optimizer_cpu"}, {"kernels": 10, "collectives": 3}),
    "cpu": ({"row": "cpu"}, {"kernels": 9, "collectives": 3}),
    "nvme": ({"row": "nvme"}, {"kernels": 9, "collectives": 3}),
}


@pytest.mark.parametrize("what", BLOCKS)
def test_a_block_costs_what_the_table_says(what: str, trained: Trained) -> None:
    """Without the optimizer's own kernels. See ``docs/architecture.md``, which has FSDP2's beside it."""
    how, expected = BLOCKS[what]

    def counts(blocks: int) -> dict[str, int]:
        step = trained(Case(blocks=blocks, settings={"prefetch_bytes": 1}, **how)).steps[-1]

        def own(counter: Counter[str]) -> int:
            return sum(n for what, n in counter.items() if not of_model(what) and not what.startswith("engine/steps"))

        found = {name: own(getattr(step, name)) for name in ("kernels", "recorded", "waited", "allocations")}
        return found | {"collectives": step.collectives.total(), "host_waits": step.waits.total()}

    few, many = counts(4), counts(12)
    assert {name: (many[name] - few[name]) / 8 for name in expected} == expected


@pytest.mark.sample
@pytest.mark.parametrize("row", ["none", "cpu", "optimizer_cpu"])
def test_a_module_is_sharded_unit_by_unit(row: str, trained: Trained) -> None:
    """Sharding it takes the memory of a few units, however many there are."""
    for blocks in (4, 12):
        found = trained(Case(3, row, steps=(), blocks=blocks))
        assert found.construction.peak <= found.shard_nbytes * (row != "cpu") + 3 * found.unit_nbytes


@pytest.mark.sample
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_first_backward_of_a_kind_holds_no_more_than_the_others(micro_batches: int, trained: Trained) -> None:
    """Buffers of reductions are bounded, also while nobody knows yet in which order the ranks come."""
    settings = SMALL | {"prefetch_bytes": 0}
    found = trained(Case(3, "cpu", steps=(Step(micro_batches),) * 3, blocks=12, settings=settings))
    assert found.steps[0].peak - found.steps[-1].peak <= found.unit_nbytes
    assert found.steps[-1].peak < 2 * (found.shard_nbytes + found.unit_nbytes)  # of 4 shards that the model is


@pytest.mark.parametrize("reduce_bucket_bytes", [1200, 1 << 28])  # one reduction in flight, and all
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_peak_is_the_planned_one(
    stage: int, precision: str, micro_batches: int, reduce_bucket_bytes: int, trained: Trained
) -> None:
    """Without norms in fp32: a fifth of this small model, whose gradients would come to the end of the backward."""
    how: dict[str, Any] = {"stage": stage, "precision": precision, "fp32_modules": ()}
    assert_peak(trained, {"reduce_bucket_bytes": reduce_bucket_bytes}, micro_batches, **how)


def test_the_peak_with_what_a_node_keeps_is_the_planned_one(trained: Trained) -> None:
    assert_peak(trained, SMALL | {"hybrid_shard": "node_backward"}, 2, nodes=2)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_peak_with_sums_in_two_levels_is_the_planned_one(stage: int, micro_batches: int, trained: Trained) -> None:
    how: dict[str, Any] = {"stage": stage, "precision": "bf16", "nodes": 2, "fp32_modules": ()}
    assert_peak(trained, SMALL | FLAT, micro_batches, **how)


def assert_peak(trained: Trained, settings: dict[str, Any], micro_batches: int, **how: Any) -> None:
    """The model's own tensors, which are not planned, are small here."""
    found = trained(Case(blocks=12, steps=(Step(micro_batches),) * 3, settings={"prefetch_bytes": 1} | settings, **how))
    assert 0.93 < found.steps[-1].peak / found.planned_nbytes < 1.07


# -- messages ---------------------------------------------------------------------------------------------------------

SENDING = [
    *(Case(stage, precision=precision, steps=MIXED) for stage in range(4) for precision in ("fp32", "bf16")),
    Case(1, ranks=1, even_alone=True),
    Case(3, "optimizer_cpu", "bf16", steps=MIXED),
    Case(3, "cpu", "bf16", "bf16"),
    Case(0, nodes=2, steps=MIXED),
    Case(3, precision="bf16", nodes=2, steps=MIXED),
    Case(3, precision="bf16", nodes=2, settings={"hybrid_shard": "node_backward"}),
    *(Case(stage, precision="bf16", nodes=2, steps=MIXED, settings=FLAT) for stage in (0, 3)),
    Case(3, precision="bf16", settings={"optimizer": {"sharding": "tensors"}}),
]


@pytest.mark.parametrize("case", SENDING, ids=str)
def test_no_message_of_a_step_is_the_first_of_its_kind(case: Case, trained: Trained) -> None:
    """NCCL connects ranks at the first message of each algorithm, which it chooses by kind, dtype and size."""
    found = trained(case)
    sent = {message for step in found.steps for message in step.messages}
    assert sent and sent <= set(found.construction.messages)


# -- seconds of a step on an H200 -------------------------------------------------------------------------------------

# An order that makes one thing wait for another, for no need, fails here: gathers that wait for all of compute,
# gradients that leave between kernels of the backward, a host that waits for the steps.
LEAST = 0.9  # of the bound that is reached

Elsewhere = Callable[..., timed.Predicted]

TIMED = [("cpu", "plain"), ("optimizer_cpu", "two micro-batches")]
MORE = [("cpu", "two micro-batches"), ("nvme", "clipped"), ("optimizer_nvme", "plain")]
MORE += [("optimizer_cpu", "plain"), ("optimizer_cpu", "clipped")]


@pytest.mark.parametrize(("row", "how"), [*TIMED, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)])
def test_a_step_takes_little_more_than_it_must(row: str, how: str, elsewhere: Elsewhere) -> None:
    found = elsewhere(timed.predict, row, timed.HIDING_TOKENS, **timed.HOWS[how])
    assert found.phi >= LEAST, found
    assert found.seconds >= max(found.busy.values()) * 0.99, found  # what is busy all the time sets the pace


@pytest.mark.full
@pytest.mark.parametrize(("row", "how"), [("cpu", {"ranks": 4}), ("optimizer_cpu", {"precision": "fp32"})])
def test_so_it_does_on_four_ranks_and_in_fp32(row: str, how: dict[str, Any], elsewhere: Elsewhere) -> None:
    assert elsewhere(timed.predict, row, timed.HIDING_TOKENS, **how).phi >= LEAST
