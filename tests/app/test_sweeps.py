"""Sweeps whose runs are jobs of SLURM, with a sbatch that only writes down; on a real SLURM: tests/slurm."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.app import sweep, train
from lightning_zero.config import ConfigError

SBATCH = """#!{python}
import json, os, re, sys
text = sys.stdin.read()
folder = re.search(r"^run_dir=(.*)$", text, re.MULTILINE)[1].strip("'")
open(folder + "/script", "w").write(text)
seed = int(re.search(r"seed=(\\d+)", text)[1])
json.dump({{"metrics": {{"bits": seed / 2}}}}, open(folder + "/results.json", "w"))
print("4711", sys.argv[1:])
sys.exit(seed == 3)
"""


def test_each_run_is_a_job(in_process: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH.format(python=sys.executable))
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(sweep, "failed", [])
    settings = ("cluster=slurm", "cluster.nodes=2", "cluster.time=1:00:00", "optimized_metric=bits")
    code, out, _ = in_process(train, "--multirun", "seed=2,3", "hydra.sweep.dir=s", *settings)
    assert code == 1 and out.count("4711 ['--parsable', '--wait']") == 2, out
    assert "=== run 1 has failed, with exit status 1" in out and "run 0 has failed" not in out
    for number, seed in enumerate((2, 3)):
        text = (tmp_path / "s" / str(number) / "script").read_text()
        assert f"    seed={seed} \\\n" in text and "    cluster=slurm \\\n" in text
        assert "#SBATCH --nodes=2\n" in text and "#SBATCH --signal=USR1@120\n" in text and "hydra.mode=RUN" in text
        assert json.loads((tmp_path / "s" / str(number) / "results.json").read_text())["metrics"] == {"bits": seed / 2}


def test_without_sbatch_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = sweep.ClusterConfig(name=sweep.ClusterName.slurm)
    with pytest.raises(ConfigError, match="sbatch: expected the command on PATH, .* drop cluster=slurm"):
        sweep.submit_job(cluster, ["seed=1"], tmp_path)


def test_a_package_that_a_sweep_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep.check_packages(["hydra/launcher=processes", "hparams_search=grid"])
    with pytest.raises(ConfigError, match=r"hydra/launcher=submitit_slurm: .* Drop hydra/launcher=submitit_slurm\."):
        sweep.check_packages(["--multirun", "hydra/launcher=submitit_slurm"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-zero\[search\]'"):
        sweep.check_packages(["hparams_search=optuna"])
