"""An object store for tests, as a file system of fsspec that several processes use (:func:`bucket`).

An object appears whole when its upload ends; nothing is renamed; folders are prefixes of names; listings are cached by
each process. An object is a file whose name is the quoted key."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


def bucket(folder: Path) -> str:
    """Return the address of the store whose objects are files in ``folder``."""
    folder.mkdir(exist_ok=True)
    return f"store://{str(folder).replace('/', ':')}"


def keys(address: str) -> list[str]:
    """Return the names of all objects below ``address``, as they are now."""
    fs, root = fsspec.core.url_to_fs(address)
    fs.invalidate_cache()
    return sorted(path.removeprefix(f"{root}/") for path in fs.find(root))


class ObjectStore(AbstractFileSystem):
    protocol = "store"
    before: Callable[[str, str], None] = staticmethod(lambda act, key: None)  # called before anything changes

    def _file(self, path: str) -> Path:
        folder, _, key = self._strip_protocol(path).partition("/")
        return Path(folder.replace(":", "/"), quote(key, safe=""))

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            folder, _, prefix = path.partition("/")
            found: dict[str, Any] = {}
            for entry in os.scandir(folder.replace(":", "/")):
                key = unquote(entry.name)
                lies_there = not prefix or key == prefix or key.startswith(f"{prefix}/")
                if entry.name.startswith(".upload") or not lies_there:
                    continue
                below = key.removeprefix(prefix).lstrip("/").partition("/")
                name = f"{path}/{below[0]}" if below[0] else path
                kind = "directory" if below[1] else "file"
                if kind == "directory" and name in found:
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    stat = entry.stat()
                    found[name] = {"name": name, "size": stat.st_size, "type": kind, "mtime": stat.st_mtime}
            self.dircache[path] = list(found.values())
        listed = self.dircache[path]
        if not listed:
            raise FileNotFoundError(path)
        return listed if detail else [entry["name"] for entry in listed]

    def modified(self, path: str) -> Any:
        if (found := self.info(path))["type"] == "directory":
            raise IsADirectoryError(path)
        return datetime.datetime.fromtimestamp(found["mtime"], datetime.UTC)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        return _Object(self, path, mode, block_size or 5 * 2**20, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with self._file(path).open("rb") as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))

    def _rm(self, path: str) -> None:
        type(self).before("remove", self._strip_protocol(path))
        self.invalidate_cache()
        self._file(path).unlink()

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


class _Object(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        with self.fs._file(self.path).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def _initiate_upload(self) -> None:
        type(self.fs).before("upload", self.path)
        target = self.fs._file(self.path)
        self._parts = target.with_name(f".upload-{os.getpid()}-{id(self)}")
        self._parts.write_bytes(b"")

    def _upload_chunk(self, final: bool = False) -> bool:
        with self._parts.open("ab") as file:
            file.write(self.buffer.getbuffer())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        type(self.fs).before("complete", self.path)
        self.fs.invalidate_cache()
        os.replace(self._parts, self.fs._file(self.path))

    def discard(self) -> None:
        self._parts.unlink()


fsspec.register_implementation("store", ObjectStore, clobber=True)
