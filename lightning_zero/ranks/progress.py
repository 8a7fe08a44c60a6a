"""Shows how far work is that takes longer than a second: a bar on a terminal, else two lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import rich
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

AFTER_S = 1.0
EVERY_S = 0.1  # a bar is drawn at most as often
Did = Callable[[int], None]  # is told of bytes as they are done
T = TypeVar("T")


class Count:
    """How many of ``total`` bytes are done: by a thread, say, while nobody waits for it yet."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def did(self, nbytes: int) -> None:
        self.done += nbytes


class LongWork:
    """Shows the long work of one process.

    Args:
        shows: on one rank, and where the user wants it.
    """

    def __init__(self, shows: bool = False) -> None:
        self.shows = shows

    def items(self, items: Sequence[T], what: str) -> Iterator[T]:
        """``items``, whose work is what the caller does between two of them."""
        if not self.shows:
            yield from items
            return
        with _Bar(what, len(items), in_bytes=False) as bar:
            for done, item in enumerate(items):
                if done:
                    bar.at(done)
                yield item

    @contextlib.contextmanager
    def bytes(self, what: str, total: Callable[[], int]) -> Iterator[Did]:
        """Inside, work is done of so many bytes.

        Args:
            total: is asked where it is shown alone.
        """
        if not self.shows:
            yield lambda nbytes: None
            return
        count = Count(total())
        with _Bar(what, count.total, in_bytes=True) as bar:

            def did(nbytes: int) -> None:
                count.did(nbytes)
                bar.at(count.done)

            yield did

    def call(self, act: Callable[[], T], what: str) -> T:
        """Do something that does not say how far it is, such as one call of the system."""
        if not self.shows:
            return act()
        with ThreadPoolExecutor(1, "lightning_zero-shown") as threads:
            future = threads.submit(act)
            self.wait(future, what)
            return future.result()

    def wait(self, future: Future[Any], what: str, count: Count | None = None) -> None:
        """Wait until what a thread does is over, well or not."""
        if not self.shows:
            wait([future])
            return
        with _Bar(what, count.total if count is not None else None, in_bytes=True) as bar:
            while wait([future], EVERY_S).not_done:
                bar.at(count.done if count is not None else 0)


SILENT = LongWork()


class _Bar:
    """One piece of work; ``total`` is None where nobody knows it.

    A bar is drawn when something is over, and not by a thread of its own: ranks may be forked or killed meanwhile.
    """

    def __init__(self, what: str, total: int | None, *, in_bytes: bool) -> None:
        self._what, self._total, self._in_bytes = what, total, in_bytes
        self._begin = time.monotonic()
        self._drawn = float("-inf")
        self._drawing = contextlib.ExitStack()
        self._bar: Progress | None = None
        self._said = False

    def __enter__(self) -> _Bar:
        return self

    def at(self, done: int) -> None:
        now = time.monotonic()
        if now - self._begin <= AFTER_S or now - self._drawn < EVERY_S:
            return
        self._drawn = now
        if self._bar is None and sys.stderr.isatty():
            self._bar = self._drawing.enter_context(_beside_others(self._columns()))
            self._bar.add_task(self._what, total=self._total)
        if self._bar is not None:
            done = done if self._total is None else min(done, self._total)  # nearly known, here and there
            self._bar.update(self._bar.task_ids[0], completed=done, refresh=True)
        elif not self._said:
            self._said = True
            far = f"{self._amount(done)} of {self._amount(self._total)} after " if self._total is not None else ""
            print(f"{self._what}: {far}{now - self._begin:.0f} s", file=sys.stderr, flush=True)

    def __exit__(self, kind: Any, *_: object) -> None:
        seconds = time.monotonic() - self._begin
        if kind is None and self._bar is not None:
            all_of_it = self._total if self._total is not None else 1
            self._bar.update(self._bar.task_ids[0], total=all_of_it, completed=all_of_it, refresh=True)
        elif kind is None and seconds > AFTER_S:
            far = f"{self._amount(self._total)} in" if self._total is not None else "over after"
            print(f"{self._what}: {far} {seconds:.0f} s", file=sys.stderr, flush=True)
        self._drawing.close()

    def _amount(self, done: int | None) -> str:
        return decimal(done or 0) if self._in_bytes else str(done)

    def _columns(self) -> list[ProgressColumn]:
        columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
        if self._total is not None:
            columns.append(DownloadColumn() if self._in_bytes else MofNCompleteColumn())
        columns.append(TimeElapsedColumn())
        return columns if self._total is None else [*columns, TimeRemainingColumn()]


@contextlib.contextmanager
def _beside_others(columns: Sequence[ProgressColumn]) -> Iterator[Progress]:
    """A bar on a terminal on which others may stand, such as Lightning's: these are there again afterwards, and of this
    one nothing is left then."""
    with contextlib.ExitStack() as stack:
        tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
        others = any(not getattr(bar, "disable", True) for bar in getattr(tqdm, "_instances", ()))
        if tqdm is not None and others:
            # Without its lock, which forked processes share: another rank might wait for it, and this one for that one.
            stack.enter_context(tqdm.external_write_mode(nolock=True))
        shared = rich.get_console()
        lives = list(getattr(shared, "_live_stack", ()))  # rich draws all of these, one below the other
        for live in lives[:1]:
            stack.callback(live.refresh)  # at once without this one: it may come to its end next
        console = shared if lives else Console(stderr=True)
        bar = Progress(*columns, console=console, auto_refresh=False, transient=others or bool(lives))
        stack.enter_context(bar)
        yield bar
