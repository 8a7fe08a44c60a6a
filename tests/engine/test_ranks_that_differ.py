"""Ranks that take different paths through the model: right numbers, or an error that names where they stand."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.config import ConfigError
from lightning_zero.engine.passes import passes
from lightning_zero.ranks.waits import StallError
from tests.engine.support import Block, Sharded, Side, check, floats, places_posted_often
from tests.harness import on_ranks

WIDTH = 19


class Paths(nn.Module):
    """Blocks in the order that the caller names."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))

    def forward(self, x: Tensor, path: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for i in path:
            x = self.blocks[i](x)
        return x


def work(side: Side, step: int, *, path_of: Any) -> Tensor:
    loss = side.module(floats(step, 4, WIDTH), path_of(step, dist.get_rank())).square().mean()
    side.backward(loss)
    return loss


def other_blocks(step: int, rank: int) -> tuple[int, ...]:
    return ((0, 1, 3), (0, 2, 3), (3,))[(step + rank) % 3]


def other_order(step: int, rank: int) -> tuple[int, ...]:
    return (0, 1, 2, 3) if (step + rank) % 2 else (3, 1, 0, 2)


def other_number(step: int, rank: int) -> tuple[int, ...]:
    return (1,) * (1 + rank) if step != 1 else (1, 2)


def nothing_on_one_rank(step: int, rank: int) -> tuple[int, ...]:
    return () if rank == step % 2 else (0, 1, 2, 3)


PATHS = {f.__name__: f for f in (other_blocks, other_order, other_number, nothing_on_one_rank)}


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("config", [{}, {"prefetch_bytes": 0}, {"reduce_bucket_bytes": 3000}], ids=str)
def test_dynamic_paths_train_with_the_right_gradients(path: str, config: dict[str, Any]) -> None:
    paths = functools.partial(work, path_of=PATHS[path])
    check(Paths, paths, steps=5, dynamic_graph=True, stall_timeout_s=20, **config)


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_paths_are_free_where_parameters_are_replicated(stage: int, path: str) -> None:
    check(Paths, functools.partial(work, path_of=PATHS[path]), steps=4, stage=stage, stall_timeout_s=20)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("row", ["none", "optimizer_cpu"])
def test_an_evaluation_after_a_step_needs_no_rank_that_uses_less(stage: int, row: str) -> None:
    """A rank issues the gathers that follow steps as it uses units, and those that are left at the end of its pass."""

    def path(step: int, rank: int) -> tuple[int, ...]:
        return () if rank == 0 else (0, 1, 2, 3)

    with Sharded(Paths(), stage=stage, offload=row, stall_timeout_s=10) as side:
        side.module.register_buffer("seen", torch.zeros(1))
        for step in range(3):
            work(side, step, path_of=lambda *_: (0, 1, 2, 3))
            side.step()
            side.zero_grad()
            with side.engine.step_scope("validation", evaluation=True), torch.no_grad():
                assert side.module(floats(step, 4, WIDTH), path(step, dist.get_rank())).isfinite().all()
            side.module.seen += 1
            side.engine.passes.buffers.sync()


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("path", list(PATHS))
def test_the_first_pass_is_agreed_step_by_step(path: str) -> None:
    """It is recorded, so ranks may differ in it; a unit that any of them needs is gathered by all."""
    check(Paths, functools.partial(work, path_of=PATHS[path]), steps=1, stall_timeout_s=20)


@on_ranks(2)
def test_a_unit_that_one_rank_always_skips_is_gathered_in_its_place() -> None:
    """The recorded order of the first pass holds for both, so nothing is agreed afterwards."""
    exchanged: list[str] = []

    def path(step: int, rank: int) -> tuple[int, ...]:
        return (0, 1, 2, 3) if rank == 0 else (0, 3)

    def observed(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded) and step == 1:
            side.engine.comm.observers.append(lambda kind, _: exchanged.append(kind))
        return work(side, step, path_of=path)

    check(Paths, observed, steps=4, stall_timeout_s=20)
    assert "exchange" not in exchanged


@on_ranks(2)
def test_all_ranks_may_leave_the_plan_together() -> None:
    """It costs an agreement, and a new path that comes to stay becomes the plan."""
    paths = [(0, 1, 2, 3)] * 3 + [(3, 1), (0, 1, 2, 3)] + [(3, 2, 0)] * 4
    check(Paths, functools.partial(work, path_of=lambda step, rank: paths[step]), steps=len(paths), stall_timeout_s=20)


@on_ranks(2)
@pytest.mark.parametrize("path", [(3, 0, 1, 2, 3, 0), (0, 1, 1, 2, 0, 3)], ids=str)
def test_a_rank_that_leaves_the_plan_alone_stops_all_with_their_places(path: tuple[int, ...]) -> None:
    with places_posted_often(), mock.patch.object(passes, "ABANDON_S", 0.5):
        side = Sharded(Paths(), stall_timeout_s=1.5, prefetch_bytes=0)
        for step in range(2):
            work(side, step, path_of=lambda *_: (0, 1, 2, 3))
            side.step()
        started = time.monotonic()
        with pytest.raises(StallError) as caught:
            work(side, 2, path_of=lambda _, rank: path if rank == 1 else (0, 1, 2, 3))
    assert time.monotonic() - started < 5
    text = str(caught.value)
    assert "zero.dynamic_graph=true" in text
    assert "rank 0:" in text and "rank 1:" in text
    assert "unit blocks." in text and "which the recorded order does not have here" in text
    side.engine.comm.waits.close()  # messages were lost: there is no release


@on_ranks(2)
def test_buffers_sent_between_forward_and_backward_are_refused_on_all_ranks() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * self.weight

    with Sharded(Scaled(), stage=1) as side:
        loss = side.module(torch.ones(2, 3, requires_grad=True)).sum()
        if dist.get_rank() == 1:
            side.module.scale.add_(1.0)
        side.engine.passes.buffers.sync()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            side.backward(loss)
        side.engine.passes.abort()


class Inside(nn.Module):
    """The model is a part of what is sharded, as of a LightningModule whose ``training_step`` calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Paths()


@on_ranks(2)
@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("way", ["plain", "in a step", "in an evaluation"])
def test_a_rank_may_send_messages_of_its_own_when_its_dynamic_call_is_over(path: str, way: str) -> None:
    """Also where no backward follows: the ranks that are still in their call need its gathers."""
    module = Inside() if way == "in a step" else Paths()
    with Sharded(module, dynamic_graph=True, stall_timeout_s=5) as side:
        for step in range(4):
            x, blocks = floats(step, 4, WIDTH), PATHS[path](step, dist.get_rank())
            scope: Any = contextlib.nullcontext()
            if way != "plain":
                scope = side.engine.step_scope("step", evaluation=way == "in an evaluation")
            with scope, torch.set_grad_enabled(way != "in an evaluation"):
                for _ in range(2):
                    loss = (module.model if way == "in a step" else module)(x, blocks).square().mean()
                    total = loss.detach().clone()
                    dist.all_reduce(total)
                    assert total.isfinite()
            if step % 2 and way == "plain":
                side.backward(loss)
                side.step()


@on_ranks(2)
def test_dynamic_evaluation() -> None:
    with Sharded(Paths(), dynamic_graph=True, stall_timeout_s=20) as side:
        full = Paths()
        with lightning_zero.gather(side.module):
            full.load_state_dict(side.module.state_dict())
        for step in range(3):
            path = other_order(step, dist.get_rank())
            with torch.no_grad():
                x = floats(step, 4, WIDTH)
                assert torch.equal(side.module(x, path), full(x, path))


# -- models that differ -----------------------------------------------------------------------------------------------


def odd_model(what: str, rank: int) -> nn.Module:
    """Not the model of rank 0 where ``what`` differs."""
    width = WIDTH + (what == "shape" and rank == 1)
    module = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, width)) for _ in range(2 + (what == "depth" and rank == 1)))
    )
    module[0][0].weight.requires_grad_(what != "frozen" or rank != 1)
    return module.to(torch.float64 if what == "dtype" and rank == 1 else None)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("shape", r"0\.0\.weight"),
        ("depth", r"no parameter.*2\.0\.weight"),
        ("frozen", r"0\.0\.weight"),
        ("dtype", r"float64"),
    ],
)
def test_models_that_differ_are_refused_on_all_ranks(what: str, place: str, stage: int) -> None:
    with pytest.raises(ConfigError, match=rf"expected the same model on all ranks, got .*{place}"):
        lightning_zero.shard(odd_model(what, dist.get_rank()), stage=stage)
    check(functools.partial(nn.Linear, WIDTH, WIDTH), work_alone, stage=stage)


def work_alone(side: Side, step: int) -> Tensor:
    loss = side.module(floats(step, 4, WIDTH)).square().mean()
    side.backward(loss)
    return loss


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_that_is_ordered_otherwise_on_a_rank_is_as_on_rank_0(stage: int) -> None:
    def model(turned: bool) -> nn.Linear:
        module = nn.Linear(WIDTH, WIDTH, bias=False)
        values = torch.arange(float(WIDTH * WIDTH)).view(WIDTH, WIDTH) / 100
        module.weight = nn.Parameter(values.t().contiguous().t() if turned else values)
        return module

    module = model(turned=dist.get_rank() == 1)
    with Sharded(module, stage=stage), lightning_zero.gather(module):
        assert torch.equal(module.weight, model(False).weight) and module.weight.is_contiguous()
