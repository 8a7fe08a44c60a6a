"""Gives meta parameters and buffers memory and initial values, unit by unit. Parameters stay the same objects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_zero.config import ConfigError
from lightning_zero.pretrained.first import ADAPTER, reset_adapter, resetter


def materialise(
    module: nn.Module,
    unit: str,
    units: Collection[str],
    device: torch.device,
    sources: Mapping[str, Tensor] | None = None,
) -> None:
    """Give meta parameters and buffers of a unit memory and initial values; tied parameters stay tied.

    Parameters that have a source stay on meta: nobody needs them whole. On an engine whose own device is meta
    (simulated scale) nothing has values, and all stays as it is.

    Args:
        sources: first values by name.
    """
    if device.type == "meta":
        return
    sources = sources or {}
    sourced = {id(p) for fqn, p in module.named_parameters(remove_duplicate=False) if fqn in sources}
    adapters: list[tuple[str, nn.Module]] = []
    own = list(_own_modules(module, unit, units))
    # What was built elsewhere may be NaN on purpose.
    were_meta = {(name, key) for name, inner in own for key, tensor in _own_tensors(inner).items() if tensor.is_meta}
    for name, inner in own:
        if hasattr(inner, ADAPTER) and any(p.is_meta and id(p) not in sourced for p in _adapter_params(inner)):
            adapters.append((name, inner))
        for key, buffer in inner.named_buffers(recurse=False):
            if buffer.is_meta and (source := sources.get(f"{name}.{key}" if name else key)) is not None:
                inner._buffers[key] = torch.empty_like(buffer, device=device).copy_(source)
        lacking = {key: t for key, t in _own_tensors(inner).items() if t.is_meta and id(t) not in sourced}
        if lacking:
            _reset(module, name, inner, lacking, device)
    for name, inner in adapters:
        reset_adapter(module, name, inner)
    for name, inner in own:
        _refuse_without_values(name, inner, {key for other, key in were_meta if other == name})


def _reset(module: nn.Module, name: str, inner: nn.Module, lacking: Mapping[str, Tensor], device: torch.device) -> None:
    """Give ``lacking`` tensors of ``inner`` memory, and the values that ``inner`` itself gives them."""
    reset = resetter(module, name, inner)
    if reset is None:
        key = next(iter(lacking))
        raise ConfigError(
            f"module {name or '(root)'} ({type(inner).__name__}) holds parameters or buffers on the meta device "
            f"({key}) and has no reset_parameters() to initialise them, nor has {f'{name}.{key}' if name else key} a "
            "source in zero.init_from. Give it that method, a source, or build it off meta."
        )
    for key, tensor in lacking.items():
        value = torch.empty_like(tensor, device=device)
        if value.is_floating_point():
            value.fill_(torch.nan)  # to be found if nobody puts a value there
        if isinstance(tensor, nn.Parameter):
            move_param(tensor, value)
        else:
            inner._buffers[key] = value
    with torch.no_grad():
        reset()


def _refuse_without_values(name: str, inner: nn.Module, were_meta: Collection[str]) -> None:
    for key, tensor in _own_tensors(inner).items():
        if key not in were_meta:
            continue
        if not tensor.is_meta and tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().all()):
            raise ConfigError(
                f"{f'{name}.{key}' if name else key} was on the meta device, and {type(inner).__name__} has not "
                "initialised it. Have its reset_parameters() do that, or build it off meta."
            )


def move_param(param: nn.Parameter, value: Tensor) -> None:
    """Give ``param`` the memory of ``value``, on another device. It stays the same object, and keeps its class,
    attributes and hooks, and the weak references to it (``nn.LSTM`` holds some)."""
    if torch._has_compatible_shallow_copy_type(param, value):
        grad, param.grad = param.grad, None
        param.data = value
        param.grad = None if grad is None else grad.to(value.device)
        return
    # From or to meta, where torch refuses that. ``torch.utils.swap_tensors`` would swap class and attributes too, and
    # refuse weak references.
    hooks, grad_hooks = param._backward_hooks, param._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(param, nn.Parameter(value, requires_grad=param.requires_grad))
    # The tables of hooks stay with the object, but autograd's references to them have gone with what was swapped.
    # Setting None first makes torch put them there anew.
    for name, table in (("_backward_hooks", hooks), ("_post_accumulate_grad_hooks", grad_hooks)):
        setattr(param, name, None)
        setattr(param, name, table)


def _own_modules(module: nn.Module, unit: str, units: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that belong to ``unit`` and to no unit inside it."""
    for name, inner in module.named_modules():
        parts = name.split(".") if name else []
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        if next((p for p in prefixes if p in units), "") == unit:
            yield name, inner


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _adapter_params(layer: nn.Module) -> Iterable[nn.Parameter]:
    return (p for name, p in layer.named_parameters() if any(part.startswith("lora_") for part in name.split(".")))
