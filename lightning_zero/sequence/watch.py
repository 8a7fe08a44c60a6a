"""Sees what a step calls: gives attention and losses the whole sequence, and refuses what would compute wrong numbers.

A function that is imported by name is found too, because torch tells a mode of every call. Autograd runs a backward
without the modes of its caller, and blocks of ``torch.utils.checkpoint`` are computed again there: so a backward that
begins inside of a step gets one of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.sequence import losses
from lightning_zero.sequence.attention import attend, is_as_it_is
from lightning_zero.sequence.checks import (
    BEFORE,
    check_hidden,
    check_index,
    check_place,
    check_positions,
    check_table,
    hides_attention,
)
from lightning_zero.sequence.part import SequencePart, current

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


class Again(TorchFunctionMode):
    """Inside, what is computed again in a backward is computed as :class:`Watch` has let it be computed."""

    again = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        part = current()
        if part is None or is_as_it_is():
            return func(*args, **kwargs)
        if func in _ATTENTION:
            return whole_attention(*args, **kwargs)
        if losses.is_loss(func):
            return losses.compute(part, func, args, kwargs, again=self.again)
        return self.call(part, func, args, kwargs)

    def call(self, part: SequencePart, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function that is neither attention nor a loss."""
        return func(*args, **kwargs)


class Watch(Again):
    """Inside, calls of torch's functions go by the checks of :mod:`checks`. It costs microseconds for each."""

    again = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def call(self, part: SequencePart, func: Any, args: Any, kwargs: Any) -> Any:
        if func is Tensor.__getitem__:
            check_index(part, args[0], args[1], self._is_table)
            return func(*args, **kwargs)
        if (check := _check_before(func)) is not None:
            check(part, args, kwargs)
        elif func in _NARROWS and len(args) == 4 and args[2] == 0:
            check_table(part, args[0], args[1], args[3], self._is_table)
        elif func in _SELECTS and len(args) == 3:
            check_place(part, args[0], args[1] % max(1, args[0].dim()))
        result = func(*args, **kwargs)
        if func is torch.arange:
            check_positions(part, args, kwargs, result)
        return result

    def _is_table(self, tensor: Tensor) -> bool:
        """Whether the module holds ``tensor``, in whatever way."""
        if isinstance(tensor, nn.Parameter):
            return True
        held = (vars(m)[name] for m in self._module.modules() for name in vars(m))
        return any(tensor is value for value in (*self._module.buffers(), *held))


@contextlib.contextmanager
def backwards_again() -> Iterator[None]:
    """Inside, each backward runs under :class:`Again`."""
    run = torch.autograd._engine_run_backward  # where torch.autograd.backward and grad look it up

    @functools.wraps(run)
    def run_again(*args: Any, **kwargs: Any) -> Any:
        with Again():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_again
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run


@functools.lru_cache(maxsize=4096)
def _check_before(function: Any) -> Callable[..., None] | None:
    if (check := BEFORE.get(function)) is not None:
        return check
    return check_hidden if hides_attention(function) else None


_NARROWS = {torch.narrow, Tensor.narrow}
_SELECTS = {torch.select, Tensor.select}
