"""A tier in files: one preallocated file per rank, used without the page cache. One thread starts the transfers, in
order and in pieces, through a ring of buffers of fixed size::

    stage_out : value --copy--> [ring buffer] --write--> file
    stage_in  : file  --read--> [ring buffer] --copy---> out
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.device import recording
from lightning_zero.planning.layout import round_up
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.aio import DiskFile, Joined, Syscalls
from lightning_zero.tiers.claims import as_config_error, claim_file, remove_leftovers
from lightning_zero.tiers.extents import Extent, Wanted, lay_out
from lightning_zero.tiers.pages import PAGE, StagingBuffer, StagingRing, byte_view

_VERBS = {True: "write", False: "read"}


class _Job(NamedTuple):
    extent: Extent
    tensor: Tensor
    write: bool
    previous: threading.Event | None
    joined: Joined
    pieces: Sequence[range]


class NvmeTier:
    """Holds values in a preallocated file of this rank, in a folder under ``path``. Uses a ring of host buffers.

    Thread-safe. Operations on one extent keep their order; those on different extents overlap: read k+1, step k, write
    k-1. An extent's values are undefined before its first ``stage_out``. A page-aligned host tensor of whole pages is
    read and written in place, without the ring. Before a tensor is staged, its copies to or from the device must end.

    Args:
        path: an existing, writable folder on a local disk. Raises ConfigError for any other path, a full disk, or
            a folder that another live job uses.
        instance: index of this tier, if the process has several in one folder (one per model).
        budget: bytes that this rank may hold in files; None: no limit.
        ring_count, ring_nbytes: number of the ring's buffers, and bytes of each. The tier takes no other host memory.
            An extent that is larger than a buffer is copied in pieces.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        instance: int = 0,
        budget: int | None = None,
        ring_count: int = 4,
        ring_nbytes: int = 32 << 20,
        threads: int = 4,
        syscalls: Syscalls | None = None,
    ) -> None:
        syscalls = syscalls if syscalls is not None else Syscalls()
        self.budget = budget
        self.path, self.threads = Path(path), threads
        self._folder = self.path / "lightning_zero"
        self.instance = instance
        name = f"rank{rank:05d}" + (f".{instance}" if instance else "")
        self._claim = claim_file(Path(path), self._folder, name, syscalls)
        # If the constructor raises, nobody can close the object, and its lock would block the folder.
        with contextlib.ExitStack() as undo:
            undo.callback(self._claim.release)
            remove_leftovers(self._folder, name, syscalls)
            with as_config_error(path):
                self._file = DiskFile(self._folder / f"{name}.bin", threads=threads, syscalls=syscalls)
            undo.callback(self._file.close)
            self.ring = StagingRing(ring_count, ring_nbytes)
            undo.pop_all()
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="lightning_zero-stager")
        self._regions = Regions()
        # Keep no error that is raised: its traceback holds the engine, whose finalizer holds this tier, so that the
        # engine would never be freed.
        self._last: dict[Extent, threading.Event | None] = {}  # of every reserved extent: its last operation has ended
        self._spoiled: dict[Extent, BaseException] = {}  # extents whose last write failed
        self._nbytes = 0
        self._lock, self._behind = threading.Lock(), threading.Lock()
        self._last_behind: threading.Event | None = None
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of all extents in the file, with padding."""
        return self._nbytes

    @property
    def free_nbytes(self) -> int:
        """Return the free bytes of the disk, which all users of the disk share."""
        return self._file.free_nbytes()

    @property
    def spare_nbytes(self) -> int:
        """Return the allocated bytes of this rank's file that no extent uses."""
        return self._file.nbytes - self._nbytes

    @property
    def disk(self) -> int:
        """Return the disk's device number, which is equal for all folders on the disk."""
        return os.stat(self._folder).st_dev

    def reserve(self, wanted: Sequence[Wanted]) -> list[Extent]:
        total = lay_out(wanted, 0, PAGE)[1]
        with self._lock:
            if self.budget is not None and self._nbytes + total > self.budget:
                raise ConfigError(
                    f"zero.offload.nvme_budget: expected {total} more bytes, but {self.budget - self._nbytes} of "
                    f"{self.budget} are left. Raise zero.offload.nvme_budget or choose a zero/offload that "
                    "keeps less on disk."
                )
            with as_config_error(self._folder.parent):
                extents, _ = lay_out(wanted, self._regions.reserve(total, self._file.grow), PAGE)
            self._last |= dict.fromkeys(extents)
            self._nbytes += total
        return extents

    def stage_in(self, extent: Extent, out: Tensor) -> Future[Any]:
        """Start to read the extent's values into ``out`` [numel]. Do not touch ``out`` until the future is done."""
        return self._stage(extent, out, write=False)

    def stage_out(self, extent: Extent, value: Tensor) -> Future[Any]:
        """Start to write ``value`` [numel] to the extent. Do not touch ``value`` until the future is done."""
        return self._stage(extent, value, write=True)

    def write_behind(self, extent: Extent, value: Tensor) -> Future[Any]:
        """Wait until the previous write of this method has ended, then start to write ``value`` as :meth:`stage_out`
        does, and return the future. If the new write fails, the next read of ``extent`` raises the error too."""
        with self._behind:
            if self._last_behind is not None and not self._last_behind.is_set():
                with recording.waiting("disk", extent.label, on_host=True):
                    self._last_behind.wait()
            future = self.stage_out(extent, value)
            self._last_behind = self._last[extent]
            return future

    def free(self, extents: Iterable[Extent]) -> None:
        """Wait for operations in flight on ``extents``, then free their space in the file."""
        for extent in extents:
            # Another extent may get the region at once, and a write in flight would overwrite its values.
            if (ended := self._last[extent]) is not None:
                ended.wait()
            with self._lock:
                del self._last[extent]
                self._spoiled.pop(extent, None)
                size = round_up(extent.nbytes, PAGE)
                self._nbytes -= size
                self._regions.give_back(extent.offset, extent.offset + size)

    def trim(self) -> None:
        """Truncate the file after the last extent, to free disk space."""
        with self._lock:
            self._file.shrink(self._regions.end)

    def close(self) -> None:
        """Wait for operations in flight (futures raise their errors), and remove the file. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        # First the stager: it passes its jobs to the file's threads.
        self._stager.shutdown(wait=True)
        self._file.close()
        # Before the claim is released, or another process could claim the name and lose its new file.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file.path)
        self._claim.release()
        self._last.clear()
        self._nbytes = 0
        self.ring.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _stage(self, extent: Extent, tensor: Tensor, *, write: bool) -> Future[Any]:
        extent.check(tensor)
        recording.moved("disk_write" if write else "disk_read", extent.nbytes)
        step = max(extent.nbytes, 1) if _in_place(tensor) else self.ring.buffer_nbytes
        pieces = [range(low, min(low + step, extent.nbytes)) for low in range(0, extent.nbytes, step)]
        joined, ended = Joined(len(pieces)), threading.Event()
        joined.future.add_done_callback(lambda _: ended.set())
        # Under one lock: the single stager waits for ``previous``, which must be in its queue first. Otherwise another
        # thread could get the same ``previous``, and the two would run in any order.
        with self._lock:
            job = _Job(extent, tensor, write, self._last[extent], joined, pieces)
            self._stager.submit(self._run, job)
            self._last[extent] = ended
        return joined.future

    def _run(self, job: _Job) -> None:
        if job.previous is not None:
            job.previous.wait()
        if (span := recording.begin("disk", f"{_VERBS[job.write]} {job.extent.label}", on_host=True)) is not None:
            job.joined.future.add_done_callback(lambda _: span.end())
        if job.write:
            self._spoiled.pop(job.extent, None)
        lost = None if job.write else copy.copy(self._spoiled.get(job.extent))
        # After an error count the other pieces too, or the job's future would never be done.
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
        # This may wait. The file's threads release buffers, never this thread, so buffers do come back.
        buffer = self.ring.acquire(job.extent.label)
        try:
            if job.write:
                _copy(buffer.tensor(torch.uint8, len(piece)), _bytes(job, piece))
            future = request(offset, buffer.memory[: round_up(len(piece), PAGE)], job.extent.label)
        except BaseException:
            buffer.release()
            raise
        future.add_done_callback(partial(self._landed, job, piece, buffer))

    def _landed(self, job: _Job, piece: range, buffer: StagingBuffer, future: Future[Any]) -> None:
        error = future.exception()
        try:
            if error is None and not job.write:
                _copy(_bytes(job, piece), buffer.tensor(torch.uint8, len(piece)))
        except BaseException as raised:
            error = raised
        buffer.release()  # after the copy: the next piece may be read into it at once
        self._finish(job, error)

    def _finish(self, job: _Job, error: BaseException | None) -> None:
        # Before the future is done: the extent's next read waits for it, then looks for this error. Without the error
        # it would return stale bytes.
        if error is not None and job.write:
            self._spoiled[job.extent] = copy.copy(error)
        job.joined.part_done(error)


def _bytes(job: _Job, piece: range) -> Tensor:
    return job.tensor.detach().view(-1).view(torch.uint8)[piece.start : piece.stop]


def _copy(out: Tensor, value: Tensor) -> None:
    # Not copy_: each thread would start intra-op threads beyond the rank's thread budget.
    ctypes.memmove(out.data_ptr(), value.data_ptr(), out.numel())


def _in_place(tensor: Tensor) -> bool:
    """Return whether the tensor starts on a page boundary and fills whole pages, so that I/O can bypass the ring."""
    return tensor.data_ptr() % PAGE == 0 and tensor.numel() * tensor.element_size() % PAGE == 0


class Regions:
    """Tracks which bytes of a growing file are in use. Freed regions are reused before the file grows."""

    def __init__(self) -> None:
        self.end = 0  # of the last region
        self.holes: list[tuple[int, int]] = []  # freed bytes [low, high) before ``end``, in order, never adjacent

    def reserve(self, nbytes: int, grow: Callable[[int], None]) -> int:
        """Return the offset of a new region of ``nbytes``: the first hole that is large enough, or the end. ``grow``
        is called with the bytes that the file must then hold; if it raises, nothing changes."""
        for i, (low, high) in enumerate(self.holes):
            if high - low >= nbytes:
                self.holes[i : i + 1] = [(low + nbytes, high)] if high - low > nbytes else []
                return low
        grow(self.end + nbytes)
        self.end += nbytes
        return self.end - nbytes

    def give_back(self, low: int, high: int) -> None:
        """Free bytes ``[low, high)`` of the file for reuse."""
        holes: list[tuple[int, int]] = []
        for hole in sorted([*self.holes, (low, high)]):
            if holes and holes[-1][1] == hole[0]:
                holes[-1] = holes[-1][0], hole[1]
            elif hole[0] < hole[1]:
                holes.append(hole)
        if holes and holes[-1][1] == self.end:
            self.end = holes.pop()[0]
        self.holes = holes
