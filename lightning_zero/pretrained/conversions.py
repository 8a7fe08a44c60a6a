"""Convert tensors in files to tensors in memory, which transformers may rename or fuse (Mixtral's experts).

transformers itself describes the conversions. It is used only if the user's model has imported it."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.pretrained.stored import StoredTensor


def hugging_face_model(module: nn.Module) -> tuple[Any, str]:
    """Return the outermost transformers model in ``module``, and the prefix that its names have in ``module``. Return
    (None, "") if there is no such model, or several."""
    # Not by the package: asking the package for a class would import this module, and much more.
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return None, ""
    found: list[tuple[str, nn.Module]] = []
    for name, inner in module.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer, _ in found)
        if isinstance(inner, transformers.PreTrainedModel) and not inside:
            found.append((name, inner))
    if len(found) != 1:
        return None, ""
    name, model = found[0]
    return model, f"{name}." if name else ""


def converted(model: Any, stored: Mapping[str, StoredTensor], own: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Convert ``stored``, the tensors in files, to tensors of ``model``, and return them by name. ``own``: the model's
    tensors, by names without the parts that PEFT adds. Stored tensors that ``model`` lacks are returned unchanged."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # older versions convert nothing
        return dict(stored)
    mapping = importlib.import_module("transformers.conversion_mapping")
    transforms = list(mapping.get_model_conversion_mapping(model))
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, StoredTensor] = {}
    groups: dict[str, _Group] = {}
    for key in sorted(stored, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = key, None
        if pattern is None or name not in own:
            found[name if name in own else key] = stored[key]
        else:
            group = groups.setdefault(name, _Group(model, name, by_pattern[pattern]))
            group.add(key, pattern, stored[key])
    for group in groups.values():
        found |= group.tensors()
    # transformers sets this when it loads a model, to save it in the form of the files.
    model._weight_conversions = [t for t in transforms if t.was_used()]
    return found


class _Group:
    """Tensors in files that together become one or more tensors in memory. Reading one of the tensors in memory
    converts the whole group, which stays cached until another group is read."""

    _last: tuple[_Group, dict[str, Tensor]] | None = None

    def __init__(self, model: Any, name: str, converter: Any) -> None:
        self._model, self._name, self._converter = model, name, converter
        self._members: list[tuple[str, str, StoredTensor]] = []

    def add(self, key: str, pattern: str, tensor: StoredTensor) -> None:
        self._members.append((key, pattern, tensor))

    def tensors(self) -> dict[str, StoredTensor]:
        shapes = self._convert([torch.empty(t.shape, dtype=t.dtype, device="meta") for _, _, t in self._members])
        return {name: self._tensor(name, value) for name, value in shapes.items()}

    def _tensor(self, name: str, like: Tensor) -> StoredTensor:
        def read(start: int, stop: int, order: Sequence[int] | None) -> Tensor:
            value = self._values()[name]
            return (value if order is None else value.permute(tuple(order))).reshape(-1)[start:stop].clone()

        return StoredTensor(like.shape, like.dtype, read)

    def _values(self) -> dict[str, Tensor]:
        if _Group._last is None or _Group._last[0] is not self:
            _Group._last = None  # first, so that memory holds one group only
            _Group._last = self, self._convert([t.whole() for _, _, t in self._members])
        return _Group._last[1]

    def _convert(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converter)
        for (key, pattern, _), value in zip(self._members, values, strict=True):
            converter.add_tensor(self._name, key, pattern, value)
        made = converter.convert(self._name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def forget() -> None:
    """Free the cached tensors of the group that was read last."""
    _Group._last = None
