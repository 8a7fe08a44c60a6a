"""Commands of the app, run in the process of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def in_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command of a module with overrides, in an empty folder: exit code, stdout and stderr."""
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(tmp_path)

    def run(module: ModuleType, *overrides: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", [module.__name__.rpartition(".")[2], *overrides])
        code: Any = 0
        try:
            module.main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capfd.readouterr()

    return run
