"""A head and its loss in chunks of tokens, so that the logits of a whole batch never exist."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.config import ConfigError
from lightning_zero.engine.engine import Engine, engines
from lightning_zero.engine.vertical.chunked import Chunked
from lightning_zero.engine.vertical.split import Inputs
from lightning_zero.sequence.part import current

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
    """``loss(head(hidden), targets)``, with as many of the logits at a time as one of ``chunks`` has.

    In the backward the logits of each chunk are computed again. Gradients are those of the whole: of the head's
    parameters they are added in fp32 where an engine shards them.

    Args:
        head: takes ``[tokens, width]`` to logits ``[tokens, ...]``; it sees no other shape than that.
        loss: takes logits ``[tokens, ...]`` and targets ``[tokens]`` to the loss of each token ``[tokens]``. Default:
            cross entropy, in fp32. A module, or a function whose own parameters are those of ``head``.
        hidden: ``[..., width]``.
        targets: ``[...]``, of the same sizes.
        chunks: default: ``zero.vertical_chunks`` of the engine that shards ``head``; 1 without one.
        ignore_index: targets that do not count: their losses become 0.
        reduction: ``mean``: over the tokens that count, of the whole batch: exact, also where chunks have different
            numbers of them (NaN if none counts). ``sum``, or ``none``: the losses, in the shape of ``targets``.

    Raises:
        ConfigError: a ``head`` that is no module, sizes that do not fit, a ``loss`` that does not give one number for
            each token, or an unknown ``reduction``.
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
    of_tokens = torch.where(counts, of_tokens, 0)  # a loss of the user's may not know of them
    if reduction == "none":
        return of_tokens.view(targets.shape)
    total = of_tokens.sum()
    if reduction == "sum":
        return total
    part = current()
    return total / counts.sum() if part is None else part.mean_of(total, counts.sum(), total.dtype)


def chunks_of(head: nn.Module) -> int:
    """``zero.vertical_chunks`` of the engine that shards ``head``; 1 without one."""
    if (assumed := _ASSUMED.get()) is not None:
        return assumed
    engine = _engine_of(head)
    return 1 if engine is None else engine.config.vertical_chunks


@contextlib.contextmanager
def assuming(chunks: int) -> Iterator[None]:
    """Inside, heads are run in ``chunks`` without an engine: where only sizes are asked."""
    token = _ASSUMED.set(chunks)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def _engine_of(head: nn.Module) -> Engine | None:
    params = list(head.parameters())
    return next((engine for engine in engines() if any(engine.owns(param) for param in params)), None)


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
    in_chunks = len(targets) // count * count if count > 1 else 0
    found: list[Tensor] = []
    if engine is not None and count > 1:  # also for few tokens: another rank may have more, and gathers are of all
        _keep_gathered(engine, head)
    if in_chunks:
        found.append(_run(head, loss, engine, function, hidden[:in_chunks], targets[:in_chunks], count))
    if in_chunks < len(targets) or not found:
        # A few tokens fewer than there are chunks. A head that is a unit is not to divide them among samples.
        with engine.passes.vertical.in_chunk() if engine is not None else contextlib.nullcontext():
            found.append(function(hidden[in_chunks:], targets[in_chunks:]))
    return found[0] if len(found) == 1 else torch.cat(found)


def _keep_gathered(engine: Engine, module: nn.Module) -> None:
    """Have the units of the parameters of ``module`` stay gathered from their next use until the pass ends."""
    wanted = {id(param) for param in module.parameters()}
    for unit in engine.units[1:]:
        if unit.reshards and any(id(info.param) in wanted for info in unit.infos()):
            engine.passes.progress.hold(unit)


def _run(
    head: nn.Module,
    loss: Loss,
    engine: Engine | None,
    function: Callable[..., Any],
    hidden: Tensor,
    targets: Tensor,
    count: int,
) -> Tensor:
    inputs = Inputs((hidden, targets), {}, len(targets), count)
    params = [*head.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]
    trains = any(param.requires_grad for param in params)
    has_graph = torch.is_grad_enabled() and (trains or hidden.requires_grad or targets.requires_grad)
    title = f"chunked_loss of {type(head).__name__}"
    if engine is None:
        call = Chunked(function, inputs, title=title)
        trigger = torch.zeros((), requires_grad=True) if trains else None
        return _tensor(call.with_graph(trigger) if has_graph else call.without_graph())
    vertical = engine.passes.vertical
    call = Chunked(function, inputs, title=title, in_chunk=vertical.in_chunk, in_backward=vertical.adding_up)
    return _tensor(vertical.with_graph(call, trains) if has_graph else call.without_graph())


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
