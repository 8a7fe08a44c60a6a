"""Values of a home as they are at one moment, for a reader who comes to them later: a save in the background.

::

    main, step : save | forward, backward ..... | step 0 | step 1
    reader     :      | copies 0, 1, 2 .. | writes 0, 1, 2 ..........

Whoever is about to change what a home holds first makes sure of what is kept, and waits for that home only:

    it rests     the reader               before a change
    on a device  copies all homes first   that copy, which is made now if the reader has not come to it
    on the host  reads it where it lies   a copy is made of what has not been read
    in files     reads it where it lies   nothing: what has changed goes to another place in the file

Where there is no room for that, the change waits until the reader has been here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero.comm.streams import Streams
from lightning_zero.optimizers.low_bits import Format
from lightning_zero.planning.state_dtype import BLOCK
from lightning_zero.tiers.extents import Extent
from lightning_zero.tiers.limits import available_host_memory
from lightning_zero.tiers.nvme import NvmeTier
from lightning_zero.tiers.pages import HostPages


class Sliced(NamedTuple):
    """Adjacent elements of a flat tensor that a home holds: of a fragment, say. The tensor may rest in a file.

    Attributes:
        whole: the tensor; of packed state (``narrow.py``), a row for each block of elements.
        packed: how the rows are packed.
    """

    whole: Tensor
    start: int
    numel: int
    packed: Format | None = None

    @property
    def tensor(self) -> Tensor:
        """The values [numel]; the home is open."""
        low, high = self.rows
        return self.of(self.whole[low:high])

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.whole.dtype if self.packed is None else torch.bfloat16

    @property
    def rows(self) -> tuple[int, int]:
        """What of the first dimension of ``whole`` holds the elements."""
        if self.packed is None:
            return self.start, self.start + self.numel
        return self.start // BLOCK, -(-(self.start + self.numel) // BLOCK)

    def of(self, rows: Tensor) -> Tensor:
        """The values [numel] in a copy of these rows."""
        if self.packed is None:
            return rows
        first = self.start % BLOCK
        return self.packed.values(rows)[first : first + self.numel]

    def part(self, start: int, numel: int) -> Sliced:
        """Elements of it, from ``start`` on."""
        return self._replace(start=self.start + start, numel=numel)


class Kept(Protocol):
    """What is kept of one home. ``stage`` and ``read`` are for threads that are bound to the device; ``release``, which
    the reader calls, ends it."""

    def stage(self) -> None:
        """Copy what is sure to change soon."""

    def read(self, part: Sliced) -> Tensor:
        """The values of a part as they were, [numel] on the host. They are not changed until ``release``."""

    def release(self) -> None:
        """Nothing is read any more; may be called twice."""


class _Span:
    """The range of one tensor that is kept."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self.start, self.stop = len(whole), 0
        self.copy: Tensor | None = None

    def add(self, part: Sliced) -> None:
        low, high = part.rows
        self.start, self.stop = min(self.start, low), max(self.stop, high)

    @property
    def values(self) -> Tensor:
        return self.whole[self.start : self.stop]


class KeptInMemory:
    """Of a home on the device, or on the host."""

    def __init__(
        self, parts: Iterable[Sliced], streams: Streams, *, at_once: Tensor | None, spare: list[Tensor] | None
    ) -> None:
        """
        Args:
            at_once: the tensor of which the copy is made now, because it may change without a word.
            spare: memory of the copies that were made last, and afterwards of these: new memory takes as long again.
                :meth:`stage` copies then. None: copies are seldom needed.
        """
        self._streams, self._spare = streams, spare
        self._spans: dict[int, _Span] = {}
        for part in parts:
            self._spans.setdefault(id(part.whole), _Span(part.whole)).add(part)
        # Of whoever copies, or has read in place; and told of the end.
        self._turn = threading.Condition(threading.Lock())
        self._is_copied = self._is_over = False
        if at_once is not None and (span := self._spans.get(id(at_once))) is not None:
            span.copy = self._copy_span(span)
        self._made = streams.mark()  # behind what has made the values
        self._arrived = self._made

    def stage(self) -> None:
        if self._spare is not None:
            with self._turn:
                self._copy()

    def secure(self) -> None:
        """The values change in a moment: those that follow on the current stream, or in this thread."""
        with self._turn:
            while not (self._is_copied or self._is_over or self._copy()):
                self._turn.wait()
        self._streams.wait(self._arrived)

    def _copy(self) -> bool:
        """Make the copies, if there is room for them. Returns whether they are made."""
        spans = [span for span in self._spans.values() if span.copy is None]
        if not (self._is_copied or self._is_over):
            there = sum(memory.nbytes for memory in self._spare or ())
            if sum(span.values.nbytes for span in spans) - there > available_host_memory():
                return False
            try:
                with self._streams.on("d2h", after=self._made):
                    copies = [self._copy_span(span) for span in spans]
                    self._arrived = self._streams.mark()
            except (MemoryError, OSError, RuntimeError):  # where the system gives no memory; the last is torch's
                return False
            for span, copy in zip(spans, copies, strict=True):  # not before the event that a reader waits for
                span.copy = copy
            self._is_copied = True
        return True

    def _copy_span(self, span: _Span) -> Tensor:
        values = span.values.detach()
        return self._memory_for(values).copy_(values, non_blocking=True)

    def _memory_for(self, values: Tensor) -> Tensor:
        for place, memory in enumerate(self._spare or ()):
            if (memory.shape, memory.dtype) == (values.shape, values.dtype):
                return self._spare.pop(place)  # type: ignore[union-attr]
        if values.device.type == "cpu":
            # In large pages: to fill these takes half the time.
            return HostPages(values.nbytes).tensor(0, values.dtype, values.numel()).view(values.shape)
        return self._streams.accelerator.host_memory(values.shape, values.dtype)

    def read(self, part: Sliced) -> Tensor:
        span = self._spans[id(part.whole)]
        if span.copy is None:
            # Not in its turn: whoever trains would wait for this thread, which runs only when no other wants to.
            with self._streams.on("d2h", after=self._made):
                host = part.tensor.detach().to("cpu", copy=True)
            with self._turn:
                if span.copy is None:  # else values may have changed while they were read
                    return host
        self._streams.accelerator.wait_on_host(self._arrived)
        low, high = part.rows
        return part.of(span.copy[low - span.start : high - span.start])

    def release(self) -> None:
        with self._turn:
            self._is_over = True
            if self._spare is not None and self._spans:
                self._spare[:] = [span.copy for span in self._spans.values() if span.copy is not None]
            self._spans = {}
            self._turn.notify_all()


class KeptInFiles:
    """Of a home in files. It reads extents, of which the home has others as soon as values have changed."""

    def __init__(self, tier: NvmeTier, extents: Mapping[Tensor, Extent]) -> None:
        self._tier = tier
        self._extents = {id(tensor): extent for tensor, extent in extents.items()}
        self._tensors = list(extents)  # so that no other object gets the id of one
        self._read: dict[int, Tensor] = {}  # what has been read of this home
        self._owns = False
        self._over = threading.Event()
        self._lock = threading.Lock()

    def stage(self) -> None: ...

    def read(self, part: Sliced) -> Tensor:
        key = id(part.whole)
        if key not in self._read:
            extent = self._extents[key]
            values = torch.empty(extent.numel, dtype=extent.dtype)
            self._tier.stage_in(extent, values).result()
            self._read[key] = values
        low, high = part.rows
        return part.of(self._read[key].view(-1, *part.whole.shape[1:])[low:high])

    def take_extents(self) -> bool:
        """Make them this object's, which frees them. Returns False where nothing is read any more: they are not."""
        with self._lock:
            self._owns = not self._over.is_set()
            return self._owns

    def wait(self) -> None:
        """Wait until nothing is read any more."""
        self._over.wait()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def release(self) -> None:
        with self._lock:
            if self._owns:
                self._tier.free(self._extents.values())
                self._owns = False
            self._over.set()
        self._read = {}
