"""Handles interruptions of training: signals that end a run, and checkpoints that are asked for on exceptions.

Both come at moments that differ between ranks, while saving takes collectives of all ranks.
"""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.lightning_api import SIGTERMException, SLURMEnvironment, pl
from lightning_zero.ranks.verdict import REQUEUE, VERDICT_VARIABLE, give_verdict
from lightning_zero.trainer.replaced import Replacements

if TYPE_CHECKING:
    from lightning_zero.engine import Engine

ON_ALL_RANKS = "_lightning_zero_on_all_ranks"  # on an exception: a save has raised it
MEET_S = 10.0  # how long a rank that failed waits for the others to fail at the same place
SAVING_SHARE = 0.05  # of the time, at most, that saving every so often may take
TERMINATED = 128 + signal.SIGTERM  # exit code
_NOTHING, _SAVE, _TERM, _REQUEUE = range(4)


class Left(SIGTERMException):
    """All ranks leave together, between two steps. What was to be saved is saved."""


class Interruptions:
    """Answers signals between two steps: a handler leaves a note, and at the next step boundary all ranks agree.

    Lightning answers inside the handlers: it saves there and broadcasts there, and ranks that are at different places
    then mix up their collectives. It also broadcasts on the device before every batch, whose result the host waits for.
    Here a signal to one rank is enough, and the agreement is one small message between hosts for each step.

    ::

        signal             training                                     nothing is trained
        requeue_signal     save, requeue, leave (SLURM only)            requeue
        SIGTERM            save if asked to, leave                      leave at once

    A validation is finished first.

    SIGTERM on SLURM (cancelled, or preempted and then requeued by SLURM itself) saves too. The handler of the requeue
    signal takes the place of one that is there already (submitit's, which would requeue without saving).

    Args:
        training: else only evaluating.
        saves_on_sigterm: also where SLURM is not.
        save_every_s: save after so many seconds, for runs that are started again; seldomer if saving takes more than
            :data:`SAVING_SHARE` of the time.
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
        self._before: Any = None
        self._main_thread = threading.current_thread() is threading.main_thread()
        # Before Lightning, which leaves a signal alone that has a handler.
        if self._main_thread and self._signum is not None:
            self._before = signal.signal(self._signum, self._on_requeue_signal) or signal.SIG_DFL
        self._loop = trainer.fit_loop.epoch_loop
        self._replaced = Replacements()
        self._replaced.replace(self._connector, "_sigterm_notifier_fn", lambda _, *args: self._on_term(*args))
        self._replaced.replace(self._loop, "_broadcast_sigterm_tensor", lambda _: None)
        if training:
            self._replaced.replace(self._loop, "advance", self._advance_from_boundary)

    def _on_requeue_signal(self, signum: int, frame: Any) -> None:
        if self.training:
            self._noted = max(self._noted, _REQUEUE)
        elif self._requeue() and VERDICT_VARIABLE in os.environ:
            raise SystemExit(1)  # nobody else does it for the script; srun takes the other ranks down

    def _on_term(self, signum: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and self._noted < _TERM:
            launcher.kill(signum)  # type: ignore[attr-defined]  # to the processes that this one has started
        self._noted = max(self._noted, _TERM)
        if not self.training:
            self._connector.received_sigterm = True
            raise SIGTERMException(self._code)

    @property
    def _code(self) -> int:
        """The exit code of the process. Outside of SLURM it tells a launcher that the run has not come to its end."""
        # Where one rank fails, srun kills those that take longer to end.
        return 0 if self._on_slurm else TERMINATED

    def _advance_from_boundary(self, advance: Any, data_fetcher: Any) -> None:
        """Answer signals before a batch is fetched: afterwards a loader that saves its place would count that batch."""
        loop = self._loop
        first_of_window = (loop.batch_idx + 1) % self._trainer.accumulate_grad_batches == 0
        if first_of_window and not loop.restarting:  # inside a window, what it has accumulated would be lost
            self.at_boundary()
        advance(data_fetcher)

    def at_boundary(self, *, last: bool = False) -> None:
        """Save if it is time to, and leave if any rank got a signal. On all ranks, between two steps.

        Args:
            last: no step follows.

        Raises:
            Left: on all ranks.
        """
        due = self._trainer.is_global_zero and time.monotonic() > self._next_save and not last
        checkpoints = cast(Any, self._trainer.strategy)._checkpoints
        noted = max(self._noted, _SAVE if due else _NOTHING), checkpoints.has_failed_write
        asked, failed = self._comm.max_(torch.tensor(noted, dtype=torch.int64)).tolist()
        if failed:
            checkpoints.wait_for_writes()
        if not asked:
            return
        at = contextlib.nullcontext() if last else self._as_lightning_saves()
        self._answer(asked, at, saves=asked != _TERM or self._saves)

    def _answer(self, asked: int, at: contextlib.AbstractContextManager[None], *, saves: bool) -> None:
        """Do what the signal asks for: save, leave, or both.

        Args:
            at: inside of it loops are in the state that a checkpoint is to find, ours or that of a callback that saves
                on exceptions.
            saves: whether there is anything to save.
        """
        self._noted = _NOTHING  # a note that came in the meantime is for the next boundary
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
        """Put the loops, inside, into the state in which Lightning itself saves.

        Lightning saves before it counts the step for loggers, and counts that step when it loads. A batch that is
        counted as fetched and not as begun tells it that the validations after the batch before are done.

        An exception leaves the loops so: callbacks that save on exceptions find the state that was saved here.
        """
        loop, progress = self._loop, copy.deepcopy(self._loop.batch_progress)
        loop.batch_progress.increment_ready()
        ahead = not loop._should_accumulate()  # what it asks when it loads
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
        checkpoints.wait_for_writes()  # the next number follows from the files that are there
        folder = trainer.default_root_dir
        path = trainer.strategy.broadcast(str(trainer._checkpoint_connector.hpc_save_path(folder)))
        failed, checkpoints.next_may_fail = False, not leaving
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except Exception as error:
            if leaving or not failed_on_all_ranks(error):
                raise
            failed = True
            rank_zero_warn(f"{error} Training goes on, and this is tried again later (save_minutes).")
        else:
            if leaving:
                checkpoints.finish_writes()  # a requeue ends these processes
            if trainer.is_global_zero:
                said = f"{what} step {trainer.global_step} in {path}"
                if leaving and not requeues:
                    said += f"\nTo go on: {strategy.run_plan.command_to_go_on(path)}"
                checkpoints.after_writes(partial(print, said, flush=True))
                for older in Path(folder).glob("hpc_ckpt_*.ckpt"):  # each holds the whole state
                    if os.path.realpath(older) != os.path.realpath(path):  # in "." they are written in two ways
                        strategy.remove_checkpoint(str(older))
        finally:
            checkpoints.next_may_fail = False
        if failed:
            # The exception's frames, which refer to each other, hold what hooks were given: values of a file without a
            # name, whose room the next try may need.
            gc.collect()
        if self._save_every_s is not None:
            now = time.monotonic()
            self._next_save = now + max(self._save_every_s, (now - started) / SAVING_SHARE)

    def _requeue(self) -> bool:
        """Ask SLURM, or the script of the job, to run the job again. Returns whether it will run again."""
        if give_verdict(REQUEUE) or not self._trainer.is_global_zero:
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
            rank_zero_warn(f"the job {job} is not requeued and goes on to its end: scontrol requeue: {failure}")
        return not failure

    def let_go(self) -> None:
        """Give signals back to Lightning, after the run."""
        self._replaced.undo()
        if self._main_thread and self._signum is not None:
            self._connector._original_handlers[self._signum] = self._before  # what Lightning puts back in a moment


def repair_counts(trainer: pl.Trainer) -> None:
    """Do not count a batch that was fetched and never trained: validations every so many batches go by this."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    if total.ready == total.started + 1 == total.completed + 1:  # type: ignore[attr-defined]
        total.ready -= 1


def step_plateau_schedulers(trainer: pl.Trainer) -> None:
    """After a validation at the end of an epoch that was resumed, have schedulers step that have their metric.

    Lightning lets them out there, because metrics of before are in no checkpoint. These are of now.
    """
    loop = trainer.fit_loop
    monitors = [c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "epoch"]
    if loop.restarting and monitors and all(monitor in trainer.callback_metrics for monitor in monitors):
        loop._restarting = False


def failed_on_all_ranks(error: Exception) -> bool:
    """Whether a save has raised ``error``, and failed on all ranks alike."""
    return ON_ALL_RANKS in error.__dict__


def refuse_lonely_save(engine: Engine) -> None:
    """Refuse a checkpoint on an exception that not all ranks have met at the same place.

    Raises:
        RuntimeError: they have not, and saving would hang or mix up collectives.
    """
    if sys.exc_info()[0] is None:
        return
    missing = engine.comm.waits.missing_here(MEET_S)
    if missing:
        raise RuntimeError(
            f"no checkpoint is saved on this exception: rank(s) {missing} did not fail at the same place within "
            f"{MEET_S:g} s, and a checkpoint takes all ranks. Resume from the last regular checkpoint "
            "(ModelCheckpoint(every_n_train_steps=...))."
        )
