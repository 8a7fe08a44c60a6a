"""Tell which of torch's optimizers and states are element-wise, make state that a step expects, and choose kernels."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Each element depends on its own value, gradient and state alone.
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
# State that these classes keep once per tensor, beside the step count of all.
PER_TENSOR: dict[type[Optimizer] | None, set[str]] = {
    torch.optim.ASGD: {"eta", "mu"},
    torch.optim.NAdam: {"mu_product"},
}


def base_of(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the element-wise class of torch of which ``optimizer`` is an instance, or None if there is none."""
    return next((kind for kind in type(optimizer).__mro__ if kind in ELEMENTWISE), None)


def without_hooks(step: Any) -> Any:
    """Return the function ``step`` without the wrapper in which torch runs hooks before and after a step."""
    return step.__wrapped__ if getattr(step, "hooked", False) is True else step  # a mock has any attribute


@contextlib.contextmanager
def hooks_set_aside(optimizer: Optimizer) -> Iterator[None]:
    """Disable the step hooks of ``optimizer`` and torch's global step hooks while the body runs."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    tables: tuple[dict[int, Any], ...] = *own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    kept = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def is_known(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` is one of torch's element-wise optimizers (Adam, SGD, ...) with torch's own step."""
    base, kind = base_of(optimizer), type(optimizer)
    names = ("step", "_init_group")  # torch's steps read gradients and state by the second
    return base is not None and all(without_hooks(getattr(kind, n)) is without_hooks(getattr(base, n)) for n in names)


def is_per_tensor(optimizer: Optimizer, name: str) -> bool:
    """Return whether ``optimizer`` keeps one value of the state ``name`` per tensor, not one per element."""
    return name == "step" or name in PER_TENSOR.get(base_of(optimizer), ())


def is_elementwise(optimizer: Optimizer, name: str, value: Any, tensor: Tensor) -> bool:
    """Return whether the state ``value`` has one element for each element of ``tensor``, unlike a step count."""
    return isinstance(value, Tensor) and not is_per_tensor(optimizer, name) and value.shape == tensor.shape


def start_state(optimizer: Optimizer, group: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """Create those states of ``tensors`` that torch's step needs but does not create. ``group``: their param group.

    Adagrad creates state only in its constructor (torch 2.11). Fused SGD cannot mix tensors with and without a momentum
    buffer, so tensors without a buffer get a buffer of zeros."""
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
        for tensor in tensors:
            if optimizer.state[tensor].get("momentum_buffer") is None:
                optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
    elif isinstance(optimizer, torch.optim.Adagrad):
        first = group["initial_accumulator_value"]
        for tensor in tensors:
            if not optimizer.state[tensor]:
                value = complex(first, first) if tensor.is_complex() else first  # torch steps it as two reals
                optimizer.state[tensor] = {
                    "step": torch.zeros((), device=tensor.device),
                    "sum": torch.full_like(tensor, value),
                }


def shadow_of(optimizer: Optimizer) -> Optimizer:
    """Return a copy of ``optimizer`` with the same state object, copied hyperparameters, and no parameters or hooks."""
    shadow: Optimizer = object.__new__(base_of(optimizer) or type(optimizer))
    shadow.__dict__.update({k: v for k, v in optimizer.__dict__.items() if not callable(v)})
    shadow.param_groups = [
        {k: _copied(v) for k, v in group.items() if k != "params"} | {"params": []} for group in optimizer.param_groups
    ]
    return shadow


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, or of a list or tuple (``betas``) and its items. Return any other value itself."""
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def states_after_step(optimizer: Optimizer, probe: nn.Parameter) -> int:
    """Step ``optimizer``, whose only parameter is ``probe``. Return how many element-wise states ``probe`` then has."""
    probe.grad = torch.ones_like(probe)
    without_hooks(type(optimizer).step)(optimizer)
    return sum(is_elementwise(optimizer, name, value, probe) for name, value in optimizer.state[probe].items())


def count_states(optimizer: Optimizer) -> int:
    """Return how many element-wise states ``optimizer`` keeps per parameter: the maximum over its param groups, found
    by a step of a small parameter. Return 0 if ``optimizer`` is not one of torch's element-wise optimizers."""
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
    """Return whether to use torch's fused kernel for ``params``: the kernel must support them, and the user must not
    have chosen a kernel in ``group``. On a CPU the fused kernel is the only fast one."""
    free = group.get("fused", False) is None and not group.get("foreach") and not group.get("capturable")
    if isinstance(optimizer, torch.optim.SGD):
        if group["momentum"] and group["dampening"]:
            return False  # dampened momentum does not start at zero, and the kernel starts all runs or none
        if any(p.device.type == "cpu" and p.itemsize < 4 for p in params):
            return False  # the fused kernel is wrong for bf16 on a CPU (2.13)
    if any(p.is_meta for p in params):
        return False  # not supported by torch
    return free and isinstance(optimizer, FUSED) and all(p.is_floating_point() for p in params)


OUTSIDE_STEP = ("train", "eval")


def changes_outside_step(optimizer: Optimizer) -> bool:
    """Return whether the class has methods that change parameters outside of steps, as schedule-free optimizers do."""
    return all(callable(getattr(optimizer, name, None)) for name in OUTSIDE_STEP)
