"""What takes longer than a second is shown, once it does, on one rank."""

from __future__ import annotations

import contextlib
import io
import threading
from concurrent.futures import Future, wait
from typing import Any
from unittest import mock

import pytest
import rich
from rich.console import Console
from rich.progress import Progress
from torch import nn
from tqdm import tqdm

import lightning_zero
from lightning_zero.ranks import progress as long_work
from lightning_zero.ranks.progress import Count, LongWork


class Clock:
    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(step: float, *, shows: bool = True, stream: io.StringIO | None = None) -> str:
    """What is written while five items take ``step`` seconds each."""
    clock, out = Clock(step), stream if stream is not None else io.StringIO()
    with mock.patch.object(long_work, "time", clock), mock.patch("sys.stderr", out):
        for item in LongWork(shows).items("abcde", "sharding"):
            assert item in "abcde"
            clock.now += step
            assert not any("refresh" in type(thread).__name__.lower() for thread in threading.enumerate())
    return out.getvalue()


def test_short_work_says_nothing() -> None:
    assert work(0.1) == "" and work(0.1, stream=Terminal()) == ""
    assert work(5.0, shows=False) == "" and work(5.0, shows=False, stream=Terminal()) == ""


def test_a_log_gets_two_lines() -> None:
    assert work(2.0) == "sharding: 1 of 5 after 2 s\nsharding: 5 in 10 s\n"


def test_a_terminal_gets_a_bar() -> None:
    written = work(2.0, stream=Terminal())
    assert "sharding" in written and "1/5" in written and "5/5" in written


def test_what_raises_leaves_no_bar_behind() -> None:
    clock, out = Clock(0.0), Terminal()
    with mock.patch.object(long_work, "time", clock), mock.patch("sys.stderr", out):
        with pytest.raises(ValueError, match="of the test"):
            for _ in LongWork(True).items("abcde", "sharding"):
                clock.now += 2
                if clock.now > 5:
                    raise ValueError("of the test")
        for _ in LongWork(True).items("ab", "another"):  # rich refuses a second live display
            clock.now += 2
    assert "another" in out.getvalue()


def test_sharding_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
    with mock.patch.object(long_work, "AFTER_S", -1.0):
        lightning_zero.shard(model, device="cpu").release()
        assert "sharding, in units: 1 of 4 after 0 s\nsharding, in units: 4 in 0 s\n" in capsys.readouterr().err
        lightning_zero.shard(model, device="cpu", summary=False).release()
        assert "sharding" not in capsys.readouterr().err


def saving(step: float, *, shows: bool = True, stream: io.StringIO | None = None) -> str:
    """What is written while four pieces of 3 MB take ``step`` seconds each."""
    clock, out = Clock(step), stream if stream is not None else io.StringIO()
    asked: list[int] = []

    def total() -> int:
        asked.append(1)
        return 12_000_000

    patched = mock.patch.object(long_work, "time", clock), mock.patch("sys.stderr", out)
    with patched[0], patched[1], LongWork(shows).bytes("saving a.ckpt", total) as did:
        for _ in range(4):
            clock.now += step
            did(3_000_000)
    assert asked == [1] * shows
    return out.getvalue()


def test_bytes_are_counted() -> None:
    assert saving(2.0) == "saving a.ckpt: 3.0 MB of 12.0 MB after 2 s\nsaving a.ckpt: 12.0 MB in 8 s\n"
    assert saving(0.2) == "" and saving(2.0, shows=False) == "" and saving(2.0, shows=False, stream=Terminal()) == ""
    bar = saving(2.0, stream=Terminal())
    assert "3.0/12.0 MB" in bar and "9.0/12.0 MB" in bar and "12.0/12.0 MB" in bar


def test_a_thread_is_waited_for_with_its_count() -> None:
    clock, out, count = Clock(0.0), Terminal(), Count(8_000_000)
    future: Future[int] = Future()

    def waited(futures: Any, timeout: float) -> Any:
        clock.now += 1.0
        count.did(2_000_000)
        if count.done == count.total:
            future.set_result(1)
        return wait(futures, 0)

    patched = mock.patch.object(long_work, "time", clock), mock.patch.object(long_work, "wait", waited)
    with patched[0], patched[1], mock.patch("sys.stderr", out):
        LongWork(True).wait(future, "saving a.ckpt", count)
    assert "4.0/8.0 MB" in out.getvalue() and "6.0/8.0 MB" in out.getvalue() and "8.0/8.0 MB" in out.getvalue()


def test_what_does_not_say_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise OSError(28, "no space")

    with mock.patch.object(long_work, "AFTER_S", -1.0):
        for shows in (True, False):
            assert LongWork(shows).call(lambda: 5, "to the disk") == 5
            with pytest.raises(OSError, match="no space"):
                LongWork(shows).call(fails, "to the disk")
    assert capsys.readouterr().err.count("to the disk: over after 0 s") == 2


@pytest.mark.parametrize("other", ["tqdm", "rich"])
def test_another_bar_of_the_terminal_is_there_again_afterwards(other: str) -> None:
    clock, out = Clock(0.0), Terminal()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("sys.stderr", out))
        if other == "tqdm":
            stack.enter_context(mock.patch.object(tqdm, "monitor_interval", 0))  # no thread of its
            theirs: Any = stack.enter_context(tqdm(total=9, desc="training", file=out, ncols=60))
        else:
            console = Console(file=out, width=90)
            stack.enter_context(mock.patch("rich.get_console", lambda: console))
            theirs = stack.enter_context(Progress(console=rich.get_console(), auto_refresh=False))
            theirs.add_task("training", total=9)
        stack.enter_context(mock.patch.object(long_work, "time", clock))
        begin = len(out.getvalue())
        for _ in LongWork(True).items("abcde", "saving"):
            clock.now += 2
        written = out.getvalue()[begin:]
    assert "saving" in written and "training" in written[written.rindex("saving") :]
    assert len(getattr(rich.get_console(), "_live_stack", ())) == 0
