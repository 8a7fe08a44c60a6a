"""What ranks do on SIGTERM, on signals of SLURM (the requeue signal itself: see test_processes), and every so often."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.app.jobs import decided
from lightning_zero.ranks.resume import OUTCOME_VARIABLE
from lightning_zero.trainer import interruptions
from lightning_zero.trainer.interruptions import Interruptions
from tests.harness import on_ranks
from tests.trainer.test_processes import Signalled, requeued, slurm
from tests.trainer.toys import SAMPLES, Lit, assert_weights, fit, loader, on_rank_0, seeded, trainer

pytestmark = pytest.mark.full

EPOCH = SAMPLES // 4  # batches


Terminated = partial(Signalled, signum=int(signal.SIGTERM))


@on_ranks(2)
def test_script_of_the_job_is_told_by_a_file_to_requeue(tmp_path: Path) -> None:
    """It requeues: in a container there may be no scontrol."""
    os.environ[OUTCOME_VARIABLE] = str(tmp_path / "outcome")
    with pytest.raises(SystemExit, match="0"):
        fit("zero3", tmp_path, seeded(lambda: Signalled(1, 1)), plugins=[slurm(tmp_path)])
    assert (tmp_path / "outcome").read_text() == "requeue\n" and requeued(tmp_path) == []


@on_ranks(2)
def test_training_goes_on_where_slurm_refuses_to_requeue(tmp_path: Path) -> None:
    whole, module = fit("zero3", tmp_path / "whole", limit_val_batches=0), seeded(lambda: Signalled(1, 1))
    run = fit("zero3", tmp_path, module, limit_val_batches=0, plugins=[slurm(tmp_path, refuses=True)])
    assert run.losses == whole.losses
    assert module.saved_at == [2]


@pytest.mark.sample
@on_ranks(2)
def test_sigterm_saves_and_leaves_and_requeues_nothing(tmp_path: Path) -> None:
    """Without a collective in the handler: the other rank knows of nothing."""
    module = seeded(lambda: Terminated(1, 1))
    with pytest.raises(SystemExit, match="0"):
        fit("zero3", tmp_path, module, plugins=[slurm(tmp_path)])
    assert module.saved_at == [2] and (tmp_path / "hpc_ckpt_1.ckpt").exists()
    assert requeued(tmp_path) == []


@on_ranks(2)
def test_steps_for_loggers_are_counted_as_without_interruption(tmp_path: Path) -> None:
    """In a job that is interrupted twice, of whose checkpoints the newest alone is kept: each holds the whole state."""
    settings: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0}
    seen = []

    class Watching(Signalled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((self.trainer.global_step, self.trainer.fit_loop.epoch_loop._batches_that_stepped))
            return super().training_step(batch, batch_idx)

    for start, at in enumerate((1, EPOCH - 1), 1):
        with pytest.raises(SystemExit):
            fit("zero3", tmp_path, seeded(lambda at=at: Watching(at, 0)), plugins=[slurm(tmp_path)], **settings)
        dist.barrier()
        assert [p.name for p in tmp_path.glob("hpc_ckpt_*")] == [f"hpc_ckpt_{start}.ckpt"]
    fit("zero3", tmp_path, seeded(lambda: Watching(-1, 0)), plugins=[slurm(tmp_path)], **settings)
    assert seen == [(step, step) for step in range(2 * EPOCH)]


@on_ranks(2)
def test_main_job_loads_what_it_has_decided_on(tmp_path: Path) -> None:
    """And not what an earlier job has left in the folder."""
    with pytest.raises(SystemExit):
        fit("zero3", tmp_path, seeded(lambda: Signalled(1, 0)), limit_val_batches=0, plugins=[slurm(tmp_path)])
    for ckpt_path, steps in ((None, EPOCH), (str(tmp_path / "hpc_ckpt_1.ckpt"), EPOCH - 2)):
        of = trainer("zero3", tmp_path, limit_val_batches=0, max_epochs=-1, max_steps=EPOCH, plugins=[slurm(tmp_path)])
        module = seeded(Lit)
        with decided(of, ckpt_path):
            of.fit(module, loader(), ckpt_path=ckpt_path)
        assert len(module.losses) == steps


@on_ranks(2)
def test_other_handler_of_the_signal_is_set_aside_for_the_run(tmp_path: Path) -> None:
    """Submitit's, which is there first and would requeue without saving; and another signal than Lightning's."""
    environment, called = slurm(tmp_path), []
    environment.requeue_signal = signal.SIGCONT
    before = signal.signal(signal.SIGCONT, lambda *_: called.append(1))
    try:
        module = seeded(lambda: Signalled(1, 0, signum=int(signal.SIGCONT)))
        with pytest.raises(SystemExit):
            fit("zero3", tmp_path, module, limit_val_batches=0, plugins=[environment])
        assert module.saved_at == [2] and not called
        os.kill(os.getpid(), signal.SIGCONT)
        assert called == [1]  # it is back
    finally:
        signal.signal(signal.SIGCONT, before)


# -- elsewhere than on SLURM ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_broadcasts_of_lightnings() -> Iterator[None]:
    """Neither before each batch nor in a handler."""

    def refuse(*_: Any) -> None:
        raise AssertionError("Lightning's own answer to SIGTERM")

    with (
        mock.patch.object(_TrainingEpochLoop, "_broadcast_sigterm_tensor", refuse),
        mock.patch.object(_SignalConnector, "_sigterm_notifier_fn", refuse),
    ):
        yield


@pytest.mark.sample
@on_ranks(1, 2)
@pytest.mark.parametrize("accumulate", [1, 3])
@no_broadcasts_of_lightnings()
def test_all_ranks_leave_together_when_one_gets_sigterm(accumulate: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0, "accumulate_grad_batches": accumulate}
    whole = fit("zero3", tmp_path, **settings)
    module = seeded(lambda: Terminated(1, dist.get_world_size() - 1))
    out = io.StringIO()
    with pytest.raises(SIGTERMException) as stop, contextlib.redirect_stdout(out):
        fit("zero3", tmp_path, module, **settings)
    assert stop.value.code == 143
    step = 2 if accumulate == 1 else 1
    assert module.trainer.global_step == step  # not in the middle of a window
    assert module.losses == whole.losses[: step * accumulate]
    assert module.saved_at == [] and not list(tmp_path.glob("*.ckpt"))
    said = f"interrupted at step {step}: SIGTERM" in out.getvalue()
    assert said == (dist.get_rank() == 0)
    assert fit("zero3", tmp_path, **settings).losses == whole.losses  # these processes can train again


@on_ranks(2)
def test_run_saves_before_it_leaves_if_told(tmp_path: Path) -> None:
    """At the end of an epoch, where resuming needs no data loader that can tell its place."""
    settings: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0}
    whole = fit("zero3", tmp_path, **settings)
    of = trainer("zero3", tmp_path, **settings)
    of.strategy.saves_on_sigterm = True
    with pytest.raises(SystemExit) as stop:
        of.fit(seeded(lambda: Terminated(EPOCH - 1, 1)), loader())
    assert stop.value.code == 143
    again = fit("zero3", tmp_path, seeded(Lit, seed=9), ckpt_path=tmp_path / "hpc_ckpt_1.ckpt", **settings)
    assert again.trainer.global_step == 2 * EPOCH
    assert_weights(again.weights, whole.weights, tolerance=0)


@on_ranks(2)
@no_broadcasts_of_lightnings()
def test_sigterm_ends_an_evaluation_at_once(tmp_path: Path) -> None:
    of = trainer("zero3", tmp_path)
    module = seeded(lambda: Terminated(1, 0, "validation"))
    module.trainer = of
    with pytest.raises(SystemExit) as stop:
        if dist.get_rank() == 0:
            of.validate(module, loader(), verbose=False)
        else:  # it would hear of a broken connection; here the process lives on
            module.rank, module.at = 1, 1
            of.validate(module, loader(), verbose=False)
    assert stop.value.code == 143


@pytest.mark.sample
@on_ranks(2)
@mock.patch.object(interruptions, "SAVING_SHARE", 1e9)  # saving takes longer than a step here
def test_saves_by_the_clock_keep_the_newest_and_change_no_loss(tmp_path: Path) -> None:
    """After each step here, between steps; one file is kept, and training goes on from it as if nothing had been."""
    settings: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0}
    whole = fit("zero3", tmp_path, **settings)
    kept: list[list[str]] = []

    class Watching(Signalled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            dist.barrier()
            kept.append(sorted(p.name for p in tmp_path.glob("hpc_ckpt_*")))
            return super().training_step(batch, batch_idx)

    of = trainer("zero3", tmp_path, **settings)
    of.strategy.save_every_s = 1e-9
    module = seeded(lambda: Watching(-1, 0))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        of.fit(module, loader())
    assert module.losses == whole.losses
    steps = list(range(2 * EPOCH))  # before the first step too: what was loaded; not after the last
    assert module.saved_at == steps
    assert kept == [[f"hpc_ckpt_{step + 1}.ckpt"] for step in steps]
    assert (out.getvalue().count("saved step 3 in ") == 1) == (dist.get_rank() == 0)
    found = torch.load(tmp_path / f"hpc_ckpt_{2 * EPOCH}.ckpt", weights_only=False)
    until = fit("zero3", tmp_path, **{**settings, "max_epochs": -1, "max_steps": 2 * EPOCH - 1})
    assert_weights(found["state_dict"], until.weights, tolerance=0)


@on_ranks(2)
@pytest.mark.parametrize(("rank", "hooks"), [(0, False), (1, True)])
@mock.patch.object(interruptions, "SAVING_SHARE", 1e9)
def test_failed_save_by_the_clock_is_a_warning(rank: int, hooks: bool, tmp_path: Path) -> None:
    """And training goes on, with losses that know nothing of it; the next save is tried again."""
    settings: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    whole = fit("zero3", tmp_path, **settings)
    pwrite, fails = os.pwrite, [True]

    def full(*args: Any) -> int:
        if fails and dist.get_rank() == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    class Frees(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            fails[:] = [True] * (batch_idx < 3)
            return super().training_step(batch, batch_idx)

    of = trainer("zero3", tmp_path, **settings)
    of.strategy.save_every_s = 1e-9
    module = seeded(Frees)
    if hooks:  # which are given values of a file
        module.on_save_checkpoint = lambda checkpoint: None
    says = r"hpc_ckpt_1\.ckpt: the file could not be written: .*No space left on device.*Training goes on"
    with mock.patch.object(os, "pwrite", full), on_rank_0(pytest.warns(UserWarning, match=says)):
        of.fit(module, loader())
    assert module.losses == whole.losses
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["hpc_ckpt_2.ckpt"]


@on_ranks(1)
def test_saves_by_the_clock_take_a_bounded_share_of_the_time(tmp_path: Path) -> None:
    of, now, saved = trainer("zero3", tmp_path, limit_val_batches=0), [0.0], []
    of.fit(seeded(Lit), loader())

    def slow(*_: Any, **__: Any) -> None:
        saved.append(now[0])
        now[0] += 60

    clock = mock.patch.object(interruptions.time, "monotonic", lambda: now[0])
    with clock, mock.patch.object(of, "save_checkpoint", slow):
        side = Interruptions(of, of.strategy.engine, training=True, save_every_s=100.0)
        for _ in range(400):
            now[0] += 10
            side.at_boundary()
        assert saved == [110 + i * (60 + 60 / 0.05 + 10) for i in range(4)]
