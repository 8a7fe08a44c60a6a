"""How many threads torch's kernels take where a thread of ours calls them.

``torch.set_num_threads`` sets more than that, and less: the number is also noted for all threads that are yet to come,
and a thread that has never asked for its number takes the noted one at its first kernel, after it has set its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_SETS = threading.Lock()


def set_own_threads(count: int) -> None:
    """Have kernels take ``count`` threads where this thread calls them; later threads take as many as before."""
    if torch.get_num_threads() != count:  # this thread has asked now
        with setting_threads():
            torch.set_num_threads(count)


@contextlib.contextmanager
def setting_threads() -> Iterator[None]:
    """Around calls of ``torch.set_num_threads``, in this thread or others: later threads take as many as before."""
    asked, over = threading.Event(), threading.Event()

    def keep() -> None:
        noted = torch.get_num_threads()
        asked.set()
        over.wait()
        torch.set_num_threads(noted)

    with _SETS:
        # By a new thread, which takes the noted number; by this one it would be asked for and set as its own.
        keeper = threading.Thread(target=keep, name="lightning_zero-threads")
        try:
            with contextlib.suppress(RuntimeError):  # no more can be started
                keeper.start()
                asked.wait()
            yield
        finally:
            over.set()
            if keeper.ident is not None:
                keeper.join()
