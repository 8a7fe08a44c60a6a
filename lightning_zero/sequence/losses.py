"""Inside a step, make cross entropies of ``torch.nn.functional`` return the mean over the tokens of all parts. The mean
over one part does not tell how many tokens it counts. All ranks of a group must call these losses in the same order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.sequence.part import set_current

NAMES = ("cross_entropy", "nll_loss", "linear_cross_entropy")  # those that ignore and weigh tokens
IGNORED = -100  # the label that torch ignores by default


def over_all_parts(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``function`` so that inside a step its means are over the tokens of all parts. Then calls are collective."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        old_names = given.arguments.get("size_average"), given.arguments.get("reduce")  # they win over ``reduction``
        takes_mean = given.arguments["reduction"] == "mean" and old_names == (None, None)
        part = set_current(None)  # torch may call this again for a mode of the user's
        weighs = part is not None and takes_mean and given.arguments.get("weight") is not None
        if weighs:  # weights that add up to 0 would give a mean's gradients NaN
            given.arguments["reduction"] = "sum"
        try:
            result = function(*given.args, **given.kwargs)
        finally:
            set_current(part)
        if part is None or not takes_mean:
            return result
        count = _count(given.arguments)
        # A part without tokens has a mean of NaN and gradients of 0.
        total = result if weighs else torch.where(count > 0, result.to(torch.float64) * count, 0.0)
        return part.mean_of(total, count, result.dtype)

    return loss


def _count(given: dict[str, Any]) -> Tensor:
    """Return the divisor of a loss's mean: the number of tokens that count, or the sum of their weights."""
    target: Tensor = given["target"]
    if target.is_floating_point():  # probabilities of classes
        return torch.full((), target[:, 0].numel() if target.dim() > 1 else 1, device=target.device)
    index = given.get("ignore_index")
    counts = target != (IGNORED if index is None else index)
    weight = given.get("weight")
    if weight is None:
        return counts.sum()
    # An ignored target may be outside the classes.
    return torch.where(counts, weight.detach()[torch.where(counts, target, 0)], 0).sum(dtype=torch.float64)
