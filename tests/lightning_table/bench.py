"""A row's trainers and strategies, and what a run is compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.presets import PRESETS
from tests.trainer import toys
from tests.trainer.toys import Lit, seeded

COUNT = 12  # samples: three batches of two on each of two ranks


class Bench:
    """
    Attributes:
        row: ``ddp``, ``auto`` (one process on the batches of all ranks) or a preset.
        root: an empty folder, of all ranks.
    """

    def __init__(self, row: str, root: Path) -> None:
        self.row, self.root = row, root

    @property
    def is_ddp(self) -> bool:
        return self.row.startswith("ddp")

    def strategy(self, **ddp: Any) -> Any:
        """A new one. ``ddp``: what DDP has to be told for what needs no word here, as ``find_unused_parameters``."""
        if self.is_ddp:
            return pl.strategies.DDPStrategy(**ddp)
        if self.row == "auto":
            return "auto"
        row = PRESETS[self.row]
        return ZeroStrategy(row.stage, offload=row.offload)

    def trainer(self, ddp: dict[str, Any] | None = None, **settings: Any) -> pl.Trainer:
        """A quiet one over all ranks, two epochs long."""
        return toys.trainer(self.strategy(**ddp or {}), self.root, **settings)

    def loader(self, batch_size: int = 2, count: int = COUNT) -> DataLoader[Any]:
        """This rank's part of the samples, in their order."""
        if self.row == "auto":
            return toys.whole_loader(batch_size * dist.get_world_size(), count)
        return toys.loader(batch_size, count)

    def fit(
        self,
        module: Any = None,
        data: Any = None,
        *,
        count: int = COUNT,
        ckpt_path: Any = None,
        val: Any = True,
        **settings: Any,
    ) -> Ran:
        """Trains ``module`` (default: :class:`Lit`), evaluating on the same data."""
        module = seeded(Lit) if module is None else module
        of = self.trainer(**settings)
        data = self.loader(count=count) if data is None else data
        of.fit(
            module,
            data,
            self.loader(count=count) if val is True else None if val is False else val,
            ckpt_path=ckpt_path,
        )
        return Ran(of, module)

    def relative(self, value: Any) -> Any:
        """Paths below :attr:`root`, in nested lists and dicts, without it."""
        if isinstance(value, dict):
            return {self.relative(key): self.relative(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.relative(item) for item in value]
        return value.replace(str(self.root), "") if isinstance(value, str) else value

    def files(self, pattern: str = "**/*") -> list[str]:
        """Of all ranks: names below :attr:`root`."""
        dist.barrier()
        return sorted(str(path.relative_to(self.root)) for path in self.root.glob(pattern) if not path.is_dir())

    def raised(self, do: Any) -> str:
        """What ``do()`` raises."""
        try:
            do()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


class Ran:
    """A trainer after a run."""

    def __init__(self, of: pl.Trainer, module: Any) -> None:
        self.trainer, self.module = of, module

    @property
    def weights(self) -> dict[str, Tensor]:
        """Whole, on all ranks. Copies: DDP's are the parameters, which another fit changes."""
        return {name: value.clone() for name, value in toys.weights(self.trainer).items()}

    @property
    def seen(self) -> dict[str, Any]:
        """Losses, metrics, whole weights and steps."""
        return {
            "losses": list(getattr(self.module, "losses", [])),
            "metrics": {k: float(v) for k, v in sorted(self.trainer.callback_metrics.items())},
            "weights": self.weights,
            "steps": self.trainer.global_step,
            "epoch": self.trainer.current_epoch,
        }


class Records(Callback):
    """Keeps what ``note(trainer, module)`` gives at the named hooks."""

    def __init__(self, note: Any, *hooks: str) -> None:
        self.found: list[Any] = []
        for hook in hooks:
            setattr(self, hook, self._at(hook, note))

    def _at(self, hook: str, note: Any) -> Any:
        def noted(trainer: Any, module: Any, *_: Any, **__: Any) -> None:
            self.found.append((hook, note(trainer, module)))

        return noted


def checkpoint(path: Path | str) -> dict[str, Any]:
    """A file's content without versions and hyper-parameters' types, as plain values."""
    content: dict[str, Any] = torch.load(path, weights_only=False, map_location="cpu")
    return content
