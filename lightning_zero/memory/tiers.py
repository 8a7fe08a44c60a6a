"""Where roles rest when they leave the device: in host memory, or in a file. One interface for both.

A caller reserves extents once (a batch of them is one slab, or one region of the file), then moves values with
``stage_in`` and ``stage_out``. Futures let it overlap: read k+1, step k, write k-1. What an extent holds before the
first ``stage_out`` is undefined.

A future is done when the bytes are in place, except for host memory and a CUDA device: there it is done at once and
its result is an event. :func:`arrived` covers all cases. Until then ``out`` and ``value`` belong to the tier: the
caller keeps them alive and untouched (so no ``record_stream`` is needed)::

    compute : --e0------------------w1-- use          e0: recorded by stage_in / stage_out
    h2d     :     \\w0--- stage_in --e1                e1: the result
    d2h     :     \\w0--- stage_out -e1                w : waits

Operations on one extent happen in the order they were asked for; others overlap freely. On NVMe, one thread hands
pieces to the disk in that order, and memory is bounded by the ring::

    stage_out : value --copy--> [ring buffer] --write--> file
    stage_in  : file  --read--> [ring buffer] --copy---> out
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero.config import ConfigError
from lightning_zero.memory.aio import DiskFile, Joined, Syscalls
from lightning_zero.memory.claims import as_config_error, claim_file, remove_leftovers
from lightning_zero.memory.limits import available_host_memory
from lightning_zero.memory.pages import CPU, PAGE, HostPages, StagingBuffer, StagingRing, byte_view
from lightning_zero.planning.layout import round_up

HOST_ALIGN = 64  # bytes; what torch's vectorised loops walk in


class Wanted(NamedTuple):
    """An extent to reserve."""

    label: str  # unit and role, for error messages
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """A place for ``numel`` elements on one tier. Extents are told apart by identity."""

    label: str
    numel: int
    dtype: torch.dtype
    offset: int  # bytes, in its slab or file

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without the padding behind them."""
        return self.numel * self.dtype.itemsize


class Tier(Protocol):
    """A place where roles rest. Safe for a main thread and workers."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes held at rest now, padding included, staging buffers not."""
        ...

    def reserve(self, wanted: Sequence[Wanted]) -> list[Extent]:
        """One slab or file region for all of ``wanted``. Raises ConfigError where it does not fit."""
        ...

    def stage_in(self, extent: Extent, out: Tensor) -> Future[Any]:
        """Fill ``out`` [numel] with what the extent holds."""
        ...

    def stage_out(self, extent: Extent, value: Tensor) -> Future[Any]:
        """Put ``value`` [numel] into the extent."""
        ...

    def resident(self, extent: Extent) -> Tensor | None:
        """The extent's own memory [numel], to compute on in place; None where it has none (nvme)."""
        ...

    def free(self, extents: Iterable[Extent]) -> None:
        """Give extents back, after what is in flight for them. A slab goes when its last extent does."""
        ...

    def flush(self) -> None:
        """Wait until everything asked for has happened. Raises the error of a write that was lost."""
        ...

    def close(self) -> None:
        """Wait, and free everything. May be called twice."""
        ...


def arrived(future: Future[Any], *, host: bool = False) -> None:
    """Wait for a staging future: afterwards the current stream (``host``: this thread) may use the bytes."""
    event = future.result()
    if event is not None and host:
        event.synchronize()
    elif event is not None:
        torch.cuda.current_stream().wait_event(event)


def _done(result: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _check(extent: Extent, tensor: Tensor) -> None:
    if tensor.dtype is not extent.dtype or tensor.numel() != extent.numel or not tensor.is_contiguous():
        raise ValueError(
            f"{extent.label!r}: expected a contiguous tensor of {extent.numel} elements of {extent.dtype}, got "
            f"{tuple(tensor.shape)} of {tensor.dtype}"
        )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _lay_out(wanted: Sequence[Wanted], base: int, align: int) -> tuple[list[Extent], int]:
    """Extents one behind the other from byte ``base`` on, each at a multiple of ``align``; and the bytes they take."""
    extents, total = [], 0
    for label, numel, dtype in wanted:
        extents.append(Extent(label, numel, dtype, base + total))
        total += round_up(numel * dtype.itemsize, align)
    return extents, total


class _Copier:
    """Copies between host and device, on streams of its own where the device is CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, Any] = {}
        if device.type == "cuda":
            self._streams = {"h2d": torch.cuda.Stream(device), "d2h": torch.cuda.Stream(device)}

    def mark(self) -> Any:
        """An event behind what the caller's stream has queued so far; None without streams."""
        return torch.cuda.current_stream(self._device).record_event() if self._streams else None

    def copy(self, out: Tensor, value: Tensor, after: Sequence[Any] = ()) -> Any:
        """Queue the copy behind the events ``after``; gives the event of its end, None if it has ended."""
        out, value = _flat(out), _flat(value)
        if not self._streams or (out.device.type == "cpu" and value.device.type == "cpu"):
            out.copy_(value)
            return None
        stream = self._streams["d2h" if out.device.type == "cpu" else "h2d"]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            out.copy_(value, non_blocking=True)
            return stream.record_event()

    def copy_in_thread(self, out: Tensor, value: Tensor, after: Any) -> None:
        """Copy bytes and wait for the end, from a thread of ours."""
        if out.device.type == "cpu" and value.device.type == "cpu":
            # Not copy_: in each thread it would start a team of intra-op threads, beyond the rank's thread budget.
            ctypes.memmove(out.data_ptr(), value.data_ptr(), out.numel() * out.element_size())
        elif (event := self.copy(out, value, (after,))) is not None:
            event.synchronize()

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


# -- host -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Slab:
    pages: HostPages
    nbytes: int
    live: int  # extents that are not freed


class HostTier:
    """Host memory: each batch is one slab of exactly its size, pinned for a CUDA device.

    On a CPU the copies are real too, so that tests there mean something. They happen in the caller's thread.

    Before the host changes ``resident`` memory, and before it reads it after a ``stage_out``, it waits by
    ``arrived(future, host=True)``.

    Args:
        device: where staged tensors are.
        budget: bytes this tier may hold.
        available: gives the bytes of host memory that may still be taken.
    """

    name = "host"

    def __init__(
        self,
        device: torch.device = CPU,
        *,
        budget: int | None = None,
        available: Callable[[], int] = available_host_memory,
    ) -> None:
        self._device, self._budget, self._available = device, budget, available
        self._copier = _Copier(device)
        self._held: dict[Extent, tuple[_Slab, Tensor]] = {}
        self._last: dict[Extent, Any] = {}  # the event of an extent's last copy: streams do not order each other
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def reserve(self, wanted: Sequence[Wanted]) -> list[Extent]:
        """Raises ConfigError, with needed and available bytes, before the system would end the process for them."""
        extents, total = _lay_out(wanted, 0, HOST_ALIGN)
        with self._lock:
            self._refuse_beyond_bounds(total)
            try:
                pages = HostPages(total, self._device)
            except OSError as error:
                raise _host_error(total, f"the system refused it ({error})") from error
            pages.bytes.zero_()  # takes the memory now, so that the next reserve sees what is really left
            slab = _Slab(pages, total, len(extents))
            self._held |= {e: (slab, pages.tensor(e.offset, e.dtype, e.numel)) for e in extents}
            self._nbytes += total
        return extents

    def stage_in(self, extent: Extent, out: Tensor) -> Future[Any]:
        _check(extent, out)
        return self._copy(extent, out, self.resident(extent))

    def stage_out(self, extent: Extent, value: Tensor) -> Future[Any]:
        _check(extent, value)
        return self._copy(extent, self.resident(extent), value)

    def resident(self, extent: Extent) -> Tensor:
        return self._held[extent][1]

    def free(self, extents: Iterable[Extent]) -> None:
        self._copier.synchronize()
        with self._lock:
            for extent in extents:
                self._last.pop(extent, None)
                slab, _ = self._held.pop(extent)
                slab.live -= 1
                if slab.live == 0:
                    slab.pages.close()
                    self._nbytes -= slab.nbytes

    def flush(self) -> None:
        self._copier.synchronize()

    def close(self) -> None:
        self.free(list(self._held))

    def _copy(self, extent: Extent, out: Tensor, value: Tensor) -> Future[Any]:
        event = self._copier.copy(out, value, (self._copier.mark(), self._last.get(extent)))
        if event is not None:
            self._last[extent] = event
        return _done(event)

    def _refuse_beyond_bounds(self, total: int) -> None:
        if self._budget is not None and self._nbytes + total > self._budget:
            raise _host_error(total, f"{self._budget - self._nbytes} of {self._budget} are left in the budget")
        if (available := self._available()) < total:
            raise _host_error(total, f"{available} are available (in its cgroup, or on the machine)")


def _host_error(needed: int, got: str) -> ConfigError:
    return ConfigError(
        f"zero.offload: expected {needed} more bytes of host memory, but {got}. Give the job more memory, raise "
        "zero.offload.host_budget, or choose a row of zero/offload that keeps less on the host."
    )


# -- nvme -------------------------------------------------------------------------------------------------------------


class _Job(NamedTuple):
    """One ``stage_in`` or ``stage_out`` of an extent."""

    extent: Extent
    tensor: Tensor
    write: bool
    after: Any  # event of the caller's stream
    previous: Future[Any] | None  # the last operation on this extent
    joined: Joined
    pieces: Sequence[range]  # bytes of the extent


class NvmeTier:
    """A preallocated file for this rank in a folder of ours under ``path``, read and written through a bounded ring.

    A host tensor that is page-aligned and of whole pages (from a :class:`StagingRing`) is read and written in place,
    without the ring. Device copies from or to a host tensor must have arrived before it is staged.

    Args:
        path: an existing, writable folder on a local disk; one job at a time.
        rank: global rank.
        instance: tells tiers apart that this process has at a time in one folder, one for each model.
        budget: bytes this rank may hold there.
        ring_count, ring_nbytes: buffers for staging; an extent that is larger passes in pieces.
        device: where staged tensors are; the ring is pinned for a CUDA device.
        threads: requests in flight at the disk.

    Raises:
        ConfigError: the folder is missing, read-only, no folder, full, or used by another live job.

    Attributes:
        ring: the staging buffers, all the host memory that this tier takes.
    """

    name = "nvme"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        instance: int = 0,
        budget: int | None = None,
        ring_count: int = 4,
        ring_nbytes: int = 32 << 20,
        device: torch.device = CPU,
        threads: int = 4,
        syscalls: Syscalls | None = None,
    ) -> None:
        syscalls = syscalls if syscalls is not None else Syscalls()
        self._budget = budget
        self._folder = Path(path) / "lightning_zero"
        self.instance = instance
        name = f"rank{rank:05d}" + (f".{instance}" if instance else "")
        self._claim = claim_file(Path(path), self._folder, name, syscalls)
        with contextlib.ExitStack() as undo:
            undo.callback(self._claim.release)
            remove_leftovers(self._folder, name, syscalls)
            with as_config_error(path):
                self._file = DiskFile(self._folder / f"{name}.bin", threads=threads, syscalls=syscalls)
            undo.callback(self._file.close)
            self.ring = StagingRing(ring_count, ring_nbytes, device=device)
            undo.pop_all()
        self._copier = _Copier(device)
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-stager")
        self._file_end = 0  # of what is reserved in the file
        self._holes: list[tuple[int, int]] = []  # freed places before that, in order, none next to another
        self._last: dict[Extent, Future[Any] | None] = {}  # of every extent that is reserved
        self._spoiled: dict[Extent, BaseException] = {}  # whose last write failed
        self._nbytes = 0
        self._lock = threading.Lock()
        self._closed = False

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes that the disk can still give, to all who use it."""
        return self._file.free_nbytes()

    @property
    def disk(self) -> int:
        """A number of the disk, the same for all folders on it."""
        return os.stat(self._folder).st_dev

    def reserve(self, wanted: Sequence[Wanted]) -> list[Extent]:
        total = _lay_out(wanted, 0, PAGE)[1]
        with self._lock:
            if self._budget is not None and self._nbytes + total > self._budget:
                raise ConfigError(
                    f"zero.offload.nvme_budget: expected {total} more bytes, but {self._budget - self._nbytes} of "
                    f"{self._budget} are left. Raise zero.offload.nvme_budget or choose a row of zero/offload that "
                    "keeps less on disk."
                )
            extents, _ = _lay_out(wanted, self._take_place(total), PAGE)
            self._last |= dict.fromkeys(extents)
            self._nbytes += total
        return extents

    def stage_in(self, extent: Extent, out: Tensor) -> Future[Any]:
        return self._stage(extent, out, write=False)

    def stage_out(self, extent: Extent, value: Tensor) -> Future[Any]:
        return self._stage(extent, value, write=True)

    def resident(self, extent: Extent) -> None:
        return None

    def free(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            wait([future] if (future := self._last[extent]) is not None else [])
            with self._lock:
                del self._last[extent]
                self._spoiled.pop(extent, None)
                size = round_up(extent.nbytes, PAGE)
                self._nbytes -= size
                self._give_place_back(extent.offset, extent.offset + size)

    def flush(self) -> None:
        with self._lock:
            futures = [future for future in self._last.values() if future is not None]
        wait(futures)
        if self._spoiled:
            raise next(iter(self._spoiled.values()))

    def close(self) -> None:
        """Wait, and remove the file. Errors stay in their futures."""
        if self._closed:
            return
        self._closed = True
        self._stager.shutdown(wait=True)
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file.path)
        self._claim.release()
        self._last.clear()
        self._nbytes = 0
        self.ring.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _take_place(self, nbytes: int) -> int:
        """The offset of a region of the file: the first hole that is large enough, or at the end."""
        for i, (low, high) in enumerate(self._holes):
            if high - low >= nbytes:
                self._holes[i : i + 1] = [(low + nbytes, high)] if high - low > nbytes else []
                return low
        with as_config_error(self._folder.parent):
            self._file.ensure(self._file_end + nbytes)
        self._file_end += nbytes
        return self._file_end - nbytes

    def _give_place_back(self, low: int, high: int) -> None:
        holes: list[tuple[int, int]] = []
        for hole in sorted([*self._holes, (low, high)]):
            if holes and holes[-1][1] == hole[0]:
                holes[-1] = holes[-1][0], hole[1]
            elif hole[0] < hole[1]:
                holes.append(hole)
        if holes and holes[-1][1] == self._file_end:
            self._file_end = holes.pop()[0]
        self._holes = holes

    def _stage(self, extent: Extent, tensor: Tensor, *, write: bool) -> Future[Any]:
        _check(extent, tensor)
        step = max(extent.nbytes, 1) if _in_place(tensor) else self.ring.buffer_nbytes
        pieces = [range(low, min(low + step, extent.nbytes)) for low in range(0, extent.nbytes, step)]
        joined, after = Joined(len(pieces)), self._copier.mark()
        with self._lock:
            job = _Job(extent, tensor, write, after, self._last[extent], joined, pieces)
            self._stager.submit(self._run, job)
            self._last[extent] = joined.future
        return joined.future

    def _run(self, job: _Job) -> None:
        if job.previous is not None:
            wait([job.previous])
        if job.write:
            self._spoiled.pop(job.extent, None)
        lost = None if job.write else self._spoiled.get(job.extent)
        for piece in job.pieces:
            error = job.joined.error or lost
            if error is None:
                try:
                    self._start(job, piece)
                    continue
                except BaseException as raised:
                    error = raised
            self._finish(job, error)

    def _start(self, job: _Job, piece: range) -> None:
        offset = job.extent.offset + piece.start
        request = self._file.write if job.write else self._file.read
        if _in_place(job.tensor):
            future = request(offset, byte_view(job.tensor), job.extent.label)
            future.add_done_callback(lambda future: self._finish(job, future.exception()))
            return
        buffer = self.ring.acquire(job.extent.label)
        try:
            if job.write:
                self._copier.copy_in_thread(buffer.tensor(torch.uint8, len(piece)), _bytes(job, piece), job.after)
            future = request(offset, buffer.memory[: round_up(len(piece), PAGE)], job.extent.label)
        except BaseException:
            buffer.release()
            raise
        future.add_done_callback(partial(self._landed, job, piece, buffer))

    def _landed(self, job: _Job, piece: range, buffer: StagingBuffer, future: Future[Any]) -> None:
        error = future.exception()
        try:
            if error is None and not job.write:
                self._copier.copy_in_thread(_bytes(job, piece), buffer.tensor(torch.uint8, len(piece)), job.after)
        except BaseException as raised:
            error = raised
        buffer.release()
        self._finish(job, error)

    def _finish(self, job: _Job, error: BaseException | None) -> None:
        if error is not None and job.write:
            self._spoiled[job.extent] = error  # before the future is done: a read waits for that
        job.joined.part_done(error)


def _bytes(job: _Job, piece: range) -> Tensor:
    return _flat(job.tensor).view(torch.uint8)[piece.start : piece.stop]


def _in_place(tensor: Tensor) -> bool:
    """Whether the disk can read and write this very memory."""
    aligned = tensor.data_ptr() % PAGE == 0 and tensor.numel() * tensor.element_size() % PAGE == 0
    return tensor.device.type == "cpu" and aligned
