"""The least time that a step can take: what has to be computed and moved, by resource, over the rates of a machine.

Of a parameter in a bucket that is stepped on the host, with itemsizes c (compute), m (master, state) and g (gradient)::

    link        to the device c, or c at every gather where parameters rest elsewhere; from the device g
    host memory a step reads master, two states and the gradient, and writes master and states: 6 m + g
    disk        3 m read and written where the optimizer is in files; c read at every gather and written once where
                parameters are

Of the 6 m and 3 m, 4 m and 2 m are of states, in which these have less under ``zero.optimizer.state_dtype``.
On a GPU all of these overlap, so the largest is the bound. But a step that does not begin before the backward is over
(because of clipping, say) can hide behind the next forward only: the backward after it needs its gradients' place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.placement import Placement, Tier

STATES = 2  # of Adam
FORWARD = 1 / 3  # of the compute of a step; a backward takes twice the time of its forward


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second, as far as one rank has it.

    Attributes:
        compute: floating-point operations that a model reaches.
        device_memory, host_memory: bytes read and written by a kernel on all cores.
        to_device, to_host: bytes over the link, each way at a time.
        disk_read, disk_write: bytes; one at a time.
        network: bytes that a rank sends, and receives at the same time.
    """

    compute: float
    device_memory: float
    host_memory: float
    to_device: float
    to_host: float
    disk_read: float
    disk_write: float
    network: float = math.inf


@dataclass
class Work:
    """What one rank has to do in one step, in the units of :class:`Rates`."""

    compute: float = 0.0
    device_memory: float = 0.0
    host_memory: float = 0.0
    to_device: float = 0.0
    to_host: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0
    network: float = 0.0

    def seconds(self, rates: Rates) -> dict[str, float]:
        """By resource; the disk reads or writes."""
        found = {f.name: getattr(self, f.name) / getattr(rates, f.name) for f in fields(self)}
        disk = found.pop("disk_read") + found.pop("disk_write")
        return {**found, "disk": disk}


def work_of(buckets: Iterable[BucketPlan], flops: float, *, micro_batches: int = 1) -> Work:
    """The work of one step.

    Args:
        flops: of forwards and backwards on this rank.
    """
    work = Work(compute=flops)
    for bucket in buckets:
        if bucket.trainable:
            _add_step(work, bucket, micro_batches)
    return work


def _add_step(work: Work, bucket: BucketPlan, micro_batches: int) -> None:
    n, sizes, tiers = bucket.owned_numel, bucket.itemsizes, bucket.tiers
    gathers = 2 * micro_batches
    state = STATES * bucket.state_nbytes(n)
    step = n * (2 * sizes.master + sizes.grad) + 2 * state
    if not bucket.steps_on_host:
        work.device_memory += step
        return
    work.host_memory += step
    reductions = micro_batches if bucket.row.grad is Placement.sharded else 1
    work.to_host += reductions * n * sizes.grad * bucket.grads_on_host
    elsewhere = tiers.compute_param is not Tier.device and bucket.reshards
    work.to_device += n * sizes.compute * (gathers if elsewhere else 1)
    if tiers.master is Tier.nvme:
        work.disk_read += n * sizes.master + state
        work.disk_write += n * sizes.master + state
    if tiers.compute_param is Tier.nvme:
        work.disk_read += gathers * n * sizes.compute
        work.disk_write += n * sizes.compute


def least_seconds(work: Work, rates: Rates, *, micro_batches: int = 1) -> float:
    """The bound on a step, without the first unit's way in and the last one's way out.

    Args:
        micro_batches: in how many parts the compute is done.
    """
    seconds = work.seconds(rates)
    forward = FORWARD * seconds["compute"] / micro_batches
    # What is read from files for the step need not wait for the backward.
    return max(*seconds.values(), seconds["compute"] - forward + max(forward, seconds["host_memory"]))
