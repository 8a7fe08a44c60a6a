"""Compute attention over the whole sequence: each rank computes some of the heads.

::

    a part (4 heads, 2 ranks)      rank 0: heads 0 1 2 3 of positions 0 .. t-1      rank 1: of positions t .. 2t-1
    inside of attention            rank 0: heads 0 1 of positions 0 .. 2t-1         rank 1: heads 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zero.comm.sequence import Sharers
from lightning_zero.sequence.part import SequencePart, current
from lightning_zero.settings import ConfigError

_torch_attention = F.scaled_dot_product_attention  # torch's own: inside a step ``attention`` replaces it


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` over whole sequences under ``zero.sequence_parallel``. Collective.

    Inside a step this function replaces torch's, and raises ConfigError for unsupported shapes.

    Args:
        query, key, value: ``[batch, heads, positions, width]``; inside a step with the positions of this rank's part.
        attn_mask: a mask for all ``whole`` positions of the sequence: ``[..., whole, whole]`` or ``[..., 1, whole]``.
    """
    part = current()
    if part is None:
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    _check(part, query, key, value)
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # Cast now, as attention would, so that fewer bytes are sent.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (t.to(dtype) if t.dtype is torch.float32 else t for t in (query, key, value))
    part.rounding = max(part.rounding, torch.finfo(query.dtype).eps)
    heads = query.shape[1]
    key, value = (_enough_heads(tensor, heads, part.size) for tensor in (key, value))
    query, key, value = _exchange([query, key, value], part.sharers, to_heads=True)
    mask = _of_heads(part, attn_mask, heads, query.shape[2])
    grouped = query.shape[1] != key.shape[1]
    result = _torch_attention(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    return _exchange([result], part.sharers, to_heads=False)[0]


def _check(part: SequencePart, query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
    if any(tensor.dim() != 4 for tensor in (query, key, value)):
        raise ConfigError(
            "zero.sequence_parallel: expected queries, keys and values [batch, heads, positions, width] in attention, "
            f"got {shapes}. Pass tensors with a dimension for heads, or set zero.sequence_parallel=1."
        )
    lengths = {query.shape[2], key.shape[2], value.shape[2]}
    if len(lengths) > 1 or part.length not in (None, query.shape[2]):
        expected = f"{part.length} positions, as a part of this batch has" if part.length else "as many positions"
        raise ConfigError(
            f"zero.sequence_parallel: expected {expected} in queries, keys and values (self-attention over one "
            f"sequence), got {shapes}. Attention over other sequences (of an encoder, of an image, with a cache) is "
            "not supported. Set zero.sequence_parallel=1."
        )
    if query.shape[1] % part.size:
        raise ConfigError(
            f"zero.sequence_parallel: expected a number that divides the {query.shape[1]} heads in attention, because "
            f"each rank of a group computes equally many heads, got {part.size}. Change zero.sequence_parallel, or the "
            "number of heads."
        )


def _enough_heads(tensor: Tensor, queries: int, size: int) -> Tensor:
    """Return ``tensor`` (keys or values) with a multiple of ``size`` heads: heads are repeated if needed, to ``size``
    heads if possible, else to ``queries`` heads."""
    heads = tensor.shape[1]
    if heads % size == 0:
        return tensor
    return tensor.repeat_interleave((size if size % heads == 0 else queries) // heads, dim=1)


def _of_heads(part: SequencePart, mask: Tensor | None, heads: int, whole: int) -> Tensor | None:
    """Return ``mask`` (or None) for this rank's heads. Raises ConfigError if it does not have ``whole`` positions."""
    if mask is None:
        return None
    if mask.shape[-1] != whole or (mask.dim() > 1 and mask.shape[-2] not in (1, whole)):
        raise ConfigError(
            f"zero.sequence_parallel: expected a mask of the whole sequence in attention ([..., {whole}, {whole}] or "
            f"[..., 1, {whole}]), got {tuple(mask.shape)}, made for a part. Pass is_causal=True instead of a causal "
            "mask, or make the mask from the batch's attention_mask, which is whole on each rank."
        )
    if mask.dim() >= 3 and mask.shape[-3] == heads:
        return mask.narrow(-3, part.rank * (heads // part.size), heads // part.size)
    return mask


# -- the exchange -----------------------------------------------------------------------------------------------------


def _exchange(tensors: Sequence[Tensor], sharers: Sharers, *, to_heads: bool) -> list[Tensor]:
    """Exchange all heads of this part's positions for all positions of this rank's heads (``to_heads``), or vice versa.
    Collective. Numbers of heads and widths may differ between ``tensors``. Tensors of one dtype share one message."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        return [_exchange([tensor], sharers, to_heads=to_heads)[0] for tensor in tensors]
    return list(_Exchange.apply(sharers, to_heads, *tensors))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """An all-to-all whose backward is the reverse all-to-all."""

    @staticmethod
    def forward(ctx: Any, sharers: Sharers, to_heads: bool, *tensors: Tensor) -> Any:
        ctx.sharers, ctx.to_heads = sharers, to_heads
        n = sharers.size
        parts = [torch.stack(tensor.chunk(n, dim=1 if to_heads else 2)) for tensor in tensors]  # by rank
        received = sharers.exchange(torch.cat([part.reshape(n, -1) for part in parts], dim=1))
        rows = received.split([part[0].numel() for part in parts], dim=1)
        return tuple(_together(r.reshape(p.shape), to_heads) for r, p in zip(rows, parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *_Exchange.apply(ctx.sharers, not ctx.to_heads, *grads)  # type: ignore[no-untyped-call]


def _together(parts: Tensor, to_heads: bool) -> Tensor:
    """Join parts of all ranks [n, batch, heads, positions, width] along positions if ``to_heads``, else along heads."""
    n, batch, heads, length, width = parts.shape
    if to_heads:
        return parts.permute(1, 2, 0, 3, 4).reshape(batch, heads, n * length, width)
    return parts.permute(1, 0, 2, 3, 4).reshape(batch, n * heads, length, width)
