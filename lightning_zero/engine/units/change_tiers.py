"""Makes the tiers for another configuration of a module that is sharded, if there is room for it.

What is held gives way bucket by bucket to what takes its place, so only what comes in addition must find room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.share import Share
from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.engine.units.capacity import (
    DEVICE_MEMORY,
    IO_THREADS,
    check_files,
    check_host_memory,
    check_room,
    choose_rows,
    make_files,
    path_of,
    place_of,
    placed,
    with_ways,
)
from lightning_zero.engine.units.describe import UnitGroup
from lightning_zero.engine.units.home import Tiers
from lightning_zero.planning import memory
from lightning_zero.planning.buckets import BucketPlan, Role
from lightning_zero.planning.memory import Moment
from lightning_zero.planning.placement import Tier
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.nvme import NvmeTier


class Held(NamedTuple):
    """What a bucket has at rest now, and the state that its optimizers will have made.

    Attributes:
        states: element-wise tensors of state for each parameter, that there are.
        later: that there will be.
        whole: bytes of the state of tensors that are stepped whole, that there are.
        whole_later: ... that there will be under another plan.
    """

    plan: BucketPlan
    states: int
    later: int
    whole: int = 0
    whole_later: Callable[[BucketPlan], int] = lambda _: 0


def change_tiers(
    groups: Sequence[UnitGroup],
    config: ZeroConfig,
    comm: Communicator,
    instances: Collection[int],
    share: Share,
    before: Tiers,
    buckets: Sequence[Held],
) -> tuple[Tiers, list[BucketPlan]]:
    """Make the tiers for another configuration of a module that is sharded, and choose where each bucket rests.

    Host memory and files that are there already are used again; their budgets are the caller's to set.

    Args:
        instances, share: see :func:`make_tiers`.
        before: the tiers of now.
        buckets: in the order of ``groups``.

    Raises:
        ConfigError: there is no room, or the folder for files cannot be used. Nothing has changed.
    """
    offload, accelerator = config.offload, comm.streams.accelerator
    path = path_of(offload, comm, share)
    held = _sum((bucket.plan, bucket.states, bucket.whole) for bucket in buckets)
    rows = choose_rows(groups, config, comm, share, path, held)
    plans = placed(groups, rows, config, comm.shard_size)
    to_come = ((plan, b.later, b.whole_later(plan)) for plan, b in zip(plans, buckets, strict=True))
    wanted = _sum(to_come, Moment.reduced)
    more = {tier: memory.on_tier(wanted, tier) - memory.on_tier(held, tier) for tier in Tier}
    on_device = more[Tier.device]
    accelerator.release_cached()
    if free := accelerator.free_nbytes():
        on_device += max((2 * plan.layout.numel * plan.itemsizes.master for plan in plans), default=0)  # on its way
        gpu = f"GPU of rank {comm.rank}"
        check_room(DEVICE_MEMORY, comm, place_of(gpu, gpu), on_device, None, held=0, available=free)
        on_device = 0
    # else it takes the memory of the host
    staging = Role.staging, Tier.host
    on_way = wanted[staging] - held[staging]
    resting = memory.on_tier(held, Tier.host) - held[staging]
    check_host_memory(
        comm, more[Tier.host] - on_way, offload.host_budget, held=resting, staging=max(on_way, 0) + on_device
    )
    used = {tier for row in rows for tier in row}
    nvme = None
    if Tier.nvme in used:
        other = not _serves(before.nvme, str(path), offload)
        other = bool(comm.max_(torch.tensor([other], dtype=torch.uint8)))  # on all ranks or none: it takes messages
        nvme = _files_for(comm, None if other else before.nvme, str(path), offload, instances, wanted, held)
    host = (before.host or HostTier(accelerator)) if Tier.host in used else None
    return with_ways(host, nvme, plans, comm, share, before), plans


def _serves(nvme: NvmeTier | None, path: str, offload: OffloadConfig) -> bool:
    return nvme is not None and str(nvme.path) == path and nvme.threads == (offload.io_threads or IO_THREADS)


def _files_for(
    comm: Communicator,
    before: NvmeTier | None,
    path: str,
    offload: OffloadConfig,
    instances: Collection[int],
    wanted: memory.Bytes,
    held: memory.Bytes,
) -> NvmeTier:
    needed = memory.on_tier(wanted, Tier.nvme)
    if before is not None:
        rests = memory.on_tier(held, Tier.nvme)
        check_files(comm, before, needed - rests, offload.nvme_budget, held=rests)
        return before
    nvme = comm.together(
        "files for what is offloaded", partial(make_files, path, offload, comm.rank, instances), undo=NvmeTier.close
    )
    try:
        check_files(comm, nvme, needed, offload.nvme_budget)
    except BaseException:
        nvme.close()
        raise
    return nvme


def _sum(buckets: Iterable[tuple[BucketPlan, int, int]], moment: Moment = Moment.cleared) -> memory.Bytes:
    """Bytes of one rank at rest, with so many tensors of state for each parameter, and so many bytes of other state."""
    total: memory.Bytes = Counter()
    for plan, states, more in buckets:
        total[Role.optim_state, plan.tiers.master] += more
        found = memory.planned_bytes([plan], state_tensors=states, moment=moment)
        ring = found.pop((Role.staging, Tier.host), 0)
        total.update(found)
        total[Role.staging, Tier.host] = max(total[Role.staging, Tier.host], ring)
    return total
