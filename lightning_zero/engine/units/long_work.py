"""Shows how far work is that takes longer than a second: a bar on a terminal, else two lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

AFTER_S = 1.0
T = TypeVar("T")


def shown(items: Sequence[T], what: str, *, shows: bool) -> Iterator[T]:
    """``items``, whose work is what the caller does between two of them.

    Args:
        shows: on one rank.
    """
    begin, bar, said = time.monotonic(), None, False
    try:
        for done, item in enumerate(items):
            if shows and done and time.monotonic() - begin > AFTER_S:
                if bar is None and sys.stderr.isatty():
                    bar = _bar()
                    bar.start()
                    bar.add_task(what, total=len(items))
                if bar is not None:
                    bar.update(bar.task_ids[0], completed=done, refresh=True)
                elif not said:
                    said = True
                    print(f"{what}: {done} of {len(items)} after {time.monotonic() - begin:.0f} s", file=sys.stderr)
            yield item
        if bar is not None:
            bar.update(bar.task_ids[0], completed=len(items), refresh=True)
        elif shows and time.monotonic() - begin > AFTER_S:
            print(f"{what}: {len(items)} in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    finally:
        if bar is not None:
            bar.stop()


def _bar() -> Progress:
    # It is drawn when an item is over, and not by a thread of its own: ranks may be forked or killed meanwhile.
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), auto_refresh=False
    )
