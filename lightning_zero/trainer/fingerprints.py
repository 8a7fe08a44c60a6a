"""Write fingerprints (checksums) of weights and optimizer state into ``fingerprints.csv``, for ``zero.fingerprint``.

Equal fingerprints show that two runs, or two replicas in one run, hold the same bits.
"""

from __future__ import annotations

import csv
import itertools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.engine.passes.writes import checksum_on_device
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.master_storage import opened
from lightning_zero.engine.whole.values import MASTER, own_fragments
from lightning_zero.engine.whole.whole_params import take_writes_over
from lightning_zero.lightning_api import pl

FILE = "fingerprints.csv"
COLUMNS = ("step", "unit", "masters", "optimizer_state")


@outside_autograd
def fingerprints(engine: Engine) -> Tensor:
    """Return checksums of each unit's masters and optimizer state, ``[units, 2] int64`` on the device. Collective.

    A checksum sums, mod 2**64, the bits of each element times an odd number for its position, parameter and state name.
    Each rank adds the elements that it saves, so checksums are equal at every stage, tier and number of ranks.
    """
    take_writes_over(engine)
    unit_of = {bucket: unit.index for unit in engine.units for bucket in unit.buckets}
    found = torch.zeros(len(engine.units), 2, dtype=torch.int64, device=engine.comm.device)
    for storage, parts in itertools.groupby(own_fragments(engine), lambda part: part.storage):
        assert storage is not None
        with opened(storage):
            for part in parts:
                bucket = engine.buckets[part.value.bucket]
                info = bucket.params[part.value.slot]
                summed = checksum_on_device(part.source.tensor, part.start, info.split)
                summed *= zlib.crc32(f"{info.fqn} {part.value.name}".encode()) | 1
                found[unit_of[bucket], int(part.value.name != MASTER)] += summed.to(found.device)
    return engine.comm.sum_(found)


@outside_autograd
def differing_replicas(engine: Engine) -> Tensor:
    """Return ``[units] bool`` on the device: whether parameters that every rank holds whole differ between ranks.
    Collective."""
    groups = engine.comm.ranks.tensor, engine.comm.ranks.expert
    place = {1: 0} | {group.size: group.index for group in groups}
    sizes = sorted(place)  # numbers of parts
    # A row for each part of each number of parts. Ranks with other parts leave the least number there.
    own = torch.full((2, sum(sizes), len(engine.units)), torch.iinfo(torch.int64).min, device=engine.comm.device)
    rows = {size: sum(sizes[:kind]) + place[size] for kind, size in enumerate(sizes)}
    own[0, [*rows.values()]] = 0
    for unit in engine.units:
        for bucket in (bucket for bucket in unit.buckets if not bucket.plan.reshards):
            unit.unshard_wait()
            row = own[0, rows[bucket.params[0].split.parts if bucket.params[0].split is not None else 1]]
            for info in bucket.params:
                row[unit.index] += checksum_on_device(info.flattened(info.param.data), info.slot)
    own[1, [*rows.values()]] = ~own[0, [*rows.values()]]
    largest, smallest = engine.comm.max_(own).unbind()
    return (largest != ~smallest).any(0)


class Fingerprints:
    """Writes checksums of each unit every ``every`` steps into ``fingerprints.csv`` in the Trainer's default_root_dir.

    Checksums stay on the device until the next ones are due or training ends, so the host does not wait for them.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, every: int) -> None:
        self._trainer, self._engine, self._every = trainer, engine, every
        self._path = Path(trainer.default_root_dir) / FILE
        self._waits: tuple[int, Tensor, Tensor] | None = None  # step, fingerprints, units whose replicas differ
        self._keep(trainer.global_step, differing_replicas(engine))

    def _keep(self, step: int, differ: Tensor) -> None:
        self.write()
        self._waits = step, fingerprints(self._engine), differ

    def step(self, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Run the optimizer step ``step(closure)`` and return its result. If fingerprints are due, compare the ranks'
        copies of whole parameters before the step, and compute fingerprints after it. Collective.

        Raises RuntimeError on all ranks if these copies differed when fingerprints were last due.
        """
        number, differ = self._trainer.global_step + 1, []
        if number % self._every:
            return step(closure)

        def compared() -> Any:
            result = closure()  # the backward: after it a step replaces the parameters
            differ.append(differing_replicas(self._engine))
            return result

        result = step(compared)
        self._keep(number, torch.stack(differ).any(0))
        return result

    def write(self) -> None:
        """Append the last fingerprints to the file. Raise RuntimeError if ranks' copies of parameters differed."""
        if self._waits is None:
            return
        (step, found, differ), self._waits = self._waits, None
        titles = [unit.title for unit in self._engine.units]
        if self._trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            with self._path.open("a", newline="") as file:
                lines = csv.writer(file)
                lines.writerows([COLUMNS] if is_new else [])
                for title, row in zip(titles, found.tolist(), strict=True):
                    lines.writerow([step, title, *(f"{number & 0xFFFFFFFFFFFFFFFF:016x}" for number in row)])
        if wrong := [title for title, flag in zip(titles, differ.tolist(), strict=True) if flag]:
            raise RuntimeError(
                f"zero.fingerprint: expected equal replicas of {', '.join(wrong[:3])} on all ranks, got different ones "
                f"before step {step}. A rank has computed or stored wrong numbers, or code wrote to parameters on some "
                "ranks only: test GPUs and memory, and check this code. Resume from an earlier checkpoint."
            )
