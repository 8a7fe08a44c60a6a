"""The bare module and what torch has: DDP, DDP with ZeroRedundancyOptimizer, FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.sides.side import COMPILED, LR, Side, make_adamw, train_step
from lightning_zero.models.gpt import Block


def _bare(model: nn.Module, precision: str) -> Side:
    optimizer = make_adamw(model)
    return Side("bare", lambda tokens: train_step(model, optimizer, tokens, precision == "bf16"))


def _bare_compiled(model: nn.Module, precision: str) -> Side:
    for module in model.modules():
        if isinstance(module, Block):
            module.compile()
    optimizer = make_adamw(model)
    return Side(f"bare{COMPILED}", lambda tokens: train_step(model, optimizer, tokens, precision == "bf16"))


def _ddp(model: nn.Module, precision: str) -> Side:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_adamw(wrapped)
    return Side("ddp", lambda tokens: train_step(wrapped, optimizer, tokens, precision == "bf16"))


def _ddp_zero1(model: nn.Module, precision: str) -> Side:
    """Stage 1's peer. ``overlap_with_ddp`` is off: it needs a communication hook, leaves the first two or three steps
    out, and steps parameters one behind; parameters are sent in one message for each rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        overlap_with_ddp=False,
        lr=LR,
        fused=True,
    )
    return Side("ddp+zero1", lambda tokens: train_step(wrapped, optimizer, tokens, precision == "bf16"))


def shard_fsdp2(model: nn.Module, precision: str) -> None:
    """Each block and the root, as its documentation advises."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if precision == "bf16" else None
    )
    options: dict[str, Any] = {"mesh": mesh, **({"mp_policy": policy} if policy else {})}
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    fully_shard(model, **options)


def _fsdp2(model: nn.Module, precision: str) -> Side:
    shard_fsdp2(model, precision)
    optimizer = make_adamw(model)
    return Side("fsdp2", lambda tokens: train_step(model, optimizer, tokens, False))


BUILD: dict[str, Callable[[nn.Module, str], Side]] = {
    "bare": _bare,
    f"bare{COMPILED}": _bare_compiled,
    "ddp": _ddp,
    "ddp+zero1": _ddp_zero1,
    "fsdp2": _fsdp2,
}
