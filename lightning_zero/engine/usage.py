"""What an engine holds: bytes of this rank by role, measured, and the plan that they should follow."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_zero.engine.engine import Engine
from lightning_zero.engine.unit import Bucket
from lightning_zero.planning.memory import BucketPlan, Bytes, Role
from lightning_zero.planning.placement import Tier


def held_bytes(engine: Engine) -> Bytes:
    """Bytes of this rank now, by role and tier. Parameters that are gathered for a moment do not rest and do not count,
    nor do numbers that the optimizer keeps once for a run (a step count)."""
    held: Bytes = {(role, Tier.device): 0 for role in Role}
    for bucket in engine.buckets:
        held[Role.compute_param, Tier.device] += _compute_nbytes(bucket)
        held[Role.master_param, Tier.device] += bucket.master.nbytes if _own_master(bucket) else 0
        local = engine.reducer.grads[bucket].local
        held[Role.grad, Tier.device] += sum(g.nbytes for g in (bucket.grad, local) if g is not None)
        held[Role.optim_state, Tier.device] += sum(t.nbytes for t in _state_tensors(engine, bucket))
    return held


def _own_master(bucket: Bucket) -> bool:
    """Whether master_param is more than the compute parameters at rest."""
    return bucket.trainable and bucket.dtypes.master != bucket.dtypes.compute


def _compute_nbytes(bucket: Bucket) -> int:
    if not bucket.resharding:
        return bucket.full.nbytes
    return 0 if _own_master(bucket) else bucket.master.nbytes


def _state_tensors(engine: Engine, bucket: Bucket) -> Iterator[Tensor]:
    for sharded in engine.optimizers:
        for run in sharded.runs_of(bucket):
            state = sharded.optimizer.state.get(run.tensor, {})
            yield from (
                value for value in state.values() if isinstance(value, Tensor) and value.shape == run.tensor.shape
            )


def plan_of(engine: Engine) -> list[BucketPlan]:
    """What :func:`lightning_zero.planning.memory.planned_bytes` needs to know."""
    return [
        BucketPlan(
            layout=bucket.layout,
            row=bucket.row,
            compute_itemsize=bucket.dtypes.compute.itemsize,
            master_itemsize=bucket.dtypes.master.itemsize,
            grad_itemsize=bucket.dtypes.grad.itemsize,
            one_dtype=bucket.dtypes.master == bucket.dtypes.compute,
            trainable=bucket.trainable,
        )
        for bucket in engine.buckets
    ]
