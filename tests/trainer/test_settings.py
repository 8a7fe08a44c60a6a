"""Settings of the strategy and precision flags of the Trainer reach the engine: each is seen there.

Those that promise it change no number. What they do is shown on the engine (``tests/engine``).
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from torch import Tensor, nn

import lightning_zero
from lightning_zero import ZeroFabricStrategy, ZeroPrecision, ZeroStrategy
from lightning_zero.settings import ConfigError, ZeroConfig, make_config
from tests.harness import on_ranks
from tests.models import Does
from tests.trainer import toys
from tests.trainer.toys import Lit, Run, assert_same, fit, odd, seeded

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]

# Fields that change no number, by group.
EQUAL: dict[str, dict[str, Any]] = {
    "offload.host": {"offload": "cpu"},
    "offload.files": {"offload": {"name": "nvme", "nvme_path": ""}},
    "offload.auto": {
        "offload": {"name": "auto", "device_budget": 4096, "host_budget": 9000, "nvme_budget": 1 << 20, "nvme_path": ""}
    },
    "unit.classes": {"unit": {"classes": ["Linear"]}},
    "unit.sizes": {"unit": {"max_bytes": 1 << 20}},
    "optimizer": {"optimizer": {"sharding": "slices"}},
    "compile": {"compile": {"name": "blocks", "arguments": {"backend": "eager", "dynamic": False}}},
    "prefetch_bytes": {"prefetch_bytes": 0},
    "keep_gathered_bytes": {"keep_gathered_bytes": 1 << 20},
    "reduce_bucket_bytes": {"reduce_bucket_bytes": 1 << 10},
    "activation_checkpointing": {"activation_checkpointing": "blocks"},
    "dynamic_graph": {"dynamic_graph": True},
    "hybrid_shard": {"hybrid_shard": "flat"},
    "stall_timeout_s": {"stall_timeout_s": 50.0},
    "gather_after_fit": {"gather_after_fit": False},
}
shard_plain = partial(lightning_zero.shard, nn.Linear(2, 2))
SHORT: dict[str, Any] = {"max_epochs": 1, "count": 16, "limit_val_batches": 1}


def in_folder(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Give the settings with ``folder`` where a path is to be."""
    return {
        group: value | {"nvme_path": str(folder)} if isinstance(value, dict) and "nvme_path" in value else value
        for group, value in settings.items()
    }


@functools.cache
def plain() -> Run:
    """Without any setting. (Workers are used again, and so is this.)"""
    return fit("zero3", tempfile.mkdtemp(), odd(), **SHORT)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("name", EQUAL)
def test_setting_is_seen_in_the_engine_and_changes_no_number(name: str, tmp_path: Path) -> None:
    strategy = ZeroStrategy(3, **in_folder(EQUAL[name], tmp_path))
    found = fit(strategy, tmp_path, odd(), **SHORT)
    group = name.partition(".")[0]
    assert getattr(strategy.engine.config, group) != getattr(ZeroConfig(), group)
    found.weights = {key.replace("_orig_mod.", ""): value for key, value in found.weights.items()}
    assert_same(found, plain(), tolerance=0)
    strategy.engine.release()


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (ZeroConfig, {"fingerprint": 0}, "zero.fingerprint: expected a number > 0, got 0"),
    (make_config, {"sequence_parallel": 0}, "> 0"),
    (make_config, {"sequence_parallel": True}, "a whole number"),
    (make_config, {"sequence_parallel": 2, "compile": "blocks"}, "zero/compile=none"),
    (ZeroStrategy, {"stage": "zero4"}, "^stage: expected one of zero0, zero1, zero2, zero3, auto, got 'zero4'"),
    (lambda stage: ZeroStrategy("zero1").restage(stage), {"stage": "auto"}, "restage: expected zero0"),
    *[
        (kind, {"start_method": "spawn"}, "start_method: expected one of popen, fork, got 'spawn'. Set 'fork' in a")
        for kind in (ZeroStrategy, ZeroFabricStrategy)
    ],
    # Without the Trainer nobody follows these.
    (shard_plain, {"stage": "auto"}, "got auto, which only ZeroStrategy resolves"),
    (shard_plain, {"fingerprint": 3}, r"^fingerprint: expected None with lightning_zero\.shard and Fabric"),
    (shard_plain, {"loss": "tokens"}, r"^loss: expected batches with lightning_zero\.shard and Fabric"),
    (shard_plain, {"sequence_parallel": 2}, "ZeroStrategy"),
    (ZeroFabricStrategy, {"sequence_parallel": 2}, "ZeroStrategy"),
]


@pytest.mark.sample
def test_settings_that_cannot_work_are_refused_where_they_are_made() -> None:
    for take, settings, says in REFUSED:
        with pytest.raises(ConfigError, match=says):
            take(**settings)


def test_folder_that_is_not_there_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, got in ((tmp_path / "no", "does not exist"), (tmp_path / "file", "is not a folder")):
        with pytest.raises(ConfigError, match=rf"^offload\['nvme_path'\]: expected .* {got}"):
            ZeroStrategy("zero3", offload={"name": "nvme", "nvme_path": str(path)})


class ProjectionNorm(Does):
    """By its name it keeps fp32, and autocast casts its weight."""


class StepsInside(toys.ByHand):
    """Two steps on one batch inside one training step, and so inside one autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = ProjectionNorm(lambda m, x: x @ m.weight, weight=nn.Parameter(torch.eye(4)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.projection(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.projection.parameters(), lr=0.5)


@on_ranks(2)
def test_step_inside_autocast_leaves_no_stale_weights(tmp_path: Path) -> None:
    runs = [fit(s, tmp_path, seeded(StepsInside), precision="bf16-mixed", max_steps=4) for s in toys.ALL_STAGES]
    losses = runs[0].losses
    assert losses[0] != losses[1] and losses[2] != losses[3]
    for run in runs[1:]:
        assert_same(run, runs[0], tolerance=0)


class LogsTogether(Lit):
    def training_step(self, *args: Any) -> Tensor:
        loss = super().training_step(*args)
        self.log("together", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


@on_ranks(1)
def test_a_lone_rank_gets_no_hint_on_what_it_has_given(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen, mock.patch.object(toys, "_quiet"):
        warnings.simplefilter("always")
        fit("zero1", tmp_path, seeded(LogsTogether), max_epochs=1)
    assert not [str(w.message) for w in seen if "'together'" in str(w.message)]


def test_plugin_is_ours_whatever_lightning_chose() -> None:
    for flag in ("32-true", "32", "bf16-mixed", "bf16", "bf16-true", "16-true", "64-true", "64"):
        plugin = trainer_here(precision=flag).precision_plugin
        assert isinstance(plugin, ZeroPrecision)
        assert plugin.precision.split("-")[0] == flag.split("-")[0]


def trainer_here(strategy: Any = None, **settings: Any) -> pl.Trainer:
    """In the test's own process, which stands in no group: nothing may be run."""
    return pl.Trainer(strategy=strategy or ZeroStrategy(3), accelerator="cpu", devices=2, logger=False, **settings)


@pytest.mark.sample
def test_plugins_that_are_refused() -> None:
    """Those of other packages, and one of the user's."""
    for name in ("BitsandbytesPrecision", "TransformerEnginePrecision", "OwnPrecision"):
        plugin = type(name, (LightningPrecision,), {"precision": "8-mine"})()
        with pytest.raises(ConfigError, match=rf"{name}.*Trainer\(precision=\)"):
            trainer_here(plugins=[plugin])


def test_precision_may_be_the_strategys_or_a_plugin_and_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected 'bf16-mixed', because the strategy .* 'bf16', .*'bf16-true'"):
        trainer_here(ZeroStrategy("zero3", precision="bf16"), precision="bf16-true")
    for agreed in ("bf16-mixed", None):
        assert trainer_here(ZeroStrategy("zero3", precision="bf16"), precision=agreed).precision == "bf16-mixed"
    assert trainer_here(plugins=[ZeroPrecision("bf16-mixed")]).precision == "bf16-mixed"
    assert trainer_here(ZeroStrategy("zero3", precision_plugin=ZeroPrecision("bf16-true"))).precision == "bf16-true"
