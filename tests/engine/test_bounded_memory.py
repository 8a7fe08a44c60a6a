"""Memory that comes and goes is bounded where passes are not known, and models have no repeated blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.comm.reduction import Reduction
from lightning_zero.engine.passes import gradients
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.units.param_store import FlatBuffer
from lightning_zero.trainer.summary import large_unit
from tests.engine.support import Model, Sharded, Side, check, floats, train
from tests.harness import on_ranks
from tests.models import Does, Recurrent, UNet

pytestmark = pytest.mark.sample  # the full tier has all cases


def forks(takes: Callable[[Any, int], bool]) -> nn.Module:
    """A model that takes the blocks for which ``takes(module, number)``; ``turn`` is for the test to set."""

    def act(m: Any, batch: torch.Tensor) -> torch.Tensor:
        x = m.embed(batch)
        for number, block in enumerate(m.blocks):
            if takes(m, number):
                x = block(x)
        return m.head(x)

    torch.manual_seed(3)
    model = Model(width=32, depth=9)
    return Does(act, embed=model.embed, blocks=model.blocks, head=model.head, turn=0)


NEVER_DONE = mock.patch.object(Reduction, "done", lambda self: False)
SMALL = {"stage": 3, "reduce_bucket_bytes": 1 << 12, "stall_timeout_s": 30.0}


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("dynamic_graph", [False, True])
def test_ranks_that_take_other_paths_do_not_wait_for_each_other_in_a_circle(dynamic_graph: bool) -> None:
    # One may wait for gathers of another in its backward.
    module = forks(lambda m, number: (number + m.turn) % 3 != torch.distributed.get_rank())
    comes = mock.patch.object(Reducer, "_comes", lambda self, pending: True)
    with NEVER_DONE, comes, Sharded(module, dynamic_graph=dynamic_graph, **SMALL) as side:
        train(side, range(3))


@on_ranks(2, full=(3,))
def test_ranks_that_leave_their_one_path_are_not_waited_for_without_end() -> None:
    """What was true in the passes before is not any more, and a rank that waits is needed by another."""
    module = forks(lambda m, number: m.turn < 2 or bool(number % 3))  # all blocks at first
    with NEVER_DONE, mock.patch.object(gradients, "PATIENCE_S", 0.05), Sharded(module, **SMALL) as side:
        for step in range(6):
            module.turn = step if torch.distributed.get_rank() else 0
            train(side, [step])


# -- models without repeated blocks, divided by size ------------------------------------------------------------------


SIZES = {UNet: (2, 3, 16, 16), Recurrent: (2, 5, 64)}


@on_ranks(2)
@pytest.mark.parametrize(("kind", "precision"), [(UNet, "fp32"), (Recurrent, "fp32"), (Recurrent, "bf16")])
def test_it_trains_as_its_twin(kind: type[nn.Module], precision: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        loss = side.module(floats(step, *SIZES[kind])).square().mean()
        side.backward(loss)
        return loss

    check(kind, work, stage=(2, 3), precision=precision)


@on_ranks(2)
@pytest.mark.parametrize("kind", [UNet, Recurrent])
def test_few_units_are_gathered_at_a_time(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    most, allocate = [0], FlatBuffer.allocate

    def allocating(buffer: FlatBuffer) -> None:
        allocate(buffer)
        most.append(sum(b.full.nbytes for unit in side.engine.units for b in unit.buckets if b.full.allocated))

    with Sharded(kind(), stage=3, prefetch_bytes=0) as side, mock.patch.object(FlatBuffer, "allocate", allocating):
        sizes = [sum(b.full.nbytes for b in unit.buckets) for unit in side.engine.units]
        assert len(sizes) > 4 and sizes[0] < sum(sizes) / 8  # the root keeps little
        for step in range(3):
            side.backward(side.module(floats(step, *SIZES[kind])).square().mean())
            side.step()
            side.zero_grad()
        # The root, a unit, and the last one of the forward, which stays; the next one, when they change over.
        assert max(most) <= min(sizes[0] + sum(sorted(sizes[1:])[-3:]), 0.75 * sum(sizes)), sizes


@on_ranks(2)
def test_the_table_says_where_most_of_a_model_is_one_unit() -> None:
    def said(module: nn.Module, **config: Any) -> str | None:
        with Sharded(module, **config) as side:
            return large_unit(side.engine)

    large = nn.Sequential(nn.GRU(64, 400), nn.Linear(400, 10))
    only = "99 % of the parameters are gathered at once, as 0; it holds no modules that could be units"
    assert said(large, stage=3) == only
    assert said(large, stage=2) is said(UNet(), stage=3) is None
    whole = said(UNet(), stage=3, unit={"classes": ["UNet"]})
    assert whole is not None and whole.startswith("100 % of the parameters are gathered at once, as (root)")
    assert "zero.unit.classes divides it: it has Conv2d, ConvTranspose2d, Down, " in whole
