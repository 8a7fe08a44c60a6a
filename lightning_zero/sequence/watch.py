"""Sees what a step calls: gives attention the whole sequence, and refuses what would compute wrong numbers on a part.

A function that is imported by name is found too, because torch tells a mode of every call. What nobody can see is a
mean over positions that is no loss: it is one of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.config import ConfigError
from lightning_zero.sequence.attention import attend, is_as_it_is
from lightning_zero.sequence.part import SequencePart, current

scaled_dot_product_attention = F.scaled_dot_product_attention  # torch's own, whatever stands in its place in a step


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention``, over the whole sequence."""
    part = current()
    if part is None or is_as_it_is():
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                                            enable_gqa=enable_gqa)  # fmt: skip

    def inner(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale=scale,
                                            enable_gqa=query.shape[1] != key.shape[1])  # fmt: skip

    if not enable_gqa and query.dim() == key.dim() == 4 and key.shape[1] != query.shape[1]:
        key, value = (tensor.expand(-1, query.shape[1], -1, -1) for tensor in (key, value))
    return attend(part, inner, query, key, value, attn_mask)


class Watch(TorchFunctionMode):
    """Inside, calls of torch's functions go by the checks below. It costs microseconds for each."""

    def __init__(self, buffers: set[int]) -> None:
        """
        Args:
            buffers: ids of the buffers of the module, which may be tables of positions.
        """
        super().__init__()
        self._buffers = buffers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        part = current()
        if part is None or is_as_it_is():
            return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            return whole_attention(*args, **kwargs)
        if func is Tensor.__getitem__:
            _check_index(part, args[0], args[1], self._buffers)
            return func(*args, **kwargs)
        if (check := _BEFORE.get(func)) is not None:
            check(part, args, kwargs)
        result = func(*args, **kwargs)
        if func in _ARANGES:
            _check_positions(part, args, result)
        return result


def _refuse(expected: str, got: str, change: str) -> None:
    raise ConfigError(f"zero.sequence_parallel: expected {expected}, got {got}. {change}, or set it to 1.")


def _check_positions(part: SequencePart, args: Any, made: Tensor) -> None:
    """``torch.arange(length)`` of a part: nearly always positions, which begin at 0 in each part."""
    starts_at_0 = len(args) < 2 or args[0] == 0
    by_one = len(args) < 3 or args[2] == 1
    if part.knows_positions or made.shape != (part.length,) or not (starts_at_0 and by_one):
        return
    _refuse(
        "a model that is told the positions of its part",
        f"torch.arange({part.length}) inside of a step, the positions of the first part",
        "Make them by lightning_zero.sequence_positions(length, device); a model of transformers takes "
        "batch['position_ids']; where these are no positions, call sequence_positions before",
    )


def _check_index(part: SequencePart, tensor: Tensor, index: Any, buffers: set[int]) -> None:
    if part.length is None:
        return
    slices = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(s, slice) and s.step in (None, 1) for s in slices):
        return
    dim = 0
    for place, item in enumerate(slices):
        if item is None:
            continue
        if item is Ellipsis:
            dim = tensor.dim() - sum(s is not None for s in slices[place + 1 :])
            continue
        if isinstance(item, slice) and dim < tensor.dim():
            _check_slice(part, tensor, dim, item, buffers)
        dim += 1


def _check_slice(part: SequencePart, tensor: Tensor, dim: int, item: slice, buffers: set[int]) -> None:
    size = tensor.shape[dim]
    if size == part.length and dim == 1 and (item.start, item.stop) in ((1, None), (0, -1), (None, -1)):
        _refuse(
            "a step that looks at each position by itself, but in attention",
            f"a slice that shifts {tuple(tensor.shape)} by one position, inside of a part",
            "Shift labels in the data, or in split_sequence: part.of(tokens[:, 1:])",
        )
    from_begin = item.start in (None, 0) and item.stop == part.length and part.length is not None
    from_begin = from_begin and size > item.stop
    if from_begin and not part.knows_positions and (isinstance(tensor, nn.Parameter) or id(tensor) in buffers):
        _refuse(
            "a model that is told the positions of its part",
            f"the first {part.length} rows of a table {tuple(tensor.shape)} inside of a step",
            "Index it by lightning_zero.sequence_positions(length, device)",
        )


def _check_softmax(part: SequencePart, args: Any, kwargs: Any) -> None:
    scores = args[0] if args else kwargs["input"]
    if scores.dim() >= 3 and part.length not in (None, 1) and scores.shape[-2:] == (part.length, part.length):
        _refuse(
            "attention by F.scaled_dot_product_attention, or by the attention functions of transformers",
            f"a softmax of {tuple(scores.shape)}, which looks like attention inside of a part",
            "Call F.scaled_dot_product_attention",
        )


def _check_multi_head(part: SequencePart, args: Any, kwargs: Any) -> None:
    if kwargs.get("need_weights", True):
        _refuse(
            "need_weights=False in nn.MultiheadAttention, whose weights are those of a part of the heads",
            "need_weights=True",
            "Pass need_weights=False",
        )


def _check_along(part: SequencePart, args: Any, kwargs: Any) -> None:
    """Functions that bring values from one position to another."""
    tensor = args[0] if args else kwargs["input"]
    dims = kwargs.get("dim", kwargs.get("dims", args[-1] if len(args) > 1 else ()))
    given = dims if isinstance(dims, (tuple, list)) else (dims,)
    if any(isinstance(d, int) and d % max(1, tensor.dim()) == 1 and tensor.shape[1] == part.length for d in given):
        _refuse(
            "a step that looks at each position by itself, but in attention",
            f"a sum, a shift or a turn along the positions of {tuple(tensor.shape)}, inside of a part",
            "Do it in split_sequence, where sequences are whole",
        )


def _check_convolution(part: SequencePart, args: Any, kwargs: Any) -> None:
    given = args[0] if args else kwargs["input"]
    weight = args[1] if len(args) > 1 else kwargs["weight"]
    if (
        weight.shape[-1] > 1
        and part.length is not None
        and part.length <= given.shape[-1] < part.length + weight.shape[-1]
    ):
        _refuse(
            "a step that looks at each position by itself, but in attention",
            f"a convolution of {tuple(given.shape)} along the positions of a part",
            "Use another layer",
        )


_ARANGES = {torch.arange}
_BEFORE: dict[Any, Callable[[SequencePart, Any, Any], None]] = {
    **dict.fromkeys((torch.softmax, F.softmax, Tensor.softmax), _check_softmax),
    **dict.fromkeys((torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod), _check_along),
    **dict.fromkeys((torch.roll, Tensor.roll, torch.flip, Tensor.flip), _check_along),
    F.multi_head_attention_forward: _check_multi_head,
    F.conv1d: _check_convolution,
}
