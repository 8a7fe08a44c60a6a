"""Losses of ``torch.nn.functional`` inside of a step: means are those over the tokens of all parts.

A mean over the tokens of a part says nothing about how many these were, and labels that do not count may all lie in one
part. So cross entropies are made means over all parts where they are called; every rank of a group calls them alike.
What other losses give is a mean over as many values in each part. Sums, and losses of each token, are marked: a loss
that is made of them is refused, unless they have become a mean over the tokens of all parts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as reductions

from lightning_zero.sequence.part import SequencePart
from lightning_zero.sequence.split import IGNORED

Loss = Callable[..., Any]

_BY_TOKEN: set[Loss] = {F.cross_entropy, F.nll_loss}  # they ignore tokens, and weigh them
if (_linear := getattr(F, "linear_cross_entropy", None)) is not None:
    _BY_TOKEN.add(_linear)
_BY_VALUE: set[Loss] = {
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.gaussian_nll_loss,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.cosine_embedding_loss,
    F.margin_ranking_loss,
}
_DIVIDE_BY_WEIGHTS = {F.mse_loss, F.l1_loss, F.huber_loss}


def make_known(function: Loss) -> None:
    """Have ``function(..., targets, ignore_index, reduction)``, which asks torch's modes, taken for a cross entropy."""
    _BY_TOKEN.add(function)


def is_loss(function: Any) -> bool:
    return function in _BY_TOKEN or function in _BY_VALUE


def compute(part: SequencePart, function: Loss, args: Any, kwargs: Any, *, again: bool = False) -> Any:
    """``function(*args, **kwargs)``, for all parts where it is a mean.

    Args:
        again: in a backward, of a block that is computed again: nothing is marked.
    """
    given = _signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    result, reduction = function(*args, **kwargs), _reduction(given.arguments)
    if reduction == "mean" and function in _BY_TOKEN:
        count = _count(given.arguments)
        # A part without tokens has a mean of NaN and gradients of 0.
        return part.mean_of(torch.where(count > 0, result.to(torch.float64) * count, 0.0), count, result.dtype)
    if not again and isinstance(result, Tensor) and result.requires_grad:
        weighed = function in _DIVIDE_BY_WEIGHTS and given.arguments.get("weight") is not None
        if reduction != "mean" or weighed:
            how = "weight=..." if reduction == "mean" else f"reduction={reduction!r}"
            part.mark(result, f"{getattr(function, '__name__', 'a loss')}({how})")
        else:
            part.mark(result, None)  # labels do not say how many values it is a mean over; parts have as many
    return result


@functools.cache
def _signature(function: Loss) -> inspect.Signature:
    return inspect.signature(function)


def _reduction(given: dict[str, Any]) -> str:
    if given.get("size_average") is not None or given.get("reduce") is not None:
        found: str = reductions.legacy_get_string(given["size_average"], given["reduce"])
        return found
    if given["reduction"] == "batchmean":
        values: Tensor = given["input"]
        return "mean" if values.dim() == 2 else "batchmean"
    reduction: str = given["reduction"]
    return reduction


def _count(given: dict[str, Any]) -> Tensor:
    """What a mean was divided by: tokens that count, or the sum of their weights."""
    target: Tensor = given["target"] if "target" in given else given["targets"]
    if target.is_floating_point():  # probabilities of classes
        return torch.ones((), device=target.device)
    index = given.get("ignore_index")
    counts = target != (IGNORED if index is None else index)
    weight = given.get("weight")
    if weight is None:
        return counts.sum()
    # An ignored target need not be one of the classes.
    return torch.where(counts, weight.detach()[torch.where(counts, target, 0)], 0).sum(dtype=torch.float64)
