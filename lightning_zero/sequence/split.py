"""Cut this rank's part out of a batch, along the sequence.

These batches are cut automatically::

    tokens [batch, length]                          for a model that is given labels=tokens, as transformers has it
    (tokens [batch, length], labels [batch, length, ...])
    {"input_ids": [batch, length], ...}             every tensor [batch, length, ...], position_ids in any form; but
                                                    attention_mask, which stays whole: attention sees all positions

Other batches need the module's ``split_sequence(batch, part)``. It returns a batch made by :meth:`SequencePart.of`, or
``batch`` itself, which every rank of the group then computes as a whole.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.sequence.part import SequencePart
from lightning_zero.settings import ConfigError

HOOK = "split_sequence"
_INPUTS = ("input_ids", "inputs_embeds")
_WHOLE = ("attention_mask",)
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


def split_batch(module: nn.Module, batch: Any, part: SequencePart) -> Any:
    """Return this rank's part of ``batch``, or ``batch`` if it stays whole. Raises ConfigError for an unknown kind."""
    if callable(hook := getattr(module, HOOK, None)):
        return hook(batch, part)
    if isinstance(batch, Tensor) and _is_tokens(batch):
        return part.of(batch)
    if isinstance(batch, Mapping) and any(key in batch for key in _INPUTS):
        return _split_mapping(module, batch, part)
    if isinstance(batch, (list, tuple)) and len(batch) > 1 and all(isinstance(item, Tensor) for item in batch):
        inputs, *others = batch
        if _is_tokens(inputs) and all(item.shape[:2] == inputs.shape for item in others):
            parts = [part.of(item) for item in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise ConfigError(
        "zero.sequence_parallel: expected a batch that says where its sequences are: tokens [batch, length] of whole "
        f"numbers, a pair of them and labels [batch, length], or a mapping with input_ids; got {_describe(batch)}. "
        f"Give {type(module).__name__} a method {HOOK}(self, batch, part) that returns the batch with part.of(tensor, "
        "dim=1) in the place of each tensor of the sequence, and part.keep(tensor, dim) of each that stays whole."
    )


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _split_mapping(module: nn.Module, batch: Mapping[str, Any], part: SequencePart) -> Any:
    inputs = next(batch[key] for key in _INPUTS if key in batch and batch[key] is not None)
    length = inputs.shape[1]
    changed: Any = copy.copy(batch)
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    _check_positions(batch, positions, mask)
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        if key in _WHOLE:
            changed[key] = part.keep(value, *(d for d in (-2, -1)[value.dim() == 2 :] if value.shape[d] == length))
        elif key == "position_ids":
            changed[key] = part.of(value, dim=-1)
        elif value.dim() >= 2 and value.shape[1] == length:
            changed[key] = part.of(value)
    # A transformers model that takes positions would start them at 0 in each part.
    models = (m for m in module.modules() if hasattr(m, "config") and hasattr(m, "loss_function"))
    takes = any("position_ids" in inspect.signature(type(model).forward).parameters for model in models)
    if positions is None and part.size > 1 and takes:
        changed["position_ids"] = part.of(torch.arange(length, device=inputs.device).expand(len(inputs), -1))
    return changed


def _check_positions(batch: Mapping[str, Any], positions: Any, mask: Any) -> None:
    """Raise ConfigError if a sequence in ``batch`` holds several texts, or if padding comes before a text and there are
    no ``position_ids``."""
    packed = [key for key in _PACKED if batch.get(key) is not None]
    if isinstance(positions, Tensor) and positions.dim() == 2 and mask is None and (positions.diff(dim=1) != 1).any():
        packed.append("position_ids that restart inside a sequence")
    if packed:
        raise ConfigError(
            f"zero.sequence_parallel: expected one text per sequence of a batch, got {packed[0]} (packed texts). Pad "
            "texts instead of packing them, or set zero.sequence_parallel=1."
        )
    if positions is None and isinstance(mask, Tensor) and mask.dim() == 2 and (mask[:, 1:] > mask[:, :-1]).any():
        raise ConfigError(
            "zero.sequence_parallel: expected position_ids in a batch whose attention_mask lets padding come before a "
            "text (models count it or not), got none. Add them in the collate function, as the model counts them, or "
            "pad behind the texts."
        )


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor {tuple(batch.shape)} of {batch.dtype}"
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__}({', '.join(f'{key}: {_describe(value)}' for key, value in batch.items())})"
    if isinstance(batch, (list, tuple)):
        return f"{type(batch).__name__}({', '.join(map(_describe, batch))})"
    return type(batch).__name__
