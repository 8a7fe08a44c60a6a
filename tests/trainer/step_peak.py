"""Measures the most bytes that a rank on the CPU holds in a step: what torch allocates and frees while it goes on.

torch counts the peaks of devices itself, not those of host memory. Its profiler reports each allocation; from the bytes
that are there at the end and the changes before it follows what was there at every moment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

from lightning_zero.engine.engine import Engine
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.memory import Bytes, on_tier
from lightning_zero.planning.placement import Tier
from lightning_zero.trainer.memory.held_bytes import held_bytes


class StepPeak(Callback):
    """Measures the peak of the third step of a run: the first has no optimizer state, and no plan of its gathers, yet.

    The second is measured for what was allocated before, whose end is not reported.

    Attributes:
        nbytes: of parameters, gradients, optimizer state, activations and the batch, at the worst moment; ``None``: not
            measured (yet).
    """

    def __init__(self) -> None:
        self._profile: Any = None
        self.nbytes: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and self._profile is None:
            before = torch.empty(1)
            with _silence():
                self._profile = profile(use_kineto=True, profile_memory=True)
                self._profile.__enter__()
                del before  # the profiler says once that it did not see it come
        elif trainer.global_step == 3 and self.nbytes is None:
            # Steps on other threads, and the gathers behind them, belong to the step.
            held = live_bytes(trainer.strategy.engine)
            of_batch = sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor))
            with _silence():
                self._profile.__exit__(None, None, None)
            changes = [e.nbytes() for e in self._profile.kineto_results.events() if e.name() == "[memory]"]
            now = on_tier(held, Tier.device) + on_tier(held, Tier.host) + of_batch
            self.nbytes = max(accumulate((-change for change in reversed(changes)), initial=now))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The profiler's own lines, which tell nobody anything, do not appear."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def live_bytes(engine: Engine) -> Bytes:
    """Bytes of this rank at this instant, by role and tier: those at rest, and those that come and go.

    ::

        gathered   full buffers of units that are dropped after use and are here now
        reducing   gradients before they are reduced (where they do not accumulate), reductions in flight, and buffers
                   kept for the next ones
        staging    between tiers: the ring, what is read ahead, pinned pairs, tensors of files that are open

    It reads sizes alone, waits for nothing, and may be called at any moment of a step, by the main thread. Not in it:
    activations, and what a library needs inside.
    """
    held = held_bytes(engine)
    for bucket in engine.buckets:
        if bucket.plan.reshards and bucket.full.allocated:
            held[Role.gathered, Tier.device] += bucket.full.nbytes
        if (kept := bucket.node_shard.values) is not None:
            held[Role.gathered, Tier.device] += kept.nbytes
        grads = engine.passes.reducer.grads[bucket]
        if grads.local is not None and not bucket.plan.accumulates_locally:
            nbytes = grads.local.untyped_storage().nbytes()
            held[Role.grad, Tier.device] -= nbytes
            held[Role.reducing, Tier.device] += nbytes
        waiting = (*grads.waiting.values(), *grads.second_arrivals.values())
        held[Role.reducing, Tier.device] += sum(grad.nbytes for grad in waiting)
    reducer = engine.passes.reducer
    second = sum(b.layout.numel * b.dtypes.reduce.itemsize for b, _ in reducer._second_half)  # of all-reduces
    held[Role.reducing, Tier.device] += reducer._flying_nbytes + second + reducer.spare.nbytes
    buffers = engine.tiers.landing, engine.tiers.sender, engine.tiers.read_ahead
    held[Role.staging, Tier.host] += sum(part.nbytes for part in buffers if part is not None)
    return held
