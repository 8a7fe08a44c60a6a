"""Writes past the page cache, for those that go on beside training.

A write through the page cache is a copy by the processor, page by page: a gigabyte takes a second or two of a core that
trains. Here the disk takes whole pages from one buffer. What a write has of its first and last page goes through the
page cache, because others may write the rest of these pages.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from lightning_zero.checkpoint.durable import write_at
from lightning_zero.config import MIB
from lightning_zero.planning.layout import round_up
from lightning_zero.tiers.pages import PAGE, HostPages, byte_view

BUFFER_NBYTES = 4 * MIB
_NOT_SUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class DirectFile:
    """A file that is there already, open to be written; not by several threads at once.

    Args:
        path: on a file system without O_DIRECT all goes through the page cache.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                os.close(self.fd)
                raise
        self._pages = HostPages(BUFFER_NBYTES)
        self._buffer = byte_view(self._pages.bytes)

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``, a view of bytes, at ``offset``.

        Raises:
            OSError: the system's.
        """
        low = min(round_up(offset, PAGE) - offset, len(data))
        high = max(low, len(data) - (offset + len(data)) % PAGE)
        if low:
            write_at(self.fd, data[:low], offset)
        for start in range(low, high, BUFFER_NBYTES):
            self._write_pages(data[start : min(high, start + BUFFER_NBYTES)], offset + start)
        if high < len(data):
            write_at(self.fd, data[high:], offset + high)

    def _write_pages(self, data: memoryview, offset: int) -> None:
        written = 0
        if self._direct is not None:
            target = np.frombuffer(self._buffer[: len(data)], np.uint8)
            np.copyto(target, np.frombuffer(data, np.uint8))  # without the GIL, which training needs
            try:
                while written < len(data) and written % PAGE == 0:
                    written += os.pwrite(self._direct, self._buffer[written : len(data)], offset + written)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                os.close(self._direct)  # some file systems accept the flag and refuse every write
                self._direct = None
        if written < len(data):
            write_at(self.fd, data[written:], offset + written)

    def sync(self) -> None:
        """Return when a power cut does not take away any more what was written."""
        os.fsync(self.fd)

    def close(self) -> None:
        for fd in (self.fd, self._direct):
            if fd is not None:
                os.close(fd)
        self._direct, self._buffer = None, memoryview(b"")
        self._pages.close()

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class DirectStream(io.RawIOBase):
    """A new file that is written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        path.touch(exist_ok=False)
        self._file, self._place = DirectFile(path), 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._file.fd

    def tell(self) -> int:
        return self._place

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write_at(view, self._place)
        self._place += len(view)
        return len(view)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
