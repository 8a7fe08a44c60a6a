"""Compiled LightningModules under the strategy: the forms that Lightning's documentation shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError
from tests.engine.test_compile import COUNT
from tests.harness import on_ranks
from tests.trainer.toys import Lit, assert_same, fit, loader, record, seeded, strategy_of, trainer

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


FORMS: dict[str, Callable[[], Any]] = {
    "torch.compile(module)": lambda: torch.compile(seeded(Quiet), backend="counting"),
    "module.compile()": lambda: (module := seeded(Quiet), module.compile(backend="counting"))[0],
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
    of = trainer(strategy_of(row), tmp_path, **settings)
    of.fit(FORMS[form](), loader(), loader())
    found = record(of, of.lightning_module)
    found.weights = {name.replace("_orig_mod.", ""): value for name, value in found.weights.items()}
    assert_same(found, plain, tolerance=0.0)
    assert COUNT.blocks() == 2  # in training and in validation
    of.test(of.lightning_module, loader(), verbose=False)
    assert COUNT.blocks() == 2


@pytest.mark.sample
def test_without_a_compiler_it_is_refused_before_a_process_starts() -> None:
    missing = mock.patch("torch._inductor.cpp_builder.get_cpp_compiler", side_effect=InvalidCxxCompiler)
    of = pl.Trainer(strategy="zero3", accelerator="cpu", devices=2, logger=False)
    launches = mock.patch.object(of.strategy.launcher, "launch", side_effect=AssertionError("processes start"))
    with missing, launches:
        with pytest.raises(ConfigError, match=r"zero/compile=blocks: expected a C\+\+ compiler.*zero/compile=none"):
            ZeroStrategy(3, compile="blocks")
        with pytest.raises(ConfigError, match=r"torch\.compile: expected a C\+\+ compiler"):
            of.fit(torch.compile(Lit()), [])
        ZeroStrategy(3, compile={"name": "blocks", "arguments": {"backend": "eager"}})
