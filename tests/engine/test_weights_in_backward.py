"""Weights are there whenever a backward reads them, by whatever way it comes into a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine.units.unit import State
from tests.engine.support import Block, Model, Sharded, Side, Twin, assert_same, autocast, check, floats, sgd
from tests.harness import on_ranks

OUTER_STAGES = pytest.mark.parametrize("stage", [0, 3])
PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])
PREFETCH = pytest.mark.parametrize("prefetch_bytes", [0, 10**6])
WIDTH = 19


def scope(side: Side, key: str = "train") -> Any:
    return side.engine.step_scope(key) if isinstance(side, Sharded) else contextlib.nullcontext()


def image(step: int) -> Tensor:
    """An input of three dimensions: the output of a Linear is then a view."""
    return floats(step, 2, 3, WIDTH)


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def image_work(side: Side, step: int) -> Tensor:
    loss = side.module(image(step)).square().mean()
    side.backward(loss)
    return loss


# -- outputs that are changed in place --------------------------------------------------------------------------------


class AddsInPlace(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


@on_ranks(2)
@OUTER_STAGES
@PLAIN
@PREFETCH
def test_outputs_that_are_views_and_are_added_to(stage: int, plain: bool, prefetch_bytes: int) -> None:
    unit = {"classes": ["Linear"]}
    build = lambda: AddsInPlace(lambda: nn.Linear(WIDTH, WIDTH))  # noqa: E731
    check(build, image_work, stage=stage, plain=plain, unit=unit, prefetch_bytes=prefetch_bytes)


@on_ranks(2)
@OUTER_STAGES
def test_in_place_activations_that_are_units(stage: int) -> None:
    def build() -> nn.Module:
        layers = [m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.LayerNorm(WIDTH))]
        return nn.Sequential(*layers)

    unit = {"classes": ["Linear", "ReLU", "LayerNorm"]}
    check(build, image_work, stage=stage, unit=unit)


class WritesBeforeFrozen(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x[:, 0] = 1.0  # a view of the output of the first, whose history torch has not made yet
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
@OUTER_STAGES
def test_frozen_units_whose_inputs_are_views_that_were_changed(stage: int) -> None:
    """torch (2.13) crashes where a hook is put on such a tensor before it was asked for its history."""

    def build() -> nn.Module:
        module = WritesBeforeFrozen(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)))
        module.blocks.requires_grad_(False)
        return module

    check(build, image_work, stage=stage, unit={"classes": ["Sequential"]})


# -- other ways than outputs ------------------------------------------------------------------------------------------


class KeepsALoss(nn.Module):
    """As mixtures of experts do: a loss of its own is kept on the module. It is made last, so autograd starts there."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(self.norm(x)), -1)
        y = x + self.down(torch.tanh(self.up(x)) * weights)
        weights = torch.softmax(self.gate(self.norm(y)), -1)
        self.loss = (weights * weights.mean((0, 1))).sum()
        return y


def with_losses(side: Side, step: int) -> Tensor:
    with scope(side):
        out = side.module(image(step))
        loss = out.square().mean() + 0.1 * sum(block.loss for block in side.module.blocks)
    side.backward(loss)
    return loss


@on_ranks(2)
@OUTER_STAGES
@PLAIN
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("how", ["none", "blocks", "offload"])
@pytest.mark.mainly(lambda stage, plain, norm: stage == 3 or (plain and norm))
def test_losses_that_are_kept_on_modules(stage: int, plain: bool, norm: bool, how: str) -> None:
    build = lambda: Blocks(lambda: KeepsALoss(norm=norm))  # noqa: E731
    check(build, with_losses, stage=stage, plain=plain, activation_checkpointing=how)


class ChecksInside(nn.Module):
    """Checkpoints a part of itself, and keeps a loss that leads into that part alone."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def feed(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.feed, x, use_reentrant=self.reentrant)
        self.loss = y.square().mean()
        return x + y


@on_ranks(2)
@OUTER_STAGES
@PREFETCH
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("frozen", ["", "up", "down"])
@pytest.mark.mainly(lambda stage, frozen: stage == 3 or frozen == "up")
def test_checkpoints_inside_of_units(stage: int, reentrant: bool, frozen: str, prefetch_bytes: int) -> None:
    def build() -> nn.Module:
        module = Blocks(lambda: ChecksInside(reentrant))
        for block in module.blocks if frozen else ():
            block.get_submodule(frozen).requires_grad_(False)
        return module

    check(build, with_losses, stage=stage, optimizer=sgd, prefetch_bytes=prefetch_bytes)


class Adapter(nn.Module):
    """Frozen weights and a small trainable part; its output also goes into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up, self.down = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, found: list[Tensor]) -> None:
        y = self.last(torch.tanh(self.frozen(x) + self.down(self.up(x))))
        found.append(y)


class Collects(nn.Module):
    def __init__(self, *, frozen_first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapter() for _ in range(3))
        if frozen_first:
            self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [x]
        for block in self.blocks:
            block(found[-1], found)
        return found[1:]


@on_ranks(2)
@OUTER_STAGES
@PREFETCH
@PLAIN
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.mainly(lambda stage, plain: stage == 3 or plain)
def test_two_backwards_through_outputs_in_a_list(stage: int, prefetch_bytes: int, plain: bool, frozen: bool) -> None:
    torch.manual_seed(3)
    module = Collects(frozen_first=frozen)
    twin = Twin(module)
    with Sharded(module, stage=stage, plain=plain, prefetch_bytes=prefetch_bytes) as sharded:
        for step in range(3):
            for side in (sharded, twin):
                first, second, third = side.module(image(step).requires_grad_())
                side.backward(third.square().mean(), retain_graph=True)
                side.backward(second.square().mean() + first.mean())
            assert_same(sharded, twin, grads=True)
            for side in (sharded, twin):
                side.step()
                side.zero_grad()
        assert_same(sharded, twin)


@on_ranks(2)
def test_frozen_units_go_before_the_backward_is_over() -> None:
    """Their weights are needed up to the gradients of their inputs, and no longer."""
    module = Blocks(lambda: Block(WIDTH), depth=4)
    module.blocks.requires_grad_(False)
    most: list[int] = []
    with Sharded(module, prefetch_bytes=0) as side:
        units = side.engine.units[1:]
        first = module.first.weight
        for step in range(3):
            loss = module(image(step)).square().mean()
            first.register_hook(lambda _: most.append(sum(u.state is not State.SHARDED for u in units)))
            side.backward(loss)
            side.step()
    assert max(most) <= 1


# -- passes -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
@PLAIN
def test_a_block_whose_forward_led_nowhere_does_not_end_a_later_pass(plain: bool) -> None:
    """It opened the pass; the evaluation afterwards goes through it in the middle."""

    def work(side: Side, step: int) -> Tensor:
        module = side.module
        unused = module.blocks[1](image(step))
        assert unused.isfinite().all()
        with torch.no_grad():
            seen = module(image(step)).clone()
        loss = module(image(step)).square().mean()
        side.backward(loss)
        return seen

    check(lambda: Blocks(lambda: Block(WIDTH)), work, plain=plain)


@on_ranks(2)
def test_an_evaluation_of_one_block_ends_with_it() -> None:
    with Sharded(Blocks(lambda: Block(WIDTH))) as side:
        for _ in range(2):
            with torch.no_grad():
                side.module.blocks[1](image(0))
            assert side.engine.passes.key is None
            assert all(unit.state is State.SHARDED for unit in side.engine.units)


@on_ranks(2)
@OUTER_STAGES
@PLAIN
@pytest.mark.parametrize("before", [False, True])
def test_a_penalty_on_weights_outside_of_the_forward(stage: int, plain: bool, before: bool) -> None:
    def penalty(side: Side) -> Tensor:
        return sum(p.square().sum() for p in side.module.parameters())  # type: ignore[return-value]

    def work(side: Side, step: int) -> Tensor:
        with scope(side):
            first = penalty(side) if before else 0
            loss = side.module(image(step)).square().mean()
            loss = loss + 0.01 * (first if before else penalty(side))
        side.backward(loss)
        return loss

    check(lambda: Blocks(lambda: Block(WIDTH)), work, stage=stage, plain=plain, steps=4)


@on_ranks(2)
@PLAIN
@pytest.mark.parametrize("where", ["root", "first", "last"])
@pytest.mark.parametrize("keep", [0, 10**6])
def test_a_second_backward_through_a_weight_that_was_read_outside_is_done_or_refused(
    plain: bool, where: str, keep: int
) -> None:
    """Never done with what stands for its values, whether its unit happened to be gathered when it was read or not."""
    torch.manual_seed(3)
    module = Blocks(lambda: Block(WIDTH))
    twin = Twin(module)
    with Sharded(module, plain=plain, keep_gathered_bytes=keep) as sharded:
        for step in range(4):
            for side in (twin, sharded):
                own = {"root": side.module.last, "first": side.module.blocks[0], "last": side.module.blocks[-1]}[where]
                weight = next(p for p in own.parameters() if p.ndim == 2)
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
                side.step()
                side.zero_grad()
            assert_same(sharded, twin)


@on_ranks(2)
@OUTER_STAGES
def test_parts_of_a_unit_that_are_called_for_themselves(stage: int) -> None:
    def work(side: Side, step: int) -> Tensor:
        with scope(side):
            x = side.module(image(step))
            x = x + side.module.blocks[0].down(torch.tanh(side.module.blocks[2].up(x)))
            x = x @ side.module.blocks[1].down.weight @ side.module.blocks[1].down.weight.T
            loss = x.square().mean()
        side.backward(loss)
        return loss

    check(lambda: Blocks(lambda: Block(WIDTH)), work, stage=stage, steps=4)


@on_ranks(2)
def test_a_read_inside_a_pass_does_not_leave_its_unit_gathered() -> None:
    with Sharded(Blocks(lambda: Block(WIDTH)), prefetch_bytes=0) as side:
        units = side.engine.units[1:]
        for step in range(3):
            with scope(side):
                with torch.no_grad():
                    norms = [block.up.weight.norm() for block in side.module.blocks]
                assert all(norm.isfinite() for norm in norms)
                assert all(unit.state is State.SHARDED for unit in units)
                view = side.module.blocks[1].up.weight.view(-1)
                side.module(image(step))
                assert [unit.state is State.SHARDED for unit in units] == [True, False, True]  # the view may be read
                assert view.isfinite().all()
                loss = side.module(image(step)).square().mean()
            side.backward(loss)
            assert all(unit.state is State.SHARDED for unit in units)


# -- what torch checks ------------------------------------------------------------------------------------------------


class ChangesWhatItSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.linear(x))
        return y.add_(1)


@on_ranks(2)
@OUTER_STAGES
@PLAIN
def test_saved_tensors_that_are_changed_in_place_are_refused_as_by_torch(stage: int, plain: bool) -> None:
    with Sharded(Blocks(ChangesWhatItSaved), stage=stage, plain=plain) as side:
        loss = side.module(image(0)).square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            side.backward(loss)


@on_ranks(2)
@OUTER_STAGES
def test_hooks_of_the_user_around_the_model_still_count(stage: int) -> None:
    """Other saved tensors than weights go through them, inside units too."""
    moved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        moved.append(tensor.numel())
        return tensor.clone()

    def work(side: Side, step: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = side.module(image(step)).square().mean()
        side.backward(loss)
        return loss

    check(lambda: Blocks(lambda: Block(WIDTH)), work, stage=stage)
    assert moved.count(2 * 3 * WIDTH) > 6


FUNCTIONS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
}


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_torch_func_works_around_units(stage: int, name: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        x = image(step)
        with scope(side):
            found = FUNCTIONS[name](lambda x: side.module.blocks[1](side.module.blocks[0](x)), x)
            loss = side.module(x + 0.1 * found).square().mean()
        side.backward(loss)
        return loss

    check(lambda: Blocks(lambda: Block(WIDTH)), work, stage=stage)


# -- lower precision --------------------------------------------------------------------------------------------------


class UsesItsInputOften(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.sigmoid(self.b(x)) + self.c(x)


class UsesInputsOften(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x) * torch.tanh(x)
        return x


@on_ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "bf16_true"])
def test_inputs_that_are_used_often_have_the_same_gradients_at_every_stage(precision: str) -> None:
    """Autograd adds gradients of one tensor in an order, and in bf16 another order rounds otherwise."""
    found = []
    for stage in (0, 2, 3):
        torch.manual_seed(3)
        module = UsesInputsOften(UsesItsInputOften)
        with Sharded(module, stage=stage, precision=precision) as side, autocast(precision):
            x = image(0).to(torch.bfloat16) if precision == "bf16_true" else image(0)
            side.backward(module(x).float().square().mean())
            with lightning_zero.gather(module, grads=True):
                found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    for other in found[1:]:
        assert len(other) == len(found[0]) > 0
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@on_ranks(2)
def test_a_graph_that_is_looked_at_shows_no_values_that_are_gone() -> None:
    with Sharded(Model(), prefetch_bytes=0) as side:
        from tests.engine.support import tokens

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
