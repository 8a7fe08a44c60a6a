"""Check what the ranks that share a batch must have in common."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.sequence import open_sequence_group
from lightning_zero.sequence.step import check_alike

KEY = "zero.tensor_parallel"


class SharedBatches:
    """Compares batches and random numbers of the ``size`` adjacent ranks that share a batch. Opening is collective."""

    def __init__(self, comm: Communicator, size: int) -> None:
        self._group = open_sequence_group(dist.group.WORLD, size, comm.device, comm.waits)

    def check_alike(self, batch: Any) -> None:
        """Raise ConfigError on all ranks that should have one batch if theirs differ. Collective."""
        check_alike(batch, self._group, KEY)

    def seed_alike(self) -> None:
        """Give torch's generators of these ranks one seed unless they are in one state: dropout must agree. Collective.

        Without ``seed_everything`` every process starts with a seed of its own."""
        state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        found = self._group.gather_objects((state, torch.initial_seed()), f"random numbers ({KEY})")
        if any(other != found[0] for other in found):
            torch.manual_seed(found[0][1])
