"""Compute a head and its loss in chunks of tokens, so that the logits of a whole batch never exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine.engine import engines
from lightning_zero.sequence.part import current
from lightning_zero.settings import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]

_REDUCTIONS = ("mean", "sum", "none")


def chunked_loss(
    head: nn.Module,
    loss: Loss | None,
    hidden: Tensor,
    targets: Tensor,
    *,
    chunks: int,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return ``loss(head(hidden), targets)``. Only the logits of one chunk are in memory at a time.

    The backward computes the logits of each chunk again. Gradients equal those of the whole batch.

    Args:
        head: a module that maps ``[tokens, width]`` to logits ``[tokens, ...]``.
        loss: a module or function that maps logits ``[tokens, ...]`` and targets ``[tokens]`` to losses ``[tokens]``.
            It must not have parameters other than those of ``head``. None: cross entropy in fp32.
        hidden: ``[..., width]``, with targets ``[...]``.
        chunks: number of chunks.
        ignore_index: tokens with this target have loss 0 and are not counted.
        reduction: ``mean`` over the counted tokens of the whole batch (NaN if there are none), ``sum``, or ``none``.

    Raises ConfigError for a ``head`` that is not a module, sizes that do not match, a ``loss`` that does not return one
    number per token, or an unknown ``reduction``."""
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"chunked_loss: expected head to be a module, because its parameters get gradients, got a "
            f"{type(head).__name__}. For the weight of another module, pass a module that has the same parameter."
        )
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"chunked_loss: expected reduction to be one of {', '.join(_REDUCTIONS)}, got {reduction!r}.")
    if hidden.shape[:-1] != targets.shape:
        raise ConfigError(
            f"chunked_loss: expected hidden [..., width] and targets [...] of the same sizes, got "
            f"{list(hidden.shape)} and {list(targets.shape)}."
        )
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ConfigError(f"chunked_loss: expected chunks to be a whole number > 0, got {chunks!r}.")
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    counts = wanted != ignore_index
    if loss is None:
        loss = lambda logits, targets: F.cross_entropy(  # noqa: E731
            logits.float(), targets, reduction="none", ignore_index=ignore_index
        )
    of_tokens = _losses(head, loss, flat, wanted, chunks)
    of_tokens = torch.where(counts, of_tokens, 0)  # a user's loss may not know ``ignore_index``
    if reduction == "none":
        return of_tokens.view(targets.shape)
    total = of_tokens.sum()
    if reduction == "sum":
        return total
    part = current()
    return total / counts.sum() if part is None else part.mean_of(total, counts.sum(), total.dtype)


def _losses(head: nn.Module, loss: Loss, hidden: Tensor, targets: Tensor, count: int) -> Tensor:
    def function(hidden: Tensor, targets: Tensor) -> Tensor:
        found = loss(head(hidden), targets)
        if found.shape != targets.shape:
            raise ConfigError(
                f"chunked_loss: expected a loss that gives one number for each of {len(targets)} tokens "
                f"(reduction='none'), got {list(found.shape)}."
            )
        return found

    if count == 1:
        return function(hidden, targets)
    params = list(head.parameters())
    engine = next((engine for engine in engines() if any(engine.units.owns(param) for param in params)), None)
    if engine is not None:
        own = {id(param) for param in params}  # units of these parameters stay gathered until the pass ends
        for unit in engine.units[1:]:
            if unit.reshards and any(id(info.param) in own for info in unit.infos):
                unit.is_held = True
    pairs = zip(hidden.chunk(count), targets.chunk(count), strict=True)
    return torch.cat([checkpoint(function, *pair, use_reentrant=False) for pair in pairs])
