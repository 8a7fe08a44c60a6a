"""Loaders and data modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from tests.lightning_table.bench import Bench, Ran
from tests.lightning_table.table import heading
from tests.trainer.toys import Lit, Samples, seeded

feature = heading("Data")


class Nested(Lit):
    """Batches of several loaders, nested or in turn."""

    def loss(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            parts = [super(Nested, self).loss(part) for part in batch.values() if part is not None]
            return torch.stack(parts).mean()
        return super().loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch)


def _combined(mode: str) -> Any:
    def ran(bench: Bench) -> Any:
        data = CombinedLoader({"a": bench.loader(2), "b": bench.loader(1)}, mode)
        return bench.fit(seeded(Nested), data).seen

    return ran


for _mode in ("min_size", "max_size_cycle", "max_size"):
    feature(f'CombinedLoader(mode="{_mode}")')(_combined(_mode))


@feature("nested training loaders, several validation loaders")
def several(bench: Bench) -> Any:
    data = {"a": bench.loader(2), "b": bench.loader(1)}
    return bench.fit(seeded(Nested), data, val=[bench.loader(2), bench.loader(1)]).seen


@feature("LightningDataModule")
def data_module(bench: Bench) -> Any:
    """Losses, metrics, weights; what it saves and finds again"""

    class Data(LightningDataModule):
        def __init__(self, batch_size: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.loaded: Any = None

        def train_dataloader(self) -> Any:
            return bench.loader(self.hparams["batch_size"])

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.trainer.global_step}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    module, of = seeded(Lit), bench.trainer(max_epochs=1)
    of.fit(module, datamodule=Data())
    results = of.test(module, datamodule=Data(1), verbose=False), of.predict(module, datamodule=Data())
    path = Ran(of, module).save()
    data, of = Data(), bench.trainer()
    of.fit(module, datamodule=data, ckpt_path=path)
    again = Data.load_from_checkpoint(path, weights_only=False)
    return results, data.loaded, dict(again.hparams), Ran(of, module).seen


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Samples()[index] for index in range(dist.get_rank(), 12, 2)])


class Uneven(IterableDataset[Any]):
    """Three batches of two on rank 0, five on rank 1; ``most``: not more."""

    def __init__(self, most: int = 5) -> None:
        self.count = 2 * min(most, (3, 5)[dist.get_rank()])

    def __iter__(self) -> Any:
        return iter([Samples()[2 * index + dist.get_rank()] for index in range(self.count)])


@feature("evaluations in which ranks have different numbers of batches")
def uneven_evaluation(bench: Bench) -> Any:
    """Losses, metrics, predictions"""
    data, of, module = DataLoader(Uneven(), batch_size=2), bench.trainer(), seeded(Lit)
    of.fit(module, bench.loader(2), data)
    return Ran(of, module).seen, of.test(module, data, verbose=False), of.predict(module, data)


@feature("training in which ranks have different numbers of batches")
def uneven_training(bench: Bench) -> Any:
    """Losses and weights, beside DDP with the batches that all ranks have"""
    return bench.fit(seeded(Lit), DataLoader(Uneven(3 if bench.row == "ddp" else 5), batch_size=2)).seen


@feature("IterableDataset")
def iterable(bench: Bench) -> Any:
    data = DataLoader(Stream(), batch_size=2)
    return bench.fit(data=data, val=data, use_distributed_sampler=True).seen


@feature("batches of dicts, and of nested lists")
def nested_batches(bench: Bench) -> Any:
    class Dicts(Lit):
        def loss(self, batch: Any) -> Any:
            assert batch["more"][1] == ["text"] * 2
            return super().loss((batch["x"], batch["more"][0]))

    def collate(rows: Any) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        return {"x": x, "more": [y, ["text"] * len(rows)]}

    data = DataLoader(Samples(8), batch_size=2, collate_fn=collate)
    return bench.fit(seeded(Dicts), data, val=data, use_distributed_sampler=True).seen


@feature("a loader with workers")
def workers(bench: Bench) -> Any:
    data = bench.loader()
    data = DataLoader(data.dataset, batch_size=2, sampler=data.sampler, num_workers=1, persistent_workers=True)
    return bench.fit(data=data, val=False).seen


@feature("training_step(dataloader_iter)")
class Takes(Lit):
    def training_step(self, dataloader_iter: Any) -> Any:
        loss = self.loss(next(dataloader_iter)[0])
        self.losses.append(loss.item())
        return loss
