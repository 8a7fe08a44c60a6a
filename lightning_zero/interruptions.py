"""What happens when training is interrupted: SLURM's requeue signal, and checkpoints that are asked for on exceptions.

Both come at moments that differ between ranks, and saving takes collectives of all of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.cluster import REQUEUE, VERDICT_VARIABLE, give_verdict

if TYPE_CHECKING:
    from lightning_zero.engine import Engine

MEET_S = 10.0  # how long a rank that failed waits for the others to fail at the same place
_TERM_HANDLER = "_sigterm_notifier_fn"
_NOTHING, _TERM, _REQUEUE = range(3)


class Left(SystemExit):
    """All ranks have saved at the same step, and leave together."""


class Requeue:
    """Answers SLURM's signals between two steps: all ranks save, leave, and the job goes back to the queue.

    Lightning saves and requeues inside the signal handler: ranks would start collectives at different places. Here
    the handler leaves a note; at the next step boundary all ranks agree, so that a signal to one of them is enough.

    ::

        signal             training                                     nothing is trained
        requeue_signal     save, requeue, leave                         requeue
        SIGTERM            save, leave: cancelled, or preempted by      as without us
                           SLURM, which requeues by itself

    The handler takes the place of one that is there already (submitit's, which would requeue without saving).
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, *, training: bool) -> None:
        self._trainer = trainer
        self._comm = engine.comm
        self._training = training
        self._noted = _NOTHING
        self._connector = trainer._signal_connector
        environment = trainer._accelerator_connector.cluster_environment
        assert isinstance(environment, SLURMEnvironment) and environment.requeue_signal is not None
        self._signum = environment.requeue_signal
        self._before: Any = None
        self._main_thread = threading.current_thread() is threading.main_thread()
        if self._main_thread:  # before Lightning, which leaves a signal alone that has a handler
            self._before = signal.signal(self._signum, self._on_requeue_signal) or signal.SIG_DFL
        if training:  # Lightning's broadcasts from the handler
            setattr(self._connector, _TERM_HANDLER, self._on_term)

    @staticmethod
    def wanted(trainer: pl.Trainer) -> bool:
        environment = trainer._accelerator_connector.cluster_environment
        return isinstance(environment, SLURMEnvironment) and environment.auto_requeue

    def _on_requeue_signal(self, signum: int, frame: Any) -> None:
        if self._training:
            self._noted = max(self._noted, _REQUEUE)
        elif self._requeue() and VERDICT_VARIABLE in os.environ:
            raise SystemExit(1)  # nobody else does it for the script; srun takes the other ranks down

    def _on_term(self, signum: int, frame: Any) -> None:
        self._noted = max(self._noted, _TERM)

    def at_boundary(self, *, last: bool = False) -> None:
        """On all ranks, between two steps: save and leave if any rank got a signal.

        Args:
            last: no step follows.

        Raises:
            Left: on all ranks.
        """
        asked = int(self._comm.max_(torch.tensor([self._noted], dtype=torch.int64)).item())
        if asked:  # a note that came in the meantime is for the next boundary
            self._noted = _NOTHING
            with contextlib.nullcontext() if last else self._as_lightning_saves():
                self._save()
        if asked == _TERM or (asked == _REQUEUE and self._trainer.strategy.broadcast(self._requeue())):
            raise Left(0)  # not a code that has srun kill the ranks that take longer

    @contextlib.contextmanager
    def _as_lightning_saves(self) -> Iterator[None]:
        """Lightning saves before it counts the step for loggers, and counts it when it loads."""
        loop = self._trainer.fit_loop.epoch_loop
        ahead = not loop._should_accumulate()  # what it asks when it loads
        loop._batches_that_stepped -= ahead
        try:
            yield
        finally:
            loop._batches_that_stepped += ahead

    def _save(self) -> None:
        trainer = self._trainer
        for logger in trainer.loggers:
            logger.save()
        folder = trainer.default_root_dir
        path = trainer.strategy.broadcast(str(trainer._checkpoint_connector.hpc_save_path(folder)))
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            print(f"interrupted: saved step {trainer.global_step} in {path}", flush=True)
            for older in Path(folder).glob("hpc_ckpt_*.ckpt"):  # each holds the whole state
                if str(older) != path:
                    shutil.rmtree(older) if older.is_dir() else older.unlink(missing_ok=True)

    def _requeue(self) -> bool:
        """Ask SLURM, or the script of the job, to run it again; whether that will be."""
        if give_verdict(REQUEUE) or not self._trainer.is_global_zero:
            return True
        job = os.environ["SLURM_JOB_ID"]
        if "SLURM_ARRAY_JOB_ID" in os.environ:
            job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        try:
            done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
            failure = done.stderr.strip() if done.returncode else ""
        except OSError as error:
            failure = str(error)
        if failure:
            rank_zero_warn(f"the job {job} is not requeued and goes on to its end: scontrol requeue: {failure}")
        return not failure

    def let_go(self) -> None:
        self._connector.__dict__.pop(_TERM_HANDLER, None)
        if self._main_thread:
            self._connector._original_handlers[self._signum] = self._before  # what Lightning puts back in a moment


def refuse_lonely_save(engine: Engine) -> None:
    """A checkpoint is asked for while an exception is handled: all ranks must have come to the same place.

    Raises:
        RuntimeError: they have not, and saving would hang or mix up collectives.
    """
    if sys.exc_info()[0] is None:
        return
    missing = engine.comm.missing_here(MEET_S)
    if missing:
        raise RuntimeError(
            f"no checkpoint is saved on this exception: rank(s) {missing} did not fail at the same place within "
            f"{MEET_S:g} s, and a checkpoint takes all ranks. Resume from the last regular checkpoint "
            "(ModelCheckpoint(every_n_train_steps=...))."
        )
