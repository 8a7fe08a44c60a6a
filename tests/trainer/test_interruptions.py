"""What ranks do on SIGTERM, on signals of SLURM, every so often, and in a validation."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import itertools
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_zero.app.jobs import decided
from lightning_zero.checkpoint.archive import Skeleton
from lightning_zero.ranks import resume
from lightning_zero.ranks.resume import OUTCOME_VARIABLE, RUN_DIR_VARIABLE
from lightning_zero.ranks.verdict import PeerError
from lightning_zero.trainer import interruptions
from lightning_zero.trainer.interruptions import Interruptions
from lightning_zero.trainer.saves import kept_files
from tests.harness import on_ranks
from tests.trainer import toys
from tests.trainer.toys import Lit, assert_weights, files, fit, loader, optimizer_states, seeded, trainer, weights

pytestmark = pytest.mark.full

EPOCH = 6  # batches


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


Terminated = partial(Signalled, signum=int(signal.SIGTERM))
InValidation = partial(Terminated, where="validation")


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
        assert "_sigterm_notifier_fn" not in vars(module.trainer._signal_connector)  # Lightning's own is back


@on_ranks(2)
def test_signal_in_evaluation_alone_requeues_and_saves_nothing(tmp_path: Path) -> None:
    of = trainer("zero3", tmp_path, plugins=[slurm(tmp_path)])
    of.validate(seeded(lambda: Signalled(1, 0, "validation")), loader(), verbose=False)
    assert requeued(tmp_path) == ["requeue 77"]
    of.save_checkpoint(tmp_path / "later.ckpt")
    assert files(tmp_path, "*.ckpt") == ["later.ckpt"]


@on_ranks(2)
def test_script_of_the_job_is_told_by_a_file_to_requeue(tmp_path: Path) -> None:
    """It requeues: in a container there may be no scontrol."""
    os.environ[OUTCOME_VARIABLE] = str(tmp_path / "outcome")
    with pytest.raises(SystemExit, match="0"):
        fit("zero3", tmp_path, seeded(lambda: Signalled(1, 1)), plugins=[slurm(tmp_path)])
    assert (tmp_path / "outcome").read_text() == "requeue\n" and requeued(tmp_path) == []


@on_ranks(2)
def test_each_fit_of_a_script_resumes_its_own_checkpoint_of_the_job(tmp_path: Path) -> None:
    """In the folder of the job, and not in that of the Trainer, where another job may have left one."""
    environment, run_dir = slurm(tmp_path), tmp_path / "run"
    settings: dict[str, Any] = {"limit_val_batches": 0, "plugins": [environment], "max_epochs": 1}
    with pytest.raises(SystemExit):
        fit("zero3", tmp_path, seeded(lambda: Signalled(3)), **settings)
    assert files(tmp_path, "hpc_ckpt_*") == ["hpc_ckpt_1.ckpt"]  # of another job
    os.environ[RUN_DIR_VARIABLE] = str(run_dir)
    for second, steps in ((1, 2), (-1, EPOCH - 2)):
        kept_files._fits = itertools.count(1)  # the script starts, or starts again
        assert len(fit("zero3", tmp_path, **settings).losses) == EPOCH
        module = seeded(lambda second=second: Signalled(second))
        with pytest.raises(SystemExit) if second > 0 else contextlib.nullcontext():
            fit("zero3", tmp_path, module, **settings)
        assert len(module.losses) == steps
        assert files(run_dir / "fit-2", "*.ckpt") == ["hpc_ckpt_1.ckpt"]


@on_ranks(2)
@mock.patch.object(resume, "MEET_S", 1.0)
def test_error_of_all_ranks_before_the_first_step_is_noted_for_the_script(tmp_path: Path) -> None:
    """An error after a step, of a file system or of another rank may not come again."""
    environment = slurm(tmp_path)
    for at in (0, 1):
        run_dir = tmp_path / f"{at}"
        run_dir.mkdir(exist_ok=True)
        os.environ[OUTCOME_VARIABLE] = str(run_dir / "outcome")
        for error in (PeerError("rank 1 is gone"), OSError(errno.ESTALE, "Stale file handle"), SystemExit(1)):
            interruptions.note_failure(error)
        assert files(run_dir, "raised-*") == []
        with pytest.raises(KeyError, match="planned"):
            fit("zero3", run_dir, seeded(lambda at=at: toys.Fails(at)), plugins=[environment])
        dist.barrier()
        assert files(run_dir, "raised-*") == ([] if at else ["raised-0", "raised-1"])


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


@on_ranks(1)
def test_signal_while_ranks_agree_is_answered_at_the_next_boundary(tmp_path: Path) -> None:
    of = trainer("zero3", tmp_path)
    of.fit(seeded(Lit), loader())
    side = Interruptions(of, of.strategy.engine, training=True)

    def max_(asked: Tensor) -> Tensor:
        side._on_term(signal.SIGTERM, None)
        return asked

    side._comm = mock.Mock(max_=max_)
    side.at_boundary()
    with pytest.raises(SystemExit):
        side.at_boundary()


# -- elsewhere than on SLURM ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_broadcasts_of_lightnings() -> Iterator[None]:
    """Neither before each batch nor in a handler."""
    refuse = mock.Mock(side_effect=AssertionError("Lightning's own answer to SIGTERM"))
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
    with pytest.raises(SIGTERMException) as stop, contextlib.redirect_stdout(io.StringIO()) as out:
        fit("zero3", tmp_path, module, **settings)
    assert stop.value.code == 143
    step = 2 if accumulate == 1 else 1
    assert module.trainer.global_step == step  # not in the middle of a window
    assert module.losses == whole.losses[: step * accumulate]
    assert module.saved_at == [] and not list(tmp_path.glob("*.ckpt"))
    assert (f"interrupted at step {step}: SIGTERM" in out.getvalue()) == (dist.get_rank() == 0)
    assert fit("zero3", tmp_path, **settings).losses == whole.losses  # these processes can train again


@on_ranks(2)
@no_broadcasts_of_lightnings()
def test_sigterm_ends_an_evaluation_at_once(tmp_path: Path) -> None:
    # On each rank: one alone would hear of a broken connection, and here processes live on.
    module = seeded(lambda: InValidation(1, dist.get_rank()))
    with pytest.raises(SystemExit, match="143"):
        trainer("zero3", tmp_path).validate(module, loader(), verbose=False)


def saves_by_the_clock(root: Path | str, **settings: Any) -> Any:
    of = trainer("zero3", root, **settings)
    of.strategy.save_every_s = 1e-9
    return of


@pytest.mark.sample
@on_ranks(2)
@mock.patch.object(interruptions, "SAVING_SHARE", 1e9)  # saving takes longer than a step here
def test_saves_by_the_clock_keep_the_newest_and_change_no_loss(tmp_path: Path) -> None:
    """After each step here, between steps; one file is kept, and training goes on from it as if nothing had been."""
    whole = fit("zero3", tmp_path, limit_val_batches=0)
    kept: list[list[str]] = []
    look = LambdaCallback(on_train_batch_start=lambda *_: kept.append(files(tmp_path, "hpc_ckpt_*")))
    of, module = saves_by_the_clock(tmp_path, limit_val_batches=0, callbacks=[look]), seeded(Signalled)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        of.fit(module, loader())
    assert module.losses == whole.losses
    assert module.saved_at == list(range(2 * EPOCH))  # also what was loaded; not after the last step
    assert kept == [[f"hpc_ckpt_{step}.ckpt"] for step in range(1, 2 * EPOCH + 1)]
    assert (out.getvalue().count("saved step 3 in ") == 1) == (dist.get_rank() == 0)
    found = torch.load(tmp_path / f"hpc_ckpt_{2 * EPOCH}.ckpt", weights_only=False)
    until = fit("zero3", tmp_path, limit_val_batches=0, max_epochs=-1, max_steps=2 * EPOCH - 1)
    assert_weights(found["state_dict"], until.weights, tolerance=0)


@on_ranks(1)
@mock.patch.object(interruptions, "SAVING_SHARE", 1e9)
def test_saves_by_the_clock_remove_none_in_a_folder_that_their_own_name_matches(tmp_path: Path) -> None:
    other, own = tmp_path / "seed=1", tmp_path / "seed=[12]"
    other.mkdir()
    (other / "hpc_ckpt_9.ckpt").touch()
    saves_by_the_clock(own, max_steps=4, limit_val_batches=0).fit(seeded(Lit), loader())
    assert files(other) == ["hpc_ckpt_9.ckpt"] and files(own, "hpc_ckpt_*") == ["hpc_ckpt_4.ckpt"]


@on_ranks(1)
@mock.patch.object(interruptions, "SAVING_SHARE", 1e9)
def test_saves_by_the_clock_in_a_remote_folder_keep_the_newest(tmp_path: Path) -> None:
    fs, root = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/run"
    saves_by_the_clock(root, max_steps=4, limit_val_batches=0).fit(seeded(Lit), loader())
    (kept,) = fs.glob(f"{root}/*.ckpt")
    assert torch.load(fs.open(kept), weights_only=False)["global_step"] == 3  # not after the last step


@on_ranks(2)
@mock.patch.object(interruptions, "SAVING_SHARE", 1e9)
def test_saves_by_the_clock_in_the_working_directory(tmp_path: Path) -> None:
    """Which may be written in two ways; what was saved is not removed as an older one."""
    os.chdir(tmp_path)
    saves_by_the_clock(Path(), max_epochs=1).fit(seeded(Lit), loader())
    assert files(tmp_path, "hpc_ckpt_*") == [f"hpc_ckpt_{EPOCH}.ckpt"]


@on_ranks(2)
@pytest.mark.parametrize(("rank", "make"), [(0, Lit), (1, Signalled)])  # one has a hook on saves
@mock.patch.object(interruptions, "SAVING_SHARE", 1e9)
def test_failed_save_by_the_clock_is_a_warning(rank: int, make: Any, tmp_path: Path) -> None:
    """And training goes on, with losses that know nothing of it; the next save is tried again."""
    settings: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    whole, module = fit("zero3", tmp_path, **settings), seeded(make)
    pwrite = os.pwrite

    def full(*args: Any) -> int:
        if len(module.losses) < 4 and dist.get_rank() == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    of = saves_by_the_clock(tmp_path, **settings)
    says = r"hpc_ckpt_1\.ckpt: the file could not be written: .*No space left on device.*Training continues"
    with mock.patch.object(os, "pwrite", full), toys.on_rank_0(pytest.warns(UserWarning, match=says)):
        of.fit(module, loader())
    assert module.losses == whole.losses
    assert files(tmp_path) == ["hpc_ckpt_2.ckpt"]


@on_ranks(2)
def test_failed_save_takes_no_room(tmp_path: Path) -> None:
    """Hooks are given values of a file that has no name any more: the next save may need its room."""
    finish, count = Skeleton.finish, [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > 1:  # the file of the weights is there
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return finish(*args, **kwargs)

    def look(*_: Any) -> None:
        maps = Path("/proc/self/maps")
        held.append(maps.exists() and str(tmp_path) in maps.read_text())

    held: list[bool] = []
    looks = LambdaCallback(on_train_batch_start=look)
    of = saves_by_the_clock(tmp_path, max_steps=2, limit_val_batches=0, callbacks=[looks])
    gc.disable()
    try:
        with mock.patch.object(Skeleton, "finish", fails):
            of.fit(seeded(lambda: Signalled(optimizer="adamw")), loader())
    finally:
        gc.enable()
    assert held == [False, False] and (count[0] > 1 or dist.get_rank())


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


# -- inside a validation of a fit -------------------------------------------------------------------------------------


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_finish_the_validation_and_leave(rank: int, tmp_path: Path) -> None:
    module = seeded(lambda: InValidation(1, rank))
    of = trainer("zero3", tmp_path)
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(io.StringIO()) as out:
        of.fit(module, loader(), loader())
    assert stop.value.code == 143 and of.received_sigterm
    assert module.validated == [(EPOCH, batch) for batch in range(EPOCH)]
    assert not list(tmp_path.glob("*.ckpt"))
    assert ("interrupted at step 6: SIGTERM" in out.getvalue()) == (dist.get_rank() == 0)
    of = trainer("zero3", tmp_path)  # these processes can train again
    of.fit(seeded(Lit), loader(), loader())


# Where the signal comes (batches of validation before it), and how validations come.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "inside an epoch": (1, {"val_check_interval": 2}),
    "at the first batch": (0, {"val_check_interval": 2}),
    "at the end of an epoch": (1, {}),
    "at the end of the last epoch": (EPOCH + 2, {}),
    "inside a later epoch": (4 * EPOCH + 3, {"val_check_interval": 2}),
    "over epochs": (2 * EPOCH + 1, {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 3}),
    "accumulating": (1, {"val_check_interval": 2, "accumulate_grad_batches": 2}),
    "a window of the last batches": (1, {"accumulate_grad_batches": 4}),
    "at the last batch": (EPOCH - 1, {}),
    "of averages in the weights' place": (2, {"val_check_interval": 2, "averages": True}),
}
SCHEDULERS = itertools.cycle(["plateau", "step", "epoch", "plateau by step"])
WITH_SCHEDULERS = [*zip(CASES, SCHEDULERS, strict=False), ("at the end of an epoch", "plateau")]


def body(
    root: Path, at: int = -1, *, strategy: str = "zero3", path: Any = None, averages: bool = False, **settings: Any
) -> tuple[Any, Any]:
    """Fit, until the signal comes to rank 1 if ``at`` says so; ``path``: resume; ``module``: settings of it."""
    of_module = {"where": "validation", "optimizer": "adamw", **settings.pop("module", {})}
    module = seeded(lambda: Terminated(at, 1, **of_module))
    of = trainer(strategy, root, callbacks=[EMAWeightAveraging(decay=0.8)] if averages else [], **settings)
    of.strategy.saves_on_sigterm = True
    with pytest.raises(SystemExit, match="143") if at >= 0 else contextlib.nullcontext():
        of.fit(module, toys.Told(loader()), loader(), ckpt_path=path)
    return of, module


def place(of: Any) -> list[Any]:
    loop = of.fit_loop.epoch_loop
    return [of.global_step, of.current_epoch, loop._batches_that_stepped, loop.batch_progress.state_dict()]


@on_ranks(2)
@pytest.mark.parametrize(("case", "scheduler"), WITH_SCHEDULERS)
def test_run_resumed_after_a_validation_is_the_uninterrupted_one(case: str, scheduler: str, tmp_path: Path) -> None:
    at, settings = CASES[case]
    settings = settings | {"module": {"scheduler": scheduler}}
    _, whole = body(tmp_path, **settings)
    _, cut = body(tmp_path, at, **settings)
    first = next(i for i in range(at, -1, -1) if whole.validated[i][1] == 0)
    assert cut.validated[: first + EPOCH] == whole.validated[: first + EPOCH]
    again, resumed = body(tmp_path, path=tmp_path / "hpc_ckpt_1.ckpt", **settings)
    for noted in ("losses", "rates", "validated", "evaluated"):
        assert getattr(cut, noted) + getattr(resumed, noted) == getattr(whole, noted), noted
    assert place(again) == place(whole.trainer)
    assert_weights(weights(again), weights(whole.trainer), tolerance=0)
    torch.testing.assert_close(optimizer_states(again), optimizer_states(whole.trainer), rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("at", [0, 2, EPOCH - 1])
def test_signal_in_training_takes_no_batch_and_moves_no_validation(at: int, tmp_path: Path) -> None:
    """Of a loader that knows its place; validations go by the number of all batches, over epochs."""
    settings: dict[str, Any] = {"module": {"where": "step"}, "check_val_every_n_epoch": None, "val_check_interval": 4}
    (_, whole), (_, cut) = body(tmp_path, **settings), body(tmp_path, at, **settings)
    assert len(cut.losses) == at + 1
    _, resumed = body(tmp_path, path=tmp_path / "hpc_ckpt_1.ckpt", **settings)
    assert cut.losses + resumed.losses == whole.losses
    assert cut.validated + resumed.validated == whole.validated
    assert [step for step, batch in whole.validated if batch == 0] == [4, 8, 12]


@on_ranks(2)
@pytest.mark.parametrize("refuses", [False, True])
def test_slurm_requeues_after_the_validation_or_training_goes_on(refuses: bool, tmp_path: Path) -> None:
    def run(at: int = -1) -> Any:
        module = seeded(lambda: Signalled(at, 1, "validation", optimizer="adamw"))
        callbacks = [EMAWeightAveraging(decay=0.8)]
        of = trainer("zero3", tmp_path, val_check_interval=3, plugins=[environment], callbacks=callbacks)
        with pytest.raises(SystemExit, match="0") if at >= 0 and not refuses else contextlib.nullcontext():
            of.fit(module, toys.Told(loader()), loader())
        return module

    environment = slurm(tmp_path, refuses)
    whole, cut = run(), run(1)
    assert len(list(tmp_path.glob("hpc_ckpt_*"))) == 1
    if refuses:
        assert cut.losses == whole.losses and cut.evaluated == whole.evaluated
    else:
        assert cut.validated == [(3, batch) for batch in range(EPOCH)]
        assert requeued(tmp_path) == ["requeue 77"]
        again = run()
        assert again.validated[0] == (6, 0) and cut.losses + again.losses == whole.losses


@on_ranks(2)
def test_ddp_goes_on_from_what_was_saved_in_a_validation(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_check_interval": 2, "module": {"optimizer": "sgd"}}
    _, whole = body(tmp_path, strategy="ddp", **settings)
    _, cut = body(tmp_path, 1, **settings)
    _, rest = body(tmp_path, strategy="ddp", path=tmp_path / "hpc_ckpt_1.ckpt", **settings)
    torch.testing.assert_close(cut.losses + rest.losses, whole.losses)
