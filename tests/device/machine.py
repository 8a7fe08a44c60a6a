"""Memory of a device that is on paper only, and pinned memory of its host: who accesses it when, and after whom.

What is kept is what CUDA and torch promise, and nothing more:

- A stream does one kernel after the other. It comes after what the host had done when it was queued, and after the
  events that the stream waits for.
- The host is behind a kernel when it has waited: for an event behind it, for the stream, or in a call that blocks.
- A block of device memory belongs to the pool of the stream on which it was allocated. When it is freed, any later
  allocation from that pool may get it, on the host's word alone: what was done to it may still be under way, unless the
  thread that frees it has waited for that.
- A copy between device and host is queued like a kernel where the host's side is pinned and the caller does not block.
- Pinned memory of torch's allocator is not given out again before such copies are over; memory that was pinned in
  place has nobody who looks after it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

import lightning_zero
from tests.device.order import COMPUTE, Order

PACKAGE = str(Path(str(lightning_zero.__file__)).parent) + "/"


class Place(NamedTuple):
    """A line of the package; that of the call where something outside of it has called."""

    function: str  # "file.py: Class.function", below the package
    line: int = 0

    def __str__(self) -> str:
        return f"{self.function}, line {self.line}" if self.line else self.function


ELSEWHERE = Place("the model")
_functions: dict[CodeType, str | None] = {}


def _function(code: CodeType) -> str | None:
    inside = code.co_filename.startswith(PACKAGE)
    name = code.co_qualname.replace(".<locals>", "")
    return f"{code.co_filename.removeprefix(PACKAGE)}: {name}" if inside else None


def place() -> Place:
    """The innermost line of the package on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code not in _functions:
            _functions[code] = _function(code)
        if (function := _functions[code]) is not None:
            return Place(function, frame.f_lineno)
        frame = frame.f_back
    return ELSEWHERE


class Access(NamedTuple):
    party: int
    number: int
    writes: bool
    low: int
    high: int
    what: str
    place: Place


@dataclass(slots=True, eq=False)
class Block:
    """Memory of one storage, from its allocation until it is freed.

    Attributes:
        pool: the stream from whose pool it came; None for memory of the host.
        minded: torch's allocator does not give it out while a copy is under way (host memory).
        before: the last accesses of each party to memory of the pool that had been freed by then.
        known: parties that are behind those.
    """

    nbytes: int
    pool: int | None
    minded: bool = True
    before: dict[int, Access] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)
    storage: Any = None


class Race(NamedTuple):
    what: str
    now: str
    before: str

    def __str__(self) -> str:
        return f"{self.what}: {self.now}, while there may still be: {self.before}"


class Wait(NamedTuple):
    """The host waits for the device, in its main thread or in another."""

    function: str
    why: str
    main: bool = True


class Copy(NamedTuple):
    function: str
    to_host: bool
    waits: bool


@dataclass
class Tally:
    """What has been counted since it was last asked for, by the function that asked for it.

    Attributes:
        copies, copied: how many, and their bytes.
        collectives: on the device, by group and operation.
        messages: the same, by group, kind, and what NCCL may choose its algorithm by.
        recorded, waited: events.
        peak: bytes of device memory, the most at a time.
    """

    waits: Counter[Wait] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    copies: Counter[Copy] = field(default_factory=Counter)
    copied: Counter[Copy] = field(default_factory=Counter)
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    recorded: Counter[str] = field(default_factory=Counter)
    waited: Counter[str] = field(default_factory=Counter)
    allocations: Counter[str] = field(default_factory=Counter)
    peak: int = 0


class ThisThread(threading.local):
    """Its party, the stream on which it queues, and whether it is bound to the device."""

    party: int | None = None
    stream: int = COMPUTE
    bound: bool = False


class Machine:
    """A device, its host and their memory.

    Attributes:
        races: that were found, with how often.
        unbound: functions that used the device in a thread that had not been bound to it.
        tally: what has been counted.
        held: bytes of device memory.
        here: what is said of this thread.
        costs: of what is noted in the order's trace, as :class:`tests.device.timed.Scaled` gives them.
    """

    costs: Any

    def __init__(self) -> None:
        self.order = Order()
        self.races: Counter[Race] = Counter()
        self.unbound: Counter[str] = Counter()
        self.tally = Tally()
        self.held = 0
        self._main = threading.get_ident()
        self._lock = threading.RLock()
        self.here = ThisThread()
        self._blocks: dict[int, Block] = {}
        self._freed: dict[int, dict[int, Access]] = {}  # by pool and party: the last access to what was freed
        self._disk = self.order.new_party("disk")

    # -- parties ------------------------------------------------------------------------------------------------------

    def thread(self) -> int:
        """The party of this thread."""
        if self.here.party is None:
            own = threading.get_ident() == self._main  # not current_thread(): a thread that starts has no name yet
            with self._lock:
                self.here.party = self.order.new_party("the main thread" if own else "another thread")
        return self.here.party

    def used_here(self) -> None:
        """This thread uses the device: it must have been bound to it."""
        if not self.here.bound and threading.get_ident() != self._main:
            self.unbound[place().function] += 1

    def new_stream(self, name: str) -> int:
        with self._lock:
            return self.order.new_party(name)

    def event_of(self, party: int) -> int:
        """A new one, behind what the party has done and seen."""
        with self._lock:
            if party == self.here.stream:
                self.order.follow(party, self.thread())
            event = self.order.new_event()
            self.order.record(event, party)
            return event

    def wait(self, party: int, event: int, *, timed: bool = True) -> None:
        with self._lock:
            self.order.wait(party, event, timed=timed)

    def host_waits(self, why: str, *, events: Sequence[int] = (), parties: Sequence[int] = ()) -> None:
        """This thread waits for ``events``, and for all that ``parties`` were given. Where it has waited for them
        before, or has heard of a thread that has, this is none."""
        with self._lock:
            thread = self.thread()
            if events and all(self.order.has_seen(thread, event) for event in events):
                return
            for event in events:
                self.order.wait(thread, event)
            for party in parties:
                self.order.follow(thread, party)
            self.tally.waits[Wait(place().function, why, threading.get_ident() == self._main)] += 1

    # -- memory -------------------------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor, *, minded: bool) -> None:
        """Copies to and from the memory of ``tensor`` are queued from here on."""
        with self._lock:
            storage = tensor.untyped_storage()
            self._keep_track(storage, Block(storage.nbytes(), None, minded))

    def unpin(self, tensor: Tensor) -> None:
        with self._lock:
            block = self._blocks.pop(tensor.untyped_storage()._cdata)
            self._host_memory_goes(block)

    def block_of(self, tensor: Tensor) -> Block | None:
        """The memory of a tensor, which is new where it has not been seen; None for pageable memory and none at all."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None and tensor.is_meta and storage.nbytes():
            block = self.allocate(storage, self.here.stream)
        return block

    def allocate(self, storage: Any, pool: int) -> Block:
        """Device memory for ``storage`` from the pool of a stream."""
        block = Block(storage.nbytes(), pool, before=dict(self._freed.get(pool, {})))
        self._keep_track(storage, block)
        self.held += block.nbytes
        self.tally.allocations[place().function] += 1
        self.tally.peak = max(self.tally.peak, self.held)
        return block

    def resized(self, storage: Any, nbytes: int) -> None:
        """Before device memory of a storage goes, after it has come."""
        with self._lock:
            if nbytes == 0:
                self._free(storage._cdata, self._blocks.get(storage._cdata))
            elif storage._cdata not in self._blocks:
                self.allocate(storage, self.here.stream)

    def _keep_track(self, storage: Any, block: Block) -> None:
        key = storage._cdata
        block.storage = weakref.ref(storage, lambda _: self._free(key, block))
        self._blocks[key] = block

    def _free(self, key: int, block: Block | None) -> None:
        with self._lock:
            if block is None or self._blocks.get(key) is not block:
                return
            del self._blocks[key]
            if block.pool is None:
                self._host_memory_goes(block)
                return
            self.held -= block.nbytes
            self._back_to_pool(block)

    def _back_to_pool(self, block: Block) -> None:
        assert block.pool is not None
        freed = self._freed.setdefault(block.pool, {})
        thread = self.thread()
        for access in (*block.before.values(), *block.accesses):
            if self.order.is_behind(thread, access.party, access.number):
                continue  # over before it was freed, whoever gets the memory next
            last = freed.get(access.party)
            if last is None or last.number < access.number:
                freed[access.party] = access

    def _host_memory_goes(self, block: Block) -> None:
        if block.minded:
            return
        thread = self.thread()
        now = Access(thread, 0, True, 0, block.nbytes, "it is given back", place())
        for old in block.accesses:
            self._judge("host memory goes", now, old)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def kernel(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *, party: int | None = None) -> int:
        """A kernel on the current stream (or of ``party``, which has followed it). Host tensors are read at once."""
        with self._lock:
            self.used_here()
            stream, thread = self.here.stream, self.thread()
            trace = self.order.trace
            if trace is not None:
                trace.act(thread, self.costs.queueing())
            self.order.follow(stream, thread)
            if party is not None and party != stream:
                self.order.follow(party, stream)
            actor = stream if party is None else party
            where = place()
            self.tally.kernels[where.function] += 1
            number = self.order.act(actor)
            if trace is not None:
                trace.act(actor, *self.costs.kernel(what, reads, writes, where))
            self._touch(actor, number, reads, writes, what, where)
            return actor

    def on_host(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """The host reads and writes its own memory, in this thread."""
        with self._lock:
            if self.order.trace is not None:
                self.order.trace.act(self.thread(), *self.costs.on_host(what, reads, writes))
            if any(t.untyped_storage()._cdata in self._blocks for t in (*reads, *writes)):
                thread = self.thread()
                self._touch(thread, self.order.act(thread), reads, writes, what, place())

    def on_disk(self, what: str, tensor: Tensor, *, writes: bool) -> int:
        """The disk reads or writes host memory, from now until the event that this gives."""
        with self._lock:
            self.order.follow(self._disk, self.thread())
            number = self.order.act(self._disk)
            if self.order.trace is not None:
                self.order.trace.act(self._disk, *self.costs.on_disk(tensor, writes=writes))
            self._touch(self._disk, number, [tensor] * (not writes), [tensor] * writes, what, place())
            return self.event_of(self._disk)

    def scratch(self, nbytes: int) -> None:
        """Memory that a copy takes on the current stream, uses there and gives back."""
        with self._lock:
            stream = self.here.stream
            block = Block(nbytes, stream, before=dict(self._freed.get(stream, {})))
            self._access(block, Access(stream, self.order.act(stream), True, 0, nbytes, "a cast", place()))
            self._back_to_pool(block)

    def _touch(
        self, party: int, number: int, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str, where: Place
    ) -> None:
        for place_of, tensor in enumerate((*reads, *writes)):
            block = self.block_of(tensor) if tensor.numel() else None
            if block is not None:
                self._access(block, Access(party, number, place_of >= len(reads), *span(tensor), what, where))

    def _access(self, block: Block, now: Access) -> None:
        if now.party not in block.known:
            block.known.add(now.party)
            for old in block.before.values():
                self._judge("memory that was freed is used again", now, old)
        kept = []
        for old in block.accesses:
            if (now.writes or old.writes) and old.low < now.high and now.low < old.high:
                self._judge("no order", now, old)
            covered = now.low <= old.low and old.high <= now.high
            if not (covered and (now.writes or (not old.writes and old.party == now.party))):
                kept.append(old)
        kept.append(now)
        block.accesses = kept

    def _judge(self, what: str, now: Access, old: Access) -> None:
        if not self.order.is_behind(now.party, old.party, old.number):
            self.races[Race(what, self._describe(now), self._describe(old))] += 1

    def _describe(self, access: Access) -> str:
        does = "writes" if access.writes else "reads"
        return f"{access.what} on {self.order.names[access.party]} {does} ({access.place})"


def span(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor's storage that is its own, and one past the last."""
    low = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return low * tensor.itemsize, (low + tensor.numel()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low * tensor.itemsize, (low + last + 1) * tensor.itemsize


def is_on_device(tensor: Tensor) -> bool:
    return tensor.is_meta


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
