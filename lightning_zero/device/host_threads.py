"""How many threads torch's kernels take where a thread of ours calls them.

``torch.set_num_threads`` sets more than that, and less: the number is also noted for all threads that are yet to come,
and a thread that has never asked for its number takes the noted one at its first kernel, after it has set its own.
"""

from __future__ import annotations

import contextlib
import threading

import torch

_SETS = threading.Lock()


def set_own_threads(count: int) -> None:
    """Have kernels take ``count`` threads where this thread calls them; later threads take as many as before."""
    with _SETS:
        noted = torch.get_num_threads()  # this thread has asked now
        torch.set_num_threads(count)
        if noted != count:
            # In a thread that ends: in this one it would be its own number again.
            passing = threading.Thread(target=torch.set_num_threads, args=(noted,), name="lightning_zero-threads")
            with contextlib.suppress(RuntimeError):  # at the interpreter's end, when no thread comes later either
                passing.start()
                passing.join()
