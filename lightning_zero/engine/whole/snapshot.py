"""What shards are at one moment, for a thread that writes them to files while training goes on."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from torch import Tensor

from lightning_zero.comm.streams import Streams
from lightning_zero.engine.assembly import Assembly
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.home import Home
from lightning_zero.engine.units.kept import Kept, Sliced
from lightning_zero.engine.whole.values import Copies, Part, Range, Value, own_parts

PIECE_NUMEL = 1 << 22  # what is read at a time: a step may wait for that


class Snapshot:
    """The values of homes as they are when this is made. Everything else is for threads that read them."""

    def __init__(self, wanted: Mapping[Home, Sequence[Sliced]], streams: Streams) -> None:
        self._kept: dict[int, Kept] = {}
        self._accelerator = streams.accelerator
        self._homes = list(wanted)
        try:
            for home, parts in wanted.items():
                self._kept[id(home)] = home.keep(parts, streams)
        except BaseException:
            self.close()
            raise

    def stage(self) -> None:
        """Copy what the next step is sure to change."""
        self._accelerator.bind_thread()
        for kept in self._kept.values():
            kept.stage()

    def read(self, home: Home, part: Sliced) -> Tensor:
        """[part.numel] on the host, valid until this home is done with."""
        self._accelerator.bind_thread()
        return self._kept[id(home)].read(part)

    def done_with(self, home: Home) -> None:
        self._kept[id(home)].release()

    def close(self) -> None:
        for kept in self._kept.values():
            kept.release()


class KeptRanges:
    """What :func:`~lightning_zero.engine.whole.values.visit_ranges` would show now, for a thread that asks later."""

    @outside_autograd
    def __init__(self, engine: Assembly, wanted: Container[Value], copies: Copies) -> None:
        self._parts: dict[Home, list[Part]] = {}
        for part in own_parts(engine, copies):
            if part.value in wanted and part.home is not None:
                self._parts.setdefault(part.home, []).append(part)
        sources = {home: [part.source for part in parts] for home, parts in self._parts.items()}
        self.snapshot = Snapshot(sources, engine.comm.streams)

    def __iter__(self) -> Iterator[Range]:
        for home, parts in self._parts.items():
            for value, start, source, _ in parts:
                for done in range(0, source.numel, PIECE_NUMEL):
                    piece = source.part(done, min(PIECE_NUMEL, source.numel - done))
                    yield Range(value, start + done, self.snapshot.read(home, piece))
            self.snapshot.done_with(home)
