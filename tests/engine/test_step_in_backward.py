"""Offloaded steps that start inside the backward: the same numbers, earlier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.steps.worker import StepJob
from tests.engine.support import Model, Sharded, accumulate, language_loss, sgd, tokens
from tests.engine.test_offload import OPTIMIZERS, SOMEWHERE, assert_equal, offload, whole
from tests.harness import on_ranks


def submissions(engine: Engine) -> list[tuple[str, bool]]:
    """Labels of the buckets whose steps are queued from now on, and whether a backward was running."""
    seen: list[tuple[str, bool]] = []
    submit = engine.after_step.submit

    def spy(jobs: Sequence[StepJob]) -> None:
        seen.extend((job.bucket.label, engine.passes.in_backward) for job in jobs)
        submit(jobs)

    engine.after_step.submit = spy  # type: ignore[method-assign]
    return seen


def train(side: Sharded, steps: int, *, early: bool, micro_batches: int = 1) -> list[Tensor]:
    losses: list[Tensor] = []
    for step in range(steps):
        side.zero_grad()
        for micro in range(micro_batches - 1):
            with side.no_sync():
                side.backward(language_loss(side.module, tokens(step, micro)))

        def closure(step: int = step) -> Tensor:
            losses.append(language_loss(side.module, tokens(step, micro_batches - 1)))
            side.backward(losses[-1])
            return losses[-1]

        if early:
            with side.engine.stepping_in_backward():
                side.optimizer.step(closure)
        else:
            side.optimizer.step(closure)
    return losses


@on_ranks(1, 2)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", *(pytest.param(o, marks=pytest.mark.full) for o in ("sgd", "adagrad"))])
@SOMEWHERE
def test_it_equals_none(row: str, stage: int, optimizer: str, micro_batches: int, tmp_path: Path) -> None:
    found = []
    for place, early in ((offload(row, tmp_path), True), ({"offload": "none"}, False)):
        torch.manual_seed(3)
        with Sharded(Model(), stage=stage, optimizer=OPTIMIZERS[optimizer], **place) as side:
            seen = submissions(side.engine)
            found.append(train(side, 4, early=early, micro_batches=micro_batches) + whole(side))
            if early:
                inside = [label for label, in_backward in seen if in_backward]
                # The first backward teaches the order; of the later ones all but the last buckets come in time.
                if any(bucket.plan.may_step_in_backward for bucket in side.engine.buckets):
                    assert len(inside) > len(seen) // 2, seen
                else:
                    assert (row, stage) == ("optimizer_nvme", 2) and not inside
    assert_equal(*found, f"{row} at stage {stage}")


@on_ranks(1, 2)
@SOMEWHERE
def test_what_is_written_in_the_step_is_there_before_it_is_stepped(row: str, stage: int, tmp_path: Path) -> None:
    found = []
    for early in (True, False):
        torch.manual_seed(3)
        with Sharded(Model(), stage=stage, **offload(row, tmp_path)) as side:

            def closure(side: Sharded = side) -> Tensor:
                side.zero_grad()
                with side.engine.step_scope():
                    with torch.no_grad():
                        for param in side.module.parameters():
                            param.mul_(0.9)
                    loss = language_loss(side.module, tokens(0))
                side.backward(loss)
                return loss.detach()

            losses: list[Any] = []
            for _ in range(4):
                with side.engine.stepping_in_backward() if early else contextlib.nullcontext():
                    losses.append(side.optimizer.step(closure))
            found.append(losses + whole(side))
    assert_equal(*found, f"{row} at stage {stage}")


@on_ranks(2)
def test_not_unless_it_is_allowed() -> None:
    with Sharded(Model(), stage=3, offload="cpu") as side:
        seen = submissions(side.engine)
        train(side, 3, early=False)
        assert seen and not any(in_backward for _, in_backward in seen)


@on_ranks(1, 2)
def test_a_backward_that_the_engine_is_not_told_of_only_accumulates() -> None:
    """An auxiliary loss before the main one: its gradients are part of the step."""
    found = []
    for place, early in (({"offload": "cpu"}, True), ({"offload": "none"}, False)):
        torch.manual_seed(3)
        with Sharded(Model(), stage=3, **place) as side:

            def closure(side: Sharded = side) -> Tensor:
                side.zero_grad()
                language_loss(side.module, tokens(0)).backward()
                loss = language_loss(side.module, tokens(1))
                side.backward(loss)
                return loss.detach()

            losses: list[Any] = []
            for _ in range(4):
                with side.engine.stepping_in_backward() if early else contextlib.nullcontext():
                    losses.append(side.optimizer.step(closure))
            found.append(losses + whole(side))
    assert_equal(*found)


@on_ranks(2)
def test_a_second_backward_in_the_closure_is_refused() -> None:
    with Sharded(Model(), stage=3, offload="cpu") as side:

        def closure() -> Tensor:
            return accumulate(side, 0, 2)

        with side.engine.stepping_in_backward(), pytest.raises(RuntimeError, match="ran several backwards"):
            side.optimizer.step(closure)


class Reused(nn.Module):
    """A block that recomputation under checkpointing uses twice: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(19, 19), nn.Linear(19, 19)])

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0):
            x = torch.tanh(checkpoint(self.blocks[index], x, use_reentrant=True))
        return x


@on_ranks(2)
def test_a_block_whose_gradient_comes_in_parts_waits() -> None:
    found = []
    for place, early in (({"offload": "cpu"}, True), ({"offload": "none"}, False)):
        torch.manual_seed(3)
        with Sharded(Reused(), stage=3, unit={"classes": ["Linear"]}, **place) as side:

            def closure(side: Sharded = side) -> Tensor:
                side.zero_grad()
                loss = side.module(torch.ones(2, 19, requires_grad=True)).square().sum()
                side.backward(loss)
                return loss.detach()

            losses: list[Any] = []
            for _ in range(4):
                if early:
                    with side.engine.stepping_in_backward():
                        losses.append(side.optimizer.step(closure))
                else:
                    losses.append(side.optimizer.step(closure))
            found.append(losses + whole(side))
    assert_equal(*found)


class Broken(nn.Module):
    """Raises in the backward of its first block, when the steps of the others are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(19, 19) for _ in range(4))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if i == 0 and self.fails:
                x.register_hook(self._fail)
        return x

    @staticmethod
    def _fail(grad: Tensor) -> None:
        raise ValueError("broken")


@on_ranks(1, 2)
def test_an_exception_says_that_the_step_was_partial() -> None:
    module = Broken()
    # One reduction in flight at a time: each lands before the next is issued.
    with Sharded(module, stage=3, offload="cpu", unit={"classes": ["Linear"]}, reduce_bucket_bytes=1) as side:

        def closure() -> Tensor:
            side.zero_grad()
            loss = module(torch.ones(2, 19)).square().sum()
            side.backward(loss)
            return loss.detach()

        with side.engine.stepping_in_backward():
            for _ in range(3):
                side.optimizer.step(closure)
            module.fails = True
            with pytest.raises(ValueError, match="broken") as caught:
                side.optimizer.step(closure)
            assert any("step was partial: " in note for note in caught.value.__notes__)
            module.fails = False
            assert torch.isfinite(side.optimizer.step(closure))


class WaitForSteps(torch.autograd.Function):
    """Passes on; its backward waits until the worker has stepped what it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, engine: Engine) -> Tensor:  # type: ignore[override]
        ctx.engine = engine
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        for future in [bucket.awaited_step._future for bucket in ctx.engine.buckets]:
            if future is not None:
                future.result()
        return grad, None


def step_with(side: Sharded, compute: Callable[[], Tensor], *, early: bool) -> Tensor:
    def closure() -> Tensor:
        side.zero_grad()
        loss = compute()
        side.backward(loss)
        return loss.detach()

    with side.engine.stepping_in_backward() if early else contextlib.nullcontext():
        loss: Tensor = side.optimizer.step(closure)
    return loss


# Each parameter has a bucket of its own, which lands before the next is reduced.
SETTINGS: dict[str, Any] = {"offload": "optimizer_cpu", "reduce_bucket_bytes": 1, "optimizer": sgd}


def loss_of(side: Sharded) -> Tensor:
    return side.module(torch.ones(2, 19, requires_grad=True)).square().sum()  # type: ignore[no-any-return]


class Stopped(nn.Module):
    """A weight is used through ``detach`` first, so that the backward reads it after its gradient has come."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(19, 19), nn.Linear(19, 19)
        self.mid = nn.ModuleList(nn.Linear(19, 19) for _ in range(4))
        self.weight = nn.Parameter(torch.randn(19, 19) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = WaitForSteps.apply(torch.tanh(self.first(x) @ self.weight.detach()), engine_of(self))  # type: ignore
        for layer in self.mid:
            x = torch.tanh(layer(x))
        return self.last(torch.tanh(x @ self.weight))


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_rest_of_the_backward_reads_values_of_before_the_step(stage: int) -> None:
    found = []
    for early in (True, False):
        torch.manual_seed(3)
        with Sharded(Stopped(), stage=stage, **SETTINGS) as side:
            seen = submissions(side.engine)
            losses = [step_with(side, partial(loss_of, side), early=early) for _ in range(4)]
            assert any(in_backward for _, in_backward in seen) is early
            found.append(losses + whole(side))
    assert_equal(*found, f"stage {stage}")


class CallsInBackward(torch.autograd.Function):
    """Passes on; its backward calls a module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:  # type: ignore[override]
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad + 0.1 * ctx.module(grad), None


class NeededAgain(nn.Module):
    """A unit's weight gets its gradient, and is then needed once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.leaf, self.last = (nn.Linear(19, 19) for _ in range(3))
        self.mid = nn.ModuleList(nn.Linear(19, 19) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = CallsInBackward.apply(self.first(x), self.leaf)  # type: ignore[no-untyped-call]
        for layer in self.mid:
            x = torch.tanh(layer(x))
        return self.last(self.leaf(x))


@on_ranks(1, 2)
def test_a_unit_that_is_needed_after_its_step_is_refused() -> None:
    settings = SETTINGS | {"offload": "cpu"}  # whose units are dropped at one rank too
    with Sharded(NeededAgain(), stage=3, unit={"classes": ["Linear"]}, **settings) as side:
        step_with(side, partial(loss_of, side), early=True)  # teaches the order; nothing is stepped inside
        with pytest.raises(RuntimeError, match=r"unit leaf is needed again .*step_in_backward=false") as caught:
            step_with(side, partial(loss_of, side), early=True)
        assert any("step was partial: " in note for note in caught.value.__notes__)
        assert torch.isfinite(step_with(side, partial(loss_of, side), early=False))


class Twice(nn.Module):
    """A block that is used twice from one step on; under checkpointing its gradient then comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.often = nn.Linear(19, 19), nn.Linear(19, 19)
        self.mid = nn.ModuleList(nn.Linear(19, 19) for _ in range(4))
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.twice:
            x = checkpoint(self.often, torch.tanh(x), use_reentrant=True)
        for layer in self.mid:
            x = torch.tanh(layer(x))
        return checkpoint(self.often, x, use_reentrant=True)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_comes_after_the_step_is_refused(stage: int) -> None:
    module = Twice()
    with Sharded(module, stage=stage, unit={"classes": ["Linear"]}, **SETTINGS) as side:
        for _ in range(3):
            step_with(side, partial(loss_of, side), early=True)
        module.twice = True
        # At stage 3 the unit's weights are needed again before its gradient comes.
        with pytest.raises(RuntimeError, match=r"(often.* arrived|often is needed again) .*step_in_backward=false"):
            step_with(side, partial(loss_of, side), early=True)
        assert torch.isfinite(step_with(side, partial(loss_of, side), early=False))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_all_ranks_refuse_a_gradient_that_comes_late_on_one_of_them(stage: int) -> None:
    module = Twice()
    rank = dist.get_rank()
    with Sharded(module, stage=stage, unit={"classes": ["Linear"]}, **SETTINGS) as side:
        for _ in range(3):
            step_with(side, partial(loss_of, side), early=True)
        module.twice = rank == 1
        with pytest.raises(RuntimeError, match=r"bucket often.* arrived, on some rank"):
            step_with(side, partial(loss_of, side), early=rank == 0)
        module.twice = False
        assert torch.isfinite(step_with(side, partial(loss_of, side), early=False))


class Missing(nn.Module):
    """``mid`` comes twice before ``first`` comes once: as many gradients as the bucket has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(19, 19), nn.Linear(19, 19), nn.Linear(19, 1)
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(1 + self.twice):
            x = checkpoint(self.mid, torch.tanh(x), use_reentrant=True)
        return self.last(x)


@on_ranks(1, 2)
@pytest.mark.parametrize("nbytes", [400, 1 << 20])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bucket_is_stepped_when_all_its_parameters_have_come(stage: int, nbytes: int) -> None:
    found = []
    for early in (True, False):
        torch.manual_seed(3)
        module = Missing()
        settings = SETTINGS | {"reduce_bucket_bytes": nbytes}
        with Sharded(module, stage=stage, **settings) as side:
            losses = []
            for step in range(4):
                module.twice = step == 3
                losses.append(step_with(side, partial(loss_of, side), early=early))
            found.append(losses + whole(side))
    assert_equal(*found, f"stage {stage}")
