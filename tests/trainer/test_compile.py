"""Compiled LightningModules under the strategy: the forms that Lightning's documentation shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError
from tests.engine.test_compile import COUNT
from tests.harness import on_ranks
from tests.trainer.toys import ByHand, Lit, assert_same, fit, loader, record, seeded, strategy_of, trainer

pytestmark = pytest.mark.full


class InConfigureModel(Lit):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile(backend="counting")


class OfLists(Lit):
    """Blocks that are wrapped, as ``torch.compile(block)`` in a constructor does."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(torch.compile(block, backend="counting") for block in self.blocks)


def _in_place(module: Lit) -> Any:
    module.compile(backend="counting")
    return module


FORMS: dict[str, Callable[[], Any]] = {
    "torch.compile(module)": lambda: torch.compile(seeded(Quiet), backend="counting"),
    "module.compile()": lambda: _in_place(seeded(Quiet)),
    "block.compile()": lambda: seeded(InConfigureModel),
    "torch.compile(block)": lambda: seeded(OfLists),
}


class Quiet(Lit):
    """Steps that can be compiled: nothing is logged (``self.log`` fails inside of a graph under any strategy)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


@on_ranks(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", ["zero0", "zero3", "zero3_offload_optimizer"])
def test_compiled_module_trains_as_the_plain_one(tmp_path: Path, row: str, form: str) -> None:
    torch._dynamo.reset()
    COUNT.graphs.clear()
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 1, "limit_val_batches": 1}
    plain = fit(strategy_of(row), tmp_path / "plain", seeded(Lit if "block" in form else Quiet), **settings)
    module = FORMS[form]()
    of = trainer(strategy_of(row), tmp_path, **settings)
    of.fit(module, loader(), loader())
    found = record(of, of.lightning_module)
    found.weights = {name.replace("_orig_mod.", ""): value for name, value in found.weights.items()}
    assert_same(found, plain, tolerance=0.0)
    assert COUNT.blocks() == 2  # in training and in validation
    of.test(of.lightning_module, loader(), verbose=False)
    assert COUNT.blocks() == 2


@on_ranks(1)
def test_one_graph_around_units_is_refused(tmp_path: Path) -> None:
    module: Any = torch.compile(seeded(Quiet), backend="counting", fullgraph=True)
    with pytest.raises(ConfigError, match=r"compiled with fullgraph=True, and holds units"):
        trainer(ZeroStrategy(3), tmp_path).fit(module, loader())


def _without_compiler(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": "/nowhere", "CXX": "/nowhere/g++"}
    program = f"import torch, lightning.pytorch as pl, lightning_zero\n{program}"
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.sample
@on_ranks(1)
def test_without_a_compiler_it_is_refused() -> None:
    def missing() -> str:
        raise InvalidCxxCompiler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
        with pytest.raises(ConfigError, match=r"zero/compile=blocks: expected a C\+\+ compiler.*zero/compile=none"):
            ZeroStrategy(3, compile="blocks")
        with pytest.raises(ConfigError, match=r"torch\.compile: expected a C\+\+ compiler"):
            trainer("zero3", ".").fit(torch.compile(Lit()), loader())
        ZeroStrategy(3, compile={"name": "blocks", "arguments": {"backend": "eager"}})


def test_without_a_compiler_a_compiled_module_is_refused_before_a_process_starts() -> None:
    found = _without_compiler(
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "pl.Trainer(strategy='zero3', accelerator='cpu', devices=2, logger=False).fit(torch.compile(BoringModel()))"
    )
    assert "torch.compile: expected a C++ compiler" in found.stderr, found.stderr
    assert "Initializing distributed" not in found.stderr


class Manual(ByHand, Quiet):
    """Backward and optimizer are called inside of the compiled step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_manual_optimization_in_a_compiled_step(tmp_path: Path, stage: int) -> None:
    torch._dynamo.reset()
    COUNT.graphs.clear()
    plain = fit(ZeroStrategy(stage), tmp_path / "plain", seeded(Manual), max_epochs=1)
    of = trainer(ZeroStrategy(stage), tmp_path, max_epochs=1)
    of.fit(torch.compile(seeded(Manual), backend="counting"), loader(), loader())
    assert_same(record(of, of.lightning_module), plain, tolerance=0.0)
    assert COUNT.blocks() == 2
