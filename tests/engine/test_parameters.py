"""Parameters of every kind train as they do in a plain replicated copy."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import lightning_zero
from lightning_zero.settings import ConfigError
from tests import models
from tests.engine.sides import Sharded, Side, Twin, adamw, load_state, sgd, state_of
from tests.engine.support import IN_STAGES, OUTER_STAGES, PLAIN, PRECISIONS, STAGES, assert_equal, check
from tests.engine.works import floats, language_work, loss_at, mean_square, tokens, train
from tests.harness import on_ranks
from tests.models import TOKENS, WIDTH, Block, Chain, Does, Model, Shapes, checkpointed, linear

pytestmark = pytest.mark.sample  # a case shows all stages


def pair(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Two modules, each a unit."""
    return lambda: nn.Sequential(nn.Sequential(make()), nn.Sequential(make()))


# -- tied and frozen --------------------------------------------------------------------------------------------------


def tied_model() -> Model:
    module = Model()
    module.head.weight = module.embed.weight
    module.blocks[2].up.weight = module.blocks[0].up.weight
    return module


def tied_block() -> nn.Module:
    module = Does(lambda m, x: x + m.second(torch.tanh(m.first(x))), first=linear(), second=linear())
    module.second.weight = module.first.weight
    return module


@on_ranks(2, full=(3,))
@IN_STAGES
def test_tied_parameters_train_across_and_inside_units(stages: tuple[int, ...]) -> None:
    check(tied_model, language_work, stage=stages)
    check(pair(tied_block), mean_square, stage=OUTER_STAGES)


@on_ranks(2)
def test_tied_parameters_are_stored_once_in_the_common_unit() -> None:
    with Sharded(tied_model()) as side:
        owners = {info.fqns: unit.name for unit in side.engine.units for info in unit.infos}
        tied = {fqns: unit for fqns, unit in owners.items() if len(fqns) > 1}
        assert tied == {("embed.weight", "head.weight"): "", ("blocks.0.up.weight", "blocks.2.up.weight"): ""}
        state = side.engine.state_dict(only_rank_0=False)
        assert state["head.weight"] is state["embed.weight"]


@on_ranks(2)
def test_frozen_parameters_have_no_gradient_state_reduction_or_memory() -> None:
    with Sharded(models.frozen("blocks.1")) as side:
        language_work(side, 0)
        side.step()
        for bucket in side.engine.units[2].buckets:
            assert bucket.grad is None
            assert side.engine.comm.counts["reduce_scatter", bucket.label] == 0
        state = state_of(side)["state"]
        params = list(side.module.parameters())
        assert sorted(state) == [i for i, p in enumerate(params) if p.requires_grad]
    with Sharded(models.frozen("embed", "blocks")) as side:
        side.module(tokens(0))
        assert not any(b.full.allocated for unit in side.engine.units[1:] for b in unit.buckets)


@on_ranks(2, full=(3,))
@IN_STAGES
@PRECISIONS
def test_parameters_are_frozen_and_unfrozen_between_steps(stages: tuple[int, ...], precision: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        blocks = side.module.blocks
        if step == 1:
            side.module(tokens(step))  # leads nowhere: its pass is that of the next forward too
        side.module.embed.requires_grad_(step >= 2)
        blocks[0].requires_grad_(step in (1, 2, 4))
        blocks[1].up.requires_grad_(step != 2)
        return language_work(side, step)

    build = functools.partial(models.frozen, "embed", "blocks.0")
    check(build, work, steps=5, stage=stages, precision=precision)


# -- unused -----------------------------------------------------------------------------------------------------------


def branches() -> nn.Module:
    """Three blocks of which a forward takes some; a whole unit and parts of units may go unused."""

    def act(m: Any, x: Tensor, take: tuple[int, ...], extra: bool) -> Tensor:
        for i in take:
            x = m.blocks[i](x)
        return m.extra(x) if extra else x

    return Does(act, blocks=nn.ModuleList(Block() for _ in range(3)), extra=linear())


def dampened_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


@on_ranks(2, full=(3,))
@IN_STAGES
@pytest.mark.parametrize("optimizer", [adamw, sgd, dampened_sgd])
def test_parameters_that_no_rank_uses_are_left_alone(stages: tuple[int, ...], optimizer: Any) -> None:
    """No decay, no state, no step count: the twin's gradient is None there."""
    paths = [((0, 2), False), ((0, 1, 2), True), ((0, 2), False), ((1,), False), ((0, 1, 2), True)]
    work = lambda side, step: mean_square(side, step, *paths[step])  # noqa: E731
    tolerance = 1e-6 if optimizer is dampened_sgd else 0.0
    check(branches, work, steps=5, stage=stages, optimizer=optimizer, tolerance=tolerance)


@on_ranks(2, full=(3,))
@IN_STAGES
def test_parameters_that_some_ranks_use_train(stages: tuple[int, ...]) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    work = lambda side, step: mean_square(side, step, (0, 2) if rank else (0, 1, 2), rank == last)  # noqa: E731
    small = {"reduce_bucket_bytes": 3000}  # fewer bytes may be in flight than one rank has to give at once
    for config in (
        {"stage": stages},
        {"stage": (2, 3), "prefetch_bytes": 0, **small},
        {"dynamic_graph": True},
        {"dynamic_graph": True, **small},
    ):
        check(branches, work, stall_timeout_s=10, **config)


@on_ranks(2)
@IN_STAGES
def test_unused_parts_of_a_unit_and_of_its_outputs_train(stages: tuple[int, ...]) -> None:
    half = lambda: Does(lambda m, x: m.used(x), used=linear(), unused=linear())  # noqa: E731
    check(pair(half), mean_square, stage=stages)
    two = lambda: nn.Sequential(Does(lambda m, x: (m.a(x), m.b(x)), a=linear(), b=linear()))  # noqa: E731
    check(lambda: Chain(two, call=lambda block, x: block(x)[0]), mean_square, stage=OUTER_STAGES)


# -- shapes, dtypes, buffers ------------------------------------------------------------------------------------------


@on_ranks(3, full=(1, 2))
@IN_STAGES
@PRECISIONS
def test_odd_shapes_train(stages: tuple[int, ...], precision: str) -> None:
    check(pair(Shapes), mean_square, stage=stages, precision=precision)
    if precision == "fp32":  # fewer elements than ranks
        check(lambda: linear(2, 1, bias=False), functools.partial(mean_square, shape=(4, 2)), stage=stages)


def images() -> nn.Module:
    """Convolutions whose weights lie in memory as kernels for such images want them."""

    def act(m: Any, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        for conv in m.convs:
            assert conv[0].weight.is_contiguous(memory_format=torch.channels_last)
            x = conv(x) + x
        return x

    convs = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU()) for _ in range(3))
    return Does(act, convs=convs).to(memory_format=torch.channels_last)


image_work = functools.partial(mean_square, shape=(2, 4, 6, 6))


@on_ranks(2)
@IN_STAGES
def test_weights_keep_their_order_in_memory(stages: tuple[int, ...]) -> None:
    check(images, image_work, stage=stages)


@on_ranks(2)
@pytest.mark.parametrize("stage", OUTER_STAGES)
def test_values_and_states_go_in_and_out_whatever_their_order_in_memory(stage: int) -> None:
    """Into a module whose weights lie otherwise, by value."""
    torch.manual_seed(3)
    turned, straight = images(), images()
    with Sharded(turned, stage=stage) as side:
        train(side, [0], image_work)
        weights = {name: value.contiguous() for name, value in side.engine.state_dict(only_rank_0=False).items()}
        states = state_of(side)
        expected = train(side, (1, 2), image_work)
    with Sharded(straight, stage=stage) as side:
        side.engine.load_state_dict(weights)
        for state in states["state"].values():
            state.update({k: v.contiguous() for k, v in state.items() if isinstance(v, Tensor)})
        load_state(side, states)
        assert_equal(train(side, (1, 2), image_work), expected)


@on_ranks(2)
def test_integer_parameters_survive() -> None:
    def quantized() -> nn.Module:
        codes = nn.Parameter(torch.arange(-5, 6).repeat(2), requires_grad=False)
        return Does(lambda m, x: x[:, :1] * (m.codes * m.scale), codes=codes, scale=nn.Parameter(torch.rand(22)))

    check(lambda: nn.Sequential(nn.Sequential(quantized())), mean_square, stage=OUTER_STAGES)


@on_ranks(2)
@IN_STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_several_dtypes_in_one_module_train(stages: tuple[int, ...], precision: str) -> None:
    def wide() -> nn.Module:
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        act = lambda m, x: (x.double() @ m.wide).to(x.dtype) * m.plain  # noqa: E731
        return Does(act, wide=weight, plain=nn.Parameter(torch.randn(WIDTH)))

    def low() -> nn.Module:
        weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
        return Does(lambda m, x: x * m.low.to(x.dtype), low=weight)

    both = lambda: nn.Sequential(wide(), low()) if precision == "fp32" else wide()  # noqa: E731
    check(pair(both), mean_square, stage=stages)


@on_ranks(2)
@IN_STAGES
def test_buffers_follow_the_forward(stages: tuple[int, ...]) -> None:
    def conv() -> nn.Module:
        norm = nn.BatchNorm1d(3)
        return Does(lambda m, x: torch.relu(m.norm(m.conv(x))), conv=nn.Conv1d(3, 3, 3, padding=1), norm=norm)

    def work(side: Side, step: int) -> Tensor:
        loss = mean_square(side, step, shape=(4, 3, 9))
        return torch.cat([loss.detach().view(1), *(b.detach().double().view(-1) for b in side.module.buffers())])

    check(lambda: nn.Sequential(conv(), conv()), work, stage=stages)


@on_ranks(2)
@pytest.mark.parametrize("expanded", [False, True])
def test_buffers_of_every_kind_start_as_on_rank_0(expanded: bool) -> None:
    def buffers(mark: int) -> dict[str, Tensor]:
        return {
            "int16": torch.full((3,), mark, dtype=torch.int16),
            "boolean": torch.tensor([mark == 1, mark == 2]),
            "complex": torch.full((3,), complex(mark, -mark)),
            "row": torch.full((1, 3), float(mark)).expand(2 if expanded else 1, 3),
            "transposed": torch.arange(6.0).view(2, 3).mul(mark).t(),
            "every_second": torch.arange(8.0).mul(mark)[::2],
            "empty": torch.empty(0, 3),
            "evaluated": torch.inference_mode()(torch.full)((2,), float(mark)),  # as an evaluation leaves it
            "scalar": torch.tensor(mark),
        }

    module = Model()
    for name, buffer in buffers(1 + dist.get_rank()).items():
        module.register_buffer(name, buffer)
    module.register_buffer("shared", module.int16)
    with Sharded(module, precision="bf16") as side:
        language_work(side, 0)
        side.step()
        assert_equal({name: getattr(module, name) for name in buffers(1)}, buffers(1))
        assert module.shared is module.int16


@on_ranks(2)
@pytest.mark.parametrize("stage", OUTER_STAGES)
def test_norms_of_users_keep_fp32_and_give_back_the_dtype_of_their_input(stage: int) -> None:
    class MyRMSNorm(Does):
        """A norm by its name."""

    norm = lambda: MyRMSNorm(lambda m, x: x.float() * m.weight, weight=nn.Parameter(torch.ones(WIDTH)))  # noqa: E731
    module = nn.Sequential(*(nn.Sequential(norm(), linear()) for _ in range(2)))
    seen: list[torch.dtype] = []
    with Sharded(module, stage=stage, precision="bf16"):
        module[1][0].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            module(floats(0, 2, WIDTH))
        assert seen == [torch.bfloat16]
        assert module[0][0].weight.dtype is torch.float32
        assert module[0][1].weight.dtype is torch.bfloat16


# -- start ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@STAGES
def test_a_meta_module_is_materialised_with_its_ties(stage: int) -> None:
    with torch.device("meta"):
        module = tied_model()
        module.head.bias = None  # with one, its reset_parameters would be the last on the weight
        module.norm = nn.BatchNorm1d(TOKENS)
    before = dict(module.named_parameters(remove_duplicate=False))
    with Sharded(module, stage=stage) as side:
        assert module.head.weight is module.embed.weight
        for name, param in module.named_parameters(remove_duplicate=False):
            assert param is before[name] and not param.is_meta
        assert module.norm.running_var.tolist() == [1.0] * TOKENS
        with lightning_zero.gather(module):
            assert all(p.isfinite().all() for p in module.parameters())
            assert 0.5 < module.embed.weight.std() < 1.5
        train(side, range(2))


class Marked(nn.Parameter):
    """A class of a user's own."""


@on_ranks(1)
@pytest.mark.parametrize("stage", OUTER_STAGES)
@pytest.mark.parametrize(("built_on", "device"), [("cpu", "meta"), ("meta", "cpu")])
def test_a_parameter_keeps_all_that_it_carries_on_its_way_to_another_device(
    stage: int, built_on: str, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch's meta kernels set it for good otherwise
    with torch.device(built_on):
        module = nn.Sequential(nn.Linear(5, 5), nn.LSTM(5, 5, num_layers=2))
        module[0].weight = Marked(module[0].weight.detach())
    weight, seen = module[0].weight, []
    weight._no_weight_decay = True
    weight.register_hook(lambda grad: seen.append("hook"))
    removed = weight.register_hook(lambda grad: seen.append("removed"))
    weight.register_post_accumulate_grad_hook(lambda param: seen.append("after"))
    reference, before = weakref.ref(weight), [id(p) for p in module.parameters()]  # no list of them: torch counts
    engine = lightning_zero.shard(module, stage=stage, device=device)
    removed.remove()
    weight.register_hook(lambda grad: seen.append("later"))
    assert [id(p) for p in module.parameters()] == before
    assert all(p.device.type == device for p in module.parameters())
    assert reference() is module[0].weight is weight
    assert weight._no_weight_decay and isinstance(weight, Marked)
    with engine.step_scope("train"):
        module(torch.ones(3, 2, 5, device=device))[0].sum().backward()
    assert seen == ["hook", "later", "after"]
    assert all(p.grad is not None for p in module.parameters())  # our own hooks were called too
    engine.release()
    assert type(weight) is Marked


@pytest.mark.parametrize("trainable", [True, False])
@STAGES
def test_a_parameter_around_other_tensors_is_refused_by_name_and_class(stage: int, trainable: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    values = module[1].weight.detach()
    module[1].weight = nn.Parameter(TwoTensor(values, values), requires_grad=trainable)
    with pytest.raises(ConfigError, match=r"parameter 1\.weight is a TwoTensor, a wrapper.*after training"):
        lightning_zero.shard(module, stage=stage, device="cpu")


# -- hooks of the user on parameters ----------------------------------------------------------------------------------


@on_ranks(2)
@STAGES
@PLAIN
@pytest.mark.parametrize("when", ["before", "after", "in the step"])
def test_hooks_on_accumulated_gradients_see_what_ours_take(stage: int, plain: bool, when: str) -> None:
    """This rank's own gradient, whenever the hook was registered; what they change is reduced."""
    seen: list[Tensor] = []

    def look(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.clone())
        param.grad.mul_(2)

    def register(module: nn.Module) -> None:
        for param in (module.head.weight, module.blocks[1].up.bias):
            param.register_post_accumulate_grad_hook(look)

    def build() -> nn.Module:
        module = Model()
        if when == "before":
            register(module)
        return module

    def work(side: Side, step: int) -> Tensor:
        if step == 0 and (isinstance(side, Twin) or when == "after"):
            register(side.module)
        loss = loss_at(side.module, step)
        if step == 0 and isinstance(side, Sharded) and when == "in the step":
            register(side.module)
        side.backward(loss)
        return loss

    check(build, work, stage=stage, plain=plain)
    assert len(seen) == 8 and all(grad.isfinite().all() and grad.any() for grad in seen)


@on_ranks(2)
@STAGES
@PLAIN
@pytest.mark.parametrize("how", ["two backwards", "no_sync", "one backward"])
def test_a_hook_that_would_be_shown_a_sum_of_gradients_is_refused(stage: int, plain: bool, how: str) -> None:
    """torch adds a gradient to those before it first; it comes in parts where a reentrant checkpoint is used twice."""
    module = Model()
    seen: list[Tensor] = []
    weight = module.blocks[1].up.weight
    handle = weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    if how == "one backward":
        again = checkpointed(reentrant=True)
        repeated = Does(lambda m, x: again(m.block, again(m.block, x)), block=module.blocks[1])
        module.blocks = nn.ModuleList([module.blocks[0], repeated])
    with Sharded(module, stage=stage, plain=plain) as side:
        for step in range(2 if how != "one backward" else 0):  # gradients that are cleared are no sum
            language_work(side, step)
            side.zero_grad()
        with pytest.raises(RuntimeError, match=r"hook .* on blocks\.1\S*\.up\.weight.*param\.register_hook"):
            with side.engine.passes.reducer.no_sync() if how == "no_sync" else contextlib.nullcontext():
                language_work(side, 0)
            language_work(side, 1)
        side.zero_grad()
        handle.remove()
        for step in range(2):
            language_work(side, step)
        side.step()
