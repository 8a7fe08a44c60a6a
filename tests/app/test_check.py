"""``python -m lightning_zero.env --check``: rows pass on a machine that works; a row that fails ends in exit code 1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_zero.app import check
from lightning_zero.config import Offload, Stage
from tests.harness import run_command


@pytest.mark.full
def test_rows_pass_and_leave_no_files(tmp_path: Path) -> None:
    command = ("python", "-m", "lightning_zero.env", "--check", "--disk", tmp_path)
    done = run_command(*command, folder=tmp_path, timeout=280)  # another folder, as who has installed a wheel
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row.name for row in check.rows()]
    assert re.findall(r"^(.+?) +[\d.]+ s +differs by \S+ +ok$", done.stdout, re.MULTILINE) == rows
    assert f"{len(rows)} of {len(rows)} rows passed" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_losses_that_differ_from_those_of_ddp_are_an_error(tmp_path: Path) -> None:
    broken = "import lightning_zero.app.check as c; c.BOUND['fp32'] = -1.0; "
    broken += "c._on_rank(0, 1, 0, False, '', [c.Row('zero1')])"
    done = run_command("python", "-c", broken, timeout=280)
    assert done.returncode == 1 and "zero1 fp32: losses differ from DDP's" in done.stderr, done.stderr


def test_every_row_that_is_allowed_is_tried_and_others_refused() -> None:
    rows = check.rows()
    assert {row.stage for row in rows} == set(Stage.__members__) - {"auto"}  # which is one of the others
    assert {row.offload for row in rows if row.stage == "zero3"} == set(Offload.__members__)
    with pytest.raises(SystemExit, match="--check: expected a part of one of zero0 fp32"):
        check.check("zero9", None)
