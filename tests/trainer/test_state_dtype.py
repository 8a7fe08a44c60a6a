"""Checkpoints of optimizer state in few bits: resumed training is the uninterrupted one, and DDP takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import on_ranks
from tests.trainer.test_sharded import odd, other_weights, sharded
from tests.trainer.toys import assert_weights, fit

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]

WAYS = [
    ("zero3", "zero3", "sharded", "int8"),
    ("zero3_nvme", "zero1", "full", "int8"),
    ("zero1_offload", "zero3_nvme", "sharded", "bf16"),
    ("zero3", "zero3_nvme", "full", "bf16"),
]


@on_ranks(2)
@pytest.mark.parametrize(
    ("saves", "loads", "format", "dtype", "background"),
    [
        pytest.param(*way, background, marks=() if background == (number == 0) else pytest.mark.full)
        for number, way in enumerate(WAYS)
        for background in (False, True)
        if way[2] == "sharded" or not background
    ],
)
def test_resumed_training_is_the_uninterrupted_one_to_the_bit(
    saves: str, loads: str, format: str, dtype: str, background: bool, tmp_path: Path
) -> None:
    """In the background values are read behind training, from where they were."""

    def run(name: str, module: Any, epochs: int, **more: Any) -> Any:
        checkpoint = {"name": format, "background": background}
        strategy = sharded(name, tmp_path, optimizer={"state_dtype": dtype}, checkpoint=checkpoint)
        return fit(strategy, tmp_path, module, max_epochs=epochs, gradient_clip_val=0.5, **more)

    whole = run(saves, odd(), 3)
    first = run(saves, odd(), 2)
    path = tmp_path / "two.ckpt"
    first.trainer.save_checkpoint(path)
    first.trainer.strategy.teardown()
    rest = run(loads, other_weights(), 3, ckpt_path=path)
    assert_weights(rest.weights, whole.weights, tolerance=0)
    assert rest.trainer.global_step == whole.trainer.global_step


@on_ranks(2)
@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.full), "int8"])
def test_ddp_goes_on_from_it(dtype: str, tmp_path: Path) -> None:
    settings = {"optimizer": {"state_dtype": dtype}, "checkpoint": "full"}
    first = fit(sharded("zero3", tmp_path, **settings), tmp_path, odd(), max_epochs=2)
    path = tmp_path / "two.ckpt"
    first.trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["optimizer_states"][0]["state"]
    assert {entry["exp_avg"].dtype for entry in saved.values()} == {torch.bfloat16}
    rest = fit("ddp", tmp_path, other_weights(), max_epochs=3, ckpt_path=path)
    assert rest.trainer.global_step > first.trainer.global_step
