"""Bytes by role: the formulas of ``docs/architecture.md`` (Memory), and that they add up over ranks."""

from __future__ import annotations

from inspect import signature

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.planning.buckets import BucketPlan, BucketShape, Itemsizes, Role, place
from lightning_zero.planning.layout import lay_out
from lightning_zero.planning.memory import (
    FILE_PAGE_NBYTES,
    PAIR_NBYTES,
    READ_AHEAD,
    RING_COUNT,
    RING_NBYTES,
    Limits,
    Moment,
    Phase,
    gathered_peaks,
    on_tier,
    peak_bytes,
    planned_bytes,
)
from lightning_zero.planning.placement import OFFLOADS, ON_DEVICE, STAGES, Tier, TierRow
from lightning_zero.planning.topology import EXCHANGE_MAX_RANKS
from lightning_zero.settings import Offload, Stage
from lightning_zero.tiers.nvme import NvmeTier
from lightning_zero.tiers.pages import PAGE

pytestmark = pytest.mark.smoke

NUMELS = st.lists(st.integers(1, 5000), min_size=1, max_size=6)


def bucket(
    numels: list[int],
    ranks: int,
    stage: Stage,
    *,
    mixed: bool = True,
    trainable: bool = True,
    tiers: TierRow = ON_DEVICE,
) -> BucketPlan:
    """Mixed: bf16 compute and gradients, fp32 master; else all fp32."""
    sizes = Itemsizes(2, 4, 4, 2) if mixed else Itemsizes(4, 4, 4, 4)
    return BucketPlan(0, lay_out(numels, ranks), STAGES[stage], tiers, sizes, trainable)


def total(plan: BucketPlan, rank: int = 0, moment: Moment = Moment.reduced) -> int:
    return sum(planned_bytes([plan], rank, state_tensors=2, moment=moment).values())


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bytes_of_the_architectures_table(ranks: int) -> None:
    """Parameters that fill their shards: bf16 with fp32 master and Adam, gradients in bf16, while they accumulate."""
    p = 256 * ranks
    expected = {
        Stage.zero0: 16 * p,
        Stage.zero1: 4 * p + 12 * p // ranks,
        Stage.zero2: 2 * p + 14 * p // ranks,
        Stage.zero3: 14 * p // ranks if ranks > 1 else 16 * p,  # one rank keeps the gathered parameters
    }
    for stage, nbytes in expected.items():
        assert total(bucket([p], ranks, stage), moment=Moment.accumulating) == nbytes, stage


def test_gradients_of_stage_1_rest_whole_then_in_slices_then_nowhere() -> None:
    plan = bucket([4096], 4, Stage.zero1)
    grads = {m: planned_bytes([plan], 0, state_tensors=2, moment=m)[Role.grad, Tier.device] for m in Moment}
    assert grads == {Moment.accumulating: 2 * 4096, Moment.reduced: 2 * 1024, Moment.cleared: 0}


# -- tiers ------------------------------------------------------------------------------------------------------------

D, H, N = Tier.device, Tier.host, Tier.nvme
C, M, G, S = Role.compute_param, Role.master_param, Role.grad, Role.optim_state
RING = RING_COUNT * RING_NBYTES


@pytest.mark.parametrize(("stage", "offload", "mixed", "expected"), [
    # 8192 parameters on 2 ranks: 4096 on each, in whole pages
    (1, "optimizer_cpu", True, {(C, D): 2 * 8192, (M, H): 4 * 4096, (S, H): 8 * 4096, (G, H): 2 * 4096}),
    (1, "optimizer_cpu", False, {(C, D): 4 * 8192, (M, H): 4 * 4096, (S, H): 8 * 4096, (G, H): 4 * 4096}),
    (3, "optimizer_cpu", True, {(C, D): 2 * 4096, (M, H): 4 * 4096, (S, H): 8 * 4096, (G, H): 2 * 4096}),
    (3, "cpu", True, {(M, H): 4 * 4096, (S, H): 8 * 4096, (G, H): 2 * 4096}),
    (3, "cpu", False, {(C, H): 4 * 4096, (S, H): 8 * 4096, (G, H): 4 * 4096}),
    (3, "optimizer_nvme", True, {(C, D): 2 * 4096, (M, N): 4 * 4096, (S, N): 8 * 4096, (G, H): 2 * 4096}),
    (3, "optimizer_cpu_param_nvme", True, {(C, N): 8192, (M, H): 4 * 4096, (S, H): 8 * 4096, (G, H): 2 * 4096}),
    (3, "nvme", True, {(C, N): 2 * 4096, (M, N): 4 * 4096, (S, N): 8 * 4096, (G, H): 2 * 4096}),
    (3, "nvme", False, {(C, N): 4 * 4096, (M, N): 4 * 4096, (S, N): 8 * 4096, (G, H): 4 * 4096}),
])  # fmt: skip
def test_bytes_by_tier(stage: int, offload: str, mixed: bool, expected: dict[tuple[Role, Tier], int]) -> None:
    tiers = OFFLOADS[Offload[offload]]
    held = planned_bytes([bucket([8192], 2, Stage(f"zero{stage}"), mixed=mixed, tiers=tiers)], 0)
    staging = {(Role.staging, H): RING} if N in tiers else {}
    assert {key: nbytes for key, nbytes in held.items() if nbytes} == expected | staging


def test_gradients_that_were_not_reduced_are_on_the_device_and_keep_their_place_on_the_host() -> None:
    plan = bucket([8192], 2, Stage.zero1, tiers=OFFLOADS[Offload.optimizer_cpu])
    held = planned_bytes([plan], 0, moment=Moment.accumulating)
    assert (held[G, D], held[G, H]) == (2 * 8192, 8192)


SHAPES = st.lists(
    st.builds(
        BucketShape,
        st.integers(0, 3),
        NUMELS.map(tuple),
        st.sampled_from([Itemsizes(2, 4, 4, 4), Itemsizes(4, 4, 4, 4), Itemsizes(2, 2, 2, 2)]),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)
ROWS = [(s, o) for s in STAGES for o in OFFLOADS if o is Offload.none or (s is not Stage.zero0 and OFFLOADS[o][2] is D)]
ROWS += [(Stage.zero3, o) for o in OFFLOADS if OFFLOADS[o].compute_param is not D]
LIMITS = Limits(prefetch_bytes=10_000, keep_gathered_bytes=0, reduce_bucket_bytes=20_000)


@given(SHAPES, st.sampled_from(ROWS), st.integers(1, 4))
def test_a_peak_is_at_least_what_rests(shapes: list[BucketShape], row: tuple[Stage, Offload], ranks: int) -> None:
    plans = [place(s, STAGES[row[0]], OFFLOADS[row[1]], ranks) for s in shapes]
    rest = planned_bytes(plans)
    for held in peak_bytes(plans, LIMITS).values():
        for tier in Tier:
            assert on_tier(held, tier) >= on_tier(rest, tier)


# -- peaks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefetch", "keep", "forward", "backward"), [
    (0, 0, 10 + 100, 10 + 100),  # the root and the unit in use
    (1, 0, 10 + 200, 10 + 200),  # one is always gathered ahead
    (200, 0, 10 + 300, 10 + 300),
    (0, 200, 10 + 300, 10 + 300),  # 4 stays by itself; 3 and 2 are kept
    (10_000, 0, 10 + 400, 10 + 400),
])  # fmt: skip
def test_gathered_bytes_peak_by_prefetch_and_kept_units(prefetch: int, keep: int, forward: int, backward: int) -> None:
    assert gathered_peaks([10, 100, 100, 100, 100], Limits(prefetch, keep, 1)) == (forward, backward)


def test_reductions_after_step_are_bounded() -> None:
    shapes = [BucketShape(unit, (1024,), Itemsizes(2, 4, 4, 4)) for unit in range(8)]
    plans = [place(s, STAGES[Stage.zero3], ON_DEVICE, 2) for s in shapes]
    for limit, expected in ((1, 2), (2 * 4096, 3), (10**9, 8)):  # buckets of 4096 bytes; one is filling
        peak = peak_bytes(plans, Limits(0, 0, limit))[Phase.backward]
        assert peak[Role.reducing, D] == expected * 4096


def test_gradients_that_travel_as_they_are_made_take_half_of_the_buffers() -> None:
    """Beside what is received, by one after the other, on a device."""
    wide, narrow = Itemsizes(2, 4, 4, 4, 4, exchanged=True), Itemsizes(2, 4, 4, 4, 2, exchanged=True)
    for sizes, nbytes in ((wide, 4096), (narrow, 2048)):
        shapes = [BucketShape(unit, (1024,), sizes) for unit in range(8)]
        plans = [place(s, STAGES[Stage.zero3], ON_DEVICE, 2) for s in shapes]
        for has_link, buffers in ((False, 2), (True, 3)):
            peak = peak_bytes(plans, Limits(0, 0, 1, has_link=has_link))[Phase.backward]
            assert peak[Role.reducing, D] == buffers * nbytes
    # Where they add up, and among too many ranks, they travel as they are summed.
    assert place(shapes[0], STAGES[Stage.zero1], ON_DEVICE, 2).wire_itemsize(1) == 2
    assert place(shapes[0], STAGES[Stage.zero1], ON_DEVICE, 2).wire_itemsize(2) == 4
    assert place(shapes[0], STAGES[Stage.zero2], ON_DEVICE, 2).wire_itemsize(2) == 2
    assert place(shapes[0], STAGES[Stage.zero3], ON_DEVICE, EXCHANGE_MAX_RANKS + 1).wire_itemsize() == 4
    assert place(shapes[0], STAGES[Stage.zero3], ON_DEVICE, 1).wire_itemsize() == 4


def test_replicated_gradients_wait_for_more_micro_batches() -> None:
    plans = [place(BucketShape(0, (4096,), Itemsizes(2, 4, 4, 4)), STAGES[Stage.zero1], ON_DEVICE, 4)]
    once, thrice = (peak_bytes(plans, Limits(0, 0, 10**9, n))[Phase.forward] for n in (1, 3))
    assert (once[G, D], thrice[G, D]) == (4 * 1024, 4 * 4096)


def test_state_in_files_needs_three_buckets_of_the_host() -> None:
    def staging(sizes: Itemsizes, phase: Phase) -> int:
        shapes = [BucketShape(unit, (8192,), sizes) for unit in range(9)]
        plans = [place(s, STAGES[Stage.zero3], OFFLOADS[Offload.nvme], 2) for s in shapes]
        return peak_bytes(plans, LIMITS)[phase][Role.staging, H]

    cast = 2 * 2 * 4096  # parameters: one shard is being written, one is made
    # A pair for gradients that come to the host and one for masters that leave it, and places for parameters.
    stays = RING + 2 * 2 * PAIR_NBYTES + READ_AHEAD * 2 * 4096
    for phase in (Phase.step, Phase.forward):  # a step overlaps the next forward
        assert staging(Itemsizes(2, 4, 4, 4), phase) == stays + 3 * 12 * 4096 + cast
    assert staging(Itemsizes(2, 4, 4, 4), Phase.backward) <= stays + cast
    stays += READ_AHEAD * 2 * 4096
    assert staging(Itemsizes(4, 4, 4, 4), Phase.step) == stays + 3 * 12 * 4096  # written as the masters are


def test_the_ring_is_that_of_the_tier() -> None:
    defaults = signature(NvmeTier).parameters
    assert (defaults["ring_count"].default, defaults["ring_nbytes"].default) == (RING_COUNT, RING_NBYTES)
    assert FILE_PAGE_NBYTES == PAGE
