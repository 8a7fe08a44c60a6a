"""Bytes per rank at rest, by role. Pure: layouts, placements and dtypes in, integers out.

For a trainable bucket of P elements on N ranks, with itemsizes c, m, g of compute_param, master_param and grad, and k
elementwise state tensors of the optimizer (AdamW 2, SGD with momentum 1, SGD 0) in the master's dtype::

    role           replicated     sharded    nothing where
    compute_param  c P            c P / N    sharded with a master of another dtype: it is cast from that when gathered
    master_param   m P            m P / N    it has the dtype of compute_param, whose memory it then is
    grad           g P            g P / N    cleared
    optim_state    k m P          k m P / N

Each role has the placement of the stage's row; optim_state goes with master_param. A frozen bucket has compute_param
only. With bf16 compute, fp32 master, Adam and bf16 gradients: 16P, 4P + 12P/N, 2P + 14P/N and 14P/N for stages 0 to 3
(architecture, section 3; ZeRO, arXiv 1910.02054, section 3.2, which also keeps the 2P/N of compute_param at stage 3).

Gradients at stages 0 and 1 rest replicated while they accumulate; once reduced they rest where the master is. P counts
the padding between parameters and at the end of the bucket; optim_state has none of the latter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from lightning_zero.planning.layout import BucketLayout
from lightning_zero.planning.placement import Placement, StageRow, Tier


class Role(Enum):
    compute_param = "compute_param"
    master_param = "master_param"
    grad = "grad"
    optim_state = "optim_state"


class Moment(Enum):
    """When bytes are counted."""

    accumulating = "accumulating"  # between two micro-batches of a step
    reduced = "reduced"  # after the last backward, before the gradients are zeroed
    cleared = "cleared"  # after they are


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """What the bytes of a bucket follow from.

    Attributes:
        layout: elements, padding included, and ranks.
        row: placements of its roles.
        compute_itemsize, master_itemsize, grad_itemsize: bytes of an element of each role.
        one_dtype: master_param and compute_param have the same dtype, and so the same memory.
        trainable: it has roles besides compute_param.
    """

    layout: BucketLayout
    row: StageRow
    compute_itemsize: int
    master_itemsize: int
    grad_itemsize: int
    one_dtype: bool
    trainable: bool = True


Bytes = dict[tuple[Role, Tier], int]


def planned_bytes(
    buckets: Iterable[BucketPlan], rank: int, *, state_tensors: int, moment: Moment = Moment.reduced
) -> Bytes:
    """Bytes of one rank at rest, by role and tier.

    Args:
        state_tensors: elementwise tensors that the optimizer keeps for each parameter, in the master's dtype.
        moment: which gradients there are.
    """
    total: Bytes = {(role, Tier.device): 0 for role in Role}
    for bucket in buckets:
        for role, nbytes in _bucket_bytes(bucket, rank, state_tensors, moment).items():
            total[role, Tier.device] += nbytes
    return total


def _bucket_bytes(bucket: BucketPlan, rank: int, state_tensors: int, moment: Moment) -> dict[Role, int]:
    row = bucket.row
    compute = _numel(bucket.layout, row.compute_param) * bucket.compute_itemsize
    if not bucket.trainable:
        return {Role.compute_param: compute}
    cast_from_master = row.compute_param is Placement.sharded and bucket.layout.world_size > 1 and not bucket.one_dtype
    return {
        Role.compute_param: 0 if cast_from_master else compute,
        Role.master_param: 0 if bucket.one_dtype else _numel(bucket.layout, row.master) * bucket.master_itemsize,
        Role.grad: _grad_numel(bucket, moment) * bucket.grad_itemsize,
        Role.optim_state: _stepped_numel(bucket, rank) * state_tensors * bucket.master_itemsize,
    }


def _grad_numel(bucket: BucketPlan, moment: Moment) -> int:
    if moment is Moment.cleared:
        return 0
    at_rest = bucket.row.grad if moment is Moment.accumulating else bucket.row.master
    return _numel(bucket.layout, at_rest)


def _numel(layout: BucketLayout, placement: Placement) -> int:
    return layout.numel if placement is Placement.replicated else layout.shard_numel


def _stepped_numel(bucket: BucketPlan, rank: int) -> int:
    """Elements that the optimizer of ``rank`` steps: its runs reach to the last parameter's end, not to the shard's."""
    layout = bucket.layout
    owned = (0, layout.numel) if bucket.row.master is Placement.replicated else layout.shard_range(rank)
    return sum(fragment.stop - fragment.start for fragment in layout.cut(*owned))
