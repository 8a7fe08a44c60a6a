"""Finds what computes with the samples of a batch together, and so gives something else for chunks of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_zero.config import ConfigError, ZeroConfig
from lightning_zero.engine.vertical.split import Changes


def whole_batch_units(module: nn.Module, names: Sequence[str], config: ZeroConfig) -> set[str]:
    """Names of the units that run on the whole batch: those of ``zero.unit.whole_batch``, and those around others.

    Args:
        names: of all units, the root (``""``) among them.
    """
    wanted = set(config.unit.whole_batch)
    classes = {name: {type(inner).__name__ for inner in module.get_submodule(name).modules()} for name in names if name}
    return {""} | units_around(names) | {name for name, found in classes.items() if found & wanted}


def units_around(names: Sequence[str]) -> set[str]:
    """Names of the units that hold others. They see the whole batch, as the root does, and keep what they compute."""
    return {name for name in names if any(name and other.startswith(f"{name}.") for other in names)}


def check_divided(module: nn.Module, names: Sequence[str], config: ZeroConfig) -> None:
    """Check that the units of ``module`` can be run in chunks.

    Raises:
        ConfigError: a unit has a part that couples the samples of a batch; a class of ``zero.unit.whole_batch`` does
            not occur in any unit; no unit is left.
    """
    if config.vertical_chunks == 1:
        return
    present = {type(m).__name__ for name in names if name for m in module.get_submodule(name).modules()}
    if missing := sorted(set(config.unit.whole_batch) - present):
        raise ConfigError(
            f"zero.unit.whole_batch: expected class names of units, or of modules inside of them, got {missing[0]!r}, "
            f"which does not occur. They have {', '.join(sorted(present))}. Change zero.unit.whole_batch."
        )
    whole = whole_batch_units(module, names, config)
    divided = [name for name in names if name not in whole]
    if not divided:
        raise ConfigError(
            f"zero.vertical_chunks: expected units that run in chunks, got {config.vertical_chunks} with a model none "
            "of "
            "whose units do. Name blocks in zero.unit.classes, change zero.unit.whole_batch, or set "
            "zero.vertical_chunks=1."
        )
    for name in divided:
        unit = module.get_submodule(name)
        for inner_name, why in coupling_parts(unit):
            inner = unit.get_submodule(inner_name)
            raise ConfigError(
                f"zero.vertical_chunks={config.vertical_chunks}: unit {name} ({type(unit).__name__}) holds "
                f"{inner_name or 'itself'} ({type(inner).__name__}), which {why}. Run such units on the whole batch "
                f"with zero.unit.whole_batch=[{type(inner).__name__}], or set zero.vertical_chunks=1."
            )


def coupling_parts(unit: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of the modules in ``unit`` that are known to couple samples, and how."""
    for name, inner in unit.named_modules():
        if isinstance(inner, _BatchNorm) and (inner.training or not inner.track_running_stats):
            yield name, "normalizes over the samples of a batch"
        elif isinstance(inner, _InstanceNorm) and inner.training and inner.track_running_stats:
            yield name, "averages statistics over the samples of a batch"
        elif isinstance(inner, (nn.RNNBase, nn.MultiheadAttention)) and not inner.batch_first:
            yield name, "takes the batch as its second dimension (batch_first=False)"
        elif isinstance(inner, _SpectralNorm) or any(
            isinstance(hook, SpectralNorm) for hook in inner._forward_pre_hooks.values()
        ):
            yield name, "changes its weight at every call (spectral_norm)"


def changes_with_batch(function: Callable[..., Any], module: nn.Module | None, title: str) -> Callable[..., Any]:
    """``function``, the forward of ``module``, refused where it changes the module's buffers: running statistics would
    be of chunks, and move on again as they are computed again.
    """
    if module is None:
        return function
    buffers = [(name, buffer, buffer._version) for name, buffer in module.named_buffers() if not buffer.is_inference()]
    if not buffers:
        return function

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        now = dict(module.named_buffers())
        for name, buffer, version in buffers:
            if now.get(name) is not buffer or buffer._version != version:
                owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
                raise Changes(
                    f"{title} is run in chunks (zero.vertical_chunks), and its forward changes the buffer {name} of "
                    f"{owner}, which would be that of chunks, and change with each of them. Run such units on the "
                    f"whole batch with zero.unit.whole_batch=[{owner}], or set zero.vertical_chunks=1."
                )
        return result

    return call
