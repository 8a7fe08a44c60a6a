"""``zero.precision.float8``: torchao's linear layers, emulated on a CPU, under the engine."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.engine import Engine
from lightning_zero.layerwise import float8
from lightning_zero.settings import ConfigError, Precision, make_config
from tests.engine.support import assert_equal
from tests.harness import on_ranks
from tests.models import Does

WIDTH = 32
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def block() -> nn.Module:
    def act(m: Any, x: Tensor) -> Tensor:
        return x + m.down(F.gelu(m.up(m.norm(x)))) + m.small(x).sum(-1, keepdim=True)

    parts = {"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 64), "down": nn.Linear(64, WIDTH)}
    return Does(act, **parts, small=nn.Linear(WIDTH, 3))  # 16 does not divide it


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(block(), block())
    return Does(lambda m, x: m.lm_head(m.blocks(x)), blocks=blocks, lm_head=nn.Linear(WIDTH, 16))


def train(module: nn.Module, engine: Engine | None = None) -> list[float]:
    """All ranks have the whole batch, so that the scales of activations are those of one process."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    mixed = engine is not None and engine.config.precision.name is Precision.bf16
    if engine is not None:
        engine.add_optimizer(optimizer)
    losses = []
    for step in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
            loss = module(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def sharded(settings: dict[str, Any], stage: int, offload: str = "none") -> tuple[Engine, list[float]]:
    module = model()
    engine = lightning_zero.shard(module, stage=stage, offload=offload, precision=settings)
    return engine, train(module, engine)


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_every_stage_gives_the_losses_of_torchao_in_one_process(recipe: str) -> None:
    from torchao import float8 as torchao

    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    plain = torchao.convert_to_float8_training(
        model(), config=config, module_filter_fn=lambda _, name: name.endswith(("up", "down"))
    )
    expected, without = train(plain), model()
    assert train(without) != expected
    half = []
    for stage, offload in [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "cpu")]:
        engine, losses = sharded({"name": "fp32", "float8": recipe}, stage, offload)
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
        # The state dict is that of plain linear layers.
        assert list(engine.state_dict(only_rank_0=False)) == list(without.state_dict())
        half.append(sharded({"name": "bf16", "float8": recipe}, stage, offload)[1])
    assert half == half[:1] * 5


def in_float8(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if type(part).__name__ == "Float8Linear"]


@needs_torchao
@on_ranks(1)
def test_each_run_converts_the_layers_that_its_settings_choose() -> None:
    module = model()
    runs: list[tuple[str, list[str], list[str]]] = [
        ("tensorwise", ["*head", "*down"], ["blocks.0.up", "blocks.1.up"]),
        ("rowwise", ["blocks.0.*"], ["blocks.1.up", "blocks.1.down", "lm_head"]),
        ("none", ["*head", "*output"], []),
    ]
    for recipe, exclude, expected in runs:
        settings = {"name": "fp32", "float8": recipe, "float8_exclude": exclude}
        lightning_zero.shard(module, precision=settings).release()
        assert in_float8(module) == expected
        for name in expected:
            scales: Any = module.get_submodule(name).config
            assert scales.cast_config_weight.scaling_granularity.value == {"rowwise": "axiswise"}.get(recipe, recipe)
    assert vars(module.lm_head).keys() == vars(model().lm_head).keys()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@needs_torchao
@on_ranks(1)
def test_layers_stay_the_objects_that_they_were() -> None:
    first = nn.Linear(WIDTH, WIDTH).eval()
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    module = nn.ModuleDict({"first": first, "again": first, "own": Doubled(WIDTH, WIDTH), "norm": parametrized})
    seen: list[Any] = []
    first.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(4, WIDTH)
    before = first(x), module["own"](x), module["norm"](x)
    lightning_zero.shard(module, stage=2, precision={"name": "fp32", "float8": "rowwise"})
    assert module["first"] is module["again"] is first and not first.training and in_float8(module) == ["first"]
    assert 0 < (first(x) - before[0]).abs().max() < 0.2 and len(seen) == 2
    torch.testing.assert_close((module["own"](x), module["norm"](x)), before[1:])


@needs_torchao
@on_ranks(2)
def test_a_module_on_meta_trains_the_same_and_its_state_loads_into_plain_layers() -> None:
    precision = {"name": "bf16", "float8": "rowwise"}
    expected, losses = sharded(precision, 3)
    with torch.device("meta"):
        module = model()
    engine = lightning_zero.shard(module, stage=3, precision=precision, sources=model().state_dict())
    assert train(module, engine) == losses
    plain = model()
    plain.load_state_dict(engine.state_dict(only_rank_0=False))
    with lightning_zero.gather(expected.module):
        assert_equal(dict(plain.named_parameters()), dict(expected.module.named_parameters()))


@needs_torchao
@on_ranks(1)
def test_on_a_gpu_small_layers_stay_and_batches_of_any_size_are_padded() -> None:
    """A GPU multiplies matrices of multiples of 16; the CPU, which takes all, stands in for it."""
    module = nn.Sequential(nn.Linear(WIDTH, 1040), nn.Linear(1040, WIDTH))
    with mock.patch.object(torch.cuda, "get_device_capability", lambda _: (8, 9)):
        float8.convert(module, make_config(precision="float8").precision, torch.device("cuda", 0))
    assert in_float8(module) == ["0"]
    sizes: list[int] = []
    multiply = torch._scaled_mm

    def noting(a: Tensor, b: Tensor, *more: Any, **settings: Any) -> Tensor:
        sizes.extend((a.shape[1], *b.shape))
        return multiply(a, b, *more, **settings)

    with mock.patch.object(torch, "_scaled_mm", noting):
        module(torch.randn(5, WIDTH, requires_grad=True)).sum().backward()
    assert len(sizes) == 9 and not any(size % 16 for size in sizes)


def test_what_cannot_be_in_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"zero\.precision\.float8: expected none under zero/precision=fp16, got row"):
        make_config(precision={"name": "fp16", "float8": "rowwise"})
    with pytest.raises(ConfigError, match=r"zero\.precision\.float8_exclude: expected its default with .*float8=none"):
        make_config(precision={"float8_exclude": ["up"]})
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"a GPU of compute capability 8\.0, got rowwise: .* Choose zero/prec"):
        float8.convert(model(), make_config(precision={"float8": "rowwise"}).precision, gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"tensorwise needs torchao, .* Run pip install torchao"):
        ZeroStrategy(precision="float8")


def test_the_name_means_what_its_file_says() -> None:
    assert make_config(precision="float8") == make_config(precision={"name": "bf16", "float8": "tensorwise"})


@needs_torchao
@on_ranks(1)
def test_modules_without_a_layer_for_it_and_with_one_of_fsdp_are_refused() -> None:
    from torchao import float8 as torchao

    with pytest.raises(ConfigError, match=r"expected layers of nn\.Linear with sizes that are .* got none in Does"):
        sharded({"name": "fp32", "float8": "rowwise", "float8_exclude": ["*"]}, 3)
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    module = torchao.convert_to_float8_training(model(), config=config)
    says = r"parameter blocks\.0\.up\.weight is a Weight.* train in float8 with precision='float8'"
    with pytest.raises(ConfigError, match=says):
        lightning_zero.shard(module, stage=2)
