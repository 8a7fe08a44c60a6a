"""Says what a run of the tests costs in time of the processor, with all processes that the tests start."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-minutes", type=float, help="fail if the run has taken more time of the processor")
    parser.addoption("--minutes", type=float, help="skip the tests that have not begun by then, and say how many")
    parser.addoption("--costs", type=Path, help="append a line of JSON for each test: its name, CPU and wall seconds")


BEGAN = time.monotonic()
LATE = "not run: --minutes are over"


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--minutes")
    if limit is not None and time.monotonic() - BEGAN > 60 * limit:
        pytest.skip(LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    late = sum(LATE in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if late:
        limit = terminalreporter.config.getoption("--minutes")
        terminalreporter.write_line(f"{late} tests were not run: the {limit:g} minutes were over.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Append what the test cost to the file of ``--costs``."""
    path = item.config.getoption("--costs")
    if path is None:
        return (yield)
    began, used = time.monotonic(), _used_by_all()
    answer = yield
    cost = {"test": item.nodeid, "cpu": _used_by_all() - used, "wall": time.monotonic() - began}
    with path.open("a") as file:
        file.write(json.dumps(cost) + "\n")
    return answer


def _used_by_all() -> float:
    """Give CPU seconds of this process, its descendants, and those of them that have ended."""
    used = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            used += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return used


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Print the time of the processor at the end of the run, and fail if it is above ``--cpu-minutes``."""
    yield  # workers of pytest-xdist and of the harness have ended
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 60
    print(f"CPU: {used:.1f} minutes, with all processes.")
    limit = session.config.getoption("--cpu-minutes")
    if limit is not None and used > limit:
        print(
            f"The run has taken more than --cpu-minutes={limit:g}: give dear tests the mark full (--costs finds them)."
        )
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
