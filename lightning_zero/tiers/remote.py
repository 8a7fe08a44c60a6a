"""Checkpoint folders in object stores, such as ``s3://bucket/last.ckpt``, through fsspec.

Object stores have no rename, but an object appears when its upload is complete, and replacing one object is atomic. So
a save gives its objects new names, and writing the index, which has these names, makes the checkpoint valid::

    last.ckpt/__0_5f0c.distcp, __1_5f0c.distcp      each by its rank, a multipart upload
    last.ckpt/meta_5f0c.pt
    last.ckpt/.metadata                             the index of the objects above: now the new checkpoint is valid
    last.ckpt/meta.pt                               for other readers; this package reads the name in the index
    last.ckpt/__0_91ab.distcp, ...                  of the older checkpoint: removed

A killed save leaves objects that no index names. The next save to the same address removes them."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.utils import get_protocol  # type: ignore[import-untyped]

INDEX = ".metadata"  # of a checkpoint folder
_MIB = 2**20
_BLOCKS = 32  # of an open file that are kept
_PARTS = 5000  # of an upload; S3 allows 10,000


class RemotePath:
    """A file or folder at the address ``url`` of fsspec, with the methods of a Path that checkpoints need."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.name = self._url.rpartition("/")[2]
        self.suffix = posixpath.splitext(self.name)[1]

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._url.rpartition("/")[0])

    @property
    def _place(self) -> tuple[Any, str]:
        """Return the fsspec file system, its cache cleared because other processes write too, and the path's key."""
        fs, key = url_to_fs(self._url)
        fs.invalidate_cache()
        return fs, key

    def is_file(self) -> bool:
        fs, key = self._place
        return bool(fs.isfile(key))

    def is_dir(self) -> bool:
        return next(self.iterdir(), None) is not None

    def iterdir(self) -> Iterator[RemotePath]:
        fs, key = self._place
        yield from (self / path[len(key) + 1 :] for path in fs.find(key) if path.startswith(f"{key}/"))

    def stat(self) -> Any:
        fs, key = self._place
        return SimpleNamespace(st_size=fs.size(key), st_mtime_ns=0, st_ino=0)

    def read_bytes(self) -> bytes:
        fs, key = self._place
        return bytes(fs.cat_file(key))

    def write_bytes(self, data: bytes) -> None:
        fs, key = self._place
        fs.pipe_file(key, data)

    def unlink(self) -> None:
        fs, key = self._place
        fs.rm_file(key)

    def remove_folder(self) -> None:
        """Remove the objects in this folder, the index first, so that the index never names missing objects."""
        for path in sorted(self.iterdir(), key=lambda path: path.name != INDEX):
            path.unlink()

    def open(self, mode: str, nbytes: int = 0, **options: Any) -> Any:
        """Open the file. ``mode`` "rb": to read ranges, with a cache of blocks for small ranges. "wb": to upload about
        ``nbytes`` bytes; the file appears in the store when it is closed."""
        fs, key = self._place
        if mode == "rb":
            size, blocks = int(fs.size(key)), lru_cache(_BLOCKS)(lambda n: _read(fs, key, n * _MIB, (n + 1) * _MIB))

            def fetch(low: int, high: int) -> bytes:
                if high - low > _MIB:
                    return _read(fs, key, low, high)
                start = low // _MIB
                return b"".join(map(blocks, range(start, -(-high // _MIB))))[low - start * _MIB : high - start * _MIB]

            return Ranges(fetch, size)
        return Upload(fs.open(key, mode, block_size=_MIB * max(16, nbytes // _MIB // _PARTS), **options))

    @contextlib.contextmanager
    def uploading(self, nbytes: int) -> Iterator[Upload]:
        """Yield an upload of about ``nbytes`` bytes to this file. The file appears in the store when the body ends; if
        the body fails, it does not appear."""
        upload: Upload = self.open("wb", nbytes, autocommit=False)
        try:
            yield upload
            upload.close()
            upload.file.commit()
        except BaseException as error:
            with contextlib.suppress(Exception):
                upload.file.discard()
            raise (upload.failure or error) from None  # torch.save raises another one when a write fails


def _read(fs: Any, key: str, low: int, high: int) -> bytes:
    return bytes(fs.cat_file(key, start=low, end=high))


class Ranges(io.RawIOBase):
    """A readable file of ``length`` bytes. ``fetch(low, high)`` reads bytes ``[low, high)`` in one request."""

    def __init__(self, fetch: Callable[[int, int], bytes], length: int) -> None:
        self._fetch, self._length, self._place = fetch, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._place))
        data = self._fetch(self._place, self._place + wanted) if wanted else b""
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


class Upload:
    """A file of fsspec for uploads. Divides large writes, because fsspec keeps all bytes of a write in memory."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.tell, self.flush, self.close = file.tell, file.flush, file.close
        self.failure: Exception | None = None  # of a write
        self._early: dict[int, bytes | memoryview] = {}  # by offset

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _MIB):
                self.file.write(view[start : start + _MIB])
        except Exception as error:
            self.failure = self.failure or error
            raise
        return len(view)

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write ``data`` at byte ``offset``, or keep a copy of it until the bytes before it have been written."""
        self._early[offset] = data if offset == self.tell() else bytes(data)
        while (here := self.tell()) in self._early:
            self.write(self._early.pop(here))


Place = Path | RemotePath


def place(path: str | os.PathLike[str] | RemotePath) -> Place:
    """Return ``path`` as a Path if it is on a mounted file system, else as a RemotePath."""
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    if get_protocol(text) != "file":
        return RemotePath(text)
    return Path(url_to_fs(text)[0]._strip_protocol(text) if "://" in text else text)


def names_in(folder: Place) -> list[str]:
    """Return the sorted names of the files and folders that are directly in ``folder``."""
    return sorted({os.path.relpath(str(path), str(folder)).partition("/")[0] for path in folder.iterdir()})


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a folder. In an object store a file and a folder can have the same name; the folder
    then counts only if it has a checkpoint's index."""
    found = place(path)
    if not isinstance(found, RemotePath) or str(path).startswith("http"):
        return isinstance(found, Path) and found.is_dir()
    return (found / INDEX).is_file() or (found.is_dir() and not found.is_file())
