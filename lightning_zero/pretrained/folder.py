"""Read ranges of the safetensors files of a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.planning.boxes import boxes
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.settings import ConfigError

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


class _Place(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsFolder:
    """Reads ``model.safetensors`` in a folder, else the files that its index names, else all ``*.safetensors`` files.
    Raises ConfigError if there are none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, _Place] = {}
        self._open: tuple[Path, Any] | None = None
        self._read_nbytes = 0
        for file in self._files():
            handle = self._opened(file)
            for key in handle.keys():  # noqa: SIM118, this is no dict
                found = handle.get_slice(key)
                if (name := found.get_dtype()) not in DTYPES:
                    raise ConfigError(f"zero.init_from: {file} holds {key} as {name}, which PyTorch has not.")
                self._places[key] = _Place(file, tuple(found.get_shape()), DTYPES[name])
        self.keys = list(self._places)

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            raise ConfigError(f"zero.init_from: expected a folder, got {self.path}. Change zero.init_from.")
        if (self.path / SINGLE).is_file():
            return [self.path / SINGLE]
        if (self.path / INDEX).is_file():
            try:
                names = sorted(set(json.loads((self.path / INDEX).read_text())["weight_map"].values()))
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
        if found := sorted(self.path.glob("*.safetensors")):
            return found
        raise ConfigError(
            f"zero.init_from: expected *.safetensors files in {self.path}, got none. Save the model in that format "
            "(save_pretrained does), or change zero.init_from."
        )

    def _opened(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if self._open is None or self._open[0] != file or self._read_nbytes > KEPT_OPEN_NBYTES:
            self._open, self._read_nbytes = None, 0
            try:
                self._open = file, safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(_damaged(file, error)) from error
        return self._open[1]

    def tensor(self, key: str) -> StoredTensor:
        place = self._places[key]
        return StoredTensor(place.shape, place.dtype, lambda start, stop, order: self._read(key, start, stop, order))

    def _read(self, key: str, start: int, stop: int, order: Sequence[int] | None) -> Tensor:
        place = self._places[key]
        dims = tuple(order) if order is not None else tuple(range(len(place.shape)))
        parts = self._opened(place.file).get_slice(key)
        flat = torch.empty(stop - start, dtype=place.dtype)
        for box in boxes(place.shape, start, stop, dims):
            # Slices of the mapped file read only the pages they need.
            part = parts[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
            low = box.start - start
            flat[low : low + box.numel].view([box.sizes[d] for d in dims]).copy_(part.permute(dims))
        self._read_nbytes += flat.nbytes
        return flat


def _damaged(file: Path, error: Exception) -> str:
    return (
        f"zero.init_from: expected a whole file, got {file}, which cannot be read: {type(error).__name__}: {error}. "
        "Replace it, or change zero.init_from."
    )
