"""What offload would cost on an H200: a recorded order of work, timed by the rates of a machine.

An order that makes one thing wait for another, for no need, fails here: gathers that wait for all of compute, gradients
that leave between kernels of the backward, a host that waits for the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.device.timed import HIDING_TOKENS, HOWS, Predicted, predict

LEAST = 0.9  # of the bound that is reached

Elsewhere = Callable[..., Predicted]

ROWS = [("cpu", "plain"), ("optimizer_cpu", "two micro-batches")]
OTHERS = [("cpu", "two micro-batches"), ("nvme", "clipped"), ("optimizer_nvme", "plain")]
OTHERS += [("optimizer_cpu", "plain"), ("optimizer_cpu", "clipped")]


@pytest.mark.parametrize(("row", "how"), [*ROWS, *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS)])
def test_a_step_takes_little_more_than_it_must(row: str, how: str, elsewhere: Elsewhere) -> None:
    found = elsewhere(predict, row, HIDING_TOKENS, **HOWS[how])
    assert found.phi >= LEAST, found
    assert found.seconds >= max(found.busy.values()) * 0.99, found  # what is busy all the time sets the pace


@pytest.mark.full
@pytest.mark.parametrize(("row", "how"), [("cpu", {"ranks": 4}), ("optimizer_cpu", {"precision": "fp32"})])
def test_so_it_does_on_four_ranks_and_in_fp32(row: str, how: dict[str, Any], elsewhere: Elsewhere) -> None:
    assert elsewhere(predict, row, HIDING_TOKENS, **how).phi >= LEAST
