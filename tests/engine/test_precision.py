"""Modules of every kind compute in every precision as they do without us."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import lightning_zero
from lightning_zero.comm.transports import DirectTransport
from lightning_zero.optimizers.loss_scale import LossScaler
from lightning_zero.settings import ConfigError, make_config
from lightning_zero.trainer.steps import differing_replicas
from tests.engine.sides import TRUE, Sharded, Twin, adamw, sgd, step_and_clear, with_twin
from tests.engine.support import IN_STAGES, assert_equal, assert_same, check
from tests.engine.test_offload import compare, train
from tests.engine.works import autocast, floats, language_work
from tests.harness import on_ranks
from tests.models import Does, Model, linear

pytestmark = pytest.mark.sample  # the full tier has all cases

OUTER_STAGES = pytest.mark.parametrize("stage", [0, 3])
WIDTH = 16


def takes_two() -> nn.Module:
    """A layer of two inputs; one comes from another layer, and so in lower precision under autocast."""
    return Does(lambda m, x: m.both(m.first(x), x), first=linear(WIDTH), both=nn.Bilinear(WIDTH, WIDTH, WIDTH))


def looks_up() -> nn.Module:
    act = lambda m, x: m.last(m.table(torch.arange(len(x)) % 5) + x)  # noqa: E731
    return Does(act, table=nn.Embedding(5, WIDTH, sparse=True), last=linear(WIDTH))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm before": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm before": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "bilinear": takes_two,
    "sparse": looks_up,
}


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_true", "fp16_true", "fp64"])
@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.mainly(
    lambda stage, precision, name: stage == 3 and (precision in ("bf16", "bf16_true") or name == "sparse")
)
def test_gradients_are_near_those_of_the_plain_module(stage: int, precision: str, name: str) -> None:
    """Under autocast nearly: the plain module rounds weights at each use, we do it once."""
    torch.manual_seed(3)
    module = nn.Sequential(*(nn.Sequential(MODULES[name]()) for _ in range(2)))
    plain = nn.Sequential(*(nn.Sequential(MODULES[name]()) for _ in range(2)))
    plain.load_state_dict(module.state_dict())
    dtype = TRUE.get(precision, torch.float32)
    if precision in TRUE:
        plain.to(dtype)
    if name == "bilinear" and precision in ("bf16", "fp16"):  # torch refuses it there
        for inner in plain.modules():
            if isinstance(inner, nn.Bilinear):
                inner.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
    x = floats(0, 10, WIDTH).to(dtype)
    with autocast(precision):
        expected = plain(x).float().square().mean()
    expected.backward()
    with Sharded(module, stage=stage, precision=precision, optimizer=sgd) as side:
        with autocast(precision):
            loss = module(x).float().square().mean()
        side.backward(loss)
        near = {"fp64": 1e-6, "fp16": 1e-2, "fp16_true": 1e-2}.get(precision, 6e-2)
        torch.testing.assert_close(loss, expected, rtol=near, atol=near)
        with lightning_zero.gather(module, grads=True):
            gaps, sizes = [], []
            for own, other in zip(module.parameters(), plain.parameters(), strict=True):
                assert own.grad is not None and other.grad is not None
                mean = other.grad.to_dense().double() / dist.get_world_size()
                dist.all_reduce(mean)
                gaps.append((own.grad.double() - mean).norm())
                sizes.append(mean.norm())  # that of a bias before a batch norm is rounding alone
            assert max(gaps) < 2 * near * max(sizes)
        for own_buffer, other_buffer in zip(module.buffers(), plain.buffers(), strict=True):
            assert own_buffer.dtype == other_buffer.dtype
        side.step()


@on_ranks(2, full=(3,))
@IN_STAGES
@pytest.mark.parametrize("precision", ["fp64", "fp16_true"])
def test_rows_of_one_dtype_train_as_a_plain_copy(stages: tuple[int, ...], precision: str) -> None:
    def with_eps(params: Any) -> torch.optim.Optimizer:  # torch's own is zero in fp16
        return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True, eps=1e-4)

    for optimizer in (sgd, with_eps if precision == "fp16_true" else adamw):
        check(Model, language_work, stage=stages, precision=precision, optimizer=optimizer)


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norms_under_fp64_are_not_rounded_to_fp32(stage: int, norm_type: float) -> None:
    with with_twin(stage=stage, precision="fp64") as sides:
        for side in sides:
            language_work(side, 0)
        own, expected = (side.clip(1e-3, norm_type) for side in sides)
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=0)
        assert_same(*sides, grads=True, tolerance=1e-13)


@on_ranks(2)
@pytest.mark.parametrize("row", ["optimizer_cpu", "cpu"])
@pytest.mark.parametrize("precision", ["fp64", "fp16_true"])
def test_rows_of_one_dtype_are_offloaded(row: str, precision: str, tmp_path: Path) -> None:
    compare(row, 3, tmp_path, lambda side: train(side, 3), precision=precision, optimizer=sgd)


@pytest.mark.parametrize("name", ["fp64", "fp16_true"])
@pytest.mark.parametrize("key", ["reduce_dtype", "grad_dtype"])
def test_dtypes_of_gradients_are_those_of_the_row(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"zero\.precision\.{key}: expected none under zero/precision={name}"):
        make_config(precision={"name": name, key: "bf16"})


class Narrow(Twin):
    """Its gradients are added up over the ranks in bf16, and rest in fp32."""

    def _is_divided_later(self, param: nn.Parameter) -> bool:
        return False

    def _average(self) -> None:
        self._local = {param: grad.to(torch.bfloat16) for param, grad in self._local.items()}
        self._reduce_dtype = torch.bfloat16
        super()._average()
        self.grads = {param: grad.float() for param, grad in self.grads.items()}

    def _take(self) -> None:
        self._reduce_dtype = torch.float32  # until they travel they are as exact as they came
        super()._take()


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_travel_in_bf16_if_that_is_chosen(stage: int, together: bool) -> None:
    """Half of the bytes; what is added up over micro-batches stays in fp32."""
    torch.manual_seed(3)
    module = Model()
    twin = Narrow(module, precision="bf16")
    with (
        mock.patch.object(DirectTransport, "reduce", autospec=True, side_effect=DirectTransport.reduce) as reduce,
        Sharded(module, stage=stage, precision={"name": "bf16", "reduce_dtype": "bf16"}) as side,
    ):
        for grads in side.engine.passes.reducer.grads.values():
            grads.batched_copy = together  # as on a device
        for step in range(3):
            for one in (side, twin):
                with autocast("bf16"):
                    language_work(one, step)
            assert_same(side, twin, grads=True, what=f"step {step}, after backward: ")
            assert all(bucket.grad.dtype is torch.float32 for bucket in side.engine.buckets if bucket.grad is not None)
            step_and_clear(side, twin)
            assert_same(side, twin, what=f"step {step}: ")
    assert {call.args[1].dtype for call in reduce.call_args_list} == {torch.bfloat16}


@on_ranks(2)
@OUTER_STAGES
def test_a_module_that_needs_fp32_has_it_by_the_setting(stage: int) -> None:
    def build() -> nn.Module:  # with an operation that takes one dtype only, and that autocast does not know
        lerp = Does(lambda m, x: torch.lerp(x.float(), m.weight, 0.5), weight=nn.Parameter(torch.ones(WIDTH)))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), lerp)

    x = floats(0, WIDTH, WIDTH)
    with Sharded(build(), stage=stage, precision="bf16") as side, autocast("bf16"):
        with pytest.raises(RuntimeError):
            side.module(x)
        side.engine.passes.abort()
    for pattern in ("Does", "1.*"):
        precision = {"name": "bf16", "fp32_modules": [pattern]}
        with Sharded(build(), stage=stage, precision=precision) as side, autocast("bf16"):
            side.backward(side.module(x).square().mean())
    for pattern in ("2.*", "1"):  # of no module; a name without a dot, which is no class
        with pytest.raises(ConfigError, match=rf"fp32_modules'\]: expected .*, got '{re.escape(pattern)}'"):
            Sharded(build(), stage=stage, precision={"name": "bf16", "fp32_modules": [pattern]})


@on_ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_norms_in_fp32_are_one_bucket_of_the_root_that_all_ranks_have(precision: str) -> None:
    """Also behind a restage, and where each is a unit. A module with a matrix stays in its unit, with its bias."""

    def build() -> nn.Module:
        parts = [linear(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]
        act = Does(lambda m, x: m.two(x, x), two=nn.Bilinear(WIDTH, WIDTH, WIDTH))
        return nn.Sequential(*parts, act, nn.BatchNorm1d(WIDTH, affine=False))

    def names() -> list[list[str]]:
        return [[info.fqns[0] for info in bucket.params] for bucket in engine.buckets if bucket.plan.whole]

    for classes in (["Linear", "LayerNorm"], ["LayerNorm", "Bilinear"]):
        module = build()
        with Sharded(module, stage=3, precision=precision, unit={"classes": classes}) as side:
            engine = side.engine
            norms = [[f"{n}.{name}" for n in (1, 2) for name in ("weight", "bias")]] * (precision == "bf16")
            for stage in ("zero3", "zero1", "zero3"):
                engine.restage(stage, "none")
                assert names() == norms
                for context in (side.no_sync, contextlib.nullcontext):
                    with context(), autocast(precision):
                        side.backward(module(floats(0, 4, WIDTH)).float().square().mean())
                    if stage == "zero3":  # there each backward reduces
                        assert lightning_zero.grad_norm(module) > 0
                side.step()
                side.zero_grad()
            assert not differing_replicas(engine).any()
            if norms and dist.get_rank():
                module[1].weight.data[3] = 5.0  # as a GPU that computes wrongly would
            assert differing_replicas(engine).tolist() == [bool(norms), *[False] * (len(engine.units) - 1)]


class Packed(nn.Parameter):
    """Holds bytes, as bitsandbytes' ``Params4bit`` does with ``quant_storage=torch.float16``."""

    quant_state = 500.0


def decodes() -> nn.Module:
    """A frozen layer whose weight is decoded from the bytes."""

    def act(m: Any, x: Tensor) -> Tensor:
        weight = (m.weight.view(torch.uint8).to(x.dtype) - 127.5) / m.weight.quant_state
        return x @ weight + m.adapter(x)

    packed = torch.randint(0, 256, (WIDTH, WIDTH), dtype=torch.uint8)
    return Does(act, weight=Packed(packed.view(torch.float16), requires_grad=False), adapter=linear(WIDTH))


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("precision", ["bf16", "bf16_true", "fp64"])
def test_bytes_in_a_frozen_parameter_are_not_cast(stage: int, precision: str) -> None:
    bytes_of = lambda layer: layer.weight.detach().view(torch.uint8).clone()  # noqa: E731
    torch.manual_seed(0)
    module = nn.Sequential(decodes(), decodes())
    before = [bytes_of(layer) for layer in module]

    def loss(step: int) -> Tensor:
        with autocast(precision):
            return module(floats(step, 4, WIDTH).to(TRUE.get(precision, torch.float32))).float().square().mean()

    with Sharded(module, stage=stage, precision=precision, optimizer=sgd) as side:
        for step in range(2):
            side.backward(loss(step))
            side.step()
        with lightning_zero.gather(module):
            assert_equal([bytes_of(layer) for layer in module], before)
        state = side.engine.state_dict(only_rank_0=False)
        assert torch.equal(state["1.weight"].view(torch.uint8), before[1])
        seen: list[Tensor] = []
        for layer in module:
            layer.register_forward_hook(lambda layer, args, out: seen.append(bytes_of(layer)))
        with side.engine.step_scope("validation", evaluation=True), torch.no_grad():
            loss(9)
        assert_equal(seen, before)


class Product(torch.autograd.Function):
    """A product with a weight that is decoded from bytes. Its backward decodes bytes that autograd does not know of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.packed = packed
        return x @ (packed.to(x.dtype) - 127.5) / Packed.quant_state

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad @ (ctx.packed.to(grad.dtype) - 127.5).t() / Packed.quant_state, None


@on_ranks(2)
def test_bytes_that_a_backward_reads_without_autograd_are_there() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(*[decodes() for _ in range(3)])
        for layer in layers:  # the backward of what comes last is the first
            layer.act = lambda m, x: m.adapter(x) + Product.apply(x, m.weight.view(torch.uint8))
        return layers

    module, twin = build(), build()
    x = floats(0, 4, WIDTH, rank=0)  # for all ranks
    twin(x).square().mean().backward()
    with Sharded(module, stage=3, optimizer=sgd) as side:
        side.backward(module(x).square().mean())
        with lightning_zero.gather(module, grads=True):
            torch.testing.assert_close(module[0].adapter.weight.grad, twin[0].adapter.weight.grad)


@on_ranks(1)
@pytest.mark.parametrize("first", [2.0**16, 2.0**126])
def test_scales_are_those_of_torch_up_to_the_largest(first: float) -> None:
    """A scale that fp32 cannot hold would make every loss infinite, and skip a step."""
    ours = LossScaler(first, growth_interval=2)
    theirs = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=2)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param])
    for step in range(8):
        overflowed = first < 2.0**100 and step == 5
        param.grad = theirs.scale(torch.full((1,), float("inf") if overflowed else 0.0))
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflowed=overflowed)
        assert ours.scale == theirs.get_scale(), step
        assert ours.state_dict()["_growth_tracker"] == theirs.state_dict()["_growth_tracker"], step
