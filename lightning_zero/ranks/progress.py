"""Shows on stderr the progress of work that takes longer than a second."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from rich.filesize import decimal

AFTER_S = 1.0
EVERY_S = 10.0  # seconds between lines
LOOKS_S = 0.1  # seconds between looks at a thread
Did = Callable[[int], None]  # called with the number of bytes just done
T = TypeVar("T")


class Count:
    """Counts how many of ``total`` bytes a piece of work has processed, for example in a thread."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def did(self, nbytes: int) -> None:
        self.done += nbytes


class LongWork:
    """Shows the progress of long loops, calls and waits on stderr; shows nothing if ``shows`` is False."""

    def __init__(self, shows: bool = False) -> None:
        self.shows = shows

    def items(self, items: Sequence[T], what: str) -> Iterator[T]:
        """Yield ``items``, and show how many of them the caller has worked through. ``what``: the name of this work."""
        with self._lines(what, len(items), str) as at:
            for done, item in enumerate(items):
                if done:
                    at(done)
                yield item

    @contextlib.contextmanager
    def bytes(self, what: str, total: Callable[[], int]) -> Iterator[Did]:
        """Yield a function to call with numbers of bytes done, to show progress. Calls ``total`` only to show it."""
        count = Count(total() if self.shows else 0)
        with self._lines(what, count.total, decimal) as at:

            def did(nbytes: int) -> None:
                count.did(nbytes)
                at(count.done)

            yield did

    def call(self, act: Callable[[], T], what: str) -> T:
        """Run ``act``, which reports no progress, and return its result. Show how long it takes."""
        if not self.shows:
            return act()
        with ThreadPoolExecutor(1, "lightning_zero-shown") as threads:
            future = threads.submit(act)
            self.wait(future, what)
            return future.result()

    def wait(self, future: Future[Any], what: str, count: Count | None = None) -> None:
        """Wait until ``future`` ends, with or without an error, and show its progress."""
        with self._lines(what, None if count is None else count.total, decimal) as at:
            while wait([future], LOOKS_S if self.shows else None).not_done:
                at(0 if count is None else count.done)

    @contextlib.contextmanager
    def _lines(self, what: str, total: int | None, text: Callable[[int], str]) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with how much of ``what`` is done, to show it. ``total``: None if unknown."""
        begin = time.monotonic()
        following = begin + AFTER_S

        def at(done: int) -> None:
            nonlocal following
            now = time.monotonic()
            if self.shows and now > following:
                following = now + EVERY_S
                far = "" if total is None else f"{text(min(done, total))} of {text(total)} after "
                print(f"{what}: {far}{now - begin:.0f} s", file=sys.stderr, flush=True)

        yield at
        seconds = time.monotonic() - begin
        if self.shows and seconds > AFTER_S:
            far = "over after" if total is None else f"{text(total)} in"
            print(f"{what}: {far} {seconds:.0f} s", file=sys.stderr, flush=True)


SILENT = LongWork()
