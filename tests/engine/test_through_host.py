"""Ranks on devices that have only gloo: messages go through host memory, and no rank waits where it sends one.

Devices are simulated on the host, with values; see ``test_gradients_together.py``.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_zero
from tests.engine.support import Model, Sharded, accumulate, adamw, assert_equal, floats
from tests.engine.test_gradients_together import through_host, together
from tests.engine.test_node_backward import paths
from tests.engine.test_offload import offload
from tests.harness import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")


def on_both(build: Any, work: Any, **config: Any) -> None:
    """The same on the host and on devices, to the bit."""
    found = []
    for ways in (together, contextlib.nullcontext):
        torch.manual_seed(3)
        host = through_host() if ways is together else contextlib.nullcontext()
        with ways(), host, Sharded(build(), optimizer=adamw, **config) as side:
            values = []
            for step in range(3):
                values.append(work(side, step))
                side.step()
                side.zero_grad()
            with lightning_zero.gather(side.module):
                values += [p.detach().clone() for p in side.module.parameters()]
            found.append(values)
    assert_equal(*found)


@on_ranks(3)
@pytest.mark.parametrize(("stage", "row"), [(1, "optimizer_cpu"), (2, "optimizer_nvme")])
def test_ranks_whose_offloaded_steps_end_at_different_moments(stage: int, row: str, tmp_path: Path) -> None:
    """Each issues the gathers after steps as far as its own have got, and then waits for the others elsewhere."""

    def work(side: Sharded, step: int) -> Tensor:
        return accumulate(side, step, 1)

    on_both(Model, work, stage=stage, **offload(row, tmp_path))


@on_ranks(2, 3)
def test_ranks_that_take_other_paths() -> None:
    """One reduces what another still gathers for."""

    def work(side: Sharded, step: int) -> Tensor:
        path = [(0, 1, 2, 3), (1, 0, 1), (3, 3, 2)][(dist.get_rank() + step) % 3]
        loss = side.module(floats(step, 2, 6), path).square().mean()
        side.backward(loss)
        return loss.detach()

    on_both(paths, work, stage=3, dynamic_graph=True, unit={"classes": ["Linear"]})
