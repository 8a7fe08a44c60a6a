"""Load a module's first values from a Hugging Face folder (``zero.init_from``).

::

    stored       tensors in files, of which each rank reads the parts it needs
    folder       reads ranges of the safetensors files of a folder
    conversions  converts tensors that transformers stores differently in files and in memory
    first        finds how a module initializes its values

This file matches the tensors of a folder with parameters and buffers of a module. The folder uses the names of the
transformers model. The module's names may have a prefix (``model.``, an attribute of a LightningModule) and contain
names of adapters (``base_layer``), and some tensors are fused in memory (``conversions``)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from lightning_zero.mesh.local_leaves import saved_shape
from lightning_zero.pretrained.conversions import converted, hugging_face_model
from lightning_zero.pretrained.folder import SafetensorsFolder
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.settings import ConfigError

SHOWN = 5  # names in a message


def sources_from(path: str, module: nn.Module, *, warn: bool, only_meta: bool = False) -> dict[str, StoredTensor]:
    """Return the folder's tensors for parameters and buffers of ``module``, by their names in ``module``.

    ``warn``: warn of missing and unused tensors. ``only_meta``: return only tensors that are on meta in ``module``.
    Raises ConfigError for absent or damaged files, no tensor of ``module``, a quantized tensor or another shape."""
    folder = SafetensorsFolder(path)
    found = match(module, folder)
    if not found.sources:
        raise ConfigError(
            f"zero.init_from: expected tensors of this module in {path}, got none: the folder has {some(folder.keys)}, "
            f"the module {some([name for name, _ in module.named_parameters()])}. Set zero.init_from to the folder of "
            "this model."
        )
    if only_meta:
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        lacking = {name for name, value in tensors if value.is_meta}
        return {name: source for name, source in found.sources.items() if name in lacking}
    if warn and found.missing:
        warnings.warn(
            f"zero.init_from={path} has no {some(found.missing)}: these tensors keep their initial values.",
            stacklevel=2,
        )
    if warn and found.unused:
        warnings.warn(f"zero.init_from={path} has {some(found.unused)}, which the module does not have.", stacklevel=2)
    return found.sources


def some(names: Iterable[str]) -> str:
    """Return the first few of ``names`` as text for a message, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


INSIDE_ADAPTERS = ".base_layer."  # PEFT's name for the layer that it wraps


class Match(NamedTuple):
    """Says which tensors of a folder belong to which parameters and buffers of a module."""

    sources: dict[str, StoredTensor]  # by names of the module
    missing: list[str]  # its parameters and persistent buffers without a source, except adapters
    unused: list[str]  # tensors of the folder


def match(module: nn.Module, folder: SafetensorsFolder) -> Match:
    """Return which tensors of ``folder`` belong to which parameters and buffers of ``module``. Raise ConfigError if the
    shapes differ, or if a stored tensor is quantized."""
    model, prefix = hugging_face_model(module)
    own = {_without_adapters(name): value for name, value in _tensors(model if model is not None else module)}
    stored = {key: folder.tensor(key) for key in folder.keys}
    found = stored if model is None else converted(model, stored, own)
    if model is None:
        prefix = _common_prefix(list(found), own)
        own = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
        names = {name: prefix + name for name in own}
    else:
        names = {_without_adapters(full): prefix + full for full, _ in _tensors(model)}
    sources = {names[key]: value for key, value in found.items() if key in own}
    for key, value in found.items():
        shape = saved_shape(own[key]) if key in own else value.shape
        if value.shape != shape:
            raise ConfigError(
                f"zero.init_from: expected {names[key]} of shape {tuple(shape)} in {folder.path}, got "
                f"{tuple(value.shape)}. Set zero.init_from to the folder of this model, or build the module with these "
                "sizes."
            )
        if key in own and _is_quantized(value, own[key]):
            raise ConfigError(
                f"zero.init_from: expected {names[key]} as floating-point numbers of 16 bits or more in {folder.path}, "
                f"got {str(value.dtype).removeprefix('torch.')}: values of quantized models mean nothing without "
                "their scales. Set zero.init_from to the folder of a model that is not quantized."
            )
    return Match(sources, _missing(module, sources), [key for key in found if key not in own])


def _is_quantized(value: Tensor, own: Tensor) -> bool:
    small = value.dtype.itemsize == 1 or not value.is_floating_point()
    return small and own.is_floating_point() and value.dtype is not own.dtype and not value.is_complex()


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) for all parameters and persistent buffers; tied parameters under each of their names."""
    found: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    for prefix, inner in model.named_modules():
        for key, value in inner.named_buffers(recurse=False):
            if key not in inner._non_persistent_buffers_set:
                found.append((f"{prefix}.{key}" if prefix else key, value))
    return found


def _without_adapters(name: str) -> str:
    return name.replace(INSIDE_ADAPTERS, ".")


def _common_prefix(keys: list[str], own: Mapping[str, Tensor]) -> str:
    """Return the prefix, such as ``model.``, that must be removed from names in ``own`` (the module) so that most of
    them are in ``keys`` (the folder)."""
    ends: Counter[str] = Counter()
    wanted = set(keys)
    for name in own:
        parts = name.split(".")
        for n in range(len(parts)):
            if ".".join(parts[n:]) in wanted:
                ends["".join(f"{part}." for part in parts[:n])] += 1
    return max(ends, key=lambda prefix: (ends[prefix], -len(prefix)), default="")


def _missing(module: nn.Module, sources: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters and persistent buffers of ``module``, except adapters, that are not in
    ``sources``. For a tied tensor, any one of its names in ``sources`` is enough."""
    names: dict[int, list[str]] = {}
    for name, value in _tensors(module):
        names.setdefault(id(value), []).append(name)
    adapters = {name for same in names.values() for name in same if ".lora_" in f".{name}"}
    return [same[0] for same in names.values() if adapters.isdisjoint(same) and sources.keys().isdisjoint(same)]
