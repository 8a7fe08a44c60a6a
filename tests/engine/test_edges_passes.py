"""Forwards and backwards of every kind train as they do in a plain replicated copy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.engine.passes.saved_weights import SavedWeights
from lightning_zero.engine.units.unit import State
from tests.engine.support import (
    Block,
    Model,
    Sharded,
    Side,
    Twin,
    accumulate,
    assert_same,
    autocast,
    check,
    floats,
    language_loss,
    language_work,
    sgd,
    tokens,
)
from tests.harness import on_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
OUTER_STAGES = pytest.mark.parametrize("stage", [0, 3])
PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])
WIDTH = 19


def square_work(side: Side, step: int) -> Tensor:
    loss = side.module(floats(step, 4, WIDTH)).square().mean()
    side.backward(loss)
    return loss


class Chain(nn.Module):
    """Blocks in a row, called by ``call(block, x)``."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor] | None = None, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.call = call or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x


# -- modules used more than once --------------------------------------------------------------------------------------


class Twice(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for i in (1, 1, 0):
            x = self.blocks[i](x)
        return x


@on_ranks(2, full=(3,))
@STAGES
@PLAIN
def test_a_module_used_several_times_in_one_forward(stage: int, plain: bool) -> None:
    check(Twice, square_work, stage=stage, plain=plain)


@on_ranks(2)
@OUTER_STAGES
def test_several_forwards_before_one_backward(stage: int) -> None:
    def work(side: Side, step: int) -> Tensor:
        losses = [language_loss(side.module, tokens(step, i)) for i in range(3)]
        side.backward(sum(losses))  # type: ignore[arg-type]
        return losses[0]

    check(Model, work, stage=stage)


@on_ranks(2)
@OUTER_STAGES
def test_a_block_called_for_itself_beside_the_whole(stage: int) -> None:
    def work(side: Side, step: int) -> Tensor:
        loss = side.module(floats(step, 4, WIDTH)).square().mean()
        loss = loss + side.module.blocks[1](floats(step + 100, 4, WIDTH)).mean()
        side.backward(loss)
        return loss

    check(Chain, work, stage=stage)


@on_ranks(2)
@OUTER_STAGES
def test_a_step_without_the_root_s_forward(stage: int) -> None:
    """What Lightning does: ``training_step`` calls parts of the module, and uses root parameters directly."""

    def work(side: Side, step: int) -> Tensor:
        module = side.module
        scope = side.engine.step_scope("train") if isinstance(side, Sharded) else contextlib.nullcontext()
        with scope:
            x = floats(step, 4, WIDTH) @ module.first.weight
            for block in module.blocks:
                x = block(x)
            loss = x.square().mean()
            side.backward(loss)
        return loss

    check(Chain, work, stage=stage)


# -- activation checkpointing -----------------------------------------------------------------------------------------


def per_block(block: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    return checkpoint(block, x, use_reentrant=reentrant)


class SeveralBlocksInOne(Chain):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(depth=4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in (0, 2):
            pair = lambda y, i=i: self.blocks[i + 1](self.blocks[i](y))  # noqa: E731
            x = checkpoint(pair, x, use_reentrant=self.reentrant)
        return x


@on_ranks(2, full=(3,))
@STAGES
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_checkpointed_blocks(stage: int, reentrant: bool) -> None:
    check(lambda: Chain(functools.partial(per_block, reentrant=reentrant)), square_work, stage=stage)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("prefetch_bytes", [0, 10**6])
def test_several_blocks_in_one_checkpoint(stage: int, reentrant: bool, prefetch_bytes: int) -> None:
    check(lambda: SeveralBlocksInOne(reentrant), square_work, stage=stage, prefetch_bytes=prefetch_bytes)


@on_ranks(2)
@OUTER_STAGES
def test_checkpoints_end_recomputation_early(stage: int) -> None:
    """The non-reentrant kind stops inside of a module once everything saved has been recomputed."""

    class StopsEarly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.a(x)) + x + 0 * self.b.weight.sum()

    def build() -> nn.Module:
        module = Chain(functools.partial(per_block, reentrant=False))
        module.blocks = nn.ModuleList(nn.Sequential(StopsEarly()) for _ in range(3))
        return module

    check(build, square_work, stage=stage)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("how", ["blocks", "offload"])
def test_blocks_that_are_computed_again_pack_what_they_save_where_weights_go_away(stage: int, how: str) -> None:
    pack = SavedWeights._pack_inside
    with mock.patch.object(SavedWeights, "_pack_inside", autospec=True, side_effect=pack) as packs:
        check(Chain, square_work, stage=stage, activation_checkpointing=how, unit={"classes": ["Block"]})
    assert bool(packs.call_count) == (stage == 3)


class ChecksPartOfItself(nn.Module):
    """A block whose norm is used inside of its checkpoint, and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        y = checkpoint(lambda z: self.inner(self.norm(z)), x, use_reentrant=reentrant)
        return self.norm(y).mul_(2)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_a_checkpoint_inside_of_a_unit(stage: int, reentrant: bool) -> None:
    """Its recomputation calls no unit. Gradients of the norm come from around it too, and the unit is dropped before
    the norm's backward inside of it: that has to gather it again."""

    def build() -> nn.Module:
        module = Chain(lambda block, x: block(block(block(x, reentrant), reentrant), reentrant))
        module.blocks = nn.ModuleList(ChecksPartOfItself() for _ in range(2))
        return module

    unit = {"classes": ["ChecksPartOfItself"]}
    check(build, square_work, stage=stage, unit=unit, tolerance=1e-6, optimizer=sgd)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_a_checkpointed_block_used_twice(stage: int, reentrant: bool) -> None:
    """Under the reentrant kind its gradients arrive twice, and the second time after they were reduced."""

    class Reused(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return self.call(self.blocks[0], super().forward(x))

    check(
        lambda: Reused(functools.partial(per_block, reentrant=reentrant)),
        square_work,
        stage=stage,
        tolerance=1e-6,
        optimizer=sgd,
    )


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_checkpointed_adapters(stage: int, reentrant: bool) -> None:
    """Frozen weights with small trainable parts, inputs that need no gradient at first."""

    def build() -> nn.Module:
        module = Chain(functools.partial(per_block, reentrant=reentrant))
        for block in module.blocks:
            block.up.requires_grad_(False)
            block.norm.requires_grad_(False)
        module.first.requires_grad_(reentrant)  # the reentrant kind needs an input with a gradient
        return module

    check(build, square_work, stage=stage)


# -- several backwards, gradients of gradients ------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@STAGES
@PLAIN
def test_several_backwards_before_a_step(stage: int, plain: bool) -> None:
    """Each with a forward of its own, without ``no_sync``: reduced at every backward."""

    def work(side: Side, step: int) -> Tensor:
        total = torch.zeros(())
        for micro in range(3):
            loss = language_loss(side.module, tokens(step, micro))
            side.backward(loss)
            total = total + loss.detach()
        return total

    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=True)
    with Sharded(module, stage=stage, plain=plain) as sharded:
        for step in range(3):
            for side in (sharded, twin):
                work(side, step)
            assert_same(sharded, twin, grads=True)
            for side in (sharded, twin):
                side.step()
                side.zero_grad()
            assert_same(sharded, twin)


@on_ranks(2)
@STAGES
def test_two_backwards_through_one_forward(stage: int) -> None:
    def work(side: Side, step: int) -> Tensor:
        out = side.module(floats(step, 4, WIDTH))
        side.backward(out.square().mean(), retain_graph=True)
        side.backward(out.abs().mean())
        return out.sum()

    torch.manual_seed(3)
    module = Chain()
    twin = Twin(module)
    with Sharded(module, stage=stage) as sharded:
        for step in range(3):
            for side in (sharded, twin):
                work(side, step)
            assert_same(sharded, twin, grads=True)
            for side in (sharded, twin):
                side.step()
                side.zero_grad()


@on_ranks(2)
@STAGES
@PLAIN
def test_gradients_of_a_backward_with_a_weight(stage: int, plain: bool) -> None:
    def work(side: Side, step: int) -> Tensor:
        out = side.module(floats(step, 4, WIDTH))
        side.backward(out, gradient=floats(step + 50, 4, WIDTH))
        return out

    check(Chain, work, stage=stage, plain=plain)


@on_ranks(2, full=(3,))
@STAGES
@PLAIN
def test_gradient_penalty(stage: int, plain: bool) -> None:
    def work(side: Side, step: int) -> Tensor:
        x = floats(step, 4, WIDTH).requires_grad_()
        out = side.module(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + slope.square().sum()
        side.backward(loss)
        return loss

    check(Chain, work, stage=stage, plain=plain)


class Images(nn.Module):
    """Convolutions: their backward of second order reads weights that the first one has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x)
        return x


@on_ranks(2)
@OUTER_STAGES
@PLAIN
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_gradient_penalty_whose_graph_is_walked_twice(stage: int, plain: bool, checkpointing: str) -> None:
    """The pass is over after the first time, and weights have gone."""

    def work(side: Side, step: int) -> Tensor:
        x = floats(step, 2, 3, 5, 5).requires_grad_()
        out = side.module(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + slope.square().sum()
        side.backward(loss, retain_graph=True)
        side.backward(loss)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        return loss

    check(Images, work, stage=stage, plain=plain, activation_checkpointing=checkpointing)


@on_ranks(2)
@STAGES
def test_autograd_grad_without_a_graph_then_an_ordinary_backward(stage: int) -> None:
    """An attack on the input: gradients of inputs, none of parameters."""

    def work(side: Side, step: int) -> Tensor:
        x = floats(step, 4, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(side.module(x).square().mean(), x)
        loss = side.module(x.detach() + 0.1 * slope.sign()).square().mean()
        side.backward(loss)
        return loss

    check(Chain, work, stage=stage)


# -- evaluation between training steps --------------------------------------------------------------------------------


def no_grad_or_inference(kind: str) -> Any:
    return torch.no_grad() if kind == "no_grad" else torch.inference_mode()


@on_ranks(2, full=(3,))
@STAGES
@pytest.mark.parametrize("kind", ["no_grad", "inference_mode"])
def test_evaluation_between_steps_gives_the_same_outputs(stage: int, kind: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        with no_grad_or_inference(kind):
            outputs = [side.module(tokens(step + 10 * i)).clone() for i in range(3)]
        language_work(side, step)
        with no_grad_or_inference(kind):
            outputs.append(side.module(tokens(step)).clone())
        with torch.inference_mode(False), torch.no_grad():
            return torch.stack([o.clone() for o in outputs])

    check(Model, work, stage=stage)


@on_ranks(2)
@pytest.mark.parametrize("scoped", [False, True])
def test_evaluation_keeps_the_order_of_training(scoped: bool) -> None:
    """Plans stay as they are, nothing is agreed anew, and gathers are still issued ahead."""
    with Sharded(Model(depth=4)) as side:
        engine = side.engine
        events: list[tuple[str, str]] = []

        def scope(key: str, evaluation: bool = False) -> Any:
            return engine.step_scope(key, evaluation=evaluation) if scoped else contextlib.nullcontext()

        def train(step: int) -> None:
            with scope("train"):
                loss = language_loss(side.module, tokens(step))
            side.backward(loss)
            side.step()
            side.zero_grad()

        def evaluate(batches: int) -> None:
            for i in range(batches):
                with torch.no_grad(), scope("validate", evaluation=True):
                    side.module(tokens(100 + i))

        train(0)
        evaluate(1)
        plans = {key: plan.entries for key, plan in engine.passes.order.plans.items()}
        engine.comm.observers.append(lambda *event: events.append(event))
        ahead: list[str] = []
        for block in side.module.blocks:
            block.register_forward_pre_hook(lambda *_: ahead.append(_states(side)))
        for step in range(1, 4):
            train(step)
            evaluate(step + 1)
        assert {key: plan.entries for key, plan in engine.passes.order.plans.items()} == plans
        assert not [event for event in events if event[0] == "exchange"]
        # In every forward, whatever came before it, the next block is on its way when the first starts.
        assert all(states.startswith("GG") for states in ahead[0::4])


def _states(side: Sharded) -> str:
    return "".join(" " if unit.state is State.SHARDED else "G" for unit in side.engine.units[1:])


@on_ranks(2)
def test_evaluation_gathers_every_unit_once() -> None:
    with Sharded(Model()) as side:
        language_work(side, 0)
        side.step()
        for _ in range(3):
            side.engine.comm.counts.clear()
            with torch.no_grad():
                side.module(tokens(1))
            assert side.engine.comm.counts == {("all_gather", b.label): 1 for b in side.engine.buckets}
            assert not any(b.full.allocated for b in side.engine.buckets)


@on_ranks(2)
def test_generation_repeats_its_gathers_without_new_agreements() -> None:
    """Evaluation steps of different numbers of forwards follow one plan."""
    with Sharded(Model()) as side:
        exchanged: list[str] = []
        side.engine.comm.observers.append(lambda kind, _: exchanged.append(kind))
        for forwards in (1, 3, 2, 5):
            exchanged.clear()
            with torch.no_grad(), side.engine.step_scope("generate", evaluation=True):
                for i in range(forwards):
                    side.module(tokens(i))
            if forwards > 1:
                assert "exchange" not in exchanged
                assert exchanged.count("all_gather") == 1 + 3 * forwards  # the root once


@on_ranks(2)
@OUTER_STAGES
def test_a_layer_with_and_without_no_grad_in_one_forward(stage: int) -> None:
    class Targets(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = super().forward(x)
            return super().forward(x + 1) - target

    check(Targets, square_work, stage=stage)


@on_ranks(2)
@OUTER_STAGES
def test_a_forward_with_gradients_and_no_backward(stage: int) -> None:
    """A loss that is only looked at; then training goes on."""

    def work(side: Side, step: int) -> Tensor:
        language_loss(side.module, tokens(step + 40))
        return language_work(side, step)

    check(Model, work, stage=stage)


@on_ranks(2)
def test_what_the_engine_makes_in_inference_mode_can_train() -> None:
    module = Model()
    twin = Twin(module)
    with Sharded(module) as sharded:
        with torch.inference_mode():
            sharded.module(tokens(0))
        for side in (sharded, twin):
            language_work(side, 0)
            with torch.inference_mode():
                side.step()
            side.zero_grad()
        assert_same(sharded, twin)


# -- inputs and outputs -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    value: Tensor
    note: str = ""


@dataclasses.dataclass(frozen=True)
class FrozenResult:
    value: Tensor


class Unknown:
    """A container that nobody can look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


Pair = namedtuple("Pair", ["value", "other"])

WRAP: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (lambda t: Result(t), lambda r: r.value),
    "frozen dataclass": (lambda t: FrozenResult(t), lambda r: r.value),
    "named tuple": (lambda t: Pair(t, None), lambda r: r.value),
    "nested": (lambda t: {"a": [(t, 1), "text"]}, lambda r: r["a"][0][0]),
    "ordered dict": (lambda t: OrderedDict(value=t), lambda r: r["value"]),
    "list": (lambda t: [t], lambda r: r[0]),
    "unknown": (lambda t: Unknown(t), lambda r: r.value),
}


class Wrapping(nn.Module):
    """Takes and gives its tensor inside a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.kind = kind

    def forward(self, wrapped: Any) -> Any:
        wrap, unwrap = WRAP[self.kind]
        return wrap(self.block(unwrap(wrapped)))


class WrappingChain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Wrapping(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        wrap, unwrap = WRAP[self.kind]
        wrapped = wrap(x)
        for block in self.blocks:
            wrapped = block(wrapped)
        return unwrap(wrapped)


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("kind", list(WRAP))
def test_inputs_and_outputs_in_containers(stage: int, kind: str) -> None:
    check(lambda: WrappingChain(kind), square_work, stage=stage)


@on_ranks(2)
def test_units_are_dropped_after_their_forward_whatever_they_return() -> None:
    for kind in WRAP:
        module = WrappingChain(kind)
        with Sharded(module, prefetch_bytes=0) as side:
            for _ in range(2):
                module(floats(0, 4, WIDTH))
                held = [any(b.full.allocated for b in unit.buckets) for unit in side.engine.units[1:]]
                assert not any(held), kind


@on_ranks(2)
@STAGES
def test_inputs_that_need_gradients_and_inputs_that_do_not(stage: int) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, gate: Tensor, shift: float = 0.0) -> Tensor:
            return self.a(x) * torch.sigmoid(self.b(gate)) + shift

    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.ModuleList(Gate() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = x
            for gate in self.gates:
                y = gate(y, gate=x, shift=0.5) + gate(x, gate=y)
            return y

    def work(side: Side, step: int) -> Tensor:
        x = floats(step, 4, WIDTH).requires_grad_(step % 2 == 1)
        loss = side.module(x).square().mean()
        side.backward(loss)
        return loss if x.grad is None else x.grad

    check(Gates, work, stage=stage, steps=4, optimizer=sgd)


@on_ranks(2)
@OUTER_STAGES
def test_in_place_activations(stage: int) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.linear = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.act(x))

    check(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), InPlace(), InPlace()), square_work, stage=stage)


class Adds(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.linear(x.clone()))


def adding() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Adds(), Adds())


@on_ranks(2)
@OUTER_STAGES
def test_units_may_change_their_inputs_in_place(stage: int) -> None:
    check(adding, square_work, stage=stage)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("how", ["blocks", "offload"])
def test_inputs_that_change_cannot_be_computed_from_again(stage: int, how: str) -> None:
    """torch would compute wrong gradients without a word."""
    with (
        Sharded(adding(), stage=stage, activation_checkpointing=how) as side,
        pytest.raises(RuntimeError, match=r"unit 1 .*changed in place by it.*zero\.activation_checkpointing=none"),
    ):
        side.module(floats(0, 4, WIDTH))

    def changed_by_the_caller(block: nn.Module, x: Tensor) -> Tensor:
        out = block(x)
        x.mul_(2)
        return out

    with Sharded(Chain(changed_by_the_caller), stage=stage, activation_checkpointing=how) as side:
        out = side.module(floats(0, 4, WIDTH))
        with pytest.raises(RuntimeError, match=r"changed in place after it|modified by an inplace operation"):
            side.backward(out.sum())


class Appending(nn.Module):
    """Blocks that hand on what they have computed in a list."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, found: list[Tensor], more: dict[str, list[Tensor]]) -> None:
            found.append(torch.tanh(self.linear(found[-1])) + sum(more["all"], torch.zeros(())))
            more["all"].append(found[-1].square())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found, more = [x], {"all": list[Tensor]()}
        for block in self.blocks:
            block(found, more=more)
        assert len(found) == 4
        return found[-1]


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("how", ["blocks", "offload"])
def test_lists_that_blocks_append_to_are_as_they_were_when_a_block_is_computed_again(stage: int, how: str) -> None:
    settings = {"activation_checkpointing": how, "unit": {"classes": ["Block"]}}
    check(Appending, square_work, stage=stage, **settings)


class Attends(nn.Module):
    """Attention computes otherwise where its inputs are one tensor."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.linear, self.attention = nn.Linear(WIDTH, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).unflatten(0, (2, 2))
        others = {"key": x, "value": x} if self.by_name else {}
        return self.attention(x, *([] if self.by_name else [x, x]), **others, need_weights=False)[0]


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("how", ["blocks", "offload"])
@pytest.mark.parametrize("by_name", [False, True])
def test_an_input_that_is_given_several_times_is_one_tensor_again(stage: int, how: str, by_name: bool) -> None:
    """... when the unit is computed again: torch's checkpoint alone gives back one for each argument."""
    settings = {"activation_checkpointing": how, "unit": {"classes": ["MultiheadAttention"]}}
    check(lambda: Attends(by_name=by_name), square_work, stage=stage, tolerance=1e-6, optimizer=sgd, **settings)


class Doubles(TorchFunctionMode):
    """A mode under which ``torch.tanh`` is another function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result.sigmoid() if func is torch.tanh else result


class Tanhs(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self.Block(), self.Block())

    def forward(self, x: Tensor) -> Tensor:
        with Doubles():
            return self.blocks(x)


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("how", ["blocks", "offload"])
def test_a_block_is_computed_again_under_the_function_modes_of_its_forward(stage: int, how: str) -> None:
    """Autograd runs a backward without them: values would be others, or gradients wrong without a word."""
    check(Tanhs, square_work, stage=stage, activation_checkpointing=how, unit={"classes": ["Block"]})


class Moves(nn.Module):
    """Statistics of a norm, a count, and an average that is replaced by each forward in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(19, 19), nn.BatchNorm1d(19)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(19))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.inner(x))
        if self.training:
            self.calls += 1
            self.average = 0.5 * self.average + 0.5 * x.detach().mean(0)
        return x


@pytest.mark.parametrize("how", ["none", "blocks", "offload"])
def test_a_forward_that_is_computed_again_does_not_change_buffers_again(how: str) -> None:
    torch.manual_seed(0)
    module, plain = nn.Sequential(Moves(), Moves()), nn.Sequential(Moves(), Moves())
    plain.load_state_dict(module.state_dict())
    engine = lightning_zero.shard(module, stage=0, activation_checkpointing=how, device="cpu")
    x = torch.randn(6, 19, requires_grad=True)
    for training in (True, True, False, True):
        for side in (module, plain):
            side.train(training)
            (side(x) * side(2 * x)).mean().backward()
    for (name, buffer), (_, other) in zip(module.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    engine.release()


# -- nested units, user hooks -----------------------------------------------------------------------------------------


@on_ranks(2, 3)
@STAGES
@pytest.mark.parametrize("prefetch_bytes", [0, 10**6])
def test_nested_units(stage: int, prefetch_bytes: int) -> None:
    unit = {"classes": ["Block", "Linear", "Embedding"]}
    check(Model, language_work, stage=stage, unit=unit, prefetch_bytes=prefetch_bytes)


@on_ranks(2)
@OUTER_STAGES
def test_the_root_as_the_only_unit(stage: int) -> None:
    check(Model, language_work, stage=stage, unit={"classes": ["Model"]})


@on_ranks(2)
def test_user_hooks_see_gathered_parameters() -> None:
    module = Model()
    seen: list[bool] = []

    def look(block: nn.Module, *_: Any) -> None:
        seen.append(bool(torch.stack([p.isfinite().all() for p in block.parameters()]).all()))

    for block in module.blocks:
        block.register_forward_pre_hook(look)
    with Sharded(module) as side:
        for block in module.blocks:
            block.register_full_backward_hook(look)
        for step in range(2):
            language_work(side, step)
    assert len(seen) == 12 and all(seen)


# -- exceptions -------------------------------------------------------------------------------------------------------


class Fragile(Chain):
    """Raises in the forward or the backward of its middle block on demand."""

    fail: str = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i == 1 and self.fail == "forward":
                raise ZeroDivisionError("in forward")
            x = block(x)
            if i == 1 and self.fail == "backward":
                x.register_hook(self._raise)
        return x

    @staticmethod
    def _raise(_: Tensor) -> None:
        raise ZeroDivisionError("in backward")


def _raise_in_a_block(*_: Any) -> None:
    raise ZeroDivisionError("in a block")


@on_ranks(2, full=(3,))
@STAGES
@PLAIN
@pytest.mark.parametrize("where", ["forward", "backward", "block"])
def test_an_exception_is_followed_by_a_clean_step(stage: int, plain: bool, where: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        if step in (0, 2):
            side.module.fail = where
            handle = None
            if where == "block":
                handle = side.module.blocks[1].up.register_forward_pre_hook(_raise_in_a_block)
            with pytest.raises(ZeroDivisionError):
                square_work(side, step)
            if handle is not None:
                handle.remove()
            side.module.fail = ""
            side.zero_grad()
        return square_work(side, step)

    check(Fragile, work, steps=4, stage=stage, plain=plain)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_that_failed_unnoticed_takes_no_gradients_of_the_next_one(stage: int) -> None:
    """The next forward is that of a module which is no unit, so it is the next backward that finds out."""

    def work(side: Side, step: int) -> Tensor:
        side.module.fail = "backward"
        with pytest.raises(ZeroDivisionError):
            square_work(side, step)
        side.module.fail = ""
        for param in side.module.parameters():
            param.grad = None
        side.zero_grad()
        loss = side.module.first(floats(step, 4, WIDTH)).square().mean()
        side.backward(loss)
        return loss

    check(Fragile, work, stage=stage, plain=True)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_that_is_told_of_takes_no_gradients_of_one_that_failed_unnoticed(stage: int) -> None:
    """Its graph was made before: no forward comes in between."""
    torch.manual_seed(3)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    twin = Twin(module, each=stage >= 2)
    # One rank may have issued the second half of a sum, and the other not.
    soon = mock.patch("lightning_zero.engine.passes.passes.ABANDON_S", 0.5)
    with soon, Sharded(module, stage=stage, unit={"classes": ["Linear"]}) as sharded:
        for side in (twin, sharded):
            with side.engine.step_scope() if side is sharded else contextlib.nullcontext():
                first = side.module[0](floats(0, 4, WIDTH))
                failing = side.module[2](side.module[1](first)).square().mean()
                other = side.module(floats(1, 4, WIDTH)).square().mean()
                handle = first.register_hook(lambda _: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    failing.backward()
                handle.remove()
                for param in side.module.parameters():
                    param.grad = None
                side.zero_grad()
                side.backward(other)
            side.step()
        assert_same(sharded, twin)


@on_ranks(2)
def test_an_exception_leaves_nothing_gathered() -> None:
    with Sharded(Fragile()) as side:
        for where in ("forward", "backward"):
            side.module.fail = where
            with pytest.raises(ZeroDivisionError):
                square_work(side, 0)
            assert all(unit.state is State.SHARDED for unit in side.engine.units)
            assert not any(b.full.allocated for b in side.engine.buckets)
            side.zero_grad()


# -- several models ---------------------------------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("stages", [(3, 3), (0, 3), (2, 1)], ids=str)
def test_two_models_in_one_process(stages: tuple[int, int]) -> None:
    """As in adversarial training: each is stepped by itself, and one's loss goes through the other."""
    torch.manual_seed(3)
    modules = [Chain(), Chain()]
    twins = [Twin(m, each=s >= 2) for m, s in zip(modules, stages, strict=True)]
    sharded = [Sharded(m, stage=s, plain=True) for m, s in zip(modules, stages, strict=True)]
    for step in range(3):
        for first, second in (sharded, twins):
            made = first.module(floats(step, 4, WIDTH))
            second.backward(second.module(made.detach()).square().mean())
            second.step()
            second.zero_grad()
            loss = second.module(made).mean()
            if isinstance(first, Twin):
                _backward_through(loss, first, second)
            else:
                loss.backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
        for side, twin in zip(sharded, twins, strict=True):
            assert_same(side, twin)
    for side in sharded:
        side.engine.release()


def _backward_through(loss: Tensor, first: Twin, second: Twin) -> None:
    for param in second.masters:
        param.grad = None
    first.backward(loss)


@on_ranks(2)
@pytest.mark.parametrize("stages", [(3, 3), (3, 1)], ids=str)
def test_an_operation_on_parameters_of_two_models(stages: tuple[int, int]) -> None:
    """As a penalty for the distance between them; the gradients and the refusal are those of each."""
    torch.manual_seed(3)
    modules = [Chain(), Chain()]
    unit = {"classes": ["Block"]}
    sides = [Sharded(m, stage=s, plain=True, unit=unit) for m, s in zip(modules, stages, strict=True)]
    first, second = (m.blocks[1].up.weight for m in modules)
    with lightning_zero.gather(modules[0]), lightning_zero.gather(modules[1]):
        gap = (first - second).detach()
    for _ in range(2):
        with sides[0].engine.step_scope(), sides[1].engine.step_scope():
            distance = (first - second).square().sum()
        distance.backward()
        assert torch.equal(distance, gap.square().sum())
        for module, sign in zip(modules, (2, -2), strict=True):
            with lightning_zero.gather(module, grads=True):
                assert torch.equal(module.blocks[1].up.weight.grad, sign * gap)
        for side in sides:
            side.zero_grad()
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight is sharded.*gather"):
            torch._foreach_add_([first], [second])
    for side in sides:
        side.engine.release()


@on_ranks(2)
def test_a_module_cannot_be_sharded_twice_at_once_but_again_after_its_release() -> None:
    module = Model()
    with Sharded(module), pytest.raises(ValueError, match="sharded already"):
        lightning_zero.shard(module, device="cpu")
    assert engine_of(module) is None
    with Sharded(module, stage=2) as side:
        language_work(side, 0)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
def test_release_gives_the_plain_module_back(stage: int, precision: str) -> None:
    module = Model()
    before = dict(module.named_parameters())
    twin = Twin(module, precision=precision)
    with Sharded(module, stage=stage, precision=precision) as side, autocast(precision):
        for one in (side, twin):
            language_work(one, 0)
            one.step()
    for (name, param), master in zip(module.named_parameters(), twin.masters.values(), strict=True):
        assert param is before[name]
        assert torch.equal(param, master.value) and param.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    assert "_apply" not in module.__dict__
    module.state_dict()
    dtype = next(module.parameters()).dtype
    module.to(torch.float64).to(dtype)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    language_loss(module, tokens(0)).backward()
    assert dist.is_initialized()


@on_ranks(2)
@OUTER_STAGES
def test_accumulating_without_steps_then_stepping(stage: int) -> None:
    """More micro-batches than ever before in one step, then fewer."""

    def work(side: Side, step: int) -> Tensor:
        return accumulate(side, step, micro_batches=(1, 4, 2, 4)[step])

    check(Model, work, steps=4, stage=stage, plain=True)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_wait_are_reduced_when_their_parameters_are_frozen_before_the_last_backward(stage: int) -> None:
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=False)
    with Sharded(module, stage=stage) as side:
        for both in (twin, side):
            with both.no_sync():
                both.backward(language_loss(both.module, tokens(0)))
            both.module.blocks[1].requires_grad_(False)
            both.backward(language_loss(both.module, tokens(1)))
            both.module.blocks[1].requires_grad_(True)
        assert_same(side, twin, grads=True)
