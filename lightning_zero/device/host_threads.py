"""Sets which cores threads run on, and how many threads torch's kernels use when one Python thread calls them.

``torch.set_num_threads`` also affects threads started later: a thread that has not read or set its number of threads
takes the number that any thread has set last.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator

import torch

_SETS = threading.Lock()


def set_own_threads(count: int) -> None:
    """Make torch kernels that this Python thread calls use ``count`` threads. Does not affect other Python threads."""
    if torch.get_num_threads() != count:  # this call asks for the number first
        with setting_threads():
            torch.set_num_threads(count)


def allowed_cores() -> set[int]:
    """Return the cores on which this thread may run; an empty set on systems without ``os.sched_getaffinity``."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def bind_to(cores: Collection[int]) -> None:
    """Restrict this process to those of its allowed cores that are in ``cores``. Does nothing if there are none."""
    if common := allowed_cores().intersection(cores):
        for thread in os.listdir("/proc/self/task"):  # later threads run where the one runs that starts them
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), common)


@contextlib.contextmanager
def setting_threads() -> Iterator[None]:
    """Context manager in which ``torch.set_num_threads`` affects only the thread that calls it. On exit, restore the
    number of threads that threads started later take."""
    asked, over = threading.Event(), threading.Event()

    def keep() -> None:
        noted = torch.get_num_threads()
        asked.set()
        over.wait()
        torch.set_num_threads(noted)

    with _SETS:
        # On a new thread, which takes the noted number; asking here would set this thread's number.
        keeper = threading.Thread(target=keep, name="lightning_zero-threads")
        try:
            with contextlib.suppress(RuntimeError):  # no thread can be started
                keeper.start()
                asked.wait()
            yield
        finally:
            over.set()
            if keeper.ident is not None:
                keeper.join()
