"""Compare the bytes of checkpoints with the checksums in them. A one-file checkpoint has a checksum for each record of
its zip format. In a checkpoint folder each box of a tensor is stored in this format, with checksums."""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from lightning_zero.checkpoint.archive import CHUNK_NBYTES, Record, records_of
from lightning_zero.checkpoint.sharded.index import extra_of, read_index
from lightning_zero.checkpoint.sharded.read import Slice
from lightning_zero.ranks.progress import SILENT, LongWork
from lightning_zero.tiers.remote import Place, place


class Report(NamedTuple):
    """The result of a comparison with checksums.

    Attributes:
        checked: number of bytes that have a checksum.
        unknown: number of bytes without a checksum.
        damage: descriptions of the damaged records.
    """

    checked: int
    unknown: int
    damage: list[str]

    def __add__(self, other: Report) -> Report:  # type: ignore[override]
        return Report(self.checked + other.checked, self.unknown + other.unknown, [*self.damage, *other.damage])


NOTHING = Report(0, 0, [])


def check(path: str | Place, part: int = 0, parts: int = 1, long_work: LongWork = SILENT) -> Report:
    """Compare the checkpoint at ``path`` with its checksums and return a report. If ``parts`` ranks share the work,
    rank ``part`` compares and reports every ``parts``-th record of a file or box of a folder. Raises ConfigError for a
    folder that is not a complete checkpoint, and zipfile.BadZipFile for a file that torch.save has not written or that
    is truncated. OSErrors are passed on."""
    path, total = place(path), NOTHING
    files: list[Any] = list(path.iterdir()) if path.is_dir() else [path]
    with long_work.bytes(
        f"checksums of {path.name}", lambda: sum(file.stat().st_size for file in files) // parts
    ) as did:
        for number, compare in enumerate(_comparisons(path)):
            if number % parts == part:
                report = compare()
                total += report
                did(report.checked + report.unknown)
    return total


def _comparisons(path: Place) -> Iterator[Callable[[], Report]]:
    """Yield, for each record of a file or each box of a folder, a function that compares its bytes with their checksums
    and returns a report. Call each function before taking the next one, because the next step may close the file."""
    if not path.is_dir():
        with path.open("rb") as file:
            for record in records_of(file):
                yield partial(_compare, file, record)
        return
    index = read_index(path)
    # Tied parameters are in the index several times.
    parts = {(info.relative_path, info.offset): (where, info) for where, info in index.storage_data.items()}
    for name, of_file in itertools.groupby(sorted(parts), key=lambda part: part[0]):
        with (path / name).open("rb") as file:
            for where, info in map(parts.__getitem__, of_file):
                yield partial(_all_of, f"{name}: {where.fqn}", Slice(file, info.offset, info.length))
    with (path / extra_of(index)).open("rb") as file:
        yield partial(_all_of, extra_of(index), file)


def _all_of(name: str, file: Any) -> Report:
    try:
        report = sum((_compare(file, record) for record in records_of(file)), NOTHING)
    except zipfile.BadZipFile as error:
        return Report(0, 0, [f"{name} ({error})"])
    return report._replace(damage=[f"{name}, {damage}" for damage in report.damage])


def _compare(file: Any, record: Record) -> Report:
    if record.nbytes and not record.crc:  # torch can be told to compute none
        return Report(0, record.nbytes, [])
    file.seek(record.start)
    crc, left = 0, record.nbytes
    while left and (data := file.read(min(CHUNK_NBYTES, left))):
        crc, left = zlib.crc32(data, crc), left - len(data)
    if left or crc != record.crc:
        return Report(record.nbytes, 0, [f"bytes {record.start} to {record.start + record.nbytes} ({record.name})"])
    return Report(record.nbytes, 0, [])


def main(arguments: list[str]) -> int:
    """Run ``python -m lightning_zero.checkpoint verify PATH ...``, where ``arguments`` are the paths. Return the exit
    code: 0 if all checkpoints agree with their checksums, 1 if one is damaged, 2 if no path is given."""
    if not arguments:
        print("usage: python -m lightning_zero.checkpoint verify PATH ...")
        return 2
    worst = 0
    for path in arguments:
        try:
            found = check(path)
        except Exception as error:  # whatever it is, the checkpoint would not load
            print(f"{path}: not a whole checkpoint of torch.save: {type(error).__name__}: {error}")
            worst = 1
            continue
        if found.damage:
            worst = 1
            print(f"{path}: damaged: {', '.join(found.damage)}")
        else:
            rest = f"; {found.unknown:,} have no checksum" if found.unknown else ""
            print(f"{path}: {found.checked:,} bytes agree with their checksums{rest}")
    return worst
