"""A checkpoint that is not there is named before any other process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError
from lightning_zero.trainer import launchers


class Started(Exception):
    pass


@pytest.mark.parametrize("start_method", ["popen", "fork"])
@pytest.mark.parametrize("function", ["fit", "validate"])
def test_a_missing_checkpoint_is_refused_before_the_start(
    start_method: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: Any) -> None:
        raise Started

    monkeypatch.setattr(launchers.ScriptLauncher, "_call_children_scripts", start)
    monkeypatch.setattr(launchers.ForkLauncher, "_fit_to_fork", start)
    (tmp_path / "there.ckpt").touch()
    for path, error in {"missing.ckpt": ConfigError, "there.ckpt": Started, "": Started}.items():
        run = pl.Trainer(
            strategy=ZeroStrategy("zero3", start_method=start_method), accelerator="cpu", devices=2, logger=False
        )
        with pytest.raises(error, match="missing.ckpt.: there is nothing" if error is ConfigError else None):
            getattr(run, function)(BoringModel(), ckpt_path=str(tmp_path / path) if path else "last")
