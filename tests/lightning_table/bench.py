"""A row's trainers and strategies, and what a run is compared by."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.presets import PRESETS
from tests.trainer import toys
from tests.trainer.toys import Lit, seeded

READ = ("epoch", "global_step", "lr_schedulers", "optimizer_states", "loops", "hyper_parameters", "mine")
SORTED = ("state_dict", "averaging_state")
COUNT = 12  # samples: three batches of two on each of two ranks


class Bench:
    """
    Attributes:
        row: ``ddp``, ``auto`` (one process on the batches of all ranks) or a preset.
        root: an empty folder, of all ranks.
    """

    def __init__(self, row: str, root: Path) -> None:
        self.row, self.root = row, root

    def trainer(self, ddp: dict[str, Any] | None = None, **settings: Any) -> pl.Trainer:
        """A quiet one over all ranks, two epochs long.

        Args:
            ddp: what DDP has to be told for what needs no word here, as ``find_unused_parameters``.
        """
        if self.row == "ddp":
            strategy: Any = pl.strategies.DDPStrategy(**ddp or {})
        else:
            row = PRESETS.get(self.row)
            strategy = self.row if row is None else ZeroStrategy(row.stage, offload=row.offload)
        return toys.trainer(strategy, self.root, **settings)

    def loader(self, batch_size: int = 2, count: int = COUNT) -> DataLoader[Any]:
        """This rank's part of the samples, in their order."""
        if self.row == "auto":
            return toys.whole_loader(batch_size * dist.get_world_size(), count)
        return toys.loader(batch_size, count)

    def fit(self, module: Any = None, data: Any = None, *, val: Any = True, count: int = COUNT, **how: Any) -> Ran:
        """Trains ``module`` (default: :class:`Lit`), evaluating on the same data. ``how``: settings of the Trainer."""
        module = seeded(Lit) if module is None else module
        ckpt_path = how.pop("ckpt_path", None)
        of = self.trainer(**how)
        data = self.loader(count=count) if data is None else data
        val = {True: self.loader(count=count), False: None}[val] if isinstance(val, bool) else val
        of.fit(module, data, val, ckpt_path=ckpt_path)
        return Ran(of, module)

    def logged(self, module: Any = None, **how: Any) -> tuple[Ran, list[dict[str, Any]]]:
        """The same, and what a CSVLogger has written."""
        ran = self.fit(module, logger=CSVLogger(self.root, name="", version=""), log_every_n_steps=1, **how)
        return ran, self.rows()

    def rows(self) -> list[dict[str, Any]]:
        """What a CSVLogger has written."""
        dist.barrier()
        with (self.root / "metrics.csv").open() as file:
            found = list(csv.DictReader(file))
        assert found
        return [{k: round(float(v), 5) if v else v for k, v in row.items()} for row in found]

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

    def contents(self) -> dict[str, Any]:
        """What Lightning and its tools read of each checkpoint, and all its keys, by its name."""
        files = self.files("**/*.ckpt")
        assert files
        return {name: self._content(name) for name in files}

    def _content(self, name: str) -> Any:
        file = torch.load(self.root / name, weights_only=False, map_location="cpu")
        keys = sorted(file.keys() - {"lightning_zero_rng"})  # which ours has too
        found = {key: file[key] for key in READ if key in file}
        return keys, found | {key: dict(sorted(file[key].items())) for key in SORTED if key in file}

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

    def save(self, **how: Any) -> Path:
        """To a file ``a.ckpt``; its path."""
        path = Path(self.trainer.default_root_dir) / "a.ckpt"
        self.trainer.save_checkpoint(path, **how)
        return path

    @property
    def weights(self) -> dict[str, Tensor]:
        """Whole, on all ranks. Copies: DDP's are the parameters, which another fit changes."""
        return {name: value.clone() for name, value in toys.weights(self.trainer).items()}

    @property
    def seen(self) -> dict[str, Any]:
        """Losses, metrics, whole weights, rates and steps, and what the module has noted."""
        noted = ("losses", "evaluated", "rates", "noted")
        return {name: list(getattr(self.module, name, [])) for name in noted} | {
            "metrics": {k: float(v) for k, v in sorted(self.trainer.callback_metrics.items())},
            "weights": self.weights,
            "steps": self.trainer.global_step,
            "epoch": self.trainer.current_epoch,
        }


def variant(base: type = Lit, **members: Any) -> type:
    """A module with other methods."""
    return type(base.__name__, (base,), members)


class Notes(Lit):
    """Keeps in ``noted`` what a subclass wants to be compared."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.noted: list[Any] = []
