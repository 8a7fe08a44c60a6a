"""What takes longer than a second is shown, once it does, on one rank."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import nn

import lightning_zero
from lightning_zero.ranks import progress as long_work
from lightning_zero.ranks.progress import Count, LongWork


@contextlib.contextmanager
def seen() -> Iterator[tuple[SimpleNamespace, io.StringIO]]:
    """A clock that stands still, and what is written."""
    clock, out = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), io.StringIO()
    with mock.patch.object(long_work, "time", clock), mock.patch("sys.stderr", out):
        yield clock, out


def work(step: float, *, shows: bool = True) -> str:
    """What is written while five items take ``step`` seconds each."""
    with seen() as (clock, out):
        for item in LongWork(shows).items("abcde", "sharding"):
            assert item in "abcde"
            clock.now += step
    return out.getvalue()


def saving(step: float, *, shows: bool = True) -> str:
    """What is written while four pieces of 3 MB take ``step`` seconds each."""
    total = mock.Mock(return_value=12_000_000)
    with seen() as (clock, out), LongWork(shows).bytes("saving a.ckpt", total) as did:
        for _ in range(4):
            clock.now += step
            did(3_000_000)
    assert total.call_count == shows
    return out.getvalue()


def test_long_work_says_a_line_now_and_then_and_short_work_nothing() -> None:
    assert work(2.0) == "sharding: 1 of 5 after 2 s\nsharding: 5 in 10 s\n"
    assert work(6.0) == "sharding: 1 of 5 after 6 s\nsharding: 3 of 5 after 18 s\nsharding: 5 in 30 s\n"
    assert saving(2.0) == "saving a.ckpt: 3.0 MB of 12.0 MB after 2 s\nsaving a.ckpt: 12.0 MB in 8 s\n"
    assert work(0.1) == work(5.0, shows=False) == saving(0.2) == saving(2.0, shows=False) == ""


def test_what_raises_says_no_end() -> None:
    bad = pytest.raises(ValueError, match="of the test")
    with seen() as (clock, out), bad, LongWork(True).bytes("saving", lambda: 9) as did:
        clock.now += 2
        did(3)
        raise ValueError("of the test")
    assert out.getvalue() == "saving: 3 bytes of 9 bytes after 2 s\n"


def test_sharding_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
    with mock.patch.object(long_work, "AFTER_S", -1.0):
        lightning_zero.shard(model, device="cpu").release()
        assert "sharding, in units: 1 of 4 after 0 s\nsharding, in units: 4 in 0 s\n" in capsys.readouterr().err
        lightning_zero.shard(model, device="cpu", long_work=LongWork()).release()
        assert "sharding" not in capsys.readouterr().err


def test_a_thread_is_waited_for_with_its_count() -> None:
    count, future = Count(8_000_000), Future[int]()

    def waited(futures: Any, timeout: float) -> Any:
        clock.now += 1.0
        count.did(2_000_000)
        if count.done == count.total:
            future.set_result(1)
        return wait(futures, 0)

    with seen() as (clock, out), mock.patch.object(long_work, "wait", waited):
        LongWork(True).wait(future, "saving a.ckpt", count)
    assert out.getvalue() == "saving a.ckpt: 4.0 MB of 8.0 MB after 2 s\nsaving a.ckpt: 8.0 MB in 4 s\n"


def test_what_does_not_say_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise OSError(28, "no space")

    with mock.patch.object(long_work, "AFTER_S", -1.0):
        for shows in (True, False):
            assert LongWork(shows).call(lambda: 5, "to the disk") == 5
            with pytest.raises(OSError, match="no space"):
                LongWork(shows).call(fails, "to the disk")
    assert capsys.readouterr().err.count("to the disk: over after 0 s") == 2
