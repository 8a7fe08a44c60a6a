"""Page-aligned host memory, and buffers of it that are lent out for staging.

O_DIRECT wants memory addresses at multiples of the device's block, which divides ``PAGE``; memory from torch's
allocator is not aligned so, memory from ``mmap`` is.

Forks. A forked child (a data loader's worker) finds zeros instead of our pages (MADV_WIPEONFORK). Shared with it, a
transfer in flight could land in the child's copy of a page instead of ours (open(2), notes on O_DIRECT), pinned pages
would be copied one and all, and later writes page by page. MADV_DONTFORK would leave a hole in the child, where it may
map something else, which it then unmaps when it collects its copy of our mmap object: tried, and it crashed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from typing import Any

import torch
from torch import Tensor

from lightning_zero.config import ConfigError
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.planning.layout import round_up

PAGE = 4096  # bytes
ACQUIRE_TIMEOUT_S = 120.0

HOST = Accelerator(torch.device("cpu"))

_MADV_WIPEONFORK = 18  # linux/mman.h; Python's mmap has no name for it


class HostPages:
    """Page-aligned host memory of exactly ``nbytes``; it is given back when the last tensor on it is gone.

    Args:
        nbytes: size; nothing is rounded up to a power of two, as torch's caching host allocator would.
        accelerator: pins the pages for itself until :meth:`close`.

    Raises:
        ConfigError: the pages cannot be pinned.
        OSError: the system has no address space for them.

    Attributes:
        bytes: uint8 [nbytes].
    """

    def __init__(self, nbytes: int, accelerator: Accelerator = HOST) -> None:
        self.nbytes = nbytes
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (_MADV_WIPEONFORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # a sandbox's kernel may know neither
                pages.madvise(advice)
        # A tensor made under inference mode could never be used in training again.
        with torch.inference_mode(False):
            self.bytes: Tensor = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
        self._pinned_for: Accelerator | None = None
        if accelerator.has_streams and nbytes:
            self._pin(accelerator)

    def tensor(self, start: int, dtype: torch.dtype, numel: int) -> Tensor:
        """A view [numel] that begins at byte ``start``, a multiple of the element size."""
        with torch.inference_mode(False):
            return self.bytes[start : start + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Unpin the memory and let go of it: it is unmapped when no view of it is left."""
        # Unpinned while it is mapped: the next line may unmap it, and its addresses may be other memory's then.
        if self._pinned_for is not None:
            self._pinned_for.synchronize()  # copies that were queued may still read it
            self._pinned_for.unpin(self.bytes)
            self._pinned_for = None
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def _pin(self, accelerator: Accelerator) -> None:
        try:
            accelerator.pin(self.bytes)
        except MemoryError as error:
            self.close()
            raise ConfigError(
                f"zero.offload: expected to pin {self.nbytes} bytes of host memory, got {error}. Allow this process to "
                "lock memory (ulimit -l), or lower zero.offload.host_budget."
            ) from error
        self._pinned_for = accelerator


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, for I/O. It keeps the tensor's memory alive."""
    # Not numpy(): a storage that has once been lent to numpy can never be resized again.
    flat = tensor.detach().view(-1).view(torch.uint8)
    array: Any = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.owner = flat
    return memoryview(array).cast("B")


class StagingBuffer:
    """One buffer of a :class:`StagingRing`, on loan."""

    def __init__(self, ring: StagingRing, index: int, label: str) -> None:
        self._ring, self._index, self.label = ring, index, label
        self.nbytes = ring.buffer_nbytes

    @property
    def memory(self) -> memoryview:
        """All bytes of the buffer, for :class:`DiskFile`."""
        return byte_view(self.tensor(torch.uint8, self.nbytes))

    def tensor(self, dtype: torch.dtype, numel: int) -> Tensor:
        """The first ``numel`` elements of the buffer as a tensor [numel].

        Raises:
            ValueError: the buffer is smaller than that.
        """
        if numel * dtype.itemsize > self.nbytes:
            raise ValueError(f"a staging buffer holds {self.nbytes} bytes; {numel} elements of {dtype} do not fit")
        return self._ring.pages.tensor(self._index * self.nbytes, dtype, numel)

    def release(self) -> None:
        """Give the buffer back to the ring. Nothing may use its memory afterwards."""
        self._ring._take_back(self._index)


class StagingRing:
    """``count`` page-aligned buffers of ``nbytes`` each (rounded up to whole pages), lent out one at a time.

    Attributes:
        pages: the memory of all buffers; ``nbytes`` its size: the host memory that staging takes, never more.
    """

    def __init__(self, count: int, nbytes: int, *, timeout_s: float = ACQUIRE_TIMEOUT_S):
        if count < 1 or nbytes < 1:
            raise ValueError(f"a ring needs at least one buffer of at least one byte, got {count} of {nbytes}")
        self.count = count
        self.buffer_nbytes = round_up(nbytes, PAGE)
        self.nbytes = count * self.buffer_nbytes
        self.pages = HostPages(self.nbytes)
        self._timeout_s = timeout_s
        self._free = list(range(count))  # the last one back is lent first: it may still be in cache
        self._lent: dict[int, str] = {}
        self._changed = threading.Condition()

    def acquire(self, label: str = "") -> StagingBuffer:
        """A free buffer; waits until there is one.

        Raises:
            RuntimeError: none was given back for ``timeout_s``; the message names who holds them.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, self._timeout_s):
                holders = ", ".join(repr(holder) for holder in self._lent.values())
                raise RuntimeError(
                    f"no staging buffer for {label!r} within {self._timeout_s:g} s: all {self.count} are held by "
                    f"{holders}. The ring is too small for its users, which is a bug of lightning_zero (or the disk "
                    "hangs: see dmesg)."
                )
            index = self._free.pop()
            self._lent[index] = label
        return StagingBuffer(self, index, label)

    def close(self) -> None:
        """Let go of the memory; every buffer must be back."""
        with self._changed:
            if self._lent:
                raise RuntimeError(f"staging buffers are still held by {sorted(self._lent.values())}")
            self.pages.close()

    def _take_back(self, index: int) -> None:
        with self._changed:
            if index not in self._lent:
                raise RuntimeError("a staging buffer was released twice")
            del self._lent[index]
            self._free.append(index)
            self._changed.notify()
