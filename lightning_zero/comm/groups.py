"""Process groups of communicators. Groups are used again, because torch never frees them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

from lightning_zero.planning.topology import Topology
from lightning_zero.ranks.waits import Waits

# Of messages that wait on a device, at least: a rank may be at work alone while the others, which wait with patience,
# have queued what it has not. Within reach, because nothing else ends a device that hangs.
DEVICE_TIMEOUT_S = 3600.0

OPERATIONS = (
    "all_gather",
    "node_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "second_half",
    "replicate",
    "exchange",
    "control",
    "control on the device",
)


class GroupKind(NamedTuple):
    """What groups are for.

    Attributes:
        backend: that serves the engine's device.
        in_streams: messages are queued on streams of the device, one behind the other, and the host does not wait.
        even_alone: make groups of one rank too.
        stall_timeout_s: how long ranks wait for each other.
    """

    topology: Topology
    backend: str
    in_streams: bool
    even_alone: bool
    stall_timeout_s: float


@dataclass(slots=True, eq=False)
class Groups:
    """The process groups of one communicator at a time. Those that would have one rank are None, unless wanted.

    Attributes:
        issued: operations asked for so far on this rank, of each of :data:`OPERATIONS`.
        user: the communicator, as long as it lives.
    """

    gather: Any
    reduce: Any
    second_half: Any  # the gather that ends an all-reduce, where the host waits for the first half
    replicate: Any  # the same shards on other nodes
    node_gather: Any  # ranks of this node, of what units keep for the backward
    control: Any  # host-side, all ranks
    issued: Counter[str] = field(default_factory=Counter)
    user: Callable[[], object | None] = lambda: None

    @property
    def all_issued(self) -> list[int]:
        """Of each of :data:`OPERATIONS`. Each kind goes over one group, in one order on all ranks: so where all these
        numbers are equal, each message has its own on every other rank. Of their sum that does not hold."""
        assert self.issued.keys() <= set(OPERATIONS)
        return [self.issued[kind] for kind in OPERATIONS]

    @classmethod
    def create(cls, parent: Any, kind: GroupKind) -> Groups:
        rank, ranks = dist.get_rank(parent), dist.get_process_group_ranks(parent)
        shards = [ranks[r] for r in kind.topology.shard_group_of(rank)]
        replicas = [ranks[r] for r in kind.topology.replicate_group_of(rank)]
        neighbours = [ranks[r] for r in kind.topology.node_group_of(rank)]

        def new(members: Sequence[int], name: str, backend: str = kind.backend) -> Any:
            wanted = len(members) > 1 or kind.even_alone
            return make_group(members, name, backend, kind.stall_timeout_s) if wanted else None

        # All ranks make their groups in this order. Making one is a collective, so another order would hang.
        return cls(
            new(shards, "gather"),
            new(shards, "reduce"),
            None if kind.in_streams else new(shards, "second half"),
            new(replicas, "replicate") if len(replicas) > 1 else None,
            new(neighbours, "node gather") if neighbours else None,
            new(ranks, "control", host_backend(parent)),
        )


def backend_for(group: Any, device: torch.device) -> str:
    """The backend that serves tensors of ``device`` in ``group``, where each kind of device may have its own
    (``cpu:gloo,cuda:nccl``)."""
    served = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    return served.get(device.type, str(dist.get_backend(group)))


def host_backend(parent: Any) -> str:
    """The backend of agreements, which are a few integers: gloo exists in every build.

    A simulated world (torch's fake process group) is of one process, with nobody for gloo to connect to.
    """
    backend = dist.get_backend(parent)
    return backend if backend == "fake" else "gloo"


def make_group(ranks: Sequence[int], name: str, backend: str, stall_timeout_s: float = 0.0) -> Any:
    name = f"lightning_zero: {name}"
    # Synchronized among its members only: otherwise all ranks of the default group would have to call this, also those
    # that are no part of a module's process group, and the members would wait for them.
    with _made_when_used():
        group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name, backend=backend)
    # An operation of gloo fails for good when the group's own timeout passes. A patient wait must be able to go on, so
    # the timeout is set out of reach, and every wait has a bound of its own (``ranks/waits.py``).
    if backend == "gloo":
        dist.distributed_c10d._set_pg_timeout(timedelta(days=30), group)
    elif backend == "nccl":
        seconds = max(DEVICE_TIMEOUT_S, 2 * stall_timeout_s)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    return group


@contextlib.contextmanager
def _made_when_used() -> Iterator[None]:
    """Where the default group is bound to a device, NCCL would make the communicators of a new group at once, by a
    split that all ranks of the default group must take part in: ranks that are not in the new group do not come."""
    default = dist.distributed_c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


class _Parent(NamedTuple):
    group: Any
    agreement: Any  # host-side, the same ranks
    made: list[tuple[GroupKind, Groups]]


class GroupPool:
    """Groups are used again: torch never frees them, and each costs threads, sockets and milliseconds.

    Communicators end when they are closed or collected as garbage, at moments that differ between ranks. So the ranks
    agree on what is free, and take nothing where they issued different operations (after an exception).
    """

    def __init__(self) -> None:
        self._parents: list[_Parent] = []

    def parent(self, group: Any) -> _Parent:
        # By identity, which is safe as the list keeps each group alive: the id of one cannot come back as another's.
        found = next((parent for parent in self._parents if parent.group is group), None)
        if found is None:
            ranks = dist.get_process_group_ranks(group)
            found = _Parent(group, make_group(ranks, "agreement", host_backend(group)), [])
            self._parents.append(found)
        return found

    def take(self, group: Any, user: object, kind: GroupKind, waits: Waits) -> Groups:
        parent = self.parent(group)
        made = [groups for known, groups in parent.made if known == kind]
        free = self._free(made, parent.agreement, dist.get_world_size(group), waits)
        if free is None:
            free = Groups.create(group, kind)
            parent.made.append((kind, free))
        free.user = ref(user)
        return free

    @staticmethod
    def _free(made: list[Groups], agreement: Any, world_size: int, waits: Waits) -> Groups | None:
        """The first set of groups that is free on all ranks, with equal numbers of operations issued."""
        if not made:  # on all ranks or on none: sets are made by all ranks together
            return None
        # -1: still used. A communicator's weak reference dies when the garbage collector comes by, at another moment on
        # each rank. A rank that decided by itself would take groups that another rank does not take.
        used = [-1] * len(OPERATIONS)
        own = torch.tensor([groups.all_issued if groups.user() is None else used for groups in made])
        table = [torch.empty_like(own) for _ in range(world_size)]
        work = dist.all_gather(table, own, group=agreement, async_op=True)
        waits.wait_work(work, "the agreement on process groups")
        alike = [all(torch.equal(rows[n], own[n]) for rows in table) for n in range(len(made))]
        return next((g for g, o, same in zip(made, own, alike, strict=True) if same and int(o[0]) >= 0), None)


GROUP_POOL = GroupPool()
