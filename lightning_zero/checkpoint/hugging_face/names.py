"""Find under which names, and in which form, a Hugging Face folder has the tensors of a module.

Names lose the prefix that the model has in its LightningModule. Tensors that transformers converts at loading are
converted back, and tied parameters appear once. Of a PEFT model PEFT's own functions decide what is written.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.pretrained.conversions import hugging_face_model
from lightning_zero.pretrained.folder import SINGLE

ADAPTERS = "adapter_model.safetensors"
RECORD = "lightning_zero_hugging_face"  # in a checkpoint: which transformers model it holds


class Group(NamedTuple):
    """Tensors of a module that files hold in another form. ``convert`` maps values by key in files to values by name in
    the module."""

    members: tuple[str, ...]
    results: dict[str, Tensor]  # on meta
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Outgoing(NamedTuple):
    """What to export. ``renamed``: name in files -> key of a tensor that is not converted. ``model``: the module's
    model of transformers or PEFT; None: it has none. ``adapters``: of a PEFT model, by name; those not named "default"
    are each in a folder, which leads their tensors' names. ``reads``: keys whose values PEFT needs to plan."""

    model: Any
    renamed: dict[str, str]
    groups: list[Group]
    adapters: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def files(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the exported tensors on meta, by file and by name in the file. ``state``: the module's, by key."""
        tensors = {name: state[key] for name, key in self.renamed.items()}
        tensors |= {name: value for group in self.groups for name, value in group.results.items()}
        if not self.adapters:
            return {SINGLE: tensors}
        found: dict[str, dict[str, Tensor]] = {}
        for folder in sorted(map(folder_of, self.adapters), reverse=True):  # "" last, which takes the rest
            own = [name for name in tensors if name.startswith(folder)]
            found[f"{folder}{ADAPTERS}"] = {name.removeprefix(folder): tensors.pop(name) for name in own}
        return found


def alone(renamed: Mapping[str, str], state: Mapping[str, Tensor]) -> list[Group]:
    """Return a group for each tensor in ``renamed``, which has the form of ``Outgoing.renamed``."""
    named = lambda name, key, values: {name: values[key]}  # noqa: E731
    return [Group((key,), {name: state[key]}, partial(named, name, key)) for name, key in renamed.items()]


def folder_of(adapter: str) -> str:
    return "" if adapter == "default" else f"{adapter}/"


def outgoing(module: nn.Module, state: Mapping[str, Tensor], *, asks: bool = True) -> Outgoing:
    """Plan the export of ``module``. Of ``state``, its state dict, only shapes, dtypes and object identity are used,
    but for ``reads``: call again with their values, while the module has them. ``asks``: PEFT compares the vocabulary
    with that of the original model, for which it may ask the hub; otherwise embeddings are left out."""
    if (peft := sys.modules.get("peft")) is not None:
        for name, inner in module.named_modules():
            if isinstance(inner, peft.PeftModel):
                return _adapters(inner, f"{name}." if name else "", state, "auto" if asks else False)
    model, prefix = hugging_face_model(module)
    own = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
    own = _once(own, state, model)
    if model is None:
        return Outgoing(None, own, [])
    return _in_form_of_files(model, own, state)


def _adapters(model: Any, prefix: str, state: Mapping[str, Tensor], embeddings: Any) -> Outgoing:
    own = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
    # One object for each name. What PEFT selects it passes on; other results it has computed.
    given = {name: state[key] if not state[key].is_meta else _on_meta(state[key]) for name, key in own.items()}
    names = {id(value): own[name] for name, value in given.items()}
    select = importlib.import_module("peft").get_peft_model_state_dict
    renamed: dict[str, str] = {}
    computed: dict[str, Tensor] = {}
    missing: list[str] = []
    for adapter, config in model.peft_config.items():
        part = "prompt_encoder." if config.is_prompt_learning else getattr(model.base_model, "prefix", "")
        reads = [name for name in own if part in name and adapter in name.split(".")]
        waits = any(given[name].is_meta for name in reads)
        found: dict[str, Tensor] = {}
        if not (waits and config.is_prompt_learning):  # these read the modules
            with contextlib.suppress(NotImplementedError) if waits else contextlib.nullcontext():  # on meta
                found = select(model, state_dict=given, adapter_name=adapter, save_embedding_layers=embeddings)
        made = {name: value for name, value in found.items() if id(value) not in names}
        if waits and (not found or any(value.is_meta for value in made.values())):
            missing += [own[name] for name in reads]
            continue
        folder = folder_of(adapter)
        renamed |= {f"{folder}{name}": names[id(value)] for name, value in found.items() if name not in made}
        if config.is_prompt_learning:
            made = {name: value.to(given[reads[0]].dtype) for name, value in made.items()}
        computed |= {f"{folder}{name}": value.detach().clone() for name, value in made.items()}
    groups = [Group((), {name: _on_meta(value) for name, value in computed.items()}, lambda _: computed)]
    return Outgoing(model, renamed, groups if computed else [], tuple(model.peft_config), tuple(missing))


def _once(own: Mapping[str, str], state: Mapping[str, Tensor], model: Any) -> dict[str, str]:
    """Return ``own``, names in files and keys of ``state``, with a single name for each tied tensor: one that is not in
    the model's ``_tied_weights_keys``, else the first."""
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
    revert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda values: values  # noqa: E731
    with contextlib.suppress(ImportError):  # with older transformers the form of files is the model's own
        loading = importlib.import_module("transformers.core_model_loading")
        revert = partial(loading.revert_weight_conversion, model)
    made = revert(dict(meta))
    renamed = {name: own[names[id(value)]] for name, value in made.items() if id(value) in names}
    plain = set(renamed.values())
    left = [name for name, key in own.items() if key not in plain]
    together: dict[tuple[str, ...], list[str]] = {}  # by the file names that each would give alone
    for name in left:
        together.setdefault(tuple(sorted(revert({name: meta[name]}))), []).append(name)
    groups = []
    for members in together.values():
        results = revert({name: meta[name] for name in members})
        groups.append(Group(tuple(own[name] for name in members), results, _converter(members, own, revert)))
    return Outgoing(model, renamed, groups)


def _converter(members: Sequence[str], own: Mapping[str, str], revert: Any) -> Any:
    return lambda values: revert({name: values[own[name]] for name in members})


def _on_meta(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def record_of(module: nn.Module, source: str | None) -> dict[str, str] | None:
    """Describe the transformers model in ``module`` by plain values, so that a checkpoint can be converted without the
    user's code. None: there is no such model, or it has adapters. ``source``: the folder that it came from."""
    model, prefix = hugging_face_model(module)
    if model is None or prefix.endswith("base_model.model."):  # with adapters
        return None
    config = json.dumps(model.config.to_diff_dict(), default=str)
    origin = source or getattr(model.config, "_name_or_path", "") or ""
    return {"prefix": prefix, "class": type(model).__name__, "config": config, "source": str(origin)}


def model_of(record: Mapping[str, str]) -> Any:
    """Build on meta the model that ``record`` describes; return None if transformers lacks it or is missing."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return None
    kind = getattr(transformers, record["class"], None)
    if kind is None:
        return None
    config = kind.config_class.from_dict(json.loads(record["config"]))
    with torch.device("meta"):
        return kind(config)
