"""Manage folders of offloaded files: check that they are usable, lock each rank's file, remove files of dead jobs. The
system drops a rank's lock when its process dies, so a file without a lock is a leftover."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_zero.settings import ConfigError
from lightning_zero.tiers.aio import DiskError, Syscalls
from lightning_zero.tiers.limits import lines_of

CLAIM_WAIT_S = 2.0  # a peer that looks for leftovers holds a lock for milliseconds

_log = logging.getLogger(__name__)

LOCKS: set[int] = set()  # descriptors that this process has locked


def _close_in_child() -> None:
    """Close lock files in a forked child. Otherwise a data loader's worker would keep the locks of a dead parent."""
    while LOCKS:
        os.close(LOCKS.pop())


os.register_at_fork(after_in_child=_close_in_child)


class Claim:
    """A lock on the file ``rank_name`` in ``folder``, held until :meth:`release`, which removes the lock file before it
    unlocks it; a process that then locks the removed file notices this by the inode. The constructor raises
    BlockingIOError if another process holds the lock for ``wait_s`` seconds."""

    def __init__(self, folder: Path, rank_name: str, syscalls: Syscalls, wait_s: float) -> None:
        self._path = folder / f"{rank_name}.lock"
        deadline = time.monotonic() + wait_s
        while (fd := self._try(syscalls)) is None:
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EWOULDBLOCK, self._holder())
            time.sleep(0.02)
        self._fd = fd
        LOCKS.add(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()  # while locked: later it may belong to a new owner
        # Before the close: its number may then belong to another file, which a forked child would close.
        LOCKS.discard(self._fd)
        os.close(self._fd)
        with contextlib.suppress(OSError):  # other ranks still use it
            self._path.parent.rmdir()

    def _try(self, syscalls: Syscalls) -> int | None:
        self._path.parent.mkdir(0o700, exist_ok=True)  # the end of another job may have removed it
        try:
            # Otherwise other users could put links into the folder, to files that would then be emptied.
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _check_own(folder, self._path.parent)
                os.fchmod(folder, 0o700)
            finally:
                os.close(folder)
            fd = syscalls.open(str(self._path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            return None
        try:
            _check_own(fd, self._path)  # before the owner empties the file
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An owner may have removed the file before this process locked it. A lock on a file without a name is
            # useless: the next process makes and locks a new file of that name.
            if os.fstat(fd).st_ino == self._path.stat().st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:  # another user's file, or a file system without locks
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _holder(self) -> str:
        pid, host, *_ = [*"".join(lines_of(self._path)).split(), "unknown", "unknown"]
        if pid == str(os.getpid()):
            return f"this process (pid {pid}): close what uses it first"
        return f"pid {pid} on {host}"


def _check_own(fd: int, path: Path) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{path} is of user {found.st_uid}, and this is user {os.geteuid()}")
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        raise PermissionError(errno.EPERM, f"{path} has other names")


def path_error(path: object, got: str, fix: str = "") -> ConfigError:
    return ConfigError(
        f"zero.offload.nvme_path: expected a writable folder with space on a local disk, got {str(path)!r}, {got}. "
        f"{fix} (Under zero3_nvme by string, it comes from LIGHTNING_ZERO_NVME_PATH.)"
    )


@contextlib.contextmanager
def as_config_error(path: object) -> Iterator[None]:
    try:
        yield
    except DiskError as error:
        raise path_error(path, f"where {error.strerror}") from error


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError if ``path`` is not an existing folder."""
    if not os.path.exists(path):
        raise path_error(path, "which does not exist", "Create it or change zero.offload.nvme_path.")
    if not os.path.isdir(path):
        raise path_error(path, "which is not a folder", "Change zero.offload.nvme_path.")


def claim_file(path: Path, folder: Path, rank_name: str, syscalls: Syscalls) -> Claim:
    check_folder(path)
    try:
        return Claim(folder, rank_name, syscalls, CLAIM_WAIT_S)
    except BlockingIOError as error:
        fix = "Wait for it, or give each job a zero.offload.nvme_path of its own."
        raise path_error(path, f"which is used by another job: {error.strerror}", fix) from error
    except OSError as error:
        got = f"where nothing can be written or locked ({error.strerror or error})"
        raise path_error(path, got, "Make it writable or change zero.offload.nvme_path.") from error


def remove_leftovers(folder: Path, own: str, syscalls: Syscalls) -> None:
    """Remove, with a warning, the offloaded files of dead ranks from ``folder``: all files that no rank has locked, and
    the file ``own`` (a name without suffix), which the caller has locked and will create again."""
    count = nbytes = 0
    for file in sorted(folder.glob("rank*.bin")):
        with contextlib.suppress(OSError):  # locked: its rank lives
            claim = None if file.stem == own else Claim(folder, file.stem, syscalls, 0.0)
            with contextlib.suppress(FileNotFoundError):
                size = file.stat().st_size
                file.unlink()
                count, nbytes = count + 1, nbytes + size
            if claim is not None:
                claim.release()
    if count:
        _log.warning("removed %d file(s), %d bytes, which a job that has ended left in %s", count, nbytes, folder)
