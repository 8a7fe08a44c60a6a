"""Training data that goes on in the middle of an epoch: a requeued job sees the batches that it has not seen yet.

The order of an epoch is a function of the seed and the epoch alone, so that a position in it is two numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler


class EpochSampler(DistributedSampler[int]):
    """Torch's sampler, whose first pass over one epoch may begin later."""

    _begin: tuple[int, int] | None = None  # epoch, items of this rank

    def begin_at(self, epoch: int, items: int) -> None:
        """Leave out the first ``items`` of all ranks in the next pass over ``epoch``."""
        own = items // self.num_replicas
        self._begin = (epoch, own) if own < len(self) else None
        self.set_epoch(epoch)  # workers fetch ahead before Lightning says which epoch it is

    def __iter__(self) -> Iterator[int]:
        epoch, skipped = self._begin or (self.epoch, 0)
        self._begin = None
        yield from islice(super().__iter__(), skipped if epoch == self.epoch else 0, None)


class ResumableLoader(DataLoader[Tensor]):
    """A loader of training data with the ``state_dict`` that Lightning saves and loads.

    Args:
        trained: batches of this epoch that this rank has trained on. It is not the number of batches that were
            fetched: a checkpoint between two steps may come with the next batch in hand.
    """

    def __init__(self, *args: Any, trained: Callable[[], int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trained = trained

    def state_dict(self) -> dict[str, int]:
        """Epoch, and items of it that all ranks together have trained on."""
        if not isinstance(self.sampler, EpochSampler) or self.trained is None or self.batch_size is None:
            return {}
        items = self.trained() * self.batch_size * self.sampler.num_replicas
        return {"epoch": self.sampler.epoch, "items": items}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin where the checkpoint was saved, also on another number of ranks."""
        if state and isinstance(self.sampler, EpochSampler):
            self.sampler.begin_at(state["epoch"], state["items"])


def shuffled(dataset: Any, world_size: int, rank: int) -> EpochSampler:
    """The order that Lightning would give to a loader that shuffles."""
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    return EpochSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=seed)
