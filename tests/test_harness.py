"""The harness: failures reach the parent, and the next case is clean. The cases of the default run."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import harness
from tests.harness import CaseTimeout, run, run_command
from tests.selection import TIERS, pairwise_places


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


PAIRED = [{"a": a, "b": b, "c": c, "d": d} for a, b, c, d in itertools.product("xyz", "pq", (1, 2, 3), (True, False))]


def test_every_pair_occurs_in_few_cases() -> None:
    chosen = [PAIRED[place] for place in pairwise_places(PAIRED)]
    for one, other in itertools.combinations("abcd", 2):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in PAIRED}
    assert len(chosen) <= 12 < len(PAIRED)


FILE = """
import pytest

@pytest.mark.parametrize("a", ["x", "y"])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_product(a, b): ...

@pytest.mark.sample
@pytest.mark.parametrize("a", [pytest.param(0, marks=pytest.mark.full), 1, 2])
def test_sampled(a): ...

@pytest.mark.sample
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [3, 4, 5])
def test_pair(a, b): ...

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.mainly(lambda a: a == 2)
def test_main(a): ...

@pytest.mark.full
@pytest.mark.parametrize("a", [1, 2])
def test_full(a): ...
"""


@pytest.mark.full
def test_each_case_is_in_one_tier_and_the_default_one_has_every_value(tmp_path: Path) -> None:
    hooks = "pytest_addoption, pytest_pycollect_makeitem, pytest_leave_out_full_functions"
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import {hooks}")
    (tmp_path / "test_file.py").write_text(FILE)
    found = {}
    for tier in TIERS:
        command = ("python", "-m", "pytest", "--co", "-q", "-c/dev/null", f"--tier={tier}", tmp_path)
        found[tier] = re.findall(r"::(\S+)", run_command(*command).stdout)
    product = [name for name in found["default"] if name.startswith("test_product")]
    assert len(product) == 3
    assert all(any(value in name for name in product) for value in "xy123")
    pair = [re.findall(r"\d", name) for name in found["default"] if name.startswith("test_pair")]
    assert len(pair) == 2 and not set(pair[0]) & set(pair[1])
    others = [name for name in found["default"] if not name.startswith(("test_pair", "test_product"))]
    assert others == ["test_sampled[1]", "test_sampled[2]", "test_main[2]"]
    assert sorted(found["default"] + found["rest"]) == sorted(found["all"])
    assert len(found["all"]) == 19
