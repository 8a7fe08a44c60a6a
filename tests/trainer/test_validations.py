"""Signals inside a validation of a fit: it is finished, ranks leave, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.harness import on_ranks
from tests.trainer.toys import Lit, assert_weights, loader, seeded, trainer, weights


class Told:
    """This rank's batches; knows its place, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.batches = list(loader())
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


class InValidation(Lit):
    """A signal comes to one rank in a batch of a validation; ``at``: how many batches of validation were before."""

    def __init__(self, at: int = -1, rank: int = 0, signum: int = int(signal.SIGTERM), **settings: Any) -> None:
        super().__init__(**settings)
        self.at, self.rank, self.signum = at, rank, signum
        self.validated: list[tuple[int, int]] = []
        self.rates_seen: list[float] = []
        self.saw_sigterm = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if (len(self.validated), dist.get_rank()) == (self.at, self.rank):
            os.kill(os.getpid(), self.signum)
        self.validated.append((self.trainer.global_step, batch_idx))
        super().validation_step(batch, batch_idx)

    def on_exception(self, *_: Any) -> None:
        self.saw_sigterm = self.trainer.received_sigterm


def body(
    root: Path, at: int = -1, *, make: Any = InValidation, strategy: str = "zero3", path: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """Fit, until the signal comes to rank 1 if ``at`` says so; ``path``: resume."""
    module = seeded(lambda: make(at, 1, **settings.pop("module", {})))
    of = trainer(strategy, root, **settings)
    if strategy.startswith("zero"):
        of.strategy.saves_on_sigterm = True
    with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
        of.fit(module, Told(), loader(), ckpt_path=path)
    return of, module


@on_ranks(2)
def test_trained_weights_are_saved_in_a_validation_of_their_average(tmp_path: Path) -> None:
    """Averages are in the model's place for that time."""

    def averaged(at: int = -1, **more: Any) -> Any:
        callbacks = [EMAWeightAveraging(decay=0.8)]
        return body(tmp_path, at, val_check_interval=2, callbacks=callbacks, module={"optimizer": "adamw"}, **more)

    (of, whole), (_, cut) = averaged(), averaged(2)
    again, resumed = averaged(path=tmp_path / "hpc_ckpt_1.ckpt")
    assert cut.losses + resumed.losses == whole.losses
    assert cut.evaluated + resumed.evaluated == whole.evaluated
    assert_weights(weights(again), weights(of), tolerance=0)
