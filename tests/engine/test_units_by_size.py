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


class Down(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(into, out, 3, stride=2, padding=1), nn.GroupNorm(4, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class Up(nn.Module):
    def __init__(self, into: int, skip: int, out: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(into, out, 2, stride=2)
        self.mix = nn.Sequential(nn.Conv2d(out + skip, out, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.mix(torch.cat([self.grow(x), skip], dim=1))


class UNet(nn.Module):
    """4.6 MB, in modules of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.down1, self.down2, self.down3 = Down(32, 64), Down(64, 128), Down(128, 192)
        self.middle = nn.Sequential(nn.Conv2d(192, 192, 3, padding=1), nn.ReLU())
        self.up3, self.up2, self.up1 = Up(192, 128, 128), Up(128, 64, 64), Up(64, 32, 32)
        self.last = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x).relu()
        b = self.down1(a)
        c = self.down2(b)
        d = self.middle(self.down3(c))
        return self.last(self.up1(self.up2(self.up3(d, c), b), a))


class Recurrent(nn.Module):
    """4.3 MB: two GRUs, whose layers are no modules, and a cell that is called once for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(64, 160, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(160, 160)
        self.decoder = nn.GRU(160, 160, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(160, 512), nn.Tanh(), nn.Linear(512, 300))

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.encoder(x)
        state, seen = last[-1], []
        for place in states.unbind(1):
            state = self.cell(place, state)
            seen.append(state)
        return self.head(self.decoder(torch.stack(seen, dim=1))[0])


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
@pytest.mark.parametrize(
    ("kind", "stage", "precision"),
    [(UNet, 3, "fp32"), (UNet, 2, "fp32"), (Recurrent, 3, "fp32"), (Recurrent, 3, "bf16"), (Recurrent, 2, "fp32")],
)
def test_it_trains_as_its_twin(kind: type[nn.Module], stage: int, precision: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        loss = side.module(floats(step, *SIZES[kind])).square().mean()
        side.backward(loss)
        return loss

    check(kind, work, stage=stage, precision=precision)


@on_ranks(2)
@pytest.mark.parametrize("kind", [UNet, Recurrent])
def test_a_part_is_gathered_at_a_time(kind: type[nn.Module]) -> None:
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
