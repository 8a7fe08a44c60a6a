"""Page-aligned host memory from ``mmap``, and a ring of staging buffers in it. O_DIRECT needs addresses that are
multiples of the device's block size; multiples of ``PAGE`` suffice.

A forked child (a data loader's worker) sees zeros in place of these pages (MADV_WIPEONFORK). If they were shared, a
transfer in flight could write to the child's copy (open(2), notes on O_DIRECT), and pinned pages would be copied.
With MADV_DONTFORK the child crashed: its copy of the mmap object unmapped other memory mapped at these addresses."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from queue import Empty, LifoQueue
from typing import Any

import torch
from torch import Tensor

from lightning_zero.device.accelerator import Accelerator
from lightning_zero.planning.layout import round_up
from lightning_zero.settings import ConfigError

PAGE = 4096  # bytes
ACQUIRE_TIMEOUT_S = 120.0

HOST = Accelerator(torch.device("cpu"))

_MADV_WIPEONFORK = 18  # linux/mman.h; Python's mmap has no name for it


class HostPages:
    """Page-aligned host memory of exactly ``nbytes``, freed when no tensor uses it. If ``accelerator`` is a GPU, the
    pages are pinned until :meth:`close`. ``bytes``: the memory as a tensor uint8 [nbytes]. The constructor raises
    ConfigError if the pages cannot be pinned, OSError if there is no address space."""

    def __init__(self, nbytes: int, accelerator: Accelerator = HOST) -> None:
        self.nbytes, self.accelerator = nbytes, accelerator
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (_MADV_WIPEONFORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # a sandbox's kernel may know neither
                pages.madvise(advice)
        # A tensor made under inference mode could never be used in training.
        with torch.inference_mode(False):
            self.bytes: Tensor = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
        self._pinned = False
        if accelerator.has_streams and nbytes:
            self.bytes.zero_()  # faults the pages in on all cores; pinning would use one
            try:
                accelerator.pin(self.bytes)
            except MemoryError as error:
                self.close()
                raise ConfigError(
                    f"zero.offload: expected to pin {nbytes} bytes of host memory, got {error}. Allow this process to "
                    "lock memory (ulimit -l), lower zero.offload.host_budget, or drop zero.checkpoint.background."
                ) from error
            self._pinned = True

    def tensor(self, start: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Return a view of ``numel`` elements from byte ``start`` on. ``start`` is a multiple of the element size."""
        with torch.inference_mode(False):
            return self.bytes[start : start + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Unpin the memory and drop this object's reference to it. The memory is unmapped with its last view."""
        # Unpin before the unmapping below: afterwards the addresses may belong to other memory.
        if self._pinned:
            self.accelerator.synchronize()  # queued copies may still read it
            self.accelerator.unpin(self.bytes)
            self._pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)


def byte_view(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous host tensor, for I/O. The view keeps the tensor's memory alive."""
    # Not numpy(): a storage once lent to numpy can never be resized.
    flat = tensor.detach().view(-1).view(torch.uint8)
    array: Any = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.owner = flat
    return memoryview(array).cast("B")


class StagingBuffer:
    """A buffer of a :class:`StagingRing`, in use from ``acquire`` to :meth:`release`."""

    def __init__(self, ring: StagingRing, index: int, label: str) -> None:
        self._ring, self._index, self.label = ring, index, label
        self.nbytes = ring.buffer_nbytes

    @property
    def memory(self) -> memoryview:
        """Return all bytes of the buffer, for requests of a :class:`DiskFile`."""
        return byte_view(self.tensor(torch.uint8, self.nbytes))

    def tensor(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return the buffer's first ``numel`` elements as a tensor. Raises ValueError if they do not fit."""
        if numel * dtype.itemsize > self.nbytes:
            raise ValueError(f"a staging buffer holds {self.nbytes} bytes; {numel} elements of {dtype} do not fit")
        return self._ring.pages.tensor(self._index * self.nbytes, dtype, numel)

    def release(self) -> None:
        """Give the buffer back to the ring. Nothing may use its memory afterwards."""
        self._ring._take_back(self._index)


class StagingRing:
    """``count`` page-aligned buffers that transfers take in turn, each of ``nbytes`` rounded up to pages."""

    def __init__(self, count: int, nbytes: int, *, timeout_s: float = ACQUIRE_TIMEOUT_S):
        if count < 1 or nbytes < 1:
            raise ValueError(f"a ring needs at least one buffer of at least one byte, got {count} of {nbytes}")
        self.count = count
        self.buffer_nbytes = round_up(nbytes, PAGE)
        self.nbytes = count * self.buffer_nbytes
        self.pages = HostPages(self.nbytes)
        self._timeout_s = timeout_s
        self._free: LifoQueue[int] = LifoQueue()  # last in, first out: the last one may still be in cache
        for index in range(count):
            self._free.put(index)
        self._lent: dict[int, str] = {}

    def acquire(self, label: str = "") -> StagingBuffer:
        """Wait for a free buffer and return it. ``label`` names the buffer's user. If no buffer is free for
        ``timeout_s`` seconds, raises RuntimeError with the labels of all users."""
        try:
            index = self._free.get(timeout=self._timeout_s)
        except Empty:
            holders = ", ".join(repr(holder) for holder in self._lent.values())
            raise RuntimeError(
                f"no staging buffer for {label!r} within {self._timeout_s:g} s: all {self.count} are held by "
                f"{holders}. The ring is too small for its users, which is a bug of lightning_zero (or the disk "
                "hangs: see dmesg)."
            ) from None
        self._lent[index] = label
        return StagingBuffer(self, index, label)

    def close(self) -> None:
        """Free the memory of all buffers. Raises RuntimeError if a buffer is still in use."""
        if self._lent:
            raise RuntimeError(f"staging buffers are still held by {sorted(self._lent.values())}")
        self.pages.close()

    def _take_back(self, index: int) -> None:
        if self._lent.pop(index, None) is None:
            raise RuntimeError("a staging buffer was released twice")
        self._free.put(index)
