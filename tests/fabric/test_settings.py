"""Every field of the configuration under Fabric: it does what it does under the Trainer, or it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import lightning_zero
from lightning_zero import ZeroFabricStrategy
from lightning_zero.fabric.strategy import FabricPrecision
from lightning_zero.optimizers.loss_scale import LossScaler
from lightning_zero.settings import ConfigError, Precision, PrecisionConfig, ZeroConfig
from tests.fabric.toys import Run, adamw, assert_equal, fabric, make, sgd, train
from tests.harness import on_ranks
from tests.trainer.test_settings import EQUAL, in_folder
from tests.trainer.toys import FEATURES, loader, once

# Those with tests of their own, here or beside.
ELSEWHERE = {"stage", "precision", "checkpoint", "timeline", "init_from", "sequence_parallel"}
ELSEWHERE |= {"loss", "fingerprint", "uneven", "tensor_parallel", "expert_parallel", "tensor_plan"}


def test_every_field_is_tried_here_or_beside() -> None:
    tried = {name.partition(".")[0] for name in EQUAL} | ELSEWHERE
    assert tried == {field.name for field in dataclasses.fields(ZeroConfig)}


def strategy(tmp_path: Path, stage: int = 3, **settings: Any) -> ZeroFabricStrategy:
    return ZeroFabricStrategy(stage, **in_folder(settings, tmp_path))


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")
@pytest.mark.parametrize("name", EQUAL)
def test_setting_is_seen_in_the_engine_and_changes_no_number(name: str, tmp_path: Path) -> None:
    expected = train("zero3")
    found = train(strategy(tmp_path, **EQUAL[name]))
    config = found.model._forward_module.engine.config
    group = name.partition(".")[0]
    assert getattr(config, group) != getattr(ZeroConfig(), group)
    assert_equal(found, expected)


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize(("precision", "setting"), [
    ("bf16-mixed", {"reduce_dtype": "bf16"}),
    ("bf16-mixed", {"grad_dtype": "bf16"}),
    ("bf16-mixed", {"fp32_modules": ["Linear"]}),
    ("bf16-true", {"stochastic_rounding": True}),
])  # fmt: skip
def test_settings_of_precision_change_losses(precision: str, setting: dict[str, Any], tmp_path: Path) -> None:
    run = train(strategy(tmp_path, precision=setting), precision=precision)
    assert run.losses != train("zero3", precision=precision).losses


@pytest.mark.full
@on_ranks(2)
def test_init_from_gives_first_values(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = make()
    values = {name: p.detach() + 1 for name, p in source.named_parameters()}
    once(lambda: save_file(values, tmp_path / "model.safetensors"))
    found = fabric(strategy(tmp_path, init_from=str(tmp_path)))
    with found.init_module(empty_init=True):
        model = make()
    run = Run(found, *found.setup(model, adamw(model.parameters())))
    with lightning_zero.gather(run.model):
        for own, other in zip(run.model.parameters(), source.parameters(), strict=True):
            assert torch.equal(own, other + 1)


def test_settings_that_only_the_trainer_follows_are_refused() -> None:
    here = partial(Fabric, accelerator="cpu", devices=2)
    bf16 = ZeroFabricStrategy(config=ZeroConfig(precision=PrecisionConfig(name=Precision.bf16)))
    behind = {"name": "sharded", "background": True}
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: here(strategy="zero_auto"), "^stage: expected zero0, zero1, zero2 or zero3 with .* Fabric"),
        (lambda: ZeroFabricStrategy(checkpoint=behind), r"^checkpoint\['background'\]: expected False with Fabric"),
        (lambda: ZeroFabricStrategy(gather_after_fit=True), r"^gather_after_fit: expected None or False with Fabric"),
        (lambda: here(strategy=bf16, precision="bf16-true"), "fabric.precision: expected 'bf16-mixed'"),
    ]
    for act, says in cases:
        with pytest.raises(ConfigError, match=says):
            act()


@on_ranks(2)
def test_setup_of_what_cannot_be_sharded_and_a_plain_backward_are_refused() -> None:
    of, scaled = fabric("zero3"), fabric(ZeroFabricStrategy("zero3", precision="fp16"))
    plain = make()
    with pytest.raises(ConfigError, match="Set the module up first"):
        scaled.setup_optimizers(sgd(make().parameters()))
    with pytest.raises(ConfigError, match="SparseAdam"):
        of.setup(plain, torch.optim.SparseAdam(plain.parameters()))
    model, _ = of.setup(plain, adamw(plain.parameters()))  # as it was, so it can be set up
    with pytest.raises(ConfigError, match="sharded already"):
        of.setup_module(plain)
    other = of.setup_module(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="got parameters of 2"):
        of.setup_optimizers(sgd([*model.parameters(), *other.parameters()]))
    with pytest.raises(RuntimeError, match=r"fabric\.backward\(loss\)"):
        model(torch.ones(2, FEATURES)).sum().backward()


def overflow_on_one_rank(run: Run) -> None:
    x, y = next(iter(loader()))
    scale = float("inf") if run.fabric.global_rank else 1.0
    run.fabric.backward(nn.functional.mse_loss(run.model(x), y) * scale)


@on_ranks(2)
def test_norm_that_is_not_finite_is_an_error_on_all_ranks() -> None:
    run = train("zero3")
    overflow_on_one_rank(run)
    with pytest.raises(RuntimeError, match="the gradient norm is (nan|inf)"):
        run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0)
    norm = run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0, error_if_nonfinite=False)
    assert norm is not None and not norm.isfinite()


@on_ranks(2)
def test_loss_scaling_skips_steps_on_all_ranks() -> None:
    """16-mixed, which Fabric itself leaves to GPUs."""
    run = train("zero3", plugins=FabricPrecision("16-mixed", LossScaler(init_scale=64.0)), clip={"max_norm": 1.0})
    scaler = run.fabric.strategy.precision.scaler
    assert scaler.scale == 64.0 and run.losses[-1] < run.losses[0]
    torch.testing.assert_close(run.norms, train("ddp", clip={"max_norm": 1.0}).norms, rtol=0.05, atol=0.01)
    before = run.fabric.strategy.get_module_state_dict(run.model._forward_module)
    x, y = next(iter(loader()))
    run.fabric.backward(nn.functional.mse_loss(run.model(x), y))
    run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0)
    run.optimizer.zero_grad()  # without a step: what was known of its gradients is not true of the next ones
    overflow_on_one_rank(run)
    run.optimizer.step()
    after = run.fabric.strategy.get_module_state_dict(run.model._forward_module)
    assert scaler.scale == 32.0
    assert all(torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_that_is_dropped_after_an_overflow_lowers_the_scale_and_skips_no_step(set_to_none: bool) -> None:
    run = train("zero3", plugins=FabricPrecision("16-mixed", LossScaler(init_scale=64.0)))
    scaler, (x, y) = run.fabric.strategy.precision.scaler, next(iter(loader()))
    for clip in ({"max_norm": 1e9, "error_if_nonfinite": False}, {"clip_val": 1e9}):
        run.optimizer.zero_grad()
        before = scaler.scale
        overflow_on_one_rank(run)
        run.fabric.clip_gradients(run.model, run.optimizer, **clip)
        run.fabric.backward(nn.functional.mse_loss(run.model(x), y))  # added to what has overflowed
        assert scaler.scale == before
        run.fabric.clip_gradients(run.model, run.optimizer, **clip)
        run.optimizer.zero_grad(set_to_none=set_to_none)
        weights = run.fabric.strategy.get_module_state_dict(run.model._forward_module)
        run.fabric.backward(nn.functional.mse_loss(run.model(x), y))
        assert scaler.scale == before / 2
        run.fabric.clip_gradients(run.model, run.optimizer, **clip)
        run.optimizer.step()
        after = run.fabric.strategy.get_module_state_dict(run.model._forward_module)
        assert not any(torch.equal(weights[name], after[name]) for name in weights)
