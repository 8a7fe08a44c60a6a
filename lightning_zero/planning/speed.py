"""Compute the least time of a step: its work on each resource, divided by the rates of the machine.

Bytes for each parameter that is stepped on the host, with itemsizes c (compute), m (master, state), g (gradient)::

    link        to the device c, or c at every gather if parameters rest on another tier; from the device g
    host memory the step reads master, two states and gradient, and writes master and states: 6 m + g
    disk        3 m read and written if the optimizer is in files; c read at every gather and written once if
                parameters are

``zero.optimizer.state_dtype`` shrinks the states' part of m. On a GPU all resources work in parallel, so the slowest is
the bound. But a step that waits for the end of the backward (gradient clipping) overlaps only the next forward, because
the next backward needs the gradients' memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.placement import Placement, Tier

STATES = 2  # of Adam
FORWARD = 1 / 3  # share of the compute of a step; a backward takes twice the time of its forward


@dataclass(frozen=True)
class Rates:
    """What a machine does per second for one rank."""

    compute: float  # FLOPs that a model reaches
    device_memory: float  # bytes read and written
    host_memory: float  # bytes read and written by all cores
    to_device: float  # bytes
    to_host: float  # bytes, at the same time
    disk_read: float  # bytes; the disk does not write at the same time
    disk_write: float  # bytes
    network: float = math.inf  # bytes sent, while as many are received


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
        """Return the seconds of each resource. Disk reads and writes are added up."""
        found = {f.name: getattr(self, f.name) / getattr(rates, f.name) for f in fields(self)}
        disk = found.pop("disk_read") + found.pop("disk_write")
        return {**found, "disk": disk}


def work_of(buckets: Iterable[BucketPlan], flops: float, *, micro_batches: int = 1) -> Work:
    """Sum the work of one step. ``flops``: of all forwards and backwards on this rank."""
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
    """Compute the lower bound of a step's time, without the first gather and the last reduction."""
    seconds = work.seconds(rates)
    forward = FORWARD * seconds["compute"] / micro_batches
    # Reading the optimizer state from files need not wait for the backward.
    return max(*seconds.values(), seconds["compute"] - forward + max(forward, seconds["host_memory"]))
