"""Where the master weights of a bucket rest, with their optimizer state.

A home owns tensors that stay the same objects for ever. So runs, optimizer state and views of these tensors need not
know where the values rest. On the device and in host memory the tensors are always readable. In files the tensors have
memory only while the home is open; otherwise the values lie in extents. ``open`` and ``close`` nest.

A home belongs to the worker while a step of its bucket is under way, else to the main thread. The worker brings a home
in files to rest after that step is over, so such a home lets in one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_zero.comm.profiling import profiled
from lightning_zero.device import recording
from lightning_zero.planning.placement import Tier
from lightning_zero.tiers.extents import Extent, Wanted
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.nvme import NvmeTier
from lightning_zero.tiers.pinned import ReadAhead, Sender
from lightning_zero.tiers.write_behind import WriteBehind

if TYPE_CHECKING:  # which knows the tiers
    from lightning_zero.engine.units.grad_store import Landing

CAST_CHUNK = 1 << 22  # elements: few enough to need little memory, and enough to keep a link busy


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of one engine that exist, beside the device; a bucket takes what its plan asks for.

    Attributes:
        landing: of gradients that rest on the host.
        sender: of masters in files, to a device that has streams.
        read_ahead, write_behind: for parameters in files.
    """

    host: HostTier | None = None
    nvme: NvmeTier | None = None
    landing: Landing | None = None
    sender: Sender | None = None
    read_ahead: ReadAhead | None = None
    write_behind: WriteBehind | None = None

    def close(self, *, but: Tiers | None = None) -> None:
        """End them, except for parts of ``but``. May be called twice."""
        kept = () if but is None else but._parts()
        for part in self._parts():
            if part is not None and not any(part is other for other in kept):
                part.close()

    def _parts(self) -> tuple[Landing | Sender | HostTier | NvmeTier | ReadAhead | None, ...]:
        return self.landing, self.sender, self.host, self.nvme, self.read_ahead  # in the order of who uses whom

    @property
    def staging_nbytes(self) -> int:
        """Host memory of what is on the way between tiers, beside the ring of the files."""
        return sum(part.nbytes for part in (self.landing, self.sender, self.read_ahead) if part is not None)

    def set_budgets(self, host: int | None, nvme: int | None) -> None:
        """Bound the bytes that this rank may hold; None: by what is available."""
        if self.host is not None:
            self.host.budget = host
        if self.nvme is not None:
            self.nvme.budget = nvme


class Home:
    """The place of a bucket's master_param and optimizer state.

    Attributes:
        master: [owned numel]; readable while open.
        changes: another object whenever the master may have got other values.
    """

    def __init__(self, master: Tensor) -> None:
        self.master = master
        self.changes = object()
        self._lent: list[Future[Any]] = []

    def begin_open(self) -> None:
        """Start bringing the tensors into memory."""

    def open(self, *, to_write: bool = False) -> None:
        """Have the tensors in memory, until the matching ``close``; ``to_write``: and nobody reads them any more."""
        raise NotImplementedError

    def copy_to(self, target: Tensor) -> None:
        """Copy the master, which is readable, into ``target`` [owned numel] of any dtype on the device."""
        copy_cast(self.master, target)

    def read_until(self, event: Any) -> None:
        """A stream reads the master until ``event`` (None: it does not): it is not written to before."""

    def lend(self, reading: Future[Any]) -> None:
        """Somebody reads the tensors, which are readable, until ``reading`` is done: they are not written to before."""
        self._lent.append(reading)

    def close(self, *, changed: bool) -> None:
        """End one ``open``; the last end starts to bring the tensors to rest. ``changed``: they were written to."""

    def settle(self) -> None:
        """Wait until the tensors of a closed home are at rest."""

    def adopt(self, owner: object, states: Sequence[Tensor]) -> None:
        """Take ``states`` as the state tensors of ``owner``, an optimizer's runs; the home is open.

        They rest beside the master from now on, and replace those that ``owner`` had here. Several optimizers may step
        one master.
        """

    def free(self) -> None:
        """Give the home's place back; the master is not readable any more."""


@contextlib.contextmanager
def opened(home: Home, *, changed: bool = False) -> Iterator[Tensor]:
    """Open ``home``: the master is readable inside (and writable, with ``changed``), and at rest again afterwards."""
    home.open(to_write=changed)
    try:
        yield home.master
    finally:
        home.close(changed=changed)
        home.settle()


class ResidentHome(Home):
    """Always readable, in device memory; state that an optimizer makes lies beside its parameter."""

    def __init__(self, master: Tensor, *, is_exposed: bool = False) -> None:
        """
        Args:
            is_exposed: users' code may change the master itself, without ``open``.
        """
        super().__init__(master)
        self.is_exposed = is_exposed

    def open(self, *, to_write: bool = False) -> None:
        if to_write:
            self.changes = object()
            self._take_back()

    def _take_back(self) -> None:
        wait(self._lent)  # an error is for whoever reads
        self._lent = []


class HostHome(ResidentHome):
    """Always readable, in slabs of the host tier. It holds copies, also where the device is the host."""

    def __init__(self, tier: HostTier, label: str, values: Tensor, dtype: torch.dtype) -> None:
        self._tier, self._label = tier, label
        self._states: dict[int, list[tuple[Tensor, Any]]] = {}  # of each owner, with their extents
        self._extent = tier.reserve([Wanted(label, values.numel(), dtype)])[0]
        master = tier.resident(self._extent)
        # The host waits: nothing tells whoever reads or writes the masters next that a copy is still under way.
        copy_cast(values, master, wait=True)
        super().__init__(master)
        self._reads: Any = None  # the end of the last copy to the device

    def open(self, *, to_write: bool = False) -> None:
        super().open(to_write=to_write)
        # The slabs are pinned: a copy to the device may go on long after it was queued.
        if to_write and self._reads is not None:
            self._tier.accelerator.wait_on_host(self._reads)
            self._reads = None

    def read_until(self, event: Any) -> None:
        self._reads = event

    def adopt(self, owner: object, states: Sequence[Tensor]) -> None:
        """Move new states into a slab. The optimizer keeps the same tensor objects, which get other memory."""
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
            # ``.data =`` and not a new tensor: the optimizer's ``state`` holds this object, and would go on with its
            # old memory. The object is kept here too, so that its id cannot come back as that of another tensor.
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
    (Phase.OPEN, Phase.WRITING),  # what has changed
    (Phase.OPEN, Phase.RESTS),
    (Phase.WRITING, Phase.RESTS),
}


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _by_one_thread(method: _Method) -> _Method:
    """Let one thread at a time into the methods of a home; the others wait for it."""

    @functools.wraps(method)
    def locked(self: FileHome, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


class FileHome(Home):
    """In files: tensors have memory from ``begin_open`` until the ``settle`` after ``close``."""

    def __init__(self, tier: NvmeTier, label: str, master: Tensor, sender: Sender | None = None) -> None:
        self._tier, self._sender = tier, sender
        self._label = label
        super().__init__(master)
        self._states: dict[int, list[Tensor]] = {}  # of each owner
        self._tensors: list[Tensor] = []
        self._extents: list[Any] = []
        self._opens = 1
        self._changed = False
        self._phase = Phase.OPEN
        self._moving: list[Future[Any]] = []  # reads or writes
        # The worker brings a home to rest after its step is over, and the main thread may open it from then on.
        self._lock = threading.RLock()
        self._place([master])
        self.close(changed=True)
        self.settle()

    def _enter(self, phase: Phase) -> None:
        if (self._phase, phase) not in LEGAL:
            raise RuntimeError(f"{self._label!r} {self._phase.value}: illegal transition to {phase.name}")
        self._phase = phase

    @_by_one_thread
    def begin_open(self) -> None:
        if self._phase is Phase.RESTS:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            # From here on the tier's threads write to this memory, until the futures are done: see ``_wait``.
            self._move(self._tier.stage_in)
            self._enter(Phase.READING)

    def copy_to(self, target: Tensor) -> None:
        if self._sender is None:  # memory that is not pinned has been read when its copy is queued
            super().copy_to(target)
        else:
            self._sender.send(self.master, target)

    @_by_one_thread
    def lend(self, reading: Future[Any]) -> None:
        self._lent.append(reading)

    @_by_one_thread
    def open(self, *, to_write: bool = False) -> None:
        self._opens += 1
        # A write that is under way still reads this memory, so it must end before anyone may change the tensors.
        self.settle()
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
    def settle(self) -> None:
        if self._phase is Phase.WRITING:
            self._wait()
            self._rest()

    def _move(self, operation: Callable[[Extent, Tensor], Future[Any]]) -> None:
        self._moving = [operation(extent, tensor) for extent, tensor in zip(self._extents, self._tensors, strict=True)]

    def _wait(self) -> None:
        with profiled("transfer", self._label), recording.stands("disk", self._label, on_host=True):
            for future in self._moving:
                future.result()
        self._moving = []  # not where one has failed: then whoever waits next gets its error too

    def _take_back(self) -> None:
        if self._lent:
            with recording.stands("disk", self._label, on_host=True):
                wait(self._lent)  # an error is for whoever reads what they write
        self._lent = []

    def _rest(self) -> None:
        self._take_back()
        # The storage objects stay: the runs' tensors and the optimizer's state are views of them.
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self._enter(Phase.RESTS)

    @_by_one_thread
    def adopt(self, owner: object, states: Sequence[Tensor]) -> None:
        self._states[id(owner)] = list(states)
        wanted = [self.master, *(state for held in self._states.values() for state in held)]
        if [id(t) for t in wanted] != [id(t) for t in self._tensors]:
            self._place(wanted)

    def _place(self, tensors: Sequence[Tensor]) -> None:
        """Give each of ``tensors`` an extent; extents that the home has are used again where their size is right."""
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
        # An extent may hold another tensor's values now, or none: the next close must write all of them.
        self._changed = True

    @_by_one_thread
    def free(self) -> None:
        self._tier.free(self._extents)
        self._extents, self._tensors = [], []


def make_home(tier: Tier, tiers: Tiers, label: str, values: Tensor, dtype: torch.dtype, *, taken: bool = False) -> Home:
    """A home on ``tier`` for ``values`` [owned numel], in ``dtype``.

    Args:
        taken: nobody else has ``values``, which may become the home.
    """
    if tier is Tier.host:
        assert tiers.host is not None
        return HostHome(tiers.host, label, values, dtype)
    if tier is Tier.nvme:
        assert tiers.nvme is not None
        return FileHome(tiers.nvme, label, values.to("cpu", dtype, copy=True), tiers.sender)
    return ResidentHome(values.to(dtype, copy=not taken))


def copy_cast(source: Tensor, target: Tensor, *, wait: bool = False) -> None:
    """``target.copy_(source)`` in pieces: a cast between devices would otherwise need a whole second copy.

    The host does not wait where its memory is pinned. A cast is made on the device: the host would be slower, and
    would have to be waited for.

    Args:
        wait: the host goes on when the copy is over.
    """
    if source.device == target.device or source.dtype == target.dtype:
        target.copy_(source, non_blocking=not wait)
        return
    from_host = source.device.type == "cpu"
    for start in range(0, source.numel(), CAST_CHUNK):
        piece, place = source[start : start + CAST_CHUNK], target[start : start + CAST_CHUNK]
        # Freed at once, and used again by the next piece: both are queued on the current stream, one behind the other.
        moved = piece.to(target.device, non_blocking=True) if from_host else piece.to(target.dtype)
        place.copy_(moved)
