"""Shard a module without Lightning.

::

    engine = lightning_zero.shard(model, stage=3)
    optimizer = torch.optim.AdamW(model.parameters())
    engine.add_optimizer(optimizer)
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.device.cuda import default_device, with_index
from lightning_zero.engine import Engine
from lightning_zero.engine.build import Core
from lightning_zero.engine.steps.interception import AroundStep
from lightning_zero.engine.steps.optimizer import ShardedOptimizer, Stepper
from lightning_zero.layerwise.float8 import convert
from lightning_zero.layerwise.whole_optimizer import WholeOptimizer
from lightning_zero.mesh.plans import split_module
from lightning_zero.optimizers.refused import check_optimizer
from lightning_zero.ranks.progress import LongWork
from lightning_zero.settings import (
    ConfigError,
    Sharding,
    ZeroConfig,
    check_decided,
    keywords,
    make_config,
    names_arguments,
)


def shard(
    module: nn.Module,
    *,
    stage: keywords.Stage = None,
    config: ZeroConfig | None = None,
    process_group: Any = None,
    device: torch.device | str | None = None,
    node: str | None = None,
    sources: Mapping[str, Tensor] | None = None,
    has_values: bool = False,
    long_work: LongWork | None = None,
    **settings: Unpack[keywords.Keywords],
) -> Engine:
    """Shard ``module`` in place over the ranks of a process group, with rank 0's values. Return its engine. Collective.

    In your own loop, buffers that forwards change can differ between ranks; Trainer and Fabric broadcast rank 0's.

    Args:
        stage: ``"zero0"`` .. ``"zero3"`` (default), or 0 .. 3.
        config: a complete configuration; ``settings`` are fields of :class:`ZeroConfig` that override it.
        process_group: the data-parallel group; default: the world, or a single rank without ``torch.distributed``.
        device: where to train; default: this rank's GPU, or the CPU. On ``meta``, steps compute no values and only
            count collectives and bytes, over torch's fake process group (``make bench-scale``).
        sources: initial values of parameters and buffers, by their names in ``module``. They override ``init_from``.
        has_values: whether an engine has trained ``module`` before. Then ``init_from`` fills only tensors on meta.
        long_work: shows the progress of long operations; default: a display on rank 0.
        node: the name of this rank's node; default: :func:`node_name`.

    Raises ConfigError for settings that cannot work, a module that is sharded already, and DTensor parameters.
    """
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    where = default_device() if device is None else with_index(torch.device(device))
    node = node or node_name()
    with names_arguments(config):
        config = make_config(config, stage=stage, **settings)
        check_decided(config)
        convert(module, config.precision, where)
        split_module(module, config, where)
        return Engine(
            module,
            config,
            process_group,
            where,
            node,
            sources,
            make_stepper=_make_stepper,
            has_values=has_values,
            long_work=long_work,
        )


def node_name() -> str:
    """Return this node's ``<host name>/<node rank>``. The rank is empty if no launcher or ``NODE_RANK`` sets it."""
    number = next((os.environ[key] for key in ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK") if key in os.environ), "")
    return f"{socket.gethostname()}/{number}"


def _make_stepper(engine: Core, around_step: AroundStep, optimizer: Optimizer) -> Stepper:
    """Return a Stepper for ``optimizer``: of whole tensors if its class or the settings require it, else of slices."""
    settings, rounds = engine.config.optimizer, engine.config.precision.stochastic_rounding
    if check_optimizer(optimizer, settings, stochastic_rounding=rounds):
        if engine.config.splits:
            raise ConfigError(
                f"{engine.config.splits}: expected 1 with {type(optimizer).__name__}, which steps whole tensors. Use "
                f"an element-wise optimizer, such as AdamW; if {type(optimizer).__name__} is element-wise, set "
                "zero.optimizer.sharding=slices."
            )
        return WholeOptimizer(
            optimizer,
            around_step,
            engine.comm,
            {bucket: number for number, bucket in enumerate(engine.buckets)},
            message_nbytes=engine.config.reduce_bucket_bytes,
            unprobed=settings.sharding is Sharding.tensors,
        )
    return ShardedOptimizer(
        optimizer,
        around_step,
        device_type=engine.comm.device.type,
        declared_elementwise=settings.sharding is Sharding.slices,
        stochastic_rounding=rounds,
        state_dtype=settings.state_dtype,
    )
