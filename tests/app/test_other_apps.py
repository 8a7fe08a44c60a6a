"""Hydra apps of other people: what they see of us unasked, and what they get when they ask."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_zero.app.unread import check_read
from lightning_zero.presets import PRESETS
from lightning_zero.settings import ConfigError, ZeroConfig, make_config
from lightning_zero.trainer.strategy import ZeroStrategy
from tests.harness import run_command

# A project of the kind of lightning-hydra-template: groups of its own under the names that everyone takes.
FILES = {
    "train.yaml": """
defaults: [_self_, model: vit, experiment: null, debug: null, logger: null, strategy: null]
trainer: {_target_: lightning.pytorch.Trainer, strategy: auto}
optimizer: adam
seed: 0
""",
    "model/vit.yaml": "depth: 6\nn_layer: 12\n",
    "experiment/wide.yaml": "# @package _global_\nmodel: {depth: 9}\n",
    "debug/quick.yaml": "# @package _global_\nseed: 7\n",
    "logger/file.yaml": "path: log.txt\n",
    "strategy/ddp.yaml": "_target_: lightning.pytorch.strategies.DDPStrategy\n",
}
OURS = "hydra.searchpath=[pkg://lightning_zero.conf]"


@pytest.fixture
def conf(tmp_path: Path) -> Iterator[Path]:
    for name, text in FILES.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        yield tmp_path / "conf"


def test_an_app_that_asks_for_nothing_sees_the_group_zero_alone(conf: Path) -> None:
    plain = compose("train", ["optimizer=sgd", "debug=quick", "experiment=wide", "+data=mnist", "+machine=h100"])
    assert plain == {
        "trainer": {"_target_": "lightning.pytorch.Trainer", "strategy": "auto"},
        "optimizer": "sgd",
        "seed": 7,
        "model": {"depth": 9, "n_layer": 12},
        "data": "mnist",
        "machine": "h100",
    }
    loader = GlobalHydra.instance().config_loader()
    own = {"model", "experiment", "debug", "logger", "strategy"}
    assert {group for group in loader.list_groups("") if group != "hydra"} == own | {"zero"}
    for mistake in ("experiment=tiny", "model=llama", "logger=wandb", "debug=overfit", "strategy=zero3"):
        group, _, choice = mistake.partition("=")
        with pytest.raises(HydraException, match=f"Could not find '{group}/{choice}'"):
            compose("train", [mistake])
        assert loader.get_group_options(group) == [Path(name).stem for name in FILES if name.startswith(f"{group}/")]


def made(cfg: DictConfig, where: str) -> Any:
    strategy = instantiate(OmegaConf.select(cfg, where))
    assert isinstance(strategy, ZeroStrategy)
    return strategy.config


WANTED = ["zero/stage=zero2", "zero/precision=bf16", "zero/offload=optimizer_cpu", "zero.reduce_bucket_bytes=64MB"]


@pytest.mark.parametrize(("overrides", "where"), [
    (["+zero/into=trainer"], "trainer.strategy"),
    (["+zero/into=strategy"], "strategy"),
    ([OURS, "strategy=zero"], "strategy"),
    ([OURS, "+strategy@trainer.strategy=zero"], "trainer.strategy"),
])  # fmt: skip
def test_the_groups_reach_the_strategy(conf: Path, overrides: list[str], where: str) -> None:
    zero = made(compose("train", [*overrides, *WANTED]), where)
    assert zero == make_config(stage="zero2", precision="bf16", offload="optimizer_cpu", reduce_bucket_bytes=64_000_000)
    assert made(compose("train", overrides), where) == ZeroConfig()


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("_notebook")])
def test_each_preset_is_a_file_of_strategy(conf: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, path = PRESETS[name], ["zero.offload.nvme_path=/tmp"] if "nvme" in name else []
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", "/tmp")
    expected = make_config(stage=row.stage, offload=row.offload)
    assert made(compose("train", [OURS, f"strategy={name}", *path]), "strategy") == expected
    changed = compose("train", [OURS, f"strategy={name}", "zero/stage=zero1", "zero/offload=none"])
    assert made(changed, "strategy") == make_config(stage="zero1")  # the command line wins


def refusal(overrides: list[str], *made: ZeroConfig) -> str:
    """What is said as a Trainer is made, in an app with these overrides and strategies with these settings."""
    cfg = compose("train", overrides, return_hydra_config=True)
    with mock.patch("lightning_zero.app.unread.strategies", [SimpleNamespace(config=each) for each in made]):
        try:
            check_read(cfg.hydra)
        except ConfigError as error:
            return str(error)
    return ""


def test_settings_that_no_strategy_reads_are_refused(conf: Path) -> None:
    chosen = ["+zero/into=trainer", "zero/precision=float8", "zero.prefetch_bytes=64MB", "zero.unit.classes=[Block]"]
    zero = OmegaConf.to_object(compose("train", chosen).zero)
    other, later = make_config(stage="zero3"), make_config(stage="zero3", prefetch_bytes="64MB")
    assert isinstance(zero, ZeroConfig) and not refusal(chosen, zero) and not refusal(chosen, other, zero)
    assert refusal(["+zero/precision=bf16"]).startswith("zero/precision=bf16: expected a strategy that reads the group")
    assert "got one with other settings" in refusal(["+zero/stage=zero2"], other)
    assert refusal(["+zero/precision=float8"], other) and refusal([*chosen, "zero/offload=cpu"], zero)
    assert not refusal(["trainer.strategy=zero3"], other) and not refusal(["+zero/stage=zero3"], other)
    assert not refusal(["+zero.prefetch_bytes=64MB"], other, later)
    assert refusal(["+zero.prefetch_bytes=64MB"], other).startswith("zero.prefetch_bytes=64MB: ")
    assert refusal(["+zero=default"], make_config(stage="zero1")) and not refusal(["+zero=default", "~zero"])


def test_the_check_is_called_as_a_trainer_is_made(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [*entry_points(group="lightning.pytorch.callbacks_factory", name="lightning_zero")]
    points += entry_points(group="lightning.fabric.callbacks_factory", name="lightning_zero")
    assert [point.value for point in points] == ["hydra_plugins.lightning_zero_unread:check"] * 2
    Trainer(accelerator="cpu", logger=False)
    HydraConfig.instance().set_config(compose("train", ["+zero/stage=zero2"], return_hydra_config=True))
    try:
        for make in (Trainer, Fabric):
            with pytest.raises(ConfigError, match="zero/stage=zero2: expected a strategy that reads the group zero"):
                make(accelerator="cpu", strategy="zero1")
    finally:
        HydraConfig.instance().cfg = None


def test_a_package_without_its_groups_says_so(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SourcesRegistry.instance().resolve("lightning_zero").is_group.__globals__, "CONF", tmp_path)
    assert compose("train", ["optimizer=sgd"]).optimizer == "sgd"
    with pytest.raises(ConfigError, match="zero/stage: expected the groups of lightning_zero in .*, got no folder"):
        compose("train", ["+zero/stage=zero2"])


APP = """
import sys
import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(cfg):
    zero = OmegaConf.to_object(cfg.zero)
    print(type(zero).__name__, zero.stage.name.name, zero.precision.name.name, zero.reduce_bucket_bytes)
    print(GlobalHydra.instance().config_loader().get_group_options("hydra/launcher"))
    print("heavy:", [m for m in ("torch", "lightning") if m in sys.modules])

main()
"""


@pytest.mark.full
def test_an_app_that_reads_the_group_itself_gets_our_types_and_errors(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text("defaults: [zero: default, _self_]\nhydra: {output_subdir: null}\n")
    (tmp_path / "app.py").write_text(APP)
    given = ("zero/stage=zero1", "zero/precision=bf16", "zero.reduce_bucket_bytes=5")
    done = run_command("python", "app.py", *given, folder=tmp_path, code=0)
    assert done.stdout.splitlines() == ["ZeroConfig zero1 bf16 5", "['basic']", "heavy: []"]
    done = run_command("python", "app.py", "zero.prefetch_bytes=-5", folder=tmp_path)
    assert done.returncode != 0
    assert "zero.prefetch_bytes: expected a number >= 0, got -5" in done.stderr
