"""What a rank's ranges are now, read later from copies: as saves in the background do."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from lightning_zero.checkpoint.sharded.items import Snapshot
from lightning_zero.engine.units.master_storage import FlatSlice, MasterStorage
from lightning_zero.engine.whole.values import Range, Value, own_parts
from lightning_zero.tiers.pages import HostPages


class KeptRanges:
    def __init__(self, engine: Any, wanted: Container[Value]) -> None:
        self._parts = [part for part in own_parts(engine) if part.value in wanted]
        sources: dict[MasterStorage, list[FlatSlice]] = {}
        for part in self._parts:
            assert part.storage is not None
            sources.setdefault(part.storage, []).append(part.source)
        self.spare: list[HostPages] = []
        self.snapshot = Snapshot(sources, engine.comm.streams, self.spare)

    def __iter__(self) -> Iterator[Range]:
        for value, start, source, _ in self._parts:
            yield Range(value, start, self.snapshot.read(source))

    def close(self) -> None:
        self.snapshot.close()
        while self.spare:
            self.spare.pop().close()
