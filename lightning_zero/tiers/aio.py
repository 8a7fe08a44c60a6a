"""Read and write files with several threads and O_DIRECT, without the page cache.

O_DIRECT needs file offsets, lengths and memory addresses that are multiples of the device's block size (else EINVAL).
Multiples of ``PAGE`` suffice. The threads of a file divide each request (``preadv`` and ``pwritev`` release the GIL)::

    read(offset, buffer)   | piece 0 | piece 1 | piece 2 | piece 3 |     the future is done after the last piece
    threads                    t0        t1        t2        t3
"""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightning_zero.planning.layout import round_up
from lightning_zero.settings import MIB
from lightning_zero.tiers.pages import PAGE, HostPages, byte_view

MIN_PIECE_NBYTES = MIB  # smaller pieces cost more in calls than another thread gains
RETRY_PAUSES_S = (0.01, 0.05, 0.25)  # between attempts; one more attempt than pauses
RETRIED = frozenset({errno.EIO, errno.EAGAIN})
_NOT_SUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

_HINTS = {
    errno.ENOSPC: "Free space there, lower zero.offload.nvme_budget, or choose another zero.offload.nvme_path.",
    errno.EIO: "The disk reports an error (see dmesg): choose another zero.offload.nvme_path.",
    errno.EINVAL: "The memory or offset may not be aligned as O_DIRECT wants: this is a bug of lightning_zero.",
}
_OTHER_HINT = "Check the folder, or choose another zero.offload.nvme_path."


class DiskError(OSError):
    """Raised when an operation on a file fails and retries do not help. The message names file, cause and remedy."""


@dataclass(slots=True)
class Syscalls:
    """The system calls that a :class:`DiskFile` uses. Tests replace them by functions that fail."""

    open: Callable[..., int] = os.open
    preadv: Callable[[int, list[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, list[memoryview], int], int] = os.pwritev
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    sleep: Callable[[float], None] = time.sleep


class Joined:
    """Joins ``parts`` parts of a request in one ``future``, which is done when all parts are done, and then has the
    first error. An error does not end it early, because the caller would reuse the buffer while other parts use it."""

    def __init__(self, parts: int) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # transfers in flight cannot be cancelled
        self.error: BaseException | None = None
        self._left = parts
        self._lock = threading.Lock()
        if parts == 0:
            self.future.set_result(None)

    def part_done(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if self._left:
                return
        # Outside the lock: callbacks of the future run here and may ask for more.
        if self.error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self.error)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a request, for one thread. If ``write``, write ``memory`` at byte ``offset`` of the file; else read
    into ``memory`` from there. ``label``: the request's name in errors."""

    write: bool
    offset: int
    memory: memoryview
    label: str


@functools.cache
def _warn_once(folder: str) -> None:
    warnings.warn(
        f"{folder} has no O_DIRECT: offload to it goes through the page cache, which is slower and takes memory. "
        "Choose a folder on a local disk as zero.offload.nvme_path.",
        RuntimeWarning,
        stacklevel=4,
    )


class DiskFile:
    """A scratch file at ``path``, empty until :meth:`grow` is called; an existing file is truncated. Reads and writes
    bypass the page cache; if the file system does not support this, a warning is shown once per folder. The constructor
    raises DiskError if the file cannot be opened."""

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 4, syscalls: Syscalls | None = None) -> None:
        self.path = os.fspath(path)
        self.syscalls = syscalls if syscalls is not None else Syscalls()
        self.nbytes = 0
        self.threads = threads
        self._fd = self._open()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lightning_zero-disk")
        self._closed = False
        self._lock = threading.Lock()

    # -- requests -----------------------------------------------------------------------------------------------------

    def grow(self, nbytes: int) -> None:
        """Make the file at least ``nbytes`` long (rounded up to pages), with allocated space. Raises DiskError, with
        needed and free bytes, if there is no space; the file then keeps its size."""
        wanted = round_up(nbytes, PAGE)
        if wanted <= self.nbytes:
            return
        try:
            self.syscalls.fallocate(self._fd, self.nbytes, wanted - self.nbytes)
        except OSError as error:
            os.ftruncate(self._fd, self.nbytes)  # give back what was allocated before the failure
            code = error.errno or errno.EIO
            raise DiskError(
                code,
                f"allocating {self.path} failed: needed {wanted - self.nbytes} more bytes, {self.free_nbytes()} are "
                f"free: {os.strerror(code)}. {_HINTS.get(code, _OTHER_HINT)}",
            ) from error
        self.nbytes = wanted

    def shrink(self, nbytes: int) -> None:
        """Truncate the file to ``nbytes`` (rounded up to pages). Requests in flight must not use the removed space."""
        wanted = round_up(nbytes, PAGE)
        if wanted < self.nbytes:
            os.ftruncate(self._fd, wanted)
            self.nbytes = wanted

    def free_nbytes(self) -> int:
        stat = os.statvfs(self._fd)
        return stat.f_bavail * stat.f_frsize

    def read(self, offset: int, buffer: memoryview, label: str) -> Future[Any]:
        """Start to read from byte ``offset`` into ``buffer``; offset and length are multiples of a page. Do not touch
        ``buffer`` until the future is done. The future can raise :class:`DiskError`, which names ``label``."""
        return self._start(_Piece(False, offset, buffer, label))

    def write(self, offset: int, buffer: memoryview, label: str) -> Future[Any]:
        """Start to write ``buffer`` at byte ``offset``, under the rules of :meth:`read`."""
        return self._start(_Piece(True, offset, buffer, label))

    def close(self) -> None:
        """Wait for requests in flight, end the threads and close the file. The file stays on disk, not synced."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # First the threads: the system may give a closed descriptor's number to another file.
        self._pool.shutdown(wait=True)
        os.close(self._fd)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            if (fd := self._open_direct(flags)) is not None:
                return fd
            fd = self.syscalls.open(self.path, flags, 0o600)
        except OSError as error:
            code = error.errno or errno.EIO
            raise DiskError(code, f"opening {self.path} failed: {os.strerror(code)}. {_OTHER_HINT}") from error
        _warn_once(os.path.dirname(os.path.abspath(self.path)))
        return fd

    def _open_direct(self, flags: int) -> int | None:
        """Open the file with O_DIRECT and return its descriptor; None if the file system does not support O_DIRECT. Try
        one write too, because some file systems accept the flag and refuse every write."""
        try:
            fd = self.syscalls.open(self.path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno in _NOT_SUPPORTED:
                return None
            raise
        try:
            self.syscalls.pwritev(fd, [byte_view(HostPages(PAGE).bytes)], 0)
        except OSError as error:
            if error.errno in _NOT_SUPPORTED:
                os.close(fd)
                return None
        os.ftruncate(fd, 0)
        return fd

    def _start(self, request: _Piece) -> Future[Any]:
        offset, nbytes = request.offset, request.memory.nbytes
        if offset % PAGE or nbytes % PAGE or offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"{request.label!r}: expected whole pages inside {self.path} ({self.nbytes} bytes), got offset "
                f"{offset} and {nbytes} bytes"
            )
        step = max(round_up(-(-nbytes // self.threads), PAGE), MIN_PIECE_NBYTES)
        starts = range(0, nbytes, step)
        joined = Joined(len(starts))
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self.path} is closed ({request.label!r})")
        for low in starts:
            piece = _Piece(request.write, offset + low, request.memory[low : low + step], request.label)
            # The interpreter or another thread's close() may have ended the pool. The error goes into the future,
            # because earlier pieces may still use the buffer, which the caller takes back on an exception.
            try:
                self._pool.submit(self._run, joined, piece)
            except RuntimeError as error:
                joined.part_done(error)
        return joined.future

    def _run(self, joined: Joined, piece: _Piece) -> None:
        try:
            self._move(piece)
        except BaseException as error:  # all errors: a part that never ends would hang its waiters
            joined.part_done(error)
        else:
            joined.part_done()

    def _move(self, piece: _Piece) -> None:
        """Read or write all bytes of ``piece``, and retry after temporary errors. Raises DiskError if this fails."""
        call = self.syscalls.pwritev if piece.write else self.syscalls.preadv
        done = failures = 0
        while done < piece.memory.nbytes:
            code = 0
            try:
                moved = call(self._fd, [piece.memory[done:]], piece.offset + done)
            except OSError as error:
                moved, code = 0, error.errno or errno.EIO
            whole = moved - moved % PAGE  # O_DIRECT can only continue at a page boundary
            if whole > 0:
                done, failures = done + whole, 0
                continue
            if (code in RETRIED or moved > 0) and failures < len(RETRY_PAUSES_S):
                self.syscalls.sleep(RETRY_PAUSES_S[failures])
                failures += 1
                continue
            reason = os.strerror(code) if code else "the disk takes no more" if piece.write else "the file ends here"
            code = code or errno.EIO
            raise DiskError(
                code,
                f"{'writing' if piece.write else 'reading'} {self.path} failed for {piece.label!r}: at byte offset "
                f"{piece.offset} wanted {piece.memory.nbytes} bytes, got {done + moved}: {reason} "
                f"({failures + 1} attempt{'s' * (failures > 0)}). {_HINTS.get(code, _OTHER_HINT)}",
            )
