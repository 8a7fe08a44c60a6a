"""``auto``: what is chosen fits, no faster row does, and the largest micro-batch is the largest. Times of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.planning.activations import Activations, ByBatchSize, Stretch, peaks_with
from lightning_zero.planning.buckets import BucketShape, Itemsizes, Role, place
from lightning_zero.planning.choose import MOST_SAMPLES, choose_row, with_reserve
from lightning_zero.planning.fit import Machine, Model, plan_row
from lightning_zero.planning.memory import Limits, Phase
from lightning_zero.planning.placement import OFFLOADS, STAGES, Tier
from lightning_zero.planning.speed import CPU_RATES, GPU_RATES, Rates, expected, least_seconds, sent_by, work_of
from lightning_zero.settings import ConfigError, Offload, OffloadConfig, Stage, allowed_rows

CANDIDATES = [(stage, offload, OffloadConfig()) for stage, offload in allowed_rows() if "nvme" not in offload.name]
UNITS = 3


def activations(per_sample: int, samples: int, fixed: int = 100) -> Activations:
    """Of units called in order: the forward keeps ``per_sample`` for each, the backward lets go of it."""
    kept = [per_sample * samples * n + fixed for n in range(1, UNITS + 1)]
    forward = [Stretch(unit, False, nbytes) for unit, nbytes in zip(range(1, UNITS + 1), kept, strict=True)]
    backward = [
        Stretch(unit, True, kept[unit - 1] + per_sample, frozenset({unit}), frozenset({unit}))
        for unit in range(UNITS, 0, -1)
    ]
    last = Stretch(0, True, fixed, frozenset({0}), frozenset({0}))
    return Activations((*forward, *backward, last), kept[-1], 8 * samples, 1e9 * samples)


def model(numel: int, per_sample: int, samples: int = 4) -> Model:
    shapes = tuple(BucketShape(unit, (numel,), Itemsizes(2, 4, 4, 4)) for unit in range(UNITS + 1))
    sizes = ByBatchSize(
        (samples, 2 * samples), (activations(per_sample, samples), activations(per_sample, 2 * samples))
    )
    names = ("", *map(str, range(1, UNITS + 1)))
    return Model(names, shapes, Limits(10**6, 0, 10**6), activations=sizes, samples=samples)


MODELS = st.builds(model, st.integers(256, 2_000_000), st.integers(10**4, 5_000_000), st.integers(1, 8))
MACHINES = st.builds(
    Machine,
    st.integers(1, 8),
    st.integers(10**5, 10**9),
    st.integers(10**6, 10**10),
    st.just(0),
    st.integers(1, 3),
    st.booleans(),
)


def test_gradients_that_wait_for_more_micro_batches_are_reduced_where_they_lie() -> None:
    """At stage 1: nothing comes beside them but what is received of one bucket. Spare buffers hold them meanwhile."""
    of = model(1000, 10**5)
    shapes = [replace(shape, itemsizes=Itemsizes(4, 4, 4, 4)) for shape in of.shapes]
    plans = [place(shape, STAGES[Stage.zero1], OFFLOADS[Offload.none], 2) for shape in shapes]
    limits = Limits(10**6, 0, 10**6, micro_batches=2, has_link=False)
    assert of.activations is not None
    held = peaks_with(plans, limits, of.activations.interpolate(4))
    bucket = plans[0].layout.numel * 4
    assert held[Phase.backward][Role.reducing, Tier.device] <= bucket
    assert held[Phase.backward][Role.grad, Tier.device] == len(plans) * bucket
    once = peaks_with(plans, replace(limits, micro_batches=1), of.activations.interpolate(4))
    assert once[Phase.backward][Role.reducing, Tier.device] > bucket


def test_half_is_left_for_activations_that_are_not_known() -> None:
    for machine, name in (
        (Machine(1, 1000, 1000, 0), "gpu_memory"),
        (Machine(1, 0, 1000, 0, shared=True), "host_memory"),
    ):
        assert getattr(with_reserve(machine), name) == 900
        assert getattr(with_reserve(machine, activations_known=False), name) == 500


@settings(max_examples=40, deadline=None)
@given(MODELS, MACHINES)
def test_auto_chooses_the_fastest_row_that_fits(of: Model, machine: Machine) -> None:
    rates = CPU_RATES if machine.shared else GPU_RATES
    room = with_reserve(machine)
    rows = [plan_row(of, stage, offload, room, settings, rates) for stage, offload, settings in CANDIDATES]
    try:
        choice = choose_row(of, machine, CANDIDATES, rates)
    except ConfigError as error:
        assert not any(row.fits for row in rows)
        assert "expected a combination that fits" in str(error) and "got none of" in str(error)
        return
    again = plan_row(of, choice.row.stage, choice.row.offload, machine, OffloadConfig(), rates)
    assert choice.row.fits and again.fits
    seconds = [row.time.seconds for row in rows if row.fits and row.time is not None]
    assert choice.row.time is not None and choice.row.time.seconds == min(seconds)
    assert choose_row(of, machine, list(reversed(CANDIDATES)), rates).rows == choice.rows
    assert choice.samples is not None and of.samples <= choice.samples <= MOST_SAMPLES
    for samples, fits in ((choice.samples, True), (choice.samples + 1, False)):
        other = replace(of, samples=samples)
        if fits or samples <= MOST_SAMPLES:
            assert plan_row(other, choice.row.stage, choice.row.offload, room, OffloadConfig()).fits is fits


def test_the_error_says_what_is_missing_and_what_to_change() -> None:
    with pytest.raises(ConfigError) as raised:
        choose_row(model(10**6, 1000), Machine(1, 10**6, 10**6, 0), CANDIDATES, GPU_RATES)
    text = str(raised.value)
    assert "zero/stage and zero/offload: expected a combination that fits into 1 rank(s) on 1 host(s)" in text
    for part in ("got none of", "data.batch_size", "zero.activation_checkpointing=blocks", "zero.offload.nvme_path"):
        assert part in text


def test_bytes_sent_in_a_step_by_stage() -> None:
    """docs/benchmarks.md and the literature: stages 0-2 send twice the parameters, stage 3 three times."""
    shapes = [BucketShape(unit, (1024,), Itemsizes(4, 4, 4, 4)) for unit in range(1, 101)]
    total, ranks = 100 * 1024 * 4, 4
    for stage, times in ((Stage.zero0, 2.0), (Stage.zero1, 2.0), (Stage.zero2, 2.0), (Stage.zero3, 2.99)):
        plans = [place(s, STAGES[stage], OFFLOADS[Offload.none], ranks) for s in shapes]
        sent = sent_by(plans, Limits(0, 0, 10**9))
        assert sent.nbytes == pytest.approx(times * total * 3 / 4)  # the last unit stays gathered
        twice = sent_by(plans, Limits(0, 0, 10**9, 2))
        grows = {Stage.zero0: 2.0, Stage.zero1: 2.0, Stage.zero2: 3.0, Stage.zero3: 2 * 2.99}[stage]
        assert twice.nbytes == pytest.approx(grows * total * 3 / 4)
    alone = [place(s, STAGES[Stage.zero3], OFFLOADS[Offload.none], 1) for s in shapes]
    assert sent_by(alone, Limits(0, 0, 10**9)).nbytes == 0


def test_the_slowest_resource_binds() -> None:
    shapes = [BucketShape(unit, (10**6,), Itemsizes(2, 4, 4, 4)) for unit in range(1, 5)]
    limits = Limits(0, 0, 10**9)
    plans = [place(s, STAGES[Stage.zero3], OFFLOADS[Offload.optimizer_nvme], 8) for s in shapes]
    assert expected(plans, limits, 1e16, GPU_RATES).binding == "compute"
    assert expected(plans, limits, 1e6, GPU_RATES).binding == "disk"
    slow = replace(GPU_RATES, network=1e6)
    found = expected(plans, limits, 1e6, slow)
    assert found.binding == "network" and found.seconds > found.resources["network"]
    on_cpu = expected(plans, limits, 1e9, CPU_RATES, on_cpu=True)
    assert on_cpu.seconds == pytest.approx(sum(on_cpu.resources.values()))


# -- the least time of a step -----------------------------------------------------------------------------------------

UNIT = Rates(compute=1, device_memory=1, host_memory=1, to_device=1, to_host=1, disk_read=1, disk_write=2)


@pytest.mark.parametrize(("row", "expected"), [
    (Offload.none, {"device_memory": 28}),
    (Offload.optimizer_cpu, {"host_memory": 28, "to_host": 4, "to_device": 4}),
    (Offload.cpu, {"host_memory": 28, "to_host": 4, "to_device": 8}),
    (Offload.optimizer_nvme, {"host_memory": 28, "to_host": 4, "to_device": 2, "disk": 12 + 6}),
    (Offload.nvme, {"host_memory": 28, "to_host": 4, "to_device": 4, "disk": 12 + 6 + 4 + 1}),
])  # fmt: skip
def test_work_of_a_row_by_resource(row: Offload, expected: dict[str, int]) -> None:
    """By parameter, under bf16 with fp32 gradients."""
    shape = BucketShape(1, (8192,), Itemsizes(2, 4, 4, 4))
    work = work_of([place(shape, STAGES[Stage.zero3], OFFLOADS[row], 1)], flops=0.0)
    assert {name: s / 8192 for name, s in work.seconds(UNIT).items() if s} == expected


def test_a_step_behind_the_backward_hides_behind_the_next_forward() -> None:
    shape = BucketShape(1, (100,), Itemsizes(4, 4, 4, 4))
    work = work_of([place(shape, STAGES[Stage.zero3], OFFLOADS[Offload.optimizer_cpu], 1)], flops=0.0)
    step = work.host_memory
    work.compute = 1.5 * step
    assert least_seconds(work, UNIT) == pytest.approx(step + step)
    assert least_seconds(work, UNIT, micro_batches=3) == pytest.approx(1.5 * step * 8 / 9 + step)
