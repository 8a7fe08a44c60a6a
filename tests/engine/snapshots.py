"""What a rank's ranges are now, read later from copies: as saves in the background do."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from lightning_zero.engine.whole.ranges import Range, Value, own_parts
from lightning_zero.engine.whole.snapshot import Snapshot


class KeptRanges:
    def __init__(self, engine: Any, wanted: Container[Value]) -> None:
        self._parts = list(own_parts(engine, wanted, {}))
        sources = {home: [part.values for part in parts] for home, parts in self._parts}
        self.snapshot = Snapshot(sources, engine.comm.streams, [])

    def __iter__(self) -> Iterator[Range]:
        for _, parts in self._parts:
            for value, start, part in parts:
                yield Range(value, start, self.snapshot.read(part))
