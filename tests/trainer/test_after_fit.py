"""After a run the module is whole again, on any rank alone."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError
from lightning_zero.engine import engine_of
from lightning_zero.engine.whole import host_copy
from tests.harness import on_ranks
from tests.trainer.toys import ALL_STAGES, Lit, Samples, assert_same, assert_weights, fit, loader, record, seeded, trainer


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@on_ranks(2)
@pytest.mark.parametrize("stage", ALL_STAGES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_one_rank_alone_does_what_it_likes_with_the_module(stage: str, precision: str, tmp_path: Path) -> None:
    run = fit(stage, tmp_path, seeded(Lit), precision=precision)
    module = run.module
    assert type(module.first.weight) is nn.Parameter
    assert_weights(values(module), run.weights, tolerance=0)
    if dist.get_rank() == 1:
        x = Samples()[0][0][None].to(module.dtype)
        out = module(x)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        assert_weights(torch.load(file), run.weights, tolerance=0)
        twin = copy.deepcopy(module)
        assert engine_of(twin) is None and torch.equal(twin(x), out)
        twin(x).sum().backward()
        module(x).sum().backward()
        assert torch.equal(module.first.weight.grad, twin.first.weight.grad)
        module.half()
        module.to(run.weights["first.weight"].dtype)
        module.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_what_is_written_is_what_the_next_fit_starts_from(stage: str, tmp_path: Path) -> None:
    def body(strategy: Any) -> Any:
        of = trainer(strategy, tmp_path, max_epochs=1)
        module = seeded(Lit)
        of.fit(module, loader())
        with torch.no_grad():
            module.head.weight.mul_(2.0)
            module.blocks[0].up.weight.data.fill_(0.01)
        saved = tmp_path / f"{strategy}.ckpt"
        of.save_checkpoint(saved)
        assert torch.equal(torch.load(saved, weights_only=False)["state_dict"]["head.weight"], module.head.weight)
        of.test(module, loader(), verbose=False)
        of.fit_loop.max_epochs = 2
        of.fit(module, loader())
        return record(of, module), values(module)

    expected, whole = body("ddp")
    found, own = body(stage)
    assert_same(found, expected)
    assert_weights(own, whole)


@on_ranks(2)
def test_other_values_on_some_ranks_are_refused_on_all(tmp_path: Path) -> None:
    run = fit("zero3", tmp_path, seeded(Lit), max_epochs=1)
    with torch.no_grad():
        run.module.head.weight.fill_(float(dist.get_rank()))
    with pytest.raises(RuntimeError, match="head.weight: written to between runs"):
        run.trainer.test(run.module, loader(), verbose=False)


@on_ranks(2)
@pytest.mark.parametrize("after_fit", ["auto", "whole", "sharded"])
def test_without_room_it_stays_sharded(after_fit: str, tmp_path: Path, monkeypatch: Any = None) -> None:
    before, host_copy.available_host_memory = host_copy.available_host_memory, lambda: 1000
    try:
        strategy = ZeroStrategy("zero3", summary=False, after_fit=after_fit)
        module = seeded(Lit)
        if after_fit == "whole":
            with pytest.raises(ConfigError, match=r"zero\.after_fit: .*auto"):
                fit(strategy, tmp_path, module)
            return
        fit(strategy, tmp_path, module)
    finally:
        host_copy.available_host_memory = before
    with pytest.raises(RuntimeError, match=r"trainer\.save_checkpoint.*lightning_zero\.gather\(model\)"):
        module.state_dict()
    with lightning_zero.gather(module):
        module.state_dict()
