"""Forwards, backwards and evaluations of every kind train as they do in a plain replicated copy."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lightning_zero
from lightning_zero.engine.units.unit import State, Unit
from tests.engine.sides import Sharded, Side, sgd, step_and_clear, with_twin
from tests.engine.support import IN_STAGES, OUTER_STAGES, PRECISIONS, STAGES, assert_same, check
from tests.engine.works import accumulate, floats, language_loss, language_work, mean_square, scope, tokens, train
from tests.harness import on_ranks
from tests.models import WIDTH, Adapted, Block, Chain, Does, Model, checkpointed, linear

pytestmark = pytest.mark.sample  # a case shows all stages

BOTH = (False, True)
REENTRANT = pytest.mark.parametrize("reentrant", BOTH, ids=["nonreentrant", "reentrant"])

image_work = functools.partial(mean_square, shape=(2, 3, WIDTH))  # the output of a Linear is then a view

# -- modules used more than once, and parts for themselves ------------------------------------------------------------


@on_ranks(2)
def test_blocks_and_parts_of_units_are_called_for_themselves() -> None:
    """Beside the whole; and without the root's forward, as Lightning's ``training_step`` may."""

    def beside(module: Any, step: int) -> Tensor:
        whole = module(floats(step, 4, WIDTH)).square().mean()
        return whole + module.blocks[1](floats(step + 100, 4, WIDTH)).mean()

    def without_root(module: Any, step: int) -> Tensor:
        x = floats(step, 4, WIDTH) @ module.first.weight
        for block in module.blocks:
            x = block(x)
        return x.square().mean()

    def parts(module: Any, step: int) -> Tensor:
        blocks = module.blocks
        x = module(floats(step, 2, 3, WIDTH))
        x = x + blocks[0].down(torch.tanh(blocks[2].up(x)))
        x = x @ blocks[1].down.weight @ blocks[1].down.weight.T
        return x.square().mean()

    def work(side: Side, step: int, loss_of: Any) -> Tensor:
        with contextlib.nullcontext() if loss_of is beside else scope(side):
            loss = loss_of(side.module, step)
            side.backward(loss)
        return loss

    for loss_of in (beside, without_root, parts):
        check(Chain, functools.partial(work, loss_of=loss_of), stage=OUTER_STAGES, steps=3)


@on_ranks(2, full=(3,))
@IN_STAGES
def test_nested_units_and_a_root_that_is_the_only_unit_train(stages: tuple[int, ...]) -> None:
    for prefetch_bytes in (0, 10**6):
        unit = {"classes": ["Block", "Linear", "Embedding"]}
        check(Model, language_work, stage=stages, unit=unit, prefetch_bytes=prefetch_bytes)
    check(Model, language_work, stage=OUTER_STAGES, unit={"classes": ["Model"]})


# -- activation checkpointing -----------------------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@IN_STAGES
@REENTRANT
def test_checkpointed_blocks_train(stages: tuple[int, ...], reentrant: bool) -> None:
    call = checkpointed(reentrant)
    several = lambda: Chain(lambda: nn.Sequential(Block(), Block()), 2, call=call)  # noqa: E731
    # Under the reentrant kind its gradients arrive twice, and the second time after they were reduced.
    used_twice = lambda: Chain(call=call, path=(0, 1, 2, 0))  # noqa: E731

    def adapters() -> nn.Module:
        module = Chain(Adapted, call=call)
        module.first.requires_grad_(reentrant)  # the reentrant kind needs an input with a gradient
        return module

    for prefetch_bytes in (0, 10**6):
        check(several, mean_square, stage=stages, prefetch_bytes=prefetch_bytes, unit={"classes": ["Block"]})
    check(used_twice, mean_square, stage=stages, tolerance=1e-6, optimizer=sgd)
    check(adapters, mean_square, stage=OUTER_STAGES)


@on_ranks(2)
def test_checkpoints_that_end_recomputation_early_train() -> None:
    """The non-reentrant kind stops inside of a module once everything saved has been recomputed."""

    def stops_early() -> nn.Module:
        act = lambda m, x: torch.tanh(m.a(x)) + x + 0 * m.b.weight.sum()  # noqa: E731
        return nn.Sequential(Does(act, a=linear(), b=linear(bias=False)))

    check(lambda: Chain(stops_early, call=checkpointed(False)), mean_square, stage=OUTER_STAGES)


@on_ranks(2)
@IN_STAGES
@REENTRANT
def test_a_checkpoint_inside_of_a_unit_trains(stages: tuple[int, ...], reentrant: bool) -> None:
    """Its recomputation calls no unit. Gradients of the norm come from around it too, and the unit is dropped before
    the norm's backward inside of it: that has to gather it again."""

    def act(m: Any, x: Tensor) -> Tensor:
        return m.norm(checkpoint(lambda z: m.inner(m.norm(z)), x, use_reentrant=reentrant)).mul_(2)

    make = lambda: Does(act, norm=nn.LayerNorm(WIDTH), inner=linear())  # noqa: E731
    build = lambda: Chain(make, 2, call=lambda block, x: block(block(block(x))))  # noqa: E731
    check(build, mean_square, stage=stages, unit={"classes": ["Does"]}, tolerance=1e-6, optimizer=sgd)


# -- saved tensors ---------------------------------------------------------------------------------------------------


def packs(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Hooks of the user's own, as those that compress activations, and leave parameters alone."""
    if kind == "on the host":
        return torch.autograd.graph.save_on_cpu()
    keep = lambda t: t if kind == "as they are" or isinstance(t, nn.Parameter) else t.clone()  # noqa: E731
    return torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)


@on_ranks(2)
@IN_STAGES
@pytest.mark.parametrize("kind", ["parameters", "as they are", "on the host"])
def test_hooks_of_saved_tensors_inside_of_a_block_may_keep_its_weights(stages: tuple[int, ...], kind: str) -> None:
    def act(m: Any, x: Tensor, around: str) -> Tensor:
        with packs(kind) if around == "all" else contextlib.nullcontext():
            y = torch.tanh(m.up(m.norm(x)))
        with packs(kind):
            return x + y @ m.weight

    def make() -> nn.Module:
        return Does(act, norm=nn.LayerNorm(WIDTH), up=linear(), weight=nn.Parameter(torch.randn(WIDTH, WIDTH) / 9))

    for around in ("all", "a part"):
        build = functools.partial(Chain, make, call=lambda block, x, around=around: block(x, around))
        check(build, mean_square, stage=stages, plain=BOTH, unit={"classes": ["Does"]})


class KeepsAView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.turned = weight.detach().t()
        ctx.save_for_backward(x)
        return x @ ctx.turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad @ ctx.turned.t(), grad.t() @ ctx.saved_tensors[0]


def saves_all(block: nn.Module, x: Tensor) -> Tensor:
    policy = lambda *_, **__: CheckpointPolicy.MUST_SAVE  # noqa: E731
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def keeps_a_view(m: Any, x: Tensor) -> Tensor:
    result: Tensor = KeepsAView.apply(m.before(x), m.inner.weight)  # type: ignore[no-untyped-call]
    return result


@on_ranks(2)
def test_views_of_weights_in_ctx_are_valid_in_the_backward() -> None:
    for before in (nn.Identity, functools.partial(nn.LayerNorm, WIDTH)):
        make = lambda before=before: Does(keeps_a_view, before=before(), inner=linear())  # noqa: E731
        check(functools.partial(Chain, make), mean_square, stage=OUTER_STAGES, unit={"classes": ["Does"]})


@on_ranks(2)
@IN_STAGES
def test_selective_checkpoints_may_save_every_result_and_views_of_weights(stages: tuple[int, ...]) -> None:
    check(functools.partial(Chain, call=saves_all), mean_square, stage=stages, unit={"classes": ["Block"]})


# -- several backwards, gradients of gradients ------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@IN_STAGES
def test_backwards_of_every_kind_train(stages: tuple[int, ...]) -> None:
    def of_several_forwards(side: Side, step: int) -> Tensor:
        """Without ``no_sync``: reduced at every backward."""
        return torch.stack([mean_square(side, step + 20 * micro).detach() for micro in range(3)])

    def two_of_one_forward(side: Side, step: int) -> Tensor:
        out = side.module(floats(step, 4, WIDTH))
        side.backward(out.square().mean(), retain_graph=True)
        side.backward(out.abs().mean())
        return out

    def with_a_gradient(side: Side, step: int) -> Tensor:
        out = side.module(floats(step, 4, WIDTH))
        side.backward(out, gradient=floats(step + 50, 4, WIDTH))
        return out

    def of_a_gradient(side: Side, step: int) -> Tensor:
        loss = penalty(side, floats(step, 4, WIDTH))
        side.backward(loss)
        return loss

    for work in (of_several_forwards, two_of_one_forward, with_a_gradient, of_a_gradient):
        check(Chain, work, stage=stages, plain=BOTH)


def penalty(side: Side, x: Tensor) -> Tensor:
    out = side.module(x.requires_grad_()).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_a_gradient_penalty_whose_graph_is_walked_twice_trains(checkpointing: str) -> None:
    """The pass is over after the first time, and weights have gone: convolutions read those that the first backward has
    saved."""

    def work(side: Side, step: int) -> Tensor:
        loss = penalty(side, floats(step, 2, 3, 5, 5))
        side.backward(loss, retain_graph=True)
        side.backward(loss)
        return loss

    conv = lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())  # noqa: E731
    build = lambda: nn.Sequential(*(conv() for _ in range(3)))  # noqa: E731
    check(build, work, stage=OUTER_STAGES, plain=BOTH, activation_checkpointing=checkpointing)


@on_ranks(2)
@pytest.mark.parametrize("where", ["before the step", "between", "between, no_sync", "of a block"])
def test_autograd_grad_keeps_the_gradients_held_so_far(where: str) -> None:
    def slope_of_input(module: nn.Module, step: int) -> Tensor:
        x = floats(step, 4, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x)
        return slope

    def work(side: Side, step: int) -> Tensor:
        with side.no_sync() if where == "between, no_sync" else contextlib.nullcontext():
            loss = mean_square(side, step)
        if where == "of a block":
            return slope_of_input(side.module.blocks[0], step + 50)
        slope = slope_of_input(side.module, step + 50)
        if where != "before the step":
            loss = mean_square(side, step + 20)
        return slope + loss.detach()

    check(lambda: Chain(depth=4), work, stage=(0, 2, 3), plain=BOTH)


@on_ranks(2)
def test_accumulation_goes_on_over_scopes_and_numbers_of_micro_batches() -> None:
    def over_scopes(side: Side, step: int) -> Tensor:
        with scope(side), side.no_sync():
            first = mean_square(side, step)
        with scope(side):
            return first.detach() + mean_square(side, step + 20)

    check(Chain, over_scopes, stage=(0, 1), plain=BOTH)
    more_and_fewer = lambda side, step: accumulate(side, step, micro_batches=(1, 4, 2, 4)[step])  # noqa: E731
    check(Model, more_and_fewer, steps=4, stage=OUTER_STAGES, plain=True)


@on_ranks(2)
def test_gradients_that_wait_are_reduced_when_their_parameters_are_frozen_before_the_last_backward() -> None:
    def work(side: Side, step: int) -> None:
        with side.no_sync():
            language_work(side, 0)
        side.module.blocks[1].requires_grad_(False)
        language_work(side, 1)
        side.module.blocks[1].requires_grad_(True)

    check(Model, work, steps=1, stage=(0, 1))


# -- evaluation between training steps --------------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@IN_STAGES
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_gives_the_same_outputs(stages: tuple[int, ...], without: Callable[[], Any]) -> None:
    def work(side: Side, step: int) -> Tensor:
        with without():
            outputs = [side.module(tokens(step + 10 * i)).clone() for i in range(3)]
        language_work(side, step)
        with without():
            outputs.append(side.module(tokens(step)).clone())
        with torch.inference_mode(False), torch.no_grad():
            return torch.stack([o.clone() for o in outputs])

    check(Model, work, stage=stages)


@on_ranks(2)
def test_a_forward_of_a_block_may_lead_nowhere() -> None:
    """It opens the pass, and the evaluation afterwards goes through it in the middle."""

    def work(side: Side, step: int) -> Tensor:
        x = floats(step, 2, 3, WIDTH)
        assert side.module.blocks[1](x).isfinite().all()
        with torch.no_grad():
            seen = side.module(x).clone()
        image_work(side, step)
        return seen

    check(Chain, work, plain=BOTH)


@on_ranks(2)
def test_evaluation_gathers_every_unit_once_and_leaves_none() -> None:
    with Sharded(Model()) as side:
        train(side, [0])
        buckets = side.engine.buckets
        for _ in range(2):
            side.engine.comm.counts.clear()
            with torch.no_grad():
                side.module(tokens(1))
            assert side.engine.comm.counts == {("all_gather", b.label): 1 for b in buckets}
            assert not any(b.full.allocated for b in buckets)
        for _ in range(2):
            with torch.no_grad():
                side.module.blocks[1](floats(0, 2, WIDTH))
            assert side.engine.passes.key is None
            assert all(unit.state is State.SHARDED for unit in side.engine.units)


# -- passes and steps that come between one another -------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_forward_inside_gather_leaves_masters_intact(precision: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        shown = lightning_zero.gather(side.module) if isinstance(side, Sharded) else contextlib.nullcontext()
        with shown, torch.no_grad():
            looked_at = side.module(tokens(step + 30))
        loss = language_work(side, step).detach()
        return loss if precision == "bf16" else looked_at + loss  # inside, bf16 runs on the unrounded masters

    check(Model, work, stage=(1, 3), precision=precision)


@on_ranks(2)
def test_a_step_inside_gather_is_refused_and_right_after_it() -> None:
    def work(side: Side, step: int) -> Tensor:
        loss = language_work(side, step)
        if isinstance(side, Sharded):
            for target in (side.module, side.module.head.weight):
                with lightning_zero.gather(target), pytest.raises(RuntimeError, match=r"step\(\) inside gather"):
                    side.step()
        return loss

    check(Model, work, stage=(0, 1, 3))


@on_ranks(2)
@pytest.mark.parametrize("prefetch_bytes", [0, 10**6])
def test_what_was_gathered_ahead_of_a_step_is_not_used_after_it(prefetch_bytes: int) -> None:
    """Several passes and steps in one scope, as in manual optimization."""

    def work(side: Side, step: int) -> Tensor:
        with scope(side):
            language_work(side, step)
            with torch.no_grad():
                side.module(tokens(step, 1))
            step_and_clear(side)
            with torch.no_grad():
                looked_at = side.module(tokens(step, 2))
            return looked_at + language_work(side, step + 50).detach()

    check(Model, work, steps=3, stage=(1, 3), prefetch_bytes=prefetch_bytes)


@on_ranks(2)
@STAGES
def test_what_no_sync_left_on_one_rank_or_all_is_not_stepped_measured_or_clipped(stage: int) -> None:
    """A parameter of one element rests replicated at every stage. Stages 2 and 3 reduce it in each backward."""

    def refused(*uses: Callable[[], Any]) -> None:
        for use in uses:
            with pytest.raises(RuntimeError, match="no_sync.*not been reduced"):
                use()

    act = lambda m, x: m.linear(x) * (m.scale if dist.get_rank() else 1)  # noqa: E731
    module = Does(act, linear=linear(), scale=nn.Parameter(torch.tensor(2.0)))
    with Sharded(module, stage=stage, optimizer=lambda _: sgd([module.scale])) as side:
        with side.no_sync():
            mean_square(side, 0)
        if stage >= 2:  # there each backward reduces
            assert side.clip(1.0) > 0
            side.step()
            return
        refused(side.step, lambda: side.clip(1.0), lightning_zero.gather(module.scale, grads=True).__enter__)

    def work(side: Side, step: int) -> Tensor:
        with side.no_sync():
            first = language_work(side, step)
        if isinstance(side, Sharded):
            refused(side.step, lambda: lightning_zero.grad_norm(side.module), lambda: side.clip(1.0))
        return first.detach() + language_work(side, step + 20)

    check(Model, work, stage=stage)


# -- passes that end early, or on one rank only -----------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("prefetch_bytes", [1, 10**6])
def test_ranks_leave_a_step_after_different_numbers_of_blocks(prefetch_bytes: int) -> None:
    lengths = {3: (1, 3), 4: (3, 1)}  # by step and rank

    def work(side: Side, step: int) -> Tensor:
        if step in lengths:
            with scope(side):
                x = floats(step, 4, WIDTH)
                for block in list(side.module.blocks)[: lengths[step][dist.get_rank()]]:
                    x = block(x)
        with scope(side):
            return mean_square(side, step)

    check(lambda: Chain(depth=6), work, steps=6, prefetch_bytes=prefetch_bytes, stall_timeout_s=10)


@on_ranks(2)
@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_on_one_rank_does_not_hang_below_stage_3(grad: bool) -> None:
    def work(side: Side, step: int) -> Tensor:
        if dist.get_rank() == 0:
            with torch.set_grad_enabled(grad):
                side.module(tokens(step + 50))
        return language_work(side, step)

    check(Model, work, stage=(0, 1, 2), stall_timeout_s=5)


@on_ranks(2)
@pytest.mark.parametrize("evaluation", [True, False], ids=["evaluation", "training"])
def test_passes_that_end_early_or_skip_do_not_pile_units_up(evaluation: bool) -> None:
    number = 12
    with Sharded(Chain(depth=number), prefetch_bytes=1, stall_timeout_s=10) as side:
        engine, gathered = side.engine, [0]
        units = engine.units[1:]
        engine.comm.observers.append(lambda *_: gathered.append(sum(u.state is not State.SHARDED for u in units)))
        for path in ([*range(number)], [*range(number)], [0], [0, number - 1], [*range(number)], [5]):
            with engine.step_scope("s", evaluation=evaluation), torch.set_grad_enabled(not evaluation):
                x = floats(0, 4, WIDTH)
                for i in path:
                    x = side.module.blocks[i](x)
            if not evaluation:
                engine.passes.backward(x.sum())
            assert 0 < max(gathered) <= 3, path


@on_ranks(2)
@pytest.mark.parametrize("dynamic_graph", [False, True])
def test_a_rank_that_is_done_holds_few_of_the_units_that_others_need(dynamic_graph: bool) -> None:
    most = 0
    unshard_begin = Unit.unshard_begin

    def counted(self: Unit) -> None:
        nonlocal most
        unshard_begin(self)
        most = max(most, sum(unit.state is not State.SHARDED for unit in side.engine.units))

    with Sharded(Chain(depth=9), stage=3, dynamic_graph=dynamic_graph, prefetch_bytes=1) as side:
        with mock.patch.object(Unit, "unshard_begin", counted), torch.no_grad():
            side.module(floats(0, 4, WIDTH), range(9 if dist.get_rank() else 1))
        assert most <= 4, "the root, one in use, and one for another rank"


# -- several models ---------------------------------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("stages", [(3, 3), (0, 3), (2, 1)], ids=str)
def test_two_models_in_one_process_train(stages: tuple[int, int]) -> None:
    """As in adversarial training: each is stepped by itself, and one's loss goes through the other."""
    with (
        with_twin(Chain, stage=stages[0], plain=True) as makers,
        with_twin(lambda: Chain(depth=4), stage=stages[1], plain=True) as judges,
    ):
        for step in range(3):
            for maker, judge in zip(makers, judges, strict=True):
                made = maker.module(floats(step, 4, WIDTH))
                judge.backward(judge.module(made.detach()).square().mean())
                step_and_clear(judge)
                maker.backward(judge.module(made).mean())
                step_and_clear(maker)
                judge.zero_grad()
            assert_same(*makers)
            assert_same(*judges)


@on_ranks(2)
@STAGES
@PRECISIONS
def test_release_gives_the_plain_module_back(stage: int, precision: str) -> None:
    module = Model()
    before = dict(module.named_parameters())
    with with_twin(lambda: module, stage=stage, precision=precision) as (side, twin):
        for one in (side, twin):
            train(one, [0])
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
    language_loss(copy.deepcopy(module), tokens(0)).backward()
    assert dist.is_initialized()
