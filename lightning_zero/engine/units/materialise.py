"""Gives meta parameters and buffers memory and initial values, unit by unit. Parameters stay the same objects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_zero.config import ConfigError


def materialise(module: nn.Module, unit: str, units: Collection[str], device: torch.device) -> None:
    """Give meta parameters and buffers of a unit memory and initial values; tied parameters stay tied.

    On an engine whose own device is meta (simulated scale) nothing has values, and all stays as it is.
    """
    if device.type == "meta":
        return
    for name, inner in _own_modules(module, unit, units):
        if not any(t.is_meta for t in _own_tensors(inner)):
            continue
        reset = getattr(inner, "reset_parameters", None)
        if not callable(reset):
            raise ConfigError(
                f"module {name or '(root)'} ({type(inner).__name__}) holds parameters or buffers on the meta device "
                "and has no reset_parameters() to initialise them. Give it that method, or build it off meta."
            )
        for param in inner.parameters(recurse=False):
            if param.is_meta:
                move_param(param, torch.empty_like(param, device=device))
        for key, buffer in inner.named_buffers(recurse=False):
            if buffer.is_meta:
                inner._buffers[key] = torch.empty_like(buffer, device=device)
        reset()


def move_param(param: nn.Parameter, value: Tensor) -> None:
    """Move a parameter to another device and keep the object: ``.data =`` refuses that, a swap does not."""
    torch.utils.swap_tensors(param, nn.Parameter(value, requires_grad=param.requires_grad))


def _own_modules(module: nn.Module, unit: str, units: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that belong to ``unit`` and to no unit inside it."""
    for name, inner in module.named_modules():
        parts = name.split(".") if name else []
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        if next((p for p in prefixes if p in units), "") == unit:
            yield name, inner


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
