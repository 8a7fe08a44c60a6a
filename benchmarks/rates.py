"""What a machine moves and computes at most: the rates by which measurements are judged.

Every function returns operations or bytes per second, the median of a few rounds. Traffic counts as in a bound: a copy
within one memory reads and writes, so it counts twice; a copy over the link or to the disk counts once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.tiers.extents import Wanted
from lightning_zero.tiers.nvme import NvmeTier

PROBE_NBYTES = 512 << 20
ROUNDS = 5


def disk_rates(folder: str, nbytes: int = PROBE_NBYTES) -> tuple[float, float]:
    """Bytes per second that the disk reads and writes, through the tier that the engine uses."""
    tier = NvmeTier(folder, rank=0)
    try:
        extent = tier.reserve([Wanted("probe", nbytes // 4, torch.float32)])[0]
        value = torch.ones(nbytes // 4)
        reads, writes = [], []
        for _ in range(3):
            started = time.perf_counter()
            tier.stage_out(extent, value).result()
            writes.append(nbytes / (time.perf_counter() - started))
            started = time.perf_counter()
            tier.stage_in(extent, value).result()
            reads.append(nbytes / (time.perf_counter() - started))
        return statistics.median(reads), statistics.median(writes)
    finally:
        tier.close()


def seconds_of(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of ``work`` on the host: the median, after one round that does not count."""
    times = []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def host_copy_rate(nbytes: int, threads: int | None = None) -> float:
    """Bytes read and written per second by a copy within host memory, on all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    try:
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        return 2 * nbytes / seconds_of(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(before)


def host_adam_rate(numel: int, threads: int | None = None) -> float:
    """Bytes per second that torch's fused AdamW moves on all cores, by the 28 bytes per parameter of a bound."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    try:
        param = torch.nn.Parameter(torch.ones(numel))
        param.grad = torch.ones(numel)
        optimizer = torch.optim.AdamW([param], fused=True)
        return 28 * numel / seconds_of(optimizer.step)
    finally:
        torch.set_num_threads(before)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def device_seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of ``work`` on the device, between events on the current stream, after one round that does not count."""
    work()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def matmul_rate(width: int = 8192) -> float:
    """Operations per second of a product of bf16 matrices of random numbers (of zeros it would be faster)."""
    a, b = (torch.randn(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * width**3 / device_seconds(lambda: torch.mm(a, b, out=out), 10)


def device_copy_rate(nbytes: int = 4 << 30) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / device_seconds(lambda: target.copy_(source))


def link_rates(nbytes: int = 1 << 30) -> dict[str, float]:
    """Bytes per second between pinned host memory and the device: to it, from it, and each way with both at once."""
    host = [torch.ones(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    device = [torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]

    def there() -> Tensor:
        return device[0].copy_(host[0], non_blocking=True)

    def back() -> Tensor:
        return host[1].copy_(device[1], non_blocking=True)

    other = torch.cuda.Stream()

    def both() -> None:
        current = torch.cuda.current_stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            back()
        there()
        current.wait_stream(other)

    return {
        "h2d": nbytes / device_seconds(there),
        "d2h": nbytes / device_seconds(back),
        "both_ways_each": nbytes / device_seconds(both),
    }
