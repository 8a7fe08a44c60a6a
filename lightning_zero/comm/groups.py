"""Makes the process groups of communicators, and reuses them, because torch never frees a group.

[Note: what resume may trust]
After an exception `Communicator.resume` keeps groups on which all ranks have issued equal numbers of each operation:
each operation uses one group, in one order, so every message has its counterparts on the other ranks. Ranks that raised
in the same place may still differ: each rank issues the later half of a reduction, counted separately, when that rank
finds the first half complete. Of a failed agreement only the first message may have been sent, so the rank on which
the agreement failed makes its counts differ from all others. No rank waits for abandoned messages. On replaced groups
such messages may never end. On kept groups they end late, and access only memory that nothing else uses.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

from lightning_zero.planning.topology import Ranks, Topology, rounds_of
from lightning_zero.ranks.waits import Waits

# Timeout of messages on a device: long, because other ranks may queue messages while one works alone; finite, because
# nothing else ends a device that hangs.
DEVICE_TIMEOUT_S = 3600.0

# A gloo group of more ranks connects them when they first send to each other. In smaller ones a rank notices at once
# that any other rank is gone.
EAGER_RANKS = 64

OPERATIONS = (
    "all_gather",
    "node_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "across",
    "second_half",
    "replicate",
    "exchange",
    "control",
    "control on the device",
)


def even_alone() -> bool:
    """Return whether groups of one rank are made and send messages too: True if the environment variable
    LIGHTNING_ZERO_EVEN_ALONE is 1, for benchmarks and tests."""
    return os.environ.get("LIGHTNING_ZERO_EVEN_ALONE") == "1"


class GroupKind(NamedTuple):
    """Describes one communicator's process groups. Another communicator reuses them only if all values are equal."""

    topology: Topology
    backend: str
    in_streams: bool  # messages are queued on streams and the host does not wait
    even_alone: bool  # make groups of one rank too
    stall_timeout_s: float


@dataclass(slots=True, eq=False)
class Groups:
    """Holds the process groups of one communicator. Groups of one rank are None, unless :func:`even_alone`."""

    gather: Any
    reduce: Any
    second_half: Any  # the gather that ends an all-reduce, where the host waits for the first half
    replicate: Any  # ranks with the same shards on other nodes
    node_gather: Any  # ranks of this node, which share the slices that units keep until the backward
    node_sum: Any  # ranks of this node, which sum exchanged gradients first
    across: Any  # one rank of each node, which add up these sums
    control: Any  # host-side, all ranks
    rounds: list[Any]  # host-side, for a maximum or sum over all ranks: see ``rounds_of``
    issued: Counter[str] = field(default_factory=Counter)  # operations of this rank, each of :data:`OPERATIONS`
    user: Callable[[], object | None] = lambda: None  # gives the communicator, or None when it is gone

    @property
    def all_issued(self) -> list[int]:
        """Return this rank's number of operations of each kind, in the order of :data:`OPERATIONS`."""
        assert self.issued.keys() <= set(OPERATIONS)
        return [self.issued[kind] for kind in OPERATIONS]

    @classmethod
    def create(cls, parent: Any, ranks: Ranks, kind: GroupKind) -> Groups:
        of_job = dist.get_process_group_ranks(parent)

        def new(members: Sequence[int], name: str, backend: str = kind.backend) -> Any:
            wanted = len(members) > (0 if kind.even_alone else 1)
            return make_group([of_job[r] for r in members], name, backend, kind.stall_timeout_s) if wanted else None

        # All ranks make their groups in this order. Making one is a collective, so another order would hang.
        control = new(range(ranks.world_size), "control", host_backend(parent))
        rounds = rounds_of(ranks.rank, ranks.world_size)
        return cls(
            new(ranks.shard.ranks, "gather"),
            new(ranks.shard.ranks, "reduce"),
            None if kind.in_streams else new(ranks.shard.ranks, "second half"),
            new(ranks.replicate.ranks, "replicate") if ranks.replicate.size > 1 else None,
            new(ranks.node.ranks, "node gather"),
            new(ranks.sum.ranks, "node reduce"),
            new(ranks.across.ranks, "across reduce"),
            control,
            [new(some, "round", host_backend(parent)) for some in rounds] if len(rounds) > 1 else [control],
        )


def backend_for(group: Any, device: torch.device) -> str:
    """Return the backend of ``group`` for tensors of ``device``; a group can have several (``cpu:gloo,cuda:nccl``)."""
    served = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    return served.get(device.type, str(dist.get_backend(group)))


def host_backend(parent: Any) -> str:
    """Return the backend for small host-side messages: ``fake`` if ``parent`` is a simulated group, else ``gloo``."""
    backend = dist.get_backend(parent)
    return backend if backend == "fake" else "gloo"


def make_group(ranks: Sequence[int], name: str, backend: str, stall_timeout_s: float = 0.0) -> Any:
    name = f"lightning_zero: {name}"
    # Synchronize among members only; otherwise all ranks of the default group would have to call this.
    with _connected_when_used(len(ranks)):
        group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name, backend=backend)
    # gloo's operations fail for good at their group's timeout, but patient waits must go on. So the timeout is out of
    # reach, and every wait has its own bound (``ranks/waits.py``).
    if backend == "gloo":
        dist.distributed_c10d._set_pg_timeout(timedelta(days=30), group)
    elif backend == "nccl":
        seconds = max(DEVICE_TIMEOUT_S, 2 * stall_timeout_s)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    return group


@contextlib.contextmanager
def _connected_when_used(ranks: int) -> Iterator[None]:
    """Context manager in which a new group of ``ranks`` ranks connects two ranks only at their first message. Otherwise
    NCCL connects the group at once if the default group is bound to a device, by a split that needs all ranks of the
    default group, and gloo opens a socket to each rank of a large group, although its rings use two sockets."""
    default = dist.distributed_c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    sets_gloo = ranks > EAGER_RANKS and "TORCH_GLOO_LAZY_INIT" not in os.environ
    try:
        if sets_gloo:
            os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        yield
    finally:
        default.bound_device_id = bound
        if sets_gloo:
            del os.environ["TORCH_GLOO_LAZY_INIT"]


class _Parent(NamedTuple):
    group: Any
    agreement: Any  # host-side, the same ranks
    uses: Any  # host-side, the same ranks: see [Note: uses by some ranks alone]
    made: list[tuple[GroupKind, Groups]]


class GroupPool:
    """Keeps process groups for reuse, because torch never frees groups. Ranks drop their communicators at different
    moments, so all ranks agree on which groups are free. Groups with unequal operation counts are not reused."""

    def __init__(self) -> None:
        self._parents: list[_Parent] = []

    def parent(self, group: Any) -> _Parent:
        found = next((parent for parent in self._parents if parent.group is group), None)
        if found is None:
            ranks = dist.get_process_group_ranks(group)
            agreement, uses = (make_group(ranks, name, host_backend(group)) for name in ("agreement", "uses"))
            found = _Parent(group, agreement, uses, [])
            self._parents.append(found)
        return found

    def take_groups(self, group: Any, user: object, ranks: Ranks, kind: GroupKind, waits: Waits) -> Groups:
        parent = self.parent(group)
        made = [groups for known, groups in parent.made if known == kind]
        free = self._free(made, parent.agreement, ranks.world_size, waits)
        if free is None:
            free = Groups.create(group, ranks, kind)
            parent.made.append((kind, free))
        free.user = ref(user)
        return free

    @staticmethod
    def _free(made: list[Groups], agreement: Any, world_size: int, waits: Waits) -> Groups | None:
        """Return the first of ``made`` that no communicator uses on any rank and whose operation counts are equal on
        all ranks; None if there is none. Collective."""
        if not made:  # empty on all ranks or on none, because sets are made collectively
            return None
        # -1: in use. Communicators are garbage-collected at different moments, so no rank may decide alone.
        used = [-1] * len(OPERATIONS)
        own = torch.tensor([groups.all_issued if groups.user() is None else used for groups in made])
        table = [torch.empty_like(own) for _ in range(world_size)]
        work = dist.all_gather(table, own, group=agreement, async_op=True)
        waits.wait_work(work, "the agreement on process groups")
        alike = [all(torch.equal(rows[n], own[n]) for rows in table) for n in range(len(made))]
        return next((g for g, o, same in zip(made, own, alike, strict=True) if same and int(o[0]) >= 0), None)


GROUP_POOL = GroupPool()
