"""``lightning-zero replay`` runs steps of a run again and says what differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_zero.app.replay import compare, read
from tests.harness import run_command

COMMAND = ("python", "-m", "lightning_zero")


@pytest.mark.full
def test_steps_that_are_run_again_are_compared(tmp_path: Path) -> None:
    settings = ["experiment=tiny", "trainer.devices=2", "trainer.max_steps=8", "zero.fingerprint=2"]
    saves = ["callbacks.checkpoint.save_top_k=-1", "+callbacks.checkpoint.every_n_train_steps=3"]
    saves += [f"callbacks.checkpoint.dirpath={tmp_path}/run/checkpoints"]
    run_command(*COMMAND, "train", *settings, *saves, "hydra.run.dir=run", folder=tmp_path, code=0)
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/checkpoints/*")}
    replay = (*COMMAND, "replay", "run", "--from", "run/checkpoints/step-3.ckpt", "--steps", "4")
    again = run_command(*replay, "zero/stage=zero1", folder=tmp_path, code=0)
    assert "all 2 steps that both have are equal" in again.stdout  # 4 and 6
    assert max(read(tmp_path / "run" / "replay-1" / "fingerprints.csv")) == 6  # it stops after step 7
    assert saved == {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/checkpoints/*")}
    path = tmp_path / "run" / "fingerprints.csv"
    path.write_text(re.sub(r"(?m)^(6,gpt\.blocks\.1,)\w{16}", r"\g<1>0123456789abcdef", path.read_text()))
    other = run_command(*replay, folder=tmp_path, code=1)
    assert "1 steps are equal; after step 6, unit gpt.blocks.1: ('0123456789abcdef', " in other.stderr


def test_the_first_difference_is_named() -> None:
    a, b = ("1", "2"), ("1", "3")
    said = f"after step 2, unit y: {a} in the run, {b} again"
    assert compare({1: {"x": a}, 2: {"x": a, "y": a}}, {2: {"x": a, "y": b}, 3: {}}) == (said, 0)
    assert compare({1: {"x": a}, 2: {"x": a}}, {1: {"x": a}, 2: {"x": a}}) == (None, 1)  # 1: of the checkpoint
    units = [f"blocks.{number}" for number in range(20)]
    said, _ = compare({1: dict.fromkeys(units, a)}, {1: dict.fromkeys(units, b)})
    assert said == f"after step 1, unit blocks.0: {a} in the run, {b} again"
    assert compare({1: {"x": a}}, {1: {}})[1] == 0


def test_a_run_without_fingerprints_is_refused(tmp_path: Path) -> None:
    done = run_command(*COMMAND, "replay", "run", "--from", "a.ckpt", "--steps", "4", folder=tmp_path, code=2)
    assert "run/fingerprints.csv: expected what replay compares, got nothing there" in done.stderr
