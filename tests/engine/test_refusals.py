"""What one rank refuses all refuse, at once, and everything is as before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zero
from lightning_zero.config import ConfigError
from lightning_zero.engine import engine_of, engines
from tests.engine.support import Sharded, language_loss, language_work, sgd, tokens
from tests.harness import on_ranks
from tests.models import Does, Model

pytestmark = [pytest.mark.sample, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]


class Fails(Does):
    def reset_parameters(self) -> None:
        raise ZeroDivisionError("in reset_parameters")


def on_meta(kind: type[nn.Module]) -> nn.Module:
    """A child without values on rank 1, which it cannot get there; on others a layer."""
    if dist.get_rank() != 1:
        return nn.Linear(3, 1, False, device="meta")
    return kind(lambda m, x: x, weight=nn.Parameter(torch.empty(1, 3, device="meta")))


# What rank 1 does otherwise than the others, and what all hear.
Refused = tuple[Callable[[nn.Module, Path], dict[str, Any]], str]


def _add(module: nn.Module, child: nn.Module) -> dict[str, Any]:
    module.add_module("more", child)
    return {}


CASES: dict[str, Refused] = {
    "unit": (lambda m, _: {"unit": {"classes": ["Block" if dist.get_rank() != 1 else "Bloc"]}}, "zero.unit.classes"),
    "lazy": (
        lambda m, _: _add(m, nn.LazyLinear(2)) if dist.get_rank() == 1 else {},
        r"parameter more\.weight has no shape yet.*lazy.*configure_model",
    ),
    "recompute": (
        lambda m, _: {"activation_checkpointing": "blocks", "unit": {"classes": ["Model"] * (dist.get_rank() == 1)}},
        "zero.activation_checkpointing",
    ),
    "folder": (
        lambda m, folder: {"offload": {"name": "nvme", "nvme_path": f"{folder}/{'missing' * (dist.get_rank() == 1)}"}},
        "zero.offload.nvme_path",
    ),
    "variable": (
        lambda m, folder: {"offload": {"name": "nvme", "nvme_path": f"{folder}/${'NOWHERE' * (dist.get_rank() == 1)}"}},
        "NOWHERE",
    ),
    "reset": (lambda m, _: _add(m, on_meta(Fails)), "in reset_parameters"),
    "no reset": (lambda m, _: _add(m, on_meta(Does)), r"module more \(Does\).*reset_parameters"),
}


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("name", list(CASES))
def test_a_module_that_one_rank_cannot_shard(name: str, tmp_path: Path) -> None:
    change, message = CASES[name]
    module = Model()
    before = len(engines())
    started = time.monotonic()
    with pytest.raises(Exception, match=message) as caught:
        lightning_zero.shard(module, device="cpu", stage=3, **change(module, tmp_path))
    assert time.monotonic() - started < 10
    if dist.get_rank() != 1:
        assert isinstance(caught.value, RuntimeError if name == "reset" else ConfigError)
        assert "rank 1" in str(caught.value)
    assert engine_of(module) is None and len(engines()) == before
    assert not list(tmp_path.rglob(f"*{dist.get_rank()}.bin"))
    if name not in ("reset", "no reset", "lazy"):
        language_loss(module, tokens(0)).backward()  # plain, as it was
        assert all(type(p) is nn.Parameter and p.grad is not None for p in module.parameters())
        with Sharded(module, optimizer=sgd) as side:
            language_work(side, 0)
            side.step()


@on_ranks(2, full=(3,))
def test_an_optimizer_that_one_rank_cannot_take() -> None:
    module = Model()
    engine = lightning_zero.shard(module, device="cpu", stage=2)
    kind = torch.optim.LBFGS if dist.get_rank() == 1 else torch.optim.SGD
    optimizer = kind(module.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="LBFGS"):
        engine.add_optimizer(optimizer)
    assert not engine.optimizers and "step" not in optimizer.__dict__
    engine.add_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    engine.release()


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("how", ["module", "in place", "forward"])
def test_cuda_graphs_over_parameters_that_move(how: str) -> None:
    def build(mode: str) -> nn.Module:
        model = Model()
        block = model.blocks[1]
        if how == "module":
            model.blocks[1] = torch.compile(block, mode=mode)
        elif how == "in place":
            block.compile(mode=mode)
        else:
            block.forward = torch.compile(block.forward, mode=mode)
        return model

    with pytest.raises(ConfigError, match=r"blocks.1 is compiled with CUDA graphs.*max-autotune-no-cudagraphs"):
        Sharded(build("reduce-overhead"), stage=3)
    for kept, stage in (("reduce-overhead", 2), ("max-autotune-no-cudagraphs", 3)):
        Sharded(build(kept), stage=stage).engine.release()
