"""Plan the state that optimizers will have, before anything is sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.units.describe import UnitGroup
from lightning_zero.optimizers.known import count_states
from lightning_zero.optimizers.probe import probe
from lightning_zero.optimizers.refused import is_stepped_whole
from lightning_zero.planning.owners import matrix_work
from lightning_zero.planning.tensor_states import TensorState, TensorStates
from lightning_zero.settings import ConfigError, OptimizerConfig


class UnknownStateError(Exception):
    """Raised if an optimizer's state cannot be known before training. The message names optimizer and reason."""


def planned_states(
    units: Sequence[UnitGroup],
    optimizers: Sequence[Optimizer],
    settings: OptimizerConfig,
    message_nbytes: int,
    param_of: Callable[[nn.Parameter], nn.Parameter] = lambda param: param,
) -> int | TensorStates:
    """Return the number of state tensors per parameter, or each parameter's state if an optimizer steps whole tensors.

    Raises UnknownStateError if an optimizer cannot be tried.

    Args:
        optimizers: optimizers, which stay unchanged. Their parameters can be on meta, or fake tensors.
        message_nbytes: bytes of gradients in transit at a time.
        param_of: returns the parameter in ``units`` that an optimizer's parameter stands for.
    """
    stepped_whole = [is_stepped_whole(o, settings.sharding) for o in optimizers]
    if not any(stepped_whole):
        return max(map(count_states, optimizers), default=0)
    dtypes = {
        id(info.param): bucket.dtypes.master for unit in units for bucket in unit.buckets for info in bucket.params
    }
    found: dict[int, TensorState] = {}
    for number, (optimizer, whole) in enumerate(zip(optimizers, stepped_whole, strict=True)):
        if not whole:
            state = TensorState(slices=count_states(optimizer))
            found |= {id(param_of(p)): state for group in optimizer.param_groups for p in group["params"]}
            continue
        try:
            cpu = torch.device("cpu")
            probed = probe(optimizer, lambda p: dtypes[id(param_of(p))], cpu, true_shapes=False)
        except (ConfigError, KeyError) as error:
            raise UnknownStateError(f"{type(optimizer).__name__} cannot be tried: {error}") from error
        if probed.failed is not None or probed.couples:
            raise UnknownStateError(f"{type(optimizer).__name__} is not known")
        for index, group in enumerate(optimizer.param_groups):
            for param in map(param_of, group["params"]):
                shapes = probed.states.get((index, param.dim(), dtypes[id(param)]), ())
                nbytes = tuple(shape.nbytes(param.shape) for shape in shapes)
                found[id(param)] = TensorState(number, matrix_work(param.shape), nbytes)
    tensors = tuple(
        tuple(found.get(id(info.param), TensorState()) for info in bucket.params)
        for unit in units
        for bucket in unit.buckets
    )
    return TensorStates(tensors, message_nbytes)
