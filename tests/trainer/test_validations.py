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
from tests.trainer.test_processes import Signalled, requeued, slurm
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


@on_ranks(2)
@pytest.mark.parametrize("at", [0, 2, EPOCH - 1])
def test_signal_in_training_takes_no_batch_and_moves_no_validation(at: int, tmp_path: Path) -> None:
    """Of a loader that knows its place; validations go by the number of all batches, over epochs."""

    class Validated(Signalled):
        def __init__(self, at: int, rank: int) -> None:
            super().__init__(at, rank, signum=int(signal.SIGTERM))
            self.validated_at: list[int] = []

        def on_validation_start(self) -> None:
            self.validated_at.append(self.trainer.global_step)

    settings: dict[str, Any] = {"make": Validated, "check_val_every_n_epoch": None, "val_check_interval": 4}
    (_, whole), (_, cut) = body(tmp_path, **settings), body(tmp_path, at, **settings)
    assert len(cut.losses) == at + 1
    _, resumed = body(tmp_path, path=tmp_path / "hpc_ckpt_1.ckpt", **settings)
    assert cut.losses + resumed.losses == whole.losses
    assert cut.validated_at + resumed.validated_at == whole.validated_at == [4, 8, 12]


@on_ranks(2)
@pytest.mark.parametrize("refuses", [False, True])
def test_slurm_requeues_after_the_validation_or_training_goes_on(refuses: bool, tmp_path: Path) -> None:
    def run(at: int = -1) -> Any:
        module = seeded(lambda: InValidation(at, 1, int(signal.SIGUSR1), optimizer="adamw"))
        callbacks = [EMAWeightAveraging(decay=0.8)]
        of = trainer("zero3", tmp_path, val_check_interval=3, plugins=[environment], callbacks=callbacks)
        with pytest.raises(SystemExit, match="0") if at >= 0 and not refuses else contextlib.nullcontext():
            of.fit(module, Told(), loader())
        return module

    environment = slurm(tmp_path, refuses)
    whole, cut = run(), run(1)
    assert len(list(tmp_path.glob("hpc_ckpt_*"))) == 1
    if refuses:
        assert cut.losses == whole.losses and cut.evaluated == whole.evaluated
    else:
        assert cut.validated == [(3, batch) for batch in range(EPOCH)]
        assert requeued(tmp_path) == ["requeue 77"]
        again = run()
        assert again.validated[0] == (6, 0) and cut.losses + again.losses == whole.losses


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

    def run(at: int = -1, path: Path | None = None, *callbacks: Any) -> Any:
        settings = {"val_check_interval": 2, "callbacks": [EMAWeightAveraging(decay=0.8), *callbacks]}
        of = trainer("zero3", tmp_path, enable_checkpointing=bool(callbacks), **settings)
        of.strategy.saves_on_sigterm = saves
        module = seeded(lambda: InValidation(at, 1, optimizer="adamw"))
        with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
            of.fit(module, Told(), loader(), ckpt_path=path)
        return module

    run(1, None, OnExceptionCheckpoint(tmp_path))
    if saves:
        assert_same_content(tmp_path / "on_exception.ckpt", tmp_path / "hpc_ckpt_1.ckpt")
    again, whole = run(path=tmp_path / "on_exception.ckpt"), run()
    assert again.validated == whole.validated[EPOCH:] and again.evaluated == whole.evaluated[EPOCH:]
    assert again.losses == whole.losses[2:]


def assert_same_content(one: Path, other: Path) -> None:
    dist.barrier()
    (found, shape), (expected, expected_shape) = (tree_flatten(torch.load(path)) for path in (one, other))
    assert shape == expected_shape
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
