"""Scale the loss dynamically for fp16, with the arithmetic of ``torch.amp.GradScaler``.

Gradients are divided by the scale in fp32 as they leave autograd, so messages and gradient buffers are unscaled. All
ranks skip a step if any rank has a gradient that is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler


class LossScaler(GradScaler):
    """Holds the loss scale and adapts it. The engine multiplies losses by the scale and reports overflows."""

    def __init__(self, init_scale: float = 2.0**16, **settings: Any) -> None:
        super().__init__("cpu", init_scale, **settings)

    @classmethod
    def like(cls, scaler: GradScaler) -> LossScaler:
        """Make a LossScaler with the settings of ``scaler``, or with the default settings if ``scaler`` is disabled."""
        if not scaler.is_enabled():
            return cls()
        return cls(
            scaler._init_scale,
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.get_scale()

    def update(self, *, overflowed: bool) -> None:  # type: ignore[override]
        """Adapt the scale after each step. ``overflowed``: whether the step was skipped because of an overflow."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))
        factors = self._growth_factor, self._backoff_factor, self._growth_interval
        torch._amp_update_scale_(self._scale, self._growth_tracker, torch.tensor(float(overflowed)), *factors)  # type: ignore[arg-type]
