"""Precision flags of the Trainer: what they mean here, and that all stages mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.config import ConfigError
from tests.harness import on_ranks
from tests.trainer.toys import (
    ALL_STAGES,
    ByHand,
    Lit,
    assert_same,
    assert_weights,
    fit,
    loader,
    seeded,
    trainer,
    weights,
)

pytestmark = pytest.mark.full


class Looking(Lit):
    """Notes the dtypes that a forward and a hook on gradients meet."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[tuple[str, torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.dtypes |= {("weight", self.first.weight.dtype), ("norm", self.blocks[0].norm.weight.dtype)}
        self.dtypes |= {("input", x.dtype), ("output", out.dtype)}
        return out

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.dtypes |= {("gradient", norm.dtype) for norm in grad_norm(self, 2).values()}


WHERE = ("weight", "norm", "input", "output", "gradient")
MET = {  # the dtypes of these
    "32-true": [torch.float32] * 5,
    "bf16-mixed": [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.float32],
    "bf16-true": [torch.bfloat16] * 5,
    "16-true": [torch.float16] * 5,
    "64-true": [torch.float64] * 5,
}


@on_ranks(2)
@pytest.mark.parametrize("flag", MET)
def test_forward_meets_the_dtypes_of_the_flag(flag: str, tmp_path: Path) -> None:
    for stage in ("zero1", "zero3"):
        module = fit(stage, tmp_path, seeded(Looking), precision=flag, max_steps=2).module
        assert module.dtypes == set(zip(WHERE, MET[flag], strict=True)), stage


@on_ranks(2)
def test_masters_start_from_unrounded_weights(tmp_path: Path) -> None:
    module = seeded(Lit)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    of = trainer("zero3", tmp_path, precision="bf16-mixed")
    of.validate(module, loader(), verbose=False)
    assert_weights(weights(of), before, tolerance=0)


class ProjectionNorm(nn.Module):
    """By its name it keeps fp32, and autocast casts its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class StepsInside(ByHand):
    """Two steps on one batch inside one training step, and so inside one autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = ProjectionNorm()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.projection(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.projection.parameters(), lr=0.5)


@on_ranks(2)
def test_step_inside_autocast_leaves_no_stale_weights(tmp_path: Path) -> None:
    runs = [fit(s, tmp_path, seeded(StepsInside), precision="bf16-mixed", max_steps=4) for s in ALL_STAGES]
    losses = runs[0].losses
    assert losses[0] != losses[1] and losses[2] != losses[3]
    for run in runs[1:]:
        assert_same(run, runs[0], tolerance=0)


# -- what the Trainer chooses -----------------------------------------------------------------------------------------


def test_plugin_is_ours_whatever_lightning_chose() -> None:
    for flag in ("32-true", "32", "bf16-mixed", "bf16", "bf16-true", "16-true", "64-true", "64"):
        plugin = trainer_here(precision=flag).precision_plugin
        assert isinstance(plugin, ZeroPrecision)
        assert plugin.precision.split("-")[0] == flag.split("-")[0]
    assert trainer_here(precision="16-mixed").precision_plugin.precision == "bf16-mixed"  # on a CPU, as Lightning does


def trainer_here(strategy: Any = None, **settings: Any) -> pl.Trainer:
    """In the test's own process, which stands in no group: nothing may be run."""
    return pl.Trainer(
        strategy=strategy or ZeroStrategy("zero3"), accelerator="cpu", devices=2, logger=False, **settings
    )


@pytest.mark.sample
def test_plugins_that_are_refused() -> None:
    """Those of packages that are not installed here, and one of the user's."""
    with pytest.raises((ConfigError, ModuleNotFoundError), match=r"precision|transformer_engine"):
        trainer_here(precision="transformer-engine")
    for name in ("BitsandbytesPrecision", "TransformerEnginePrecision", "OwnPrecision"):
        plugin = type(name, (LightningPrecision,), {"precision": "8-mine"})()
        with pytest.raises(ConfigError, match=rf"{name}.*Trainer\(precision=\)"):
            trainer_here(plugins=[plugin])


def test_precision_may_be_the_strategys_or_a_plugin_and_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected 'bf16-mixed', which the strategy's .* 'bf16' .*'bf16-true'"):
        trainer_here(ZeroStrategy("zero3", precision="bf16"), precision="bf16-true")
    for agreed in ("bf16-mixed", None):
        assert trainer_here(ZeroStrategy("zero3", precision="bf16"), precision=agreed).precision == "bf16-mixed"
    assert trainer_here(plugins=[ZeroPrecision("bf16-mixed")]).precision == "bf16-mixed"
    assert trainer_here(ZeroStrategy("zero3", precision_plugin=ZeroPrecision("bf16-true"))).precision == "bf16-true"
