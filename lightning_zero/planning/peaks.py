"""The peak FLOP/s of GPUs, by the name that the driver reports."""

from __future__ import annotations

# Dense, in 1e12 FLOP/s, from NVIDIA's data sheets (figures with sparsity are halved). bf16 stands for fp16 too, with
# fp32 sums. More specific names come first.
_PEAKS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250, "tf32": 1125, "fp32": 75, "fp64": 37},
    "H200 NVL": {"bf16": 835, "tf32": 417, "fp32": 60, "fp64": 60},
    "H200": {"bf16": 989, "tf32": 494, "fp32": 67, "fp64": 67},
    "H100 NVL": {"bf16": 835, "tf32": 417, "fp32": 60, "fp64": 60},
    "H100 PCIe": {"bf16": 756, "tf32": 378, "fp32": 51, "fp64": 51},
    "H100": {"bf16": 989, "tf32": 494, "fp32": 67, "fp64": 67},
    "A100": {"bf16": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5},
    "A800": {"bf16": 312, "tf32": 156, "fp32": 19.5, "fp64": 9.7},
    "L40S": {"bf16": 362, "tf32": 183, "fp32": 91.6},
    "L4": {"bf16": 121, "tf32": 60, "fp32": 30.3},
    "V100": {"fp16": 125, "fp32": 15.7, "fp64": 7.8},
    "T4": {"fp16": 65, "fp32": 8.1},
}


def peak_flops(gpu: str, dtype: str, *, tf32: bool) -> float | None:
    """Return the peak FLOP/s of a GPU, or None if unknown.

    Args:
        gpu: the driver's name: ``NVIDIA H100 80GB HBM3``.
        dtype: ``fp64``, ``fp32``, ``bf16`` or ``fp16``.
        tf32: fp32 products use TF32 where the GPU has it.
    """
    words = gpu.replace("-", " ").split()
    for name, peaks in _PEAKS.items():
        if all(word in words for word in name.split()):
            keys = {"fp32": ["tf32", "fp32"] if tf32 else ["fp32"], "fp16": ["fp16", "bf16"]}.get(dtype, [dtype])
            return next((peaks[key] * 1e12 for key in keys if key in peaks), None)
    return None
