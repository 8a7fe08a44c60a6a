"""Scale the loss dynamically for fp16, with the arithmetic of ``torch.amp.GradScaler``.

Gradients are divided by the scale in fp32 as they leave autograd, so they travel and rest unscaled. All ranks skip a
step if any rank has a gradient that is not finite.
"""

from __future__ import annotations

from typing import Any

import torch


class LossScaler:
    """The scale and its history.

    Args:
        growth_factor: multiplies the scale after ``growth_interval`` steps in a row without overflow.
        backoff_factor: multiplies the scale after an overflow.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = float(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._good_steps = 0

    @classmethod
    def like(cls, scaler: Any) -> LossScaler:
        """Copy the settings of a ``torch.amp.GradScaler``."""
        if not scaler.is_enabled():
            return cls()
        return cls(
            scaler._init_scale,
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
        )

    def get_scale(self) -> float:
        """Return the scale, for callbacks that log it as of ``torch.amp.GradScaler``."""
        return self.scale

    def is_enabled(self) -> bool:
        """Return True, as an enabled ``torch.amp.GradScaler`` does."""
        return True

    def update(self, *, overflowed: bool) -> None:
        """Adapt the scale after a step, or after a step was skipped because of an overflow."""
        if overflowed:
            self.scale *= self.backoff_factor
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            grown = self.scale * self.growth_factor
            if grown <= torch.finfo(torch.float32).max:  # beyond it every loss would be infinite
                self.scale = grown
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Use the keys of ``torch.amp.GradScaler.state_dict``."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self._good_steps = int(state["_growth_tracker"])
