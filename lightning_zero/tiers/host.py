"""A tier in host memory, allocated in slabs of exactly the requested size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_zero.device.accelerator import Accelerator
from lightning_zero.planning.memory import HOST_ALIGN_NBYTES
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.extents import Extent, Wanted, lay_out
from lightning_zero.tiers.limits import available_host_memory
from lightning_zero.tiers.pages import HOST, HostPages

HOST_ALIGN = HOST_ALIGN_NBYTES  # alignment for torch's vectorised loops


@dataclass(slots=True)
class _Slab:
    pages: HostPages
    nbytes: int
    live: int


class HostTier:
    """A tier in host memory, pinned if there is a GPU. Each :meth:`reserve` allocates one slab. Thread-safe.
    ``budget``: bytes that the tier may hold; None: each slab may take as many bytes as ``available`` returns."""

    def __init__(
        self,
        accelerator: Accelerator = HOST,
        *,
        budget: int | None = None,
        available: Callable[[], int] = available_host_memory,
    ) -> None:
        self.accelerator, self.budget, self._available = accelerator, budget, available
        self._held: dict[Extent, tuple[_Slab, Tensor]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slabs, with padding."""
        return self._nbytes

    def reserve(self, wanted: Sequence[Wanted]) -> list[Extent]:
        """Return an extent in a new slab for each of ``wanted``. Raises ConfigError for too little memory or budget."""
        extents, total = lay_out(wanted, 0, HOST_ALIGN)
        # Hold the lock to the end: two threads that only look could both find the same memory free.
        with self._lock:
            if self.budget is not None:
                if self._nbytes + total > self.budget:
                    raise _host_error(total, f"{self.budget - self._nbytes} of {self.budget} are left in the budget")
            elif (available := self._available()) < total:
                raise _host_error(total, f"{available} are available (in its cgroup, or on the machine)")
            try:
                pages = HostPages(total, self.accelerator)
            except OSError as error:
                raise _host_error(total, f"the system refused it ({error})") from error
            if not self.accelerator.has_streams:  # pinned pages are taken already
                pages.bytes.zero_()  # takes the memory now, so that the next reserve sees what is left
            slab = _Slab(pages, total, len(extents))
            self._held |= {e: (slab, pages.tensor(e.offset, e.dtype, e.numel)) for e in extents}
            self._nbytes += total
        return extents

    def resident(self, extent: Extent) -> Tensor:
        """Return the extent's memory as a tensor [numel], to be used in place."""
        return self._held[extent][1]

    def free(self, extents: Iterable[Extent]) -> None:
        """Free extents. The memory of a slab is freed with its last extent."""
        with self._lock:
            for extent in extents:
                slab, _ = self._held.pop(extent)
                slab.live -= 1
                if slab.live == 0:
                    slab.pages.close()
                    self._nbytes -= slab.nbytes

    def close(self) -> None:
        """Free all slabs. A second call does nothing."""
        self.free(list(self._held))


def _host_error(needed: int, got: str) -> ConfigError:
    return ConfigError(
        f"zero.offload: expected {needed} more bytes of host memory, but {got}. Give the job more memory, raise "
        "zero.offload.host_budget, or choose a zero/offload that keeps less on the host."
    )
