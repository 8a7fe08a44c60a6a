"""Parameters of every kind train as they do in a plain replicated copy."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.config import ConfigError
from lightning_zero.engine.whole import state_dicts
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

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
OUTER_STAGES = pytest.mark.parametrize("stage", [0, 3])
PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])


def mean_square(side: Side, step: int, *, width: int = 19) -> Tensor:
    """One forward and backward of a module that maps [rows, width] to anything."""
    loss = side.module(floats(step, 4, width)).square().mean()
    side.backward(loss)
    return loss


@on_ranks(1)
def test_libraries_know_parameters_by_the_name_of_their_class() -> None:
    """As tensorboardX does, for histograms of weights: by the letters "torch"."""
    os.environ["LIGHTNING_ZERO_EVEN_ALONE"] = "1"
    module = lightning_zero.shard(Model(), stage=3).module
    assert all("torch" in str(type(p)) and type(p) is not nn.Parameter for p in module.parameters() if p.numel() > 1)


# -- tied -------------------------------------------------------------------------------------------------------------


class TiedAcrossUnits(Model):
    """Embedding and head share a weight, and so do two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight


class TiedInside(nn.Module):
    def __init__(self, width: int = 19) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


@on_ranks(2, 3)
@STAGES
def test_tied_across_units(stage: int) -> None:
    check(TiedAcrossUnits, language_work, stage=stage)


@on_ranks(2)
def test_tied_across_units_is_stored_once_and_belongs_to_the_common_unit() -> None:
    with Sharded(TiedAcrossUnits()) as side:
        owners = {info.fqns: unit.name for unit in side.engine.units for info in unit.infos}
        assert owners["embed.weight", "head.weight"] == ""
        assert owners["blocks.0.up.weight", "blocks.2.up.weight"] == ""
        assert sum(len(fqns) for fqns in owners) == len(owners) + 2


@on_ranks(2)
@OUTER_STAGES
def test_tied_inside_a_unit(stage: int) -> None:
    check(lambda: nn.Sequential(TiedInside(), TiedInside()), mean_square, stage=stage)


# -- frozen -----------------------------------------------------------------------------------------------------------


def frozen_model(*names: str) -> nn.Module:
    module = Model()
    for name in names:
        module.get_submodule(name).requires_grad_(False)
    return module


@on_ranks(2, full=(3,))
@STAGES
@pytest.mark.parametrize(
    "frozen",
    [("embed",), ("blocks.1",), ("embed", "blocks.0", "blocks.1", "blocks.2"), ("blocks.0.up", "blocks.2.norm")],
    ids=["embedding", "one unit", "backbone", "parts of units"],
)
def test_frozen_parameters(stage: int, frozen: tuple[str, ...]) -> None:
    check(functools.partial(frozen_model, *frozen), language_work, stage=stage)


@on_ranks(2)
def test_frozen_backbone_without_gradients_keeps_nothing_gathered() -> None:
    with Sharded(frozen_model("embed", "blocks.0", "blocks.1", "blocks.2")) as side:
        side.module(tokens(0))
        assert not any(b.full.allocated for unit in side.engine.units[1:] for b in unit.buckets)


@on_ranks(2)
def test_frozen_parameters_have_no_gradient_state_or_reduction() -> None:
    with Sharded(frozen_model("blocks.1")) as side:
        language_work(side, 0)
        side.step()
        for bucket in side.engine.units[2].buckets:
            assert bucket.grad is None
            assert side.engine.comm.counts["reduce_scatter", bucket.label] == 0
        state = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)["state"]
        params = list(side.module.parameters())
        assert sorted(state) == [i for i, p in enumerate(params) if p.requires_grad]


@on_ranks(2, full=(3,))
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
def test_freezing_and_unfreezing_between_steps(stage: int, precision: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        blocks = side.module.blocks  # type: ignore[union-attr]
        side.module.embed.requires_grad_(step >= 2)  # type: ignore[union-attr]
        blocks[0].requires_grad_(step in (1, 2, 4))
        blocks[1].up.requires_grad_(step != 2)
        return language_work(side, step)

    build = functools.partial(frozen_model, "embed", "blocks.0")
    check(build, work, steps=6, stage=stage, precision=precision)


@on_ranks(2)
@STAGES
def test_unfreezing_after_a_forward_that_led_nowhere(stage: int) -> None:
    """Its pass is still open, and is that of the next forward too."""

    def work(side: Side, step: int) -> Tensor:
        if step == 1:
            side.module(tokens(step))
            side.module.blocks[0].requires_grad_(True)  # type: ignore[union-attr]
        return language_work(side, step)

    check(functools.partial(frozen_model, "embed", "blocks.0"), work, stage=stage)


@on_ranks(2)
@OUTER_STAGES
def test_unfreezing_by_a_new_param_group(stage: int) -> None:
    """What a fine-tuning callback does: the backbone is unfrozen and added with a learning rate of its own."""

    def work(side: Side, step: int) -> Tensor:
        if step == 2:
            side.module.blocks[1].requires_grad_(True)  # type: ignore[union-attr]
            side.optimizer.add_param_group({"params": parameters_of(side, "blocks.1"), "lr": 0.003})
        return language_work(side, step)

    torch.manual_seed(3)
    module = frozen_model("blocks.1")
    twin = Twin(module)
    with Sharded(module, stage=stage) as sharded:
        for side in (sharded, twin):
            for group in side.optimizer.param_groups:
                late = set(map(id, parameters_of(side, "blocks.1")))
                group["params"] = [p for p in group["params"] if id(p) not in late]
        for step in range(4):
            for side in (sharded, twin):
                work(side, step)
                side.step()
                side.zero_grad()
            assert_same(sharded, twin)


def parameters_of(side: Side, name: str) -> list[nn.Parameter]:
    params = list(side.module.get_submodule(name).parameters())
    return [side.masters[p].flat for p in params] if isinstance(side, Twin) else params


class Adapted(nn.Module):
    """A frozen linear layer with a small trainable detour."""

    def __init__(self, width: int = 19, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x))) + x


@on_ranks(2, full=(3,))
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
def test_adapters_beside_frozen_weights(stage: int, precision: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        dtype = torch.bfloat16 if precision == "bf16_true" else torch.float32
        loss = side.module(floats(step, 4, 19).to(dtype)).float().square().mean()
        side.backward(loss)
        return loss

    check(lambda: nn.Sequential(*(Adapted() for _ in range(4))), work, stage=stage, precision=precision)


class Prompted(nn.Module):
    """Blocks with frozen weights, all of which get one trainable prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.ones(19))
        self.blocks = nn.ModuleList(Block(19) for _ in range(2))
        self.blocks.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.prompt)
            x = x + block(self.prompt)
        return x


@on_ranks(2)
@pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])
def test_inputs_that_outlive_their_graph_keep_no_hooks(plain: bool) -> None:
    """Of backwards, of a forward without one, and of one that failed."""
    leaf = floats(0, 2, 19).requires_grad_()

    def hooks() -> list[Any]:
        return [*(leaf._backward_hooks or {}), *(module.prompt._backward_hooks or {})]

    module = Prompted()
    with Sharded(module, optimizer=sgd, plain=plain, unit={"classes": ["Block"]}) as side:
        for _ in range(2):
            loss = module(leaf).square().mean()
            assert hooks()
            side.backward(loss)
            side.step()
            side.zero_grad()
            assert not hooks()
        module(leaf)
        side.engine.passes.rest()
        assert not hooks()
        with pytest.raises(ZeroDivisionError), side.engine.step_scope():
            module(leaf)
            raise ZeroDivisionError
        assert not hooks()
        side.backward(module(leaf).square().mean())
        assert leaf.grad is not None and not hooks()


# -- unused -----------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three blocks of which a forward takes some; a whole unit and parts of units may go unused."""

    def __init__(self, width: int = 19) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.extra = nn.Linear(width, width)

    def forward(self, x: Tensor, take: tuple[int, ...], extra: bool) -> Tensor:
        for i in take:
            x = self.blocks[i](x)
        return self.extra(x) if extra else x


def dampened_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


def branch_work(side: Side, step: int, *, paths: Any) -> Tensor:
    loss = side.module(floats(step, 4, 19), *paths(step)).square().mean()
    side.backward(loss)
    return loss


@on_ranks(2, full=(3,))
@STAGES
@pytest.mark.parametrize("optimizer", [adamw, sgd, dampened_sgd])
def test_parameters_that_no_rank_uses_are_left_alone(stage: int, optimizer: Any) -> None:
    """No decay, no state, no step count: the twin's gradient is None there."""
    paths = [((0, 2), False), ((0, 1, 2), True), ((0, 2), False), ((1,), False), ((0, 1, 2), True)]
    work = functools.partial(branch_work, paths=lambda step: paths[step])
    tolerance = 1e-6 if optimizer is dampened_sgd else 0.0
    check(Branches, work, steps=5, stage=stage, optimizer=optimizer, tolerance=tolerance)


@on_ranks(2, 3)
@pytest.mark.parametrize(
    "config",
    [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "dynamic_graph": True},
        {"stage": 2, "reduce_bucket_bytes": 3000},  # fewer bytes in flight than one rank has to give at once
        {"stage": 3, "reduce_bucket_bytes": 3000, "prefetch_bytes": 0},
        {"stage": 3, "reduce_bucket_bytes": 3000, "dynamic_graph": True},
    ],
    ids=str,
)
def test_parameters_that_some_ranks_use(config: dict[str, Any]) -> None:
    def paths(step: int) -> Any:
        rank = dist.get_rank()
        return ((0, 1, 2) if rank == 0 else (0, 2)), rank == dist.get_world_size() - 1

    check(Branches, functools.partial(branch_work, paths=paths), stall_timeout_s=10, **config)


@on_ranks(2)
@STAGES
def test_unused_parts_of_a_unit(stage: int) -> None:
    class Half(nn.Module):
        def __init__(self, width: int = 19) -> None:
            super().__init__()
            self.used = nn.Linear(width, width)
            self.unused = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    check(lambda: nn.Sequential(Half(), Half()), mean_square, stage=stage)


@on_ranks(2)
@OUTER_STAGES
def test_an_outputs_that_is_not_used(stage: int) -> None:
    class Two(nn.Module):
        def __init__(self, width: int = 19) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(nn.Sequential(Two()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x, _ = step(x)
            return x

    check(Chain, mean_square, stage=stage)


# -- shapes, dtypes, buffers ------------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """0-d, one element, empty, odd, non-contiguous: every parameter takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.empty = nn.Parameter(torch.ones(0, 5))
        self.odd = nn.Parameter(torch.randn(3, 1, 7))
        self.turned = nn.Parameter(torch.randn(5, 19).t())

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.turned * self.scale + self.one + self.empty.sum()
        return torch.cat([x + y.sum(1, keepdim=True) + self.odd.sum(), y], 1)[:, :19]


@on_ranks(3, full=(1, 2))
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
def test_odd_shapes(stage: int, precision: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        dtype = torch.bfloat16 if precision == "bf16_true" else torch.float32
        loss = side.module(floats(step, 4, 19).to(dtype)).float().square().mean()
        side.backward(loss)
        return loss

    check(
        lambda: nn.Sequential(nn.Sequential(Shapes()), nn.Sequential(Shapes())), work, stage=stage, precision=precision
    )


class Images(nn.Module):
    """Convolutions whose weights lie in memory as kernels for such images want them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU()) for _ in range(3))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        for conv in self.convs:
            assert conv[0].weight.is_contiguous(memory_format=torch.channels_last)
            x = conv(x) + x
        return x


@on_ranks(2)
@STAGES
def test_weights_keep_their_order_in_memory(stage: int) -> None:
    def work(side: Side, step: int) -> Tensor:
        loss = side.module(floats(step, 2, 4, 6, 6)).square().mean()
        side.backward(loss)
        return loss

    check(Images, work, stage=stage)


@on_ranks(2)
@OUTER_STAGES
def test_values_and_states_go_in_and_out_whatever_their_order_in_memory(stage: int) -> None:
    """Into a module whose weights lie otherwise, by value."""
    torch.manual_seed(3)

    def step_of(side: Sharded, step: int) -> Tensor:
        loss = side.module(floats(step, 2, 4, 6, 6).contiguous()).square().mean()
        side.backward(loss)
        side.step()
        side.zero_grad()
        return loss.detach()

    turned, straight = Images(), Images()
    with Sharded(turned, stage=stage, optimizer=adamw) as side:
        step_of(side, 0)
        weights = {name: value.contiguous() for name, value in side.engine.state_dict(only_rank_0=False).items()}
        states = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)
        expected = step_of(side, 1), step_of(side, 2)
    with Sharded(straight, stage=stage, optimizer=adamw) as side:
        side.engine.load_state_dict(weights)
        for state in states["state"].values():
            state.update({k: v.contiguous() for k, v in state.items() if isinstance(v, Tensor)})
        state_dicts.load_optimizer_state(side.engine, side.optimizer, states)
        assert (step_of(side, 1), step_of(side, 2)) == expected


@on_ranks(2, 3)
@STAGES
def test_fewer_elements_than_ranks(stage: int) -> None:
    check(lambda: nn.Linear(2, 1, bias=False), functools.partial(mean_square, width=2), stage=stage)


@on_ranks(2)
@OUTER_STAGES
def test_integer_parameters_survive(stage: int) -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(-5, 6).repeat(2), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(22))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1] * (self.codes * self.scale)

    check(lambda: nn.Sequential(nn.Sequential(Quantized())), mean_square, stage=stage)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_several_dtypes_in_one_module(stage: int, precision: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.randn(19, 19, dtype=torch.float64))
            self.plain = nn.Parameter(torch.randn(19))

        def forward(self, x: Tensor) -> Tensor:
            return (x.double() @ self.wide).to(x.dtype) * self.plain

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.randn(19, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.low.to(x.dtype)

    parts = (Mixed, Narrow) if precision == "fp32" else (Mixed,)
    check(lambda: nn.Sequential(*(nn.Sequential(*(p() for p in parts)) for _ in range(2))), mean_square, stage=stage)


@on_ranks(2)
@STAGES
def test_buffers_follow_the_forward(stage: int) -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 3, 3, padding=1)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.conv(x)))

    def work(side: Side, step: int) -> Tensor:
        loss = F.mse_loss(side.module(floats(step, 4, 3, 9)), torch.ones(()))
        side.backward(loss)
        return torch.cat([loss.detach().view(1), *(b.detach().double().view(-1) for b in side.module.buffers())])

    check(lambda: nn.Sequential(Conv(), Conv()), work, stage=stage)


@on_ranks(2)
def test_buffers_start_with_the_values_of_rank_0_and_keep_their_dtype() -> None:
    module = nn.BatchNorm1d(3)
    module.running_mean += dist.get_rank() + 1
    module.register_buffer("codes", torch.tensor([dist.get_rank()]))
    module.register_buffer("shared", module.codes)
    with Sharded(module, precision="bf16"):
        assert module.running_mean.tolist() == [1.0] * 3
        assert module.running_mean.dtype is torch.float32 and module.codes.dtype is torch.int64
        assert module.codes.item() == 0
        assert module.shared is module.codes


@on_ranks(2)
@OUTER_STAGES
def test_custom_norms_keep_fp32_and_give_back_the_dtype_of_their_input(stage: int) -> None:
    class MyRMSNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            return x.float() * self.weight

    module = nn.Sequential(*(nn.Sequential(MyRMSNorm(19), nn.Linear(19, 19)) for _ in range(2)))
    seen: list[torch.dtype] = []
    with Sharded(module, stage=stage, precision="bf16"):
        module[1][0].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            module(floats(0, 2, 19))
        assert seen == [torch.bfloat16]
        assert module[0][0].weight.dtype is torch.float32
        assert module[0][1].weight.dtype is torch.bfloat16


# -- start ------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_everyone_starts_with_the_unrounded_values_of_rank_0(stage: int, precision: str) -> None:
    torch.manual_seed(dist.get_rank())
    module = Model()
    torch.manual_seed(0)
    expected = Model()
    with Sharded(module, stage=stage, precision=precision), lightning_zero.gather(module):
        for own, other in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.equal(own, other)


class TiedMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 19)
        self.blocks = nn.ModuleList(Block(19) for _ in range(2))
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(19, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


@on_ranks(2)
@STAGES
def test_meta_modules_are_materialised_with_ties(stage: int) -> None:
    with torch.device("meta"):
        module = TiedMeta()
    before = dict(module.named_parameters(remove_duplicate=False))
    with Sharded(module, stage=stage) as side:
        assert module.head.weight is module.embed.weight
        for name, param in module.named_parameters(remove_duplicate=False):
            assert param is before[name] and not param.is_meta
        assert not any(b.is_meta for b in module.buffers())
        assert module.norm.running_var.tolist() == [1.0] * 7
        with lightning_zero.gather(module):
            assert all(p.isfinite().all() for p in module.parameters())
            assert 0.5 < module.embed.weight.std() < 1.5
        for step in range(2):
            language_work(side, step)
            side.step()
            side.zero_grad()


class Marked(nn.Parameter):
    """A class of a user's own."""


@on_ranks(1)
@OUTER_STAGES
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
    assert weight._no_weight_decay
    assert isinstance(weight, Marked)
    with engine.step_scope("train"):
        module(torch.ones(3, 2, 5, device=device))[0].sum().backward()
    assert seen == ["hook", "later", "after"]
    assert all(p.grad is not None for p in module.parameters())  # our own hooks were called too
    engine.release()
    assert type(weight) is Marked


@on_ranks(1, 2)
def test_a_meta_module_without_reset_parameters_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    module = nn.Sequential(nn.Linear(3, 3), Bare())
    with pytest.raises(ValueError, match=r"module 1 \(Bare\).*reset_parameters"):
        lightning_zero.shard(module, device="cpu")


@on_ranks(2)
@STAGES
def test_the_state_of_empty_parameters_is_that_of_a_plain_optimizer(stage: int) -> None:
    module = nn.Sequential(nn.Sequential(Shapes()), nn.Sequential(Shapes()))
    plain = copy.deepcopy(module)
    plain_optimizer = adamw(plain.parameters())
    with Sharded(module, stage=stage) as side:
        for step in range(2):
            mean_square(side, step)
            plain(floats(step, 4, 19)).mean().backward()
            for optimizer in (side.optimizer, plain_optimizer):
                optimizer.step()
        whole = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)
        state = whole["state"]
        expected = plain_optimizer.state_dict()["state"]
        assert state.keys() == expected.keys()
        for number, values in expected.items():
            assert {n: v.shape for n, v in values.items()} == {n: v.shape for n, v in state[number].items()}
            assert state[number]["step"] == values["step"] == 2
        state_dicts.load_optimizer_state(side.engine, side.optimizer, whole)
        mean_square(side, 2)
        side.step()
        again = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)["state"]
        assert {n: int(values["step"]) for n, values in again.items()} == dict.fromkeys(expected, 3)


def test_a_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"parameter 0\.weight has no shape yet.*lazy.*configure_model"):
        lightning_zero.shard(nn.Sequential(nn.LazyLinear(3)), device="cpu")


class Wrapped(Tensor):
    """As the quantised and float8 weights of torchao: what is computed is computed with the tensor inside."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        wrapper: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Wrapped, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return Wrapped(result) if func is torch.ops.aten.detach.default else result


@pytest.mark.parametrize("trainable", [True, False])
@STAGES
def test_a_parameter_around_other_tensors_is_refused_by_name_and_class(stage: int, trainable: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(Wrapped(module[1].weight.detach()), requires_grad=trainable)
    with pytest.raises(ConfigError, match=r"parameter 1\.weight is a Wrapped, a wrapper.*after training"):
        lightning_zero.shard(module, stage=stage, device="cpu")


# -- hooks of the user on parameters -----------------------------------------------------------------------------------


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

    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=stage >= 2)
    if when == "before":
        register(module)
    with Sharded(module, stage=stage, plain=plain) as sharded:
        if when == "after":
            register(module)
        for step in range(2):
            if when == "in the step" and step == 0:
                loss = language_loss(module, tokens(0))
                register(module)
                sharded.backward(loss)
            else:
                language_work(sharded, step)
            loss = language_loss(twin.module, tokens(step))
            twin.backward(loss)
            for param in (twin.module.head.weight, twin.module.blocks[1].up.bias):
                twin.grads[param].mul_(2)
            assert_same(sharded, twin, grads=True)
            for side in (sharded, twin):
                side.step()
                side.zero_grad()
    assert len(seen) == 4 and all(grad.isfinite().all() and grad.any() for grad in seen)


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
        module.blocks = nn.ModuleList([module.blocks[0], Repeated(module.blocks[1])])
    with Sharded(module, stage=stage, plain=plain) as side:
        for step in range(2 if how != "one backward" else 0):  # gradients that are cleared are no sum
            language_work(side, step)
            side.zero_grad()
        with pytest.raises(RuntimeError, match=r"hook .* on blocks\.1\S*\.up\.weight.*param\.register_hook"):
            with side.engine.passes.no_sync() if how == "no_sync" else contextlib.nullcontext():
                language_work(side, 0)
            language_work(side, 1)
        side.zero_grad()
        handle.remove()
        for step in range(2):
            language_work(side, step)
        side.step()


class Repeated(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x
