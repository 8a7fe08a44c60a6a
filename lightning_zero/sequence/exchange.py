"""Heads for positions, and back, by one all-to-all each: of tensors ``[batch, heads, positions, width]``.

::

    before (4 heads, 2 ranks)      rank 0: heads 0 1 2 3 of positions 0 .. t-1      rank 1: of positions t .. 2t-1
    after :func:`to_heads`         rank 0: heads 0 1 of positions 0 .. 2t-1         rank 1: heads 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm.sequence import Sharers


def to_heads(tensors: Sequence[Tensor], sharers: Sharers) -> list[Tensor]:
    """``[batch, heads, positions, width]`` of a part become ``[batch, heads / size, positions * size, width]``.

    Numbers of heads and widths may differ between tensors; those of one dtype travel together.
    """
    return _exchange(tensors, sharers, scatter=True)


def to_positions(tensor: Tensor, sharers: Sharers) -> Tensor:
    """The way back: all heads of this part's positions."""
    return _exchange([tensor], sharers, scatter=False)[0]


def _exchange(tensors: Sequence[Tensor], sharers: Sharers, *, scatter: bool) -> list[Tensor]:
    if len({tensor.dtype for tensor in tensors}) > 1:
        return [_exchange([tensor], sharers, scatter=scatter)[0] for tensor in tensors]
    return list(_Exchange.apply(sharers, scatter, *tensors))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Its backward is the way back."""

    @staticmethod
    def forward(ctx: Any, sharers: Sharers, scatter: bool, *tensors: Tensor) -> Any:
        ctx.sharers, ctx.scatter = sharers, scatter
        n = sharers.size
        parts = [_by_rank(tensor, n, scatter) for tensor in tensors]
        received = sharers.exchange(torch.cat([part.reshape(n, -1) for part in parts], dim=1))
        rows = received.split([part[0].numel() for part in parts], dim=1)
        return tuple(_together(r.reshape(p.shape), scatter) for r, p in zip(rows, parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *_Exchange.apply(ctx.sharers, not ctx.scatter, *grads)  # type: ignore[no-untyped-call]


def _by_rank(tensor: Tensor, n: int, scatter: bool) -> Tensor:
    """What each rank gets: ``[n, batch, heads, positions, width]``, of a part of either."""
    return torch.stack(tensor.chunk(n, dim=1 if scatter else 2))


def _together(parts: Tensor, scatter: bool) -> Tensor:
    """What has come from each rank: positions behind each other, or heads."""
    n, batch, heads, length, width = parts.shape
    if scatter:
        return parts.permute(1, 2, 0, 3, 4).reshape(batch, heads, n * length, width)
    return parts.permute(1, 0, 2, 3, 4).reshape(batch, n * heads, length, width)
