"""Write fingerprints (checksums) of weights and optimizer state into ``fingerprints.csv``, for ``zero.fingerprint``."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.engine.whole.fingerprints import differing_replicas, fingerprints
from lightning_zero.lightning_api import pl

FILE = "fingerprints.csv"
COLUMNS = ("step", "unit", "masters", "optimizer_state")


class Fingerprints:
    """Writes checksums of each unit every ``every`` steps into ``fingerprints.csv`` in the Trainer's default_root_dir.

    Checksums stay on the device until the next ones are due or training ends, so the host does not wait for them.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, every: int) -> None:
        self._trainer, self._engine, self._every = trainer, engine, every
        self._path = Path(trainer.default_root_dir) / FILE
        self._waits: tuple[int, Tensor, Tensor] | None = None  # step, fingerprints, units whose replicas differ
        self._keep(trainer.global_step, differing_replicas(engine))

    def _keep(self, step: int, differ: Tensor) -> None:
        self.write()
        self._waits = step, fingerprints(self._engine), differ

    def step(self, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Run the optimizer step ``step(closure)`` and return its result. If fingerprints are due, compare the ranks'
        copies of whole parameters before the step, and compute fingerprints after it. Collective.

        Raises RuntimeError on all ranks if these copies differed when fingerprints were last due.
        """
        number, differ = self._trainer.global_step + 1, []
        if number % self._every:
            return step(closure)

        def compared() -> Any:
            result = closure()  # the backward: after it a step replaces the parameters
            differ.append(differing_replicas(self._engine))
            return result

        result = step(compared)
        self._keep(number, torch.stack(differ).any(0))
        return result

    def write(self) -> None:
        """Append the last fingerprints to the file. Raise RuntimeError if ranks' copies of parameters differed."""
        if self._waits is None:
            return
        (step, found, differ), self._waits = self._waits, None
        titles = [unit.title for unit in self._engine.units]
        if self._trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            with self._path.open("a", newline="") as file:
                lines = csv.writer(file)
                lines.writerows([COLUMNS] if is_new else [])
                for title, row in zip(titles, found.tolist(), strict=True):
                    lines.writerow([step, title, *(f"{number & 0xFFFFFFFFFFFFFFFF:016x}" for number in row)])
        if wrong := [title for title, flag in zip(titles, differ.tolist(), strict=True) if flag]:
            raise RuntimeError(
                f"zero.fingerprint: before step {step} ranks held different parameters of {', '.join(wrong[:3])}, of "
                "which each holds a replica. A rank has computed or stored wrong numbers: test its GPU and memory, and "
                "code that writes to parameters on some ranks only. Resume from an earlier checkpoint."
            )
