"""Compares checkpoints with their checksums.

A file of ours has one for every 16 MiB; one that ``torch.save`` has written elsewhere, one for every tensor, and a
folder one for every box.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from lightning_zero.checkpoint.archive import Record, records_of
from lightning_zero.checkpoint.crc import CHUNK_NBYTES, Report
from lightning_zero.checkpoint.sharded.index import EXTRA, read_index
from lightning_zero.checkpoint.sharded.slices import Slice
from lightning_zero.ranks.progress import SILENT, LongWork


def check(path: str | os.PathLike[str], part: int = 0, parts: int = 1, long_work: LongWork = SILENT) -> Report:
    """Read a checkpoint and compare it with its checksums.

    Args:
        part, parts: look at one of so many parts only, about equally large.
        long_work: shows how far it is.

    Raises:
        ConfigError: it is a folder, and no whole checkpoint.
        OSError: the system's.
        zipfile.BadZipFile: it is no file of torch.save, or was cut off.
    """
    total = Report(0, 0, [])
    compares = _parts_of_folder(Path(path)) if os.path.isdir(path) else _parts_of_file(path)
    with long_work.bytes(f"checksums of {Path(path).name}", lambda: _nbytes(Path(path)) // parts) as did:
        for number, compare in enumerate(compares):
            if number % parts == part:
                found = compare()
                total += found
                did(found.checked + found.unknown)
    return total


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


# Comparisons, each to be made before the next one is asked for.


def _parts_of_file(path: str | os.PathLike[str]) -> Iterator[Callable[[], Report]]:
    with open(path, "rb") as file:
        yield from _parts_of(file)


def _parts_of_folder(path: Path) -> Iterator[Callable[[], Report]]:
    seen: set[tuple[str, int]] = set()  # tied parameters are in the index several times
    for place, info in read_index(path).storage_data.items():
        if (key := (info.relative_path, info.offset)) not in seen:
            seen.add(key)
            with (path / info.relative_path).open("rb") as file:
                yield partial(_whole, f"{info.relative_path}: {place.fqn}", Slice(file, info.offset, info.length))
    with (path / EXTRA).open("rb") as file:
        yield partial(_whole, EXTRA, file)


def _whole(name: str, file: Any) -> Report:
    try:
        found = sum((compare() for compare in _parts_of(file)), Report(0, 0, []))
    except zipfile.BadZipFile as error:
        return Report(0, 0, [f"{name} ({error})"])
    return found._replace(damage=[f"{name}, {damage}" for damage in found.damage])


def _parts_of(file: BinaryIO) -> Iterator[Callable[[], Report]]:
    for chunk in _chunks(records_of(file)):
        yield partial(_compare, file, *chunk)


def _compare(file: BinaryIO, record: Record, start: int, nbytes: int, crc: int | None) -> Report:
    if crc is None:
        return Report(0, nbytes, [])
    low = record.start + start
    same = _crc_of(file, low, nbytes) == crc
    return Report(nbytes, 0, [] if same else [f"bytes {low} to {low + nbytes} ({record.name})"])


def _chunks(records: list[Record]) -> Iterator[tuple[Record, int, int, int | None]]:
    """Record, place in it, bytes, checksum."""
    for record in records:
        size = record.chunk_nbytes or max(1, record.nbytes)
        for number, crc in enumerate(record.crcs):
            start = number * size
            nbytes = min(size, record.nbytes - start)
            # torch can be told to compute none.
            yield record, start, nbytes, None if nbytes and not crc and len(record.crcs) == 1 else crc


def _crc_of(file: BinaryIO, start: int, nbytes: int) -> int:
    file.seek(start)
    crc, done = 0, 0
    while done < nbytes:
        data = file.read(min(CHUNK_NBYTES, nbytes - done))
        if not data:
            return -1  # the file ends here
        crc, done = zlib.crc32(data, crc), done + len(data)
    return crc


def main(arguments: list[str]) -> int:
    """``python -m lightning_zero.checkpoint verify PATH ...``"""
    if not arguments:
        print("usage: python -m lightning_zero.checkpoint verify PATH ...")
        return 2
    worst = 0
    for path in arguments:
        try:
            found = check(path)
        except Exception as error:  # whatever it is: it would not load
            print(f"{path}: no checkpoint of torch.save, or not whole: {type(error).__name__}: {error}")
            worst = 1
            continue
        if found.damage:
            worst = 1
            print(f"{path}: damaged: {', '.join(found.damage)}")
        else:
            rest = f"; {found.unknown:,} have no checksum" if found.unknown else ""
            print(f"{path}: {found.checked:,} bytes are as they were written{rest}")
    return worst
