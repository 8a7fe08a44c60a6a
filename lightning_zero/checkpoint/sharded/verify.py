"""Compares a folder with its checksums: each box of a tensor is a zip archive, with the CRC-32 of its values."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lightning_zero.checkpoint.sharded.index import EXTRA, read_index
from lightning_zero.checkpoint.sharded.slices import Slice

CHUNK_NBYTES = 16 * 1024 * 1024


class Found(NamedTuple):
    """Bytes that have a checksum and bytes that have none, and the places that are not as they were written."""

    checked: int
    unknown: int
    damage: list[str]


def check_folder(path: str | os.PathLike[str], part: int = 0, parts: int = 1) -> Found:
    """Read a folder and compare it with its checksums.

    Args:
        part, parts: look at one of so many parts only, about equally large.

    Raises:
        ConfigError: it is no whole checkpoint.
        OSError: the system's.
    """
    checked, unknown, damage = 0, 0, list[str]()
    for number, (name, file) in enumerate(_archives(Path(path))):
        if number % parts != part:
            continue
        try:
            own, other = _check_archive(file)
            checked, unknown = checked + own, unknown + other
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            damage.append(f"{name} ({error})")
    return Found(checked, unknown, damage)


def _archives(path: Path) -> Iterator[tuple[str, Any]]:
    index = read_index(path)
    seen: set[tuple[str, int]] = set()  # tied parameters are in the index several times
    for place, info in index.storage_data.items():
        if (key := (info.relative_path, info.offset)) not in seen:
            seen.add(key)
            with (path / info.relative_path).open("rb") as file:
                yield f"{info.relative_path}: {place.fqn}", Slice(file, info.offset, info.length)
    if (path / EXTRA).is_file():
        with (path / EXTRA).open("rb") as file:
            yield EXTRA, file


def _check_archive(file: io.IOBase) -> tuple[int, int]:
    checked = unknown = 0
    with zipfile.ZipFile(file) as archive:  # type: ignore[arg-type]
        for info in archive.infolist():
            with archive.open(info) as record:
                while record.read(CHUNK_NBYTES):  # raises at the end of the record if it is not what was written
                    pass
            if info.CRC or not info.file_size:
                checked += info.file_size
            else:
                unknown += info.file_size  # torch can be told to compute none
    return checked, unknown
