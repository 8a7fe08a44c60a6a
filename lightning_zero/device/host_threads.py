"""Sets which cores threads run on, and how many threads torch's kernels use for calls of one thread.

``torch.set_num_threads`` also sets the number for later threads: a thread that has never asked for its number takes the
last set one at its first kernel.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator

import torch

_SETS = threading.Lock()


def set_own_threads(count: int) -> None:
    """Make kernels that this thread calls use ``count`` threads, without effect on the number for later threads."""
    if torch.get_num_threads() != count:  # this call asks for the number first
        with setting_threads():
            torch.set_num_threads(count)


def allowed_cores() -> set[int]:
    """Return the cores on which this thread may run; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def bind_to(cores: Collection[int]) -> None:
    """Let this process run only on those of its cores that are among ``cores``. Changes nothing if none is."""
    if common := allowed_cores().intersection(cores):
        for thread in os.listdir("/proc/self/task"):  # later threads run where the one runs that starts them
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), common)


@contextlib.contextmanager
def setting_threads() -> Iterator[None]:
    """Undo for later threads the effect of ``torch.set_num_threads`` calls in the body, on any thread."""
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
