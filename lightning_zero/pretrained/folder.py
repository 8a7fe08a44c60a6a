"""Read ranges of the safetensors files of a folder, which may lie in an object store."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.planning.boxes import boxes
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.remote import Place, RemotePath, names_in, place

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
KEPT_OPEN_NBYTES = 64 * 1024 * 1024  # reopen a file after reading so much: pages of a mapping count as process memory
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


class _Stored(NamedTuple):
    file: Place
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsFolder:
    """Reads ``model.safetensors`` in a folder, else the files that its index names, else all ``*.safetensors`` files.
    Raises ConfigError if there are none."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = place(os.path.expanduser(path))
        self._places: dict[str, _Stored] = {}
        self._open: tuple[Place, Any] | None = None
        self._read_nbytes = 0
        for file in self._files():
            handle = self._opened(file)
            for key in handle.keys():  # noqa: SIM118, this is no dict
                found = handle.get_slice(key)
                if (name := found.get_dtype()) not in DTYPES:
                    raise ConfigError(
                        f"zero.init_from: expected a dtype of PyTorch, got {name} for {key} in {file}. Change "
                        "zero.init_from."
                    )
                self._places[key] = _Stored(file, tuple(found.get_shape()), DTYPES[name])
        self.keys = list(self._places)

    def _files(self) -> list[Place]:
        if not self.path.is_dir():
            raise ConfigError(f"zero.init_from: expected a folder, got {self.path}. Change zero.init_from.")
        if (self.path / SINGLE).is_file():
            return [self.path / SINGLE]
        if (self.path / INDEX).is_file():
            try:
                names = sorted(set(json.loads((self.path / INDEX).read_bytes())["weight_map"].values()))
                # Files of hubs are links out of the folder, so names are checked and not the paths they lead to.
                if outside := [name for name in names if name != os.path.basename(name) or name in ("", "..")]:
                    raise ValueError(f"it names {outside[0]}, which is not in the folder")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(_damaged(self.path / INDEX, error)) from error
            for name in names:
                if not (self.path / name).is_file():
                    raise ConfigError(
                        f"zero.init_from: expected {name} in {self.path}, where {INDEX} names it, got no such file. "
                        "Complete the folder, or change zero.init_from."
                    )
            return [self.path / name for name in names]
        if found := [name for name in names_in(self.path) if name.endswith(".safetensors")]:
            parts = re.findall(r"-of-(\d+)\.safetensors$", "\n".join(found), re.MULTILINE)
            if parts and len(parts) < int(parts[0]):
                got = f"expected {int(parts[0])} numbered files in {self.path}, got {len(parts)}"
                raise ConfigError(f"zero.init_from: {got}. Complete the folder, or change zero.init_from.")
            return [self.path / name for name in found]
        raise ConfigError(
            f"zero.init_from: expected *.safetensors files in {self.path}, got none. Save the model in that format "
            "(save_pretrained does), or change zero.init_from."
        )

    def _opened(self, file: Place) -> Any:
        from safetensors import SafetensorError, safe_open

        if self._open is None or self._open[0] != file or self._read_nbytes > KEPT_OPEN_NBYTES:
            self._open, self._read_nbytes = None, 0
            try:
                opened = _RemoteFile(file) if isinstance(file, RemotePath) else safe_open(file, framework="pt")
                self._open = file, opened
            except (SafetensorError, OSError, ValueError) as error:
                raise ConfigError(_damaged(file, error)) from error
        return self._open[1]

    def tensor(self, key: str) -> StoredTensor:
        stored = self._places[key]
        return StoredTensor(stored.shape, stored.dtype, lambda start, stop, order: self._read(key, start, stop, order))

    def _read(self, key: str, start: int, stop: int, order: Sequence[int] | None) -> Tensor:
        stored = self._places[key]
        dims = tuple(order) if order is not None else tuple(range(len(stored.shape)))
        parts = self._opened(stored.file).get_slice(key)
        flat = torch.empty(stop - start, dtype=stored.dtype)
        for box in boxes(stored.shape, start, stop, dims):
            # Slices of the mapped file read only the pages they need.
            part = parts[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
            low = box.start - start
            flat[low : low + box.numel].view([box.sizes[d] for d in dims]).copy_(part.permute(dims))
        self._read_nbytes += flat.nbytes
        return flat


class _RemoteFile:
    """A safetensors file in an object store, with the methods of ``safe_open`` that :class:`SafetensorsFolder` calls.
    The file has the length of its header in 8 bytes, the header as JSON, and the tensors' bytes in row-major order."""

    def __init__(self, path: RemotePath) -> None:
        self._file = path.open("rb")
        length = int.from_bytes(self._file.read(8), "little")
        self._header: dict[str, Any] = json.loads(self._file.read(length))
        self._header.pop("__metadata__", None)
        self._begin = 8 + length

    def keys(self) -> list[str]:
        return list(self._header)

    def get_slice(self, key: str) -> _RemoteSlice:
        entry = self._header[key]
        return _RemoteSlice(self._file, self._begin + entry["data_offsets"][0], entry["dtype"], entry["shape"])


@dataclass(frozen=True)
class _RemoteSlice:
    file: Any
    begin: int
    dtype: str
    shape: list[int]

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, box: Any) -> Tensor:
        """Return the values in ``box``, a tuple of slices. One request reads from the first value to the last."""
        dtype, strides = DTYPES[self.dtype], [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first = sum(part.start * stride for part, stride in zip(box, strides, strict=True))
        last = sum((part.stop - 1) * stride for part, stride in zip(box, strides, strict=True))
        self.file.seek(self.begin + first * dtype.itemsize)
        data = bytearray(self.file.read((last - first + 1) * dtype.itemsize))
        return torch.frombuffer(data, dtype=dtype).as_strided([part.stop - part.start for part in box], strides)


def _damaged(file: Place, error: Exception) -> str:
    return (
        f"zero.init_from: expected a whole file, got {file}, which cannot be read: {type(error).__name__}: {error}. "
        "Replace the file, or change zero.init_from."
    )
