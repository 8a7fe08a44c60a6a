"""Choose and make the tiers (host memory, files) of an engine, after a check that the tiers have enough free bytes.

Ranks of one host share the host's memory and disk. Every rank sums the bytes that the ranks of each host need, and
compares the sum with the free bytes of this host. So all ranks raise the same error."""

from __future__ import annotations

import shutil
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_zero.comm.agreements import gather_objects
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.share import Share, own_path, ranks_on_disk
from lightning_zero.device import accelerator_of
from lightning_zero.engine.units.describe import UnitGroup, bucket_shapes
from lightning_zero.engine.units.master_storage import Tiers
from lightning_zero.planning import memory
from lightning_zero.planning.buckets import BucketPlan, Role, place
from lightning_zero.planning.memory import Moment
from lightning_zero.planning.placement import OFFLOADS, STAGES, Budgets, Tier, default_budgets, split_by_budget
from lightning_zero.planning.topology import Ranks, is_even, over_nodes
from lightning_zero.ranks.posts import machine
from lightning_zero.ranks.waits import Waits
from lightning_zero.settings import ConfigError, HybridShard, Offload, OffloadConfig, ZeroConfig
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.limits import available_host_memory
from lightning_zero.tiers.nvme import NvmeTier
from lightning_zero.tiers.pinned import Landing, ReadAhead, Sender

IO_THREADS = 4  # a disk wants several requests in flight
LANDING_THREADS = 4  # enough to keep up with a link: each adds a few GB/s
_NONE = Tiers()


class Held(NamedTuple):
    """Describes a bucket before a restage: its plan, and the size of its optimizer state now and after a step."""

    plan: BucketPlan
    states: int  # number of state tensors as large as the masters
    later: int  # number of state tensors as large as the masters after the first step
    whole: int = 0  # bytes of the state of parameters that are stepped whole
    whole_later: Callable[[BucketPlan], int] = lambda _: 0  # these bytes under another plan


def make_tiers(
    groups: Sequence[UnitGroup],
    config: ZeroConfig,
    comm: Communicator,
    instances: Collection[int],
    share: Share,
    before: Tiers = _NONE,
    held_by: Sequence[Held] | None = None,
) -> tuple[Tiers, list[BucketPlan]]:
    """Choose the tiers that keep each unit's values between uses, and make the tiers. Return the tiers and a plan for
    each bucket. Collective.

    Args:
        instances: the numbers of file tiers in use.
        share: how many ranks are on this rank's machine, and how many cores this rank may use.
        before: the present tiers, in a restage. Their host memory and files are reused.
        held_by: in a restage, what each bucket holds on the tiers ``before``, in the order of ``groups``.

    Raises ConfigError on all ranks, before any change, if a tier lacks bytes or the folder cannot be used.
    """
    offload, accelerator = config.offload, comm.streams.accelerator
    if path := offload.nvme_path:
        path = comm.together("zero.offload.nvme_path", partial(own_path, path, share, comm.rank))
    held = _sum((bucket.plan, bucket.states, bucket.whole) for bucket in held_by or ())
    stage, size, alone = STAGES[config.stage.name], comm.shard.size, comm.even_alone
    if offload.name is Offload.auto:
        units = [memory.unit_bytes(unit.name, (b.shape(0) for b in unit.buckets), stage, size) for unit in groups]
        rows = split_by_budget(units, _budgets(offload, path, comm, share, held))
    else:
        rows = [OFFLOADS[offload.name]] * len(groups)
    plans = [place(shape, stage, rows[shape.unit], size, even_alone=alone) for shape in bucket_shapes(groups)]
    on_device = 0
    if held_by is None:  # optimizer state is made later, and checked then
        wanted = memory.planned_bytes(plans, state_tensors=0, moment=Moment.cleared)
    else:
        to_come = ((plan, b.later, b.whole_later(plan)) for plan, b in zip(plans, held_by, strict=True))
        wanted = _sum(to_come, Moment.reduced)
        on_device = memory.on_tier(wanted, Tier.device) - memory.on_tier(held, Tier.device)
        accelerator.release_cached()
        if free := accelerator.free_nbytes():
            moving = max((2 * plan.layout.numel * plan.itemsizes.master for plan in plans), default=0)  # old and new
            gpu = f"GPU of rank {comm.rank}"
            place_of_gpu = place_of(gpu, gpu)
            check_free_memory(DEVICE_MEMORY, comm, place_of_gpu, on_device + moving, None, held=0, available=free)
            on_device = 0
    used = {tier for row in rows for tier in row}
    if used != {Tier.device} or held_by is not None:
        staging, rests = wanted[Role.staging, Tier.host], held[Role.staging, Tier.host]
        resting = memory.on_tier(held, Tier.host) - rests
        more = memory.on_tier(wanted, Tier.host) - staging - resting
        # Without memory of its own (CPU), the device's needs count as host memory.
        staging = max(staging - rests, 0) + on_device
        check_host_memory(comm, more, offload.host_budget, held=resting, staging=staging)
    nvme = sender = read_ahead = None
    if Tier.nvme in used:
        nvme = before.nvme
        if nvme is not None:  # agreed: making files sends messages
            other = str(nvme.path) != str(path) or nvme.threads != IO_THREADS
            nvme = None if comm.max_(torch.tensor([other], dtype=torch.uint8)).item() else nvme
        rests = memory.on_tier(held, Tier.nvme) if nvme is not None else 0
        nvme = _files(comm, nvme, str(path), offload, instances, memory.on_tier(wanted, Tier.nvme) - rests, rests)
        if comm.streams.are_there:
            sender = before.sender or Sender(accelerator)
        read_ahead = ReadAhead(accelerator, max(map(memory.read_nbytes, plans)))
    host = landing = None
    if Tier.host in used:
        host = before.host or HostTier(accelerator, budget=offload.host_budget)
        landing = before.landing or Landing(comm.streams, min(share.cpus, LANDING_THREADS))
    return Tiers(host, nvme, landing, sender, read_ahead), plans


def _files(
    comm: Communicator,
    before: NvmeTier | None,
    path: str,
    offload: OffloadConfig,
    instances: Collection[int],
    needed: int,
    held: int,
) -> NvmeTier:
    """Return the file tier ``before``, or a new tier if ``before`` is None. Check that there is room for ``needed``
    bytes in addition to the ``held`` bytes that stay in the tier. Collective. Raises ConfigError for an unusable
    folder, a full disk or a low budget."""
    nvme = before
    if nvme is None:
        make = partial(
            NvmeTier,
            path,
            rank=comm.rank,
            instance=next(n for n in range(len(instances) + 1) if n not in instances),
            budget=offload.nvme_budget,
            ring_count=memory.RING_COUNT,
            ring_nbytes=memory.RING_NBYTES,
            threads=IO_THREADS,
        )
        nvme = comm.together("files for what is offloaded", make, undo=NvmeTier.close)
    try:
        check_files(comm, nvme, needed, offload.nvme_budget, held=held)
    except BaseException:
        if before is None:
            nvme.close()
        raise
    return nvme


def check_state_fits(comm: Communicator, tiers: Tiers, needed: Callable[[Tier], int], offload: OffloadConfig) -> None:
    """Raise ConfigError if a tier does not have `needed(tier)` free bytes for new optimizer state. Collective."""
    if tiers.host is not None:
        check_host_memory(comm, needed(Tier.host), offload.host_budget, held=tiers.host.nbytes)
    if tiers.nvme is not None:
        check_files(comm, tiers.nvme, needed(Tier.nvme), offload.nvme_budget)


class _Kind(NamedTuple):
    what: str
    budget_key: str
    where: str
    fix: str


_MEMORY = _Kind(
    "host memory",
    "zero.offload.host_budget",
    "available (in its cgroup, or on the machine)",
    "Give the job more memory, use more hosts, or choose a zero/offload that keeps less on the host; if the "
    "machine gets more memory as it is used, set zero.offload.host_budget, which replaces the free memory",
)
_FILES = _Kind(
    "files",
    "zero.offload.nvme_budget",
    "free on the disk",
    "Free space there, choose another zero.offload.nvme_path, use more hosts, or a zero/offload that keeps less "
    "in files",
)


DEVICE_MEMORY = _Kind(
    "memory of the device",
    "zero.offload.device_budget",
    "free there",
    "Choose a stage that shards more, a zero/offload that keeps less on the device, or use more ranks",
)


def check_host_memory(comm: Communicator, needed: int, budget: int | None, *, held: int, staging: int = 0) -> None:
    """Raise ConfigError on all ranks if a rank's host memory would exceed its `budget` or, if that is None, the host's
    free memory. Collective. `held`: bytes that this rank has already. `needed`: bytes that it wants in addition.
    `staging`: bytes of transfer buffers, which the budget does not count."""
    available = available_host_memory() - staging if budget is None else None
    check_free_memory(_MEMORY, comm, place_of(), needed, budget, held=held, available=available)


def check_files(
    comm: Communicator, nvme: NvmeTier, needed: int, budget: int | None, *, held: int | None = None
) -> None:
    """Raise ConfigError on all ranks if a rank's files would exceed its `budget` or the free disk space. Collective.
    `held`: bytes that stay in this rank's files (None: all present ones). `needed`: bytes that it wants in addition."""
    place = place_of(f"disk {nvme.disk}", f"in {nvme.path}")
    rests = nvme.nbytes if held is None else held
    free, spare = nvme.free_nbytes, nvme.spare_nbytes
    check_free_memory(_FILES, comm, place, needed, budget, held=rests, available=free, spare=spare)


def place_of(part: str = "", name: str = "") -> tuple[str, str]:
    """Return (key, name) of a resource of this host, for :func:`check_free_memory`. `part`: identifies the resource (a
    disk, a GPU; "" for host memory). Keys are unique over all hosts; names are for error messages."""
    return f"{machine()}, {part}", ", ".join(filter(None, (f"on host {socket.gethostname()}", name)))


def check_free_memory(
    kind: _Kind,
    comm: Communicator,
    place: tuple[str, str],
    needed: int,
    budget: int | None,
    *,
    held: int,
    available: int | None,
    spare: int = 0,
) -> None:
    """Raise ConfigError on all ranks if the bytes that ranks need exceed a budget or the free bytes. Collective. Ranks
    with equal `place` (see :func:`place_of`) share the `available` bytes (None: no limit). `held`: bytes that this rank
    has already. `needed`: bytes that it wants in addition, of which it has reserved `spare` bytes earlier."""
    beyond = budget is not None and held + needed > budget
    own = (place, needed, held, beyond, available, min(spare, max(needed, 0)))
    table = comm.all_gather_objects(own, f"whether {kind.what} will do")
    for rank, (_, want, holds, beyond, *_) in enumerate(table):
        if beyond:
            raise ConfigError(
                f"{kind.budget_key}: rank {rank} needs {want:,} more bytes of {kind.what} between steps, beside "
                f"{holds:,} that it holds; the budget is {budget:,}. Raise {kind.budget_key}, use more ranks, or "
                "choose another zero/offload."
            )
    names = {key: name for (key, name), *_ in reversed(table)}
    for key, name in names.items():
        wants = [want - reused for found, want, *_, reused in table if found[0] == key]
        free = min((left for found, *_, left, _ in table if found[0] == key and left is not None), default=None)
        if free is not None and sum(wants) > free:
            raise ConfigError(
                f"zero.offload: the {len(wants)} rank(s) {name} need {sum(wants):,} more bytes of {kind.what} "
                f"between steps; {free:,} are {kind.where}. {kind.fix} (python -m lightning_zero.plan shows all)."
            )


def _budgets(offload: OffloadConfig, path: str | None, comm: Communicator, share: Share, held: memory.Bytes) -> Budgets:
    """Return a byte budget for each tier, equal on all ranks. Collective. A budget that the user does not set is
    computed from the rank with the fewest free bytes. `held`: bytes in use, which count as free."""
    # Equal, because budgets decide which units rest on which tier: with other tiers a rank would issue other gathers.
    on_disk = ranks_on_disk(comm, path)
    disk = shutil.disk_usage(path).free // on_disk if path else 0
    device, host, files = (memory.on_tier(held, tier) for tier in (Tier.device, Tier.host, Tier.nvme))
    free = comm.streams.accelerator.free_nbytes()
    found = default_budgets(
        free and free + device, available_host_memory() + host * share.local_ranks, disk + files, share.local_ranks
    )
    least = (-comm.max_(-torch.tensor(found, dtype=torch.int64))).tolist()
    return Budgets(*least).with_given(offload.device_budget, offload.host_budget, offload.nvme_budget)


# -- nodes ------------------------------------------------------------------------------------------------------------


def find_ranks(
    groups: Sequence[UnitGroup],
    config: ZeroConfig,
    group: dist.ProcessGroup | None,
    device: torch.device,
    node: str,
    waits: Waits,
) -> Ranks:
    """Return the groups of ranks that share shards, with this rank's index in each. Collective. `group`: all ranks of
    the engine (None: one rank). Raises ConfigError if `zero.hybrid_shard` does not allow these nodes (of unequal size,
    say)."""
    own = (node, machine(), accelerator_of(device).free_nbytes(), available_host_memory())
    table = gather_objects(group, own, waits, "which ranks share a node")
    names = [name for name, *_ in table]
    hybrid_shard = config.hybrid_shard
    if hybrid_shard is HybridShard.auto:
        # With zero/offload=auto replicas would use up the budgets.
        several = (
            not config.splits and len(set(names)) > 1 and is_even(names) and config.offload.name is not Offload.auto
        )
        on_host = Counter(host for _, host, *_ in table)

        def fits(node: str, host: str, gpu: int, free: int) -> bool:
            stage, tiers, ranks = STAGES[config.stage.name], OFFLOADS[config.offload.name], names.count(node)
            plans = [place(shape, stage, tiers, ranks) for shape in bucket_shapes(groups)]
            return memory.fits_half(memory.planned_bytes(plans), gpu, free, on_host[host])

        hybrid_shard = HybridShard.node if several and all(fits(*row) for row in table) else HybridShard.flat
    exchanges = any(bucket.dtypes.exchanged for unit in groups for bucket in unit.buckets)
    return Ranks.locate(waits.rank, over_nodes(names, hybrid_shard, exchanges=exchanges), config)


def _sum(buckets: Iterable[tuple[BucketPlan, int, int]], moment: Moment = Moment.cleared) -> memory.Bytes:
    """Sum this rank's bytes at `moment`, by role and tier. `buckets` yields (plan, number of sharded state tensors,
    bytes of state that is not sharded)."""
    total: memory.Bytes = Counter()
    for plan, states, more in buckets:
        total[Role.optim_state, plan.tiers.master] += more
        found = memory.planned_bytes([plan], state_tensors=states, moment=moment)
        ring = found.pop((Role.staging, Tier.host), 0)
        total.update(found)
        total[Role.staging, Tier.host] = max(total[Role.staging, Tier.host], ring)
    return total
