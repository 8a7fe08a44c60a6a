"""Answer signals on all ranks at the same step, refuse a save after an exception that only some ranks raised, and warn
when a loss or gradient norm is NaN or infinite for the first time."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_zero.comm.agreements import FailedElsewhereError
from lightning_zero.engine import Engine
from lightning_zero.lightning_api import SIGTERMException, SLURMEnvironment, is_local, pl
from lightning_zero.ranks.rendezvous import StartError
from lightning_zero.ranks.resume import MEET_S, OUTCOME_VARIABLE, REQUEUE, listed, note_job, note_raised, write_outcome
from lightning_zero.ranks.verdict import PeerError, StallError, is_broken_connection
from lightning_zero.settings import Precision

ON_ALL_RANKS = "_lightning_zero_on_all_ranks"  # attribute of an exception that a save has raised on all ranks
SAVING_SHARE = 0.05  # largest share of the run's time that periodic saves may take
TERMINATED = 128 + signal.SIGTERM  # exit code
_NOTHING, _SAVE, _TERM, _REQUEUE = range(4)


class Left(SIGTERMException):
    """Raised on all ranks between two steps to end the run because of a signal, after a save if the signal asks for
    one."""


class Interruptions:
    """Answers signals between two steps. A handler only notes its signal; ranks exchange noted signals after each step.

    Lightning saves and broadcasts inside handlers, where ranks may be at different steps and mix up their collectives.
    Here a signal to any one rank is enough, at the cost of one small message per step::

        signal             training                                                only evaluating
        requeue_signal     save, requeue, exit (SLURM only)                        requeue
        SIGTERM            save (on SLURM, or with saves_on_sigterm), exit         exit at once

    A running validation ends first. An existing handler of the requeue signal is replaced, because submitit's handler
    does not save.

    Args:
        saves_on_sigterm: whether to save on SIGTERM outside of SLURM too.
        save_every_s: least number of seconds between periodic saves; None: no periodic saves. Saves become less
            frequent if saving would take more than :data:`SAVING_SHARE` of the run's time.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        engine: Engine,
        *,
        training: bool,
        saves_on_sigterm: bool = False,
        save_every_s: float | None = None,
    ) -> None:
        self._trainer = trainer
        self._comm = engine.comm
        self.training = training
        self.not_finite = NotFinite(trainer, engine)
        self._noted = _NOTHING
        self._save_every_s = save_every_s
        self._next_save = time.monotonic() + save_every_s if save_every_s is not None else float("inf")
        self._connector = trainer._signal_connector
        environment = trainer._accelerator_connector.cluster_environment
        self._on_slurm = isinstance(environment, SLURMEnvironment)
        self._saves = saves_on_sigterm or self._on_slurm
        self._signum: signal.Signals | None = None
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._signum = environment.requeue_signal
        self._loop = trainer.fit_loop.epoch_loop
        folder = cast(Any, trainer.strategy).run_plan.folder
        if training and folder is not None and trainer.is_global_zero:
            note_job(folder)  # by now all ranks have read the old note

    def take_signals(self) -> None:
        """Replace the signal handlers that Lightning has just registered. After a SIGTERM the user's own handler is
        called too. At the end of the run Lightning restores the earlier handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = self._connector._original_handlers.get(signal.SIGTERM)

        def on_term(signum: int, frame: Any) -> None:
            self._on_term(signum, frame)
            if callable(before):
                before(signum, frame)

        signal.signal(signal.SIGTERM, on_term)
        if self._signum is not None:
            signal.signal(self._signum, self._on_requeue_signal)

    def _on_requeue_signal(self, signum: int, frame: Any) -> None:
        if self.training:
            self._noted = max(self._noted, _REQUEUE)
        elif self._requeue() and OUTCOME_VARIABLE in os.environ:
            raise SystemExit(1)  # the job's script requeues after this exit; srun ends the other ranks

    def _on_term(self, signum: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and self._noted < _TERM:
            launcher.kill(signum)  # type: ignore[attr-defined]  # to the processes that this one started
        self._noted = max(self._noted, _TERM)
        if not self.training:
            self._connector.received_sigterm = True
            raise SIGTERMException(self._code)

    @property
    def _code(self) -> int:
        """Return the exit code of a process that a signal ends: 0 on SLURM, elsewhere 143, which means "unfinished"."""
        # On SLURM 0, because srun kills the remaining ranks as soon as one exits with an error.
        return 0 if self._on_slurm else TERMINATED

    def before_batch(self) -> None:
        """Call :meth:`at_boundary`, unless a step is still accumulating gradients. Collective."""
        loop = self._loop
        first_of_window = (loop.batch_idx + 1) % self._trainer.accumulate_grad_batches == 0
        if first_of_window and not loop.restarting:  # leaving inside a window would lose accumulated gradients
            self.at_boundary()

    def at_boundary(self, *, last: bool = False) -> None:
        """Between two steps, save if a periodic save is due, and answer a signal that any rank got: raise Left on all
        ranks, after a save if the signal asks for one. A signal to requeue the job ends the run only if requeuing
        succeeds. Raise the error of a failed background save. Collective.

        ``last``: training has ended, so no periodic save is needed.
        """
        due = self._trainer.is_global_zero and time.monotonic() > self._next_save and not last
        checkpoints = cast(Any, self._trainer.strategy)._checkpoints
        noted = max(self._noted, _SAVE if due else _NOTHING), checkpoints.background.has_failed, self.not_finite.found
        asked, failed, not_finite = self._comm.max_(torch.tensor(noted, dtype=torch.int64)).tolist()
        self.not_finite.say(not_finite)
        if failed:
            checkpoints.wait_for_writes()
        if not asked:
            return
        at = contextlib.nullcontext() if last else self._as_lightning_saves()
        self._answer(asked, at, saves=asked != _TERM or self._saves)

    def _answer(self, asked: int, at: contextlib.AbstractContextManager[None], *, saves: bool) -> None:
        """Save, raise Left, or both. ``asked``: the signal, or _SAVE if a periodic save is due. ``at``: context manager
        in which the Trainer's loops are ready to be saved. ``saves``: whether to save. Collective."""
        self._noted = _NOTHING  # a signal that arrives from now on is answered at the next boundary
        with at:
            if saves:
                what = "saved" if asked == _SAVE else "interrupted: saved"
                self._save(what, leaving=asked != _SAVE, requeues=asked == _REQUEUE)
            elif self._trainer.is_global_zero:
                what = "SIGTERM" if asked == _TERM else "requeue"
                print(f"interrupted at step {self._trainer.global_step}: {what}", flush=True)
            if asked == _TERM:
                self._connector.received_sigterm = True
                raise Left(self._code)
            if asked == _REQUEUE and self._trainer.strategy.broadcast(self._requeue()):
                raise Left(0)

    @contextlib.contextmanager
    def _as_lightning_saves(self) -> Iterator[None]:
        """During the body, give the Trainer's loops the counts that they have when Lightning saves. If the body raises,
        the loops keep these counts.

        Lightning saves before it counts the last step for loggers, and adds this step when it loads, so loops count one
        step less in the body. They also count one more batch as fetched. From this Lightning concludes, when it loads
        the checkpoint, that earlier validations are done.
        """
        loop, progress = self._loop, copy.deepcopy(self._loop.batch_progress)
        loop.batch_progress.increment_ready()
        ahead = not loop._should_accumulate()  # Lightning checks the same on load
        loop._batches_that_stepped -= ahead
        yield
        loop._batches_that_stepped += ahead
        loop.batch_progress = progress

    def _save(self, what: str, *, leaving: bool, requeues: bool = False) -> None:
        started = time.monotonic()
        trainer = self._trainer
        for logger in trainer.loggers:
            logger.save()
        strategy = cast(Any, trainer.strategy)
        checkpoints = strategy._checkpoints
        checkpoints.wait_for_writes()  # hpc_save_path numbers the file after those on disk
        folder = strategy.run_plan.folder or trainer.default_root_dir
        path = trainer.strategy.broadcast(str(trainer._checkpoint_connector.hpc_save_path(folder)))
        failed, checkpoints.next_may_fail = False, not leaving
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except Exception as error:
            if leaving or not failed_on_all_ranks(error):
                raise
            failed = True
            rank_zero_warn(f"{error} Training continues, and the save is tried again later (save_minutes).")
        else:
            if leaving:
                checkpoints.finish_writes()  # a requeue ends this process
            if trainer.is_global_zero:
                said = f"{what} step {trainer.global_step} in {path}"
                if leaving and not requeues:
                    said += f"\nTo resume: {strategy.run_plan.command_to_go_on(path)}"
                checkpoints.after_writes(partial(print, said, flush=True))
                fs, root = url_to_fs(folder)
                for older in listed(fs, root, "hpc_ckpt_*.ckpt"):  # the new file replaces older ones
                    if os.path.basename(older) != os.path.basename(path):
                        strategy.remove_checkpoint(older if is_local(folder) else fs.unstrip_protocol(older))
        finally:
            checkpoints.next_may_fail = False
        if failed:
            # The exception's frames form cycles that hold an unnamed file, whose disk space the next save may need.
            gc.collect()
        if self._save_every_s is not None:
            now = time.monotonic()
            self._next_save = now + max(self._save_every_s, (now - started) / SAVING_SHARE)

    def _requeue(self) -> bool:
        """Ask SLURM or the job's script to run the job again, and return whether this succeeded. Only rank 0 asks
        SLURM; other ranks return True."""
        if write_outcome(REQUEUE) or not self._trainer.is_global_zero:
            return True
        job = os.environ["SLURM_JOB_ID"]
        if "SLURM_ARRAY_JOB_ID" in os.environ:
            job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        try:
            done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
            failure = (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
        except OSError as error:
            failure = str(error)
        if failure:
            rank_zero_warn(f"scontrol requeue {job} failed, so the job continues to its time limit: {failure}")
        return not failure


def repair_counts(trainer: pl.Trainer) -> None:
    """Repair counts when a run resumes: subtract a batch that was fetched but never trained from the number of batches
    that ``val_check_interval`` uses, and let GradientAccumulationScheduler set ``accumulate_grad_batches`` for the
    current epoch. (Lightning lets it do so only when an epoch begins.)"""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, pl.callbacks.GradientAccumulationScheduler):
            callback.on_train_epoch_start(trainer)
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    if total.ready == total.started + 1 == total.completed + 1:  # type: ignore[attr-defined]
        total.ready -= 1


def step_plateau_schedulers(trainer: pl.Trainer) -> None:
    """Let ReduceLROnPlateau schedulers step at the end of a resumed epoch if all metrics that they monitor were logged.
    Lightning alone would skip the step."""
    loop = trainer.fit_loop
    monitors = [c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "epoch"]
    if loop.restarting and monitors and all(monitor in trainer.callback_metrics for monitor in monitors):
        loop._restarting = False


def failed_on_all_ranks(error: Exception) -> bool:
    """Return whether ``error`` comes from a save that failed on all ranks, so that all ranks can continue training."""
    return ON_ALL_RANKS in error.__dict__


def note_failure(error: BaseException) -> None:
    """Note for the job's script, which may restart the job, that this rank raised ``error`` before training any step.
    Errors about another rank, a message, a device or a file system are not noted, because a restart may avoid them."""
    others = PeerError, StallError, StartError, FailedElsewhereError, dist.DistError, torch.AcceleratorError, OSError
    own = isinstance(error, FileNotFoundError) or not (isinstance(error, others) or is_broken_connection(error))
    if isinstance(error, Exception) and own:
        note_raised()


def refuse_lonely_save(engine: Engine) -> None:
    """If an exception is being handled, raise RuntimeError unless all ranks call this function within :data:`MEET_S`
    seconds, because a save by only some ranks would hang: see [Note: what a rank does when another dies]."""
    if sys.exc_info()[0] is None:
        return
    missing = engine.comm.waits.missing_here(MEET_S)
    if missing:
        raise RuntimeError(
            f"no checkpoint is saved on this exception: a checkpoint needs all ranks, but rank(s) {missing} did not "
            f"fail at the same place within {MEET_S:g} s. Resume from the last regular checkpoint "
            "(ModelCheckpoint(every_n_train_steps=...))."
        )


_STEPS = 2**40  # more than any run has; an earlier step is a larger finding


class NotFinite:
    """Checks whether losses and gradient norms are finite once copies of them have reached the host, without waiting
    for the copies. Ranks exchange what they found in :meth:`Interruptions.at_boundary`."""

    def __init__(self, trainer: Any, engine: Engine) -> None:
        self._trainer, self._streams = trainer, engine.comm.streams
        self._rank, self._ranks = engine.comm.rank, engine.comm.world_size
        skips = engine.config.optimizer.skip_nonfinite is not None
        self._skips = skips or engine.passes.precision is Precision.fp16
        self._coming: list[tuple[int, bool, Tensor, Any]] = []
        self._found = 0
        self._norm: float | None = None
        self._said = False

    def note(self, number: Tensor, *, is_norm: bool = False) -> None:
        """Begin to copy ``number`` to the host, to check it later. It is this rank's loss in the current step or, if
        ``is_norm``, the gradient norm. Tensors that are not 0-d are ignored."""
        # Norms that overflow are skipped, and with a loss scale the first ones do.
        matters = not self._said and not (is_norm and self._skips)
        if number.dim() == 0 and (matters or is_norm):
            step = self._trainer.fit_loop.epoch_loop._batches_that_stepped
            finding = (_STEPS - step) * (self._ranks + 1) + (0 if is_norm else self._ranks - self._rank)
            self._coming.append((finding * matters, is_norm, *self._streams.to_host(number.detach())))

    def _take(self) -> None:
        """Check numbers that have reached the host. Keep the newest norm, and step and rank of the first NaN or inf."""
        while self._coming and ((event := self._coming[0][3]) is None or self._streams.accelerator.is_over(event)):
            finding, is_norm, number, _ = self._coming.pop(0)
            if is_norm:
                self._norm = float(number)
            if not torch.isfinite(number):
                self._found = self._found or finding

    @property
    def found(self) -> int:
        """Return the step and rank of this rank's first NaN or infinite number, encoded as an integer that is larger
        for earlier steps; 0: none so far."""
        self._take()
        return self._found

    @property
    def norm(self) -> float | None:
        """Return the newest norm (of gradients that were clipped) whose copy has reached the host, or None."""
        self._take()
        return self._norm

    def say(self, finding: int) -> None:
        """Warn once per run, naming step and rank of ``finding``, the largest :attr:`found` of all ranks (0: none)."""
        if not finding or self._said:
            return
        self._said, self._found = True, 0
        self._coming.clear()
        left, place = divmod(finding, self._ranks + 1)
        what = f"the loss of rank {self._ranks - place}" if place else "the norm of gradients"
        skips = "Such steps are skipped" if self._skips else "Set zero.optimizer.skip_nonfinite=5 to skip such steps"
        rank_zero_warn(
            f"{what} is NaN or infinite at step {_STEPS - left} (as loggers count), for the first time. {skips}. "
            "Trainer(detect_anomaly=True) names the operation."
        )
