"""The harness itself: failures reach the parent, and the next case is clean."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import harness
from tests.harness import CaseTimeout, run


def _rank_times(factor: int) -> int:
    return dist.get_rank() * factor


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("no such thing")
    dist.barrier()


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_exception_of_one_rank_is_raised_and_the_next_case_is_clean() -> None:
    assert run(2, _rank_times, 10) == [0, 10]  # in rank order
    with pytest.raises(KeyError, match="no such thing") as caught:
        run(2, _fail_on, 1)
    assert any("on rank 1" in note for note in caught.value.__notes__)
    assert any("_fail_on" in note for note in caught.value.__notes__)
    assert run(2, _rank_times, 1) == [0, 1]


def test_time_limit_shows_where_the_rank_stood() -> None:
    with pytest.raises(CaseTimeout, match="_sleep_on"):
        run(2, _sleep_on, 1, timeout=0.5)
    assert run(2, _rank_times, 1) == [0, 1]


def test_workers_cost_nothing_between_cases() -> None:
    deadline = time.monotonic() + 10
    for pid in run(2, os.getpid):
        while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
            assert time.monotonic() < deadline, state
            time.sleep(0.01)
    assert run(2, _rank_times, 1) == [0, 1]


def test_workers_with_many_threads_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (before := run(2, os.getpid)) == run(2, os.getpid)
    monkeypatch.setattr(harness, "MANY_THREADS", 0)
    assert run(2, os.getpid) == before  # after which they ended
    monkeypatch.undo()
    assert not set(run(2, os.getpid)) & set(before)
