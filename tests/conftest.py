"""Checks that hold for every test: nothing leaks out of one, and worker pools end in good order."""

from __future__ import annotations

import gc
import inspect
import os
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

# Read when torch is imported: threads of OpenMP that wait leave the core to other ranks.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import settings

from tests import harness
from tests.pairwise import pairwise_places

# Reproducible runs: the same examples every time, no time limit on a shared machine, no folder left behind.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=150)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """A run of the full matrices takes all stages where the default one takes two."""
    if "not full" not in config.getoption("markexpr"):
        os.environ["LIGHTNING_ZERO_ALL_STAGES"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which cases of parametrized tests are ``full``.

    Those of ``@pytest.mark.mainly(predicate)`` for which the predicate, by name, does not hold; of tests with three
    parameters or more all but a selection in which every pair of values occurs; and of tests of all stages one of the
    two in the middle, whose ways are the same but for when gradients are sharded: by turns.
    """
    for item in items:
        for mark in item.iter_markers("mainly"):
            (predicate,) = mark.args
            known = item.callspec.params  # type: ignore[attr-defined]
            if not predicate(**{name: known[name] for name in inspect.signature(predicate).parameters}):
                item.add_marker(pytest.mark.full)
    products: dict[tuple[Any, str], list[pytest.Item]] = {}
    for item in items:
        if len(_parameters(item)) >= 3 and not any(map(item.get_closest_marker, ("full", "slow", "gpu", "slurm"))):
            products.setdefault((item.parent, item.originalname), []).append(item)  # type: ignore[attr-defined]
    for cases in products.values():
        chosen = pairwise_places([_parameters(case) for case in cases])
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker(pytest.mark.full)
    for item in items:
        if _is_left_out_by_turns(item):
            item.add_marker(pytest.mark.full)


_BY_TURNS = {(0, 1, 2, 3): (1, 2), ("zero0", "zero1", "zero2", "zero3"): ("zero1", "zero2")}


def _is_left_out_by_turns(item: pytest.Item) -> bool:
    """Whether a test of all stages takes the other of the two in the middle, for these other parameters."""
    if not hasattr(item, "callspec"):
        return False
    stages = [list(mark.args[1]) for mark in item.iter_markers("parametrize") if mark.args[0] == "stage"]
    pair = next((pair for every, pair in _BY_TURNS.items() if stages == [list(every)]), ())
    if (stage := item.callspec.params.get("stage")) not in pair:
        return False
    others = sorted((name, place) for name, place in item.callspec.indices.items() if name != "stage")
    name = f"{item.nodeid.partition('[')[0]} {others}"  # the same in every process
    return stage == pair[zlib.crc32(name.encode()) % 2]


def _parameters(item: pytest.Item) -> dict[str, tuple[int, ...]]:
    """The case of a parametrized test: what is given as one list of tuples is one parameter, and equal where it is
    the same objects."""
    if not hasattr(item, "callspec"):
        return {}
    left = {name: id(value) for name, value in item.callspec.params.items()}
    case = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        case[names] = tuple(left.pop(name.strip()) for name in names.split(","))
    return case | {name: (value,) for name, value in left.items()}


def pytest_collection_finish() -> None:
    """What was imported and collected is not looked at again by each collection of garbage."""
    gc.collect()
    gc.freeze()


_NOT_OURS = {"PYTEST_CURRENT_TEST"}


@pytest.fixture(scope="session", autouse=True)
def pools_end_cleanly() -> Iterator[None]:
    """Every worker of every pool exits with 0."""
    yield
    codes = harness.close_pools()
    assert all(code == 0 for exits in codes.values() for code in exits), f"exit codes of the workers, by pool: {codes}"


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """A test leaves no thread and no changed environment variable behind in this process."""
    threads, environ = set(threading.enumerate()), _environ()
    yield
    deadline = time.monotonic() + 2
    while (left := _new_threads(threads)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"threads left behind: {sorted(t.name for t in left)}"
    changed = {key for key, _ in environ.items() ^ _environ().items()}
    assert not changed, f"environment variables changed: {sorted(changed)}"


def _environ() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in _NOT_OURS}


def _new_threads(known: set[threading.Thread]) -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t not in known and t.is_alive()}
