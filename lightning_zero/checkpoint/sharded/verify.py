"""What of a folder can be compared with its checksums: each box of a tensor is a zip archive, with the CRC-32 of its
values."""

from __future__ import annotations

import errno
import io
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.crc import CHUNK_NBYTES, Report
from lightning_zero.checkpoint.sharded.index import EXTRA, read_index
from lightning_zero.checkpoint.sharded.slices import Slice


def parts_of_folder(path: Path) -> Iterator[Callable[[], Report]]:
    """Comparisons of the parts of a folder, each to be made before the next one is asked for.

    Raises:
        ConfigError: it is no whole checkpoint.
        OSError: the system's.
    """
    index = read_index(path)
    seen: set[tuple[str, int]] = set()  # tied parameters are in the index several times
    for place, info in index.storage_data.items():
        if (key := (info.relative_path, info.offset)) not in seen:
            seen.add(key)
            with (path / info.relative_path).open("rb") as file:
                yield partial(_compare, f"{info.relative_path}: {place.fqn}", Slice(file, info.offset, info.length))
    if (path / EXTRA).is_file():
        with (path / EXTRA).open("rb") as file:
            yield partial(_compare, EXTRA, file)


def _compare(name: str, file: Any) -> Report:
    try:
        return _check_archive(file)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        return Report(0, 0, [f"{name} ({error})"])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return Report(0, 0, [f"{name} ({error})"])  # a place outside of the file


def _check_archive(file: io.IOBase) -> Report:
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
    return Report(checked, unknown, [])
