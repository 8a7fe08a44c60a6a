"""What goes into units and comes out of them, by whatever way: weights are there when a backward reads them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine.torch_modes import default_dtype
from lightning_zero.engine.units.unit import State
from tests.engine.sides import Sharded, Side, beside_twin, sgd, step_and_clear
from tests.engine.support import ALL_STAGES, IN_STAGES, OUTER_STAGES, PLAIN, STAGES, assert_equal, assert_same, check
from tests.engine.works import floats, mean_square, mean_square_of, scope, tokens
from tests.harness import on_ranks
from tests.models import WIDTH, Block, Chain, Does, Doubles, Model, linear

pytestmark = pytest.mark.sample  # a case shows all stages

BOTH = (False, True)
PREFETCH = pytest.mark.parametrize("prefetch_bytes", [0, 10**6])
AGAIN = pytest.mark.parametrize("how", ["blocks", "offload"])  # what is computed again
image_work = functools.partial(mean_square, shape=(2, 3, WIDTH))  # of ``image``


def image(step: int) -> Tensor:
    """An input of three dimensions: the output of a Linear is then a view."""
    return floats(step, 2, 3, WIDTH)


# -- containers, keywords, several times ------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["value", "other"])

WRAP: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (dataclasses.make_dataclass("Result", ["value"]), lambda r: r.value),
    "frozen dataclass": (dataclasses.make_dataclass("Frozen", ["value"], frozen=True), lambda r: r.value),
    "named tuple": (lambda t: Pair(t, None), lambda r: r.value),
    "nested": (lambda t: {"a": [(t, 1), "text"]}, lambda r: r["a"][0][0]),
    "ordered dict": (lambda t: OrderedDict(value=t), lambda r: r["value"]),
    "unknown": (lambda t: SimpleNamespace(value=t), lambda r: r.value),  # nobody can look into it
}


def wrapping(kind: str) -> nn.Module:
    """Blocks that take and give their tensor inside a container."""
    wrap, unwrap = WRAP[kind]
    make = lambda: Does(lambda m, wrapped: wrap(m.block(unwrap(wrapped))), block=Block())  # noqa: E731
    return Chain(make, call=lambda block, x: unwrap(block(wrap(x))))


@on_ranks(2)
@pytest.mark.parametrize("kind", list(WRAP))
def test_inputs_and_outputs_in_containers_train_and_units_are_dropped(kind: str) -> None:
    check(lambda: wrapping(kind), mean_square, stage=OUTER_STAGES)
    module = wrapping(kind)
    with Sharded(module, prefetch_bytes=0) as side:
        for _ in range(2):
            module(floats(0, 4, WIDTH))
            assert not any(b.full.allocated for unit in side.engine.units[1:] for b in unit.buckets)


@on_ranks(2)
@IN_STAGES
def test_inputs_need_gradients_or_not_or_are_ignored(stages: tuple[int, ...]) -> None:
    def act(m: Any, x: Tensor, *, gate: Tensor, shift: float = 0.0) -> Tensor:
        return m.a(x) * torch.sigmoid(m.b(gate)) + shift

    def work(side: Side, step: int) -> Tensor:
        x = floats(step, 4, WIDTH).requires_grad_(step % 2 == 1)
        loss = mean_square_of(side, x)
        return loss if x.grad is None else x.grad

    def gates(m: Any, x: Tensor) -> Tensor:
        y = x
        for gate in m.gates:
            y = gate(y, gate=x, shift=0.5) + gate(x, gate=y)
        return y

    build = lambda: Does(gates, gates=nn.ModuleList(Does(act, a=linear(), b=linear()) for _ in range(3)))  # noqa: E731
    check(build, work, stage=stages, steps=4, optimizer=sgd)

    def feeds(m: Any, x: Tensor) -> Tensor:
        other = m.beside(x)
        return m.blocks[1](m.first(m.blocks[0](m.first(x), other)), other)

    def ignoring() -> nn.Module:
        """The gradient of what is fed is none, and not zeros."""
        ignores = [Does(lambda m, x, other: m.block(x), block=Block()) for _ in range(2)]
        return Does(feeds, first=linear(), beside=linear(), blocks=nn.ModuleList(ignores))

    check(ignoring, mean_square)


@on_ranks(2)
@pytest.mark.parametrize("max_bytes", [1500, 6000])
def test_attention_that_reads_its_children_s_weights_trains(max_bytes: int) -> None:
    """``nn.MultiheadAttention`` uses ``out_proj.weight`` without a call; in eval mode, a layer all of its weights."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 33, 0.0, batch_first=True) for _ in range(2)))

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded):
            assert len(side.engine.units) > 3
        mean_square_of(side, floats(step, 2, 5, 16))
        side.module.eval()
        with torch.no_grad():
            seen = side.module(floats(step, 2, 5, 16))
        side.module.train()
        return seen

    check(build, work, unit={"max_bytes": max_bytes}, tolerance=1e-5)


# -- changes in place -------------------------------------------------------------------------------------------------


def adding() -> nn.Module:
    adds = lambda: Does(lambda m, x: x.add_(m.linear(x.clone())), linear=linear())  # noqa: E731
    return nn.Sequential(linear(), adds(), adds())


@on_ranks(2)
def test_inputs_and_outputs_of_units_are_changed_in_place() -> None:
    relu = lambda: Does(lambda m, x: m.linear(m.act_(x)), act_=nn.ReLU(inplace=True), linear=linear())  # noqa: E731
    check(lambda: nn.Sequential(linear(), relu(), relu()), mean_square, stage=OUTER_STAGES)
    check(adding, mean_square, stage=OUTER_STAGES)
    layers = lambda: [m for _ in range(3) for m in (linear(), nn.ReLU(inplace=True), nn.LayerNorm(WIDTH))]  # noqa: E731
    classes = ["Linear", "ReLU", "LayerNorm"]
    check(lambda: nn.Sequential(*layers()), image_work, stage=OUTER_STAGES, unit={"classes": classes})


@on_ranks(2)
@PREFETCH
def test_outputs_that_are_views_are_changed_in_place(prefetch_bytes: int) -> None:
    """torch (2.13) crashes where a hook is put on such a tensor before it was asked for its history."""

    def adds(block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        y += x
        return y

    settings = {"stage": OUTER_STAGES, "prefetch_bytes": prefetch_bytes}
    check(lambda: Chain(linear, call=adds), image_work, plain=BOTH, unit={"classes": ["Linear"]}, **settings)

    def writes(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        x[:, 0] = 1.0  # a view of the output of the first, whose history torch has not made yet
        return m.frozen(x)

    def before_frozen() -> nn.Module:
        frozen = nn.Sequential(*(nn.Sequential(linear()) for _ in range(3))).requires_grad_(False)
        return Does(writes, first=linear(), frozen=frozen)

    check(before_frozen, image_work, unit={"classes": ["Sequential"]}, **settings)


@on_ranks(2)
@STAGES
@AGAIN
def test_inputs_that_change_cannot_be_computed_from_again(stage: int, how: str) -> None:
    """torch would compute wrong gradients without a word."""
    settings = {"stage": stage, "activation_checkpointing": how}
    says = r"unit 1 .*changed in place by it.*zero\.activation_checkpointing=none"
    with Sharded(adding(), **settings) as side, pytest.raises(RuntimeError, match=says):
        side.module(floats(0, 4, WIDTH))

    def changed_by_the_caller(block: nn.Module, x: Tensor) -> Tensor:
        out = block(x)
        x.mul_(2)
        return out

    with Sharded(Chain(call=changed_by_the_caller), **settings) as side:
        out = side.module(floats(0, 4, WIDTH))
        with pytest.raises(RuntimeError, match=r"changed in place after it|modified by an inplace operation"):
            side.backward(out.sum())


@on_ranks(2)
@pytest.mark.parametrize("stage", OUTER_STAGES)
@PLAIN
def test_saved_tensors_that_are_changed_in_place_are_refused_as_by_torch(stage: int, plain: bool) -> None:
    changes = lambda: Does(lambda m, x: torch.exp(m.linear(x)).add_(1), linear=linear())  # noqa: E731
    with Sharded(Chain(changes), stage=stage, plain=plain) as side:
        loss = side.module(image(0)).square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            side.backward(loss)


# -- units that are computed again ------------------------------------------------------------------------------------


@on_ranks(2)
@AGAIN
def test_a_block_is_computed_again_as_in_its_forward(how: str) -> None:
    settings = {"stage": ALL_STAGES, "activation_checkpointing": how}

    def appends(m: Any, found: list[Tensor], more: dict[str, list[Tensor]]) -> None:
        found.append(torch.tanh(m.linear(found[-1])) + sum(more["all"], torch.zeros(())))
        more["all"].append(found[-1].square())

    def lists(m: Any, x: Tensor) -> Tensor:
        found, more = [x], {"all": list[Tensor]()}
        for block in m.blocks:
            block(found, more=more)
        assert len(found) == 4
        return found[-1]

    appending = lambda: Does(lists, blocks=nn.ModuleList(Does(appends, linear=linear()) for _ in range(3)))  # noqa: E731
    check(appending, mean_square, **settings)

    def under_modes(m: Any, x: Tensor) -> Tensor:
        """Autograd runs a backward without them."""
        random.seed(3)
        with Doubles(), default_dtype(torch.float64):
            return m.blocks(x)

    def half(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(m.linear(x) * random.random() * (torch.finfo(torch.get_default_dtype()).bits / 64))

    moded = lambda: Does(under_modes, blocks=nn.Sequential(*(Does(half, linear=linear()) for _ in range(2))))  # noqa: E731
    check(moded, mean_square, **settings)


@on_ranks(2)
@AGAIN
def test_an_input_that_is_given_several_times_is_one_tensor_again(how: str) -> None:
    """Attention computes otherwise where its inputs are one tensor; torch's checkpoint alone gives back one for each
    argument."""

    def act(m: Any, x: Tensor) -> Tensor:
        x = m.linear(x).unflatten(0, (2, 2))
        x = m.attention(x, x, x, need_weights=False)[0]
        return m.by_name(x, key=x, value=x, need_weights=False)[0]

    def build() -> nn.Module:
        parts = {name: nn.MultiheadAttention(16, 2, batch_first=True) for name in ("attention", "by_name")}
        return Does(act, linear=linear(WIDTH, 16), **parts)

    settings = {"activation_checkpointing": how, "unit": {"classes": ["MultiheadAttention"]}}
    check(build, mean_square, stage=OUTER_STAGES, tolerance=1e-6, optimizer=sgd, **settings)


@on_ranks(1)
@pytest.mark.parametrize("how", ["none", "blocks", "offload"])
def test_a_forward_that_is_computed_again_reads_the_same_buffers_and_changes_none_again(how: str) -> None:
    """Statistics of a norm, a count, and an average that is replaced by each forward in training. The forward reads
    both."""

    def act(m: Any, x: Tensor) -> Tensor:
        x = x + m.norm(m.inner(x)) * (m.calls + m.average.exp())
        if m.training:
            m.calls += 1
            m.average = 0.5 * m.average + 0.5 * x.detach().mean(0)
        return x

    def moves() -> nn.Module:
        module = Does(act, inner=linear(), norm=nn.BatchNorm1d(WIDTH))
        module.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        module.register_buffer("average", torch.zeros(WIDTH))
        return module

    torch.manual_seed(0)
    module = nn.Sequential(moves(), moves())
    plain = copy.deepcopy(module)
    engine = lightning_zero.shard(module, stage=0, activation_checkpointing=how, device="cpu")
    x = torch.randn(6, WIDTH, requires_grad=True)
    for training in (False, True, True, False, True):
        for side in (module, plain):
            side.train(training)
            (side(x) * side(2 * x)).mean().backward()
    assert_equal(dict(module.named_buffers()), dict(plain.named_buffers()))
    with lightning_zero.gather(module, grads=True):
        pairs = zip(module.parameters(), plain.parameters(), strict=True)
        assert all(torch.allclose(own.grad, other.grad, rtol=1e-4) for own, other in pairs)
    engine.release()


# -- other ways out of a unit than its outputs ------------------------------------------------------------------------


def keeps_a_loss(kind: str) -> nn.Module:
    """As mixtures of experts do: a loss of its own is kept on the module. It is made last, so autograd starts there."""

    def gates(m: Any, x: Tensor) -> Tensor:
        weights = torch.softmax(m.gate(m.norm(x)), -1)
        y = x + m.down(torch.tanh(m.up(x)) * weights)
        weights = torch.softmax(m.gate(m.norm(y)), -1)
        m.loss = (weights * weights.mean((0, 1))).sum()
        return y

    def of_output(m: Any, x: Tensor) -> Tensor:
        out = m.block(x)
        m.loss = (m.linear(out) if kind == "linear of the output" else out * m.scale).square().mean()
        return out

    if "output" in kind:
        return Does(of_output, block=Block(), scale=nn.Parameter(torch.ones(1, WIDTH)), linear=linear())
    norm = nn.LayerNorm(WIDTH) if kind == "gate and norm" else nn.Identity()
    return Does(gates, gate=linear(), up=linear(), down=linear(), norm=norm)


def with_losses(side: Side, step: int) -> Tensor:
    with scope(side):
        out = side.module(image(step))
        loss = out.square().mean() + 0.1 * sum(block.loss for block in side.module.blocks)
    side.backward(loss)
    return loss


@on_ranks(2)
@pytest.mark.parametrize("kind", ["gate", "gate and norm", "scale of the output", "linear of the output"])
@pytest.mark.parametrize("how", ["none", "blocks", "offload"])
def test_losses_that_are_kept_on_modules_train(kind: str, how: str) -> None:
    build = lambda: Chain(lambda: keeps_a_loss(kind))  # noqa: E731
    check(build, with_losses, stage=OUTER_STAGES, plain=BOTH, activation_checkpointing=how)


@on_ranks(2)
@PREFETCH
@pytest.mark.parametrize("reentrant", BOTH, ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("frozen", ["", "up", "down"])
def test_checkpoints_inside_of_units_train(reentrant: bool, frozen: str, prefetch_bytes: int) -> None:
    """A block checkpoints a part of itself, and keeps a loss that leads into that part alone."""

    def act(m: Any, x: Tensor) -> Tensor:
        y = checkpoint(lambda z: m.down(torch.tanh(m.up(z))), x, use_reentrant=reentrant)
        m.loss = y.square().mean()
        return x + y

    def make() -> nn.Module:
        module = Does(act, up=linear(WIDTH, 2 * WIDTH), down=linear(2 * WIDTH, WIDTH))
        if frozen:
            module.get_submodule(frozen).requires_grad_(False)
        return module

    check(lambda: Chain(make), with_losses, stage=OUTER_STAGES, optimizer=sgd, prefetch_bytes=prefetch_bytes)


@on_ranks(2)
def test_frozen_units_go_before_the_backward_is_over() -> None:
    """Their weights are needed up to the gradients of their inputs, and no longer."""
    module = Chain(depth=4)
    module.blocks.requires_grad_(False)
    most: list[int] = []
    with Sharded(module, prefetch_bytes=0) as side:
        units = side.engine.units[1:]
        for step in range(3):
            loss = module(image(step)).square().mean()
            module.first.weight.register_hook(lambda _: most.append(sum(u.state is not State.SHARDED for u in units)))
            side.backward(loss)
            side.step()
    assert max(most) <= 1


# -- weights that are read outside of their module's call -------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("before", [False, True])
def test_a_penalty_on_weights_outside_of_the_forward_trains(before: bool) -> None:
    def work(side: Side, step: int) -> Tensor:
        def penalty() -> Tensor:
            return 0.01 * torch.stack([p.square().sum() for p in side.module.parameters()]).sum()

        with scope(side):
            first = penalty() if before else 0
            loss = side.module(image(step)).square().mean() + (first if before else penalty())
        side.backward(loss)
        return loss

    check(Chain, work, stage=OUTER_STAGES, plain=BOTH, steps=3)


@on_ranks(2)
@PLAIN
@pytest.mark.parametrize("where", ["first", "blocks.0", "blocks.2"])
@pytest.mark.parametrize("keep", [0, 10**6])
def test_a_second_backward_through_a_weight_that_was_read_outside_is_done_or_refused(
    plain: bool, where: str, keep: int
) -> None:
    """Never done with what stands for its values, whether its unit happened to be gathered when it was read or not."""
    torch.manual_seed(3)
    sharded, twin = beside_twin(Chain(), plain=plain, keep_gathered_bytes=keep)
    with sharded:
        for step in range(4):
            for side in (twin, sharded):
                weight = next(p for p in side.module.get_submodule(where).parameters() if p.ndim == 2)
                with scope(side):
                    loss = side.module(image(step)).square().mean()
                    penalty = weight.pow(3).sum()
                side.backward(loss)
                try:
                    side.backward(penalty)
                except RuntimeError as error:
                    assert side is sharded and "modified by an inplace operation" in str(error)
                    assert plain or "read outside of its module's call" in error.__notes__[0]
                    return
                step_and_clear(side)
            assert_same(sharded, twin)


@on_ranks(2)
def test_hooks_of_users_see_gathered_parameters() -> None:
    module = Model()
    seen: list[bool] = []

    def look(block: nn.Module, *_: Any) -> None:
        seen.append(all(p.isfinite().all() for p in block.parameters()))

    for block in module.blocks:
        block.register_forward_pre_hook(look)
    with Sharded(module) as side:
        for block in module.blocks:
            block.register_full_backward_hook(look)
        for step in range(2):
            mean_square_of(side, tokens(step))
    assert seen == [True] * 12


@on_ranks(2)
def test_hooks_of_users_on_saved_tensors_still_count() -> None:
    """Other saved tensors than weights go through them, inside units too."""
    moved: list[int] = []  # sizes, on the side of the engine

    def work(side: Side, step: int) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            moved.extend([tensor.numel()] * isinstance(side, Sharded))
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return image_work(side, step)

    for stage in OUTER_STAGES:
        moved.clear()
        check(Chain, work, stage=stage)
        assert moved.count(2 * 3 * WIDTH) > 4


FUNCTIONS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
}


@on_ranks(2)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_torch_func_works_around_units(name: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        x = image(step)
        with scope(side):
            found = FUNCTIONS[name](lambda x: side.module.blocks[1](side.module.blocks[0](x)), x)
            loss = side.module(x + 0.1 * found).square().mean()
        side.backward(loss)
        return loss

    check(Chain, work, stage=OUTER_STAGES)


@on_ranks(2)
def test_other_tensors_in_the_place_of_parameters_are_refused_where_units_are_computed_again() -> None:
    with Sharded(Chain(), activation_checkpointing="blocks") as side, scope(side):
        own = dict(side.module.named_parameters())
        torch.func.functional_call(side.module, own, image(0))
        with pytest.raises(RuntimeError, match="its own parameters.*torch.func.functional_call"):
            torch.func.functional_call(side.module, {name: 2 * param for name, param in own.items()}, image(0))


@on_ranks(2)
def test_a_graph_that_is_looked_at_shows_no_values_that_are_gone() -> None:
    with Sharded(Model(), prefetch_bytes=0) as side:
        out = side.module(tokens(0))
        stack, seen = [out.grad_fn], []
        while stack:
            node = stack.pop()
            for name in dir(node):
                if name.startswith("_saved_"):
                    with contextlib.suppress(RuntimeError):
                        value = getattr(node, name)
                        seen += [value.sum()] if isinstance(value, Tensor) else []
            stack += [n for n, _ in node.next_functions if n is not None] if node is not None else []
        assert len(seen) > 10
