"""Safetensors files whose bytes several processes write in any order.

::

    8 bytes: length of the header | header: JSON of names, dtypes, shapes, places | values, row-major

The safetensors library can write only tensors that are all in memory. Here a tensor's place follows from all names and
shapes, files are made in full length, and each rank writes its ranges of the tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import WriteAt
from lightning_zero.checkpoint.durable import naming, write_at, written_aside
from lightning_zero.checkpoint.hugging_face.names import Group
from lightning_zero.planning.layout import round_up
from lightning_zero.pretrained.folder import DTYPES, INDEX
from lightning_zero.settings import ConfigError
from lightning_zero.tiers import remote
from lightning_zero.tiers.pages import byte_view

NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 1 << 22
_ALIGN = 8

_SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def parse_dtype(key: str, value: str | torch.dtype | None) -> torch.dtype | None:
    """Return the floating-point dtype that ``value`` is or names, None for None. Raises ConfigError otherwise."""
    found = _SHORT.get(value, getattr(torch, value, None)) if isinstance(value, str) else value
    if value is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise ConfigError(f"{key}: expected one of {', '.join(_SHORT)}, got {value!r}. Change {key}.")


class Place(NamedTuple):
    file: str
    start: int  # bytes
    dtype: torch.dtype


class Files:
    """Where ``tensors`` (on meta, by file and name) are in files of ``shard_nbytes``, a file by itself being split. A
    larger tensor has its own file. A place is found by the file's folder and the tensor's name, joined by "/"."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], shard_nbytes: int) -> None:
        self.names: list[str] = []
        self.places: dict[str, Place] = {}
        self.heads: dict[str, tuple[bytes, int]] = {}  # header and size of each file
        for file, own in tensors.items():
            self._divide(file, own, shard_nbytes)

    def _divide(self, file: str, tensors: Mapping[str, Tensor], shard_nbytes: int) -> None:
        self._nbytes, left = sum(tensor.nbytes for tensor in tensors.values()), shard_nbytes
        groups: list[dict[str, Tensor]] = [{}]
        for name, tensor in sorted(tensors.items()):
            if groups[-1] and tensor.nbytes > left:
                groups.append({})
                left = shard_nbytes
            groups[-1][name] = tensor
            left -= tensor.nbytes
        base = file.removesuffix(".safetensors")
        names = [f"{base}-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        names = names if len(groups) > 1 else [file]
        self.names += names
        for name, group in zip(names, groups, strict=True):
            self._lay_out(name, group)

    def _lay_out(self, file: str, group: Mapping[str, Tensor]) -> None:
        # Wide elements first, so that all are aligned without gaps, which the format forbids.
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in sorted(group.items(), key=lambda item: -item[1].dtype.itemsize):
            if tensor.dtype not in NAMES:
                raise ConfigError(
                    f"{name}: expected a dtype that safetensors supports, got {tensor.dtype}. Change dtype=."
                )
            places = [offset, offset + tensor.nbytes]
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
            offset += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (round_up(len(text), _ALIGN) - len(text))
        head = struct.pack("<Q", len(text)) + text
        self.heads[file] = head, len(head) + offset
        folder = file.rpartition("/")[0]
        for name, tensor in group.items():
            self.places[f"{folder}/{name}" if folder else name] = Place(
                file, len(head) + header[name]["data_offsets"][0], tensor.dtype
            )

    def make(self, folder: Path) -> None:
        """Make all files in full length, with headers and no values; also an index if there are several files."""
        for name, (head, size) in self.heads.items():
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("wb") as file:
                file.write(head)
                file.truncate(size)
        self.make_index(folder)

    def make_index(self, folder: remote.Place) -> None:
        if len(self.names) > 1:
            index = {
                "metadata": {"total_size": self._nbytes},
                "weight_map": {name: place.file for name, place in sorted(self.places.items())},
            }
            (folder / INDEX).write_bytes((json.dumps(index, indent=2) + "\n").encode())

    def in_order(self, groups: Iterable[Group]) -> list[Group]:
        """Return ``groups`` in the order of their tensors in the files."""
        return sorted(groups, key=lambda group: min((self.places[name][:2] for name in group.results), default=("", 0)))


class Writer:
    """A context manager that writes ranges of tensors into existing files in ``folder``. Each process makes its own."""

    def __init__(self, files: Files, folder: Path) -> None:
        self._files, self._folder = files, folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def close(self) -> None:
        for fd in self._open.values():
            os.fsync(fd)
        self.__exit__()

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write ``values`` [n], cast to the file's dtype, as the tensor's row-major elements from ``start`` on."""
        place = self._files.places[name]
        write, dtype = self._opened(place.file), place.dtype
        for low in range(0, values.numel(), CHUNK):
            part = values[low : low + CHUNK].detach().to(device="cpu", dtype=dtype).contiguous()
            write(byte_view(part), place.start + (start + low) * dtype.itemsize)

    def write_all(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.write(name, 0, value.reshape(-1))

    def _opened(self, file: str) -> WriteAt:
        if file not in self._open:
            self._open[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CLOEXEC)
        return partial(write_at, self._open[file])


class _Uploads(Writer):
    """Writes the files into a folder of an object store, each from its first byte to its last. ``stack``: at its exit
    they appear."""

    def __init__(self, files: Files, folder: remote.RemotePath, stack: contextlib.ExitStack) -> None:
        super().__init__(files, Path())
        self._target, self._stack = folder, stack
        self._uploads: dict[str, remote.Upload] = {}

    def _opened(self, file: str) -> WriteAt:
        head, nbytes = self._files.heads[file]
        if (upload := self._uploads.get(file)) is None:
            upload = self._uploads[file] = self._stack.enter_context((self._target / file).uploading(nbytes))
            upload.write(head)

        def write(data: memoryview, offset: int) -> None:
            upload.write_at(data, offset)
            if upload.tell() == nbytes:
                upload.close()  # it needs memory no longer

        return write

    def finish(self) -> None:
        """Begin files without values. Raise RuntimeError if values are missing."""
        for file, (_, nbytes) in self._files.heads.items():
            self._opened(file)
            if (found := self._uploads[file].tell()) != nbytes:
                raise RuntimeError(f"{file}: only {found:,} of {nbytes:,} bytes were written")


@contextlib.contextmanager
def written(files: Files, target: remote.Place) -> Iterator[tuple[Path, Writer]]:
    """Yield a local folder for small files, and a writer of ``files``. At the end all of them are in the new folder
    ``target``; if the body fails, none. In an object store what makes the model loadable comes last."""
    if not isinstance(target, remote.RemotePath):
        with written_aside(target, folder=True) as part, Writer(files, part.path) as writer:
            files.make(part.path)
            yield part.path, writer
        return
    with naming(target, folder=True), tempfile.TemporaryDirectory() as made:
        small = Path(made)
        with contextlib.ExitStack() as stack:
            uploads = _Uploads(files, target, stack)
            yield small, uploads
            uploads.finish()
            for path in small.rglob("*"):
                if path.is_file():
                    (target / str(path.relative_to(small))).write_bytes(path.read_bytes())
        files.make_index(target)
