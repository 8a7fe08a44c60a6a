"""What happens when training is interrupted: SLURM's requeue signal, and checkpoints that are asked for on exceptions.

Both come at moments that differ between ranks, and saving takes collectives of all of them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

if TYPE_CHECKING:
    from lightning_zero.engine import Engine

MEET_S = 10.0  # how long a rank that failed waits for the others to fail at the same place
_HANDLER = "_slurm_sigusr_handler_fn"


class Requeue:
    """Answers SLURM's requeue signal between two steps.

    Lightning saves and requeues inside the signal handler: ranks would start collectives at different places. Here the
    handler leaves a note; at the next step boundary all ranks agree, and then run Lightning's handler.

    While nothing is trained there is nothing to save: the job is requeued at once.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, *, training: bool) -> None:
        self._trainer = trainer
        self._comm = engine.comm
        self._training = training
        self._noted: int | None = None
        connector = trainer._signal_connector
        self._save_and_requeue = getattr(type(connector), _HANDLER).__get__(connector)
        setattr(connector, _HANDLER, self._on_signal)

    @staticmethod
    def wanted(trainer: pl.Trainer) -> bool:
        environment = trainer._accelerator_connector.cluster_environment
        return isinstance(environment, SLURMEnvironment) and environment.auto_requeue

    def _on_signal(self, signum: int, frame: Any) -> None:
        if self._training:
            self._noted = signum
        else:
            self._requeue_only(signum)

    def _requeue_only(self, signum: int) -> None:
        self._trainer.save_checkpoint = lambda *_, **__: None  # type: ignore[method-assign]
        try:
            self._save_and_requeue(signum, None)
        finally:
            del self._trainer.save_checkpoint

    def at_boundary(self) -> None:
        """On all ranks, between two steps: save and requeue if any rank got the signal."""
        asked = torch.tensor([self._noted or 0], dtype=torch.int64)
        signum = int(self._comm.max_(asked).item())
        if signum:
            self._noted = None
            self._save_and_requeue(signum, None)

    def let_go(self) -> None:
        self._trainer._signal_connector.__dict__.pop(_HANDLER, None)


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
