"""Signals inside a validation of a fit: ranks leave between its batches, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset

from tests.harness import on_ranks
from tests.trainer.test_interruptions import Terminated
from tests.trainer.test_processes import requeued, slurm
from tests.trainer.toys import (
    SAMPLES,
    STAGES,
    Lit,
    Samples,
    assert_weights,
    loader,
    optimizer_states,
    seeded,
    some_of,
    trainer,
    weights,
)

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


def saving(root: Path | str, strategy: str = "zero3", **settings: Any) -> Any:
    of = trainer(strategy, root, **settings)
    if strategy.startswith("zero"):
        of.strategy.saves_on_sigterm = True
    return of


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_leave_between_two_batches(rank: int, tmp_path: Path) -> None:
    module = seeded(lambda: InValidation(1, rank))
    of = trainer("zero3", tmp_path)
    out = io.StringIO()
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(out):
        of.fit(module, loader(), loader())
    assert stop.value.code == 143 and of.received_sigterm
    assert module.validated == [(EPOCH, 0), (EPOCH, 1)]
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


@on_ranks(2)
@pytest.mark.parametrize("scheduler", some_of(["plateau", "step", "epoch", "plateau by step"], "plateau"))
@pytest.mark.parametrize("case", some_of(CASES, "inside an epoch", "at the end of an epoch", "over epochs"))
def test_a_resumed_run_is_the_uninterrupted_one(case: str, scheduler: str, tmp_path: Path) -> None:
    """Step for step, validation for validation; the validation that was left is done anew."""
    at, settings = CASES[case]

    def body(root: Path, at: int = -1, **more: Any) -> tuple[Any, Any]:
        of = saving(root, **settings)
        module = seeded(lambda: InValidation(at, 1, optimizer="adamw", scheduler=scheduler))
        left = pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext()
        with left:
            of.fit(module, Told(), loader(), **more)
        return of, module

    _, whole = body(tmp_path)
    _, cut = body(tmp_path, at)
    first = next(i for i in range(at, -1, -1) if whole.validated[i][1] == 0)
    finishes = scheduler == "plateau by step"  # it goes by a metric of training
    assert cut.validated == whole.validated[: first + EPOCH if finishes else at + 1]
    assert cut.losses == whole.losses[: len(cut.losses)]
    again, resumed = body(tmp_path, ckpt_path=tmp_path / "hpc_ckpt_1.ckpt")
    assert cut.losses + resumed.losses == whole.losses
    assert cut.rates + resumed.rates == whole.rates
    kept = first + EPOCH if finishes else first
    assert cut.validated[:kept] + resumed.validated == whole.validated
    assert cut.evaluated[:kept] + resumed.evaluated == whole.evaluated
    assert again.global_step == whole.trainer.global_step and again.current_epoch == whole.trainer.current_epoch
    loops = again.fit_loop.epoch_loop, whole.trainer.fit_loop.epoch_loop
    assert loops[0]._batches_that_stepped == loops[1]._batches_that_stepped
    assert loops[0].batch_progress.state_dict() == loops[1].batch_progress.state_dict()
    assert finishes or loops[0].val_loop.batch_progress.state_dict() == loops[1].val_loop.batch_progress.state_dict()
    assert_weights(weights(again), weights(whole.trainer), tolerance=0)
    torch.testing.assert_close(optimizer_states(again), optimizer_states(whole.trainer), rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("at", [0, 2, EPOCH - 1])
def test_a_signal_in_training_takes_no_batch_from_a_loader_that_knows_its_place(at: int, tmp_path: Path) -> None:
    def body(at: int, **more: Any) -> Any:
        module = seeded(lambda: Terminated(at, 1))
        with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
            saving(tmp_path, limit_val_batches=0).fit(module, Told(), **more)
        return module

    whole, cut = body(-1), body(at)
    assert len(cut.losses) == at + 1
    resumed = body(-1, ckpt_path=tmp_path / "hpc_ckpt_1.ckpt")
    assert cut.losses + resumed.losses == whole.losses


@on_ranks(2)
def test_validations_every_so_many_batches_stay_where_they_were(tmp_path: Path) -> None:
    """Over epochs, they go by the number of all batches."""

    def body(at: int, **more: Any) -> Any:
        of = saving(tmp_path, check_val_every_n_epoch=None, val_check_interval=4)
        module = seeded(lambda: Validated(at, 1))
        with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
            of.fit(module, Told(), loader(), **more)
        return module

    whole, cut = body(-1), body(1)
    resumed = body(-1, ckpt_path=tmp_path / "hpc_ckpt_1.ckpt")
    assert cut.validated_at == [] and resumed.validated_at == whole.validated_at == [4, 8, 12]


class Validated(Terminated):
    def __init__(self, at: int, rank: int) -> None:
        super().__init__(at, rank)
        self.validated_at: list[int] = []

    def on_validation_start(self) -> None:
        self.validated_at.append(self.trainer.global_step)


@on_ranks(2)
def test_slurm_requeues_out_of_a_validation(tmp_path: Path) -> None:
    module = seeded(lambda: InValidation(1, 1, int(signal.SIGUSR1)))
    of = trainer("zero3", tmp_path, val_check_interval=3, plugins=[slurm(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        of.fit(module, Told(), loader())
    assert module.validated == [(3, 0), (3, 1)]
    assert requeued(tmp_path) == ["requeue 77"] and (tmp_path / "hpc_ckpt_1.ckpt").exists()
    again = seeded(InValidation)
    trainer("zero3", tmp_path, val_check_interval=3, plugins=[slurm(tmp_path)]).fit(again, Told(), loader())
    assert again.validated[0] == (3, 0) and len(again.losses) == 2 * EPOCH - 3


@on_ranks(2)
def test_where_slurm_refuses_the_validation_goes_on(tmp_path: Path) -> None:
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
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_saved_is_what_is_trained_and_not_its_average(stage: str, tmp_path: Path) -> None:
    """A validation runs on averages, which are in the model's place for that time."""

    def body(at: int, **more: Any) -> Any:
        of = saving(tmp_path, stage, val_check_interval=2, callbacks=[EMAWeightAveraging(decay=0.8)])
        module = seeded(lambda: InValidation(at, 1, optimizer="adamw"))
        with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
            of.fit(module, Told(), loader(), **more)
        return of, module

    (of, whole), (_, cut) = body(-1), body(2)
    again, resumed = body(-1, ckpt_path=tmp_path / "hpc_ckpt_1.ckpt")
    assert cut.losses + resumed.losses == whole.losses
    assert resumed.evaluated == whole.evaluated
    assert_weights(weights(again), weights(of), tolerance=0)


@on_ranks(2)
def test_ddp_goes_on_from_what_was_saved_in_a_validation(tmp_path: Path) -> None:
    losses = []
    for strategy, at, path in (("ddp", -1, None), ("zero3", 1, None), ("ddp", -1, tmp_path / "hpc_ckpt_1.ckpt")):
        module = seeded(lambda at=at: InValidation(at, 1))
        with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
            saving(tmp_path, strategy, val_check_interval=2).fit(module, Told(), loader(), ckpt_path=path)
        losses.append(module.losses)
    torch.testing.assert_close(losses[1] + losses[2], losses[0])


@on_ranks(2)
def test_the_sanity_check_is_left_too_and_saves_nothing(tmp_path: Path) -> None:
    module = seeded(lambda: InValidation(0, 1))
    of = saving(tmp_path, num_sanity_val_steps=3)
    with pytest.raises(SystemExit) as stop:
        of.fit(module, loader(), loader())
    assert stop.value.code == 143 and of.received_sigterm
    assert module.validated == [(0, 0)] and not list(tmp_path.glob("*.ckpt"))


@on_ranks(2)
def test_a_window_is_not_lost(tmp_path: Path) -> None:
    """The validation lies inside of it."""

    def body(at: int, **more: Any) -> Any:
        of = saving(tmp_path, val_check_interval=3, accumulate_grad_batches=2)
        module = seeded(lambda: InValidation(at, 1))
        with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
            of.fit(module, Told(), loader(), **more)
        return module

    whole, cut = body(-1), body(1)
    assert len(cut.losses) == 4 and len(cut.validated) == EPOCH
    resumed = body(-1, ckpt_path=tmp_path / "hpc_ckpt_1.ckpt")
    assert cut.losses + resumed.losses == whole.losses


class Stops(Callback):
    """A stop is asked for in the first validation."""

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = True


class StopsForAMoment(Callback):
    """On one rank a stop is asked for, inside of validations only."""

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = dist.get_rank() == 0

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = False


# What a validation ends in that no checkpoint holds.
ONCE_ONLY: dict[str, Callable[[Path], Any]] = {
    "a file by a metric of training": lambda root: ModelCheckpoint(root, monitor="loss", save_on_train_epoch_end=False),
    "a stop by a metric of training": lambda root: EarlyStopping(
        "loss_step", patience=99, check_on_train_epoch_end=False
    ),
    "a save": lambda root: ModelCheckpoint(root, monitor="val", every_n_train_steps=3, filename="{step}"),
    "a stop": lambda root: Stops(),
    "a stop on one rank": lambda root: StopsForAMoment(),
}


@on_ranks(2)
@pytest.mark.parametrize("case", ONCE_ONLY)
def test_a_validation_that_cannot_be_done_anew_is_finished(case: str, tmp_path: Path) -> None:
    def body(root: Path, at: int, **more: Any) -> Any:
        callback = ONCE_ONLY[case](root / "kept")
        saves = isinstance(callback, ModelCheckpoint)
        of = saving(root, val_check_interval=3, callbacks=[callback], enable_checkpointing=saves)
        module = seeded(lambda: InValidation(at, 1))
        with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
            of.fit(module, Told(), loader(), **more)
        return module

    whole, cut = body(tmp_path / "whole", -1), body(tmp_path, 1)
    assert cut.validated == [(3, batch) for batch in range(EPOCH)]
    if case != "a stop":  # which a run that goes on does not know of
        resumed = body(tmp_path, -1, ckpt_path=tmp_path / "hpc_ckpt_1.ckpt")
        assert cut.losses + resumed.losses == whole.losses
        assert cut.validated + resumed.validated == whole.validated
    kept = [sorted(path.name for path in (root / "kept").glob("*")) for root in (tmp_path / "whole", tmp_path)]
    assert kept[0] == kept[1]


@on_ranks(2)
def test_a_validation_that_comes_by_the_clock_is_finished(tmp_path: Path) -> None:
    class Late(InValidation):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.trainer.global_step == 2:  # the first validation is due
                self.trainer._last_val_time = float("-inf")

    module = seeded(lambda: Late(1, 1))
    with pytest.raises(SystemExit):
        saving(tmp_path, val_check_interval="00:01:00:00").fit(module, Told(), loader())
    assert module.validated == [(3, batch) for batch in range(EPOCH)]


@on_ranks(2)
@pytest.mark.parametrize("saves", [True, False])
def test_a_callback_that_saves_on_exceptions_saves_the_same(saves: bool, tmp_path: Path) -> None:
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
    assert again.validated == whole.validated and again.evaluated == whole.evaluated
    assert again.losses == whole.losses[2:]


@on_ranks(2)
def test_so_it_does_between_two_steps(tmp_path: Path) -> None:
    callbacks = [OnExceptionCheckpoint(tmp_path)]
    of = saving(tmp_path, val_check_interval=2, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(SystemExit):
        of.fit(seeded(lambda: Terminated(1, 1)), Told(), loader())
    assert_same_content(tmp_path / "on_exception.ckpt", tmp_path / "hpc_ckpt_1.ckpt")


def assert_same_content(one: Path, other: Path) -> None:
    dist.barrier()
    (found, shape), (expected, expected_shape) = (tree_flatten(torch.load(path)) for path in (one, other))
    assert shape == expected_shape
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


@on_ranks(2)
@pytest.mark.parametrize("n", [1, 2])
def test_loaders_are_asked_for_as_often_as_elsewhere(n: int, tmp_path: Path) -> None:
    """Where they are reloaded, after a sanity check too."""

    class Counting(Lit):
        asked = 0

        def train_dataloader(self) -> Any:
            return loader()

        def val_dataloader(self) -> Any:
            self.asked += 1
            return loader()

    settings: dict[str, Any] = {"num_sanity_val_steps": 1, "reload_dataloaders_every_n_epochs": 1}
    counts = []
    for strategy in ("ddp", "zero3"):
        module = seeded(Counting)
        trainer(strategy, tmp_path, check_val_every_n_epoch=n, **settings).fit(module)
        counts.append(module.asked)
    assert counts[0] == counts[1]


class Endless(IterableDataset[Any]):
    """As many samples as there are, without saying how many."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        data = Samples()
        yield from (data[i] for i in range(2 * self.batches))


UNEVEN: dict[str, Callable[[int], Any]] = {  # validation loaders by rank
    "sized": lambda rank: DataLoader(Samples(4 + 6 * rank), batch_size=2),
    "not sized": lambda rank: DataLoader(Endless(2 + 3 * rank), batch_size=2),
    "several": lambda rank: [DataLoader(Samples(4 + 6 * (rank == i)), batch_size=2) for i in range(2)],
    "some empty": lambda rank: [DataLoader(Samples(n), batch_size=2) for n in (4, 6 * rank, 4, 2 * rank)],
    "the first empty": lambda rank: [DataLoader(Samples(n), batch_size=2) for n in (10 * rank, 4)],
}


class Apart(InValidation):
    """Each rank by itself."""

    def __init__(self, at: int, rank: int, logs: bool) -> None:
        super().__init__(at, rank)
        self.logs = logs
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def _evaluate(self, batch: Any) -> None:
        if self.logs:
            super()._evaluate(batch)
        else:
            self.loss(batch)


@on_ranks(2)
@pytest.mark.parametrize("case", UNEVEN)
@pytest.mark.parametrize("at", [-1, 0, 3])
def test_ranks_with_more_and_with_fewer_batches(at: int, case: str, tmp_path: Path) -> None:
    """Stages at which a rank can compute by itself; the rank with more batches is the one that gets the signal."""
    # Means over ranks take a batch of each loader on each rank, as under DDP.
    module = seeded(lambda: Apart(at, 1, logs="empty" not in case))
    of = saving(tmp_path, "zero1", max_epochs=1)
    with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
        of.fit(module, Told(), UNEVEN[case](dist.get_rank()))
    rank = dist.get_rank()
    everything = {"several": 7, "some empty": 4 + 4 * rank, "the first empty": 2 + 5 * rank}.get(case, 2 + 3 * rank)
    until_fourth = {"several": 7 - 3 * rank, "some empty": 2 + 2 * rank, "the first empty": 4 * rank}
    assert len(module.validated) == {-1: everything, 0: rank if case == "the first empty" else 1}.get(
        at, until_fourth.get(case, min(everything, 4))
    )


@on_ranks(2)
def test_a_checkpoint_of_the_validation_that_was_done_anew_resumes(tmp_path: Path) -> None:
    def body(at: int, seed: int = 3, **more: Any) -> Any:
        best = ModelCheckpoint(tmp_path, filename="{step}", monitor="val", save_top_k=-1)
        of = saving(tmp_path, val_check_interval=3, enable_checkpointing=True, callbacks=[best])
        module = seeded(lambda: InValidation(at, 1), seed)
        with pytest.raises(SystemExit) if at >= 0 else contextlib.nullcontext():
            of.fit(module, Told(), loader(), **more)
        return module

    whole, _ = body(-1), body(1)
    body(-1, ckpt_path=tmp_path / "hpc_ckpt_1.ckpt")
    third = body(-1, seed=9, ckpt_path=tmp_path / "step=3-v1.ckpt")
    assert third.losses == whole.losses[3:]
    assert third.validated == whole.validated[EPOCH:]
