"""Steps whose gradients are not finite are skipped on all ranks (``zero.optimizer.skip_nonfinite``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import ZeroMonitor, ZeroStrategy
from lightning_zero.trainer import interruptions
from lightning_zero.trainer.precision import ZeroPrecision
from tests.engine.sides import Sharded, Side, Twin, step_and_clear, with_twin
from tests.engine.support import assert_same
from tests.engine.test_offload import offload
from tests.engine.works import accumulate, loss_at
from tests.harness import on_ranks
from tests.models import Model
from tests.rows import PLACES
from tests.trainer.toys import Lit, fit

ROWS = [("none", 0), ("none", 1), ("none", 3), *PLACES]


def poisoned(tensor: Tensor) -> Tensor:
    """Infinity, as a loss or a gradient, on the last rank."""
    return tensor * float("inf") if dist.get_rank() == dist.get_world_size() - 1 else tensor


def trains(side: Side, bad: tuple[int, ...], clips: bool) -> None:
    for step in range(5):
        if step in bad and isinstance(side, Twin):
            continue
        if step in bad:  # one parameter, which at stages 1 to 3 one rank steps
            with side.module.head.bias.register_hook(poisoned):
                side.backward(loss_at(side.module, step))
        accumulate(side, step, 2)
        if clips:
            side.clip(0.5)
        elif step in bad:  # which must not make it finite
            torch.nn.utils.clip_grad_value_(side.module.parameters(), 1e6)
        step_and_clear(side)


@on_ranks(2)
@pytest.mark.parametrize("sharding", ["auto", "tensors"])
@pytest.mark.parametrize(("row", "stage"), ROWS)
def test_skipped_steps_leave_the_bits_of_a_run_without_their_batches(
    row: str, stage: int, sharding: str, tmp_path: Path
) -> None:
    settings, clips = {"skip_nonfinite": 3, "sharding": sharding}, row == "none"
    with with_twin(stage=stage, optimizer_settings=settings, **offload(row, tmp_path)) as (sharded, twin):
        trains(twin, (0, 2, 3), clips)
        trains(sharded, (0, 2, 3), clips)
        assert_same(sharded, twin, tolerance=1e-6 if sharding == "tensors" or clips else 0.0)
        assert sharded.engine.passes.sharded_grads.overflows == 3


@on_ranks(2)
def test_as_many_skipped_steps_in_a_row_as_allowed_are_an_error_with_the_names() -> None:
    with Sharded(Model(), optimizer_settings={"skip_nonfinite": 2}) as sharded:
        for bad in (True, False, True, True):
            loss = loss_at(sharded.module, 0)
            sharded.backward(poisoned(loss) if bad else loss)
            if sharded.engine.passes.sharded_grads.overflows == 2:
                with pytest.raises(RuntimeError, match=r"2 step\(s\) in a row .*, first those of embed"):
                    sharded.step()
            else:
                sharded.step()
            sharded.zero_grad()


class Poisoned(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return poisoned(loss) if batch_idx == 1 else loss


class PoisonedGradients(Lit):
    """Where the norm of gradients is the first number that is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            loss.register_hook(poisoned)
        return loss


@on_ranks(2)
@pytest.mark.parametrize("skips", [None, 3])
@pytest.mark.parametrize(("module", "clips", "says"), [
    (Poisoned, None, r"^the loss of rank 1 is NaN or infinite at step 1 "),
    (Poisoned, 1.0, r"^the loss of rank 1 is NaN or infinite at step 1 "),
    (PoisonedGradients, 1.0, r"^the norm of gradients is NaN or infinite at step 1 "),
])  # fmt: skip
def test_the_first_number_that_is_not_finite_is_said_once(
    module: type[Lit], clips: float | None, says: str, skips: int | None, tmp_path: Path
) -> None:
    said: list[str] = []
    strategy = ZeroStrategy("zero3", optimizer={"skip_nonfinite": skips})
    with mock.patch.object(interruptions, "rank_zero_warn", said.append):
        fit(strategy, tmp_path, module(), max_epochs=1, gradient_clip_val=clips)
    if skips and module is PoisonedGradients:  # such a step is skipped and counted
        assert not said
        return
    assert len(said) == 1 and re.search(says, said[0]), said
    assert ("Such steps are skipped" in said[0]) == (skips is not None)


@on_ranks(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_trainer_skips_a_step_and_goes_on(precision: str, tmp_path: Path) -> None:
    def train(**settings: Any) -> tuple[bool, float | None]:
        strategy = ZeroStrategy("zero3", precision_plugin=ZeroPrecision(precision), **settings)
        run = fit(strategy, tmp_path, Poisoned(), max_epochs=1, callbacks=[ZeroMonitor(1)])
        finite = all(torch.isfinite(value).all() for value in run.weights.values())
        return finite, run.metrics.get("zero/skipped_steps")

    with_scale = precision == "16-mixed"  # the first loss scale is too large, and is halved
    assert train(optimizer={"skip_nonfinite": 3}) == (True, 1 + with_scale)
    assert train() == ((True, 2) if with_scale else (False, None))
