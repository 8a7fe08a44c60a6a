"""Sharded training without Lightning: :func:`shard` a module, add optimizers, train as usual.

::

    engine = lightning_zero.shard(model, stage=3)
    optimizer = torch.optim.AdamW(model.parameters())
    engine.add_optimizer(optimizer)
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

Where to look::

    engine       what may be asked of an engine
    assembly     its parts, and how they hang together
    units        what is sharded, in which buffers, and where it rests
    passes       forward and backward: gathers, gradients, reductions
    vertical     units in chunks of the batch, all chunks before the next unit
    steps        optimizers and offloaded steps
    whole        state dicts, gather, norms
    torch_modes  the modes of torch that all of this runs in
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.config import ConfigError, ZeroConfig, check_decided, make_config
from lightning_zero.device.cuda import default_device, with_index
from lightning_zero.engine.engine import Engine, engine_of, engines
from lightning_zero.engine.whole import norms
from lightning_zero.engine.whole.gather import show_full
from lightning_zero.ranks.progress import LongWork

__all__ = ["Engine", "clip_grad_norm_", "engine_of", "engines", "gather", "grad_norm", "shard"]

Target = nn.Module | nn.Parameter | Iterable[nn.Parameter]


def shard(
    module: nn.Module,
    *,
    config: ZeroConfig | None = None,
    process_group: Any = None,
    device: torch.device | str | None = None,
    node: str | None = None,
    sources: Mapping[str, Tensor] | None = None,
    has_values: bool = False,
    long_work: LongWork | None = None,
    **settings: Any,
) -> Engine:
    """Shard ``module`` over the ranks of a process group, in place.

    All ranks call it; the values of rank 0 become everyone's. Parameters may be on any device or on meta.

    Args:
        config: a whole configuration; ``settings`` are fields of :class:`ZeroConfig` on top of it.
        process_group: the data-parallel group; default: the world, or a single rank without ``torch.distributed``.
        device: where to train; default: this rank's GPU, else the CPU. On ``meta`` nothing has values: whole steps run
            for their order, counts and bytes, over torch's fake process group at any scale (``make bench-scale``).
        sources: first values by names of parameters and buffers, which may be in files. They count more than the folder
            ``init_from``.
        has_values: an engine before has trained ``module``: the folder ``init_from`` counts for what is on meta only.
        long_work: shows what takes long; default: on rank 0, unless ``summary`` is off.
        node: names the node of this rank; default: its host, and the number that a launcher has given it.

    Raises:
        ConfigError: a setting that cannot work, a module that is sharded already, DTensor parameters.
    """
    config = make_config(config, **settings)
    check_decided(config)
    if config.sequence_parallel > 1:
        raise ConfigError(
            "zero.sequence_parallel: expected 1 with lightning_zero.shard and Fabric, which do not see the steps that "
            f"batches are cut for, got {config.sequence_parallel}. Train with ZeroStrategy, or drop "
            "zero.sequence_parallel."
        )
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    where = default_device() if device is None else with_index(torch.device(device))
    node = node or node_name()
    return Engine(module, config, process_group, where, node, sources, has_values=has_values, long_work=long_work)


def node_name() -> str:
    """The node of this process, by host and by the number that torchrun, SLURM or the user has given it."""
    number = next((os.environ[key] for key in ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK") if key in os.environ), "")
    return f"{socket.gethostname()}/{number}"


def _resolve(target: Target) -> tuple[Engine, list[nn.Parameter]]:
    if isinstance(target, nn.Parameter):
        params = [target]
    elif isinstance(target, nn.Module):
        params = list(target.parameters())
    else:
        params = list(target)
    found = {id(e): e for p in params for e in engines() if e.owns(p)}
    if len(found) != 1:
        raise ConfigError(
            f"expected parameters of one sharded module, got {len(params)} parameters of {len(found)}. "
            "Call this after the module was sharded (in training hooks, not in __init__)."
        )
    return next(iter(found.values())), params


@contextlib.contextmanager
def gather(target: Target, *, from_rank: int | None = None, grads: bool = False) -> Iterator[None]:
    """Inside the ``with``, parameters hold their full master values; what is written to them is kept.

    Masters are fp32, or of the one dtype under ``*_true`` and ``fp64``.

    All ranks enter it. They write the same values, or ``from_rank`` names the rank whose values count.

    Args:
        target: a module, a parameter or several.
        grads: ``param.grad`` holds the full reduced gradient inside, and changes to it are kept too.
    """
    engine, params = _resolve(target)
    with show_full(engine, params, from_rank=from_rank, grads=grads):
        yield


def grad_norm(target: Target, norm_type: float = 2.0) -> Tensor:
    """The norm of the reduced gradients over all ranks, between backward and step: a 0-d tensor. All ranks call it."""
    engine, params = _resolve(target)
    return norms.grad_norm_of(engine, params, norm_type)


def clip_grad_norm_(
    target: Target, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for sharded gradients; returns the norm before clipping. All ranks call it.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    engine, params = _resolve(target)
    return norms.clip_by_norm(engine, params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
