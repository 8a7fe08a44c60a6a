"""Measure the bytes that an engine holds on this rank, by role and tier, to compare with the plan."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from lightning_zero.engine.engine import Engine
from lightning_zero.engine.steps.optimizer import ShardedOptimizer
from lightning_zero.engine.units.packed import tensors_beside
from lightning_zero.planning.buckets import RESTING, BucketPlan, Role
from lightning_zero.planning.layout import round_up
from lightning_zero.planning.memory import (
    FILE_PAGE_NBYTES,
    Bytes,
    Limits,
    Moment,
    StateOfRank,
    States,
    at_rest,
    planned_bytes,
)
from lightning_zero.planning.placement import Tier


def held_bytes(engine: Engine) -> Bytes:
    """Count this rank's bytes by role and tier: each storage once, and files by their reserved size.

    Parameters that are gathered for a use, and step counters, do not count. Copies in memory of tensors in files count
    as staging buffers.
    """
    held: Bytes = Counter({(role, Tier.device): 0 for role in RESTING})
    seen: set[int] = set()

    def add(role: Role, tier: Tier, tensor: Tensor | None) -> None:
        storage = None if tensor is None else tensor.untyped_storage()
        if storage is None or not storage.nbytes() or storage._cdata in seen:
            return
        seen.add(storage._cdata)  # by object, because meta tensors share one address
        held[(Role.staging, Tier.host) if tier is Tier.nvme else (role, tier)] += storage.nbytes()

    for bucket in engine.buckets:
        plan, tiers = bucket.plan, bucket.plan.tiers
        if not bucket.plan.reshards:
            add(Role.compute_param, Tier.device, bucket.full.data)
        add(Role.compute_param, tiers.compute_param, bucket.param_store.memory)
        for info in bucket.params:
            for _, _, tensor in tensors_beside(info.param):
                add(Role.compute_param, Tier.device, tensor)
        add(plan.storage_role, plan.storage_tier, bucket.master)
        for sharded in engine.optimizers:
            for state in sharded.state_tensors(bucket):
                add(Role.optim_state, tiers.master, state)
        add(Role.grad, tiers.grad, bucket.grad_store.memory)
        add(Role.grad, Tier.device, engine.passes.reducer.grads[bucket].local)
    if engine.tiers.nvme is not None:
        held[Role.staging, Tier.host] += engine.tiers.nvme.ring.nbytes
        held.update(_in_files(engine, engine.tiers.nvme.nbytes))
    return held


def _in_files(engine: Engine, total: int) -> Bytes:
    """Divide the ``total`` bytes in files among roles: parameters and masters have the planned bytes, optimizer state
    has the rest."""
    held: Bytes = Counter()
    for bucket in engine.buckets:
        for role, tier, nbytes in at_rest(bucket.plan, engine.comm.rank, state=(), moment=Moment.cleared):
            if tier is Tier.nvme:
                held[role, tier] += round_up(nbytes, FILE_PAGE_NBYTES)
    held[Role.optim_state, Tier.nvme] = total - sum(held.values())
    return held


def plan_of(engine: Engine) -> list[BucketPlan]:
    return [bucket.plan for bucket in engine.buckets]


def state_tensors(engine: Engine) -> States:
    """Return the number of state tensors per parameter, or a ``StateOfRank`` if an optimizer steps whole tensors."""
    sliced = [sharded for sharded in engine.optimizers if isinstance(sharded, ShardedOptimizer)]
    if len(sliced) < len(engine.optimizers):
        tensors = tuple(
            tuple(n for s in engine.optimizers for n in s.planned_state(bucket)) for bucket in engine.buckets
        )
        return StateOfRank(tensors, max(sharded.step_peak() for sharded in engine.optimizers))
    counts = [0]
    for bucket in engine.buckets:
        runs = sum(len(sharded.runs.runs_of(bucket)) for sharded in sliced)
        states = sum(1 for sharded in sliced for _ in sharded.state_tensors(bucket))
        counts.append(states // max(1, runs))
    return max(counts)


def limits_of(engine: Engine, micro_batches: int = 1) -> Limits:
    config = engine.config
    return Limits(
        config.prefetch_bytes,
        config.keep_gathered_bytes,
        config.reduce_bucket_bytes,
        micro_batches,
        has_link=engine.comm.streams.are_there,
        node_ranks=engine.comm.ranks.node.size,
        sum_ranks=engine.comm.ranks.sum.size,
    )


def planned_now(engine: Engine, held: Bytes) -> Bytes:
    """Return the planned bytes between two steps, by role and tier. Gradients count if ``held`` contains gradients."""
    gone = not any(nbytes for (role, _), nbytes in held.items() if role is Role.grad)
    moment = Moment.cleared if gone else Moment.reduced
    return planned_bytes(plan_of(engine), engine.comm.shard.index, state_tensors=state_tensors(engine), moment=moment)
