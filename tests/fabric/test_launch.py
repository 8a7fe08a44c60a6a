"""The example of the documentation, started in the ways that launching.md has."""

from __future__ import annotations

import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT, forked, free_port, run_command


@pytest.mark.full
@pytest.mark.parametrize("by", ["alone", "torchrun"])
def test_the_example_of_the_documentation(by: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "fabric.md").read_text(), re.S)
    script = tmp_path / "train.py"
    script.write_text(code)
    if by == "alone":  # rank 0 is a fork of this process
        run = partial(runpy.run_path, str(script), run_name="__main__")
        environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        found = forked(run, tmp_path, [str(script)], **environ)
    else:
        torchrun = ("python", "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
        found = run_command(*torchrun, script, folder=tmp_path)
    assert found.returncode == 0, found.stderr[-3000:]
    ((step, loss),) = re.findall(r"^step (\d+): loss ([\d.]+)$", found.stdout, re.M)  # once: rank 0 alone prints
    assert found.stdout.count("loss") == 1
    assert int(step) >= 12 and float(loss) < 0.6
    state = torch.load(tmp_path / "fabric.ckpt", weights_only=True)
    assert state["step"] == int(step) and state["model"]["0.weight"].shape == (64, 16)
