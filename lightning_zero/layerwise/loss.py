"""Compute a head and its loss in chunks of tokens, so that the logits of a whole batch never exist."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.engine.engine import Engine, engines
from lightning_zero.engine.passes.recompute import Context
from lightning_zero.engine.vertical.chunked import Chunked, Inputs
from lightning_zero.sequence.part import current
from lightning_zero.settings import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]

_REDUCTIONS = ("mean", "sum", "none")
_ASSUMED: ContextVar[int | None] = ContextVar("chunks without an engine", default=None)


def chunked_loss(
    head: nn.Module,
    loss: Loss | None,
    hidden: Tensor,
    targets: Tensor,
    *,
    chunks: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return ``loss(head(hidden), targets)``, with the logits of one chunk in memory at a time.

    The backward computes the logits of each chunk again. Gradients equal those of the whole batch; under an engine,
    gradients of the head's parameters are summed over the chunks in fp32.

    Args:
        head: a module that maps ``[tokens, width]`` to logits ``[tokens, ...]``.
        loss: maps logits ``[tokens, ...]`` and targets ``[tokens]`` to losses ``[tokens]``. Default: cross entropy in
            fp32. A module, or a function without parameters other than those of ``head``.
        hidden: ``[..., width]``, with targets ``[...]``.
        chunks: number of chunks. Default: ``zero.vertical_chunks`` of the engine that shards ``head``; 1 without one.
        ignore_index: tokens with this target have loss 0 and are not counted.
        reduction: ``mean`` over the counted tokens of the whole batch (NaN if there are none), ``sum``, or ``none``.

    Raises ConfigError for a ``head`` that is no module, sizes that do not fit, a ``loss`` that does not return one
    number per token, or an unknown ``reduction``.
    """
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"chunked_loss: expected head to be a module, whose parameters are to have gradients, got a "
            f"{type(head).__name__}. For a weight that is another module's, give a module that has the same parameter."
        )
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"chunked_loss: expected reduction to be one of {', '.join(_REDUCTIONS)}, got {reduction!r}.")
    if hidden.shape[:-1] != targets.shape:
        raise ConfigError(
            f"chunked_loss: expected hidden [..., width] and targets [...] of the same sizes, got "
            f"{list(hidden.shape)} and {list(targets.shape)}."
        )
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise ConfigError(f"chunked_loss: expected chunks to be a whole number > 0, got {chunks!r}.")
    count = chunks_of(head) if chunks is None else chunks
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    counts = wanted != ignore_index
    of_tokens = _losses(head, loss or _cross_entropy(ignore_index), flat, wanted, count)
    of_tokens = torch.where(counts, of_tokens, 0)  # a user's loss may not know ``ignore_index``
    if reduction == "none":
        return of_tokens.view(targets.shape)
    total = of_tokens.sum()
    if reduction == "sum":
        return total
    part = current()
    return total / counts.sum() if part is None else part.mean_of(total, counts.sum(), total.dtype)


def chunks_of(head: nn.Module) -> int:
    """Return the number of chunks: ``zero.vertical_chunks`` of the engine that shards ``head``; 1 without an engine."""
    if (assumed := _ASSUMED.get()) is not None:
        return assumed
    engine = _engine_of(head)
    return 1 if engine is None else engine.config.vertical_chunks


@contextlib.contextmanager
def assuming(chunks: int) -> Iterator[None]:
    """Let :func:`chunks_of` return ``chunks`` in the body, to measure activations without an engine."""
    token = _ASSUMED.set(chunks)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def _engine_of(head: nn.Module) -> Engine | None:
    params = list(head.parameters())
    return next((engine for engine in engines() if any(engine.units.owns(param) for param in params)), None)


def _cross_entropy(ignore_index: int) -> Loss:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, reduction="none", ignore_index=ignore_index)

    return loss


def _losses(head: nn.Module, loss: Loss, hidden: Tensor, targets: Tensor, count: int) -> Tensor:
    def function(hidden: Tensor, targets: Tensor) -> Tensor:
        found = loss(head(hidden), targets)
        if found.shape != targets.shape:
            raise ConfigError(
                f"chunked_loss: expected a loss that gives one number for each of {len(targets)} tokens "
                f"(reduction='none'), got {list(found.shape)}."
            )
        return found

    engine = _engine_of(head)
    in_chunk: Context = contextlib.nullcontext
    in_backward: Context = contextlib.nullcontext
    if engine is not None:
        in_chunk, in_backward = engine.forwards.vertical.in_chunk, engine.passes.adding_up
        if count > 1:  # also with few tokens: another rank may have more, and gathers are collective
            own = {id(param) for param in head.parameters()}  # their units, once gathered, stay until the pass ends
            for unit in engine.units[1:]:
                if unit.reshards and any(id(info.param) in own for info in unit.infos):
                    unit.is_held = True
    params = [*head.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]
    trains = any(param.requires_grad for param in params)
    divided = len(targets) // count * count if count > 1 else 0
    found: list[Tensor] = []
    if divided:
        inputs = Inputs((hidden[:divided], targets[:divided]), {}, divided, count)
        title = f"chunked_loss of {type(head).__name__}"
        call = Chunked(function, inputs, title=title, in_chunk=in_chunk, in_backward=in_backward)
        found.append(call(trains=trains) if engine is None else engine.forwards.vertical.run(call, trains=trains))
    if divided < len(targets) or not found:
        with in_chunk():  # the remainder, fewer tokens than chunks; a head that is a unit must not divide them
            found.append(function(hidden[divided:], targets[divided:]))
    return found[0] if len(found) == 1 else torch.cat(found)
