"""LightningCLI takes every setting of ZeroStrategy, from the command line and from YAML."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

import lightning_zero
from lightning_zero.settings import ZeroConfig, make_config
from tests.trainer.toys import Lit

pytest.importorskip("jsonargparse")

CLASS = "--trainer.strategy=lightning_zero.ZeroStrategy"
OTHERS = {
    "stage": "zero2",
    "precision": {"name": "bf16-mixed", "reduce_dtype": "bf16"},
    "offload": {"name": "optimizer_cpu", "host_budget": "1GB"},
    "unit": {"classes": ["Block"]},
    "optimizer": {"skip_nonfinite": 3},
    "checkpoint": {"name": "sharded", "background": True},
    "compile": "none",
    "reduce_bucket_bytes": "64MB",
    "gather_after_fit": False,
    "stall_timeout_s": 9,
    "tensor_parallel": 1,
    "hybrid_shard": "node",
    "uneven": "join",
    "fingerprint": 5,
}


def made(*arguments: str) -> Any:
    """The settings of the strategy that a command line makes."""
    of_trainer = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.barebones=true")
    cli = LightningCLI(
        Lit, run=False, save_config_callback=None, seed_everything_default=False, args=[*of_trainer, *arguments]
    )
    return cli.trainer.strategy.config  # type: ignore[attr-defined]


def flags(settings: dict[str, Any], path: str = "--trainer.strategy") -> list[str]:
    """Each setting that is not null as an argument of its own; mappings that are empty as they are."""
    found = []
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found += flags(value, f"{path}.{key}")
        elif value is not None:
            found.append(f"{path}.{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}")
    return found


def plain(config: Any) -> dict[str, Any]:
    """All settings, as YAML has them."""
    found: dict[str, Any] = {}
    for name in (f.name for f in fields(config)):
        value = getattr(config, name)
        if is_dataclass(value):
            found[name] = plain(value)
        else:
            found[name] = value.name if isinstance(value, Enum) else value
    return found


@pytest.mark.parametrize("settings", [OTHERS, plain(ZeroConfig())], ids=["others", "all"])
def test_settings_come_from_the_command_line_and_from_yaml(settings: dict[str, Any], tmp_path: Path) -> None:
    expected = make_config(**settings)
    assert made(CLASS, *flags(settings)) == expected
    strategy = {"class_path": "lightning_zero.ZeroStrategy", "init_args": settings}
    (tmp_path / "cli.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    assert made(f"--config={tmp_path / 'cli.yaml'}") == expected
    assert made(f"--config={tmp_path / 'cli.yaml'}", "--trainer.strategy.prefetch_bytes=256MiB") == expected


@pytest.mark.parametrize(("argument", "words"), [
    ("prefetch_bytes=-1", "prefetch_bytes: expected a number >= 0, got -1. Change prefetch_bytes."),
    ("fingerprint=two", "Expected a <class 'int'>"),
    ("stage=zero4", "'zero0', 'zero1', 'zero2', 'zero3', 'auto'"),
    ("unit.clases=[Block]", "Unexpected keys: {'clases'}"),
    ("prefetch=1", "Option 'prefetch' is not accepted"),
])  # fmt: skip
def test_what_is_wrong_is_refused(argument: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as error:
        made(CLASS, f"--trainer.strategy.{argument}")
    assert words in f"{error.value} {capsys.readouterr().err}"


def test_help_lists_each_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        made("--trainer.strategy.help=lightning_zero.ZeroStrategy")
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"--trainer.strategy.{f.name} " in said for f in fields(ZeroConfig))
    assert "number of adjacent ranks that divide the experts" in said


def test_signatures_list_each_setting_with_its_default() -> None:
    for strategy in (lightning_zero.ZeroStrategy, lightning_zero.ZeroFabricStrategy):
        found = inspect.signature(strategy).parameters
        assert {f.name for f in fields(ZeroConfig)} < set(found)
        assert all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in found.values())
        assert (found["prefetch_bytes"].default, found["loss"].default, found["unit"].default) == (
            2**28,
            "batches",
            None,
        )

    class Own(lightning_zero.ZeroStrategy):
        def __init__(self, mine: int) -> None: ...

    assert list(inspect.signature(Own).parameters) == ["mine"]
