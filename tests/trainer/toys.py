"""Small modules, data and trainers for the Lightning tests, and what a run is compared by.

Everything here runs inside pool workers (see ``tests/harness.py``): every rank calls the same functions.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_zero import ZeroStrategy, presets
from lightning_zero.engine import engine_of
from lightning_zero.engine.whole import state_dicts

ALL_STAGES = ("zero0", "zero1", "zero2", "zero3")

SAMPLES, FEATURES = 24, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Lit(pl.LightningModule):
    """A regression. Its losses are kept in ``losses``; ``optimizer`` and ``scheduler`` name entries of tables below."""

    def __init__(
        self, width: int = 8, depth: int = 2, optimizer: str = "sgd", scheduler: str = "none", lr: float = 0.05
    ):
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.rates: list[float] = []
        self.first = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates += [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]

    def _evaluate(self, batch: Any) -> None:
        loss = self.loss(batch)
        self.evaluated.append(loss.item())
        self.log("val", loss, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.hparams["optimizer"]](self.parameters(), self.hparams["lr"])
        scheduler = SCHEDULERS[self.hparams["scheduler"]](optimizer)
        return optimizer if scheduler is None else {"optimizer": optimizer, "lr_scheduler": scheduler}


class Odd(Lit):
    """Tied weights, a frozen part, a buffer, a parameter that is not row-major, one number, an empty parameter, and two
    param groups."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"width": 16, "optimizer": "adamw", "scheduler": "step", **kwargs})
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[1].down.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("seen", torch.arange(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * self.scale + self.turned.sum() * 0.1 + self.empty.sum()
        if self.training:
            self.seen += 1
        return out

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": trained[:3], "lr": 0.01}, {"params": trained[3:], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]


def odd() -> Odd:
    return seeded(Odd)


def other_weights() -> Odd:
    """Give what is loaded into: equal to nothing that was saved."""
    return seeded(Odd, seed=11)


class Frozen(Odd):
    """Trains its head alone, as adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class ByHand(Lit):
    """Manual optimization: one backward, and a step of each optimizer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()


class Dropping(Lit):
    """Draws in each batch, at random."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.drop = nn.Dropout(0.5)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.drop(batch[0]), batch[1]))


class WithBatchNorm(Lit):
    """Buffers, of which one is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Fails(Lit):
    """Raises in the batch ``at`` of each epoch, on ``ranks``."""

    def __init__(self, at: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.at, self.ranks = at, ranks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.at and dist.get_rank() in self.ranks:
            raise KeyError("planned")
        return loss


class At(Callback):
    """Does something in a hook, each time the hook is called for the steps that are named."""

    def __init__(self, hook: str, acts: dict[int, Callable[[pl.Trainer], Any]]) -> None:
        self.acts = dict(acts)
        setattr(self, hook, self._act)

    def _act(self, of: pl.Trainer, *_: Any, **__: Any) -> None:
        if (act := self.acts.pop(of.global_step, None)) is not None:
            act(of)


def saves_at(path: Path, step: int = 2) -> At:
    return At("on_train_batch_end", {step: lambda of: of.save_checkpoint(path)})


OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr / 5),
}


def plateau(optimizer: torch.optim.Optimizer) -> lr_scheduler.ReduceLROnPlateau:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda _: None,
    "epoch": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "step": lambda o: {"scheduler": lr_scheduler.StepLR(o, 2, 0.5), "interval": "step"},
    "onecycle": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20), "interval": "step"},
    "plateau": lambda o: {"scheduler": plateau(o), "monitor": "val"},
    "plateau by step": lambda o: {"scheduler": plateau(o), "monitor": "loss_step", "interval": "step", "strict": False},
}


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The same regression data on every rank."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def loader(batch_size: int = 2, count: int = SAMPLES) -> DataLoader[Any]:
    """This rank's part of the samples, always in the same order."""
    data = Samples(count)
    return DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data, shuffle=False))


def whole_loader(batch_size: int, count: int = SAMPLES) -> DataLoader[Any]:
    """For one process what ``loader(batch_size // ranks)`` is for all ranks together: batches of the same samples."""
    return DataLoader(Samples(count), batch_size=batch_size)


class Told:
    """Batches that know their place, as torchdata's StatefulDataLoader does."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)
        self.first = self.given = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for i, batch in enumerate(self.batches[first:], first):
            self.given = i + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.first = self.given % len(self.batches)


def seeded(make: Callable[[], Any], seed: int = 3) -> Any:
    pl.seed_everything(seed, verbose=False)
    return make()


def strategy_of(row: str, folder: Path | None = None, **settings: Any) -> ZeroStrategy:
    """Give the strategy of a preset, or of a stage and a row of offload (``zero2 optimizer_cpu``).

    Args:
        folder: files of parameters and optimizer states are in ``disk`` below it.
    """
    preset = presets.PRESETS.get(row)
    stage, offload = (preset.stage, preset.offload) if preset is not None else row.split()
    settings = {"offload": {"name": offload}, **settings}
    if "nvme" in offload:
        assert folder is not None
        (folder / "disk").mkdir(exist_ok=True)
        settings["offload"] |= {"nvme_path": str(folder / "disk")}
    return ZeroStrategy(stage, **settings)


def sharded(row: str = "zero3", folder: Path | None = None, **settings: Any) -> ZeroStrategy:
    """Give the same, which saves folders."""
    return strategy_of(row, folder, **{"checkpoint": "sharded", **settings})


def trainer(strategy: Any, root: Path | str, **settings: Any) -> pl.Trainer:
    """A quiet Trainer over all ranks of the pool."""
    _quiet()
    defaults = {
        "accelerator": "cpu",
        "devices": 1 if strategy == "auto" else dist.get_world_size(),
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "default_root_dir": str(root),
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **settings})


def _quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def weights(of: pl.Trainer) -> dict[str, Tensor]:
    """On all ranks: the module's full state dict, on all ranks."""
    engine = engine_of(of.lightning_module)
    return of.strategy.broadcast(of.strategy.lightning_module_state_dict() if engine is None else engine.state_dict())


def loaded_weights(path: Path | str, strategy: Any, root: Path, module: Any = None) -> dict[str, Tensor]:
    """Whole weights in an evaluation that has loaded ``path`` into ``module`` (default: :func:`other_weights`)."""
    of = trainer(strategy, root)
    of.test(other_weights() if module is None else module, loader(), ckpt_path=path, verbose=False)
    return weights(of)


def optimizer_states(of: pl.Trainer) -> list[dict[str, Any]]:
    """On all ranks: every optimizer's state dict, on all ranks."""
    engine = engine_of(of.lightning_module)
    state_of = of.strategy.optimizer_state if engine is None else partial(state_dicts.optimizer_state, engine)
    return of.strategy.broadcast([state_of(optimizer) for optimizer in of.optimizers])


@dataclass
class Run:
    """What a run is compared by."""

    trainer: pl.Trainer
    module: Any
    weights: dict[str, Tensor]
    losses: list[float]
    metrics: dict[str, float] = field(default_factory=dict)


def fit(
    strategy: Any, root: Path | str, module: Any = None, *, batch_size: int = 2, count: int = SAMPLES, **settings: Any
) -> Run:
    """``Trainer.fit`` of ``module`` (default: :class:`Lit`), with validation."""
    module = seeded(Lit) if module is None else module
    ckpt_path = settings.pop("ckpt_path", None)
    of = trainer(strategy, root, **settings)
    of.fit(module, loader(batch_size, count), loader(batch_size, count), ckpt_path=ckpt_path)
    return record(of, module)


def record(of: pl.Trainer, module: Any) -> Run:
    metrics = {k: float(v) for k, v in of.callback_metrics.items()}
    return Run(of, module, weights(of), list(getattr(module, "losses", [])), metrics)


def assert_same(found: Run, expected: Run, *, tolerance: float = 1e-5, what: str = "") -> None:
    """Equal losses, metrics and weights."""
    __tracebackhide__ = True
    close = {"rtol": tolerance, "atol": tolerance}
    assert len(found.losses) == len(expected.losses), what
    torch.testing.assert_close(found.losses, expected.losses, msg=lambda text: f"{what} losses: {text}", **close)
    assert_weights(found.weights, expected.weights, tolerance=tolerance, what=what)
    assert found.metrics.keys() == expected.metrics.keys(), what
    torch.testing.assert_close(found.metrics, expected.metrics, msg=lambda text: f"{what} metrics: {text}", **close)


def assert_weights(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, tolerance: float = 1e-5, what: str = ""
) -> None:
    assert list(found) == list(expected), what
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, f"{what} {name}"
        says = lambda text, name=name: f"{what} {name}: {text}"  # noqa: E731
        torch.testing.assert_close(found[name].double(), value.double(), rtol=tolerance, atol=tolerance, msg=says)


def assert_goes_on(found: Run, whole: Run, what: str = "") -> None:
    """A resumed run is the rest of the one that was not interrupted, to the bit."""
    assert 0 < len(found.losses) < len(whole.losses), what
    assert found.losses == whole.losses[-len(found.losses) :], what
    assert_weights(found.weights, whole.weights, tolerance=0, what=what)
    assert found.trainer.global_step == whole.trainer.global_step, what


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, with dtypes and strides, in nested dicts and lists."""
    if isinstance(a, Tensor):
        return bool(torch.equal(a, b)) and a.dtype == b.dtype and a.stride() == b.stride()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def on_rank_0(context: Any) -> Any:
    """``context`` on rank 0, and nothing elsewhere: as for a warning that rank 0 alone gives."""
    return context if dist.get_rank() == 0 else contextlib.nullcontext()


def once(act: Callable[[], Any]) -> None:
    """Rank 0 acts, and the others wait for it."""
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def files(folder: Path, pattern: str = "*") -> list[str]:
    """Sorted names of what is in a folder: when all ranks are here, and before one goes on."""
    dist.barrier()
    found = sorted(path.name for path in folder.glob(pattern))
    dist.barrier()
    return found
