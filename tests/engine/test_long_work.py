"""What takes longer than a second is shown, once it does, on one rank."""

from __future__ import annotations

import io
import threading
from unittest import mock

import pytest
from torch import nn

import lightning_zero
from lightning_zero.engine.units import long_work
from lightning_zero.engine.units.long_work import shown


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
        for item in shown("abcde", "sharding", shows=shows):
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
            for _ in shown("abcde", "sharding", shows=True):
                clock.now += 2
                if clock.now > 5:
                    raise ValueError("of the test")
        for _ in shown("ab", "another", shows=True):  # rich refuses a second live display
            clock.now += 2
    assert "another" in out.getvalue()


def test_sharding_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
    with mock.patch.object(long_work, "AFTER_S", -1.0):
        lightning_zero.shard(model, device="cpu").release()
        assert "sharding, in units: 1 of 4 after 0 s\nsharding, in units: 4 in 0 s\n" in capsys.readouterr().err
        lightning_zero.shard(model, device="cpu", summary=False).release()
        assert "sharding" not in capsys.readouterr().err
