"""What watches parameters and gradients from outside: the values that it sees under DDP, or an error that says how."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero import ZeroStrategy
from tests.harness import on_ranks
from tests.trainer.toys import Lit, assert_same, fit, seeded

pytestmark = pytest.mark.full


class Watch:
    """As ``wandb.watch(model, log="all")`` does: hooks on parameters, and on the module, which reads them there."""

    def __init__(self, module: nn.Module, every: int = 1) -> None:
        self.seen: list[tuple[str, float]] = []
        self.every, self.calls, self.root = every, 0, module
        for name, param in module.named_parameters():
            param.register_hook(lambda grad, name=name: self.note(f"gradients/{name}", grad.data))
        module.head.register_forward_hook(self.forward)  # DDP calls the root twice in a step

    def forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls += 1
        if torch.is_grad_enabled() and self.calls % self.every == 0:
            for name, param in self.root.named_parameters():
                self.note(f"parameters/{name}", param.data.cpu())

    def note(self, name: str, values: Tensor) -> None:
        self.seen.append((name, float(values.reshape(-1).double().sum())))


class Watched(Lit):
    def __init__(self, every: int = 1, only_rank_0: bool = False) -> None:
        super().__init__()
        self.every, self.only_rank_0 = every, only_rank_0

    def on_train_start(self) -> None:
        if not self.only_rank_0 or self.global_rank == 0:
            self.watch = Watch(self, self.every)


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_watcher_sees_what_it_sees_under_ddp(stage: str, tmp_path: Path) -> None:
    seen = {}
    for strategy in ("ddp", stage):
        module = seeded(Watched)
        fit(strategy, tmp_path, module, max_epochs=1)
        seen[strategy] = sorted(module.watch.seen)
    names = [name for name, _ in seen["ddp"]]
    assert names == [name for name, _ in seen[stage]] and any("gradients" in name for name in names)
    torch.testing.assert_close([v for _, v in seen[stage]], [v for _, v in seen["ddp"]], rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("dynamic_graph", [False, True])
def test_watcher_on_rank_0_alone_reads_and_changes_nothing(dynamic_graph: bool, tmp_path: Path) -> None:
    """As Lightning's ``WandbLogger.watch`` does. The gathers that it needs are those of the backward, ahead of it;
    under ``zero.dynamic_graph`` the other rank answers it at the end of its call."""
    module = seeded(lambda: Watched(every=4, only_rank_0=True))
    found = fit(ZeroStrategy("zero3", dynamic_graph=dynamic_graph), tmp_path, module)
    assert_same(found, fit("ddp", tmp_path, seeded(Lit)), tolerance=0)
    if dist.get_rank() == 0:
        values = [value for name, value in module.watch.seen if name.startswith("parameters")]
        assert len(values) >= 32 and all(map(math.isfinite, values))


LOOKS = {
    "a histogram": lambda p: numpy.histogram(p.detach().cpu().numpy()),
    "an array": lambda p: numpy.asarray(p.detach()),
    "data": lambda p: p.data.cpu(),
    "a list": lambda p: p.tolist(),
    "a copy": lambda p: p.clone(),
}


class Looks(Lit):
    """Looks at a parameter and at its gradient outside of steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        param = self.blocks[0].up.weight
        for look in LOOKS.values():
            look(param.grad)
            if self.trainer.strategy.config.stage.name.name == "zero1":
                look(param)
            else:
                with pytest.raises(RuntimeError, match="lightning_zero.gather"):
                    look(param)
        assert "nan" not in f"{param} {param.grad}"


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_look_outside_of_a_step_is_given_or_refused_with_the_way(stage: str, tmp_path: Path) -> None:
    module = seeded(Looks)
    fit(stage, tmp_path, module, max_epochs=1)
    for look in LOOKS.values():
        look(module.blocks[0].up.weight.detach())
