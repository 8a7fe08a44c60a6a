"""What offload would cost on an H200: a recorded order of work, timed by the rates of a machine.

An order that makes one thing wait for another, for no need, fails here; so does one test below for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_zero.comm.streams import Streams
from lightning_zero.engine.units.after_step import AfterStep, StepJob
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


# -- what would cost --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bring_on_compute(self: Streams, kind: str, *, after: Any = None) -> Iterator[Any]:
    """Gradients travel to the host between kernels of the backward."""
    if kind == "d2h":
        self.wait(after)
        yield None
        return
    with _on(self, kind, after=after) as stream:
        yield stream


def wait_for_the_steps(self: AfterStep, jobs: list[StepJob]) -> None:
    _submit(self, jobs)
    self.wait_for_steps()


def gather_behind_compute(self: Streams, kind: str) -> Any:
    """A gather waits for all that compute has queued, not only for those who used its memory."""
    return self.on(kind)


_on, _submit = Streams.on, AfterStep.submit

WORSE: dict[str, tuple[str, str, Any]] = {
    "gradients leave between kernels": ("optimizer_cpu", "comm.streams.Streams.on", bring_on_compute),
    "the host waits for the steps": ("optimizer_cpu", "engine.units.after_step.AfterStep.submit", wait_for_the_steps),
    "gathers wait for compute": ("cpu", "comm.streams.Streams.on_free_memory", gather_behind_compute),
}


@pytest.mark.sample
@pytest.mark.parametrize("what", WORSE)
def test_work_that_does_not_overlap_takes_longer(what: str, elsewhere: Elsewhere) -> None:
    row, path, new = WORSE[what]
    found = elsewhere(predict, row, HIDING_TOKENS, mutations=[(f"lightning_zero.{path}", new)])
    assert found.phi < LEAST, found
