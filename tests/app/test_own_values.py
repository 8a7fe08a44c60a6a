"""A class of the user's own gets what the user has set, wherever that was, and nothing of our files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_zero.app import parts, train
from lightning_zero.app.overrides import explicit_keys
from lightning_zero.app.schema import TrainConfig, register_schema

FILES = {
    "model/mine.yaml": "_target_: users.Net\nn_layer: 5\nwidth: 9\n",
    "experiment/mine.yaml": "# @package _global_\ndefaults: [tiny]\nmodel: {n_head: 4, net: {a: 1, b: {c: 2}}}\n",
    "experiment/longer.yaml": "# @package _global_\ndata: {block_size: 99}\n",
}


@pytest.fixture
def config_of(tmp_path: Path) -> Iterator[Callable[..., TrainConfig]]:
    for name, text in FILES.items():
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    register_schema()

    def config_of(*overrides: str, own_files: bool = True) -> TrainConfig:
        own = [f"hydra.searchpath=[file://{tmp_path}]"] * own_files
        cfg = compose("train", [*own, "run_dir=run", *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        return train.train_config(cfg)

    with initialize_config_module("lightning_zero.conf.app", version_base="1.3"):
        yield config_of


def values(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "_target_"}


MINE = "model._target_=users.Net"


def test_a_class_of_ones_own_gets_nothing_of_our_files(config_of: Callable[..., TrainConfig]) -> None:
    """Names such as n_layer and dropout are in everybody's GPT, and values of ours would replace its defaults."""
    for own_files in (False, True):
        config = config_of("experiment=tiny", MINE, "data._target_=users.Data", own_files=own_files)
        assert config.model == {"_target_": "users.Net"} and config.data == {"_target_": "users.Data"}
    config = config_of("experiment=tiny", MINE, "model.dropout=0.3", "+model.net.a=1", "data.block_size=32")
    assert values(config.model) == {"dropout": 0.3, "net": {"a": 1}, "block_size": 32}  # linked to data.block_size
    assert config.data["batch_size"] == 4  # the data is ours


def test_files_of_ones_own_count_and_win_over_an_experiment_of_ours(config_of: Callable[..., TrainConfig]) -> None:
    config = config_of("experiment=mine", "model=mine", "model.net.b.c=7")
    assert values(config.model) == {"n_layer": 5, "width": 9, "n_head": 4, "net": {"a": 1, "b": {"c": 7}}}
    assert {"model.n_head", "model.net.a", "model", "experiment"} <= explicit_keys()
    assert values(config_of("experiment=longer", MINE).model) == {"block_size": 99}


def test_a_class_of_ours_gets_what_it_takes_of_an_experiment_for_another(
    config_of: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    config = config_of("experiment=tiny", "model=llama", "data=synthetic")
    parts.build_model(config, explicit_keys())
    assert "LitCausalLM takes no n_layer, n_head, d_model: not passed to it." in capsys.readouterr().out
