"""Measures the bytes that an engine holds at one instant, for comparison with the plan."""

from __future__ import annotations

from lightning_zero.engine.engine import Engine
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.memory import Bytes
from lightning_zero.planning.placement import Tier
from lightning_zero.trainer.memory.held_bytes import held_bytes


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
