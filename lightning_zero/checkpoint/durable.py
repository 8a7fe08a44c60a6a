"""Files and folders that are whole or not there, whatever the moment at which a process is killed or a disk is full.

::

    last.ckpt                               the old one, whole all the time
    .last.ckpt.node0.4711-1.part            the new one, written beside it       (1) write, fsync
    last.ckpt                               the new one                          (2) rename, (3) fsync of the folder

The new one is written in the target's folder: a rename is atomic only within a file system, and ``$TMPDIR`` may be on
another one, too small, or missing.

A killed process leaves its ``.part``, which the next write into that folder removes. Who writes one holds a lock on it,
and the system drops a lock when its process dies. Where locks do not reach other nodes, that of another node must have
rested for :data:`REST_S` too; where there are no locks at all, any.

A name cannot be changed to that of a folder with something in it, so old and new exchange their names (Linux). On a
file system that cannot exchange, the old one steps aside as ``.old`` for a moment, and gets its name back with the next
write if the new one has not come.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

REST_S = 3600.0
_PART = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)\.\d+-\d+\.(?P<kind>part|old)")
_ROOM, _PLACE = "Free some space, or save to another disk.", "Save to a folder that can be written."
_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR), _PLACE),
}
_NAME_BYTES = 120  # of the target's name: file systems allow 255 in all
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # EBADF: of a folder, on NFS
_EXCHANGE, _AT_FDCWD = 2, -100
_SYNC_WRITE = 2  # of sync_file_range: begin to write what is not being written yet
_LIBC = ctypes.CDLL(None)
_numbers = itertools.count(1)
_LOCKED: set[int] = set()  # descriptors of what this process writes


def _let_go_in_child() -> None:
    """Close what is locked in a forked child: a data loader's worker would hold the locks for a dead trainer."""
    while _LOCKED:
        os.close(_LOCKED.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


class Part:
    """A file or folder that is being written; locked.

    Attributes:
        path: where it is, until it gets its name.
        fd: of the file, for reading and writing; of the folder.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        _LOCKED.add(fd)

    def close(self) -> None:
        if self.fd in _LOCKED:
            _LOCKED.discard(self.fd)  # before the close: a forked child would close another file of that number
            os.close(self.fd)


@contextlib.contextmanager
def written_aside(path: str | os.PathLike[str], *, folder: bool = False) -> Iterator[Part]:
    """Make an empty file, or folder, beside ``path``, to be written inside; afterwards it has the name ``path``.

    Other processes may write to it too, while this one is inside. They sync what they write; this one syncs all that it
    finds. When this has left, a power cut does not take it away.

    Raises:
        OSError: the system's, or a RuntimeError of what was raised inside: with the file and the cause. What was under
            this name before is there still, and nothing else is.
    """
    with naming(Path(path), folder=folder), aside(path, folder=folder) as part:
        yield part


@contextlib.contextmanager
def aside(path: str | os.PathLike[str], *, folder: bool = False, keep: bool = True) -> Iterator[Part]:
    """As :func:`written_aside`, with errors as they are.

    Args:
        keep: else it gets no name, and is removed afterwards.
    """
    target = Path(path)
    _make_folder(target.parent)
    part = _open_part(target, folder)
    try:
        yield part
        if keep:
            # Synced before it is renamed: otherwise the new name may be on the disk before the bytes, and after a power
            # cut ``target`` would be an empty file in the place of the old checkpoint.
            _sync(part.path)
            _replace(part.path, target)
            sync_folder(target.parent)  # the rename itself is durable only now
    finally:
        _remove(part.path)  # after an exchange of names, the old one
        part.close()
    remove_leftovers(target.parent)


def leave(stack: contextlib.ExitStack, error: BaseException | None) -> None:
    """Leave what ``stack`` has entered as after ``error``, which takes an unfinished file away."""
    if error is None:
        stack.close()
        return
    with contextlib.suppress(BaseException):  # the error itself, or with more words
        stack.__exit__(type(error), error, error.__traceback__)


@contextlib.contextmanager
def naming(target: Path, *, folder: bool = False) -> Iterator[None]:
    """Have what is raised inside name what could not be written, and the cause.

    Raises:
        OSError: the system's, or a RuntimeError of whatever else.
    """
    outer = sys.exception()
    try:
        yield
    except Exception as error:
        if str(target) in str(error):
            raise
        cause = _cause_of(error, outer)
        way_out = _WAYS_OUT.get(cause.errno or 0) if isinstance(cause, OSError) else None
        text = f"{target}: the {'folder' if folder else 'file'} could not be written: {type(cause).__name__}: {cause}"
        text += f". {way_out}" if way_out else ""
        raise OSError(cause.errno, text) if isinstance(cause, OSError) else RuntimeError(text) from error


def link(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Have ``path`` lead to ``target``, from one moment to the next, whatever it was before."""
    where, is_there = Path(path), False
    while not is_there:
        made = where.with_name(part_name(where.name))
        made.symlink_to(os.path.relpath(target, where.parent))
        try:
            _replace(made, where)
            is_there = True
        except FileNotFoundError:  # another process has taken it for a leftover: a link cannot be locked
            pass
        finally:
            _remove(made)  # after an exchange of names, the folder that was there
    sync_folder(where.parent)


def _open_part(target: Path, folder: bool) -> Part:
    while True:
        path = target.with_name(part_name(target.name))
        try:
            if folder:
                path.mkdir()
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            else:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:  # left by a killed process: in a container that starts again all have the same ids
            continue
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        # Another process may have taken it for a leftover, and removed it, before it was locked. It has no name then
        # that could be changed to the target's.
        if os.fstat(fd).st_nlink:
            return Part(path, fd)
        os.close(fd)


def part_name(name: str) -> str:
    """The name of what is being written. It is one that Lightning does not take for a checkpoint.

    Lightning looks for ``hpc_ckpt_`` and ``last`` anywhere in a name. So this one begins with a dot and has no ``_``.
    """
    stem = name.replace("_", "-").encode()[:_NAME_BYTES].decode(errors="ignore")
    return f".{stem}.{_host()}.{os.getpid()}-{next(_numbers)}.part"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60] or "host"


def _replace(source: Path, target: Path) -> None:
    """Give ``source`` the name ``target``; what had it, if it is a folder, has that of ``source`` afterwards."""
    occupied = os.path.lexists(target) and (_is_folder(source) or _is_folder(target))
    (_exchange if occupied else os.replace)(source, target)


def _exchange(source: Path, target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    names = (os.fsencode(source), os.fsencode(target))
    if renameat2 is not None and not renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE):
        return
    code = ctypes.get_errno()
    if renameat2 is not None and code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(source), None, str(target))
    old = target.with_name(_old_name(target.name))
    os.rename(target, old)
    try:
        os.rename(source, target)
    except OSError:
        os.rename(old, target)
        raise
    sync_folder(target.parent)
    _remove(old)


def _old_name(name: str) -> str:
    return f".{name.replace('%', '%25').replace('_', '%5F')}.{_host()}.{os.getpid()}-{next(_numbers)}.old"


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what dead processes have begun in ``folder``, in which something was made or renamed just now.

    Returns:
        The names of what is removed.
    """
    removed = []
    for path in [*folder.glob(".*.part"), *folder.glob(".*.old")]:
        match = _PART.fullmatch(path.name)
        if match is not None:
            with contextlib.suppress(OSError):  # somebody writes it, or has removed it
                name = match["name"].replace("%5F", "_").replace("%25", "%") if match["kind"] == "old" else None
                if _end(path, name, here=match["host"] == _host()):
                    removed.append(path.name)
    return removed


def _end(path: Path, name: str | None, *, here: bool) -> bool:
    """Remove what a dead process has begun, or has put aside: if nothing has that ``name`` now, it has it again."""
    if path.is_symlink():  # if its process lives, that makes another one
        path.unlink()
        return True
    fd = os.open(path, os.O_CLOEXEC | (os.O_DIRECTORY if path.is_dir() else os.O_RDWR))
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                return False
            here = False
        now = path.parent.stat().st_mtime  # by the file system's clock, which is that of all times of files
        touched = max(p.stat().st_mtime for p in [path, *path.rglob("*")])
        if not here and now - touched <= REST_S:
            return False
        if name is not None and not path.with_name(name).exists():
            os.rename(path, path.with_name(name))
            return False
        _remove(path)
        return True
    finally:
        os.close(fd)


def remove_whole(path: str | os.PathLike[str]) -> None:
    """Remove a file or folder. Killed in between, what is left of it has another name, and goes as a leftover."""
    gone = Path(path).with_name(part_name(Path(path).name))
    os.rename(path, gone)
    sync_folder(gone.parent)
    _remove(gone)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def _sync(path: Path) -> None:
    """Make a file durable, or a folder with all that is in it."""
    if not path.is_dir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(Path(folder, name))
        sync_folder(Path(folder))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``, a view of bytes, at ``offset``, and have the disk begin with it."""
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], offset + written)
    begin_sync(fd, offset, len(data))


def begin_sync(fd: int, start: int, nbytes: int) -> None:
    """Have the disk begin with what was written to this range, where the system can (Linux). Nobody waits for it.

    Otherwise the disk would rest until the last byte is there, while checksums are computed. The ``fsync`` at the end
    waits for all of it, and tells of errors.
    """
    begin = getattr(_LIBC, "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), _SYNC_WRITE)


def _cause_of(error: BaseException, outer: BaseException | None) -> BaseException:
    """Find the system's own error, under what ``torch.save`` makes of it while it unwinds.

    Args:
        outer: what was raised already when it was tried.
    """
    found: BaseException | None = error
    while found is not None and found is not outer:
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return error
