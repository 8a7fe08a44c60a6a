"""Names and forms of a module's tensors in a Hugging Face folder.

Names lose the prefix of the model in a LightningModule. Tensors that transformers converts at loading are converted
back, tied parameters appear once, and of a PEFT model only the adapters are written."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.pretrained.conversions import hugging_face_model

ADAPTERS = "adapter_model.safetensors"


class Group(NamedTuple):
    """Tensors in memory that together become other tensors in files. ``convert`` maps values by name."""

    members: tuple[str, ...]
    results: dict[str, Tensor]  # on meta
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Outgoing(NamedTuple):
    """What to export. ``renamed``: name in files -> name in the module's state dict. ``model``: of transformers or
    PEFT, or None."""

    model: Any
    renamed: dict[str, str]
    groups: list[Group]
    adapters: bool

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the files by name, on meta like ``state``."""
        renamed = {name: state[key] for name, key in self.renamed.items()}
        return renamed | {name: value for group in self.groups for name, value in group.results.items()}


def outgoing(module: nn.Module, state: Mapping[str, Tensor]) -> Outgoing:
    """Plan the export of ``module``. Of its state dict ``state`` only shapes, dtypes and object identity count."""
    wrapped, prefix = _peft_model(module)
    if wrapped is not None:
        return _adapters(wrapped, prefix, state)
    model, prefix = hugging_face_model(module)
    own = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
    own = _once(own, state, model)
    if model is None:
        return Outgoing(None, own, [], adapters=False)
    return _in_form_of_files(model, own, state)


def _peft_model(module: nn.Module) -> tuple[Any, str]:
    peft = sys.modules.get("peft")
    if peft is not None:
        for name, inner in module.named_modules():
            if isinstance(inner, peft.PeftModel):
                return inner, f"{name}." if name else ""
    return None, ""


def _adapters(model: Any, prefix: str, state: Mapping[str, Tensor]) -> Outgoing:
    own = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
    meta = {name: _on_meta(state[key]) for name, key in own.items()}
    names = {id(value): own[name] for name, value in meta.items()}
    found = importlib.import_module("peft").get_peft_model_state_dict(
        model, state_dict=meta, save_embedding_layers=False
    )
    return Outgoing(model, {name: names[id(value)] for name, value in found.items()}, [], adapters=True)


def _once(own: Mapping[str, str], state: Mapping[str, Tensor], model: Any) -> dict[str, str]:
    """Keep one name of each tied tensor: the one that the others are tied to, else the first."""
    tied = getattr(model, "_tied_weights_keys", None)
    tied = set(tied) if tied else set()
    names: dict[int, list[str]] = {}
    for name, key in own.items():
        names.setdefault(id(state[key]), []).append(name)
    kept = [next((n for n in same if n not in tied), same[0]) for same in names.values()]
    return {name: own[name] for name in kept}


def _in_form_of_files(model: Any, own: Mapping[str, str], state: Mapping[str, Tensor]) -> Outgoing:
    meta = {name: _on_meta(state[key]) for name, key in own.items()}
    names = {id(value): name for name, value in meta.items()}
    revert = _reverter(model)
    made = revert(dict(meta))
    renamed = {name: own[names[id(value)]] for name, value in made.items() if id(value) in names}
    plain = set(renamed.values())
    left = [name for name, key in own.items() if key not in plain]
    groups = []
    for members in _together(left, meta, revert):
        results = revert({name: meta[name] for name in members})
        groups.append(Group(tuple(own[name] for name in members), results, _converter(members, own, revert)))
    return Outgoing(model, renamed, groups, adapters=False)


def _converter(members: Sequence[str], own: Mapping[str, str], revert: Any) -> Any:
    return lambda values: revert({name: values[own[name]] for name in members})


def _together(left: Sequence[str], meta: Mapping[str, Tensor], revert: Any) -> list[list[str]]:
    """Group names that are converted together: alone each would give a tensor of the same name."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in left:
        groups.setdefault(tuple(sorted(revert({name: meta[name]}))), []).append(name)
    return list(groups.values())


def _reverter(model: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the function that converts tensors to the form of files; none with older transformers."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return lambda values: values
    return lambda values: loading.revert_weight_conversion(model, values)


def _on_meta(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
