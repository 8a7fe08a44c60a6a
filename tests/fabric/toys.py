"""A training loop of Fabric's, and what a run is compared by. Everything here runs inside pool workers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_zero import ZeroFabricStrategy
from lightning_zero.presets import PRESETS
from tests.trainer.toys import FEATURES, Block, Lit, assert_weights, loader


class Net(nn.Module):
    """A regression of blocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    forward = Lit.forward

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(x), y)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def fabric(strategy: Any, **settings: Any) -> Fabric:
    """A quiet Fabric over all ranks of the pool, launched."""
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if isinstance(strategy, str) and strategy.startswith("zero"):
        row = PRESETS[strategy]
        strategy = ZeroFabricStrategy(row.stage, offload=row.offload)
    found = Fabric(strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), **settings)
    found.launch()
    return found


def make(**settings: Any) -> Net:
    torch.manual_seed(3)
    return Net(**settings)


@dataclass
class Run:
    """What a run is compared by."""

    fabric: Fabric
    model: Any
    optimizer: Any
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def weights(run: Run) -> dict[str, Tensor]:
    """On all ranks: the full state dict."""
    return run.fabric.strategy.get_module_state_dict(run.model._forward_module)


def setup(strategy: Any, model: nn.Module | None = None, optimizer: Any = None, **settings: Any) -> Run:
    """Fabric with ``model`` (default: that of ``make``) and its optimizer."""
    found = fabric(strategy, **settings)
    model = make() if model is None else model
    return Run(found, *found.setup(model, (optimizer or adamw)([p for p in model.parameters() if p.requires_grad])))


def step(run: Run, loss: Tensor) -> None:
    run.fabric.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.losses.append(loss.item())


def train(
    strategy: Any,
    *,
    epochs: int = 1,
    every: int = 1,
    clip: dict[str, Any] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    run: Run | None = None,
    **settings: Any,
) -> Run:
    """Train for some epochs, with a step after ``every`` backwards; ``run``: go on with one."""
    run = run or setup(strategy, None, optimizer, **settings)
    for _ in range(epochs):
        for number, (x, y) in enumerate(run.fabric.setup_dataloaders(loader(), use_distributed_sampler=False), 1):
            with run.fabric.no_backward_sync(run.model, enabled=number % every != 0):
                loss = nn.functional.mse_loss(run.model(x), y)
                run.fabric.backward(loss / every)
            run.losses.append(loss.item())
            if number % every == 0:
                if clip is not None:
                    norm = run.fabric.clip_gradients(run.model, run.optimizer, **clip)
                    run.norms += [] if norm is None else [float(norm)]
                run.optimizer.step()
                run.optimizer.zero_grad()
    return run


def assert_equal(found: Run, expected: Run, *, tolerance: float = 0.0) -> None:
    """Equal losses, norms and weights."""
    __tracebackhide__ = True
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(found.losses, expected.losses, **close)
    torch.testing.assert_close(found.norms, expected.norms, rtol=max(tolerance, 1e-6), atol=tolerance)
    assert_weights(weights(found), weights(expected), tolerance=tolerance)
