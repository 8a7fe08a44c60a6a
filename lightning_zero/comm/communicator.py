"""The only file that calls collectives: transports, process groups, logical counts.

The engine asks for *logical* operations on whole buckets: ``all_gather``, ``reduce_scatter``, ``all_reduce`` (which is
the two of them, so that all stages add in the same order). A :class:`Transport` turns each into messages.

Topology. Shards are divided among all ranks, or among those of a node (``planning/topology.py``). Then a reduced shard
is summed over the nodes by a second message, and agreements still go over all ranks, so that all keep one order.

Groups. Gathers and reductions each have a process group of their own, because operations on one group must be issued
in the same order on every rank and the two kinds interleave freely. The gather half of an all-reduce is issued when
the first half is found complete, at moments that differ between ranks, so it has a third. Small host-side agreements
run on a gloo group.

CUDA. Each kind runs on a stream of its own (``streams.py`` draws the order of events). An operation waits for what the
stream that issues it has queued: its buffer was allocated there, and may be memory that earlier kernels still read.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.streams import Streams
from lightning_zero.config import ConfigError
from lightning_zero.config import Transport as TransportName
from lightning_zero.planning.topology import Topology, flat
from lightning_zero.ranks.waits import Waits
from lightning_zero.ranks.watchdog import Watchdog

# The names before torch 2.13 still exist there, but warn at every call.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

T = TypeVar("T")

DIRECT_MAX_RANKS = 8  # above this many ranks one broadcast per rank costs more than the library's ring


class ApartError(RuntimeError):
    """Ranks have come to different places; the message names them, on all ranks."""


class Transport(Protocol):
    """How a logical operation becomes messages. Both methods are asynchronous and work on contiguous tensors."""

    def gather(self, full: Tensor, rank: int, world_size: int, group: Any) -> list[Any]:
        """Fill ``full`` [world_size * n] in place; the slice of ``rank`` is filled already."""
        ...

    def reduce(self, full: Tensor, rank: int, world_size: int, group: Any) -> tuple[list[Any], Callable[[], Tensor]]:
        """Sum ``full`` [world_size * n] over ranks; after the works, the callable gives this rank's sum [n]."""
        ...


class PlainTransport:
    """One library call for each logical operation."""

    def gather(self, full: Tensor, rank: int, world_size: int, group: Any) -> list[Any]:
        own = full.view(world_size, -1)[rank]
        return [_all_gather_single(full, own, group=group, async_op=True)]

    def reduce(self, full: Tensor, rank: int, world_size: int, group: Any) -> tuple[list[Any], Callable[[], Tensor]]:
        out = full.new_empty(full.numel() // world_size)
        work = _reduce_scatter_single(out, full, group=group, async_op=True)
        return [work], lambda: out


class DirectTransport:
    """Broadcasts from each owner in place, and an all-to-all with a local sum in rank order.

    On gloo at two ranks and 64 MiB this takes a sixth and a quarter of the library calls' time, and is issued in
    0.2 ms where ``reduce_scatter_tensor`` blocks.
    """

    def gather(self, full: Tensor, rank: int, world_size: int, group: Any) -> list[Any]:
        slots = full.view(world_size, -1)
        return [dist.broadcast(slots[r], group_src=r, group=group, async_op=True) for r in range(world_size)]

    def reduce(self, full: Tensor, rank: int, world_size: int, group: Any) -> tuple[list[Any], Callable[[], Tensor]]:
        received = torch.empty_like(full)
        work = dist.all_to_all_single(received, full, group=group, async_op=True)

        def total() -> Tensor:
            parts = received.view(world_size, -1)
            for part in parts[1:]:
                parts[0].add_(part)
            return parts[0]

        return [work], total


class HostTransport:
    """Device tensors over a host-side backend, by copies through host memory. Correct, not fast: for tests."""

    def __init__(self, inner: Transport, waits: Waits) -> None:
        self._inner, self._waits = inner, waits

    def gather(self, full: Tensor, rank: int, world_size: int, group: Any) -> list[Any]:
        host = full.cpu()
        for work in self._inner.gather(host, rank, world_size, group):
            self._waits.wait_work(work, "a gather through host memory")
        full.copy_(host)
        return []

    def reduce(self, full: Tensor, rank: int, world_size: int, group: Any) -> tuple[list[Any], Callable[[], Tensor]]:
        works, total = self._inner.reduce(full.cpu(), rank, world_size, group)
        for work in works:
            self._waits.wait_work(work, "a reduction through host memory")
        out = total().to(full.device)
        return [], lambda: out


TRANSPORTS: dict[TransportName, Callable[[], Transport]] = {
    TransportName.plain: PlainTransport,
    TransportName.direct: DirectTransport,
}


def choose_transport(
    name: TransportName, backend: str, world_size: int, device: torch.device, waits: Waits
) -> Transport:
    """The transport of ``zero.comm.transport``; ``auto`` takes ``direct`` on gloo with few ranks, else ``plain``."""
    host_side = "gloo" in backend
    if name is TransportName.auto:
        direct = host_side and world_size <= DIRECT_MAX_RANKS
        name = TransportName.direct if direct else TransportName.plain
    transport = TRANSPORTS[name]()
    return HostTransport(transport, waits) if host_side and device.type != "cpu" else transport


@dataclass(slots=True, eq=False)
class _Groups:
    """The process groups of one communicator at a time. Those that would have one rank are None.

    Attributes:
        issued: operations of all kinds asked for so far on this rank.
        user: the communicator, as long as it lives.
    """

    gather: Any
    reduce: Any
    second_half: Any  # the gather that ends an all-reduce
    replicate: Any  # the same shards on other nodes
    control: Any  # host-side, all ranks
    issued: int = 0
    user: Callable[[], Communicator | None] = lambda: None

    @classmethod
    def create(cls, ranks: Sequence[int], rank: int, topology: Topology, host: str) -> _Groups:
        """``ranks`` of the parent group are the default group's; ``rank`` and ``topology`` count in the parent."""
        shards = [ranks[r] for r in topology.shard_group_of(rank)]
        replicas = [ranks[r] for r in topology.replicate_group_of(rank)]
        return cls(
            _new_group(shards, "gather"),
            _new_group(shards, "reduce"),
            _new_group(shards, "second half"),
            _new_group(replicas, "replicate"),
            _new_group(ranks, "control", backend=host),
        )


def _host_backend(parent: Any) -> str:
    """The backend of agreements, which are a few integers: gloo exists in every build.

    A simulated world (torch's fake process group) is of one process, with nobody for gloo to connect to.
    """
    backend = dist.get_backend(parent)
    return backend if backend == "fake" else "gloo"


def _new_group(ranks: Sequence[int], name: str, **options: Any) -> Any:
    if len(ranks) == 1:
        return None
    name = f"lightning_zero: {name}"
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name, **options)
    if dist.get_backend(group) == "gloo":  # waits have bounds of their own
        dist.distributed_c10d._set_pg_timeout(timedelta(days=30), group)
    return group


class _Parent(NamedTuple):
    group: Any
    agreement: Any  # host-side, the same ranks
    made: list[tuple[Topology, _Groups]]


class _GroupPool:
    """Groups are used again: torch never frees them, and each costs threads, sockets and milliseconds.

    Communicators end when they are closed or collected as garbage, at moments that differ between ranks. So the ranks
    agree on what is free, and take nothing where they issued different operations (after an exception).
    """

    def __init__(self) -> None:
        self._parents: list[_Parent] = []

    def parent(self, group: Any) -> _Parent:
        found = next((parent for parent in self._parents if parent.group is group), None)
        if found is None:
            ranks = dist.get_process_group_ranks(group)
            found = _Parent(group, _new_group(ranks, "agreement", backend=_host_backend(group)), [])
            self._parents.append(found)
        return found

    def take(self, group: Any, user: Communicator, topology: Topology, waits: Waits) -> _Groups:
        ranks = dist.get_process_group_ranks(group)
        parent = self.parent(group)
        made = [groups for divided, groups in parent.made if divided == topology]
        free = self._free(made, parent.agreement, len(ranks), waits)
        if free is None:
            free = _Groups.create(ranks, dist.get_rank(group), topology, _host_backend(group))
            parent.made.append((topology, free))
        free.user = ref(user)
        return free

    @staticmethod
    def _free(made: list[_Groups], agreement: Any, world_size: int, waits: Waits) -> _Groups | None:
        """The first set of groups that all ranks have free after the same operations."""
        if not made:
            return None
        own = torch.tensor([groups.issued if groups.user() is None else -1 for groups in made])
        table = [torch.empty_like(own) for _ in range(world_size)]
        work = dist.all_gather(table, own, group=agreement, async_op=True)
        waits.wait_work(work, "the agreement on process groups")
        columns = torch.stack(table).t().tolist()
        return next((g for g, c in zip(made, columns, strict=True) if c[0] >= 0 and len(set(c)) == 1), None)


GROUP_POOL = _GroupPool()


def open_waits(group: Any, device: torch.device, stall_timeout_s: float) -> Waits:
    """On all ranks: waits for the others of ``group``, which train on devices as ``device``."""
    waits = Waits(group, stall_timeout_s=stall_timeout_s)
    if waits.world_size > 1 and (backend := str(dist.get_backend(group))) != "fake":  # there nobody else is there
        number = 1 + max(gather_objects(group, Watchdog.last_number, waits, "the start of a run, or of an engine"))
        waits.watch(number, hears_ends=device.type == "cpu" or "nccl" not in backend)
    return waits


def gather_objects(group: Any, value: Any, waits: Waits, what: str, *, patient: bool = False) -> list[Any]:
    """Blocking: a small picklable object from each rank of ``group``, before there is a communicator.

    Args:
        what: for, in words; the same on all ranks, or they have come to different places, and all raise.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    return _gather_objects(GROUP_POOL.parent(group).agreement, value, waits, what, patient=patient)


def _gather_objects(group: Any, value: Any, waits: Waits, what: str, *, patient: bool = False) -> list[Any]:
    """As ``dist.all_gather_object``, on a host-side group, with a bound, and with a look at what it is for."""
    if dist.get_backend(group) == "fake":  # a simulated world has nobody else
        return [value] * dist.get_world_size(group)
    own = torch.frombuffer(bytearray(pickle.dumps((what, value))), dtype=torch.uint8)
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    work = _all_gather_single(sizes, torch.tensor([own.numel()]), group=group, async_op=True)
    waits.wait_work(work, what, patient=patient)
    table = torch.empty(len(sizes), int(sizes.max()), dtype=torch.uint8)
    padded = torch.zeros(table.shape[1], dtype=torch.uint8)
    padded[: own.numel()] = own
    work = _all_gather_single(table.view(-1), padded, group=group, async_op=True)
    waits.wait_work(work, what, patient=patient)
    found = [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(table, sizes.tolist(), strict=True)]
    if any(place != what for place, _ in found):
        places = "\n".join(f"  rank {rank}: {place}" for rank, (place, _) in enumerate(found))
        raise ApartError(
            f"ranks have come to different places:\n{places}\nAll ranks must make the same calls in the same order "
            "(fit, gather, save_checkpoint ...): look for one that only some ranks make, or that an exception has kept "
            "some ranks from."
        )
    return [value for _, value in found]


def barrier(group: Any, waits: Waits, label: str) -> None:
    """Blocking: until all ranks of ``group`` have come, as long as any is at work. Devices are not waited for."""
    if waits.world_size > 1:
        gather_objects(group, None, waits, label, patient=True)


def broadcast_object(group: Any, value: T, src: int, waits: Waits) -> T:
    """Blocking: a picklable object of rank ``src``, waited for as long as any rank is at work."""
    if waits.world_size == 1 or dist.get_backend(group) == "fake":
        return value
    what, sends = f"an object of rank {src}", waits.rank == src
    payload = bytearray(pickle.dumps(value)) if sends else bytearray()
    size: int = gather_objects(group, len(payload), waits, what, patient=True)[src]
    data = torch.frombuffer(payload or bytearray(size), dtype=torch.uint8)
    work = dist.broadcast(data, group_src=src, group=GROUP_POOL.parent(group).agreement, async_op=True)
    waits.wait_work(work, what, patient=True)
    return value if sends else cast(T, pickle.loads(data.numpy().tobytes()))


def gather_rows(group: Any, row: Tensor, waits: Waits, what: str) -> Tensor | None:
    """Blocking: ``row``, ``[bytes] uint8`` on the host and as long on all ranks; ``[ranks, bytes]`` on rank 0."""
    if waits.world_size == 1 or dist.get_backend(group) == "fake":
        return row.expand(waits.world_size, -1)
    table = torch.empty(waits.world_size, len(row), dtype=torch.uint8) if waits.rank == 0 else None
    parts = list(table) if table is not None else None
    work = dist.gather(row, parts, group_dst=0, group=GROUP_POOL.parent(group).agreement, async_op=True)
    waits.wait_work(work, what, patient=True)
    return table


def together(
    group: Any,
    waits: Waits,
    what: str,
    act: Callable[[], T],
    undo: Callable[[T], Any] = lambda _: None,
    *,
    patient: bool = False,
) -> T:
    """``act``, which asks nothing of other ranks, on all ranks. Where it fails on one, all raise, and none waits.

    Args:
        what: it is, in words.
        undo: what is done on the other ranks then, with the result of ``act``.
        patient: it may take longer than ``stall_timeout_s``.

    Raises:
        Exception: what ``act`` has raised on this rank; or, of the first rank that it failed on, a ConfigError as it
            was, or a RuntimeError that names the rank.
    """
    try:
        result = act()
    except Exception as error:
        own = (type(error).__name__ if not isinstance(error, ConfigError) else "", str(error))
        gather_objects(group, own, waits, what, patient=patient)
        raise
    for rank, found in enumerate(gather_objects(group, None, waits, what, patient=patient)):
        if found is not None:
            undo(result)
            kind, text = found
            raise (
                RuntimeError(f"rank {rank} failed with {kind}: {text}")
                if kind
                else ConfigError(f"{text} (So says rank {rank}.)")
            )
    return result


class Pending:
    """A logical operation in flight. ``wait`` makes its result usable on the current stream."""

    def __init__(self, comm: Communicator, label: str, works: list[Any], finish: Callable[[], Any] | None = None):
        self._comm, self.label = comm, label
        self._works = works
        self._finish = finish
        self._event: Any = None
        self._result: Any = None
        self._keep: Any = None  # memory that another stream reads until the event

    def done(self) -> bool:
        """Whether ``wait`` would return at once (never true for device work, whose end the host need not know)."""
        return self._event is None and all(work.is_completed() for work in self._works)

    def abandon(self, deadline: float) -> None:
        """After an exception: let the messages end, until ``deadline`` (monotonic); the other ranks may be gone."""
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        self._wait_event()
        self._works, self._finish, self._keep = [], None, None

    def _wait_event(self) -> None:
        if self._event is not None:
            self._comm.streams.wait(self._event)
            self._event = None

    def wait(self) -> Any:
        for work in self._works:
            self._comm.wait_work(work, self.label)
        self._works = []
        self._wait_event()
        self._keep = None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


ABANDON_S = 10.0  # after an exception: how long messages in flight may take to arrive


class Communicator:
    """Collectives of one engine over one group of ranks.

    Attributes:
        rank, world_size: place among all ranks of the group.
        shard_rank, shard_size: place among the ranks that share shards; all of them, or those of this node.
        replica, replicas: which copy of the shards this rank has a part of, and how many there are.
        across_nbytes: bytes that this rank had to receive from other nodes, by kind of operation: of a gather what
            their ranks hold; of a reduction their parts of this rank's shard; of a sum of ``s`` bytes over ``r``
            replicas ``2 s (r - 1) / r``, as a ring does it.
        counts: logical operations asked for, by kind and bucket: ``counts["all_gather", label]``.
        observers: called with (kind, label) when an operation is issued.
        waits: for the other ranks.
        place: what this rank is doing, in words; posted for the others' error messages.
        streams: of the device, for every kind of transfer.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        transport: TransportName = TransportName.auto,
        stall_timeout_s: float = 300.0,
        topology: Topology | None = None,
        waits: Waits | None = None,
    ) -> None:
        """
        Args:
            topology: default: one node, all ranks share shards.
            waits: of this rank, where there is something that waits for the group already.
        """
        self.device = device
        self._parent = group
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.topology = topology if topology is not None else flat(["one node"] * self.world_size)
        self._shards = self.topology.shard_group_of(self.rank)
        self.shard_rank, self.shard_size = self._shards.index(self.rank), self.topology.shard_size
        self.replicas = self.topology.replicas
        self.replica = self.topology.shard_groups.index(self._shards)
        self._from_other_nodes = self.topology.share_from_other_nodes(self.rank, self._shards)
        self.across_nbytes: Counter[str] = Counter()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.observers: list[Callable[[str, str], None]] = []
        self._groups: _Groups | None = None
        self.waits = waits if waits is not None else open_waits(group, device, stall_timeout_s)
        if self.world_size > 1:
            backend = str(dist.get_backend(group))
            self._transport = choose_transport(transport, backend, self.shard_size, device, self.waits)
            self._groups = GROUP_POOL.take(group, self, self.topology, self.waits)
        self.streams = Streams(device)

    @property
    def issued(self) -> int:
        """Operations of all kinds asked for so far on its groups."""
        return self._groups.issued if self._groups is not None else 0

    @property
    def place(self) -> str:
        return self.waits.place

    @place.setter
    def place(self, place: str) -> None:
        self.waits.place = place

    # -- logical operations -------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, label: str) -> Pending:
        """Fill ``full`` [shard_size * n] with every rank's slice, in place; this rank's slice is filled already."""
        self._count("all_gather", label)
        return self._gather(full, label, "gather")

    def reduce_scatter(self, full: Tensor, label: str) -> Pending:
        """Sum ``full`` [shard_size * n] over all ranks; ``full`` is used up.

        ``wait`` gives this rank's slice [n], or a :class:`Pending` that does, where there are replicas.
        """
        self._count("reduce_scatter", label)
        return self._reduce(full, label)

    def all_reduce(self, full: Tensor, label: str) -> Pending:
        """Sum ``full`` over all ranks, in place.

        ``wait`` gives a :class:`Pending`, whose ``wait`` gives the sum or, where there are replicas, one more. The
        later halves are issued by these waits, which come in one order on all ranks.
        """
        self._count("all_reduce", label)
        first = self._reduce(full, label)

        def gather(shard: Tensor) -> Pending:
            with self.streams.on("reduce"):
                full.view(self.shard_size, -1)[self.shard_rank].copy_(shard)
            return self._gather(full, label, "second_half")

        def second() -> Pending:
            shard = first.wait()
            if isinstance(shard, Pending):
                return Pending(self, label, list(shard._works), lambda: gather(shard.wait()))
            return gather(shard)

        return Pending(self, label, list(first._works), second)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Blocking: every rank gets ``tensor`` of rank ``src``: first one rank of each replica, then the others."""
        if self._groups is None:
            return
        host = isinstance(self._transport, HostTransport)
        data = (tensor.cpu() if host else tensor).contiguous()
        flat_bytes = data.view(-1).view(torch.uint8)  # backends do not know every integer type
        group = self.topology.shard_group_of(src)
        place = group.index(src)
        if self._groups.replicate is not None and self.shard_rank == place:
            replica = self.topology.shard_groups.index(group)
            self._wait_broadcast(flat_bytes, replica, self._groups.replicate)
        if self._groups.gather is not None:
            self._wait_broadcast(flat_bytes, place, self._groups.gather)
        if data is not tensor:
            tensor.copy_(data)

    def _wait_broadcast(self, tensor: Tensor, src: int, group: Any) -> None:
        work = dist.broadcast(tensor, group_src=src, group=group, async_op=True)
        self.wait_work(work, "values of rank 0", on_device=tensor.device.type != "cpu")

    def broadcast_small(self, tensor: Tensor, src: int = 0) -> None:
        """Blocking: every rank gets a small host tensor of rank ``src``."""
        if self._groups is not None:
            work = dist.broadcast(tensor, group_src=src, group=self._groups.control, async_op=True)
            self.wait_work(work, "a small reduction")

    def all_gather_objects(self, value: Any, what: str) -> list[Any]:
        """Blocking: a small picklable object from each rank, in rank order.

        Args:
            what: for, in words; the same on all ranks.
        """
        if self._groups is None:
            return [value]
        return _gather_objects(self._groups.control, value, self.waits, what)

    def together(self, what: str, act: Callable[[], T], undo: Callable[[T], Any] = lambda _: None) -> T:
        """See :func:`together`."""
        return together(self._parent, self.waits, what, act, undo)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Blocking: sum a small tensor on its device over ranks, in place."""
        return self._small(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Blocking: the maximum of a small tensor over ranks, in place; host tensors go by the host-side group."""
        return self._small(tensor, dist.ReduceOp.MAX)

    def exchange(self, value: int) -> list[int]:
        """Blocking: one integer from each rank, in rank order."""
        if self._groups is None:
            return [value]
        self._note("exchange", str(value))
        own = torch.tensor([value], dtype=torch.int64)
        table = torch.empty(self.world_size, dtype=torch.int64)
        work = _all_gather_single(table, own, group=self._groups.control, async_op=True)
        self.wait_work(work, "the agreement on the next gather")
        values: list[int] = table.tolist()
        return values

    def barrier(self) -> None:
        if self._groups is not None:
            self.exchange(0)

    def resume(self) -> None:
        """Blocking, on all ranks, after an exception has ended a pass: go on with groups that all have used alike.

        The later halves of reductions are issued when the first are found complete, so that ranks which raised in the
        same place may have issued different ones. Messages on such groups would meet others than their own.
        """
        if self._groups is not None and len({*self.all_gather_objects(self.issued, "going on after an exception")}) > 1:
            self._groups.user = lambda: None
            self._groups = GROUP_POOL.take(self._parent, self, self.topology, self.waits)

    def close(self) -> None:
        """End the threads and give the groups back."""
        self.waits.close()
        if self._groups is not None:
            self._groups.user = lambda: None
            self._groups = None

    # -- messages -----------------------------------------------------------------------------------------------

    def _gather(self, full: Tensor, label: str, group: str) -> Pending:
        if self._groups is None or self.shard_size == 1:
            pending = Pending(self, label, [], lambda: full)
            pending._event = self.streams.mark()  # the current stream may be one that still brings the bytes
            return pending
        self.across_nbytes["gather"] += int(full.nbytes * self._from_other_nodes)
        self._groups.issued += group == "second_half"
        with self.streams.on("gather" if group == "gather" else "reduce") as stream:
            works = self._transport.gather(full, self.shard_rank, self.shard_size, getattr(self._groups, group))
            return self._pending(label, works, lambda: full, stream)

    def _reduce(self, full: Tensor, label: str) -> Pending:
        """The sum over all ranks of this rank's slice."""
        if self._groups is None:
            return Pending(self, label, [], lambda: full)
        with self.streams.on("reduce") as stream:
            works: list[Any] = []
            total: Callable[[], Tensor] = lambda: full  # noqa: E731
            if self.shard_size > 1:
                self.across_nbytes["reduce"] += int(full.nbytes * self._from_other_nodes)
                works, total = self._transport.reduce(full, self.shard_rank, self.shard_size, self._groups.reduce)
            finish = total if self._groups.replicate is None else lambda: self._sum_replicas(total(), label, stream)
            pending = self._pending(label, works, finish, stream)
            pending._keep = full  # the reduce stream reads it, whose memory belongs to the compute stream
            return pending

    def _sum_replicas(self, shard: Tensor, label: str, stream: Any) -> Any:
        """Sum ``shard`` over the nodes: a Pending on a host-side backend, else the shard, on the current stream."""
        assert self._groups is not None
        self._groups.issued += 1
        self.across_nbytes["sum"] += 2 * shard.nbytes * (self.replicas - 1) // self.replicas
        host = isinstance(self._transport, HostTransport)
        data = shard.cpu() if host else shard
        work = dist.all_reduce(data, group=self._groups.replicate, async_op=True)
        if stream is not None:
            self.wait_work(work, label, on_device=not host)
            return shard.copy_(data) if host else shard
        return Pending(self, label, [work], lambda: data)

    def _pending(self, label: str, works: list[Any], finish: Callable[[], Any], stream: Any) -> Pending:
        if stream is None:
            return Pending(self, label, works, finish)
        for work in works:
            work.wait()  # on a device this makes the stream wait, not the host
        result = finish()
        pending = Pending(self, label, [], lambda: result)
        pending._event = stream.record_event()
        return pending

    def _small(self, tensor: Tensor, op: Any) -> Tensor:
        if self._groups is None:
            return tensor
        host = tensor.device.type == "cpu"
        self._note("control", str(op))
        if not host and isinstance(self._transport, HostTransport):
            return tensor.copy_(self._small(tensor.cpu(), op))
        groups = (self._groups.control,) if host else (self._groups.reduce, self._groups.replicate)
        for group in groups:
            if group is not None:
                work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
                self.wait_work(work, "a small reduction", on_device=not host)
        return tensor

    # -- waiting, counting ----------------------------------------------------------------------------------------

    def wait_work(self, work: Any, label: str, *, on_device: bool = False) -> None:
        """See :meth:`Waits.wait_work`."""
        self.waits.wait_work(work, label, on_device=on_device)

    def _count(self, kind: str, label: str) -> None:
        if self._groups is not None:
            self.counts[kind, label] += 1
            self._note(kind, label)

    def _note(self, kind: str, label: str) -> None:
        if self._groups is not None:
            self._groups.issued += 1
            self.waits.issued += 1
        for observer in self.observers:
            observer(kind, label)
