"""What ranks do when SLURM interrupts them, beside the requeue signal itself: see test_processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.cluster import VERDICT_VARIABLE
from lightning_zero.interruptions import Requeue
from tests.harness import on_ranks
from tests.lightning.test_processes import Signalled, requeued, slurm
from tests.lightning.toys import SAMPLES, Lit, assert_weights, fit, loader, seeded, trainer, weights

EPOCH = SAMPLES // 4  # batches


class Terminated(Signalled):
    """Gets SIGTERM."""

    def _signal(self, batch_idx: int, where: str) -> None:
        if (batch_idx, dist.get_rank(), where) == (self.at, self.rank, self.where):
            self.at = -1
            os.kill(os.getpid(), signal.SIGTERM)


@on_ranks(2)
def test_the_script_of_the_job_is_told_by_a_file(tmp_path: Path) -> None:
    """It requeues: in a container there may be no scontrol."""
    environment = slurm(tmp_path)
    file = tmp_path / "verdict"
    os.environ[VERDICT_VARIABLE] = str(file)
    with pytest.raises(SystemExit) as stop:
        fit("zero3", tmp_path, seeded(lambda: Signalled(1, 1)), plugins=[environment])
    assert stop.value.code == 0
    assert file.read_text() == "requeue\n" and requeued(tmp_path) == []


@on_ranks(2)
def test_where_slurm_refuses_training_goes_on(tmp_path: Path) -> None:
    environment = slurm(tmp_path)
    if dist.get_rank() == 0:
        (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho 'not allowed' >&2\nexit 1\n")
    dist.barrier()
    whole = fit("zero3", tmp_path / "whole", limit_val_batches=0)
    module = seeded(lambda: Signalled(1, 1))
    run = fit("zero3", tmp_path, module, limit_val_batches=0, plugins=[environment])
    assert run.losses == whole.losses
    assert module.saved_at == [2]


@on_ranks(2)
def test_sigterm_saves_and_leaves_and_requeues_nothing(tmp_path: Path) -> None:
    """Without a collective in the handler: the other rank knows of nothing."""
    module = seeded(lambda: Terminated(1, 1))
    with pytest.raises(SystemExit) as stop:
        fit("zero3", tmp_path, module, plugins=[slurm(tmp_path)])
    assert stop.value.code == 0
    assert module.saved_at == [2] and (tmp_path / "hpc_ckpt_1.ckpt").exists()
    assert requeued(tmp_path) == []


@on_ranks(2)
@pytest.mark.parametrize("at", [1, EPOCH - 1])
def test_steps_are_counted_for_loggers_as_without_interruption(at: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0}
    with pytest.raises(SystemExit):
        fit("zero3", tmp_path, seeded(lambda: Signalled(at, 0)), plugins=[slurm(tmp_path)], **settings)
    seen = []

    class Watching(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((self.trainer.global_step, self.trainer.fit_loop.epoch_loop._batches_that_stepped))
            return super().training_step(batch, batch_idx)

    fit("zero3", tmp_path, seeded(Watching), plugins=[slurm(tmp_path)], **settings)
    assert seen == [(step, step) for step in range(at + 1, 2 * EPOCH)]


@on_ranks(2)
def test_one_checkpoint_of_a_signal_is_kept(tmp_path: Path) -> None:
    """Each holds the whole state; a long run is interrupted many times."""
    whole = fit("zero3", tmp_path / "whole", limit_val_batches=0, max_epochs=2)
    for at, version in ((1, 1), (EPOCH - 1, 2)):
        with pytest.raises(SystemExit):
            module = seeded(lambda at=at: Signalled(at, 0))
            fit("zero3", tmp_path, module, limit_val_batches=0, max_epochs=2, plugins=[slurm(tmp_path)])
        dist.barrier()
        assert [p.name for p in tmp_path.glob("hpc_ckpt_*")] == [f"hpc_ckpt_{version}.ckpt"]
    of = trainer("zero3", tmp_path, limit_val_batches=0, max_epochs=2, plugins=[slurm(tmp_path)])
    of.fit(seeded(Lit, seed=9), loader())
    assert of.global_step == 2 * EPOCH
    assert weights(of).keys() == whole.weights.keys()


@on_ranks(2)
def test_another_handler_of_the_signal_is_set_aside(tmp_path: Path) -> None:
    """Submitit's, which is there first and would requeue without saving; and another signal than Lightning's."""
    environment = slurm(tmp_path)
    environment.requeue_signal = signal.SIGCONT
    called = []
    before = signal.signal(signal.SIGCONT, lambda *_: called.append(1))
    try:
        module = seeded(lambda: Signalled(1, 0))
        module._signal = lambda batch_idx, where: (  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGCONT) if (batch_idx, dist.get_rank()) == (1, 0) else None
        )
        with pytest.raises(SystemExit):
            fit("zero3", tmp_path, module, limit_val_batches=0, plugins=[environment])
        assert module.saved_at == [2] and not called
        os.kill(os.getpid(), signal.SIGCONT)
        assert called == [1]  # it is back
    finally:
        signal.signal(signal.SIGCONT, before)


@on_ranks(2)
def test_the_weights_of_the_boundary_are_saved(tmp_path: Path) -> None:
    until = fit("zero3", tmp_path / "until", limit_val_batches=0, max_epochs=-1, max_steps=2)
    with pytest.raises(SystemExit):
        fit("zero3", tmp_path, seeded(lambda: Signalled(1, 1)), limit_val_batches=0, plugins=[slurm(tmp_path)])
    found = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert_weights(found["state_dict"], until.weights, tolerance=0)


def test_a_signal_while_ranks_agree_is_not_lost() -> None:
    requeue = object.__new__(Requeue)
    requeue._noted = 0

    class Agreeing:
        def max_(self, asked: torch.Tensor) -> torch.Tensor:
            requeue._training = True
            requeue._on_requeue_signal(signal.SIGUSR1, None)
            return asked

    requeue._comm = Agreeing()  # type: ignore[assignment]
    requeue.at_boundary()
    assert requeue._noted
