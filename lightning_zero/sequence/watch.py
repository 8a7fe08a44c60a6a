"""Sees what a step calls, and gives attention and losses the whole sequence.

A function that is imported by name is found too, because torch tells a mode of every call. Autograd runs a backward
without the modes of its caller, and blocks of ``torch.utils.checkpoint`` are computed again there: so a backward that
begins inside of a step gets one of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_zero.sequence import losses
from lightning_zero.sequence.attention import attend, is_as_it_is
from lightning_zero.sequence.part import current

scaled_dot_product_attention = F.scaled_dot_product_attention  # torch's own, whatever stands in its place in a step
_OP = torch.ops.aten.scaled_dot_product_attention
_ATTENTION = {scaled_dot_product_attention, _OP, _OP.default}


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
    """Inside, attention is that over the whole sequence, and means of torch's losses are those over all parts.

    Args:
        again: inside of a backward, where what is computed was computed before.
    """

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self._again = again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        part = current()
        if part is None or is_as_it_is():
            return func(*args, **kwargs)
        if func in _ATTENTION:
            return whole_attention(*args, **kwargs)
        if losses.is_loss(func):
            return losses.compute(part, func, args, kwargs, again=self._again)
        return func(*args, **kwargs)


@contextlib.contextmanager
def backwards_again() -> Iterator[None]:
    """Inside, what a backward computes again sees whole sequences too."""
    run = torch.autograd._engine_run_backward  # where torch.autograd.backward and grad look it up

    @functools.wraps(run)
    def run_again(*args: Any, **kwargs: Any) -> Any:
        with Watch(again=True):
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_again
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run
