"""Estimate the seconds of a step: its work on each resource, divided by the rates of the machine.

Bytes for each parameter that is stepped on the host, with itemsizes c (compute), m (master, state), g (gradient)::

    link        c to the device, once, or at every gather if parameters are on another tier; g from the device
    host memory 6 m + g: the step reads master, two states and gradient, and writes master and states
    disk        3 m read and written if the optimizer is in files; c read at every gather and written once if
                parameters are

``zero.optimizer.state_dtype`` shrinks the states' part of m. On a GPU all resources work in parallel, so the slowest is
the bound. But a step that waits for the end of the backward (gradient clipping) overlaps only the next forward, because
the next backward needs the gradients' memory. Nothing overlaps the first gather and the last reduction. On a CPU all
work shares the same cores, so the seconds of all resources are added.

Bytes that a rank sends for a bucket of n elements over N ranks (ring algorithms; Thakur, Rabenseifner, Gropp 2005)::

    gather           n * compute itemsize * (N - 1) / N       stages 1, 2: one; stage 3: two for each micro-batch
    reduce-scatter   n * wire itemsize * (N - 1) / N          stage 2, 3: each micro-batch; stages 0, 1: one
    all-reduce       a reduce-scatter, and a gather of the sum in the reduce dtype

An exchange among N = K L ranks, L on each of K nodes, goes in two levels: n * wire itemsize * (L - 1) / L within the
node, then n / L * reduce itemsize * (K - 1) / K between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.memory import ADAM_STATES, Limits, by_unit
from lightning_zero.planning.placement import Placement, Tier, logical_collectives

FORWARD = 1 / 3  # share of the compute of a step; a backward takes twice the time of its forward


@dataclass(frozen=True)
class Rates:
    """FLOPs and bytes per second of each resource of a machine, for one rank."""

    compute: float  # FLOPs that a model reaches
    device_memory: float  # bytes read and written
    host_memory: float  # bytes read and written by all cores
    to_device: float  # bytes
    to_host: float  # bytes, at the same time
    disk_read: float  # bytes; the disk does not write at the same time
    disk_write: float  # bytes
    network: float = math.inf  # bytes sent, while as many are received


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


@dataclass
class Work:
    """The work of one rank in one step, in the units of :class:`Rates`."""

    compute: float = 0.0
    device_memory: float = 0.0
    host_memory: float = 0.0
    to_device: float = 0.0
    to_host: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0
    network: float = 0.0

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Return how many seconds each resource works, by name. Disk reads and writes are added up as ``disk``."""
        found = {f.name: getattr(self, f.name) / getattr(rates, f.name) for f in fields(self)}
        disk = found.pop("disk_read") + found.pop("disk_write")
        return {**found, "disk": disk}


def work_of(buckets: Iterable[BucketPlan], flops: float, *, micro_batches: int = 1) -> Work:
    """Return a rank's work in one step, except on the network. ``flops``: of the step's forwards and backwards."""
    work = Work(compute=flops)
    for bucket in buckets:
        if not bucket.trainable:
            continue
        n, sizes, tiers = bucket.owned_numel, bucket.itemsizes, bucket.tiers
        gathers = 2 * micro_batches
        state = ADAM_STATES * bucket.state_nbytes(n)
        step = n * (2 * sizes.master + sizes.grad) + 2 * state
        if not bucket.steps_on_host:
            work.device_memory += step
            continue
        work.host_memory += step
        reductions = micro_batches if bucket.row.grad is Placement.sharded else 1
        work.to_host += reductions * n * sizes.grad * bucket.grads_on_host
        work.to_device += gathers * bucket.brought_to_gather or n * bucket.sent_itemsize
        if tiers.master is Tier.nvme:
            work.disk_read += n * sizes.master + state
            work.disk_write += n * sizes.master + state
        if tiers.compute_param is Tier.nvme:
            work.disk_read += gathers * n * sizes.compute
            work.disk_write += n * sizes.compute
    return work


def least_seconds(work: Work, rates: Rates, *, micro_batches: int = 1) -> float:
    """Compute the lower bound of a step's time, without the first gather and the last reduction."""
    seconds = work.seconds(rates)
    forward = FORWARD * seconds["compute"] / micro_batches
    # Reading the optimizer state from files need not wait for the backward.
    return max(*seconds.values(), seconds["compute"] - forward + max(forward, seconds["host_memory"]))


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that one rank sends in one optimizer step."""

    gathers: float
    reductions: float
    in_node: float = 0.0  # of gathers within a node, not counted in gathers
    exchanged: float = 0.0  # to ranks that share a sequence

    @property
    def nbytes(self) -> float:
        """Return the bytes that a rank sends in a step, without gathers within a node."""
        return self.gathers + self.reductions + self.exchanged


def sent_by(buckets: Sequence[BucketPlan], limits: Limits, *, replicas: int = 1, exchanged: int = 0) -> Sent:
    """Compute the bytes that a rank sends in a step of ``limits.micro_batches`` backwards.

    Args:
        replicas: number of shard groups; reduced shards are summed across them too.
        exchanged: bytes that go to ranks of the same sequence in one micro-batch.
    """
    sizes = by_unit(buckets, lambda b: b.full_nbytes * b.reshards)
    last = max((unit for unit, nbytes in enumerate(sizes) if unit and nbytes), default=0)
    gathers = reductions = in_node = 0.0
    for bucket in buckets:
        ranks = bucket.layout.world_size
        stays = bucket.unit in (0, last)
        share = (ranks - 1) / ranks
        row = bucket.row
        # The second gathers stay within the node if its ranks keep the units.
        kept = limits.node_ranks > 1 and bucket.reshards and not stays
        if kept:
            in_node += limits.micro_batches * bucket.full_nbytes * (limits.node_ranks - 1) / limits.node_ranks
        if not bucket.trainable:
            if bucket.reshards:
                gathers += limits.micro_batches * (1 if stays or kept else 2) * bucket.full_nbytes * share
            continue
        counts = logical_collectives(row, limits.micro_batches, stays_gathered=stays)
        gathers += (limits.micro_batches if kept else counts["all_gather"]) * bucket.full_nbytes * share
        reduced = bucket.layout.numel * bucket.itemsizes.reduce
        sums = counts["reduce_scatter"] + counts["all_reduce"]
        reductions += sums * _summed_nbytes(bucket, limits) + counts["all_reduce"] * reduced * share
        # Then each rank sums its shard over the replicas, also for an all-reduce.
        reductions += 2 * sums * reduced / ranks * (replicas - 1) / replicas
    return Sent(gathers, reductions, in_node, float(exchanged * limits.micro_batches))


def _summed_nbytes(bucket: BucketPlan, limits: Limits) -> int:
    """Return the bytes that a rank sends for one reduce-scatter of the bucket's gradients."""
    numel, ranks, sum_ranks = bucket.layout.numel, bucket.layout.world_size, limits.sum_ranks
    wire = numel * bucket.wire_itemsize(limits.micro_batches)
    if not (sum_ranks and ranks > sum_ranks and bucket.exchanges(limits.micro_batches)):
        return wire - wire // ranks
    sums = numel * bucket.itemsizes.reduce
    return wire - wire // sum_ranks + sums // sum_ranks - sums // ranks


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
    """Estimate the time of a step, as if it waited only for its resources (compute, links, network, disk).

    Args:
        flops: FLOPs of one micro-batch's forward and backward, with recomputation.
        replicas, exchanged: as in :func:`sent_by`.
        on_cpu: the same cores do all work, so that nothing overlaps.
    """
    micro_batches = limits.micro_batches
    work = work_of(buckets, flops * micro_batches, micro_batches=micro_batches)
    work.network = sent_by(buckets, limits, replicas=replicas, exchanged=exchanged).nbytes
    resources = {name: seconds for name, seconds in work.seconds(rates).items() if seconds}
    if on_cpu:
        return StepTime(sum(resources.values()), resources or {"compute": 0.0})
    seconds = least_seconds(work, rates, micro_batches=micro_batches)
    return StepTime(seconds + _alone(buckets, limits) / rates.network, resources or {"compute": 0.0})


def _alone(buckets: Sequence[BucketPlan], limits: Limits) -> float:
    """Return the bytes that a rank sends in a step's first gather and last reduction, which nothing overlaps."""
    others = {b.unit: (b.layout.world_size - 1) / b.layout.world_size for b in buckets}
    gathers = by_unit(buckets, lambda b: b.full_nbytes * b.reshards)
    reductions = by_unit(buckets, lambda b: b.trainable * _summed_nbytes(b, limits))
    first = next((unit for unit, nbytes in enumerate(gathers) if unit and nbytes), 0)
    last = next((unit for unit, nbytes in enumerate(reductions) if unit and nbytes), 0)
    gathered = gathers[first] * others.get(first, 0.0) if gathers else 0.0
    return gathered + (reductions[last] if reductions else 0.0)
