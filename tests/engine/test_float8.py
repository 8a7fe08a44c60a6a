"""``zero.precision.float8``: torchao's linear layers, emulated on a CPU, under the engine."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError, make_config
from lightning_zero.engine import Engine
from lightning_zero.layerwise import float8
from tests.harness import on_ranks

STEPS, WIDTH = 3, 32
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.small = nn.Linear(WIDTH, 3)  # 16 does not divide it

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y + self.small(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, *, autocast: bool) -> list[float]:
    """All ranks have the whole batch, so that the scales of activations are those of one process."""
    losses = []
    for step in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = module(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def sharded(settings: dict[str, Any], stage: int, offload: str = "none", **more: Any) -> tuple[Engine, list[float]]:
    module = model()
    engine = lightning_zero.shard(module, stage=stage, offload=offload, precision=settings, **more)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    engine.add_optimizer(optimizer)
    return engine, train(module, optimizer, autocast=settings["name"] == "bf16")


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
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), autocast=False)
    without = model()
    assert train(without, torch.optim.AdamW(without.parameters(), lr=1e-2), autocast=False) != expected
    half = []
    for stage, offload in [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "cpu")]:
        engine, losses = sharded({"name": "fp32", "float8": recipe}, stage, offload)
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
        # The state dict is that of plain linear layers.
        assert list(engine.state_dict(only_rank_0=False)) == list(model().state_dict())
        half.append(sharded({"name": "bf16", "float8": recipe}, stage, offload)[1])
    assert half == half[:1] * 5


@needs_torchao
@on_ranks(1)
def test_a_module_is_converted_once_and_without_its_excluded_layers() -> None:
    engine, _ = sharded({"name": "fp32", "float8": "rowwise", "float8_exclude": ["blocks.0.*"]}, 3)
    module = engine.module
    assert isinstance(module, Model)
    kinds = {name: type(part).__name__ for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == {
        "blocks.1.up",
        "blocks.1.down",
        "lm_head",
    }
    layers = [module.blocks[1].up, module.lm_head]
    engine.release()
    lightning_zero.shard(module, precision={"name": "fp32", "float8": "rowwise", "float8_exclude": ["blocks.0.*"]})
    assert [module.blocks[1].up, module.lm_head] == layers


def test_what_cannot_be_in_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"zero\.precision\.float8: expected none under zero/precision=fp16, got row"):
        make_config(precision={"name": "fp16", "float8": "rowwise"})
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"a GPU of compute capability 8\.0, got rowwise: .* Choose zero/prec"):
        float8.convert(model(), make_config(precision={"float8": "rowwise"}).precision, gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"tensorwise needs torchao, .* Install it \(pip install"):
        ZeroStrategy(precision="float8")


def test_the_name_means_what_its_file_says() -> None:
    assert make_config(precision="float8") == make_config(precision={"name": "bf16", "float8": "tensorwise"})


@needs_torchao
@on_ranks(1)
def test_without_a_layer_for_it_float8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected linear layers whose sizes 16 divides, .* got none in Model"):
        sharded({"name": "fp32", "float8": "rowwise", "float8_exclude": ["*"]}, 3)


@needs_torchao
@on_ranks(1)
def test_weights_for_float8_gathers_of_fsdp_are_refused() -> None:
    from torchao import float8 as torchao

    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    module = torchao.convert_to_float8_training(copy.deepcopy(model()), config=config)
    with pytest.raises(ConfigError, match="parameter blocks.0.up.weight"):
        lightning_zero.shard(module, stage=2)
