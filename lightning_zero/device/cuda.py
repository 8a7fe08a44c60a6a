"""Drives a GPU, and lists the GPUs of this host. The only file that calls ``torch.cuda``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.host_threads import allowed_cores, bind_to
from lightning_zero.settings import ConfigError


class Cuda(Accelerator):
    has_streams = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(with_index(device))
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            raise ConfigError(
                "CUDA_DEVICE_MAX_CONNECTIONS: expected no value, or a larger one, got 1: all streams would share one "
                "queue, so that gathers hold up compute. Unset it."
            )

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def new_stream(self) -> Any:
        # High priority: ready copies and messages should not wait behind kernels that fill the GPU.
        return torch.cuda.Stream(self.device, priority=-1)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self) -> Any:
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps, and leaves its core to the steps
        event.record(self.current_stream())
        return event

    def wait(self, event: Any) -> None:
        self.current_stream().wait_event(event)

    def is_over(self, event: Any) -> bool:
        return bool(event.query())

    def wait_on_host(self, event: Any) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current_stream())
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: Tensor) -> None:
        # In place: the caching allocator of pinned memory would round up to a power of two.
        if code := self._runtime("cudaHostRegister", memory.data_ptr(), memory.nbytes, 0):
            raise MemoryError(f"CUDA error {code}")

    def unpin(self, memory: Tensor) -> None:
        self._runtime("cudaHostUnregister", memory.data_ptr())  # the memory is freed in any case

    def _runtime(self, function: str, *arguments: int) -> int:
        """Call a function of CUDA's runtime. Return its error code (0: none), and clear CUDA's last error."""
        with torch.cuda.device(self.device):
            code = int(getattr(torch.cuda.cudart(), function)(*arguments))
            if code != 0:
                with contextlib.suppress(RuntimeError):  # torch raises the last error, once, after the next kernel
                    torch.ones(1, device=self.device)
        return code

    def free_nbytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def peak_nbytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def bind_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device)

    def seeded_rng_state(self, seed: int) -> Tensor:
        return torch.Generator(self.device).manual_seed(seed).get_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_in_use() -> bool:
    """Return whether this process has initialized CUDA, which its forks cannot use from then on."""
    return torch.cuda.is_initialized()


def gpu_nbytes() -> int:
    """Return the size of the first GPU's memory in bytes."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def near_cores(device: torch.device, system: Path = Path("/sys")) -> set[int]:
    """Return the cores on the NUMA node of a GPU; an empty set if ``system`` (sysfs) lists none."""
    found: Any = torch.cuda.get_device_properties(device)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        text = (system / "bus/pci/devices" / address / "local_cpulist").read_text()
    except OSError:
        return set()
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def bind_near(device: torch.device, devices: Iterable[torch.device]) -> None:
    """Restrict this process to those of its allowed cores that are on the NUMA node of ``device``. Does nothing if some
    allowed core is near none of ``devices`` (all GPUs of this host's ranks), because no rank would use that core."""
    if allowed_cores() <= set().union(*map(near_cores, devices)):
        bind_to(near_cores(device))


def nccl_version() -> tuple[int, ...]:
    """Return the version of torch's NCCL."""
    return tuple(torch.cuda.nccl.version())


def with_index(device: torch.device) -> torch.device:
    """Return ``device``; if it is a GPU without an index, return it with the index of the current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def default_device() -> torch.device:
    """Return this process's current GPU; the CPU if there is no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if gpu_count() else torch.device("cpu")
