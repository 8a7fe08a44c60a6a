"""The example of the documentation, started in the ways that launching.md has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import free_port

ROOT = Path(__file__).parent.parent.parent
COMMANDS = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port={port}"],
}


@pytest.mark.parametrize("by", ["alone", pytest.param("torchrun", marks=pytest.mark.full)])
def test_the_example_of_the_documentation(by: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "fabric.md").read_text(), re.S)
    script = tmp_path / "train.py"
    script.write_text(code)
    command = [part.format(port=free_port()) for part in COMMANDS[by]]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environ, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    (step, loss) = re.findall(r"^step (\d+): loss ([\d.]+)$", found.stdout, re.M)[0]  # once: rank 0 alone prints
    assert found.stdout.count("loss") == 1
    assert int(step) >= 12 and float(loss) < 0.6
    state = torch.load(tmp_path / "fabric.ckpt", weights_only=True)
    assert state["step"] == int(step) and state["model"]["0.weight"].shape == (64, 16)
