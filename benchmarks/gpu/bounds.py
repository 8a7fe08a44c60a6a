"""The least time that a step can take, by resource, from measured rates; phi is the largest of them over measured time.

What has to be computed and moved is as in :mod:`lightning_zero.planning.speed`, with two differences: compute is the
time of the bare module, measured in the same run, and an optimizer on the device adds its own traffic to that. On a CPU
resources share the cores and their memory, so their sum is the bound.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu.plan import Row
from lightning_zero.planning.buckets import BucketShape, Itemsizes, place
from lightning_zero.planning.placement import OFFLOADS, STAGES
from lightning_zero.planning.speed import Work, work_of
from lightning_zero.settings import Offload, Stage

RESOURCES = {  # of what is moved: under which name its seconds are counted, and at which measured rate
    "device_memory": ("compute", "device_copy"),
    "to_device": ("link to the device", "h2d"),
    "to_host": ("link from the device", "d2h"),
    "host_memory": ("host memory", "host_copy"),
    "disk_read": ("disk", "disk_read"),
    "disk_write": ("disk", "disk_write"),
}
OPTIMIZER_IN_FILES = ("optimizer_nvme", "nvme")


def work_of_row(row: Row) -> Work:
    """All parameters as one bucket: fp32 masters, state and gradients."""
    shape = BucketShape(1, (row.size.parameters,), Itemsizes(row.size.itemsize, 4, 4, 4))
    return work_of([place(shape, STAGES[Stage.zero3], OFFLOADS[Offload(row.offload)], 1)], row.size.flops)


def bounds(row: Row, rates: Mapping[str, float], compute_s: float | None) -> dict[str, float]:
    """Seconds by resource; a resource whose rate is not known is left out.

    Args:
        compute_s: forward and backward of the bare module. None: from the rate of matrix products, which no model
            reaches.
    """
    work, found = work_of_row(row), dict[str, float]()
    compute = compute_s if compute_s is not None else _over(work.compute, rates.get("matmul"))
    if compute is not None:
        found["compute"] = compute
    for resource, (name, rate) in RESOURCES.items():
        seconds = _over(getattr(work, resource), rates.get(rate))
        if seconds and (name != "compute" or name in found):
            found[name] = found.get(name, 0.0) + seconds
    return found


def phi(found: Mapping[str, float], step_s: float, *, overlap: bool) -> dict[str, object]:
    """The bound, the resource that sets it, and the bound over the measured time."""
    if not found or not step_s:
        return {}
    binding = max(found, key=lambda name: found[name])
    bound = found[binding] if overlap else sum(found.values())
    return {
        "bounds_s": {name: _rounded(seconds) for name, seconds in found.items()},
        "bound_s": _rounded(bound),
        "bound_by": binding,
        "phi": round(bound / step_s, 3),
    }


def _over(amount: float, rate: float | None) -> float | None:
    return amount / rate if rate else None


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")
