"""Attention over the whole sequence, of this rank's part of the heads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_zero.config import ConfigError
from lightning_zero.sequence.exchange import to_heads, to_positions
from lightning_zero.sequence.part import SequencePart

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
_as_it_is = 0  # depth of calls that see whole sequences already


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """Inside, attention computes with what it is given."""
    global _as_it_is
    _as_it_is += 1
    try:
        yield
    finally:
        _as_it_is -= 1


def is_as_it_is() -> bool:
    return _as_it_is > 0


def attend(part: SequencePart, inner: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """``inner(query, key, value, mask)`` for all positions and this rank's heads, and its result for this part.

    Args:
        inner: takes and gives ``[batch, heads, positions, width]``.
        query, key, value: of this part. There may be fewer heads of keys and values than of queries.
        mask: of the whole sequence: ``[..., whole, whole]``, or ``[..., 1, whole]``; other than tensors are handed on.

    Raises:
        ConfigError: shapes that this cannot work for.
    """
    _check(part, query, key, value)
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # What attention would do first, so that fewer bytes travel.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (t.to(dtype) if t.dtype is torch.float32 else t for t in (query, key, value))
    part.rounding = max(part.rounding, torch.finfo(query.dtype).eps)
    heads = query.shape[1]
    key, value = (_enough_heads(tensor, heads, part.size) for tensor in (key, value))
    query, key, value = to_heads([query, key, value], part.sharers)
    with as_it_is():
        result = inner(query, key, value, _of_heads(part, mask, heads, query.shape[2]))
    return to_positions(result, part.sharers)


def _check(part: SequencePart, query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
    if any(tensor.dim() != 4 for tensor in (query, key, value)):
        raise ConfigError(
            "zero.sequence_parallel: expected queries, keys and values [batch, heads, positions, width] in attention, "
            f"got {shapes}. Give attention its heads as a dimension, or set zero.sequence_parallel=1."
        )
    lengths = {query.shape[2], key.shape[2], value.shape[2]}
    if len(lengths) > 1 or part.length not in (None, query.shape[2]):
        expected = f"{part.length} positions, as a part of this batch has" if part.length else "as many positions"
        raise ConfigError(
            f"zero.sequence_parallel: expected {expected} in queries, keys and values (self-attention over one "
            f"sequence), got {shapes}. Attention over other sequences (of an encoder, of an image, with a cache) is "
            "not supported: set zero.sequence_parallel=1."
        )
    if query.shape[1] % part.size:
        raise ConfigError(refused_heads(query.shape[1], part.size))


def refused_heads(heads: int, size: int, where: str = "in attention") -> str:
    return (
        f"zero.sequence_parallel: expected a number that divides the {heads} heads {where}, which are divided among "
        f"the ranks of a group, got {size}. Change zero.sequence_parallel, or the number of heads."
    )


def _enough_heads(tensor: Tensor, queries: int, size: int) -> Tensor:
    """Keys or values with so many heads that each rank gets those of its queries: repeated, where they are too few."""
    heads = tensor.shape[1]
    if heads % size == 0:
        return tensor
    return tensor.repeat_interleave((size if size % heads == 0 else queries) // heads, dim=1)


def _of_heads(part: SequencePart, mask: Any, heads: int, whole: int) -> Any:
    """The mask for this rank's heads.

    Raises:
        ConfigError: it is not that of the whole sequence.
    """
    if not isinstance(mask, Tensor):
        return mask
    if mask.shape[-1] != whole or (mask.dim() > 1 and mask.shape[-2] not in (1, whole)):
        raise ConfigError(
            f"zero.sequence_parallel: expected a mask of the whole sequence in attention ([..., {whole}, {whole}] or "
            f"[..., 1, {whole}]), got {tuple(mask.shape)}, made for a part. Use is_causal=True in the place of a "
            "causal mask; attention_mask of a batch is whole in each part, and a mask of it is too."
        )
    if mask.dim() >= 3 and mask.shape[-3] == heads:
        return mask.narrow(-3, part.rank * (heads // part.size), heads // part.size)
    return mask
