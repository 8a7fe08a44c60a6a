"""Runs the transfers of one engine on streams, one for each kind of transfer. On the host all methods do nothing.

::

    compute : --e0------------------w1-- use --r       e0: what the transfer must wait for
    gather  :     \\w0-- all_gather --e1               e1: the end of the transfer
    reduce  :  reduce-scatters                        w : a stream waits, never the host
    h2d     :  parameters from the host, before their gather
    push    :  parameters that a step on the host has changed
    d2h     :  reduced gradients to the host, after their reduction

Memory that another stream reads is kept until compute has waited for ``e1``. So no ``record_stream`` is needed.

Gathered parameters are allocated from the gather stream's memory pool, which has no other use. When this memory is
freed, event ``r`` is recorded after compute's last use. A gather waits for the last ``r`` and for the last change of
the values that the gather sends, but for no later work of compute, so a gather can start while compute is still busy.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_zero.device.accelerator import Accelerator

KINDS = ("gather", "reduce", "h2d", "push", "d2h")
HELD = 2  # transfers to the host whose device memory is kept: the one under way and the next


class Streams:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._held: deque[tuple[Any, Any]] = deque()
        self._streams: dict[str, Any] = {}
        if accelerator.has_streams:
            self._streams = {kind: accelerator.new_stream() for kind in KINDS}
        self.are_there = bool(self._streams)
        self._given_back: dict[Any, Any] = {}  # stream that last used given-back memory -> event after that use
        self._waited_for: dict[str, Sequence[Any]] = {}  # kind -> events that its stream has waited for
        self._change_event: Any = None  # event after the last change of what gathers send; None: not recorded yet

    def on(self, kind: str, *, after: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context that runs its body on the stream of ``kind``, after the event ``after``; by default after
        all work queued on the current stream. The ``as`` target is the stream (None without streams)."""
        stream = self._streams.get(kind)
        if stream is None or (after is None and stream == self.accelerator.current_stream()):
            return contextlib.nullcontext(stream)
        return self._on(stream, after)

    @contextlib.contextmanager
    def _on(self, stream: Any, after: Any) -> Iterator[Any]:
        # Otherwise the body could overwrite memory that queued kernels still read, or read what they have not yet
        # written.
        event = after if after is not None else self.accelerator.record()
        with self.accelerator.on(stream):
            self.accelerator.wait(event)
            yield stream

    # -- memory of gathered parameters, and what is sent to fill it ------------------------------------------------

    def pool_of(self, kind: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose body allocates device memory from the pool of ``kind``'s stream. Write to this memory
        only inside :meth:`on_free_memory`, which waits for earlier uses of the pool's memory."""
        return self.accelerator.on(self._streams[kind]) if self._streams else contextlib.nullcontext()

    @contextlib.contextmanager
    def on_free_memory(self, kind: str) -> Iterator[Any]:
        """Context manager that runs its body on the stream of ``kind`` (the ``as`` target; None without streams), after
        the last uses of memory freed to this stream's pool and the last change of the shards that gathers send."""
        stream = self._streams.get(kind)
        if stream is None:
            yield None
            return
        # The allocator may give out any block, so wait for the last use of each. Uses on one stream are ordered.
        events = [self.change_event(), *self._given_back.values()]
        known, self._waited_for[kind] = self._waited_for.get(kind, ()), events
        with self.accelerator.on(stream):
            for event in events:
                if not any(event is before for before in known):
                    self.accelerator.wait(event)
            yield stream

    def give_back(self) -> None:
        """Record that memory of gathered parameters was freed, and that its last use was on the current stream."""
        if self._streams:
            self._given_back[self.accelerator.current_stream()] = self.accelerator.record()

    def change(self) -> None:
        """Record that the current stream changes shards that gathers send. Later gathers wait for this change."""
        self._change_event = None

    def change_event(self) -> Any:
        """Return an event after the last change of the shards that gathers send; None without streams."""
        if self._change_event is None:
            # Record now, at the first gather that needs it: one event for all changes of a step.
            self._change_event = self.accelerator.record()
        return self._change_event

    # -- events ----------------------------------------------------------------------------------------------------

    def hold(self, memory: Any, event: Any) -> None:
        """Keep ``memory``, which was allocated on the current or the reduce stream, until ``event``, because another
        stream reads it. If more than :data:`HELD` blocks are kept, the current and the reduce stream, not the host,
        wait for the oldest block's event."""
        # Dropped earlier, the memory could be overwritten by the stream that allocated it.
        self._held.append((event, memory))
        while self._held and (len(self._held) > HELD or self.accelerator.is_over(self._held[0][0])):
            oldest, _ = self._held.popleft()
            self.wait(oldest)
            with self.on("reduce", after=oldest):
                pass

    def drop_held(self) -> None:
        """Drop all memory that :meth:`hold` keeps. Call this method only after the host has waited for the device."""
        self._held.clear()

    def to_host(self, number: Tensor) -> tuple[Tensor, Any]:
        """Copy a 0-d tensor to the host without waiting. Return the copy, and an event after the copy's arrival;
        without streams, ``number`` and None."""
        if not self.are_there:
            return number, None
        host = self.accelerator.host_memory(number.shape, number.dtype)
        host.copy_(number, non_blocking=True)
        return host, self.mark()

    def mark(self) -> Any:
        """Return an event after all work queued on the current stream so far; None without streams."""
        return self.accelerator.record()

    def wait(self, event: Any) -> None:
        """Make the current stream wait for ``event``, a result of :meth:`mark` (None: do nothing)."""
        if event is not None:
            self.accelerator.wait(event)
