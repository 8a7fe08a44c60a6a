"""Files that are whole or not there, whatever the moment at which a process is killed or a disk is full.

::

    last.ckpt                               the old one, whole all the time
    .last.ckpt.node0.4711-1.part            the new one, written beside it       (1) write, fsync
    last.ckpt                               the new one                          (2) rename, (3) fsync of the folder

The new file is written in the target's folder: a rename is atomic only within a file system, and ``$TMPDIR`` may be on
another one, too small, or missing.

A killed process leaves its ``.part`` file, which the next write into that folder removes. Who writes one holds a lock
on it, and the system drops a lock when its process dies. Where locks do not reach other nodes, a file of another node
must have rested for :data:`REST_S` too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

REST_S = 3600.0
_PART = re.compile(r"\..+\.(?P<host>[^.]+)\.\d+-\d+\.part")
_NAME_BYTES = 120  # of the target's name: file systems allow 255 in all
_numbers = itertools.count(1)
_LOCKED: set[int] = set()  # descriptors of the files that this process writes


def _let_go_in_child() -> None:
    """Close the locked files in a forked child: a data loader's worker would hold the locks for a dead trainer."""
    while _LOCKED:
        os.close(_LOCKED.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


def write_whole(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Put what ``write`` writes under the name ``path``; when this returns, a power cut does not take it away.

    Raises:
        OSError: the system's, or a RuntimeError of what ``write`` has raised: with the file and the cause. What was
            under this name before is there still.
    """
    target = Path(path)
    outer = sys.exception()
    try:
        _make_folder(target.parent)
        part = _open_part(target)
        try:
            with os.fdopen(part.fd, "wb", closefd=False) as file:
                write(file)
            # Synced before it is renamed: otherwise the new name may be on the disk before the bytes, and after a power
            # cut ``target`` would be an empty file in the place of the old checkpoint.
            os.fsync(part.fd)
            os.replace(part.path, target)
        except BaseException:
            part.path.unlink(missing_ok=True)
            raise
        finally:
            part.close()
        _sync_folder(target.parent)  # the rename itself is durable only now
    except Exception as error:
        cause = _cause(error, outer)
        text = f"{target}: the file could not be written: {type(cause).__name__}: {cause}"
        raise OSError(cause.errno, text) if isinstance(cause, OSError) else RuntimeError(text) from error
    remove_leftovers(target.parent)


class _Part:
    """A file that is being written; locked."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        _LOCKED.add(fd)

    def close(self) -> None:
        if self.fd in _LOCKED:
            _LOCKED.discard(self.fd)  # before the close: a forked child would close another file of that number
            os.close(self.fd)


def _open_part(target: Path) -> _Part:
    while True:
        path = target.with_name(part_name(target.name))
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:  # left by a killed process: in a container that starts again all have the same ids
            continue
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        # Another process may have taken the file for a leftover, and removed it, before it was locked. It has no name
        # then that could be changed to the target's.
        if os.fstat(fd).st_nlink:
            return _Part(path, fd)
        os.close(fd)


def part_name(name: str) -> str:
    """The name of a file that is being written. It is one that Lightning does not take for a checkpoint.

    Lightning looks for ``hpc_ckpt_`` and ``last`` anywhere in a name. So this one begins with a dot and has no ``_``.
    """
    stem = name.replace("_", "-").encode()[:_NAME_BYTES].decode(errors="ignore")
    return f".{stem}.{_host()}.{os.getpid()}-{next(_numbers)}.part"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60] or "host"


def remove_leftovers(folder: Path) -> None:
    """Remove files that dead processes have begun in ``folder``, in which a file was made or renamed just now."""
    for path in folder.glob(".*.part"):
        match = _PART.fullmatch(path.name)
        if match is not None:
            with contextlib.suppress(OSError):  # somebody writes it, or has removed it
                _remove_if_dead(path, here=match["host"] == _host())


def _remove_if_dead(path: Path, *, here: bool) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        now = path.parent.stat().st_mtime  # by the file system's clock, which is that of all times of files
        if here or now - os.fstat(fd).st_mtime > REST_S:
            path.unlink()
    finally:
        os.close(fd)


def _make_folder(folder: Path) -> None:
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _sync_folder(made.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _cause(error: BaseException, outer: BaseException | None) -> BaseException:
    """The system's own error, under what ``torch.save`` makes of it while it unwinds."""
    found: BaseException | None = error
    while found is not None and found is not outer:
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return error
