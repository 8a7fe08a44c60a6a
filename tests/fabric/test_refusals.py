"""What cannot work with Fabric is refused with a reason and a way out, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_zero import ZeroFabricStrategy
from lightning_zero.config import ConfigError, Precision, PrecisionConfig, ZeroConfig
from lightning_zero.fabric.precision import FabricPrecision
from lightning_zero.optimizers.loss_scale import LossScaler
from tests.fabric.toys import adamw, fabric, make, sgd, train
from tests.harness import on_ranks
from tests.trainer.toys import loader


def test_settings_that_only_the_trainer_follows_are_refused() -> None:
    here = partial(Fabric, accelerator="cpu", devices=2)
    bf16 = ZeroFabricStrategy(config=ZeroConfig(precision=PrecisionConfig(name=Precision.bf16)))
    behind = {"name": "sharded", "background": True}
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: here(strategy="zero_auto"), "zero/stage: expected zero0, zero1, zero2 or zero3 with .* Fabric"),
        (lambda: ZeroFabricStrategy(checkpoint=behind), r"zero\.checkpoint\.background: expected false with Fabric"),
        (lambda: ZeroFabricStrategy(gather_after_fit=True), r"gather_after_fit: expected null or false with Fabric"),
        (lambda: here(strategy=bf16, precision="bf16-true"), "fabric.precision: expected 'bf16-mixed'"),
    ]
    for act, says in cases:
        with pytest.raises(ConfigError, match=says):
            act()


@on_ranks(2)
def test_setup_of_what_cannot_be_sharded_is_refused() -> None:
    of = fabric("zero3")
    plain = make()
    with pytest.raises(ConfigError, match="Set the module up first"):
        of.setup_optimizers(sgd(make().parameters()))
    with pytest.raises(ConfigError, match="LBFGS"):
        of.setup(plain, torch.optim.LBFGS(plain.parameters()))
    model, _ = of.setup(plain, adamw(plain.parameters()))  # as it was, so it can be set up
    with pytest.raises(ConfigError, match="sharded already"):
        of.setup_module(plain)
    other = of.setup_module(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="got those of 2"):
        of.setup_optimizers(sgd([*model.parameters(), *other.parameters()]))


@on_ranks(2)
def test_norm_that_is_not_finite_is_an_error_on_all_ranks() -> None:
    run = train("zero3")
    x, y = next(iter(loader()))
    scale = float("inf") if run.fabric.global_rank else 1.0  # on one rank: an error on all
    run.fabric.backward(nn.functional.mse_loss(run.model(x), y) * scale)
    with pytest.raises(RuntimeError, match="the gradient norm is (nan|inf)"):
        run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0)
    norm = run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0, error_if_nonfinite=False)
    assert norm is not None and not norm.isfinite()


@on_ranks(2)
def test_plain_backward_is_refused() -> None:
    run = train("zero3")
    x, y = next(iter(loader()))
    with pytest.raises(RuntimeError, match=r"fabric\.backward\(loss\)"):
        nn.functional.mse_loss(run.model(x), y).backward()


@on_ranks(2)
def test_loss_scaling_skips_steps_on_all_ranks() -> None:
    """16-mixed, which Fabric itself leaves to GPUs."""
    run = train("zero3", plugins=FabricPrecision("16-mixed", LossScaler(init_scale=64.0)), clip={"max_norm": 1.0})
    scaler = run.fabric.strategy.precision.scaler
    assert scaler.scale == 64.0 and run.losses[-1] < run.losses[0]
    torch.testing.assert_close(run.norms, train("ddp", clip={"max_norm": 1.0}).norms, rtol=0.05, atol=0.01)
    before = run.fabric.strategy.get_module_state_dict(run.model._forward_module)
    x, y = next(iter(loader()))
    scale = float("inf") if run.fabric.global_rank else 1.0
    run.fabric.backward(nn.functional.mse_loss(run.model(x), y) * scale)
    run.optimizer.step()
    after = run.fabric.strategy.get_module_state_dict(run.model._forward_module)
    assert scaler.scale == 32.0
    assert all(torch.equal(before[name], after[name]) for name in before)
