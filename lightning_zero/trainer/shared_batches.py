"""Check what the ranks that share a batch must have in common."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zero.checkpoint.rng import Generators
from lightning_zero.comm.sequence import SequenceGroup
from lightning_zero.sequence.step import check_alike
from lightning_zero.settings import ConfigError

KEY = "zero.tensor_parallel"
_SUMS = 8  # of each gradient: of every 8th element


def seed_alike(group: SequenceGroup) -> None:
    """Give the random generators of ``group`` one seed unless they are in one state: dropout, and layers that a step
    chooses, must agree. Collective. Without ``seed_everything`` every process starts with a seed of its own."""
    states = [zlib.crc32(state.numpy().tobytes()) for state in Generators.now(group.device).as_tensors().values()]
    found = group.gather_objects((states, torch.initial_seed()), "random numbers of ranks that share a batch")
    if any(other != found[0] for other in found):
        Generators.seeded(found[0][1], group.device).restore(group.device)


class SharedBatches:
    """Compares batches and gradients of ``group``, whose ranks share a batch."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self._sums: dict[str, Tensor] = {}  # of gradients of this backward, and of their squares, by parameter
        self._rounding = 0.0  # of the coarsest dtype of these gradients
        self._backwards = 1  # with the present one
        self._checked: set[str] = set()  # gradients that were not zero on some rank

    def check_alike(self, batch: Any) -> None:
        """Raise ConfigError if ranks that should share a batch have different ones. Collective."""
        check_alike(batch, self.group, KEY)

    def note(self, name: str, grad: Tensor) -> None:
        """Take a gradient of a parameter that every rank has whole, for :meth:`check_grads`."""
        if name not in self._checked:
            self._rounding = max(self._rounding, torch.finfo(grad.dtype).eps)
            flat = grad.detach().float().flatten()
            sums = F.pad(flat, (0, -len(flat) % _SUMS)).view(-1, _SUMS).sum(0)
            self._sums[name] = self._sums.get(name, 0.0) + torch.cat([sums, flat.square().sum(0, keepdim=True)])

    def check_grads(self) -> None:
        """Raise ConfigError on all ranks if gradients of parameters should be equal on ranks that share a batch, and
        are not: each would train a sum of which it has a part. Collective. Compared are the first gradients that are
        not zero (behind a layer that begins with zeros all are), and all in backwards 2, 4, 8, ... They must agree to
        half the digits of their dtype."""
        own, self._sums = {name: total.tolist() for name, total in self._sums.items()}, {}
        found = self.group.gather_objects((own, self._rounding), f"first gradients ({KEY})")
        rounding = max(eps for _, eps in found)
        table = [{name: torch.tensor(total) for name, total in sums.items()} for sums, _ in found]
        self._checked |= {name for sums in table for name, total in sums.items() if total.any()}
        self._backwards += 1
        if not self._backwards & (self._backwards - 1):
            self._checked.clear()
        first = table[0]
        floor = 2 * rounding * sum(float(total[_SUMS]) for total in first.values()) ** 0.5

        def apart(name: str, other: Tensor) -> bool:
            norm = max(float(first[name][_SUMS]), float(other[_SUMS])) ** 0.5
            return bool((first[name] - other)[:_SUMS].norm() > rounding**0.5 * norm + floor)

        differ = [name for name in first if any(apart(name, other[name]) for other in table if name in other)]
        if differ:
            raise ConfigError(
                f"{KEY}: expected one gradient of {differ[0]} (and {len(differ) - 1} others) on ranks that share a "
                "batch, got another on each: it is not split, but used for a rank's own heads or features. Give its "
                "module the style replicated_with_grad_allreduce in zero.tensor_plan."
            )
