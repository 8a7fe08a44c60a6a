"""A range of a file, as a file."""

from __future__ import annotations

import io
from typing import Any, BinaryIO


class Slice(io.RawIOBase):
    """Bytes ``[start, start + length)`` of ``file``, to be read."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        self._place = max(0, base + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._place))
        self._file.seek(self._start + self._place)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
