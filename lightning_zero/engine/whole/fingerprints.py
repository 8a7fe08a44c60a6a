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
from lightning_zero.engine.whole.values import MASTER, own_parts
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
    for storage, parts in itertools.groupby(own_parts(engine), lambda part: part.storage):
        assert storage is not None
        with opened(storage):
            for part in parts:
                bucket = engine.buckets[part.value.bucket]
                name = f"{bucket.params[part.value.slot].fqn} {part.value.name}"
                summed = checksum_on_device(part.source.tensor, part.start) * (zlib.crc32(name.encode()) | 1)
                found[unit_of[bucket], int(part.value.name != MASTER)] += summed.to(found.device)
    return engine.comm.sum_(found)


@outside_autograd
def differing_replicas(engine: Engine) -> Tensor:
    """Return ``[units] bool`` on the device: whether parameters that every rank holds whole differ between ranks.
    Collective."""
    own = torch.zeros(len(engine.units), dtype=torch.int64, device=engine.comm.device)
    for unit in engine.units:
        for bucket in unit.buckets if not unit.reshards else ():
            unit.unshard_wait()
            for info in bucket.params:
                own[unit.index] += checksum_on_device(info.flattened(info.param.data), info.slot)
    largest, smallest = engine.comm.max_(torch.stack([own, ~own])).unbind()
    return largest != ~smallest
