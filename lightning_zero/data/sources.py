"""Find the files of ``data.path``. Imports no torch (which takes seconds), so that a wrong path fails at once."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lightning_zero.settings import ConfigError

HEAD_NBYTES = 8192  # a file without NUL in its first bytes is text
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class Source(NamedTuple):
    path: Path
    nbytes: int


def check_path(path: str | None) -> None:
    """Raise ConfigError if nothing exists at ``path``. No file is read."""
    if path is None:
        return
    text = os.path.expanduser(path)
    if os.path.isfile(text) or os.path.isdir(text) or any(map(os.path.isfile, glob.iglob(text, recursive=True))):
        return
    what = "the pattern matches no file" if glob.has_magic(text) else "it does not exist"
    raise ConfigError(
        f"data.path: expected a file, a folder or a glob of text, got {path!r}: {what} "
        f"(seen from {os.getcwd()}). Change data.path."
    )


def find_sources(path: str | None) -> list[Source]:
    """Return the files of ``path``, sorted; None: Python's standard library. Raise ConfigError if there are none."""
    if path is None:
        return _stat(_standard_library())
    check_path(path)
    text = os.path.expanduser(path)
    if os.path.isfile(text):
        files: Iterable[Path] = [Path(text)]
    elif os.path.isdir(text):
        shown = (f for f in Path(text).rglob("*") if not any(p[0] == "." for p in f.relative_to(text).parts))
        files = [f for f in shown if f.is_file() and b"\0" not in _head(f)]
    else:
        files = [Path(f) for f in glob.glob(text, recursive=True) if os.path.isfile(f)]
    sources = _stat(files)
    if not sources:
        raise ConfigError(f"data.path: expected files of text in the folder {path!r}, found none. Change data.path.")
    return sources


def _standard_library() -> list[Path]:
    root = sysconfig.get_path("stdlib")
    files: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in SKIPPED_FOLDERS]  # skip these folders: some are large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ConfigError(
            f"data.path: expected Python sources, the default text, in {root}, found none. Set data.path to a file, "
            "folder or glob of text."
        )
    return files


def _head(path: Path) -> bytes:
    with open_source(path) as file:
        return file.read(HEAD_NBYTES)


def open_source(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {path}: {error.strerror}. Change data.path.") from error


def _stat(files: Iterable[Path]) -> list[Source]:
    found = []
    for file in sorted({f.absolute() for f in files}):
        if not os.access(file, os.R_OK):
            raise ConfigError(f"data.path: cannot read {file}: permission denied. Change data.path.")
        found.append(Source(file, file.stat().st_size))
    return found
