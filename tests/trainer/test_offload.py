"""Offload through the Trainer: presets by name train as without it, are saved and resumed, validate and average."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from rich.console import Console

from lightning_zero import ZeroStrategy, presets
from lightning_zero.config import ConfigError
from lightning_zero.engine import Engine
from lightning_zero.trainer import summary
from tests.harness import on_ranks
from tests.trainer.toys import (
    Lit,
    assert_same,
    assert_weights,
    fit,
    optimizer_states,
    record,
    seeded,
    trainer,
    whole_loader,
)

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]

# A preset, and the one that it must equal.
PRESETS = [
    ("zero1_offload", "zero1"),
    ("zero2_offload", "zero2"),
    ("zero3_offload_optimizer", "zero3"),
    ("zero3_offload", "zero3"),
    ("zero3_nvme", "zero3"),
]
PAIRS = pytest.mark.parametrize(("preset", "plain"), PRESETS, ids=lambda name: name)
SOME_PAIRS = pytest.mark.parametrize(("preset", "plain"), [PRESETS[0], PRESETS[4]], ids=lambda name: name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path


def strategy(name: str, folder: Path) -> ZeroStrategy:
    """What the Trainer makes of the name; the folder is the environment's."""
    os.environ["LIGHTNING_ZERO_NVME_PATH"] = str(folder / "disk")  # the pool restores it
    row = presets.PRESETS[name]
    return ZeroStrategy(row.stage, offload=row.offload)


def adamw() -> Lit:
    module: Lit = seeded(lambda: Lit(optimizer="adamw", scheduler="step"))
    return module


@pytest.mark.sample
@on_ranks(2, full=(1,))
@PAIRS
def test_fit_with_validation(preset: str, plain: str, folder: Path) -> None:
    settings: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    expected = fit(plain, folder, adamw(), **settings)
    found = fit(strategy(preset, folder), folder, adamw(), **settings)
    assert_same(found, expected, tolerance=0.0, what=preset)
    assert found.module.evaluated == expected.module.evaluated
    _release(found.trainer)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(
    ("preset", "plain"),
    [
        pytest.param(*pair, marks=() if pair[0] in ("zero2_offload", "zero3_nvme") else pytest.mark.full)
        for pair in PRESETS
    ],
    ids=[pair[0] for pair in PRESETS],
)
def test_save_and_resume(preset: str, plain: str, folder: Path) -> None:
    """In the row itself, from none, and to none."""
    whole = fit(plain, folder, adamw(), max_epochs=3)
    for name in (preset, plain):
        part = fit(strategy(name, folder), folder, adamw(), max_epochs=2)
        part.trainer.save_checkpoint(folder / f"{name}.ckpt")
        _release(part.trainer)
    files = [torch.load(folder / f"{name}.ckpt", weights_only=False) for name in (preset, plain)]
    assert_weights(files[0]["state_dict"], files[1]["state_dict"], tolerance=0.0)
    torch.testing.assert_close(files[0]["optimizer_states"], files[1]["optimizer_states"], rtol=0, atol=0)
    for saved_by, loaded_by in ((preset, preset), (preset, plain), (plain, preset)):
        module = seeded(lambda: Lit(optimizer="adamw", scheduler="step"), seed=11)
        found = fit(strategy(loaded_by, folder), folder, module, max_epochs=3, ckpt_path=folder / f"{saved_by}.ckpt")
        assert found.losses == whole.losses[-len(found.losses) :]
        assert_weights(found.weights, whole.weights, tolerance=0.0, what=f"{saved_by} -> {loaded_by}")
        torch.testing.assert_close(optimizer_states(found.trainer), optimizer_states(whole.trainer), rtol=0, atol=0)
        _release(found.trainer)


def _release(of: Any) -> None:
    engine = of.strategy.engine
    assert isinstance(engine, Engine)
    engine.release()


@on_ranks(2, full=(1,))
@SOME_PAIRS
def test_evaluation_of_the_trained_module(preset: str, plain: str, folder: Path) -> None:
    found = []
    for name in (preset, plain):
        run = fit(strategy(name, folder), folder, adamw(), max_epochs=1)
        later = trainer(strategy(name, folder), folder)
        results = [
            later.validate(run.module, whole_loader(4), verbose=False),
            later.test(run.module, whole_loader(4), verbose=False),
        ]
        predictions = later.predict(run.module, whole_loader(4))
        found.append((results, predictions))
        _release(later)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@on_ranks(2)
@SOME_PAIRS
def test_weight_averaging(preset: str, plain: str, folder: Path) -> None:
    """Updates, the swap for validation and the final copy reach masters in files too."""
    found = []
    for name in (preset, plain):
        callback = EMAWeightAveraging(decay=0.7)
        run = fit(strategy(name, folder), folder, adamw(), callbacks=[callback])
        run.trainer.save_checkpoint(folder / f"{name}.ckpt")
        found.append(record(run.trainer, run.module))
        _release(run.trainer)
    assert_same(found[0], found[1], tolerance=0.0)
    files = [torch.load(folder / f"{name}.ckpt", weights_only=False) for name in (preset, plain)]
    assert_weights(files[0]["state_dict"], files[1]["state_dict"], tolerance=0.0)


@on_ranks(1, 2)
def test_two_trainers_one_after_the_other(folder: Path) -> None:
    """The first one's module stays sharded, in the same folder."""
    first = fit(strategy("zero3_nvme", folder), folder, adamw(), max_epochs=1)
    second = fit(strategy("zero3_nvme", folder), folder, adamw(), max_epochs=1)
    assert_same(second, first, tolerance=0.0)
    for run in (first, second):
        _release(run.trainer)


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("preset", "where"),
    [
        ("zero3", "device"),
        ("zero3_offload", "host"),
        ("zero1_offload", "parameters device, gradients host, optimizer host"),
        ("zero3_nvme", "parameters nvme, gradients host, optimizer nvme"),
    ],
)
def test_the_table_of_units_says_where_things_rest(preset: str, where: str, folder: Path) -> None:
    run = fit(strategy(preset, folder), folder, adamw(), max_epochs=1)
    engine = run.trainer.strategy.engine  # type: ignore[attr-defined]
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with mock.patch.object(summary, "Console", return_value=console):
        summary.print_units(engine)
    rows = [line for line in console.export_text().splitlines() if "blocks" in line or "(root)" in line]
    assert len(rows) == 2
    assert all(row.rstrip(" │").endswith(where) for row in rows), rows
    _release(run.trainer)


# -- steps inside the backward ----------------------------------------------------------------------------------------


class Watching(Callback):
    """A hook of the user's between backward and step."""

    def on_before_optimizer_step(self, *_: Any) -> None: ...


# -- before any process starts ----------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, got in ((tmp_path / "no", "does not exist"), (tmp_path / "file", "is not a folder")):
        with pytest.raises(ConfigError, match=rf"zero.offload.nvme_path: expected .* {got}"):
            ZeroStrategy("zero3", offload={"name": "nvme", "nvme_path": str(path)})
