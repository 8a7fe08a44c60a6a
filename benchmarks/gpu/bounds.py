"""The least time that a step can take, by resource, from measured rates; phi is the largest of them over measured time.

With P parameters of itemsize c (2 under bf16):

===========  ========================================================================================================
compute      forward and backward of the bare module, measured in the same run, and the optimizer's own traffic where
             it runs on the device: 28 P / bandwidth of its memory
link         to the device c P where the optimizer is elsewhere, 2 c P where the parameters are; from it c P of
             gradients; each way has its own wires
host memory  28 P / bandwidth of a copy on all cores, for an optimizer on the host
disk         12 P (1/R + 1/W) for an optimizer in files; c P (2/R + 1/W) for parameters in files
===========  ========================================================================================================

On a GPU these overlap, so the largest is the bound. On a CPU they share the cores and their memory, so their sum is.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu.plan import Row

ADAM_NBYTES = 28  # reads m, v, p and the gradient, writes m, v, p and the copy to compute with
STATE_NBYTES = 12  # master, m, v
ON_DEVICE = ("none",)
PARAMS_ELSEWHERE = ("cpu", "nvme", "optimizer_cpu_param_nvme")
OPTIMIZER_IN_FILES = ("optimizer_nvme", "nvme")
PARAMS_IN_FILES = ("optimizer_cpu_param_nvme", "nvme")


def bounds(row: Row, rates: Mapping[str, float], compute_s: float | None) -> dict[str, float]:
    """Seconds by resource; a resource whose rate is not known is left out.

    Args:
        compute_s: forward and backward of the bare module. None: from the rate of matrix products, which no model
            reaches.
    """
    size, found = row.size, dict[str, float]()
    compute = compute_s if compute_s is not None else _over(size.flops, rates.get("matmul"))
    if compute is not None:
        found["compute"] = compute
    n, c, offload = size.parameters, size.itemsize, row.offload

    def add(name: str, amount: float, rate: str) -> None:
        seconds = _over(amount, rates.get(rate))
        if seconds is not None:
            found[name] = found.get(name, 0.0) + seconds

    if offload in ON_DEVICE:
        if "compute" in found:
            add("compute", ADAM_NBYTES * n, "device_copy")
        return found
    add("link to the device", (2 if offload in PARAMS_ELSEWHERE else 1) * c * n, "h2d")
    add("link from the device", c * n, "d2h")
    add("host memory", ADAM_NBYTES * n, "host_copy")
    if offload in OPTIMIZER_IN_FILES:
        add("disk", STATE_NBYTES * n, "disk_read")
        add("disk", STATE_NBYTES * n, "disk_write")
    if offload in PARAMS_IN_FILES:
        add("disk", 2 * c * n, "disk_read")
        add("disk", c * n, "disk_write")
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
