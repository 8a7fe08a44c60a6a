"""Estimate the seconds of a step and the resource that binds it, from the rates of a machine.

Bytes that a rank sends for a bucket of n elements over N ranks (ring algorithms; Thakur, Rabenseifner, Gropp 2005)::

    gather           n * compute itemsize * (N - 1) / N       stages 1, 2: one; stage 3: two for each micro-batch
    reduce-scatter   n * wire itemsize * (N - 1) / N          stage 2, 3: each micro-batch; stages 0, 1: one
    all-reduce       that, and a gather of the sum, in the reduce dtype

On a GPU everything overlaps but the first gather and the last reduction (``speed.py``). On a CPU all work shares the
same cores, so it adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.memory import Limits, by_unit
from lightning_zero.planning.placement import Placement, logical_collectives
from lightning_zero.planning.speed import Rates, least_seconds, work_of

CPU_RATES = Rates(
    compute=100e9,
    device_memory=10e9,
    host_memory=10e9,
    to_device=10e9,
    to_host=10e9,
    disk_read=1.5e9,
    disk_write=1e9,
    network=2e9,
)
"""Assumed for a process on a few cores if no rates are given. Like :data:`GPU_RATES`, good enough to order rows."""
GPU_RATES = Rates(
    compute=300e12,
    device_memory=2.5e12,
    host_memory=25e9,
    to_device=25e9,
    to_host=25e9,
    disk_read=3e9,
    disk_write=2e9,
    network=50e9,
)
"""Assumed for one GPU with its share of the host."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that one rank sends in one optimizer step."""

    gathers: float
    reductions: float
    in_node: float = 0.0  # of gathers within a node, not counted in gathers
    exchanged: float = 0.0  # to ranks that share a sequence

    @property
    def nbytes(self) -> float:
        """Bytes over the network."""
        return self.gathers + self.reductions + self.exchanged


def sent_by(buckets: Sequence[BucketPlan], limits: Limits, *, replicas: int = 1, exchanged: int = 0) -> Sent:
    """Compute what a rank sends in a step of ``limits.micro_batches`` backwards.

    Args:
        replicas: shard groups, whose reduced shards are summed too.
        exchanged: bytes of one micro-batch to ranks that share a sequence.
    """
    sizes = by_unit(buckets, lambda b: b.full_nbytes * b.reshards)
    last = max((unit for unit, nbytes in enumerate(sizes) if unit and nbytes), default=0)
    gathers = reductions = in_node = 0.0
    for bucket in buckets:
        ranks = bucket.layout.world_size
        stays = bucket.unit in (0, last)
        share = (ranks - 1) / ranks
        row = bucket.row
        kept = _in_node(bucket, limits) if not stays else 0.0
        in_node += kept
        if not bucket.trainable:
            if bucket.reshards:
                gathers += limits.micro_batches * (1 if stays or kept else 2) * bucket.full_nbytes * share
            continue
        counts = logical_collectives(row, limits.micro_batches, stays_gathered=stays)
        gathers += (limits.micro_batches if kept else counts["all_gather"]) * bucket.full_nbytes * share
        reduced = bucket.layout.numel * bucket.itemsizes.reduce
        sent = bucket.layout.numel * bucket.wire_itemsize(limits.micro_batches)
        reductions += (counts["reduce_scatter"] * sent + counts["all_reduce"] * (sent + reduced)) * share
        if replicas > 1:
            own = reduced / ranks if row.master is Placement.sharded else reduced
            reductions += (counts["reduce_scatter"] + counts["all_reduce"]) * 2 * own * (replicas - 1) / replicas
    return Sent(gathers, reductions, in_node, float(exchanged * limits.micro_batches))


def _in_node(bucket: BucketPlan, limits: Limits) -> float:
    """Bytes of a bucket's second gathers if the node keeps its units, else 0."""
    ranks = limits.node_ranks
    if not ranks or not bucket.reshards:
        return 0.0
    return limits.micro_batches * bucket.full_nbytes * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class StepTime:
    """Expected seconds of one optimizer step."""

    seconds: float
    resources: dict[str, float]  # busy seconds of each resource

    @property
    def binding(self) -> str:
        return max(self.resources, key=lambda name: self.resources[name])


def expected(
    buckets: Sequence[BucketPlan],
    limits: Limits,
    flops: float,
    rates: Rates,
    *,
    replicas: int = 1,
    exchanged: int = 0,
    on_cpu: bool = False,
) -> StepTime:
    """Estimate the time of a step that waits for nothing but its resources.

    Args:
        flops: of forward and backward of one micro-batch, with recomputation.
        on_cpu: the same cores do all work, so that nothing overlaps.
    """
    micro_batches = limits.micro_batches
    work = work_of(buckets, flops * micro_batches, micro_batches=micro_batches)
    work.network = sent_by(buckets, limits, replicas=replicas, exchanged=exchanged).nbytes
    resources = {name: seconds for name, seconds in work.seconds(rates).items() if seconds}
    if on_cpu:
        return StepTime(sum(resources.values()), resources or {"compute": 0.0})
    seconds = least_seconds(work, rates, micro_batches=micro_batches)
    return StepTime(seconds + _alone(buckets, micro_batches) / rates.network, resources or {"compute": 0.0})


def _alone(buckets: Sequence[BucketPlan], micro_batches: int) -> float:
    """Bytes of the first gather and the last reduction, which nothing overlaps."""
    shares = {b.unit: (b.layout.world_size - 1) / b.layout.world_size for b in buckets}
    gathers = by_unit(buckets, lambda b: b.full_nbytes * b.reshards)
    reductions = by_unit(buckets, lambda b: b.layout.numel * b.wire_itemsize(micro_batches) * b.trainable)
    first = next((unit for unit, nbytes in enumerate(gathers) if unit and nbytes), 0)
    last = next((unit for unit, nbytes in enumerate(reductions) if unit and nbytes), 0)
    gathered = gathers[first] * shares.get(first, 0.0) if gathers else 0.0
    reduced = reductions[last] * shares.get(last, 0.0) if reductions else 0.0
    return gathered + reduced
