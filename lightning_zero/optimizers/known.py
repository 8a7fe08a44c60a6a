"""Knows torch's optimizers: which of them work on slices, and what the step of each expects.

A run is stepped by the step of the optimizer's own class, on tensors that the class has not seen as parameters. So the
engine has to know which steps are element-wise, which state is element-wise (and which is one number for a tensor),
which state a step expects to find, and when torch's fused kernel gives right numbers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.planning.state_dtype import BLOCK, ROW

# Optimizers of torch that compute every element from that element's value, gradient and state alone.
ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
PER_TENSOR = frozenset({"step", "eta", "mu", "mu_product"})  # state that torch's optimizers keep once per tensor


def base_of(optimizer: Optimizer) -> type[Optimizer] | None:
    """The element-wise optimizer of torch that it is, or is derived from."""
    return next((kind for kind in type(optimizer).__mro__ if kind in ELEMENTWISE), None)


def without_hooks(step: Any) -> Any:
    """The step inside of torch's wrapper, which torch puts around the ``step`` of every class that was ever used."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def is_known(optimizer: Optimizer) -> bool:
    """Whether its step is one of torch's element-wise ones, not overridden."""
    base = base_of(optimizer)
    return base is not None and without_hooks(type(optimizer).step) is without_hooks(base.step)


def is_elementwise(name: str, value: Any, tensor: Tensor) -> bool:
    """Whether a state value has an element for every element of the run (and not, say, a step count)."""
    whole = isinstance(value, Tensor) and (value.shape == tensor.shape or _is_packed(value, tensor))
    return whole and name not in PER_TENSOR


def _is_packed(value: Tensor, tensor: Tensor) -> bool:
    """Whether ``value`` is state in 8 bits for the elements of ``tensor``."""
    packed = value.dtype is torch.uint8 and value.dim() == 2 and value.shape[1] == ROW
    return packed and value.shape[0] * BLOCK == tensor.numel()


def start_state(optimizer: Optimizer, group: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """Make the state that a step expects to find.

    torch's Adagrad makes it when it is built (2.11 only then), for parameters. Its fused SGD cannot step runs that have
    momentum beside new ones; zeros are what these start from.
    """
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
        for tensor in tensors:
            if optimizer.state[tensor].get("momentum_buffer") is None:
                optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
    elif isinstance(optimizer, torch.optim.Adagrad):
        for tensor in tensors:
            if not optimizer.state[tensor]:
                optimizer.state[tensor] = {
                    "step": torch.zeros((), device=tensor.device),
                    "sum": torch.full_like(tensor, _for_both_parts(tensor, group["initial_accumulator_value"])),
                }


def _for_both_parts(tensor: Tensor, value: float) -> complex:
    """``value`` for both parts of a complex parameter, which torch steps as two numbers."""
    return complex(value, value) if tensor.is_complex() else value


def shadow_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer of torch's class with the same state and a copy of the hyperparameters, without params and hooks."""
    shadow: Optimizer = object.__new__(base_of(optimizer) or type(optimizer))
    shadow.__dict__.update({k: v for k, v in optimizer.__dict__.items() if not callable(v)})
    shadow.param_groups = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"} | {"params": []}
        for group in optimizer.param_groups
    ]
    # Without hooks: the user's run once a step, around the eager part, and not once for each bucket in the worker.
    shadow._optimizer_step_pre_hooks = OrderedDict()
    shadow._optimizer_step_post_hooks = OrderedDict()
    return shadow


def states_after_step(optimizer: Optimizer, probe: nn.Parameter) -> int:
    """Element-wise tensors of state that a step of ``optimizer`` leaves for ``probe``, its small parameter."""
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    return sum(is_elementwise(name, value, probe) for name, value in optimizer.state[probe].items())


def count_states(optimizer: Optimizer) -> int:
    """Element-wise tensors of state for each parameter, found by one step of a small one; 0 for unknown kinds."""
    if base_of(optimizer) is None:
        return 0
    counts = [0]
    for group in optimizer.param_groups:
        shadow = shadow_of(optimizer)
        probe = nn.Parameter(torch.zeros(2))
        on_host = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in group.items()}
        on_host |= {"capturable": False} if "capturable" in group else {}
        shadow.param_groups = [on_host | {"params": [probe]}]
        shadow.state = defaultdict(dict)
        start_state(shadow, shadow.param_groups[0], [probe])
        counts.append(states_after_step(shadow, probe))
    return max(counts)


def prefers_fused(optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor]) -> bool:
    """Whether to take torch's fused kernel, where the user has chosen no implementation. No other is fast on a CPU."""
    free = group.get("fused", False) is None and not group.get("foreach") and not group.get("capturable")
    if isinstance(optimizer, torch.optim.SGD):
        if group["momentum"] and group["dampening"]:
            return False  # momentum does not start at zero then, and the fused kernel starts all runs or none
        if any(p.device.type == "cpu" and p.itemsize < 4 for p in params):
            return False  # torch's fused kernel gives wrong numbers for bf16 on the CPU (2.13)
    if any(p.is_meta for p in params):
        return False  # torch refuses it there
    return free and isinstance(optimizer, FUSED) and all(p.is_floating_point() for p in params)
