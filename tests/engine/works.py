"""What both sides of a comparison are given and do: batches, losses, forwards and backwards of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.sides import DEVICE, Sharded, Side, Twin, Work, beside_twin, step_and_clear
from tests.models import TOKENS, VOCABULARY, WIDTH


def tokens(step: int, micro: int = 0, *, rank: int | None = None, rows: int = 2) -> Tensor:
    """Another batch for every rank, step and micro-batch."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator).to(DEVICE)


def floats(step: int, *shape: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7 + 1000 * step + rank)).to(DEVICE)


def language_loss(module: nn.Module, batch: Tensor) -> Tensor:
    logits = module(batch)
    return F.cross_entropy(logits.reshape(-1, VOCABULARY).float(), batch.roll(1, 1).reshape(-1))


def loss_at(module: nn.Module, step: int, micro: int = 0, **of: Any) -> Tensor:
    """Of the batch of a step."""
    return language_loss(module, tokens(step, micro, **of))


def autocast(precision: str) -> Any:
    """What the precision plugin opens around forward and loss."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(DEVICE, dtype, enabled=dtype is not None, cache_enabled=False)


def scope(side: Side, key: str = "train") -> Any:
    return side.engine.step_scope(key) if isinstance(side, Sharded) else contextlib.nullcontext()


def mean_square_of(side: Side, *args: Any) -> Tensor:
    """One forward and backward."""
    loss = side.module(*args).float().square().mean()
    side.backward(loss)
    return loss


def mean_square(side: Side, step: int, *args: Any, shape: Sequence[int] = (4, WIDTH)) -> Tensor:
    """Of a module that maps numbers of ``shape``, and ``args``, to anything."""
    dtypes = {p.dtype for p in side.module.parameters() if p.is_floating_point()}
    x = floats(step, *shape).to(torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32)
    return mean_square_of(side, x, *args)


def language_work(side: Side, step: int) -> Tensor:
    loss = loss_at(side.module, step)
    side.backward(loss)
    return loss


def train_both(sides: Iterable[Side], steps: Iterable[int], work: Work = language_work) -> None:
    for side in sides:
        train(side, steps, work)


def trained(steps: int = 1, **config: Any) -> tuple[Sharded, Twin]:
    """A sharded model and its twin after a few steps, and a backward whose gradients are still there."""
    sides = beside_twin(**config)
    for step in range(steps + 1):
        if step:
            step_and_clear(*sides)
        for side in sides:
            with autocast(side.precision):
                language_work(side, step)
    return sides


def train(side: Side, steps: Iterable[int], work: Work = language_work, *, clip: bool = False) -> list[Any]:
    """What ``work`` gives in each step, and norms."""
    found = []
    for step in steps:
        with autocast(side.precision):
            result = work(side, step)
        found.append(result.detach() if isinstance(result, Tensor) else result)
        if clip:
            found.append(side.clip(0.3))
        step_and_clear(side)
    return found


def accumulate(side: Side, step: int, micro_batches: int) -> Tensor:
    """Backwards of one step; all but the last inside ``no_sync``."""
    total = torch.zeros((), device=DEVICE)
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        with contextlib.nullcontext() if last else side.no_sync():
            loss = loss_at(side.module, step, micro) / micro_batches
            side.backward(loss)
        total = total + loss.detach()
    return total
