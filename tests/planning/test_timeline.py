"""The least time of a step."""

from __future__ import annotations

import pytest

from lightning_zero.config import Offload, Stage
from lightning_zero.planning.buckets import BucketShape, Itemsizes, place
from lightning_zero.planning.placement import OFFLOADS, STAGES
from lightning_zero.planning.speed import Rates, least_seconds, work_of

UNIT = Rates(compute=1, device_memory=1, host_memory=1, to_device=1, to_host=1, disk_read=1, disk_write=2)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Offload.none, {"device_memory": 28}),
        (Offload.optimizer_cpu, {"host_memory": 28, "to_host": 4, "to_device": 4}),
        (Offload.cpu, {"host_memory": 28, "to_host": 4, "to_device": 8}),
        (Offload.optimizer_nvme, {"host_memory": 28, "to_host": 4, "to_device": 2, "disk": 12 + 6}),
        (Offload.nvme, {"host_memory": 28, "to_host": 4, "to_device": 4, "disk": 12 + 6 + 4 + 1}),
    ],
)
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
