"""Compares checkpoints with their checksums.

A file of ours has one for every 16 MiB; one that ``torch.save`` has written elsewhere, one for every tensor, and a
folder one for every box.
"""

from __future__ import annotations

import errno
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lightning_zero.checkpoint.archive import Record, records_of
from lightning_zero.checkpoint.crc import CHUNK_NBYTES, Report
from lightning_zero.checkpoint.sharded.verify import parts_of_folder
from lightning_zero.config import ConfigError
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
    compares = parts_of_folder(Path(path)) if os.path.isdir(path) else _parts_of_file(path)
    with long_work.bytes(f"checksums of {Path(path).name}", lambda: _nbytes(Path(path)) // parts) as did:
        for number, compare in enumerate(compares):
            if number % parts == part:
                found = compare()
                total += found
                did(found.checked + found.unknown)
    return total


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def _parts_of_file(path: str | os.PathLike[str]) -> Iterator[Callable[[], Report]]:
    with open(path, "rb") as file:
        try:
            records = records_of(file)
        except zipfile.BadZipFile:
            raise
        except Exception as error:  # of a damaged table, zipfile raises almost any
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is a place outside of the file
                raise
            raise zipfile.BadZipFile(f"its table of records: {type(error).__name__}: {error}") from error
        for chunk in _chunks(records):
            yield partial(_compare, file.fileno(), *chunk)


def _compare(fd: int, record: Record, start: int, nbytes: int, crc: int | None) -> Report:
    if crc is None:
        return Report(0, nbytes, [])
    low = record.start + start
    same = _crc_of(fd, low, nbytes) == crc
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


def _crc_of(fd: int, start: int, nbytes: int) -> int:
    crc, done = 0, 0
    while done < nbytes:
        data = os.pread(fd, min(CHUNK_NBYTES, nbytes - done), start + done)
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
        except (OSError, zipfile.BadZipFile, ConfigError) as error:
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
