"""WeightAveraging and EMAWeightAveraging: averaged on shards, equal to what they average under DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.harness import on_ranks
from tests.trainer.toys import (
    Lit,
    assert_same,
    assert_weights,
    fit,
    loader,
    record,
    seeded,
    some_of,
    trainer,
    weights,
)

pytestmark = pytest.mark.full


class WithBatchNorm(Lit):
    """Buffers, of which one is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class EveryEpoch(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


AVERAGES: dict[str, Callable[[], WeightAveraging]] = {
    "equal": WeightAveraging,
    "equal without buffers": lambda: WeightAveraging(use_buffers=False),
    "each epoch": EveryEpoch,
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "ema, late and rarely": lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=2, update_starting_at_step=3),
    "own function for many": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
}


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("case", some_of(AVERAGES, "equal", "ema, late and rarely"))
def test_averages(case: str, tmp_path: Path) -> None:
    """Validation runs on averaged weights, training goes on with its own, and the result is the average."""

    def body(strategy: str) -> Any:
        return fit(strategy, tmp_path, seeded(WithBatchNorm), callbacks=[AVERAGES[case]()], val_check_interval=4)

    plain = fit("zero3", tmp_path, seeded(WithBatchNorm), val_check_interval=4)
    expected = body("ddp")
    for stage in ("zero0", "zero1", "zero3"):
        found = body(stage)
        assert_same(found, expected, what=stage)
    assert found.losses == plain.losses
    assert any(not torch.equal(found.weights[k], plain.weights[k]) for k in plain.weights)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("ddp", "zero3"), ("zero3", "ddp"), ("zero1", "zero3")])
def test_checkpoints_hold_averages_and_resume(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    def run(strategy: str, epochs: int, **settings: Any) -> Any:
        callbacks = [EMAWeightAveraging(decay=0.8), ModelCheckpoint(tmp_path / f"{strategy}{epochs}", filename="end")]
        module = seeded(WithBatchNorm, seed=settings.pop("seed", 3))
        return fit(
            strategy, tmp_path, module, max_epochs=epochs, enable_checkpointing=True, callbacks=callbacks, **settings
        )

    whole = run("ddp", 3)
    saved = run(saved_by, 2)
    path = tmp_path / f"{saved_by}2" / "end.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    assert {"current_model_state", "averaging_state"} <= checkpoint.keys()
    assert_weights(checkpoint["state_dict"], saved.weights)
    resumed = run(loaded_by, 3, ckpt_path=path, seed=5)
    assert_weights(resumed.weights, whole.weights)
    torch.testing.assert_close(resumed.losses, whole.losses[-len(resumed.losses) :], rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_a_checkpoint_without_averages_starts_both(tmp_path: Path) -> None:
    fit("zero3", tmp_path).trainer.save_checkpoint(tmp_path / "plain.ckpt")

    def body(strategy: str) -> Any:
        callbacks = [EMAWeightAveraging(decay=0.8)]
        return fit(strategy, tmp_path, max_epochs=3, callbacks=callbacks, ckpt_path=tmp_path / "plain.ckpt")

    assert_same(body("zero3"), body("ddp"))


@on_ranks(2)
def test_evaluation_before_and_after_and_a_second_fit(tmp_path: Path) -> None:
    def body(strategy: str) -> Any:
        module = seeded(Lit)
        of = trainer(strategy, tmp_path, callbacks=[EMAWeightAveraging(decay=0.8)])
        results = [of.validate(module, loader(), verbose=False)[0]["val"]]
        of.fit(module, loader(), loader())
        results.append(of.validate(module, loader(), verbose=False)[0]["val"])
        results.append(of.test(module, loader(), verbose=False)[0]["val"])
        of.fit_loop.max_epochs = 3
        of.fit(module, loader(), loader())
        results.append(of.validate(module, loader(), verbose=False)[0]["val"])
        found = record(of, module)
        found.metrics = {str(i): r for i, r in enumerate(results)}
        return found

    expected = body("ddp")
    for stage in ("zero1", "zero3"):
        assert_same(body(stage), expected, what=stage)


@on_ranks(2)
def test_a_second_fit_of_the_same_trainer_from_a_checkpoint(tmp_path: Path) -> None:
    def body(strategy: str) -> Any:
        module = seeded(Lit)
        of = trainer(strategy, tmp_path, max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.8)])
        of.fit(module, loader())
        of.save_checkpoint(tmp_path / f"{strategy}.ckpt")
        of.fit_loop.max_epochs = 3
        of.fit(module, loader(), ckpt_path=tmp_path / f"{strategy}.ckpt")
        return record(of, module)

    assert_same(body("zero3"), body("ddp"))


@on_ranks(2)
def test_averages_of_bf16_mixed_are_of_the_fp32_masters(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "bf16-mixed"}
    runs = [fit(s, tmp_path, callbacks=[EMAWeightAveraging(decay=0.5)], **settings) for s in ("zero0", "zero3")]
    assert_same(runs[1], runs[0], tolerance=0)
    last = fit("zero3", tmp_path, **settings).weights["head.weight"]
    rounded = runs[0].weights["head.weight"]
    assert not torch.equal(rounded, rounded.bfloat16().float()) and not torch.equal(rounded, last)


class Late(Lit):
    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks, self.head

    def configure_model(self) -> None:
        if not hasattr(self, "first"):
            with torch.device("meta"):
                built = Lit()
            self.first, self.blocks, self.head = built.first, built.blocks, built.head


@on_ranks(2)
def test_a_module_configured_on_meta_is_averaged(tmp_path: Path) -> None:
    """Lightning's callback would copy a module on meta; shards are averaged after they have values."""
    runs = [fit(s, tmp_path, seeded(Late), callbacks=[EMAWeightAveraging(decay=0.8)]) for s in ("zero1", "zero3")]
    assert_same(runs[1], runs[0])
    assert all(torch.isfinite(value).all() for value in runs[0].weights.values())


class Swaps(EMAWeightAveraging):
    """A subclass that follows what Lightning's own methods do."""

    swaps = 0

    def _swap_models(self, pl_module: Any) -> None:
        self.swaps += 1
        super()._swap_models(pl_module)


@on_ranks(2)
def test_a_subclass_and_a_mock_of_the_users_are_called(tmp_path: Path) -> None:
    def body(strategy: str) -> Any:
        callback = Swaps(decay=0.8)

        def load(*args: Any) -> None:
            type(callback).on_load_checkpoint(callback, *args)

        with mock.patch.object(callback, "on_load_checkpoint", side_effect=load) as loads:
            run = fit(strategy, tmp_path, seeded(Lit), max_epochs=2, callbacks=[callback])
            run.trainer.save_checkpoint(tmp_path / f"{strategy}.ckpt")
            run.trainer.fit_loop.max_epochs = 3
            run.trainer.fit(run.module, loader(), loader(), ckpt_path=tmp_path / f"{strategy}.ckpt")
        assert callback.swaps == 2 * 3 and loads.called
        return record(run.trainer, run.module)

    assert_same(body("zero3"), body("ddp"))


@on_ranks(2)
def test_a_function_of_the_users_in_the_place_of_save_checkpoint_is_called(tmp_path: Path) -> None:
    of, saved = trainer("zero3", tmp_path), []
    save = of.save_checkpoint
    of.save_checkpoint = lambda path, *args, **kwargs: (saved.append(path), save(path, *args, **kwargs))  # type: ignore[method-assign]
    of.fit(seeded(Lit), loader())
    of.save_checkpoint(tmp_path / "last.ckpt")
    assert saved == [tmp_path / "last.ckpt"]
    assert_weights(torch.load(tmp_path / "last.ckpt")["state_dict"], weights(of))


class WithSetup(EMAWeightAveraging):
    """A subclass that prepares itself, and changes the module, in setup."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            pl_module.first.bias.data.fill_(0.25)
        super().setup(trainer, pl_module, stage)
        self.called = [*getattr(self, "called", []), stage]
        self.last = trainer.max_epochs - 1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx == self.last


@on_ranks(2)
def test_setup_of_a_subclass_is_called(tmp_path: Path) -> None:
    def body(strategy: str) -> Any:
        callback = WithSetup(decay=0.8)
        run = fit(strategy, tmp_path, seeded(WithBatchNorm), callbacks=[callback])
        run.trainer.validate(run.module, loader(), verbose=False)
        assert callback.called == ["fit", "validate"]
        return run

    expected = body("ddp")
    for stage in ("zero1", "zero3"):
        assert_same(body(stage), expected, what=stage)


@on_ranks(2)
def test_averages_that_are_not_there_in_setup_are_explained(tmp_path: Path) -> None:
    class Early(WeightAveraging):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            self._average_model.module.requires_grad_(False)  # type: ignore[union-attr]

    with pytest.raises(AttributeError) as error:
        fit("zero3", tmp_path, callbacks=[Early()])
    assert "on_fit_start" in str(error.value)
