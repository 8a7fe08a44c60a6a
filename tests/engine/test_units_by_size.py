"""Models without repeated blocks, divided by size: they train as their twins do, and gather a part at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.engine.units.param_store import FlatBuffer
from lightning_zero.trainer.summary import large_unit
from tests.engine.support import Sharded, Side, check, floats
from tests.harness import on_ranks
from tests.models import Recurrent, UNet


SIZES = {UNet: (2, 3, 16, 16), Recurrent: (2, 5, 64)}


@contextmanager
def most_gathered(engine: Engine) -> Iterator[list[int]]:
    """The most bytes of compute parameters that are on the device at a time."""
    most, allocate = [0], FlatBuffer.allocate

    def allocating(buffer: FlatBuffer) -> None:
        allocate(buffer)
        now = sum(b.full.nbytes for unit in engine.units for b in unit.buckets if b.full.allocated)
        most[0] = max(most[0], now)

    with mock.patch.object(FlatBuffer, "allocate", allocating):
        yield most


@pytest.mark.sample
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
    with Sharded(kind(), stage=3, prefetch_bytes=0) as side:
        sizes = [sum(b.full.nbytes for b in unit.buckets) for unit in side.engine.units]
        assert len(sizes) > 4 and sizes[0] < sum(sizes) / 8  # the root keeps little
        for step in range(3):
            with most_gathered(side.engine) as most:
                side.backward(side.module(floats(step, *SIZES[kind])).square().mean())
                side.step()
                side.zero_grad()
            # The root, a unit, and the last one of the forward, which stays; the next one, when they change over.
            assert most[0] <= sizes[0] + sum(sorted(sizes[1:])[-3:]), (most, sizes)
            assert most[0] < 0.75 * sum(sizes)


@on_ranks(2)
def test_the_table_says_where_most_of_a_model_is_one_unit() -> None:
    with Sharded(nn.Sequential(nn.GRU(64, 400), nn.Linear(400, 10)), stage=3) as side:
        assert large_unit(side.engine) == (
            "99 % of the parameters are gathered at once, as 0; it holds no modules that could be units"
        )
    with Sharded(nn.Sequential(nn.GRU(64, 400), nn.Linear(400, 10)), stage=2) as side:
        assert large_unit(side.engine) is None
    with Sharded(UNet(), stage=3) as side:
        assert large_unit(side.engine) is None
    with Sharded(UNet(), stage=3, unit={"classes": ["UNet"]}) as side:
        said = large_unit(side.engine)
        assert said is not None and said.startswith("100 % of the parameters are gathered at once, as (root)")
        assert "zero.unit.classes divides it: it has Conv2d, ConvTranspose2d, Down, " in said
