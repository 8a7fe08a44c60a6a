"""``import lightning_zero`` makes the strategy names known, in whatever order things are imported, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  here, because it sets environment variables
import pytest

from lightning_zero.config import ConfigError
from lightning_zero.presets import PRESETS

ROOT = Path(__file__).parent.parent.parent


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


KNOWN = "from lightning.pytorch.strategies import StrategyRegistry as R; print(sorted(n for n in R if n in P))"
PRELUDE = "from lightning_zero.presets import PRESETS as P; "


@pytest.mark.full
def test_import_is_light() -> None:
    heavy = "torch", "lightning", "hydra", "omegaconf", "numpy"
    code = f"import sys, lightning_zero; print([m for m in {heavy} if m in sys.modules])"
    assert python(code).strip() == "[]"


@pytest.mark.full
@pytest.mark.parametrize("order", ["lightning_zero, lightning.pytorch", "lightning.pytorch, lightning_zero"])
def test_presets_are_known_in_either_order(order: str) -> None:
    assert python(f"import {order}; {PRELUDE}{KNOWN}").strip().splitlines()[-1] == str(sorted(PRESETS))


def test_names_are_lower_case() -> None:
    """Lightning looks a name up in lower case: one with capitals could never be reached."""
    assert all(name == name.lower() for name in PRESETS)


def test_registering_again_changes_nothing() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_zero.trainer.registration import register_presets

    before = {name: StrategyRegistry[name]["strategy"] for name in PRESETS}
    finders = list(sys.meta_path)
    register_presets()
    assert {name: StrategyRegistry[name]["strategy"] for name in PRESETS} == before
    assert sys.meta_path == finders


def test_trainer_takes_every_name_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Trainer

    from lightning_zero import ZeroStrategy
    from lightning_zero.config import make_config

    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", str(Path.cwd()))
    for name in PRESETS:
        trainer = Trainer(strategy=name.upper(), accelerator="cpu", devices=2, logger=False, barebones=True)
        assert isinstance(trainer.strategy, ZeroStrategy)
        assert trainer.strategy.config == make_config(stage=PRESETS[name].stage, offload=PRESETS[name].offload)
        assert trainer.world_size == 2


def test_a_preset_with_files_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Trainer

    monkeypatch.delenv("LIGHTNING_ZERO_NVME_PATH", raising=False)
    with pytest.raises(ConfigError) as error:
        Trainer(strategy="zero3_nvme", accelerator="cpu", devices=1, logger=False)
    assert "LIGHTNING_ZERO_NVME_PATH" in str(error.value)
    assert "zero.offload.nvme_path" in str(error.value)


def test_public_names() -> None:
    import lightning_zero

    assert lightning_zero.ZeroConfig is __import__("lightning_zero.config", fromlist=["ZeroConfig"]).ZeroConfig
    for name in lightning_zero.__all__:
        assert getattr(lightning_zero, name) is not None
        assert name in dir(lightning_zero)
    with pytest.raises(AttributeError, match="no attribute 'ZeroStrategi'"):
        _ = lightning_zero.ZeroStrategi
