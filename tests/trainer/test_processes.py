"""Real launches: exit codes, exceptions on one rank, and SLURM's requeue signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor

from tests.harness import on_ranks, run_command
from tests.trainer.toys import SAMPLES, Lit, assert_weights, fit, loader, seeded, trainer, weights

pytestmark = pytest.mark.full

EVERY = 100

SCRIPT = """
import sys
import lightning.pytorch as pl
import lightning_zero
import torch
torch.set_num_threads(1)
from tests.trainer.toys import Lit, Samples, _quiet
from torch.utils.data import DataLoader
_quiet()
strategy, failing = sys.argv[1], int(sys.argv[2])
EVERY = 100

class Scripted(Lit):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and failing in (self.global_rank, EVERY):
            raise KeyError("planned")
        return super().training_step(batch, batch_idx)

pl.seed_everything(3, verbose=False)
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
module, data = Scripted(), DataLoader(Samples(), batch_size=2)
if failing == EVERY:
    try:
        trainer.fit(module, data)
    except KeyError:
        failing = -1
trainer.fit(module, data, data)
sys.stdout.write("done %d\\n" % trainer.global_rank)
"""


NOBODY = -1
STARTS = [  # by the rank that fails, and how often
    *[(strategy, NOBODY, 1) for strategy in ("zero0", "zero1", "zero2")],
    ("zero3", NOBODY, 10),
    *[(strategy, rank, times) for strategy, times in (("zero1", 1), ("zero3", 5)) for rank in (0, 1)],
    *[(strategy, EVERY, 1) for strategy in ("zero1", "zero3")],  # its script catches the exception, and fits again
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "failing", "times"), STARTS)
def test_script_ends_with_0_unless_one_rank_fails_every_time(
    strategy: str, failing: int, times: int, tmp_path: Path
) -> None:
    """Lightning starts it twice."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for _ in range(times):
        done = run_command("python", tmp_path / "script.py", strategy, failing, folder=tmp_path, timeout=120)
        output = done.stdout + done.stderr
        if failing in (0, 1):
            assert done.returncode and "planned" in output and "done" not in output, output
        else:
            assert done.returncode == 0 and "done 0" in output and "done 1" in output, output


# -- SLURM ------------------------------------------------------------------------------------------------------------


def slurm(root: Path, refuses: bool = False) -> SLURMEnvironment:
    """This rank as a task of a SLURM job, with a scontrol that writes down what it is asked for, or refuses it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    fake = root / "bin" / "scontrol"
    if rank == 0:
        fake.parent.mkdir(exist_ok=True)
        does = "echo 'not allowed' >&2; exit 1" if refuses else f'echo "$@" >> {root}/scontrol.log'
        fake.write_text(f"#!/bin/sh\n{does}\n")
        fake.chmod(0o755)
    dist.barrier()
    tasks = {"JOB_ID": 77, "JOB_NAME": "train", "NTASKS": world, "NTASKS_PER_NODE": world, "NNODES": 1}
    tasks |= {"PROCID": rank, "LOCALID": rank, "NODEID": 0, "NODELIST": "localhost"}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in tasks.items()})
    os.environ["PATH"] = f"{fake.parent}:{os.environ['PATH']}"
    return SLURMEnvironment(auto_requeue=True)


def requeued(root: Path) -> list[str]:
    dist.barrier()
    log = root / "scontrol.log"
    return log.read_text().split("\n")[:-1] if log.exists() else []


class Signalled(Lit):
    """One rank gets the signal: in the middle of the step ``at`` of an epoch, or after ``at`` batches of validation."""

    def __init__(
        self, at: int = -1, rank: int = 0, where: str = "step", signum: int = int(signal.SIGUSR1), **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.at, self.rank, self.where, self.signum = at, rank, where, signum
        self.saved_at: list[int] = []
        self.validated: list[tuple[int, int]] = []  # steps before it, and the batch
        self.batch_idx = -1
        self.blocks[0].register_forward_hook(lambda *_: self._signal(self.batch_idx, "step"))

    def _signal(self, at: int, where: str) -> None:
        if (at, dist.get_rank(), where) == (self.at, self.rank, self.where):
            self.at = -1  # once
            os.kill(os.getpid(), self.signum)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch_idx = batch_idx
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._signal(len(self.validated), "validation")
        self.validated.append((self.trainer.global_step, batch_idx))
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved_at.append(checkpoint["global_step"])


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.mainly(lambda rank, accumulate: (rank, accumulate) in ((0, 1), (1, 3)))
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_requeue_signal_saves_at_the_next_step_boundary(rank: int, accumulate: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0, "accumulate_grad_batches": accumulate}
    for stage in ("zero1", "zero3"):
        root = tmp_path / stage
        root.mkdir(exist_ok=True)
        whole = fit(stage, root, plugins=[slurm(root)], **settings)
        module = seeded(lambda: Signalled(1, rank))
        assert requeued(root) == []  # without a signal
        with pytest.raises(SystemExit, match="0"):
            fit(stage, root, module, plugins=[slurm(root)], **settings)
        assert module.saved_at == [2 if accumulate == 1 else 1]  # after the step, or the window, of batch 1
        assert requeued(root) == ["requeue 77"]
        assert len(module.losses) == (2 if accumulate == 1 else 3)
        assert module.losses == whole.losses[: len(module.losses)]
        found = torch.load(root / "hpc_ckpt_1.ckpt", weights_only=False)
        until = fit(stage, root, **{**settings, "max_epochs": -1, "max_steps": module.saved_at[0]})
        assert_weights(found["state_dict"], until.weights, tolerance=0)
        assert not hasattr(signal.getsignal(signal.SIGUSR1), "signal_handlers")  # as before the run


@on_ranks(2)
def test_requeued_job_goes_on_after_a_signal_in_the_last_step_of_an_epoch(tmp_path: Path) -> None:
    module = seeded(lambda: Signalled(SAMPLES // 4 - 1, 1))  # in the last step of the first epoch
    whole = fit("zero3", tmp_path, limit_val_batches=0)
    with pytest.raises(SystemExit):
        fit("zero3", tmp_path, module, max_epochs=2, limit_val_batches=0, plugins=[slurm(tmp_path)])
    assert module.saved_at == [SAMPLES // 4]
    assert requeued(tmp_path) == ["requeue 77"]
    assert "_sigterm_notifier_fn" not in vars(module.trainer._signal_connector)  # Lightning's own is back
    again = seeded(Lit, seed=9)
    of = trainer("zero3", tmp_path, limit_val_batches=0, plugins=[slurm(tmp_path)])
    of.fit(again, loader())
    assert again.losses == whole.losses[-len(again.losses) :]
    assert_weights(weights(of), whole.weights, tolerance=0)


@on_ranks(2)
def test_signal_in_evaluation_alone_requeues_and_saves_nothing(tmp_path: Path) -> None:
    of = trainer("zero3", tmp_path, plugins=[slurm(tmp_path)])
    of.validate(seeded(lambda: Signalled(1, 0, "validation")), loader(), verbose=False)
    assert requeued(tmp_path) == ["requeue 77"]
    assert not list(tmp_path.glob("*.ckpt"))
    of.save_checkpoint(tmp_path / "later.ckpt")
    dist.barrier()
    assert (tmp_path / "later.ckpt").exists()
