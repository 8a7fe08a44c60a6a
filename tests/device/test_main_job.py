"""The main job does not make the host wait for the device, but for a loss that is shown or logged, every few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.device.machine import Wait
from tests.device.main_job import EVERY, STEPS, run

SHOWN = Wait("models/language_model.py: LanguageModel.on_train_batch_end", "a copy")
LOGGED = Wait("trainer/loops.py: ZeroTrainingEpochLoop.advance", "a value")  # Lightning, called from there


@pytest.mark.full
@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.full), "bf16-true"])
def test_the_host_waits_where_a_loss_is_read(precision: str, elsewhere: Callable[..., Any]) -> None:
    waits = elsewhere(run, precision=precision)
    assert len(waits) == STEPS
    for step, found in enumerate(waits[2:], 2):  # until then the module is sharded, and things are done for once
        assert found == ({SHOWN: 1, LOGGED: 1} if step % EVERY == 0 else {}), step
