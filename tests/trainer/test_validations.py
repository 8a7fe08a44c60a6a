"""Signals inside a validation of a fit: it is finished, ranks leave, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, OnExceptionCheckpoint
from torch.utils._pytree import tree_flatten

from tests.harness import on_ranks
from tests.trainer.test_interruptions import Terminated
from tests.trainer.test_processes import requeued, slurm
from tests.trainer.toys import SAMPLES, Lit, assert_weights, loader, optimizer_states, seeded, trainer, weights

pytestmark = pytest.mark.full

EPOCH = SAMPLES // 4  # batches


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


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_finish_the_validation_and_leave(rank: int, tmp_path: Path) -> None:
    module = seeded(lambda: InValidation(1, rank))
    of = trainer("zero3", tmp_path)
    out = io.StringIO()
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(out):
        of.fit(module, loader(), loader())
    assert stop.value.code == 143 and of.received_sigterm
    assert module.validated == [(EPOCH, batch) for batch in range(EPOCH)]
    assert not list(tmp_path.glob("*.ckpt"))
    assert ("interrupted at step 6: SIGTERM" in out.getvalue()) == (dist.get_rank() == 0)
    of = trainer("zero3", tmp_path)  # these processes can train again
    of.fit(seeded(Lit), loader(), loader())


# Where the signal comes (batches of validation before it), and how validations come.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "inside an epoch": (1, {"val_check_interval": 2}),
    "at the first batch": (0, {"val_check_interval": 2}),
    "at the end of an epoch": (1, {}),
    "at the end of the last epoch": (EPOCH + 2, {}),
    "inside a later epoch": (4 * EPOCH + 3, {"val_check_interval": 2}),
    "over epochs": (2 * EPOCH + 1, {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 3}),
    "accumulating": (1, {"val_check_interval": 2, "accumulate_grad_batches": 2}),
    "a window of the last batches": (1, {"accumulate_grad_batches": 4}),
    "at the last batch": (EPOCH - 1, {}),
}
SCHEDULERS = itertools.cycle(["plateau", "step", "epoch", "plateau by step"])
WITH_SCHEDULERS = [*zip(CASES, SCHEDULERS, strict=False), ("at the end of an epoch", "plateau")]


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
@pytest.mark.parametrize(("case", "scheduler"), WITH_SCHEDULERS)
def test_run_resumed_after_a_validation_is_the_uninterrupted_one(case: str, scheduler: str, tmp_path: Path) -> None:
    """Step for step, validation for validation."""
    at, settings = CASES[case]
    settings = settings | {"module": {"optimizer": "adamw", "scheduler": scheduler}}
    _, whole = body(tmp_path, **settings)
    _, cut = body(tmp_path, at, **settings)
    first = next(i for i in range(at, -1, -1) if whole.validated[i][1] == 0)
    assert cut.validated[: first + EPOCH] == whole.validated[: first + EPOCH]
    assert cut.losses == whole.losses[: len(cut.losses)]
    again, resumed = body(tmp_path, path=tmp_path / "hpc_ckpt_1.ckpt", **settings)
    assert cut.losses + resumed.losses == whole.losses
    assert cut.rates + resumed.rates == whole.rates
    assert cut.validated + resumed.validated == whole.validated
    assert cut.evaluated + resumed.evaluated == whole.evaluated
    assert again.global_step == whole.trainer.global_step and again.current_epoch == whole.trainer.current_epoch
    loops = again.fit_loop.epoch_loop, whole.trainer.fit_loop.epoch_loop
    assert loops[0]._batches_that_stepped == loops[1]._batches_that_stepped
    assert loops[0].batch_progress.state_dict() == loops[1].batch_progress.state_dict()
    assert_weights(weights(again), weights(whole.trainer), tolerance=0)
    torch.testing.assert_close(optimizer_states(again), optimizer_states(whole.trainer), rtol=0, atol=0)


class Validated(Terminated):
    def __init__(self, at: int, rank: int) -> None:
        super().__init__(at, rank)
        self.validated_at: list[int] = []

    def on_validation_start(self) -> None:
        self.validated_at.append(self.trainer.global_step)


@on_ranks(2)
@pytest.mark.parametrize("at", [0, 2, EPOCH - 1])
def test_signal_in_training_takes_no_batch_and_moves_no_validation(at: int, tmp_path: Path) -> None:
    """Of a loader that knows its place; validations go by the number of all batches, over epochs."""
    settings: dict[str, Any] = {"make": Validated, "check_val_every_n_epoch": None, "val_check_interval": 4}
    (_, whole), (_, cut) = body(tmp_path, **settings), body(tmp_path, at, **settings)
    assert len(cut.losses) == at + 1
    _, resumed = body(tmp_path, path=tmp_path / "hpc_ckpt_1.ckpt", **settings)
    assert cut.losses + resumed.losses == whole.losses
    assert cut.validated_at + resumed.validated_at == whole.validated_at == [4, 8, 12]


@on_ranks(2)
def test_slurm_requeues_after_the_validation(tmp_path: Path) -> None:
    module = seeded(lambda: InValidation(1, 1, int(signal.SIGUSR1)))
    of = trainer("zero3", tmp_path, val_check_interval=3, plugins=[slurm(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        of.fit(module, Told(), loader())
    assert module.validated == [(3, batch) for batch in range(EPOCH)]
    assert requeued(tmp_path) == ["requeue 77"] and (tmp_path / "hpc_ckpt_1.ckpt").exists()
    again = seeded(InValidation)
    trainer("zero3", tmp_path, val_check_interval=3, plugins=[slurm(tmp_path)]).fit(again, Told(), loader())
    assert again.validated[0] == (6, 0) and len(again.losses) == 2 * EPOCH - 3


@on_ranks(2)
def test_validation_goes_on_where_slurm_refuses(tmp_path: Path) -> None:
    environment = slurm(tmp_path)
    if dist.get_rank() == 0:
        (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    dist.barrier()
    runs = []
    for at in (-1, 1):
        runs.append(seeded(lambda at=at: InValidation(at, 1, int(signal.SIGUSR1), optimizer="adamw")))
        callbacks = [EMAWeightAveraging(decay=0.8)]
        of = trainer("zero3", tmp_path, val_check_interval=3, plugins=[environment], callbacks=callbacks)
        of.fit(runs[-1], Told(), loader())
    assert runs[1].losses == runs[0].losses and runs[1].evaluated == runs[0].evaluated
    assert len(list(tmp_path.glob("hpc_ckpt_*"))) == 1


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


@on_ranks(2)
def test_ddp_goes_on_from_what_was_saved_in_a_validation(tmp_path: Path) -> None:
    _, whole = body(tmp_path, strategy="ddp", val_check_interval=2)
    _, cut = body(tmp_path, 1, val_check_interval=2)
    _, rest = body(tmp_path, strategy="ddp", val_check_interval=2, path=tmp_path / "hpc_ckpt_1.ckpt")
    torch.testing.assert_close(cut.losses + rest.losses, whole.losses)


@on_ranks(2)
@pytest.mark.parametrize("saves", [True, False])
def test_on_exception_checkpoint_saves_the_same_in_a_validation(saves: bool, tmp_path: Path) -> None:
    """Its file is the newer one, which a run of a job goes on from."""
    callbacks = [EMAWeightAveraging(decay=0.8), OnExceptionCheckpoint(tmp_path)]
    of = trainer("zero3", tmp_path, val_check_interval=2, callbacks=callbacks, enable_checkpointing=True)
    of.strategy.saves_on_sigterm = saves
    with pytest.raises(SystemExit):
        of.fit(seeded(lambda: InValidation(1, 1, optimizer="adamw")), Told(), loader())
    if saves:
        assert_same_content(tmp_path / "on_exception.ckpt", tmp_path / "hpc_ckpt_1.ckpt")
    again = seeded(lambda: InValidation(optimizer="adamw"))
    callbacks = [EMAWeightAveraging(decay=0.8)]
    path = tmp_path / "on_exception.ckpt"
    trainer("zero3", tmp_path, val_check_interval=2, callbacks=callbacks).fit(again, Told(), loader(), ckpt_path=path)
    whole = seeded(lambda: InValidation(optimizer="adamw"))
    callbacks = [EMAWeightAveraging(decay=0.8)]
    trainer("zero3", tmp_path, val_check_interval=2, callbacks=callbacks).fit(whole, Told(), loader())
    assert again.validated == whole.validated[EPOCH:] and again.evaluated == whole.evaluated[EPOCH:]
    assert again.losses == whole.losses[2:]


@on_ranks(2)
def test_on_exception_checkpoint_saves_the_same_between_two_steps(tmp_path: Path) -> None:
    callbacks = [OnExceptionCheckpoint(tmp_path)]
    body(tmp_path, 1, make=Terminated, val_check_interval=2, callbacks=callbacks, enable_checkpointing=True)
    assert_same_content(tmp_path / "on_exception.ckpt", tmp_path / "hpc_ckpt_1.ckpt")


def assert_same_content(one: Path, other: Path) -> None:
    dist.barrier()
    (found, shape), (expected, expected_shape) = (tree_flatten(torch.load(path)) for path in (one, other))
    assert shape == expected_shape
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
