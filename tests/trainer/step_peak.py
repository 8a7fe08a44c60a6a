"""Measures the most bytes that a rank on the CPU holds in a step: what torch allocates and frees while it goes on.

torch counts the peaks of devices itself, not those of host memory. Its profiler reports each allocation; from the bytes
that are there at the end and the changes before it follows what was there at every moment.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

from lightning_zero.planning.memory import on_tier
from lightning_zero.planning.placement import Tier
from tests.engine.live_bytes import live_bytes

FIRST_STEP = 1  # has optimizer state, and a plan of its gathers
STEPS = 2  # the first is for what was allocated before, whose end is not reported


class StepPeak(Callback):
    """Measures the peak of one of the first steps of a run.

    Attributes:
        nbytes: of parameters, gradients, optimizer state, activations and the batch, at the worst moment; ``None``: not
            measured (yet).
    """

    def __init__(self) -> None:
        self._profile: Any = None
        self._until: int | None = None
        self.nbytes: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step, self._engine = trainer.global_step, trainer.strategy.engine
        if self._until is None:
            if step >= FIRST_STEP:
                self._until = step + STEPS
                self._begin()
        elif self._profile is not None and step >= self._until:
            self._end(sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._profile is not None and self._until is not None and trainer.global_step >= self._until:
            self._end(0)

    def _begin(self) -> None:
        before = torch.empty(1)
        with _silence():
            self._profile = profile(use_kineto=True, profile_memory=True)
            self._profile.__enter__()
            del before  # the profiler says once that it did not see it come

    def _end(self, batch_nbytes: int) -> None:
        # Steps on other threads, and the gathers behind them, belong to the step.
        held = live_bytes(self._engine)
        now = on_tier(held, Tier.device) + on_tier(held, Tier.host) + batch_nbytes
        measured, self._profile = self._profile, None
        with _silence():
            measured.__exit__(None, None, None)
        changes = [e.nbytes() for e in measured.kineto_results.events() if e.name() == "[memory]"]
        most = now
        for change in reversed(changes):
            now -= change
            most = max(most, now)
        self.nbytes = most


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The profiler's own lines, which tell nobody anything, do not appear."""
    try:
        descriptor = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
        sys.__stderr__.flush() if sys.__stderr__ is not None else None
        kept = os.dup(descriptor)
    except (OSError, ValueError):
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
