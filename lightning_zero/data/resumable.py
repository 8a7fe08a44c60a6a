"""Load batches for all data modules. A training loader can continue in the middle of an epoch, also with another number
of ranks or batch size. Items that do not fill a step of the new size are left out of that epoch, as ``drop_last``
leaves out the last items of an epoch.

Seed and epoch alone determine the order of items. The ranks take items from this order in turn::

    order    | 7 3 | 9 1 | 4 8 | 0 2 | 6 5 |      batches of one item, two ranks
                          ^ 4 items are done: two ranks continue with 4 8, four ranks with 4 8 0 2
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_zero.device.cuda import gpu_count
from lightning_zero.settings import ConfigError, check_whole_number


class ShuffledFrom(DistributedSampler[Any]):
    """A :class:`DistributedSampler` whose first pass skips the first ``start`` items of its epoch.

    ``len`` counts a whole epoch, because Lightning counts the skipped batches as done.

    Attributes:
        start: number of items of this epoch that all ranks together have trained on.
        left: number of items that this rank gets in the first pass; ``None``: as many as in a whole epoch.
    """

    def __init__(self, data: Dataset[Any], *, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(data, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)
        self.start = 0
        self.left: int | None = None

    def __iter__(self) -> Iterator[int]:
        start, left = self.start, self.left
        self.start, self.left = 0, None
        size = len(self.dataset)  # type: ignore[arg-type]
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(size, generator=generator).tolist()
        wanted = (self.num_samples if left is None else left) * self.num_replicas
        rest = order[start:]
        rest += (order * (1 + wanted // size))[: max(0, wanted - len(rest))]
        return iter(rest[self.rank : wanted : self.num_replicas])


class ResumableLoader(DataLoader[Tensor]):
    """A DataLoader whose position in the epoch, the number of items that all ranks have used, is saved in checkpoints.

    ``sampler``: replaces the sampler of this class. Lightning passes one if ``overfit_batches`` is set; then no
    position is saved.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, trainer: Trainer | None = None, sampler: Any = None, **options: Any
    ) -> None:
        self._trainer = trainer if sampler is None else None
        # Where this run has begun: the epoch, its finished items, and the batches that count for these items.
        self._resumed = -1, 0, 0
        shares = _shares(trainer)
        sampler = sampler or ShuffledFrom(
            dataset,
            num_replicas=shares.get("num_replicas", 1),
            rank=shares.get("rank", 0),
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
        )
        super().__init__(dataset, batch_size, sampler=sampler, **options)

    def _refuse_unequal(self) -> None:
        """Raise ConfigError if the Trainer's training loaders have different lengths, because a shorter loader begins
        again within the epoch, and a checkpoint does not save its position."""
        beside = tree_leaves(getattr(self._trainer, "train_dataloader", None))
        lengths = sorted({len(other) for other in beside if isinstance(other, ResumableLoader)})
        if len(lengths) > 1:
            raise ConfigError(
                f"ckpt_path: expected training loaders of equal length, got loaders of {lengths} batches, whose places "
                "in the epoch a checkpoint does not hold. Load only the weights of the checkpoint, and start a new run."
            )

    @property
    def _items_per_step(self) -> int:
        assert isinstance(self.sampler, ShuffledFrom) and self.batch_size is not None
        return self.batch_size * self.sampler.num_replicas

    def state_dict(self) -> dict[str, int]:
        if self._trainer is None:
            return {}
        loop = self._trainer.fit_loop
        done, epoch = _processed(loop.epoch_loop.batch_progress), _processed(loop.epoch_progress)
        items, steps = self._resumed[1:] if self._resumed[0] == epoch else (0, 0)
        whole = done >= min(len(self), self._trainer.num_training_batches)  # limit_train_batches ends epochs earlier
        return {"items": items + (done - steps) * self._items_per_step, "epoch": epoch, "whole": int(whole)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._trainer is None or not state:
            return
        assert isinstance(self.sampler, ShuffledFrom) and self.batch_size is not None
        if state["whole"]:  # saved at the end of an epoch: start the next one
            self._refuse_unequal()
            self._recount(len(self))
            return
        steps = min(-(-state["items"] // self._items_per_step), len(self) - 1)
        self.sampler.set_epoch(state["epoch"])
        self.sampler.start = state["items"]
        self.sampler.left = self.sampler.num_samples - steps * self.batch_size
        self._resumed = state["epoch"], state["items"], steps
        self._recount(steps)

    def _recount(self, steps: int) -> None:
        """Set Lightning's count of batches done in this epoch to ``steps``, because the batch size may have changed."""
        assert self._trainer is not None
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        current, shift = progress.current, steps - _processed(progress)
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, max(0, getattr(current, name) + shift))


def _shares(trainer: Trainer | None) -> dict[str, Any]:
    """Return arguments for DistributedSampler; {} without a Trainer. Ranks that share a sequence get equal samples."""
    return (trainer.distributed_sampler_kwargs if trainer is not None else None) or {}


def _processed(progress: Any) -> int:
    count: int = progress.current.processed
    return count


class LanguageData(LightningDataModule):
    """Makes loaders of ``train_data`` and ``val_data``, which subclasses set. Test and predict use ``val_data`` too."""

    train_data: Any
    val_data: Any
    collate: Any = None  # default: torch's

    def __init__(self, block_size: int, batch_size: int, num_workers: int) -> None:
        super().__init__()
        self.block_size, self.batch_size, self.num_workers = block_size, batch_size, num_workers
        for key, least in (("block_size", 1), ("batch_size", 1), ("num_workers", 0)):
            check_whole_number(f"data.{key}", getattr(self, key), least)

    @property
    def n_replicas(self) -> int:
        """Return how many batches all ranks take at once; 1 without a Trainer."""
        return int(_shares(self.trainer).get("num_replicas", 1))

    def train_dataloader(self) -> DataLoader[Tensor]:
        options = {"trainer": self.trainer, "drop_last": True, **self._options()}
        return ResumableLoader(self.train_data, self.batch_size, **options)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val_data, batch_size=self.batch_size, **self._options())  # Lightning adds its sampler

    test_dataloader = predict_dataloader = val_dataloader

    def _options(self) -> dict[str, Any]:
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return {**workers, "pin_memory": gpu_count() > 0, "collate_fn": self.collate}
