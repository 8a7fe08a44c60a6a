"""Passes, backwards and steps that come between one another: each leaves the others' state as it was."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.comm.reduction import Pending
from lightning_zero.engine.units.unit import State, Unit
from tests.engine.support import (
    Block,
    Model,
    Sharded,
    Side,
    Twin,
    adamw,
    assert_same,
    check,
    floats,
    language_loss,
    language_work,
    sgd,
    tokens,
)
from tests.harness import on_ranks

WIDTH = 19
PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])


class Blocks(nn.Module):
    def __init__(self, number: int = 4, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind(WIDTH) for _ in range(number))

    def forward(self, x: Tensor, depth: int | None = None) -> Tensor:
        x = self.first(x)
        for block in list(self.blocks)[:depth]:
            x = block(x)
        return x


def scope(side: Side, key: str = "train") -> Any:
    return side.engine.step_scope(key) if isinstance(side, Sharded) else contextlib.nullcontext()


def square_work(side: Side, step: int) -> Tensor:
    loss = side.module(floats(step, 4, WIDTH)).square().mean()
    side.backward(loss)
    return loss


def slope_of_input(module: nn.Module, step: int) -> Tensor:
    x = floats(step, 4, WIDTH).requires_grad_()
    (slope,) = torch.autograd.grad(module(x).square().sum(), x)
    return slope


# -- what is held between passes --------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@PLAIN
@pytest.mark.parametrize("where", ["before the step", "between", "between, no_sync", "of a block"])
def test_autograd_grad_keeps_the_gradients_held_so_far(stage: int, plain: bool, where: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        with side.no_sync() if where == "between, no_sync" else contextlib.nullcontext():
            loss = square_work(side, step)
        if where == "of a block":
            return slope_of_input(side.module.blocks[0], step + 50)
        slope = slope_of_input(side.module, step + 50)
        if where != "before the step":
            loss = square_work(side, step + 20)
        return slope + loss.detach()

    check(Blocks, work, stage=stage, plain=plain)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_forward_inside_gather_leaves_masters_intact(stage: int, precision: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        shown = lightning_zero.gather(side.module) if isinstance(side, Sharded) else contextlib.nullcontext()
        with shown, torch.no_grad():
            looked_at = side.module(tokens(step + 30))
        loss = language_work(side, step).detach()
        return loss if precision == "bf16" else looked_at + loss  # inside, bf16 runs on the unrounded masters

    check(Model, work, stage=stage, precision=precision)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_inside_gather_is_refused_and_right_after_it(stage: int) -> None:
    def work(side: Side, step: int) -> Tensor:
        loss = language_work(side, step)
        if isinstance(side, Sharded):
            for target in (side.module, side.module.head.weight):
                with lightning_zero.gather(target), pytest.raises(RuntimeError, match=r"step\(\) inside gather"):
                    side.step()
        return loss

    check(Model, work, stage=stage)


# -- manual optimization: several passes and steps in one scope --------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("prefetch_bytes", [0, 10**6])
def test_what_was_gathered_ahead_of_a_step_is_not_used_after_it(stage: int, prefetch_bytes: int) -> None:
    def work(side: Side, step: int) -> Tensor:
        with scope(side):
            language_work(side, step)
            with torch.no_grad():
                side.module(tokens(step, 1))
            side.step()
            side.zero_grad()
            with torch.no_grad():
                looked_at = side.module(tokens(step, 2))
            loss = language_loss(side.module, tokens(step, 3))
            side.backward(loss)
        return looked_at + loss.detach()

    check(Model, work, steps=4, stage=stage, prefetch_bytes=prefetch_bytes)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
@PLAIN
def test_accumulation_goes_on_over_scopes(stage: int, plain: bool) -> None:
    def work(side: Side, step: int) -> Tensor:
        with scope(side), side.no_sync():
            first = square_work(side, step)
        with scope(side):
            return first.detach() + square_work(side, step + 20)

    check(Blocks, work, stage=stage, plain=plain)


class Scaled(nn.Module):
    """A parameter of one element rests replicated at every stage. ``use``: on which ranks it is used."""

    def __init__(self, use: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.scale, self.use = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(2.0)), use

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * self.scale if dist.get_rank() in self.use else y


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_waits_on_one_rank_only_is_refused_on_all(stage: int) -> None:
    module = Scaled(use=(1,))
    with Sharded(module, stage=stage, optimizer=lambda _: sgd([module.scale])) as side:
        with side.no_sync():
            side.backward(module(floats(0, 4, WIDTH)).square().mean())
        actions: list[Any] = [side.step, lambda: side.clip(1.0), lambda: gather_grads(module.scale)]
        for act in actions:
            with pytest.raises(RuntimeError, match="no_sync.*not been reduced"):
                act()


def gather_grads(param: nn.Parameter) -> None:
    with lightning_zero.gather(param, grads=True):
        pass


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_what_only_no_sync_backwards_left_is_not_stepped_measured_or_clipped(stage: int) -> None:
    def work(side: Side, step: int) -> Tensor:
        with side.no_sync():
            first = language_work(side, step)
        if isinstance(side, Sharded):
            for use in (side.step, lambda: lightning_zero.grad_norm(side.module), lambda: side.clip(1.0)):
                with pytest.raises(RuntimeError, match="no_sync.*not been reduced"):
                    use()
        return first.detach() + language_work(side, step + 20)

    check(Model, work, stage=stage)


# -- passes that end early, or on one rank only ------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("prefetch_bytes", [1, 10**6])
def test_ranks_leave_a_step_after_different_numbers_of_blocks(prefetch_bytes: int) -> None:
    lengths = {0: (1, 3), 1: (3, 1)}

    def work(side: Side, step: int) -> Tensor:
        if step in (3, 4):
            with scope(side):
                x = floats(step, 4, WIDTH)
                for block in list(side.module.blocks)[: lengths[dist.get_rank()][step - 3]]:
                    x = block(x)
        with scope(side):
            return square_work(side, step)

    check(lambda: Blocks(6), work, steps=6, prefetch_bytes=prefetch_bytes, stall_timeout_s=10)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_on_one_rank_does_not_hang(stage: int, grad: bool) -> None:
    def work(side: Side, step: int) -> Tensor:
        if dist.get_rank() == 0:
            with torch.set_grad_enabled(grad):
                side.module(tokens(step + 50))
        return language_work(side, step)

    check(Model, work, stage=stage, stall_timeout_s=5)


@on_ranks(2)
@pytest.mark.parametrize("evaluation", [True, False], ids=["evaluation", "training"])
def test_passes_that_end_early_or_skip_do_not_pile_units_up(evaluation: bool) -> None:
    number = 12
    with Sharded(Blocks(number), prefetch_bytes=1, stall_timeout_s=10) as side:
        engine = side.engine
        gathered: list[int] = []

        units = engine.units[1:]
        engine.comm.observers.append(lambda *_: gathered.append(sum(u.state is not State.SHARDED for u in units)))
        for path in ([*range(number)], [*range(number)], [0], [0, number - 1], [*range(number)], [5]):
            with engine.step_scope("s", evaluation=evaluation), torch.set_grad_enabled(not evaluation):
                x = floats(0, 4, WIDTH)
                for i in path:
                    x = side.module.blocks[i](x)
            if not evaluation:
                engine.passes.backward(x.sum())
            assert max(gathered) <= 3, path


@on_ranks(2)
@pytest.mark.parametrize("scoped", [False, True])
def test_a_path_that_changes_for_good_is_soon_known(scoped: bool) -> None:
    exchanged: list[bool] = []
    with Sharded(Blocks(12), stall_timeout_s=10) as side:
        side.engine.comm.observers.append(lambda kind, _: exchanged.append(kind == "exchange"))

        def passes(depth: int, number: int) -> int:
            count = 0
            for step in range(number):
                exchanged.clear()
                with scope(side) if scoped else contextlib.nullcontext():
                    loss = side.module(floats(step, 4, WIDTH), depth).mean()
                side.backward(loss)
                side.step()
                count += any(exchanged)
            return count

        assert passes(6, 3) == 1
        assert 1 <= passes(12, 8) <= 4
        assert passes(12, 3) == 0


# -- what goes in and out of units -------------------------------------------------------------------------------------


class IgnoresItsSecondInput(Block):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x)


class FeedsWhatIsIgnored(Blocks):
    def __init__(self) -> None:
        super().__init__(2, IgnoresItsSecondInput)
        self.beside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        other = self.beside(x)
        for block in self.blocks:
            x = block(self.first(x), other)
        return x


@on_ranks(2)
def test_an_ignored_input_has_no_gradient_and_not_zeros() -> None:
    check(FeedsWhatIsIgnored, square_work, optimizer=adamw)


class Hides(Block):
    """Leaves a part of the loss on itself, made after its output: autograd gets there first."""

    kind: str

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale, self.linear = nn.Parameter(torch.ones(1, width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.hidden = (self.linear(out) if self.kind == "linear" else out * self.scale).square().mean()
        return out


@on_ranks(2)
@PLAIN
@pytest.mark.parametrize("kind", ["scale", "linear"])
def test_a_tensor_may_leave_a_unit_by_another_way_than_its_outputs(plain: bool, kind: str) -> None:
    Hides.kind = kind

    def work(side: Side, step: int) -> Tensor:
        with scope(side):
            out = side.module(floats(step, 4, WIDTH))
            loss = out.square().mean() + sum(block.hidden for block in side.module.blocks)
        side.backward(loss)
        return loss

    check(lambda: Blocks(2, Hides), work, plain=plain)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_two_checkpoints_of_the_whole_model(stage: int, reentrant: bool) -> None:
    def work(side: Side, step: int) -> Tensor:
        inputs = [floats(step + 50 * i, 4, WIDTH).requires_grad_() for i in range(2)]
        loss = sum(checkpoint(side.module, x, use_reentrant=reentrant).square().mean() for x in inputs)
        side.backward(loss)  # type: ignore[arg-type]
        return loss  # type: ignore[return-value]

    check(Blocks, work, stage=stage, plain=True, optimizer=sgd, tolerance=1e-6)


class ReturnsItsWeight(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.up.weight


@on_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_returned_parameter_does_not_collect_hooks(stage: int) -> None:
    with Sharded(Blocks(2, ReturnsItsWeight), stage=stage) as side:
        for step in range(3):
            with scope(side):
                x = floats(step, 4, WIDTH)
                for block in side.module.blocks:
                    x, weight = block(x)
                    assert weight is block.up.weight and not weight._backward_hooks
            side.backward(x.mean())
            side.step()
            side.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("max_bytes", [1500, 6000])
def test_attention_that_reads_its_children_s_weights(max_bytes: int) -> None:
    """``nn.MultiheadAttention`` uses ``out_proj.weight`` without a call; in eval mode, a layer all of its weights."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 33, 0.0, batch_first=True) for _ in range(2)))

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded):
            assert len(side.engine.units) > 3
        side.backward(side.module(floats(step, 2, 5, 16)).square().mean())
        side.module.eval()
        with torch.no_grad():
            seen = side.module(floats(step, 2, 5, 16))
        side.module.train()
        return seen

    check(build, work, unit={"max_bytes": max_bytes}, tolerance=1e-5)


# -- later halves of reductions ---------------------------------------------------------------------------------------


class BreaksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ValueError("broken")


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_raise_after_different_halves_of_reductions_go_on(stage: int) -> None:
    """One rank has found its reductions complete and issued what follows them, the other has not."""
    module = Model(depth=4)
    module.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))  # all-reduced at every stage
    module.register_forward_hook(lambda m, _, out: out * m.scale)
    twin = Twin(module, each=stage >= 2)
    done = Pending.done

    def found_complete(self: Pending) -> bool:
        if dist.get_rank():
            return False
        for work in self._works:
            work.wait()
        return done(self)

    with Sharded(module, stage=stage) as side:
        for step in range(3):
            for one in (side, twin):
                one.backward(language_loss(one.module, tokens(step)))
                one.step()
                one.zero_grad()
            hook = module.embed.register_forward_hook(lambda _, __, out: BreaksInBackward.apply(out))
            with (
                mock.patch("lightning_zero.engine.passes.passes.ABANDON_S", 0.2),  # for messages that nobody answers
                mock.patch.object(Pending, "done", found_complete),
                pytest.raises(ValueError, match="broken"),
            ):
                side.backward(language_loss(module, tokens(10 + step)))
            hook.remove()
            side.zero_grad()
        assert_same(side, twin)


# -- a backward that raises -------------------------------------------------------------------------------------------


def raise_in(module: nn.Module) -> Any:
    """The next backward through ``module`` raises."""

    def backward(*_: Any) -> None:
        raise ZeroDivisionError

    return module.register_full_backward_hook(backward)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])
def test_gradients_that_lack_a_part_are_not_stepped(stage: int, plain: bool) -> None:
    """The first micro-batch is good, the second raises: what is left is neither the one nor the other."""
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=stage >= 2)
    # One rank may have issued the second half of a sum, and the other not.
    soon = mock.patch("lightning_zero.engine.passes.passes.ABANDON_S", 0.5)
    with soon, Sharded(module, stage=stage, plain=plain) as side:
        side.backward(language_loss(side.module, tokens(0)))
        hook = raise_in(side.module.blocks[1])
        with pytest.raises(ZeroDivisionError):
            side.backward(language_loss(side.module, tokens(1)))
        hook.remove()
        refused = pytest.raises(RuntimeError, match=r"a backward has raised before its end.*zero_grad")
        with refused:
            side.step()
        side.backward(language_loss(side.module, tokens(2)))  # does not make it whole
        with refused:
            side.clip(1.0)
        with refused:
            side.step()
        side.zero_grad()
        for both in (twin, side):
            both.backward(language_loss(both.module, tokens(3)))
            both.step()
        assert_same(side, twin)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("cleared_by", ["the optimizer", "hand"])
def test_gradients_that_were_cleared_lack_nothing_in_the_next_scope(stage: int, cleared_by: str) -> None:
    """The engine hears of the backward that raised when a scope begins, and by then they have been cleared."""
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module)
    soon = mock.patch("lightning_zero.engine.passes.passes.ABANDON_S", 0.5)
    with soon, Sharded(module, stage=stage, plain=True) as side:
        side.backward(language_loss(side.module, tokens(0)))
        hook = raise_in(side.module.blocks[1])
        with pytest.raises(ZeroDivisionError):
            side.backward(language_loss(side.module, tokens(1)))
        hook.remove()
        if cleared_by == "the optimizer":
            side.zero_grad()
        else:
            for param in side.module.parameters():
                param.grad = None
        with side.engine.step_scope():
            loss = language_loss(side.module, tokens(2))
        side.backward(loss)
        side.step()
        twin.backward(language_loss(twin.module, tokens(2)))
        twin.step()
        assert_same(side, twin)


@on_ranks(2)
@pytest.mark.parametrize("where", ["_begin_backward", "_end_backward", "flush"])
def test_an_exception_at_an_end_of_a_backward_is_followed_by_a_clean_one(where: str) -> None:
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module)
    with Sharded(module, stage=3) as side:
        owner = side.engine.passes.reducer if where == "flush" else side.engine.passes
        with mock.patch.object(owner, where, side_effect=MemoryError), pytest.raises(MemoryError):
            side.backward(language_loss(side.module, tokens(0)))
        side.zero_grad()
        for both in (twin, side):
            both.backward(language_loss(both.module, tokens(1)))
            both.step()
        assert_same(side, twin)


@on_ranks(2)
@pytest.mark.parametrize("dynamic_graph", [False, True])
def test_a_rank_that_is_done_holds_few_of_the_units_that_others_need(dynamic_graph: bool) -> None:
    class Long(Model):
        def forward(self, batch: Tensor) -> Tensor:
            x = self.embed(batch)
            for block in self.blocks if torch.distributed.get_rank() else self.blocks[:1]:
                x = block(x)
            return self.head(x)

    most = 0
    unshard_begin = Unit.unshard_begin

    def counted(self: Unit) -> None:
        nonlocal most
        unshard_begin(self)
        most = max(most, sum(unit.state is not State.SHARDED for unit in side.engine.units))

    with Sharded(Long(depth=9), stage=3, dynamic_graph=dynamic_graph, prefetch_bytes=1) as side:
        with mock.patch.object(Unit, "unshard_begin", counted), torch.no_grad():
            side.module(tokens(0))
        assert most <= 4, "the root, one in use, and one for another rank"


class Silent(nn.Module):
    """Keeps what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> None:
        self.kept.append(self.linear(x))


@on_ranks(2)
def test_a_module_that_returns_nothing_is_called_where_another_exception_is_handled() -> None:
    module = nn.Sequential(Silent())
    with Sharded(module, stage=3, unit={"classes": ["Silent"]}) as side:
        try:
            raise KeyError
        except KeyError:
            module(torch.ones(2, 8))
        assert not side.engine.passes.aborted
        side.backward(module[0].kept.pop().sum())
        side.step()
