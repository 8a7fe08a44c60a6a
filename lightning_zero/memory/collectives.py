"""The only file that calls collectives: transports, process groups, logical counts, and waiting with a bound.

The engine asks for *logical* operations on whole buckets: ``all_gather``, ``reduce_scatter``, ``all_reduce`` (which is
the two of them, so that all stages add in the same order). A :class:`Transport` turns each into messages.

Groups. Gathers and reductions each have a process group of their own, because operations on one group must be issued
in the same order on every rank and the two kinds interleave freely. The gather half of an all-reduce is issued when
the first half is found complete, at moments that differ between ranks, so it has a third. Small host-side agreements
run on a gloo group.

CUDA. Each kind runs on a stream of its own::

    compute : --e0------------------w1-- use
    gather  :     \\w0-- all_gather --e1

``e0`` is recorded when the operation is issued (its buffer was allocated on the compute stream, and may be memory
that earlier kernels still read), ``e1`` when it is done; compute waits for ``e1`` before it uses the buffer, so a
later free on the compute stream is ordered behind it and no ``record_stream`` is needed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.config import Transport as TransportName
from lightning_zero.memory.peers import PeerError, Peers, is_broken_connection

# The names before torch 2.13 still exist there, but warn at every call.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DIRECT_MAX_RANKS = 8  # above this many ranks one broadcast per rank costs more than the library's ring
POST_PLACE_EVERY_S = 2.0


class StallError(RuntimeError):
    """This rank waited for others longer than ``zero.stall_timeout_s``; the message names ranks and places."""


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

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def gather(self, full: Tensor, rank: int, world_size: int, group: Any) -> list[Any]:
        host = full.cpu()
        for work in self._inner.gather(host, rank, world_size, group):
            work.wait()
        full.copy_(host)
        return []

    def reduce(self, full: Tensor, rank: int, world_size: int, group: Any) -> tuple[list[Any], Callable[[], Tensor]]:
        works, total = self._inner.reduce(full.cpu(), rank, world_size, group)
        for work in works:
            work.wait()
        out = total().to(full.device)
        return [], lambda: out


TRANSPORTS: dict[TransportName, Callable[[], Transport]] = {
    TransportName.plain: PlainTransport,
    TransportName.direct: DirectTransport,
}


def choose_transport(name: TransportName, backend: str, world_size: int, device: torch.device) -> Transport:
    """The transport of ``zero.comm.transport``; ``auto`` takes ``direct`` on gloo with few ranks, else ``plain``."""
    host_side = "gloo" in backend
    if name is TransportName.auto:
        direct = host_side and world_size <= DIRECT_MAX_RANKS
        name = TransportName.direct if direct else TransportName.plain
    transport = TRANSPORTS[name]()
    return HostTransport(transport) if host_side and device.type != "cpu" else transport


@dataclass(slots=True, eq=False)
class _Groups:
    """The process groups of one communicator at a time.

    Attributes:
        issued: operations of all kinds asked for so far on this rank.
        user: the communicator, as long as it lives.
    """

    gather: Any
    reduce: Any
    second_half: Any  # the gather that ends an all-reduce
    control: Any  # host-side
    issued: int = 0
    user: Callable[[], Communicator | None] = lambda: None

    @classmethod
    def create(cls, ranks: list[int]) -> _Groups:
        return cls(_new_group(ranks), _new_group(ranks), _new_group(ranks), _new_group(ranks, backend=_HOST))


_HOST = "gloo"  # exists in every build; agreements are a few integers


def _new_group(ranks: list[int], **options: Any) -> Any:
    return dist.new_group(ranks, use_local_synchronization=True, **options)


class _GroupPool:
    """Groups are used again: torch never frees them, and each costs threads, sockets and milliseconds.

    Communicators end when they are closed or collected as garbage, at moments that differ between ranks. So the ranks
    agree on what is free, and take nothing where they issued different operations (after an exception).
    """

    def __init__(self) -> None:
        self._parents: list[tuple[Any, Any, list[_Groups]]] = []  # parent, group for agreements, all sets made for it

    def take(self, parent: Any, user: Communicator) -> _Groups:
        ranks = dist.get_process_group_ranks(parent)
        agreement, made = next(((a, m) for p, a, m in self._parents if p is parent), (None, None))
        if made is None:
            agreement, made = _new_group(ranks, backend=_HOST), []
            self._parents.append((parent, agreement, made))
        free = self._free(made, agreement, len(ranks))
        if free is None:
            free = _Groups.create(ranks)
            made.append(free)
        free.user = ref(user)
        return free

    @staticmethod
    def _free(made: list[_Groups], agreement: Any, world_size: int) -> _Groups | None:
        """The first set of groups that all ranks have free after the same operations."""
        if not made:
            return None
        own = torch.tensor([groups.issued if groups.user() is None else -1 for groups in made])
        table = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(table, own, group=agreement)
        columns = torch.stack(table).t().tolist()
        return next((g for g, c in zip(made, columns, strict=True) if c[0] >= 0 and len(set(c)) == 1), None)


GROUP_POOL = _GroupPool()


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
            torch.cuda.current_stream(self._comm.device).wait_event(self._event)
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
    """Collectives of one engine over one shard group.

    Attributes:
        rank, world_size: place in the shard group.
        counts: logical operations asked for, by kind and bucket: ``counts["all_gather", label]``.
        observers: called with (kind, label) when an operation is issued.
        place: what this rank is doing, in words; posted for the others' error messages.
        waited_s: seconds that the host has spent waiting for messages.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        transport: TransportName = TransportName.auto,
        stall_timeout_s: float = 300.0,
    ) -> None:
        self.device = device
        self._parent = group
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.counts: Counter[tuple[str, str]] = Counter()
        self.observers: list[Callable[[str, str], None]] = []
        self.place = "starting"
        self.waited_s = 0.0
        self.stall_timeout_s = stall_timeout_s
        self._groups: _Groups | None = None
        self._watchdog: _Watchdog | None = None
        if self.world_size > 1:
            self._transport = choose_transport(transport, str(dist.get_backend(group)), self.world_size, device)
            self._groups = GROUP_POOL.take(group, self)
            self._watchdog = _Watchdog(self)
        self._streams: dict[str, Any] = {}
        if device.type == "cuda":
            self._streams = {kind: torch.cuda.Stream(device, priority=-1) for kind in ("gather", "reduce")}

    # -- logical operations -------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, label: str) -> Pending:
        """Fill ``full`` [world_size * n] with every rank's slice, in place; this rank's slice is filled already."""
        self._count("all_gather", label)
        return self._gather(full, label, "gather")

    def reduce_scatter(self, full: Tensor, label: str) -> Pending:
        """Sum ``full`` [world_size * n] over ranks; ``wait`` gives this rank's slice [n]. ``full`` is used up."""
        self._count("reduce_scatter", label)
        return self._reduce(full, label)

    def all_reduce(self, full: Tensor, label: str) -> Pending:
        """Sum ``full`` over ranks; ``wait`` gives a :class:`Pending` gather whose ``wait`` gives the sum, in place."""
        self._count("all_reduce", label)
        first = self._reduce(full, label)

        def second() -> Pending:
            with self._on("reduce"):
                full.view(self.world_size, -1)[self.rank].copy_(first.wait())
            return self._gather(full, label, "second_half")

        return Pending(self, label, list(first._works), second)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Blocking: every rank gets ``tensor`` of rank ``src`` (of this group)."""
        if self._groups is not None:
            host = isinstance(self._transport, HostTransport)
            data = (tensor.cpu() if host else tensor).contiguous()
            # As bytes: backends do not know every integer type.
            dist.broadcast(data.view(-1).view(torch.uint8), group_src=src, group=self._groups.gather)
            if data is not tensor:
                tensor.copy_(data)

    def broadcast_small(self, tensor: Tensor, src: int = 0) -> None:
        """Blocking: every rank gets a small host tensor of rank ``src``."""
        if self._groups is not None:
            work = dist.broadcast(tensor, group_src=src, group=self._groups.control, async_op=True)
            self.wait_work(work, "a small reduction")

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Blocking: a small picklable object from each rank, in rank order."""
        if self._groups is None:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._groups.control)
        return found

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

    def close(self) -> None:
        """End the thread and give the groups back."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self._groups is not None:
            self._groups.user = lambda: None
            self._groups = None

    # -- messages -----------------------------------------------------------------------------------------------

    def _gather(self, full: Tensor, label: str, group: str) -> Pending:
        if self._groups is None:
            return Pending(self, label, [], lambda: full)
        with self._on("gather" if group == "gather" else "reduce") as stream:
            works = self._transport.gather(full, self.rank, self.world_size, getattr(self._groups, group))
            return self._pending(label, works, lambda: full, stream)

    def _reduce(self, full: Tensor, label: str) -> Pending:
        if self._groups is None:
            return Pending(self, label, [], lambda: full)
        with self._on("reduce") as stream:
            works, total = self._transport.reduce(full, self.rank, self.world_size, self._groups.reduce)
            pending = self._pending(label, works, total, stream)
            pending._keep = full  # the reduce stream reads it, whose memory belongs to the compute stream
            return pending

    def _pending(self, label: str, works: list[Any], finish: Callable[[], Any], stream: Any) -> Pending:
        if stream is None:
            return Pending(self, label, works, finish)
        for work in works:
            work.wait()  # on a device this makes the stream wait, not the host
        result = finish()
        pending = Pending(self, label, [], lambda: result)
        pending._event = stream.record_event()
        return pending

    @contextlib.contextmanager
    def _on(self, kind: str) -> Iterator[Any]:
        """Run the body on the stream of ``kind``, behind what the current stream has queued so far."""
        stream = self._streams.get(kind)
        if stream is None:
            yield None
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield stream

    def _small(self, tensor: Tensor, op: Any) -> Tensor:
        if self._groups is None:
            return tensor
        host = tensor.device.type == "cpu"
        self._note("control", str(op))
        if not host and isinstance(self._transport, HostTransport):
            return tensor.copy_(self._small(tensor.cpu(), op))
        group = self._groups.control if host else self._groups.reduce
        work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        self.wait_work(work, "a small reduction", on_device=not host)
        return tensor

    # -- waiting, counting ----------------------------------------------------------------------------------------

    def wait_work(self, work: Any, label: str, *, on_device: bool = False) -> None:
        """Wait for a message; on the host no longer than ``stall_timeout_s``.

        Args:
            on_device: the message is of a backend that works on the device's streams.

        Raises:
            StallError: the others did not come; names this rank's place and theirs.
            PeerError: the connection broke; names the rank that is gone.
        """
        if on_device:
            work.wait()  # this makes the stream wait, not the host
            return
        started = time.monotonic()
        try:
            if work.is_completed():
                work.wait()  # raises what it has failed with
                return
            work.wait(timedelta(seconds=self.stall_timeout_s))
            self.waited_s += time.monotonic() - started
        except RuntimeError as error:
            waited = time.monotonic() - started
            if is_broken_connection(error):
                raise PeerError(
                    f"rank {self.rank}: {self._culprit()}; noticed during {label!r} ({self.place}): {error}"
                ) from error
            if waited < 0.9 * self.stall_timeout_s:
                raise RuntimeError(f"rank {self.rank}: {label!r} failed ({self.place}): {error}") from error
            raise StallError(self._stall_message(label, waited)) from error

    def _stall_message(self, label: str, waited: float) -> str:
        places = self._watchdog.places() if self._watchdog is not None else []
        silent: list[int] = []
        with contextlib.suppress(Exception):  # the store is gone with its server
            silent = self._watchdog.peers.silent() if self._watchdog is not None else []
        lines = "\n".join(
            f"  rank {r}: {place}{' (does not answer: it has ended or hangs)' if r in silent else ''}"
            for r, place in enumerate(places)
        )
        return (
            f"rank {self.rank} waited {waited:.0f} s for {label!r} and the other ranks did not come.\n{lines}\n"
            "If ranks take different paths through the model, set zero.dynamic=true; if a rank is only slow, raise "
            f"zero.stall_timeout_s (now {self.stall_timeout_s:g})."
        )

    def _culprit(self) -> str:
        return self._watchdog.peers.culprit() if self._watchdog is not None else "a peer broke off"

    def explain(self, error: BaseException) -> None:
        """An exception ends this rank: tell the others, or, where it comes from another's end, add whose that was."""
        if self._watchdog is None or isinstance(error, PeerError | StallError) or not isinstance(error, Exception):
            return
        if is_broken_connection(error):
            error.add_note(f"rank {self.rank}: {self._culprit()}")
        else:
            self._watchdog.peers.tell(error)

    def forget_failures(self) -> None:
        """On all ranks, at the start of a run: what an earlier one ended with says nothing about this one."""
        if self._watchdog is not None:
            self._watchdog.peers.forget()

    def _count(self, kind: str, label: str) -> None:
        if self._groups is not None:
            self.counts[kind, label] += 1
            self._note(kind, label)

    def missing_here(self, timeout_s: float) -> list[int]:
        """Ranks that do not call this too, after the same number of operations, within ``timeout_s``.

        It goes through the store and so works where ranks are at different places and a collective would hang.
        """
        if self._watchdog is None or self._groups is None:
            return []
        return self._watchdog.missing(f"after {self._groups.issued}", timeout_s)

    def _note(self, kind: str, label: str) -> None:
        if self._groups is not None:
            self._groups.issued += 1
        for observer in self.observers:
            observer(kind, label)


_PLACES_STORE: list[tuple[Any, Any]] = []  # the default store and its clone


def _store_for_places() -> Any:
    """A connection of its own to the default store: a rank that waits inside that one must not block the watchdog.

    It is made once, because connecting looks host names up, which takes seconds where name servers do not answer.
    """
    store = dist.distributed_c10d._get_default_store()
    if not _PLACES_STORE or _PLACES_STORE[0][0] is not store:
        _PLACES_STORE[:] = [(store, store.clone() if hasattr(store, "clone") else store)]
    return _PLACES_STORE[0][1]


class _Watchdog:
    """Posts this rank's place to the store every few seconds, for the error messages of ranks that wait."""

    _serial = 0

    def __init__(self, comm: Communicator) -> None:
        _Watchdog._serial += 1
        ranks: Sequence[int] = dist.get_process_group_ranks(comm._parent)
        self._prefix = f"lightning_zero/{_Watchdog._serial}"
        self._ranks = list(ranks)
        self._comm = ref(comm)
        self._meetings = 0
        self._store = _store_for_places()
        self.peers = Peers(self._store, self._prefix, comm.rank, len(self._ranks), POST_PLACE_EVERY_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_zero-places", daemon=True)
        self._thread.start()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _run(self) -> None:
        posted = None
        while not self._stop.wait(POST_PLACE_EVERY_S if self.peers.knows_holder else 0.1):
            comm = self._comm()
            if comm is None:
                return
            try:
                if (place := comm.place) != posted:
                    self._store.set(self._key(comm.rank), place)
                    posted = place
                self.peers.answer()
                if comm.device.type == "cuda":
                    self._listen(comm)
            except Exception:  # the store is gone with its server: this rank will hear of it elsewhere
                return
            comm = None  # or it would live through the next wait

    def _listen(self, comm: Communicator) -> None:
        """NCCL ends the process after the group's timeout, and names nobody; this thread can only say who it was."""
        silent = self.peers.silent_neighbour(comm.stall_timeout_s)
        if silent is not None:
            print(f"rank {comm.rank}: {silent}; this rank is at: {comm.place}", file=sys.stderr, flush=True)

    def places(self) -> list[str]:
        found = []
        for rank in range(len(self._ranks)):
            place = "unknown: it has posted nothing"
            comm = self._comm()
            if comm is not None and rank == comm.rank:
                place = comm.place
            else:
                with contextlib.suppress(Exception):
                    if self._store.check([self._key(rank)]):
                        place = self._store.get(self._key(rank)).decode()
            found.append(place)
        return found

    def missing(self, place: str, timeout_s: float) -> list[int]:
        """Ranks that do not post ``place`` in time."""
        comm = self._comm()
        assert comm is not None
        self._meetings += 1  # what was posted at an earlier meeting does not count
        key = f"{self._prefix}/meeting {self._meetings} {place}"
        missing = [rank for rank in range(len(self._ranks)) if rank != comm.rank]
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):  # the store is gone with its server
            self._store.set(f"{key}/{comm.rank}", "")
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._store.check([f"{key}/{rank}"])]
                time.sleep(0.02)
        return missing

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
