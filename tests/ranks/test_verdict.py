"""Which rank went: found out over a store, without process groups."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_zero.ranks import posts
from lightning_zero.ranks import verdict as module
from lightning_zero.ranks.posts import Post, RunningTime, Seen, is_alive
from lightning_zero.ranks.verdict import Gone, Peers, Stuck, is_broken_connection, verdict

EVERY_S = 0.05


def beat(one: Peers) -> None:
    """Do what a watchdog's thread does every few seconds."""
    one.posts.write("at work")
    one.posts.read([0])
    one.find_posted()


@contextmanager
def answering(peers: list[Peers], silent: int | None = None) -> Iterator[None]:
    """The threads of all ranks answer, but not that of ``silent``."""
    over = threading.Event()

    def answer() -> None:
        while not over.wait(EVERY_S):
            for rank, one in enumerate(peers):
                if rank != silent:
                    beat(one)

    with ThreadPoolExecutor() as pool:
        pool.submit(answer)
        yield
        over.set()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is on a machine of its own."""
    monkeypatch.setattr(posts, "machine", map("machine {}".format, itertools.count()).__next__)
    monkeypatch.setattr(module, "DYING_S", 0.0)


def ranks(world: int) -> tuple[Any, list[Peers]]:
    store = dist.HashStore()
    return store, [Peers(store, "p", rank, world, EVERY_S, RunningTime(float("inf"))) for rank in range(world)]


def test_a_rank_that_does_not_answer_is_named_by_all(
    elsewhere: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROLL_CALL_S", 1.0)
    _, peers = ranks(4)
    with answering(peers, silent=2), ThreadPoolExecutor() as pool:
        (found,) = set(pool.map(lambda rank: peers[rank].culprit(), (3, 1, 0)))
    assert found.startswith("rank 2 (on ")
    assert found.endswith(f"process {os.getpid()}) has ended without a word (killed?)")
    assert capfd.readouterr().err.count("rank 2 (on") == 1  # once, and at once


def test_a_broken_connection_of_living_ranks_names_none(elsewhere: None) -> None:
    _, peers = ranks(3)
    with answering(peers):
        assert peers[1].culprit() == "a peer broke off, though all ranks still answer"


def test_a_dead_process_of_this_machine_needs_no_roll_call() -> None:
    _, peers = ranks(3)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    while is_alive(child.pid):  # it stays, a zombie: nobody has waited for it
        time.sleep(0.01)
    peers[2].posts.own = replace(peers[2].posts.own, host="here", pid=child.pid)
    beat(peers[2])
    started = time.monotonic()
    assert peers[0].culprit() == f"rank 2 (on here, process {child.pid}) has ended without a word (killed?)"
    assert time.monotonic() - started < 1
    child.wait()
    assert not is_alive(child.pid) and is_alive(os.getpid())


def test_a_rank_that_came_to_its_end_was_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (one, other) = ranks(2)
    other.leave()
    monkeypatch.setattr(one.posts, "has_ended", lambda post: post.left)
    assert "rank 1" in one.culprit() and "all ranks must make a call that takes all ranks" in one.culprit()


def test_an_exception_of_a_ranks_own_is_told_and_consequences_are_not(elsewhere: None) -> None:
    _, peers = ranks(3)
    peers[1].tell(KeyError("planned"))
    peers[2].tell(ValueError("later"))
    assert "rank 1 (on " in peers[0].culprit() and "failed with KeyError: 'planned'" in peers[0].culprit()
    assert peers[2].culprit() == peers[0].culprit()
    for one in peers:
        one.forget()
    with answering(peers):
        assert "planned" not in peers[0].culprit()


def test_without_the_store_it_is_its_holder(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    gone = SimpleNamespace(
        **dict.fromkeys(("get", "multi_get", "set", "check", "compare_set"), mock.Mock(side_effect=RuntimeError))
    )
    _, peers = ranks(2)
    beat(peers[1])
    peers[1]._store = peers[1].posts._store = gone
    assert peers[1].culprit().startswith("rank 0 (on ") and "holds the store, has ended" in peers[1].culprit()
    _, peers = ranks(2)
    peers[0].tell(KeyError("told before"))
    beat(peers[1])
    peers[1]._store = peers[1].posts._store = gone
    assert "told before" in peers[1].culprit()


def post(wait: str = "", place: str = "at work", **asked: int) -> Post:
    return Post("node", 7, "other", 1, place, wait, asked or None)


# What the ranks have posted, each with the seconds without a beat and with the same wait; a time limit of 10 s, and 5 s
# in which waits must not change.
VERDICTS: dict[str, tuple[list[Seen], Gone | Stuck | None]] = {
    "all work": ([Seen(post()), Seen(post())], None),
    "one has ended": ([Seen(post()), Seen(post(), True), Seen(post(), False, 99)], Gone([1], True)),
    "two are silent": ([Seen(post()), Seen(post(), False, 10), Seen(post(), False, 11)], Gone([1, 2], False)),
    "silent for a moment": ([Seen(post()), Seen(post(), False, 9)], None),
    "one works": ([Seen(post("1: a", a=1), still_s=9), Seen(post(), still_s=9)], None),
    "not for long": ([Seen(post("1: a", a=1), still_s=9), Seen(post("1: b", b=1), still_s=4)], None),
    "for each other": (
        [Seen(post("1: a", "here", a=1), still_s=9), Seen(post("4: b", "there", b=2), still_s=9)],
        Stuck(["here", "there"], ["a", "b"], True),
    ),
    "one message is complete": (
        [Seen(post("1: a", a=1, b=1), still_s=9), Seen(post("1: b", b=1), still_s=9)],
        Stuck(["at work"] * 2, ["a", "b"], False),
    ),
    "one has not counted": (
        [Seen(post("1: a", a=1), still_s=9), Seen(post("1: b"), still_s=9)],
        Stuck(["at work"] * 2, ["a", "b"], False),
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_follows_from_the_posts(name: str) -> None:
    seen, expected = VERDICTS[name]
    assert verdict(dict(enumerate(seen)), silent_s=10, still_s=5) == expected


def test_a_neighbour_is_named_while_it_is_not_heard(elsewhere: None) -> None:
    _, peers = ranks(3)

    def judge(limit_s: float) -> str | None:
        seen = peers[0].posts.read([1])
        gone = verdict(seen, silent_s=limit_s)
        return gone.sentence(seen, limit_s) if isinstance(gone, Gone) else None

    for _ in range(3):
        beat(peers[1])
        assert judge(5) is None
        time.sleep(0.1)
    deadline = time.monotonic() + 5
    while (said := judge(0.2)) is None and time.monotonic() < deadline:  # rank 1 beats no more
        time.sleep(0.02)
    assert said is not None and said.startswith("rank 1 (on ") and "has not been heard of for 0.2 s" in said
    beat(peers[1])
    assert judge(0.2) is None  # it was only slow


def test_of_ranks_that_have_ended_those_without_a_goodbye_are_named() -> None:
    seen = {2: Seen(replace(post(), left=True), True), 3: Seen(post(), True)}
    assert Gone([2, 3], True).sentence(seen) == "rank 3 (on node, process 7) has ended without a word (killed?)"


def test_a_process_lives_if_no_file_can_be_opened() -> None:
    with mock.patch.object(posts.Path, "read_text", side_effect=OSError(errno.EMFILE, "too many open files")):
        assert is_alive(1)


def test_a_goodbye_stays(elsewhere: None) -> None:
    """The thread that posts what a rank does may be late."""
    _, (one, other) = ranks(2)
    other.leave()
    beat(other)
    assert one.posts.read([1])[1].post.left


def test_broken_connections_are_known_by_their_words() -> None:
    broken = [
        "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2001",
        "Read error [127.0.0.1]:1: Connection reset by peer",
        "writev [10.0.0.1]:2: Broken pipe",
    ]
    others = [
        "shapes cannot be multiplied",
        "PytorchStreamReader failed reading zip archive",
        "Timed out waiting 1800000ms for recv operation to complete",
    ]
    assert all(is_broken_connection(RuntimeError(words)) for words in broken)
    assert not any(is_broken_connection(RuntimeError(words)) for words in others)
    assert not is_broken_connection(KeyError("connection closed"))


def test_a_backend_is_quoted_without_its_places_in_the_source() -> None:
    said = "[/gloo/pair.cc:537] Connection closed by peer [127.0.0.1]:1. This is typically caused by a crash. GLHF! x"
    assert module.plain(RuntimeError(said)) == "Connection closed by peer [127.0.0.1]:1"
