"""Compute numbers that tell whether two runs, or two replicas of one run, hold the same values to the bit."""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_zero.engine.passes.access import checksum_on_device
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.master_storage import opened
from lightning_zero.engine.whole.values import MASTER, own_fragments
from lightning_zero.engine.whole.whole_params import take_writes_over

if TYPE_CHECKING:
    from lightning_zero.engine.engine import Engine


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
    sizes = sorted({1, engine.config.tensor_parallel, engine.config.expert_parallel})  # numbers of parts
    # A row for each part of each number of parts. Ranks with other parts leave the least number there.
    own = torch.full((2, sum(sizes), len(engine.units)), torch.iinfo(torch.int64).min, device=engine.comm.device)
    rows = {size: sum(sizes[:kind]) + engine.comm.rank % size for kind, size in enumerate(sizes)}
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
