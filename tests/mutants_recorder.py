"""Notes which test reaches which function, in all processes that a test starts, for ``tests/mutants.py``.

It is a plugin of pytest. Functions of the copied package call ``reached`` first.
"""

from __future__ import annotations

import mmap
import os
import time

_seen: set[tuple[bytes, str]] = set()
_files: list[tuple[int, mmap.mmap]] = []  # the log, and the number of the test that runs, shared by all processes


def _open() -> tuple[int, mmap.mmap]:
    if not _files:
        path = os.environ["MUTANTS_REACHED"]
        now = os.open(path + ".now", os.O_RDWR | os.O_CREAT)
        os.truncate(now, 4)
        _files.append((os.open(path + ".log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), mmap.mmap(now, 4)))
    return _files[0]


def reached(place: str) -> None:
    """Note that the test which runs reaches ``place``, once."""
    if "MUTANTS_REACHED" in os.environ or _files:
        log, now = _open()
        key = now[:4], place
        if key not in _seen:
            _seen.add(key)
            os.write(log, f"{int.from_bytes(key[0], 'big')}\t@\t{place}\n".encode())


def pytest_configure() -> None:
    os.environ["MUTANTS_REACHED"] += os.environ.get("PYTEST_XDIST_WORKER", "")


def pytest_runtest_logstart(nodeid: str) -> None:
    log, now = _open()
    now[:4] = (int.from_bytes(now[:4], "big") + 1).to_bytes(4, "big")
    os.write(log, f"{int.from_bytes(now[:4], 'big')}\t=\t{nodeid}\t{time.monotonic()}\n".encode())


def pytest_runtest_logfinish(nodeid: str) -> None:
    log, now = _open()
    os.write(log, f"{int.from_bytes(now[:4], 'big')}\t+\t{nodeid}\t{time.monotonic()}\n".encode())
