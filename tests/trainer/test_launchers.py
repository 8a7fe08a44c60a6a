"""Starts of the Trainer: scripts that Lightning starts twice, and notebooks: one device in a cell, several by fork. An
interactive session is simulated.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric import connector as fabric_connector
from lightning.fabric.utilities import imports
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_zero.settings import ConfigError
from lightning_zero.trainer import launchers
from tests.harness import forked, run_command


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (imports, accelerator_connector, fabric_connector):
        monkeypatch.setattr(module, "_IS_INTERACTIVE", True)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def trainer(strategy: str, devices: int) -> Trainer:
    return Trainer(strategy=strategy, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False)


@pytest.mark.usefixtures("notebook")
def test_cell_needs_no_launcher_for_one_device_and_another_name_for_several() -> None:
    for name in ("zero3", "zero3_offload"):
        assert trainer(name, 1).strategy.launcher is None
    with pytest.raises(ConfigError, match=r"got 2 processes\. Set strategy='zero3_notebook'"):
        trainer("zero3", 2)
    launcher = trainer("zero3_notebook", 2).strategy.launcher
    assert launcher is not None and launcher.is_interactive_compatible


@pytest.mark.parametrize(("owner", "name", "says"), [
    (launchers, "is_in_use", "CUDA initialized in this process.*Restart the kernel"),
    (torch.distributed, "is_initialized", r"expected no process group.*destroy_process_group\(\)"),
])  # fmt: skip
def test_fork_of_what_cannot_be_forked_is_refused(owner: Any, name: str, says: str) -> None:
    with mock.patch.object(owner, name, return_value=True), pytest.raises(ConfigError, match=says):
        trainer("zero3_notebook", 2).strategy.launcher.launch(lambda: None)


def test_fork_after_a_backward_whose_threads_live_is_refused() -> None:
    names = mock.patch.object(launchers, "_thread_names", return_value=["python\n", "pt_autograd_0\n"])
    with names, pytest.raises(ConfigError, match=r"expected no backward before training.*Restart the kernel"):
        trainer("zero3_notebook", 2).strategy.launcher.launch(lambda: None)


def test_checkpoints_are_looked_at_before_processes_start(tmp_path: Path) -> None:
    """An address of a local file counts as the file."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "page.ckpt").write_text("<html>")
    torch.save({"a": torch.ones(999)}, tmp_path / "good.ckpt")
    (tmp_path / "short.ckpt").write_bytes((tmp_path / "good.ckpt").read_bytes()[:2000])
    of = trainer("zero3", 2)
    for name, says in {
        "none.ckpt": "none.ckpt', which does not exist", "folder": "folder: it has no .metadata",
        "page.ckpt": "begins with b'<html>'", "short.ckpt": "the end of the file is missing",
    }.items():  # fmt: skip
        for path in (str(tmp_path / name), f"file://{tmp_path}/{name}"):
            with pytest.raises(ConfigError, match=says):
                of.strategy.launcher.launch(lambda ckpt_path: None, path, trainer=of)
    for path in (None, "best", f"file://{tmp_path}/good.ckpt"):
        launchers._check_checkpoint(of, lambda ckpt_path: None, (path,), {})


NOTEBOOK = """
import os
import sys
os.environ.setdefault("OMP_NUM_THREADS", "1")  # DDP, the twin, hangs in forked processes after several threads
sys.ps1 = ">>> "  # what tells Lightning that this is a notebook
import warnings
warnings.simplefilter("ignore")
import torch
import lightning_zero
from lightning.pytorch import Trainer
from tests.trainer.toys import Lit, SAMPLES, assert_weights, seeded, whole_loader, Samples
from torch.utils.data import DataLoader
"""

TRAINING = """
def trainer(strategy, devices, **settings):
    return Trainer(strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, logger=False,
                   enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **settings)

def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}

data = DataLoader(Samples(), batch_size=4)  # each of two takes its half
module = seeded(Lit)
trainer("zero3", 1).fit(module, data)                                   # a cell with one device
assert not torch.distributed.is_initialized() and "LOCAL_RANK" not in os.environ
with lightning_zero.gather(module):
    before = state(module)
forked = trainer("zero3_notebook", 2)
torch.manual_seed(1)
forked.fit(module, data)                                                # the same module, on two
after = state(module)
assert any(not torch.equal(before[name], after[name]) for name in before)
assert forked.callback_metrics["loss"] > 0 and not torch.distributed.is_initialized()

plain = seeded(Lit)
plain.load_state_dict(before)
torch.manual_seed(1)
trainer("ddp_notebook", 2).fit(plain, data)
assert_weights(after, state(plain))                                     # as DDP in a notebook

forked.validate(module, data)                                           # again, with what was trained
forked.save_checkpoint(sys.argv[1])
assert_weights(torch.load(sys.argv[1])["state_dict"], after, tolerance=0)
trainer("zero3", 1).fit(module, data)                                   # and on one device again
print("trained")
"""

THREADS = """
torch.set_num_threads(2)
os.environ.pop("OMP_NUM_THREADS", None)
torch.ones(2**20).add_(1)  # the pool of OpenMP is there now
from lightning_zero.trainer import launchers
launchers.threads_of = lambda number: 2
warnings.simplefilter("always")

def computed():
    torch.ones(2**20).add_(1)
    return torch.get_num_threads()

from lightning.fabric import Fabric
fabric = Fabric(strategy="zero3_notebook", accelerator="cpu", devices=2)
print(fabric.launch(lambda fabric: computed()), os.environ.get("OMP_NUM_THREADS"))
"""


@pytest.mark.full
def test_cells_with_one_device_and_with_two_train_one_module(tmp_path: Path) -> None:
    found = run_command("python", "-c", NOTEBOOK + TRAINING, tmp_path / "last.ckpt", timeout=120)
    assert found.returncode == 0 and "trained" in found.stdout, found.stderr[-3000:]


@pytest.mark.full
@pytest.mark.usefixtures("notebook")
def test_forked_processes_compute_on_one_thread(tmp_path: Path) -> None:
    """Under DDP it does."""
    found = forked(partial(exec, NOTEBOOK + THREADS, {}), tmp_path, [""], code=0)
    assert found.stdout.splitlines()[-1] == "1 None"
    assert "computes on one thread" in found.stderr


# -- scripts: their exit codes, and exceptions on one rank -------------------------------------------------------------

SCRIPT = """
import sys
import lightning.pytorch as pl
import lightning_zero
import torch
torch.set_num_threads(1)
from tests.trainer.toys import Fails, Samples, _quiet
from torch.utils.data import DataLoader
_quiet()
strategy, failing = sys.argv[1:]

pl.seed_everything(3, verbose=False)
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
ranks = {"none": (), "each": (0, 1), "0": (0,), "1": (1,)}
module, data = Fails(3, ranks[failing]), DataLoader(Samples(), batch_size=2)
if failing == "each":
    try:
        trainer.fit(module, data)
    except KeyError:
        module.ranks = ()
trainer.fit(module, data, data)
sys.stdout.write("done %d\\n" % trainer.global_rank)
"""

STARTS = [  # by the rank that fails, and how often
    *[(strategy, "none", 1) for strategy in ("zero0", "zero1", "zero2")],
    ("zero3", "none", 10),
    *[(strategy, rank, times) for strategy, times in (("zero1", 1), ("zero3", 5)) for rank in "01"],
    *[(strategy, "each", 1) for strategy in ("zero1", "zero3")],  # its script catches the exception, and fits again
]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "failing", "times"), STARTS)
def test_script_ends_with_0_unless_one_rank_fails(strategy: str, failing: str, times: int, tmp_path: Path) -> None:
    """Lightning starts it twice."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for _ in range(times):
        done = run_command("python", tmp_path / "script.py", strategy, failing, folder=tmp_path, timeout=120)
        output = done.stdout + done.stderr
        if failing in "01":
            assert done.returncode and "planned" in output and "done" not in output, output
        else:
            assert done.returncode == 0 and "done 0" in output and "done 1" in output, output
