"""Cuts a batch along the sequence.

What is cut by itself::

    tokens [batch, length]                          for a model that is given labels=tokens, as transformers has it
    (tokens [batch, length], labels [batch, length, ...])
    {"input_ids": [batch, length], ...}             every tensor [batch, length, ...], position_ids in any form; but
                                                    attention_mask, which stays whole: attention sees all positions

Everything else is cut by the module's own ``split_sequence(batch, part)``, which returns a batch made of
:meth:`SequencePart.of`; or ``batch`` as it is, which every rank of the group then computes as a whole.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_zero.config import ConfigError
from lightning_zero.sequence.part import SequencePart

HOOK = "split_sequence"
IGNORED = -100  # a label that counts nothing, by torch's default
_INPUTS = ("input_ids", "inputs_embeds")
_WHOLE = ("attention_mask",)
_BY_PADDING = "create_position_ids_from_input_ids"  # what models of transformers call that have positions of their own
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


def split_batch(module: nn.Module, batch: Any, part: SequencePart) -> Any:
    """This rank's part of ``batch``; ``batch`` itself where the module leaves it whole.

    Raises:
        ConfigError: nothing says how to cut it, or it cannot be cut.
    """
    if callable(hook := getattr(module, HOOK, None)):
        return hook(batch, part)
    if isinstance(batch, Tensor) and _is_tokens(batch):
        return part.of(batch)
    if isinstance(batch, Mapping) and any(key in batch for key in _INPUTS):
        return _split_mapping(module, batch, part)
    if isinstance(batch, (list, tuple)) and len(batch) > 1 and all(isinstance(item, Tensor) for item in batch):
        inputs, *others = batch
        if _is_tokens(inputs) and all(item.shape[:2] == inputs.shape for item in others):
            _count(part, batch[1])
            parts = [part.of(item) for item in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise ConfigError(
        "zero.sequence_parallel: expected a batch that says where its sequences are: tokens [batch, length] of whole "
        "numbers, a pair of them and labels [batch, length], or a mapping with input_ids; got "
        f"{_describe(batch)}. Give {type(module).__name__} a method {HOOK}(self, batch, part) that returns the batch "
        "with part.of(tensor, dim=1) in the place of each tensor of the sequence, and part.keep(tensor, dim) of each "
        "that stays whole."
    )


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _count(part: SequencePart, labels: Tensor) -> None:
    if _is_tokens(labels):
        part.count(labels != IGNORED)


def _split_mapping(module: nn.Module, batch: Mapping[str, Any], part: SequencePart) -> Any:
    inputs = next(batch[key] for key in _INPUTS if key in batch and batch[key] is not None)
    length = inputs.shape[1]
    packed = [key for key in _PACKED if batch.get(key) is not None]
    if packed:
        raise ConfigError(
            f"zero.sequence_parallel: expected one text in each row of a batch, got {packed[0]}, which packs several. "
            "Pad texts in the place of packing them, or set zero.sequence_parallel=1."
        )
    changed: Any = copy.copy(batch)
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        if key in _WHOLE:
            changed[key] = part.keep(value, *(d for d in (-2, -1)[value.dim() == 2 :] if value.shape[d] == length))
        elif key == "position_ids":
            part.whole_positions = part.keep(value, -1) if value.dim() == 2 else None
            changed[key] = part.of(value, dim=-1)
        elif value.dim() >= 2 and value.shape[1] == length:
            changed[key] = part.of(value)
    if isinstance(labels := batch.get("labels"), Tensor) and labels.shape[:2] == inputs.shape[:2]:
        _count(part, labels)
    if batch.get("position_ids") is None and (counted := _positions_count(module)) is not None:
        changed["position_ids"] = part.of(_whole_positions(counted, inputs, batch.get("attention_mask")))
    return changed


def _whole_positions(counted: Counted, inputs: Tensor, mask: Any) -> Tensor:
    if counted is Counted.mask and isinstance(mask, Tensor) and mask.dim() == 2:
        return (mask.cumsum(1) * mask - 1).long()
    return torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)


class Counted(Enum):
    """What positions are counted by that a model of transformers makes up."""

    all = "all tokens, from 0 on"
    mask = "those of the attention mask"


_counted: WeakKeyDictionary[nn.Module, Counted | None] = WeakKeyDictionary()  # of modules that were looked at


def _positions_count(module: nn.Module) -> Counted | None:
    """How a model of transformers in ``module`` counts positions that it is not given; ``None``: it takes none.

    Raises:
        ConfigError: by what only it knows.
    """
    if module not in _counted:
        _counted[module] = _look_at(module)
    return _counted[module]


def _look_at(module: nn.Module) -> Counted | None:
    modules = list(module.modules())
    models = [m for m in modules if hasattr(m, "config") and hasattr(m, "loss_function")]
    takers = [m for m in models if "position_ids" in inspect.signature(type(m).forward).parameters]
    if not takers:
        return None
    by_mask = False
    for inner in modules:
        if hasattr(inner, _BY_PADDING) or hasattr(sys.modules[type(inner).__module__], _BY_PADDING):
            raise ConfigError(
                f"zero.sequence_parallel: expected position_ids in the batch for {type(takers[0]).__name__}, which "
                "counts positions by its padding, got none. Add them in the collate function: mask.cumsum(1) * mask + "
                "padding_idx, with mask = (input_ids != padding_idx).long()."
            )
        if isinstance(inner, nn.Embedding):
            by_mask = by_mask or "attention_mask" in inspect.signature(type(inner).forward).parameters
    return Counted.mask if by_mask else Counted.all


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor {tuple(batch.shape)} of {batch.dtype}"
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__}({', '.join(f'{key}: {_describe(value)}' for key, value in batch.items())})"
    if isinstance(batch, (list, tuple)):
        return f"{type(batch).__name__}({', '.join(map(_describe, batch))})"
    return type(batch).__name__
