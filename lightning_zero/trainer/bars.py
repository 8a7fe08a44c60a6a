"""The Trainer's progress bar: whether there is one."""

from __future__ import annotations

from lightning_zero.lightning_api import pl


def has_bar(trainer: pl.Trainer) -> bool:
    """Whether the user wants to see how far things are: ``enable_progress_bar=False`` or a rate of 0 say no."""
    bar = trainer.progress_bar_callback
    return bar is not None and not getattr(bar, "is_disabled", False)
