"""Ray Train: ranks, devices and checkpoints are Ray's. ``make test-ray`` installs Ray and runs this."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness import ROOT, run_command

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-ray"),
]
PROGRAM = """
import os, signal
import ray
from lightning.pytorch import Callback
from ray_train import run

class Dies(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_rank == 1 and trainer.global_step == 20 and not os.path.exists(MARK):
            open(MARK, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

MARK = os.path.abspath("killed")
if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=200 * 2**20)
    for strategy, callbacks in {"ddp": [], "zero3": [Dies()], "zero1": []}.items():
        metrics = run(strategy, callbacks=callbacks).metrics
        print(f"{strategy}: {metrics['step']} steps, loss {metrics['train_loss']:.6f}")
"""


TUNED = """
import ray
from ray_train import tune

if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=200 * 2**20)
    for result in tune({"strategy": ray.tune.grid_search(["ddp", "zero3"]), "width": 64}):
        print(f"{result.config['strategy']}: {result.metrics['step']} steps, loss {result.metrics['train_loss']:.6f}")
"""


def results_of(program: str, folder: Path) -> dict[str, str]:
    for name in ("ray_train.py", "minimal.py"):
        shutil.copy(ROOT / "examples" / name, folder)
    (folder / "program.py").write_text(program)
    done = run_command("python", "program.py", folder=folder, timeout=1500, code=0)
    return dict(re.findall(r"^(\w+): (\d+ steps, loss \S+)$", done.stdout, re.MULTILINE))


@pytest.mark.timeout(1600)
def test_trials_of_ray_tune_as_under_ddp(tmp_path: Path) -> None:
    found = results_of(TUNED, tmp_path)
    assert len(found) == 2 and len(set(found.values())) == 1, found


@pytest.mark.timeout(1600)
def test_workers_of_ray_train_as_under_ddp_and_one_may_die(tmp_path: Path) -> None:
    found = results_of(PROGRAM, tmp_path)
    assert (tmp_path / "killed").exists() and len(found) == 3 and len(set(found.values())) == 1, found
