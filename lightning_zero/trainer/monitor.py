"""ZeroMonitor: memory by role, speed, and time that was lost waiting for other ranks."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_zero.config import ConfigError
from lightning_zero.engine.whole.held_bytes import held_bytes


class ZeroMonitor(Callback):
    """Logs, under the names below, what this rank holds and how fast it steps.

    ::

        zero/bytes/<role>/<tier>   bytes of this rank at rest: compute_param, master_param, grad, optim_state
        zero/steps_per_s           optimizer steps per second since the last log
        zero/wait_s_per_step       seconds per step that this rank stood waiting for messages: exposed communication

    Args:
        every_n_steps: optimizer steps between two logs; default: ``Trainer(log_every_n_steps=)``.
        prog_bar: show steps per second in the progress bar.

    Raises:
        ConfigError: at the start of a run, with another strategy.
    """

    def __init__(self, every_n_steps: int | None = None, *, prog_bar: bool = False) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"ZeroMonitor.every_n_steps: expected a number > 0, got {every_n_steps!r}.")
        self._every_n_steps = every_n_steps
        self._prog_bar = prog_bar
        self._last: tuple[int, float, float] | None = None  # step, time, seconds waited at the last log

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        from lightning_zero.trainer.strategy import ZeroStrategy

        if not isinstance(trainer.strategy, ZeroStrategy):
            raise ConfigError("ZeroMonitor measures ZeroStrategy. Use Trainer(strategy='zero3'), or drop the callback.")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = self._now(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._last is not None
        every = self._every_n_steps or getattr(trainer, "log_every_n_steps", 0)
        if not every or trainer.global_step < self._last[0] + every:
            return
        # As tensors of the host: numbers Lightning would send to the device, one by one, and wait for each.
        memory, speed = (
            {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
            for values in (self._memory(trainer), self._speed(trainer))
        )
        pl_module.log_dict(memory, on_step=True, on_epoch=False)
        for name, value in speed.items():
            shown = self._prog_bar and name == "zero/steps_per_s"
            pl_module.log(name, value, on_step=True, on_epoch=False, prog_bar=shown)

    @staticmethod
    def _now(trainer: pl.Trainer) -> tuple[int, float, float]:
        waited: float = trainer.strategy.engine.comm.waits.waited_s  # type: ignore[attr-defined]
        return trainer.global_step, time.monotonic(), waited

    @staticmethod
    def _memory(trainer: pl.Trainer) -> dict[str, float]:
        held = held_bytes(trainer.strategy.engine)  # type: ignore[attr-defined]
        return {f"zero/bytes/{role.value}/{tier.value}": float(nbytes) for (role, tier), nbytes in held.items()}

    def _speed(self, trainer: pl.Trainer) -> dict[str, float]:
        assert self._last is not None
        before, self._last = self._last, self._now(trainer)
        steps, seconds, waited = (now - then for now, then in zip(self._last, before, strict=True))
        return {"zero/steps_per_s": steps / max(seconds, 1e-9), "zero/wait_s_per_step": waited / steps}
