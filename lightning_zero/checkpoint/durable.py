"""Write files and folders that are complete or absent, even if a process is killed or a disk is full.

::

    last.ckpt                               the old file, not changed
    .last.ckpt.node0.4711-1.part            the new file, at a temporary name    (1) write, fsync
    last.ckpt                               the new file                         (2) rename, (3) fsync of the folder

The new file is written in the target's folder, because a rename is atomic only within a file system.

A killed process leaves its ``.part`` file, which the next write into that folder removes. The writer locks its
``.part``, and the system drops the lock when the process dies. Other nodes may not see locks, so another node's
``.part`` is removed only if it has not changed for :data:`REST_S` seconds. On a file system without locks, the same
holds for every ``.part``.

A folder that is not empty cannot be replaced by a rename, so the old and the new folder exchange names (Linux). On file
systems that cannot exchange names, the old folder is renamed to a name that ends in ``.old`` before the new folder gets
its name. If the process dies between the two renames, the next write gives the old folder its name back."""

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

from lightning_zero.tiers.claims import LOCKS

REST_S = 3600.0
_PART = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)\.\d+-\d+\.(?P<kind>part|old)")
_ROOM, _PLACE = "Free some space, or save to another disk.", "Save to a folder in which this process can write."
_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR), _PLACE),
}
_NAME_BYTES = 120  # of the target's name; file systems allow 255 in all
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # EBADF: a folder on NFS
_EXCHANGE, _AT_FDCWD = 2, -100
_SYNC_WRITE = 2  # of sync_file_range: start to write what is not being written
_LIBC = ctypes.CDLL(None)
_numbers = itertools.count(1)


class Part:
    """A file or folder that is being written at the temporary path ``path``, locked by its open descriptor ``fd``."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        LOCKS.add(fd)

    def close(self) -> None:
        if self.fd in LOCKS:
            LOCKS.discard(self.fd)  # before the close, or a forked child could close another file of that number
            os.close(self.fd)


@contextlib.contextmanager
def written_aside(path: str | os.PathLike[str], *, folder: bool = False) -> Iterator[Part]:
    """Make an empty file, or folder, at a temporary name in the folder of ``path``, and yield it as a :class:`Part` for
    the body to write. When the body ends, sync the file and rename it to ``path``, so that it survives a power cut.
    Other processes may write to the part too, and must sync what they write. If the body fails, raise an OSError or
    RuntimeError that names ``path`` and the cause; ``path`` is then unchanged."""
    with naming(Path(path), folder=folder), aside(path, folder=folder) as part:
        yield part


@contextlib.contextmanager
def aside(path: str | os.PathLike[str], *, folder: bool = False, keep: bool = True) -> Iterator[Part]:
    """Like :func:`written_aside`, but raise errors of the body unchanged. If ``keep`` is False, do not rename the new
    file or folder when the body ends, but remove it."""
    target = Path(path)
    missing = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)
    part = _open_part(target, folder)
    try:
        yield part
        if keep:
            # Before the rename; otherwise the new name could reach the disk before the bytes, and a power cut would
            # lose them.
            _sync(part.path)
            _replace(part.path, target)
            sync_folder(target.parent)  # only now is the rename durable
    finally:
        _remove(part.path)  # after an exchange of names, the old one
        part.close()
    remove_leftovers(target.parent)


def leave(stack: contextlib.ExitStack, error: BaseException | None) -> None:
    """Exit ``stack`` as if its body had raised ``error``, and ignore errors of the exit. If ``error`` is None, close
    ``stack`` and raise errors of its exit."""
    if error is None:
        stack.close()
        return
    with contextlib.suppress(BaseException):
        stack.__exit__(type(error), error, error.__traceback__)


@contextlib.contextmanager
def naming(target: object, *, folder: bool = False) -> Iterator[None]:
    """Replace an error that the body raises by an OSError, if the cause is an OSError, else by a RuntimeError. The new
    error names ``target`` and the cause. An error whose message already contains ``target`` is raised unchanged.
    ``folder``: whether ``target`` is a folder."""
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
    """Make ``path`` a relative symbolic link to ``target``. Atomically replaces a file, folder or link at ``path``."""
    where, is_there = Path(path), False
    while not is_there:
        made = where.with_name(part_name(where.name))
        made.symlink_to(os.path.relpath(target, where.parent))
        try:
            _replace(made, where)
            is_there = True
        except FileNotFoundError:  # another process has removed it as a leftover: a link cannot be locked
            pass
        finally:
            _remove(made)  # after an exchange of names, the old folder
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
        except FileExistsError:  # left by a killed process: in a restarted container process ids repeat
            continue
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        # Another process may have removed it as a leftover before it was locked; then it has no name.
        if os.fstat(fd).st_nlink:
            return Part(path, fd)
        os.close(fd)


def part_name(name: str) -> str:
    """Return a new temporary name for writing the file ``name``. The temporary name begins with a dot and has no ``_``,
    because Lightning takes a file for a checkpoint if its name contains ``hpc_ckpt_`` or ``last``."""
    stem = name.replace("_", "-").encode()[:_NAME_BYTES].decode(errors="ignore")
    return f".{stem}.{_host()}.{os.getpid()}-{next(_numbers)}.part"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60] or "host"


def _replace(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``. If ``target`` exists and one of the two is a folder, exchange their names."""
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
    escaped = target.name.replace("%", "%25").replace("_", "%5F")
    old = target.with_name(f".{escaped}.{_host()}.{os.getpid()}-{next(_numbers)}.old")
    with _locked(target):
        os.rename(target, old)
        try:
            os.rename(source, target)
        except OSError:
            os.rename(old, target)
            raise
    sync_folder(target.parent)
    _remove(old)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold a lock on the file or folder ``target`` during the body, even if the body renames ``target``, so that no
    other process removes it as a leftover. A symbolic link is not locked."""
    if target.is_symlink():  # which has no lock, and nothing to lose
        yield
        return
    part = Part(target, os.open(target, os.O_RDONLY | os.O_CLOEXEC))
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(part.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        part.close()


def remove_leftovers(folder: Path) -> list[str]:
    """Remove the ``.part`` and ``.old`` files and folders of dead processes from ``folder``, and return their names.
    Call this right after a change of ``folder``, because its modification time is used as the current time."""
    removed = []
    for path in [*folder.glob(".*.part"), *folder.glob(".*.old")]:
        match = _PART.fullmatch(path.name)
        if match is not None:
            with contextlib.suppress(OSError):  # it is being written, or already removed
                name = match["name"].replace("%5F", "_").replace("%25", "%") if match["kind"] == "old" else None
                if _end(path, name, here=match["host"] == _host()):
                    removed.append(path.name)
    return removed


def _end(path: Path, name: str | None, *, here: bool) -> bool:
    """Remove ``path`` and return True if the process that wrote ``path`` is dead; else return False.

    ``name``: the original name of an ``.old``; None for a ``.part``. If the original name is free, an ``.old`` gets
    this name back and the result is False. ``here``: whether the writer ran on this node, where locks are reliable."""
    if path.is_symlink():  # if its process lives, it makes another one
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
        now = path.parent.stat().st_mtime  # the folder has just changed: its time is the file system's clock
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
    """Rename the file or folder ``path``, then remove it, so that a killed process leaves nothing incomplete there."""
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


def _sync(path: Path) -> None:
    """Wait until a file, or a folder with all its contents, is on the disk (fsync)."""
    if not path.is_dir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(Path(folder, name))
        sync_folder(Path(folder))


def sync_folder(folder: Path) -> None:
    """Wait until the list of names in ``folder`` is on the disk (fsync), if the file system supports this."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes of ``data`` at byte ``offset`` of the file of descriptor ``fd``, and call :func:`begin_sync`."""
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], offset + written)
    begin_sync(fd, offset, len(data))


def begin_sync(fd: int, start: int, nbytes: int) -> None:
    """Start to write bytes ``[start, start + nbytes)`` of the file of descriptor ``fd`` from the page cache to the
    disk, without waiting. Otherwise the disk would idle until ``fsync``, which waits and reports errors. Does nothing
    where the system has no ``sync_file_range`` (only Linux has it)."""
    begin = getattr(_LIBC, "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), _SYNC_WRITE)


def _cause_of(error: BaseException, outer: BaseException | None) -> BaseException:
    """Return the first OSError in the chain of causes and contexts of ``error``; if there is none, ``error``. The
    search stops at ``outer``, the exception that was handled before ``error`` was raised (None: there was none)."""
    found: BaseException | None = error
    while found is not None and found is not outer:
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return error
