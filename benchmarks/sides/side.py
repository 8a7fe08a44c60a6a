"""What all sides have in common: the loss, the optimizer, a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LR = 3e-4
COMPILED = "+compiled"  # ends the name of a side whose blocks torch.compile has compiled


@dataclass
class Side:
    """One way to train: ``step(tokens)`` returns the loss of a whole optimizer step."""

    name: str
    step: Callable[[Tensor], float]
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def loss_of(model: nn.Module, tokens: Tensor, autocast: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False) if autocast else nullcontext():
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train_step(model: nn.Module, optimizer: Any, tokens: Tensor, autocast: bool) -> float:
    loss = loss_of(model, tokens, autocast)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()
