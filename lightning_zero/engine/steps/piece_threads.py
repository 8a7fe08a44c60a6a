"""Threads that step the pieces of a run, each with kernels of one thread.

A step of state that rests in fewer bits is some fifty short kernels for each piece. Were each of these divided over
threads, it would end when the slowest of them does, and beside a disk that is read and written a core is often taken.
Pieces have nothing in common, so a thread takes one after the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from lightning_zero.device.host_threads import setting_threads

T = TypeVar("T")
M = TypeVar("M")


def in_threads(work: Callable[[Iterator[T], M], None], items: Iterable[T], memories: Sequence[M]) -> None:
    """Have ``work`` take ``items`` in a thread for each of ``memories``; they end with it. Any error is raised."""
    left = iter([*items])  # an item goes to one thread: a list's iterator is asked under the interpreter's lock
    ready, errors = threading.Semaphore(0), list[BaseException]()

    def run(memory: M) -> None:
        # Asked first: a thread that has never asked for its number takes, at its first kernel, that which was set last
        # in any thread. That would not be 1 by then, and each of these threads would have a team of its own.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.release()
        try:
            with torch.inference_mode(False), torch.no_grad():  # modes are those of a thread
                work(left, memory)
        except BaseException as error:
            errors.append(error)

    # New ones for each call: those of a pool would be gone in a process that is forked.
    running: list[threading.Thread] = []
    with setting_threads():
        with contextlib.suppress(RuntimeError):  # no more can be started, because of a limit or as the interpreter ends
            for number, memory in enumerate(memories):
                thread = threading.Thread(target=run, args=(memory,), name=f"lightning_zero-pieces_{number}")
                thread.start()
                running.append(thread)
        for _ in running:
            ready.acquire()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]
    work(left, memories[0])  # what nobody has taken
