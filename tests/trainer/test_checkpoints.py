"""Checkpoints are ordinary Lightning files: DDP's load in ours and ours in DDP's, at any stage and number of ranks."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

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
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO
from tests.harness import Pool, on_ranks, run
from tests.trainer.toys import (
    STAGES,
    Lit,
    assert_same,
    assert_weights,
    fit,
    loader,
    optimizer_states,
    record,
    seeded,
    some_of,
    trainer,
    weights,
)

pytestmark = pytest.mark.full


def adamw() -> Lit:
    module: Lit = seeded(lambda: Lit(optimizer="adamw", scheduler="step"))
    return module


def other_weights() -> Lit:
    """What is loaded into: equal to nothing that was saved."""
    module: Lit = seeded(lambda: Lit(optimizer="adamw", scheduler="step"), seed=11)
    return module


# -- what the file holds ----------------------------------------------------------------------------------------------


@pytest.mark.sample
@on_ranks(2)
def test_the_file_is_what_ddp_writes(tmp_path: Path) -> None:
    fit("ddp", tmp_path, adamw()).trainer.save_checkpoint(tmp_path / "ddp.ckpt")
    expected = torch.load(tmp_path / "ddp.ckpt", weights_only=False)
    for stage in STAGES:
        fit(stage, tmp_path, adamw()).trainer.save_checkpoint(tmp_path / f"{stage}.ckpt")
        found = torch.load(tmp_path / f"{stage}.ckpt", weights_only=False)
        assert found.keys() == expected.keys() | {"lightning_zero_rng"}
        assert found["hyper_parameters"] == expected["hyper_parameters"]
        assert found["lr_schedulers"] == expected["lr_schedulers"]
        assert found["loops"] == expected["loops"]
        assert_weights(found["state_dict"], expected["state_dict"], what=stage)
        assert_optimizer(found["optimizer_states"], expected["optimizer_states"], what=stage)


def assert_optimizer(found: list[dict[str, Any]], expected: list[dict[str, Any]], *, what: str = "") -> None:
    """Equal but for ``fused``, which ours chooses itself inside the step."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["param_groups"] == theirs["param_groups"], what
        assert ours["state"].keys() == theirs["state"].keys(), what
        for number, state in theirs["state"].items():
            assert ours["state"][number].keys() == state.keys()
            for name, value in state.items():
                close = {"rtol": 1e-4, "atol": 1e-6}
                torch.testing.assert_close(ours["state"][number][name], value, msg=f"{what} {number} {name}", **close)


@on_ranks(2)
def test_tensors_own_their_memory(tmp_path: Path) -> None:
    """A view of a bucket would drag the whole bucket into the file."""
    big = seeded(lambda: Lit(width=64, depth=4))
    fit("zero3", tmp_path, big, max_epochs=1).trainer.save_checkpoint(tmp_path / "big.ckpt")
    numel = sum(p.numel() for p in big.parameters())
    assert os.path.getsize(tmp_path / "big.ckpt") < 2 * 4 * numel * 1.3  # weights and momentum


# -- load anywhere ----------------------------------------------------------------------------------------------------


def _save(strategy: str, root: Path) -> dict[str, Any]:
    """Two epochs, saved; and what a third would give."""
    whole = fit(strategy, root, adamw(), max_epochs=3, batch_size=12 // dist.get_world_size())
    saved = fit(strategy, root, adamw(), max_epochs=2, batch_size=12 // dist.get_world_size())
    saved.trainer.save_checkpoint(root / "saved.ckpt")
    return {"weights": whole.weights, "losses": _mean_over_ranks(whole.losses[-2:])}


def _resume(strategy: str, root: Path, expected: dict[str, Any]) -> None:
    batch_size = 12 // dist.get_world_size()
    found = fit(strategy, root, other_weights(), max_epochs=3, batch_size=batch_size, ckpt_path=root / "saved.ckpt")
    torch.testing.assert_close(_mean_over_ranks(found.losses), expected["losses"], rtol=1e-5, atol=1e-6)
    assert_weights(found.weights, expected["weights"], what=strategy)


def _mean_over_ranks(losses: list[float]) -> Tensor:
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        (("ddp", 2), ("zero3", 2)),
        (("zero3", 2), ("ddp", 2)),
        (("zero3", 2), ("zero1", 3)),
        (("zero1", 3), ("zero3", 1)),
        (("zero2", 1), ("zero3", 3)),
        (("ddp", 1), ("zero2", 3)),
        (("zero0", 3), ("ddp", 2)),
    ],
    ids=lambda who: f"{who[0]}-{who[1]}ranks",
)
def test_training_goes_on_under_another_strategy_on_other_ranks(
    saved_by: tuple[str, int], loaded_by: tuple[str, int], tmp_path: Path
) -> None:
    expected = run(saved_by[1], _save, saved_by[0], tmp_path)[0]
    run(loaded_by[1], _resume, loaded_by[0], tmp_path, expected)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [(1, 2), (2, 3), (3, 1), (2, 2)], ids=lambda r: f"{r[0]}to{r[1]}")
@pytest.mark.parametrize("loaded_by", ["ddp", *STAGES])
@pytest.mark.parametrize("saved_by", ["ddp", *STAGES])
def test_training_goes_on_everywhere(saved_by: str, loaded_by: str, ranks: tuple[int, int], tmp_path: Path) -> None:
    expected = run(ranks[0], _save, saved_by, tmp_path)[0]
    run(ranks[1], _resume, loaded_by, tmp_path, expected)


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero3"])
def test_resumed_training_is_the_uninterrupted_one_to_the_bit(stage: str, tmp_path: Path) -> None:
    whole = fit(stage, tmp_path, adamw(), max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2)
    first = fit(stage, tmp_path, adamw(), max_epochs=2, gradient_clip_val=0.5, accumulate_grad_batches=2)
    first.trainer.save_checkpoint(tmp_path / "two.ckpt")
    path = tmp_path / "two.ckpt"
    rest = fit(
        stage, tmp_path, other_weights(), max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2, ckpt_path=path
    )
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert_weights(rest.weights, whole.weights, tolerance=0)
    assert rest.trainer.global_step == whole.trainer.global_step


@on_ranks(2)
def test_resume_in_the_same_process_with_the_same_trainer(tmp_path: Path) -> None:
    def body(strategy: str) -> Any:
        module = adamw()
        of = fit(strategy, tmp_path, module, max_epochs=2).trainer
        of.save_checkpoint(tmp_path / f"{strategy}.ckpt")
        of.fit_loop.max_epochs = 3
        of.fit(module, loader(), loader(), ckpt_path=tmp_path / f"{strategy}.ckpt")
        of.fit_loop.max_epochs = 4
        of.fit(module, loader(), loader(), ckpt_path=tmp_path / f"{strategy}.ckpt")
        return record(of, module)

    expected = body("ddp")
    for stage in ("zero1", "zero3"):
        assert_same(body(stage), expected, what=stage)


@on_ranks(2)
def test_mid_epoch_checkpoint_resumes(tmp_path: Path) -> None:
    """Lightning goes on with the rest of the epoch's batches counted, from the first of the loader's, as under DDP."""

    def body(strategy: str) -> Any:
        save = ModelCheckpoint(tmp_path / strategy, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        fit(strategy, tmp_path, adamw(), max_epochs=1, enable_checkpointing=True, callbacks=[save])
        path = tmp_path / strategy / "step=4.ckpt"
        return fit(strategy, tmp_path, other_weights(), max_epochs=2, ckpt_path=path)

    expected = body("ddp")
    for stage in ("zero1", "zero3"):
        assert_same(body(stage), expected, what=stage)


class EditsCheckpoint(Lit):
    """What hooks see and change counts."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 5

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == 5
        self.loaded_before_optimizers = True
        checkpoint["state_dict"] = {name: value * 0 for name, value in checkpoint["state_dict"].items()}

    def configure_optimizers(self) -> Any:
        self.order = getattr(self, "loaded_before_optimizers", False)
        return super().configure_optimizers()


@on_ranks(2)
def test_hooks_of_the_module_come_in_ddps_order_and_count(tmp_path: Path) -> None:
    fit("zero3", tmp_path, seeded(EditsCheckpoint)).trainer.save_checkpoint(tmp_path / "edited.ckpt")
    module = seeded(EditsCheckpoint)
    of = trainer("zero3", tmp_path, max_steps=0)
    of.fit(module, loader(), ckpt_path=tmp_path / "edited.ckpt")
    assert module.order
    assert all(not value.any() for value in weights(of).values())


@on_ranks(2)
def test_strict_and_not(tmp_path: Path) -> None:
    of = fit("zero3", tmp_path).trainer
    of.save_checkpoint(tmp_path / "full.ckpt")
    if dist.get_rank() == 0:
        checkpoint = torch.load(tmp_path / "full.ckpt", weights_only=False)
        del checkpoint["state_dict"]["head.weight"]
        checkpoint["state_dict"]["more"] = torch.ones(1)
        torch.save(checkpoint, tmp_path / "other.ckpt")
    dist.barrier()
    for fresh in (True, False):
        module = seeded(Lit, seed=5)
        test = trainer("zero3", tmp_path)
        if not fresh:
            test.test(module, loader(), verbose=False)
        with pytest.raises(RuntimeError, match=r"(?s)head\.weight.*more"):
            test.test(module, loader(), ckpt_path=tmp_path / "other.ckpt", verbose=False)
        module.strict_loading = False
        test.test(module, loader(), ckpt_path=tmp_path / "other.ckpt", verbose=False)
        found, expected = weights(test), weights(of)
        assert torch.equal(found["first.weight"], expected["first.weight"])
        assert not torch.equal(found["head.weight"], expected["head.weight"])


class OfParts(Lit):
    """``parts``: how many of three modules train, each by an optimizer of its own."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.parts = parts

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        optimizers = self.optimizers() if self.parts > 1 else [self.optimizers()]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = (self.head, self.blocks, self.first)[: self.parts]
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]


@on_ranks(2)
@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (3, 1)])
def test_more_or_fewer_optimizers_than_saved(saved: int, resumed: int, tmp_path: Path) -> None:
    """As under DDP, which loads as many as there are of both; we say so."""

    def body(strategy: str) -> Any:
        path = tmp_path / f"{strategy}.ckpt"
        fit(strategy, tmp_path, seeded(lambda: OfParts(saved)), max_epochs=1).trainer.save_checkpoint(path)
        return fit(strategy, tmp_path, seeded(lambda: OfParts(resumed)), max_epochs=2, ckpt_path=path)

    unused = DDPStrategy(find_unused_parameters=True)
    path = tmp_path / "ddp.ckpt"
    fit(unused, tmp_path, seeded(lambda: OfParts(saved)), max_epochs=1).trainer.save_checkpoint(path)
    again = DDPStrategy(find_unused_parameters=True)
    expected = fit(again, tmp_path, seeded(lambda: OfParts(resumed)), max_epochs=2, ckpt_path=path)
    for stage in STAGES:
        said: list[str] = []
        with mock.patch("lightning_zero.trainer.saves.checkpointing.rank_zero_warn", said.append):
            found = body(stage)
        assert_same(found, expected, what=stage)
        assert_optimizer(optimizer_states(found.trainer), optimizer_states(expected.trainer), what=stage)
        assert f"of {saved} optimizers, configure_optimizers() gives {resumed}" in said[0]


@on_ranks(2)
def test_a_checkpoint_with_other_param_groups_is_refused(tmp_path: Path) -> None:
    fit("zero3", tmp_path).trainer.save_checkpoint(tmp_path / "one.ckpt")

    class TwoGroups(Lit):
        def configure_optimizers(self) -> Any:
            rest = [*self.first.parameters(), *self.head.parameters()]
            groups = [{"params": list(self.blocks.parameters())}, {"params": rest}]
            return torch.optim.SGD(groups, lr=0.1)

    with pytest.raises(ValueError, match="param groups"):
        fit("zero3", tmp_path, seeded(TwoGroups), ckpt_path=tmp_path / "one.ckpt")


# -- load_from_checkpoint, weights only, after teardown ---------------------------------------------------------------


@pytest.mark.sample
@on_ranks(2)
def test_load_from_checkpoint(tmp_path: Path) -> None:
    saved = fit("zero3", tmp_path, seeded(lambda: Lit(width=6)))
    saved.trainer.save_checkpoint(tmp_path / "some.ckpt", weights_only=True)
    loaded = Lit.load_from_checkpoint(tmp_path / "some.ckpt")
    assert loaded.hparams["width"] == 6
    assert_weights(loaded.state_dict(), saved.weights, tolerance=0)
    again = trainer("zero1", tmp_path)
    result = again.validate(loaded, loader(), verbose=False)[0]["val"]
    assert result == pytest.approx(saved.trainer.validate(saved.module, loader(), verbose=False)[0]["val"], rel=1e-6)


@on_ranks(2)
def test_save_weights_only(tmp_path: Path) -> None:
    for strategy in ("ddp", "zero3"):
        save = ModelCheckpoint(tmp_path / strategy, save_weights_only=True, filename="last")
        saved = fit(strategy, tmp_path, enable_checkpointing=True, callbacks=[save])
        path = tmp_path / strategy / "last.ckpt"
        assert "optimizer_states" not in torch.load(path, weights_only=False)
        of = trainer(strategy, tmp_path)
        of.test(seeded(Lit, seed=4), loader(), ckpt_path=path, verbose=False)
        assert_weights(weights(of), saved.weights, tolerance=0)
        with pytest.raises(KeyError, match="weights_only"):
            fit(strategy, tmp_path, max_epochs=3, ckpt_path=path)


class Odd:
    """A hyperparameter that ``torch.load(weights_only=True)`` refuses."""


class WithOddHyperparameter(Lit):
    def __init__(self, odd: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Runs:
    """Writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def save_with(hyperparameter: Any, root: Path) -> Path:
    of = fit("zero3", root, seeded(lambda: WithOddHyperparameter(hyperparameter))).trainer
    of.save_checkpoint(root / "odd.ckpt")
    return root / "odd.ckpt"


@pytest.mark.sample
@on_ranks(2)
def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    """As under DDP, where nothing is said, and if ``weights_only=True`` is; in whatever is done with it."""
    of = fit("zero3", tmp_path).trainer
    of.save_checkpoint(tmp_path / "good.ckpt")
    path, ran = tmp_path / "bad.ckpt", tmp_path / "ran"
    if dist.get_rank() == 0:
        torch.save({**torch.load(tmp_path / "good.ckpt"), "extra": Runs(ran)}, path)
    dist.barrier()
    for strategy in ("ddp", "zero1", "zero3"):
        for weights_only in (None, True):
            with pytest.raises(Exception, match=r"bad\.ckpt|Weights only load failed"):
                trainer(strategy, tmp_path).fit(seeded(Lit), loader(), ckpt_path=path, weights_only=weights_only)
        with pytest.raises(Exception, match=r"bad\.ckpt|Weights only load failed"):
            trainer(strategy, tmp_path).test(seeded(Lit), loader(), ckpt_path=path)
    assert not ran.exists()
    trainer("zero3", tmp_path, max_epochs=3).fit(seeded(Lit), loader(), ckpt_path=path, weights_only=False)
    assert ran.exists()


def test_the_first_save_warns_of_what_will_be_refused(tmp_path: Path) -> None:
    io = ZeroCheckpointIO()
    says = r"odd\.ckpt holds tests\.trainer\.test_checkpoints\.Odd, and going on from it is refused"
    with pytest.warns(UserWarning, match=says):
        io.save_checkpoint({"extra": Odd(), "weight": torch.ones(3)}, tmp_path / "odd.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        io.save_checkpoint({"extra": Odd()}, tmp_path / "again.ckpt")
        ZeroCheckpointIO().save_checkpoint({"weight": torch.ones(3)}, tmp_path / "plain.ckpt")


def test_the_first_whole_file_is_looked_at_too(tmp_path: Path) -> None:
    """Files of weights only may come before it."""
    io = ZeroCheckpointIO()
    io.save_checkpoint({"weight": torch.ones(3)}, tmp_path / "weights.ckpt")
    with pytest.warns(UserWarning, match=r"whole\.ckpt holds"):
        io.save_checkpoint({"optimizer_states": [Odd()]}, tmp_path / "whole.ckpt")


@on_ranks(2)
def test_a_refusal_names_the_class_and_how_to_allow_it(tmp_path: Path) -> None:
    path = save_with(Odd(), tmp_path)
    for stage in ("zero1", "zero3"):
        with pytest.raises(ConfigError, match=r"odd\.ckpt with tests\.trainer\.test_checkpoints\.Odd: ") as refused:
            fit(stage, tmp_path, max_epochs=3, ckpt_path=path)
        assert "weights_only=False" in str(refused.value) and "add_safe_globals([Odd])" in str(refused.value)
    trainer("zero3", tmp_path, max_epochs=3).fit(seeded(Lit), loader(), ckpt_path=path, weights_only=False)
    with torch.serialization.safe_globals([Odd]):
        assert fit("zero3", tmp_path, max_epochs=3, ckpt_path=path).trainer.global_step == 18


@on_ranks(2)
def test_a_file_that_one_rank_cannot_read_ends_all(tmp_path: Path) -> None:
    of = fit("zero3", tmp_path).trainer
    of.save_checkpoint(tmp_path / "good.ckpt")
    own = tmp_path / f"{dist.get_rank()}.ckpt"
    own.write_bytes((tmp_path / "good.ckpt").read_bytes()[: -300 if dist.get_rank() else None])
    with pytest.raises(ConfigError, match=r"expected a whole checkpoint, got .*1\.ckpt"):
        fit("zero3", tmp_path, max_epochs=3, ckpt_path=own)
    if dist.get_rank():
        own.unlink()
    with pytest.raises((FileNotFoundError, RuntimeError), match=r"not found: .*1\.ckpt"):
        fit("zero3", tmp_path, max_epochs=3, ckpt_path=own)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STAGES)
def test_our_own_checkpoints_hold_nothing_that_runs(strategy: str, tmp_path: Path) -> None:
    callbacks: list[Any] = [EMAWeightAveraging(), EarlyStopping("val"), ModelCheckpoint(tmp_path, save_last=True)]
    module = seeded(lambda: Lit(optimizer="adamw", scheduler="onecycle"))
    fit(strategy, tmp_path, module, callbacks=callbacks, enable_checkpointing=True, precision="bf16-mixed")
    assert torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "last.ckpt") == []
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"]


@on_ranks(2)
def test_saving_after_the_run_and_between_evaluations(tmp_path: Path) -> None:
    for stage in ("zero1", "zero3"):
        saved = fit(stage, tmp_path, adamw())
        of = saved.trainer
        of.save_checkpoint(tmp_path / "a.ckpt")
        of.test(saved.module, loader(), verbose=False)
        of.save_checkpoint(tmp_path / "b.ckpt")
        a, b = (torch.load(tmp_path / name, weights_only=False) for name in ("a.ckpt", "b.ckpt"))
        assert_weights(a["state_dict"], saved.weights, tolerance=0)
        assert_weights(b["state_dict"], saved.weights, tolerance=0)
        assert_optimizer(b["optimizer_states"], a["optimizer_states"])


@on_ranks(2)
def test_saving_without_training(tmp_path: Path) -> None:
    of = trainer("zero3", tmp_path)
    module = seeded(Lit)
    of.validate(module, loader(), verbose=False)
    of.save_checkpoint(tmp_path / "untrained.ckpt")
    assert_weights(torch.load(tmp_path / "untrained.ckpt", weights_only=False)["state_dict"], weights(of), tolerance=0)


@on_ranks(2)
def test_saving_before_any_run(tmp_path: Path) -> None:
    for strategy in ("ddp", "zero1", "zero3"):
        module = seeded(Lit)
        of = trainer(strategy, tmp_path)
        of.strategy.connect(module)
        of.save_checkpoint(tmp_path / f"{strategy}.ckpt")
    dist.barrier()
    files = [torch.load(tmp_path / f"{strategy}.ckpt", weights_only=False) for strategy in ("ddp", "zero1", "zero3")]
    for found in files[1:]:
        assert found.keys() == files[0].keys()
        assert_weights(found["state_dict"], files[0]["state_dict"], tolerance=0)
    loaded = Lit.load_from_checkpoint(tmp_path / "zero3.ckpt")
    assert_weights(loaded.state_dict(), seeded(Lit).state_dict(), tolerance=0)


@on_ranks(2)
@pytest.mark.parametrize("by", ["copy", "pickle"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.mainly(lambda by, precision: (by == "copy") == (precision == "32-true"))
def test_a_copy_of_a_trainer_trains_by_itself(by: str, precision: Any, tmp_path: Path) -> None:
    expected = fit("zero3", tmp_path, precision=precision)
    of = trainer("zero3", tmp_path, precision=precision)
    again = copy.deepcopy(of) if by == "copy" else pickle.loads(pickle.dumps(of))
    assert again.precision_plugin.strategy is again.strategy is not of.strategy
    module = seeded(Lit)
    again.fit(module, loader(), loader())
    assert_same(record(again, module), expected, tolerance=0)
    of.fit(other := seeded(Lit), loader(), loader())
    assert_same(record(of, other), expected, tolerance=0)


@on_ranks(2)
def test_async_checkpoint_io(tmp_path: Path) -> None:
    """Written in a thread while training goes on: the file holds the weights of the moment."""
    seen: dict[int, dict[str, Tensor]] = {}

    class Remember(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen[trainer.global_step] = weights(trainer)

    save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    plugin = AsyncCheckpointIO()
    settings: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [save, Remember()], "plugins": [plugin]}
    of = fit("zero3", tmp_path, max_epochs=1, **settings).trainer
    assert plugin._executor is None  # the run's end waits for the files
    of.strategy.barrier()
    for step in (2, 4, 6):
        found = torch.load(tmp_path / f"step={step}.ckpt", weights_only=False)
        assert_weights(found["state_dict"], seen[step], tolerance=0)
    of.save_checkpoint(tmp_path / "after.ckpt")
    of.strategy.checkpoint_io.teardown()
    of.strategy.barrier()
    assert_weights(torch.load(tmp_path / "after.ckpt", weights_only=False)["state_dict"], seen[6], tolerance=0)


# -- ModelCheckpoint and EarlyStopping --------------------------------------------------------------------------------

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "top 2": {"monitor": "val", "save_top_k": 2},
    "last link": {"monitor": "val", "save_last": "link"},
    "last copy": {"save_last": True},
    "every second step": {"every_n_train_steps": 2, "save_top_k": -1},
    "train-time metric": {"monitor": "loss_step", "every_n_train_steps": 3, "save_top_k": 2},
    "epoch metric after training": {"monitor": "loss_epoch", "save_on_train_epoch_end": True, "save_top_k": 1},
    "by time": {"train_time_interval": timedelta(seconds=0), "save_top_k": 1},
}


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("case", some_of(CHECKPOINTS, "every second step", "train-time metric"))
def test_model_checkpoint(case: str, tmp_path: Path) -> None:
    """The same files as DDP's, and the best one holds what DDP's holds."""
    results: list[Any] = []
    for strategy in ("ddp", "zero1", "zero3"):
        folder = tmp_path / strategy
        save = ModelCheckpoint(folder, **CHECKPOINTS[case])
        of = fit(strategy, tmp_path, max_epochs=3, enable_checkpointing=True, callbacks=[save]).trainer
        of.strategy.barrier()
        files = sorted(path.name for path in folder.iterdir())
        links = {path.name: os.readlink(path) for path in folder.iterdir() if path.is_symlink()}
        best = torch.load(save.best_model_path, weights_only=False)["state_dict"]
        results.append((files, links, best))
        of.test(ckpt_path="best", dataloaders=loader(), verbose=False)
        assert_weights(weights(of), best, tolerance=0)
    for files, links, best in results[1:]:
        assert (files, links) == results[0][:2]
        assert_weights(best, results[0][2])


@on_ranks(2)
def test_resume_from_last(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, save_last="link")
    whole = fit("zero3", tmp_path / "whole", max_epochs=3)
    fit("zero3", tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[save])
    again = ModelCheckpoint(tmp_path, save_last="link")
    rest = fit("zero3", tmp_path, max_epochs=3, enable_checkpointing=True, callbacks=[again], ckpt_path="last")
    assert_weights(rest.weights, whole.weights, tolerance=0)


@on_ranks(2)
def test_early_stopping(tmp_path: Path) -> None:
    def body(strategy: str) -> tuple[int, Any]:
        stop = EarlyStopping("val", patience=0, min_delta=0.1)
        found = fit(strategy, tmp_path, max_epochs=8, callbacks=[stop])
        return found.trainer.current_epoch, found

    epochs, expected = body("ddp")
    assert 1 < epochs < 8
    for stage in ("zero1", "zero3"):
        found_epochs, found = body(stage)
        assert found_epochs == epochs
        assert_same(found, expected, what=stage)


# -- exceptions -------------------------------------------------------------------------------------------------------


class Failing(Lit):
    """Raises in one step, on all ranks or on some."""

    def __init__(self, ranks: tuple[int, ...], where: str = "step") -> None:
        super().__init__()
        self.ranks, self.where = ranks, where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3 and dist.get_rank() in self.ranks:
            raise KeyError("planned")
        return loss


@on_ranks(2)
def test_a_checkpoint_on_an_exception_of_all_ranks(tmp_path: Path) -> None:
    for stage in ("zero0", "zero1", "zero3"):
        module = seeded(lambda: Failing((0, 1)))
        callbacks = [OnExceptionCheckpoint(tmp_path, filename=stage)]
        of = trainer(stage, tmp_path, enable_checkpointing=True, callbacks=callbacks)
        with pytest.raises(KeyError, match="planned"):
            of.fit(module, loader())
        found = torch.load(tmp_path / f"{stage}.ckpt", weights_only=False)
        assert found["global_step"] == 3
        three = fit(stage, tmp_path, max_steps=3, limit_val_batches=0)
        assert_weights(found["state_dict"], three.weights, tolerance=0)


def _fail_alone(stage: str, root: Path) -> str:
    """What this rank ends with; the pool does not outlive this."""
    from lightning_zero.engine.passes import passes
    from lightning_zero.trainer import interruptions

    interruptions.MEET_S, passes.ABANDON_S = 1.0, 0.5
    strategy = ZeroStrategy(stage, stall_timeout_s=3.0)
    of = trainer(strategy, root, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(root)])
    try:
        of.fit(seeded(lambda: Failing((1,))), loader())
    except Exception as error:
        return f"{type(error).__name__}: {error} {error.__context__!r}"
    return "no error"


@pytest.mark.sample
@pytest.mark.parametrize("stage", some_of(("zero1", "zero3"), "zero3"))
def test_no_checkpoint_and_no_hang_on_an_exception_of_one_rank(stage: str, tmp_path: Path) -> None:
    """The rank that failed says why nothing is saved; the other one finds out by itself."""
    pool = Pool(2)
    try:
        waits, failed = pool.run(pickle.dumps((_fail_alone, (stage, tmp_path), {})), 60)
    finally:
        pool.kill()
    assert "no checkpoint is saved" in failed and "rank(s) [0]" in failed and "planned" in failed
    assert "no checkpoint is saved" in waits and "StallError" in waits
    assert not list(tmp_path.glob("*.ckpt"))


@on_ranks(2)
def test_a_fit_after_an_exception_of_all_ranks(tmp_path: Path) -> None:
    for strategy in ("zero1", "zero3"):
        module = seeded(lambda: Failing((0, 1)))
        of = trainer(strategy, tmp_path)
        with pytest.raises(KeyError, match="planned"):
            of.fit(module, loader())
        module.ranks = ()
        module.losses.clear()
        found = fit(strategy, tmp_path, module, limit_val_batches=0)
        three = seeded(Lit)
        fit(strategy, tmp_path, three, max_steps=3, limit_val_batches=0)
        three.losses.clear()
        assert_same(found, fit(strategy, tmp_path, three, limit_val_batches=0), tolerance=0, what=strategy)


@on_ranks(2)
def test_optimizer_states_are_full_tensors_on_rank_0(tmp_path: Path) -> None:
    expected = optimizer_states(fit("ddp", tmp_path, adamw()).trainer)
    for stage in STAGES:
        of = fit(stage, tmp_path, adamw()).trainer
        assert_optimizer(optimizer_states(of), expected, what=stage)
        mine = of.strategy.optimizer_state(of.optimizers[0])
        assert bool(mine) == (dist.get_rank() == 0)
