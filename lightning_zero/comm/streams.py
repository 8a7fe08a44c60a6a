"""Streams of one engine: one for each kind of transfer. On the host, which has none, everything here does nothing.

::

    compute : --e0------------------w1-- use --r       e0: what the transfer must wait for
    gather  :     \\w0-- all_gather --e1               e1: its end
    reduce  :  reduce-scatters                        w : a stream waits, never the host
    h2d     :  parameters from the host, before their gather
    push    :  parameters that a step on the host has changed
    d2h     :  reduced gradients to the host, behind their reduction

``e0`` is recorded when a transfer is issued, or earlier where it is known what the transfer depends on; ``e1`` when it
has been queued. Memory that another stream reads is kept by its owner until compute has waited for ``e1``, so a later
free on the compute stream is ordered behind it and no ``record_stream`` is needed.

Gathered parameters lie in memory of the gather stream's pool, which nothing else takes from. ``r`` is the last use of
what was given back to it. A gather waits for the last ``r``, and for the last change of the values that ranks send:
never for what compute has queued since, so it starts while that is still under way, however late it is issued.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_zero.device.accelerator import Accelerator

KINDS = ("gather", "reduce", "h2d", "push", "d2h")
HELD = 2  # transfers to the host whose device memory is kept: the one under way, and the next


class Streams:
    """The streams of one accelerator; none where it has none."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._held: deque[tuple[Any, Any]] = deque()
        self._streams: dict[str, Any] = {}
        if accelerator.has_streams:
            self._streams = {kind: accelerator.new_stream() for kind in KINDS}
        self.are_there = bool(self._streams)
        self._given_back: dict[Any, Any] = {}  # by the stream that used it last: an event behind that use
        self._waited_for: dict[str, Sequence[Any]] = {}  # by kind: events that its stream has waited for
        self._settled: Any = None  # an event behind the last change of what gathers send; None: of all that is queued

    def on(self, kind: str, *, after: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Run the body on the stream of ``kind`` (given to the body; None where there is none).

        Args:
            after: the event to wait for; by default everything that the current stream has queued so far.
        """
        stream = self._streams.get(kind)
        if stream is None or (after is None and stream == self.accelerator.current_stream()):
            return contextlib.nullcontext(stream)
        return self._on(stream, after)

    @contextlib.contextmanager
    def _on(self, stream: Any, after: Any) -> Iterator[Any]:
        # Without the wait the body could write into a block that the allocator has just taken back from a tensor that
        # queued kernels of the current stream still read, or read what these kernels have not written yet.
        event = after if after is not None else self.accelerator.record()
        with self.accelerator.on(stream):
            self.accelerator.wait(event)
            yield stream

    # -- memory of gathered parameters, and what is sent to fill it ------------------------------------------------

    def pool_of(self, kind: str) -> contextlib.AbstractContextManager[Any]:
        """Inside, memory is taken from the pool of that stream. It is used inside :meth:`on_free_memory`."""
        return self.accelerator.on(self._streams[kind]) if self._streams else contextlib.nullcontext()

    @contextlib.contextmanager
    def on_free_memory(self, kind: str) -> Iterator[Any]:
        """Run the body on the stream of ``kind``, behind all who used memory that gathered parameters have given back,
        and behind the last change of what is sent."""
        stream = self._streams.get(kind)
        if stream is None:
            yield None
            return
        # Which block the allocator gives out nobody knows, so this waits for the last use of any. Uses of one stream
        # come one after the other.
        events = [self.settled(), *self._given_back.values()]
        known, self._waited_for[kind] = self._waited_for.get(kind, ()), events
        with self.accelerator.on(stream):
            for event in events:
                if not any(event is before for before in known):
                    self.accelerator.wait(event)
            yield stream

    def give_back(self) -> None:
        """Memory of gathered parameters has gone back to its pool; the current stream has used it until now."""
        if self._streams:
            self._given_back[self.accelerator.current_stream()] = self.accelerator.record()

    def change(self) -> None:
        """The current stream changes values that gathers send: those that are issued from here on come after it."""
        self._settled = None

    def settled(self) -> Any:
        """An event behind the last change of what gathers send; None where there are no streams."""
        if self._settled is None:
            # Recorded now, by the first gather that needs it: one event for all that a step has changed.
            self._settled = self.accelerator.record()
        return self._settled

    # -- events ----------------------------------------------------------------------------------------------------

    def hold(self, memory: Any, event: Any) -> None:
        """Keep ``memory``, which a stream reads, until ``event``. It is of the current stream's pool, or the reduce
        stream's. Beyond a few, these wait for the oldest; the host does not."""
        # Dropped earlier, the block would return to the pool of the stream that allocated it, and that stream could
        # overwrite it before the stream that reads it is done.
        self._held.append((event, memory))
        while self._held and (len(self._held) > HELD or self.accelerator.is_over(self._held[0][0])):
            oldest, _ = self._held.popleft()
            self.wait(oldest)
            with self.on("reduce", after=oldest):
                pass

    def let_go(self) -> None:
        """Keep nothing any more: the host has waited for the device."""
        self._held.clear()

    def to_host(self, number: Tensor) -> tuple[Tensor, Any]:
        """A copy of a 0-d tensor on the host, and the event of its arrival; the host goes on."""
        if not self.are_there:
            return number, None
        host = self.accelerator.host_memory(number.shape, number.dtype)
        host.copy_(number, non_blocking=True)
        return host, self.mark()

    def mark(self) -> Any:
        """An event behind what the current stream has queued so far; None where there are no streams."""
        return self.accelerator.record()

    def wait(self, event: Any) -> None:
        """Make the current stream wait for ``event`` (of :meth:`mark`)."""
        if event is not None:
            self.accelerator.wait(event)
