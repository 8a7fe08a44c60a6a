"""Refuse optimizers whose class or settings cannot work, before any trial step.

``app/parts.py`` checks a configured optimizer before processes start. Ranks check the optimizers of the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from lightning_zero.optimizers.known import base_of, changes_outside_step, is_known
from lightning_zero.optimizers.low_bits import STATES
from lightning_zero.optimizers.trial import step_of
from lightning_zero.settings import ConfigError, OptimizerConfig, Sharding, StateDtype

_KEY = "zero.optimizer.state_dtype"


def check_optimizer(optimizer: Optimizer, settings: OptimizerConfig, *, stochastic_rounding: bool) -> bool:
    """Raise ConfigError if ``optimizer`` cannot work under ``settings``. Return whether it must step whole tensors."""
    name = type(optimizer).__qualname__
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer.differentiable: expected false, got true ({name}): a step of shards is "
            "no part of a graph. Drop optimizer.differentiable."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            f"optimizer: {name} steps sparse gradients only, and gradients are dense here at every stage, also those "
            "of embeddings with sparse=True. Use torch.optim.Adam or SGD for these embeddings."
        )
    if settings.sharding is Sharding.slices and changes_outside_step(optimizer):
        raise ConfigError(
            f"zero.optimizer.sharding=slices: expected a class that changes parameters in its step alone, got {name}, "
            "whose train() and eval() change them too. Drop zero.optimizer.sharding=slices."
        )
    whole = is_stepped_whole(optimizer, settings.sharding)
    if stochastic_rounding and (whole or not is_known(optimizer)):
        raise ConfigError(
            f"zero.precision.stochastic_rounding: expected one of torch's element-wise optimizers, stepped in slices, "
            f"got {name}. Use torch.optim.AdamW (and not zero.optimizer.sharding=tensors), or drop "
            "zero.precision.stochastic_rounding."
        )
    if settings.sharding is Sharding.slices:
        _refuse_own_low_bits(optimizer)
    if settings.state_dtype is not StateDtype.fp32:
        _check_narrow(optimizer, settings.state_dtype, whole=whole)
    if whole:
        _refuse_own_step(optimizer)
    return whole


def is_stepped_whole(optimizer: Optimizer, sharding: Sharding) -> bool:
    elementwise = is_known(optimizer) and not changes_outside_step(optimizer)
    return sharding is Sharding.tensors or (sharding is Sharding.auto and not elementwise)


def _refuse_own_low_bits(optimizer: Optimizer) -> None:
    """Raise ConfigError for low-bit classes of torchao and bitsandbytes, whose step depends on the size of tensors."""
    kind = type(optimizer)
    origins = {base.__module__.partition(".")[0] for base in kind.__mro__}
    low = any(mark in kind.__name__.lower() for mark in ("8bit", "4bit", "fp8"))
    if low and origins & {"torchao", "bitsandbytes"}:
        raise ConfigError(
            f"zero.optimizer.sharding=slices: {kind.__module__}.{kind.__qualname__} chooses by the size of a tensor "
            "whether its state is in few bits, and shares a scale among neighbours. Here it would step slices that "
            "differ by stage and number of ranks, most of them with state in fp32. Drop "
            "zero.optimizer.sharding=slices, or use torch.optim.AdamW with zero.optimizer.state_dtype=bf16."
        )


def _check_narrow(optimizer: Optimizer, state: StateDtype, *, whole: bool) -> None:
    """Raise ConfigError if the state of ``optimizer`` cannot be stored in bf16 (the dtype ``state``)."""
    kind = type(optimizer)
    asked, base = f"{_KEY}={state.name}", base_of(optimizer)
    if whole or base is None or not is_known(optimizer):
        why = "which steps whole tensors" if whole else "whose state is not known"
        raise ConfigError(
            f"{asked}: expected one of torch's element-wise optimizers with torch's step, stepped in slices, got "
            f"{kind.__module__}.{kind.__qualname__}, {why}. Use torch.optim.AdamW for all parameters (and not "
            f"zero.optimizer.sharding=tensors), or drop {_KEY}."
        )
    if base not in STATES:
        raise ConfigError(
            f"{asked}: torch.optim.{base.__name__} keeps more than moments (step sizes, or a second copy of the "
            f"weights), which must not be rounded. Use torch.optim.AdamW, or drop {_KEY}."
        )
    check_narrow_groups(optimizer, state, optimizer.param_groups)
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(f"{asked}: expected real parameters, got complex ones. Drop {_KEY}.")


def check_narrow_groups(optimizer: Optimizer, state: StateDtype, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError if a param group in ``groups`` keeps no state, or needs state that cannot be stored in the
    dtype ``state``. ``groups``: param groups of ``optimizer`` or of a checkpoint."""
    asked, base = f"{_KEY}={state.name}", base_of(optimizer)
    for group in groups:
        if base is torch.optim.SGD and not group["momentum"]:
            raise ConfigError(
                f"{asked}: SGD without momentum keeps no state, so there is nothing to narrow. Drop {_KEY}, or give "
                "momentum to each param group."
            )
        for flag, why in (
            ("amsgrad", "the greatest of second moments that are rounded at random grows with the number of steps"),
            ("centered", "the difference of two averages that are rounded may be negative, and its root is taken"),
        ):
            if group.get(flag):
                raise ConfigError(f"{asked}: {type(optimizer).__name__}({flag}=True): {why}. Drop {flag}, or {_KEY}.")


def _refuse_own_step(optimizer: Optimizer) -> None:
    """Raise ConfigError if the user has set ``step`` on the object, because the engine calls the class's ``step``."""
    given: Any = optimizer.__dict__.get("step")
    while getattr(given, "_wrapped_by_lr_sched", False):  # a scheduler's wrapper that counts steps
        given = given.__wrapped__
    if given is not None and getattr(given, "__func__", given) not in (type(optimizer).step, step_of(optimizer)):
        raise ConfigError(
            f"zero.optimizer.sharding: a step() was set on the {type(optimizer).__qualname__} object itself, and here "
            "the step of its class is called, for some tensors at a time. Override step() in a subclass."
        )


def refuse_unequal(table: Sequence[Sequence[Sequence[Mapping[str, object]]]]) -> NoReturn:
    """Raise a ConfigError that names the first setting which differs from rank 0's. If no setting differs, the error
    says that ranks have different numbers of param groups. ``table[rank][optimizer][param group]``: the settings."""
    for rank, found in enumerate(table):
        for number, (first, other) in enumerate(zip(table[0], found, strict=False)):
            for group, (mine, others) in enumerate(zip(first, other, strict=False)):
                if differ := [key for key in mine if others.get(key) != mine[key]]:
                    key = differ[0]
                    raise ConfigError(
                        f"param group {group} of optimizer {number}: expected one {key} on all ranks, got "
                        f"{mine[key]} on rank 0 and {others.get(key)} on rank {rank}: each would step its shards "
                        "with its own. If a scheduler (ReduceLROnPlateau) has set it by a logged value, log that "
                        "with sync_dist=True; else choose it without looking at the rank or at the rank's data."
                    )
    raise ConfigError("optimizers: expected the same param groups on all ranks, got more or fewer on some.")
