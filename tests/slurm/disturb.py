"""What happens to the jobs of the tests: signals at a step, and slow steps."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Disturb(Callback):
    """In the first stretch of a job only: a signal to this rank itself after a step, or time for every step.

    Args:
        step: after so many optimizer steps.
        rank: to this rank.
        send: name of the signal, such as ``KILL``.
        sleep_s: for every step on every rank.
    """

    def __init__(self, step: int = -1, rank: int = 0, send: str = "KILL", sleep_s: float = 0.0) -> None:
        self.step = step
        self.rank = rank
        self.signum = signal.Signals[f"SIG{send}"]
        self.sleep_s = sleep_s

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if "SLURM_RESTART_COUNT" in os.environ:
            return
        time.sleep(self.sleep_s)
        if (trainer.global_step, trainer.global_rank) == (self.step, self.rank):
            os.kill(os.getpid(), self.signum)
