"""Checks that hold for every test: nothing leaks out of one, and worker pools end in good order."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

# Read when torch is imported: threads of OpenMP that wait leave the core to other ranks.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

from tests import costs, harness
from tests.selection import TIERS, choose, has_only_full_cases, tier_of

# Reproducible runs: the same examples every time, no time limit on a shared machine, no folder left behind.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=150)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(costs)


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "; ".join(f"{tier}: {what}" for tier, what in TIERS.items())
    costs.add_options(parser)
    parser.addoption("--tier", choices=list(TIERS), default="default", help=said)


@pytest.hookimpl(specname="pytest_pycollect_makeitem", tryfirst=True)
def pytest_leave_out_full_functions(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Make no case of a function that has none in the default tier."""
    return [] if tier_of(collector.config) == "default" and has_only_full_cases(collector, obj) else None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Keep those cases of a test function that belong to the tier."""
    found = yield
    return choose(found, tier_of(collector.config)) if isinstance(found, list) else found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the cases with the mark ``full`` last: a run with ``--minutes`` may not come to them."""
    items.sort(key=lambda item: item.get_closest_marker("full") is not None)


def pytest_collection_finish() -> None:
    """What was imported and collected is not looked at again by each collection of garbage."""
    gc.collect()
    gc.freeze()


# The main job sets the second for its whole process, and the import of Lightning the third.
_NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCH_CPP_LOG_LEVEL", "PYTORCH_NVML_BASED_CUDA_CHECK"}


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
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"threads left behind: {sorted(t.name for t in left)}"
    changed = {key for key, _ in environ.items() ^ _environ().items()}
    assert not changed, f"environment variables changed: {sorted(changed)}"


# What Tensor.backward, torch.autograd.backward and torch.autograd.grad call.
_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=lambda: setattr(torch.autograd, "_engine_run_backward", _run_backward))


@pytest.fixture(autouse=True)
def backward_in_forks_only(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that computes a backward in this process. It may start autograd's threads (with torch's CUDA build it
    does after a FakeTensorMode, without a GPU too), and then no process that is forked later can compute one."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("gpu") is None:
            patch.setattr(torch.autograd, "_engine_run_backward", _fail_backward)
        yield


def _fail_backward(*args: Any, **kwargs: Any) -> None:
    pytest.fail("expected a backward in a forked process only. Use on_ranks, run or forked of tests/harness.py")


def _environ() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in _NOT_OURS}
