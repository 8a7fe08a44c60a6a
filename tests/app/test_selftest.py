"""python -m lightning_zero.selftest: rows pass on a machine that works, and one that fails is told by the exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import lightning_zero
from lightning_zero.app import selftest
from lightning_zero.app.selftest import Found
from lightning_zero.config import Offload, Stage


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # From another folder, as who has installed a wheel.
    command = [sys.executable, "-m", "lightning_zero.selftest", "--cpu", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(Path(lightning_zero.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=280, env=environ)


@pytest.mark.parametrize("only", [pytest.param("zero3 nvme"), pytest.param("", marks=pytest.mark.full)])
def test_all_is_well(only: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--only", only, "--nvme", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row.name for row in selftest.rows() if only in row.name]
    assert re.findall(r"^(.+?) +[\d.]+ s +differs by \S+ +ok$", done.stdout, re.MULTILINE) == rows
    assert f"{len(rows)} of {len(rows)} rows passed" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_time_that_is_over_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "zero1", "--timeout", "0.1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout and "not over after 0 s (--timeout)" in done.stdout
    assert "0 of" in done.stdout and "were not tried" in done.stdout


def test_every_row_that_is_allowed_is_tried() -> None:
    rows = selftest.rows()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.stage for row in rows} == set(Stage.__members__) - {"auto"}  # which is one of the others
    assert {row.offload for row in rows if row.stage == "zero3"} == set(Offload.__members__)
    assert {row.offload for row in rows if row.stage == "zero0"} == {"none"}


def test_a_row_is_over_when_all_ranks_have_it_or_one_has_failed(tmp_path: Path) -> None:
    def write(rank: int, *found: Found) -> None:
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(json.dumps(asdict(f)) + "\n" for f in found) + '{"name')

    names = ["a", "b", "c"]
    assert selftest._new(str(tmp_path), 2, names, 0) == []
    write(0, Found("a", differs=1e-6), Found("b", differs=1e-7))
    assert selftest._new(str(tmp_path), 2, names, 0) == []
    write(1, Found("a", differs=1e-5))
    assert [found.differs for found in selftest._new(str(tmp_path), 2, names, 0)] == [1e-5]
    write(1, Found("a", differs=1e-5), Found("b", error="of the test"))
    assert [found.error for found in selftest._new(str(tmp_path), 2, names, 0)] == ["", "of the test"]
    assert [found.error for found in selftest._new(str(tmp_path), 2, names, 1)] == ["of the test"]


def test_mistakes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--only", "zero9"], "--only: expected a part of one of zero0 fp32"),
        (["--nvme", str(tmp_path / "none")], "--nvme: expected a folder"),
        (["--cpu", "--ranks", "-1"], "--ranks: expected 1 to"),
    ):
        with pytest.raises(SystemExit) as stopped:
            selftest.main(arguments)
        assert stopped.value.code == 2 and said in capsys.readouterr().err
