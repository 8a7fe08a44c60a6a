"""Cross entropies of ``torch.nn.functional`` inside of a step: means are those over the tokens of all parts.

A mean over the tokens of a part says nothing about how many these were, and labels that do not count may all lie in one
part. Every rank of a group calls these losses alike.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.sequence.part import set_current

NAMES = ("cross_entropy", "nll_loss", "linear_cross_entropy")  # those that ignore tokens, and weigh them
IGNORED = -100  # a label that counts nothing, by torch's default


def over_all_parts(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function``, but inside of a step a mean is that over the tokens of all parts. Collective there."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        part = set_current(None)  # torch may call this again in the place of its own, for a mode of the user's
        try:
            result = function(*args, **kwargs)
        finally:
            set_current(part)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if part is None or given.arguments["reduction"] != "mean":
            return result
        count = _count(given.arguments)
        # A part without tokens has a mean of NaN and gradients of 0.
        return part.mean_of(torch.where(count > 0, result.to(torch.float64) * count, 0.0), count, result.dtype)

    return loss


def _count(given: dict[str, Any]) -> Tensor:
    """What a mean was divided by: tokens that count, or the sum of their weights."""
    target: Tensor = given["target"]
    if target.is_floating_point():  # probabilities of classes
        return torch.ones((), device=target.device)
    index = given.get("ignore_index")
    counts = target != (IGNORED if index is None else index)
    weight = given.get("weight")
    if weight is None:
        return counts.sum()
    # An ignored target need not be one of the classes.
    return torch.where(counts, weight.detach()[torch.where(counts, target, 0)], 0).sum(dtype=torch.float64)
