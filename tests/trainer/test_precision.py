"""Precision flags of the Trainer: what they mean here, and that all stages mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.config import ConfigError
from tests.harness import on_ranks
from tests.trainer.toys import ALL_STAGES, Lit, assert_same, assert_weights, fit, loader, seeded, trainer, weights

pytestmark = pytest.mark.full

FLAGS = ("bf16-mixed", "bf16-true")
TRUE_FLAGS = {"16-true": torch.float16, "64-true": torch.float64}


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


@on_ranks(2)
@pytest.mark.parametrize("flag", ["32-true", *FLAGS, *TRUE_FLAGS])
def test_forward_meets_the_dtypes_of_the_flag(flag: str, tmp_path: Path) -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    expected = {
        "32-true": {"weight": fp32, "norm": fp32, "input": fp32, "output": fp32, "gradient": fp32},
        "bf16-mixed": {"weight": bf16, "norm": fp32, "input": fp32, "output": bf16, "gradient": fp32},
        "bf16-true": {"weight": bf16, "norm": bf16, "input": bf16, "output": bf16, "gradient": bf16},
        **{f: dict.fromkeys(("weight", "norm", "input", "output", "gradient"), d) for f, d in TRUE_FLAGS.items()},
    }[flag]
    for stage in ("zero1", "zero3"):
        module = fit(stage, tmp_path, seeded(Looking), precision=flag, max_steps=2).module
        assert module.dtypes == set(expected.items()), stage


@on_ranks(2)
def test_masters_start_from_unrounded_weights(tmp_path: Path) -> None:
    module = seeded(Lit)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    of = trainer("zero3", tmp_path, precision="bf16-mixed")
    of.validate(module, loader(), verbose=False)
    assert_weights(weights(of), before, tolerance=0)


@on_ranks(2)
def test_module_trains_in_one_precision_after_another(tmp_path: Path) -> None:
    module = seeded(Lit)
    fit("zero3", tmp_path, module, precision="bf16-mixed", max_epochs=1)
    fit("zero3", tmp_path, module, max_epochs=1)
    fit("zero1", tmp_path, module, precision="bf16-true", max_epochs=1)
    assert all(loss == loss for loss in module.losses)


class ProjectionNorm(nn.Module):
    """By its name it keeps fp32, and autocast casts its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class StepsInside(Lit):
    """Two steps on one batch inside one training step, and so inside one autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.projection = ProjectionNorm()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.projection(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

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


def trainer_here(strategy: Any = None, **settings: Any) -> Any:
    """In the test's own process, which stands in no group: nothing may be run."""
    import lightning.pytorch as pl

    strategy = ZeroStrategy("zero3") if strategy is None else strategy
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, **settings)


@pytest.mark.sample
@pytest.mark.parametrize("flag", ["transformer-engine", "transformer-engine-float16"])
def test_flags_that_are_refused(flag: Any) -> None:
    with pytest.raises((ConfigError, ModuleNotFoundError), match=r"precision|transformer_engine"):
        trainer_here(precision=flag)


def test_plugins_that_are_refused() -> None:
    class OwnPrecision(LightningPrecision):
        precision = "8-mine"

    with pytest.raises(ConfigError, match="OwnPrecision"):
        trainer_here(plugins=[OwnPrecision()])


def test_other_refused_plugins_by_name() -> None:
    """Of packages that are not installed here."""

    class BitsandbytesPrecision:
        precision = "nf4"

    class TransformerEnginePrecision:
        precision = "transformer-engine"

    for plugin in (BitsandbytesPrecision(), TransformerEnginePrecision()):
        with pytest.raises(ConfigError, match=rf"{type(plugin).__name__}.*Trainer\(precision=\)"):
            ZeroPrecision.from_plugin(plugin)


def test_precision_that_contradicts_the_strategys_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected 'bf16-mixed', which the strategy's .* 'bf16' .*'bf16-true'"):
        trainer_here(ZeroStrategy("zero3", precision="bf16"), precision="bf16-true")
    for agreed in ("bf16-mixed", None):
        assert trainer_here(ZeroStrategy("zero3", precision="bf16"), precision=agreed).precision == "bf16-mixed"


def test_plugin_of_ours_can_be_given() -> None:
    assert trainer_here(plugins=[ZeroPrecision("bf16-mixed")]).precision == "bf16-mixed"
    strategy = ZeroStrategy("zero3", precision_plugin=ZeroPrecision("bf16-true"))
    assert trainer_here(strategy).precision == "bf16-true"
