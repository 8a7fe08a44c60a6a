"""Say on rank 0 at which step a loss or gradient norm is NaN or infinite first. Ranks' findings travel with signals."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.settings import Precision

_STEPS = 2**40  # more than any run has; an earlier step is a larger finding


class NotFinite:
    """Looks at the numbers of steps once their copies have come to the host, which never waits for them."""

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
        """Note a loss of this rank, or a norm, of the step that is being made."""
        # Norms that overflow are skipped, and with a loss scale the first ones do.
        matters = not self._said and not (is_norm and self._skips)
        if number.dim() == 0 and (matters or is_norm):
            step = self._trainer.fit_loop.epoch_loop._batches_that_stepped
            finding = (_STEPS - step) * (self._ranks + 1) + (0 if is_norm else self._ranks - self._rank)
            self._coming.append((finding * matters, is_norm, *self._streams.to_host(number.detach())))

    def _take(self) -> None:
        """Look at the numbers that have come."""
        while self._coming and ((event := self._coming[0][3]) is None or self._streams.accelerator.is_over(event)):
            finding, is_norm, number, _ = self._coming.pop(0)
            if is_norm:
                self._norm = float(number)
            if not torch.isfinite(number):
                self._found = self._found or finding

    @property
    def found(self) -> int:
        """Return this rank's first finding whose number has come, which says step and rank; 0: none."""
        self._take()
        return self._found

    @property
    def norm(self) -> float | None:
        """Return the last norm by which gradients were clipped, of those that have come; None: none has."""
        self._take()
        return self._norm

    def say(self, finding: int) -> None:
        """Warn of the first ``finding`` of all ranks."""
        if not finding or self._said:
            return
        self._said, self._found = True, 0
        self._coming.clear()
        left, place = divmod(finding, self._ranks + 1)
        what = f"the loss of rank {self._ranks - place}" if place else "the norm of gradients"
        skips = "Such a step is skipped" if self._skips else "zero.optimizer.skip_nonfinite=5 skips such steps"
        rank_zero_warn(
            f"{what} is NaN or infinite at step {_STEPS - left} (as loggers count), for the first time. {skips}; "
            "Trainer(detect_anomaly=True) names the operation."
        )
