"""The tests marked ``gpu``, for a limited time: a line for each as it ends, and what was not reached. The main job."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LONG = "tests/engine/test_gpu.py"
OUTCOME = re.compile(r"^(?P<name>\S+::.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED)\b")
COLLECTED = re.compile(r"(\d+) selected|collected (\d+) items?$")
# A process whose parent was started in the background of a shell ignores SIGINT, and pytest would never hear of it.
PYTEST = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import pytest
sys.exit(pytest.main())
"""
TIMEOUT_S = 40.0  # of one test on a GPU: one that hangs leaves time for those behind it
SUMMARY_S = 8.0  # to end the tests that run and to write what has failed


def files() -> list[str]:
    """The files of tests that have the mark: collecting all others would take longer than running these."""
    marked = re.compile(r"mark\.gpu\b")
    found = (str(f.relative_to(ROOT)) for f in (ROOT / "tests").rglob("test_*.py") if marked.search(f.read_text()))
    return sorted(found, key=lambda name: (name == LONG, name))  # the others take seconds


def run(log: Path, limit_s: float) -> dict[str, Any]:
    """Run them, with all output in ``log``; what runs longer than ``limit_s`` is interrupted."""
    command = [sys.executable, "-c", PYTEST, "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider"]
    # Without conftest: what it checks of every test is for runs of all tests, and takes packages that may be missing.
    command += ["--color=no", "--noconftest", "-o", "minversion=7.0", *files()]
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={
            "LIGHTNING_ZERO_TEST_TIMEOUT_S": str(TIMEOUT_S), **os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200",
        },
    )  # fmt: skip
    outcomes: dict[str, str] = {}
    collected = 0
    with log.open("w") as file:
        for line in _lines(process, started + max(1.0, limit_s - SUMMARY_S), started + limit_s):
            file.write(line)
            file.flush()
            if match := OUTCOME.match(line):
                outcomes[match["name"]] = match["outcome"].lower()
            elif match := COLLECTED.search(line.strip()):
                collected = int(match[1] or match[2])
    seconds = time.monotonic() - started
    return _summary(outcomes, collected, process.returncode, seconds, cut=seconds > limit_s - SUMMARY_S)


def run_main_job(device: str, folder: str, log: Path, deadline: float) -> dict[str, Any]:
    """As its users start it, on one device, with all output in ``log``."""
    if importlib.util.find_spec("hydra") is None:
        return {"status": "not run", "why": "Hydra is not installed"}
    where = [f"trainer.accelerator={'gpu' if device == 'cuda' else 'cpu'}", "trainer.devices=1"]
    command = [sys.executable, "-m", "lightning_zero.train", "experiment=tiny", "zero/precision=bf16", *where]
    environ, limit_s = {**os.environ, "LIGHTNING_ZERO_RUNS": folder}, max(1.0, deadline - time.monotonic())
    with log.open("w") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, env=environ, stdout=file, stderr=file, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            return {"status": "cut", "error": "the main job was not over in time"}
    said = f"the main job has ended with {code}: {log.read_text(errors='replace')[-2000:]}"
    return {"status": "error", "error": said} if code else {"status": "ok"}


def _summary(
    outcomes: dict[str, str], collected: int, code: int | None, seconds: float, *, cut: bool
) -> dict[str, Any]:
    of = {kind: [n for n, o in outcomes.items() if o == kind] for kind in ("passed", "failed", "error", "skipped")}
    failed = of["failed"] + of["error"]
    not_run = max(0, collected - len(outcomes))
    return {
        "status": "cut" if cut and not failed else "ok" if code == 0 else "error",
        "collected": collected,
        "passed": len(of["passed"]),
        "failed": failed,
        "skipped": len(of["skipped"]),
        "not_run": not_run,
        "exit_code": code,
        "seconds": round(seconds, 1),
    }


def _lines(process: subprocess.Popen[bytes], interrupt_at: float, kill_at: float) -> Any:
    """Lines of its output as they come; at ``interrupt_at`` pytest may still say what has failed."""
    assert process.stdout is not None
    descriptor, rest, interrupted = process.stdout.fileno(), b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            if now >= interrupt_at and not interrupted:
                interrupted = True
                process.send_signal(signal.SIGINT)
            if now >= kill_at:
                break
            if not selector.select((kill_at if interrupted else interrupt_at) - now):
                continue
            block = os.read(descriptor, 1 << 16)
            if not block:
                break
            *whole, rest = (rest + block).split(b"\n")
            yield from (line.decode(errors="replace") + "\n" for line in whole)
    _end(process)
    yield rest.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and the ranks that it started, which are in its session."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
