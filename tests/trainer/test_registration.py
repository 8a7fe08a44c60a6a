"""``import lightning_zero`` makes the strategy names known, in whatever order things are imported, without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError, make_config
from lightning_zero.presets import PRESETS
from tests.harness import run_command


def python(code: str) -> str:
    """What a fresh interpreter prints last."""
    done = run_command("python", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.full
def test_import_is_light() -> None:
    heavy = "torch", "lightning", "hydra", "omegaconf", "numpy"
    assert python(f"import sys, lightning_zero; print([m for m in {heavy} if m in sys.modules])") == "[]"


@pytest.mark.full
@pytest.mark.parametrize("order", ["lightning_zero, lightning.pytorch", "lightning.pytorch, lightning_zero"])
def test_presets_are_known_in_either_order(order: str) -> None:
    known = "print(sorted(name for name in lightning.pytorch.strategies.StrategyRegistry if name.startswith('zero')))"
    assert python(f"import {order}; {known}") == str(sorted(PRESETS))


def test_trainer_takes_every_name_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", str(Path.cwd()))
    for name in PRESETS:
        trainer = Trainer(strategy=name.upper(), accelerator="cpu", devices=2, logger=False, barebones=True)
        assert isinstance(trainer.strategy, ZeroStrategy)
        assert trainer.strategy.config == make_config(stage=PRESETS[name].stage, offload=PRESETS[name].offload)
        assert trainer.world_size == 2


def test_a_preset_with_files_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_ZERO_NVME_PATH", raising=False)
    with pytest.raises(ConfigError, match=r"(?s)(?=.*LIGHTNING_ZERO_NVME_PATH).*zero\.offload\.nvme_path"):
        Trainer(strategy="zero3_nvme", accelerator="cpu", devices=1, logger=False)


def test_public_names() -> None:
    for name in lightning_zero.__all__:
        assert getattr(lightning_zero, name) is not None
        assert name in dir(lightning_zero)
    with pytest.raises(AttributeError, match="no attribute 'ZeroStrategi'"):
        _ = lightning_zero.ZeroStrategi
