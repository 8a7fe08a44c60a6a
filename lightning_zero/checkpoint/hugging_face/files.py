"""Safetensors files whose bytes several processes write in any order.

::

    8 bytes: length of the header | header: JSON of names, dtypes, shapes, places | values, row-major

The safetensors library can write only tensors that are all in memory. Here a tensor's place follows from all names and
shapes, files are made in full length, and each rank writes its ranges of the tensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.durable import write_at
from lightning_zero.planning.layout import round_up
from lightning_zero.pretrained.folder import DTYPES, INDEX, SINGLE
from lightning_zero.settings import ConfigError
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
    raise ConfigError(f"{key}: expected one of {', '.join(_SHORT)}, got {value!r}. Change it.")


class Place(NamedTuple):
    file: str
    start: int  # bytes
    dtype: torch.dtype


class Files:
    """Where ``tensors`` (on meta, by name) are in files of ``shard_nbytes``. A larger tensor has its own file."""

    def __init__(self, tensors: Mapping[str, Tensor], shard_nbytes: int, stem: str = SINGLE) -> None:
        self._nbytes, left = sum(tensor.nbytes for tensor in tensors.values()), shard_nbytes
        groups: list[dict[str, Tensor]] = [{}]
        for name, tensor in sorted(tensors.items()):
            if groups[-1] and tensor.nbytes > left:
                groups.append({})
                left = shard_nbytes
            groups[-1][name] = tensor
            left -= tensor.nbytes
        base = stem.removesuffix(".safetensors")
        names = [f"{base}-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        self.names = names if len(groups) > 1 else [stem]
        self.places: dict[str, Place] = {}
        self._heads: dict[str, tuple[bytes, int]] = {}  # header and size of each file
        for name, group in zip(self.names, groups, strict=True):
            self._lay_out(name, group)

    def _lay_out(self, file: str, group: Mapping[str, Tensor]) -> None:
        # Wide elements first, so that all are aligned without gaps, which the format forbids.
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in sorted(group.items(), key=lambda item: -item[1].dtype.itemsize):
            if tensor.dtype not in NAMES:
                raise ConfigError(f"{name}: expected a dtype that safetensors files know, got {tensor.dtype}.")
            places = [offset, offset + tensor.nbytes]
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
            offset += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (round_up(len(text), _ALIGN) - len(text))
        head = struct.pack("<Q", len(text)) + text
        self._heads[file] = head, len(head) + offset
        for name, tensor in group.items():
            self.places[name] = Place(file, len(head) + header[name]["data_offsets"][0], tensor.dtype)

    def make(self, folder: Path) -> None:
        """Make all files in full length, with headers and no values; also an index if there are several files."""
        for name, (head, size) in self._heads.items():
            with (folder / name).open("wb") as file:
                file.write(head)
                file.truncate(size)
        if len(self.names) > 1:
            index = {
                "metadata": {"total_size": self._nbytes},
                "weight_map": {name: place.file for name, place in sorted(self.places.items())},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


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
        if place.file not in self._open:
            self._open[place.file] = os.open(self._folder / place.file, os.O_WRONLY | os.O_CLOEXEC)
        dtype = place.dtype
        for low in range(0, values.numel(), CHUNK):
            part = values[low : low + CHUNK].detach().to(device="cpu", dtype=dtype).contiguous()
            write_at(self._open[place.file], byte_view(part), place.start + (start + low) * dtype.itemsize)

    def write_whole(self, name: str, value: Tensor) -> None:
        self.write(name, 0, value.reshape(-1))
