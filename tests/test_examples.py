"""Each example runs as it is and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(folder: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *overrides],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
    )


def accuracy(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^validation accuracy: (\S+)$", done.stdout, re.MULTILINE)
    assert len(found) == 1, done.stdout  # rank 0 alone
    return float(found[0])


def test_minimal(tmp_path: Path) -> None:
    assert accuracy(run(tmp_path, "minimal.py")) > 0.9


@pytest.mark.slow
def test_vision_with_hydra(tmp_path: Path) -> None:
    done = run(tmp_path, "vision_hydra.py", "zero/stage=zero2", "zero/precision=bf16", "hydra.run.dir=run")
    assert accuracy(done) > 0.9
    assert [f.name for f in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_vision(tmp_path: Path) -> None:
    assert accuracy(run(tmp_path, "vision.py")) > 0.9


def test_vision_with_hydra_refuses_in_our_words(tmp_path: Path) -> None:
    done = run(tmp_path, "vision_hydra.py", "zero.prefetch_bytes=-1", "hydra.run.dir=run")
    assert done.returncode != 0
    assert "error: zero.prefetch_bytes: expected a number >= 0, got -1" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_example_has_a_test() -> None:
    here = Path(__file__).read_text()
    assert all(f'"{f.name}"' in here for f in EXAMPLES.glob("*.py"))
