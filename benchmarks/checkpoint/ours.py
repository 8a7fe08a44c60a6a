"""The strategy, as users have it: a Trainer saves while it trains."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.bench import batch
from benchmarks.checkpoint.sides import Side
from benchmarks.sides.side import loss_of, make_adamw
from lightning_zero.engine.units.master_storage import ResidentStorage, opened


class Ours(Side):
    """Stage 3.

    Args:
        checkpoint: a row of ``zero/checkpoint``, or its settings.
    """

    def __init__(self, model: nn.Module, checkpoint: Any) -> None:
        super().__init__()
        from lightning_zero import ZeroStrategy

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        self.background = isinstance(checkpoint, dict) and bool(checkpoint.get("background"))
        self._module = _Module(model, self.losses)
        self._strategy = ZeroStrategy("zero3", checkpoint=checkpoint)
        self._trainer: Any = None
        self._count_waits()

    def _count_waits(self) -> None:
        take_back = ResidentStorage._take_back

        def timed(storage: ResidentStorage) -> None:
            started = time.perf_counter()
            take_back(storage)
            self.waited_s += time.perf_counter() - started

        ResidentStorage._take_back = timed  # type: ignore[method-assign]  # of this process, which has one side

    def run(self, program: Iterator[None]) -> None:
        self._trainer = pl.Trainer(
            strategy=self._strategy,
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            callbacks=[_Steps(program)],
        )
        self._trainer.fit(self._module, DataLoader(_Batches(), batch_size=None))

    def save(self, path: str) -> None:
        self._trainer.save_checkpoint(path)

    def finish(self) -> None:
        self._strategy._checkpoints.wait_for_writes()

    def load(self, path: str) -> None:
        checkpoint = self._strategy.load_checkpoint(path)
        self._strategy.load_model_state_dict(checkpoint)
        self._strategy.load_optimizer_state_dict(checkpoint)

    def values(self) -> Iterable[Tensor]:
        engine = self._strategy.engine
        engine.passes.wait_for_all()
        for bucket in engine.buckets:
            with opened(bucket.storage) as master:
                yield master
                for sharded in engine.optimizers:
                    yield from sharded.state_tensors(bucket)


class _Module(pl.LightningModule):
    def __init__(self, model: nn.Module, losses: list[float]) -> None:
        super().__init__()
        self.model = model
        self._losses = losses

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.model, tokens, False)
        self._losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_adamw(self)


class _Steps(pl.Callback):
    """Lets a program run between the steps that it asks for."""

    def __init__(self, program: Iterator[None]) -> None:
        self._program = program

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        next(self._program)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        try:
            next(self._program)
        except StopIteration:
            trainer.should_stop = True


class _Batches(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        number = 0
        while True:
            yield batch(dist.get_rank(), dist.get_world_size(), number, 1)
            number += 1
