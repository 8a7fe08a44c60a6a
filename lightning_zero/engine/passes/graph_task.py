"""Hears of the end of a backward that nobody has told of."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch


class GraphTask:
    """The run of autograd's engine inside of which this is made.

    Args:
        ended: is called at its end, unless an exception has ended it.
        gone: is called when it is over, in either case; holds nothing that holds this.
    """

    def __init__(self, ended: Callable[[], None], gone: Callable[[], None]) -> None:
        end = _End(ended)
        # Weakly: a strong reference would leave the pass in its backward for ever.
        self._end = ref(end, lambda _: gone())
        torch.autograd.Variable._execution_engine.queue_callback(end)

    @property
    def is_over(self) -> bool:
        return self._end() is None


class _End:
    """A callback for the end of a graph task.

    Autograd holds the only strong reference. So the object is gone when the task is over, also if an exception has
    ended the task before the callback was called.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()
