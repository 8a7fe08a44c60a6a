"""A rank whose messages would never end ends itself when another rank is gone, and only then."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_zero.ranks import posts, verdict
from lightning_zero.ranks import watchdog as module
from lightning_zero.ranks.posts import is_alive
from lightning_zero.ranks.watchdog import EXIT_CODE, Watchdog
from tests.harness import ROOT, free_port, run_command

FOREVER_S = 60.0
LONG_S = 1.2  # one that stands still and is watched has ended by then
NUMBER = 10**6

WATCHED = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from lightning_zero.ranks import watchdog as module

class Comm:
    rank, port, world_size = map(int, sys.argv[1:])
    place, issued, stall_timeout_s, waiting, asked = "gather of unit blocks.1", 7, 30.0, "", {}

class Slow:
    def __getattr__(self, name):
        try:
            store.wait(["never"], timedelta(seconds=0.2))  # in C++, without Python's lock
        except dist.DistStoreError:
            return getattr(store, name)

limit = timedelta(seconds=30)
store = dist.TCPStore("127.0.0.1", Comm.port, is_master=Comm.rank == 0, timeout=limit, wait_for_workers=False)
comm = Comm()
"""
STANDS_STILL = (
    WATCHED
    + """
module.EVERY_S, module.STANDSTILL_S = 0.1, 1.0
dog = module.Watchdog(comm, store, number=1, notices_broken_connections=False)
time.sleep(0.5)
print("here", flush=True)
time.sleep(60)  # as in a kernel that never ends
"""
)
SLOW_STORE = (
    WATCHED
    + """
module.EVERY_S = 0.02
dog = module.Watchdog(comm, Slow(), number=1, notices_broken_connections=False)
time.sleep(0.5)
"""
)


class Side:
    """What a watchdog watches: a rank whose thread waits until it is let go."""

    def __init__(self, store: Any, rank: int, world_size: int, limit_s: float, hears: bool) -> None:
        self.rank, self.world_size, self.stall_timeout_s = rank, world_size, limit_s
        self.place, self.issued, self.waiting, self.asked = f"place of {rank}", 0, "", Counter[str]()
        self.ended: list[int] = []
        self._go = threading.Event()
        self._made = threading.Event()
        self._thread = threading.Thread(target=self._train, args=(store, hears))
        self._thread.start()
        self._made.wait()

    def _train(self, store: Any, hears: bool) -> None:
        self.dog = Watchdog(self, store, number=NUMBER, notices_broken_connections=hears, end=self._end)
        self._made.set()
        self._go.wait(FOREVER_S)

    def _end(self, code: int) -> None:
        self.ended.append(code)
        self.dog._stop.set()

    def close_all(self) -> None:
        self._go.set()
        self._thread.join()
        self.dog._gone = None
        self.dog.stop()


Sides = Callable[..., list[Side]]


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Side]]]:
    monkeypatch.setattr(module, "EVERY_S", 0.05)
    monkeypatch.setattr(module, "STANDSTILL_S", 0.5)
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    monkeypatch.setattr(verdict, "ROLL_CALL_S", 0.2)
    made: list[Side] = []

    def make(world: int, limit_s: float = 30.0, hears: bool = False) -> list[Side]:
        store = dist.HashStore()
        made.extend(Side(store, rank, world, limit_s, hears) for rank in range(world))
        return made

    yield make
    for side in made:
        side.close_all()


def seen_within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def die(ranks: list[Side], rank: int) -> int:
    """From now on the process of a rank is one that was killed."""
    side = ranks[rank]
    child = subprocess.Popen([sys.executable, "-c", ""])
    while is_alive(child.pid):
        time.sleep(0.01)
    side.dog._stop.set()
    side.dog.peers.posts.own = replace(side.dog.peers.posts.own, host="here", pid=child.pid)
    side.dog.peers.posts.write(side.place)
    child.wait()
    return child.pid


def test_ranks_that_wait_for_a_killed_one_end_and_name_it(sides: Sides, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = sides(4)
    pid = die(ranks, 2)
    assert seen_within(5, lambda: all(ranks[r].ended for r in (0, 1, 3)))
    assert [side.ended for side in ranks] == [[EXIT_CODE], [EXIT_CODE], [], [EXIT_CODE]]
    said = capfd.readouterr().err
    for rank in (0, 1, 3):
        assert f"rank {rank}: rank 2 (on here, process {pid}) has ended without a word (killed?); this rank is" in said
        assert f"rank {rank} (at: place of {rank}) ends: it has made no progress for " in said


def test_a_rank_that_gets_on_is_told_and_goes_on(sides: Sides, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = sides(2)
    die(ranks, 1)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        ranks[0].issued += 1  # in another thread than the one that stands still: hooks of backward are
        time.sleep(0.02)
    assert not ranks[0].ended
    assert capfd.readouterr().err.count("has ended without a word") == 1
    assert seen_within(3, lambda: bool(ranks[0].ended))


def test_a_rank_that_has_stood_still_before_has_its_time(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """For launchers to act, and for exceptions to arrive."""
    monkeypatch.setattr(module, "STANDSTILL_S", 1.0)
    ranks = sides(2)
    time.sleep(1.5)
    die(ranks, 1)
    assert not seen_within(0.7, lambda: bool(ranks[0].ended))
    assert seen_within(3, lambda: bool(ranks[0].ended))


def _raises() -> None:
    store = dist.HashStore()
    side = Side(store, 0, 2, 30.0, False)
    try:
        raise ValueError
    finally:  # as in a process of multiprocessing
        module._say_goodbye()
        assert not side.dog._left
        module._LIVE.discard(side.dog)
        side.close_all()


def test_a_rank_that_ends_by_an_exception_says_no_goodbye() -> None:
    with pytest.raises(ValueError):
        _raises()


@pytest.mark.parametrize(
    "why", ["gloo hears by itself", "a goodbye", "a goodbye without new threads", "the session is interactive"]
)
def test_nobody_ends_of_a_killed_rank(why: str, sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = sides(2, limit_s=0.5 if "goodbye" in why else 30.0, hears="gloo" in why)
    if "goodbye" in why:
        with monkeypatch.context() as patch:
            if "without" in why:  # as at exit in Python 3.12
                patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
            ranks[1].dog.stop()
    elif "interactive" in why:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    die(ranks, 1)
    assert not seen_within(LONG_S, lambda: bool(ranks[0].ended))


def test_a_rank_that_has_forgotten_its_engine_is_not_missed(sides: Sides) -> None:
    ranks = sides(2, limit_s=0.5, hears=True)
    ranks[1].dog._watched = lambda: None  # type: ignore[assignment]  # collected
    ranks[1].dog._stop.set()
    assert not seen_within(LONG_S, lambda: ranks[0].dog._gone is not None)


def test_at_a_clean_end_nothing_is_said(sides: Sides, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = sides(2)
    ranks[1].dog.leave()  # at exit; rank 0, which holds the store, came there first
    peers = ranks[1].dog.peers
    ranks[1].dog._store = peers._store = peers.posts._store = None  # what is asked raises
    die(ranks, 0)
    assert not seen_within(LONG_S, lambda: bool(ranks[1].ended))
    assert capfd.readouterr().err == ""


def test_a_rank_that_failed_by_itself_is_quoted(sides: Sides, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = sides(2)
    ranks[1].dog.peers.tell(KeyError("planned"))
    ranks[1].dog.peers.leave()  # on the way out, and yet nothing is well
    assert not seen_within(1, lambda: bool(ranks[0].ended))  # it may have been survived, by all
    die(ranks, 1)
    assert seen_within(3, lambda: bool(ranks[0].ended))
    assert "failed with KeyError: 'planned'" in capfd.readouterr().err


@pytest.mark.parametrize("hears", [False, True])
def test_a_rank_of_another_machine_is_missed_after_the_timeout(
    hears: bool, sides: Sides, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = iter(range(10))
    monkeypatch.setattr(posts, "machine", lambda: f"machine {next(names)}")
    ranks = sides(3, limit_s=1.0, hears=hears)
    assert not seen_within(LONG_S, lambda: any(side.ended for side in ranks))  # all stand still, and all are there
    ranks[1].dog._stop.set()
    assert seen_within(6, lambda: bool(ranks[0].ended and ranks[2].ended))
    said = capfd.readouterr().err
    assert "ends: it has made no progress for" in said and "rank 1 (on " in said
    assert "has not been heard of for 1 s: it has ended or hangs" in said
    assert "rank 2: rank 1 (on " in said  # and not rank 0, which ended before it, of the same cause


def test_a_slow_rank_is_taken_back(sides: Sides) -> None:
    ranks = sides(2, limit_s=1.0)
    store = ranks[1].dog._store
    ranks[1].dog.peers.posts._store = mock.Mock(wraps=store, set=lambda *_: None)  # swallows what is written
    assert seen_within(5, lambda: ranks[0].dog._gone is not None)
    ranks[0].issued += 1
    ranks[1].dog.peers.posts._store = store
    assert seen_within(1, lambda: ranks[0].dog._gone is None)
    assert not seen_within(LONG_S, lambda: bool(ranks[0].ended))


@contextmanager
def cut_off(dog: Watchdog) -> Iterator[None]:
    """Its store is behind a network that is cut: it neither answers nor fails."""
    assert seen_within(2, lambda: dog.peers.posts.holder.beat > 0)
    network = threading.Event()
    calls = ("get", "multi_get", "set", "check", "compare_set")
    answers = dict.fromkeys(calls, lambda *_: network.wait(FOREVER_S))
    dog._store = dog.peers._store = dog.peers.posts._store = SimpleNamespace(**answers)
    try:
        yield
    finally:
        network.set()


def test_a_store_that_does_not_answer_ends_a_rank_that_waits(sides: Sides, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = sides(2, limit_s=1.0)
    with cut_off(ranks[1].dog):
        assert seen_within(8, lambda: bool(ranks[1].ended))
        assert "rank 1: rank 0 (on " in capfd.readouterr().err


def test_messages_do_not_wait_for_a_store_that_does_not_answer(sides: Sides) -> None:
    dog = sides(2)[1].dog
    with cut_off(dog):
        started = time.monotonic()
        assert dog.places_and_silent() is None
        assert dog.culprit().startswith("rank 0 (on ")
        assert dog.missing("here", 0.1) == [0]
        dog.tell(KeyError("planned"))
        assert time.monotonic() - started < 4


def test_process_exits_cleanly_while_its_watchdog_asks_the_store() -> None:
    """C++ aborts a process whose interpreter goes while a thread of Python's is inside the store."""
    run_command("python", "-c", SLOW_STORE, 0, 0, 2, code=0)


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 2])
def test_processes_that_wait_for_a_killed_one_end_and_name_it(killed: int) -> None:
    """Rank 0 holds the store, so that its end is seen in another way."""
    command, port = [sys.executable, "-c", STANDS_STILL], free_port()
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    ranks = [subprocess.Popen([*command, *map(str, (rank, port, 3))], **pipes) for rank in range(3)]
    try:
        for process in ranks:
            assert process.stdout.readline() == "here\n", process.stderr
        ranks[killed].kill()
        for process in ranks[:killed] + ranks[killed + 1 :]:
            _, said = process.communicate(timeout=50)
            assert process.returncode == EXIT_CODE, said
            assert f"rank {killed} (" in said and "ends: it has made no progress" in said, said
    finally:
        for process in ranks:
            process.kill()
            process.wait()
