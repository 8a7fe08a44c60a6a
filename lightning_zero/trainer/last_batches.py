"""Refuse, before training, batches that ``zero.vertical_chunks`` does not divide: an epoch's last one would fail
late."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_zero.lightning_api import CombinedLoader, pl
from lightning_zero.settings import ConfigError


def check_last_batches(trainer: pl.Trainer, vertical_chunks: int) -> None:
    """Raise ConfigError if ``vertical_chunks`` does not divide a DataLoader's batch sizes. Skip other kinds of
    loader."""
    loaders: Any = trainer.fit_loop._combined_loader
    if vertical_chunks == 1 or not isinstance(loaders, CombinedLoader):
        return
    limits: Sequence[float | None] = loaders.limits or [None] * len(loaders.flattened)
    for loader, limit in zip(loaders.flattened, limits, strict=False):
        sampler = getattr(loader, "batch_sampler", None) if isinstance(loader, DataLoader) else None
        if not isinstance(sampler, BatchSampler):
            continue
        sizes = [sampler.batch_size]
        with contextlib.suppress(TypeError):  # the sampler has no length
            batches, rest = divmod(len(sampler.sampler), sampler.batch_size)  # type: ignore[arg-type]
            if not sampler.drop_last and (limit is None or limit > batches):
                sizes.append(rest)  # the last batch of an epoch
        if wrong := [size for size in sizes if size % vertical_chunks]:
            raise ConfigError(
                f"zero.vertical_chunks: expected batches that divide by {vertical_chunks}, got a batch of {wrong[0]} "
                "samples from the DataLoader of training. Change its batch size (data.batch_size), set drop_last=True "
                "in it, or change zero.vertical_chunks."
            )
