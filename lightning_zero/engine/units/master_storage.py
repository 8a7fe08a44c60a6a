"""Storages for the masters and the optimizer state of a bucket: on the device, in host memory or in files.

A storage's tensors stay the same objects, so code that holds them does not depend on the tier. On the device and the
host the tensors are always readable. Tensors in files have memory only while the storage is open; calls of `open` and
`close` can be nested.

[Note: masters during an offloaded step]
From `AwaitedStep.announce` until `AwaitedStep.wait` returns, only the step's thread may use a bucket's masters,
optimizer state, shard and claimed gradient; at other times only the main thread may. So gathers, reads of masters and
changes of gradients first wait for the step. On a GPU the step writes to the device only after the event with which the
step was submitted. The step's thread also waits for the write to files after the step, so a :class:`FileStorage` locks
its methods.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from lightning_zero.device import recording
from lightning_zero.device.accelerator import Event
from lightning_zero.planning.placement import Tier
from lightning_zero.tiers.extents import Extent, Wanted
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.nvme import NvmeTier
from lightning_zero.tiers.pinned import Landing, ReadAhead, Sender

CAST_CHUNK = 1 << 22  # elements: little memory, and enough to keep a link busy


@dataclass(frozen=True, slots=True)
class Tiers:
    """Holds the tiers of one engine (host memory, files), and the helpers that copy to and from these tiers. `landing`
    copies gradients to the host. `sender` copies masters from files to a device with streams. `read_ahead` has buffers
    for parameters that are read from files."""

    host: HostTier | None = None
    nvme: NvmeTier | None = None
    landing: Landing | None = None
    sender: Sender | None = None
    read_ahead: ReadAhead | None = None
    pid: int = field(default_factory=os.getpid)

    def close(self, *, but: Tiers | None = None) -> None:
        """Close the tiers and helpers, except those that `but` uses too. Can be called several times."""
        if os.getpid() != self.pid:  # a forked child would remove its parent's files and locks
            return
        kept = () if but is None else but._parts()
        for part in self._parts():
            if part is not None and not any(part is other for other in kept):
                part.close()

    def _parts(self) -> tuple[Landing | Sender | HostTier | NvmeTier | ReadAhead | None, ...]:
        return self.landing, self.sender, self.host, self.nvme, self.read_ahead  # first the parts that use others

    def set_budgets(self, host: int | None, nvme: int | None) -> None:
        """Limit the bytes that this rank keeps in host memory and in files. None: only what is free limits them."""
        if self.host is not None:
            self.host.budget = host
        if self.nvme is not None:
            self.nvme.budget = nvme


class MasterStorage:
    """Holds a bucket's masters [owned numel] and optimizer state on a tier. `master`: the masters, readable while the
    storage is open. `changes`: an object that the storage replaces whenever the masters may have changed."""

    keeps_state = False  # `attach_state` moves state to the tier

    def __init__(self, master: Tensor) -> None:
        self.master = master
        self.changes = object()
        self._lent: list[Future[None]] = []

    def begin_open(self) -> None:
        """If the tensors are in files, start to read the files, so that a later `open` waits less. Does not wait."""

    def open(self, *, to_write: bool = False) -> None:
        """Make the tensors readable until the matching `close`. `to_write`: the caller will change tensors, so wait
        until other threads and streams have read them."""
        raise NotImplementedError

    def copy_to(self, target: Tensor) -> None:
        """Copy the masters to `target` [owned numel], of any dtype, on the device. The storage may be closed."""
        copy_cast(self.master, target)

    def read_until(self, event: Event) -> None:
        """Record that a stream reads the masters until `event` (None: none does). Later writes wait for `event`."""

    def lend(self, reading: Future[None]) -> None:
        """Record that another thread reads the tensors until the future `reading` is done. Later writes, and on the
        host :meth:`free`, wait for this future."""
        self._lent.append(reading)

    def close(self, *, changed: bool) -> None:
        """Close the storage after one `open`. `changed`: the caller has changed tensors. After a change, the `close` of
        the outermost `open` starts to write the files."""

    def wait_for_rest(self) -> None:
        """For a closed storage in files: wait until the files are written, then free the tensors' memory."""

    def attach_state(self, owner: object, states: Sequence[Tensor]) -> None:
        """Move `states`, the state tensors of one optimizer (`owner`, its :class:`Runs`), to this tier. Drop earlier
        states of `owner` that are not in `states`. The storage must be open."""

    def free(self) -> None:
        """Free the storage's memory or file space. The storage cannot be used afterwards."""


@contextlib.contextmanager
def opened(storage: MasterStorage, *, changed: bool = False) -> Iterator[Tensor]:
    """Context manager that opens `storage` and yields its masters. `changed`: the body writes to tensors of the
    storage. On exit, close the storage and wait until its files are written."""
    storage.open(to_write=changed)
    try:
        yield storage.master
    finally:
        storage.close(changed=changed)
        storage.wait_for_rest()


class ResidentStorage(MasterStorage):
    """A storage in device memory, always readable. Optimizer state stays in the memory that the optimizer allocated."""

    def __init__(self, master: Tensor, *, is_exposed: bool = False) -> None:
        """`is_exposed`: parameters are views of `master`, so that users' code may change masters without `open`."""
        super().__init__(master)
        self.is_exposed = is_exposed

    def open(self, *, to_write: bool = False) -> None:
        if to_write:
            self.changes = object()
            self._take_back()

    def _take_back(self) -> None:
        wait(self._lent)  # the reader handles errors
        self._lent = []


class HostStorage(ResidentStorage):
    """A storage in the host tier's memory, always readable. The constructor copies `values` and casts to `dtype`."""

    keeps_state = True

    def __init__(self, tier: HostTier, label: str, values: Tensor, dtype: torch.dtype) -> None:
        self._tier, self._label = tier, label
        self._states: dict[int, list[tuple[Tensor, Extent]]] = {}  # by owner, with extents
        self._extent = tier.reserve([Wanted(label, values.numel(), dtype)])[0]
        master = tier.resident(self._extent)
        copy_cast(values, master)
        super().__init__(master)
        self._reads: Event = None  # event after the last copy to the device

    def open(self, *, to_write: bool = False) -> None:
        super().open(to_write=to_write)
        # Slabs are pinned: a queued copy to the device may still read them.
        if to_write and self._reads is not None:
            self._tier.accelerator.wait_on_host(self._reads)
            self._reads = None

    def read_until(self, event: Event) -> None:
        self._reads = event

    def attach_state(self, owner: object, states: Sequence[Tensor]) -> None:
        """Move new tensors in `states` into the host tier's memory. The tensors stay the same objects."""
        wanted = {id(state): state for state in states}
        held = self._states.get(id(owner), [])
        if gone := [extent for state, extent in held if id(state) not in wanted]:
            self._take_back()
            self._tier.free(gone)
        held = self._states[id(owner)] = [(state, extent) for state, extent in held if id(state) in wanted]
        known = {id(state) for state, _ in held}
        new = [state for key, state in wanted.items() if key not in known]
        if not new:
            return
        extents = self._tier.reserve([Wanted(f"{self._label} (state)", s.numel(), s.dtype) for s in new])
        for state, extent in zip(new, extents, strict=True):
            place = self._tier.resident(extent)
            place.copy_(state.view(-1))
            # `.data =`, because the optimizer's `state` holds this object. Kept here too, so that its id stays unique.
            state.data = place.view(state.shape)
            held.append((state, extent))

    def free(self) -> None:
        self._take_back()
        self._tier.free([self._extent, *(extent for held in self._states.values() for _, extent in held)])
        self._states = {}


class Phase(Enum):
    RESTS = "rests in files"
    READING = "is being read"
    OPEN = "is open"
    WRITING = "is being written"


LEGAL = {
    (Phase.RESTS, Phase.READING),
    (Phase.READING, Phase.OPEN),
    (Phase.OPEN, Phase.WRITING),  # after changes
    (Phase.OPEN, Phase.RESTS),
    (Phase.WRITING, Phase.RESTS),
}


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _by_one_thread(method: _Method) -> _Method:
    @functools.wraps(method)
    def locked(self: FileStorage, *args: object, **kwargs: object) -> object:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


class FileStorage(MasterStorage):
    """A storage in files. Its tensors have memory only while being read, while open, and while being written."""

    keeps_state = True

    def __init__(self, tier: NvmeTier, label: str, master: Tensor, sender: Sender | None = None) -> None:
        self._tier, self._sender = tier, sender
        self._label = label
        super().__init__(master)
        self._states: dict[int, list[Tensor]] = {}  # by owner
        self._tensors: list[Tensor] = []
        self._extents: list[Any] = []
        self._opens = 1
        self._changed = False
        self._phase = Phase.OPEN
        self._moving: list[Future[None]] = []  # reads or writes
        self._lock = threading.RLock()
        self._place([master])
        self.close(changed=True)
        self.wait_for_rest()

    def _enter(self, phase: Phase) -> None:
        if (self._phase, phase) not in LEGAL:
            raise RuntimeError(f"{self._label!r} {self._phase.value}: illegal transition to {phase.name}")
        self._phase = phase

    @_by_one_thread
    def begin_open(self) -> None:
        if self._phase is Phase.RESTS:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            # The tier's threads write to this memory until the futures are done (`_wait`).
            self._move(self._tier.stage_in)
            self._enter(Phase.READING)

    def copy_to(self, target: Tensor) -> None:
        with opened(self):
            if self._sender is None:  # a copy from unpinned memory has read it when the call returns
                super().copy_to(target)
            else:
                self._sender.send(self.master, target)

    @_by_one_thread
    def lend(self, reading: Future[None]) -> None:
        self._lent.append(reading)

    @_by_one_thread
    def open(self, *, to_write: bool = False) -> None:
        self._opens += 1
        # A write to the file still reads this memory, so it must end before anyone changes the tensors.
        self.wait_for_rest()
        if to_write:
            self._take_back()
        self.begin_open()
        if self._phase is Phase.READING:
            self._wait()
            self._enter(Phase.OPEN)

    @_by_one_thread
    def close(self, *, changed: bool) -> None:
        self._changed |= changed
        if changed:
            self.changes = object()
        self._opens -= 1
        if self._opens:
            return
        if self._changed:
            self._move(self._tier.stage_out)
            self._changed = False
            self._enter(Phase.WRITING)
        else:
            self._rest()

    @_by_one_thread
    def wait_for_rest(self) -> None:
        if self._phase is Phase.WRITING:
            self._wait()
            self._rest()

    def _move(self, operation: Callable[[Extent, Tensor], Future[None]]) -> None:
        self._moving = [operation(extent, tensor) for extent, tensor in zip(self._extents, self._tensors, strict=True)]

    def _wait(self) -> None:
        with recording.profiled("transfer", self._label), recording.waiting("disk", self._label, on_host=True):
            for future in self._moving:
                future.result()
        self._moving = []  # after an error they stay, so that the next wait raises too

    def _take_back(self) -> None:
        if self._lent:
            with recording.waiting("disk", self._label, on_host=True):
                wait(self._lent)  # the reader handles errors
        self._lent = []

    def _rest(self) -> None:
        self._take_back()
        # Runs and optimizer state are views: see [Note: freed storage and autograd's views].
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self._enter(Phase.RESTS)

    @_by_one_thread
    def attach_state(self, owner: object, states: Sequence[Tensor]) -> None:
        self._states[id(owner)] = list(states)
        wanted = [self.master, *(state for held in self._states.values() for state in held)]
        if [id(t) for t in wanted] != [id(t) for t in self._tensors]:
            self._place(wanted)

    def _place(self, tensors: Sequence[Tensor]) -> None:
        """Assign an extent (a range in the files) to each of `tensors`. Reuse this storage's extents of equal size and
        dtype, and free the rest. The next `close` writes all tensors."""
        spare = list(self._extents)
        self._extents, self._tensors = [], list(tensors)
        for tensor in self._tensors:
            size = tensor.numel(), tensor.dtype
            extent = next((e for e in spare if (e.numel, e.dtype) == size), None)
            if extent is not None:
                spare.remove(extent)
            self._extents.append(extent)
        self._tier.free(spare)
        missing = [i for i, extent in enumerate(self._extents) if extent is None]
        wanted = [Wanted(self._label, self._tensors[i].numel(), self._tensors[i].dtype) for i in missing]
        for i, extent in zip(missing, self._tier.reserve(wanted), strict=True):
            self._extents[i] = extent
        # A reused extent may hold another tensor's values, so the next close must write all.
        self._changed = True

    @_by_one_thread
    def free(self) -> None:
        self._tier.free(self._extents)
        self._extents, self._tensors = [], []


def make_storage(
    tier: Tier, tiers: Tiers, label: str, values: Tensor, dtype: torch.dtype, *, taken: bool = False
) -> MasterStorage:
    """Return a storage on `tier` with the masters `values` [owned numel], in `dtype`. `taken`: a storage on the device
    may use the memory of `values` if the dtype is the same."""
    if tier is Tier.host:
        assert tiers.host is not None
        return HostStorage(tiers.host, label, values, dtype)
    if tier is Tier.nvme:
        assert tiers.nvme is not None
        return FileStorage(tiers.nvme, label, values.to("cpu", dtype, copy=True), tiers.sender)
    return ResidentStorage(values.to(dtype, copy=not taken))


def copy_cast(source: Tensor, target: Tensor) -> None:
    """Copy `source` to `target`, with a cast if dtypes differ. Casts between host and device run on the device, chunk
    by chunk to save memory. The host waits for the end of a copy to host memory."""
    if source.device == target.device or source.dtype == target.dtype:
        target.copy_(source, non_blocking=target.device.type != "cpu")
        return
    from_host = source.device.type == "cpu"
    for start in range(0, source.numel(), CAST_CHUNK):
        piece, place = source[start : start + CAST_CHUNK], target[start : start + CAST_CHUNK]
        # The allocator reuses the memory of a piece for the next one: both are queued on the current stream in order.
        moved = piece.to(target.device, non_blocking=True) if from_host else piece.to(target.dtype)
        place.copy_(moved)


class FlatSlice(NamedTuple):
    """Refers to adjacent elements of `whole`, a flat tensor of a storage. If the storage is in files, `whole` has
    memory only while the storage is open."""

    whole: Tensor
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def tensor(self) -> Tensor:
        """Return the values [numel]. The storage must be open."""
        return self.whole[self.start : self.stop]

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def part(self, start: int, numel: int) -> FlatSlice:
        return self._replace(start=self.start + start, numel=numel)
