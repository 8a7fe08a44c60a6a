"""For ``zero.loss=tokens``: give each step the gradients of its mean loss over all its tokens.

::

    each backward        runs on its mean loss times its number of tokens, so that gradients add up to sums over tokens
    the last backward    sends one message with the number of tokens of all ranks and micro-batches
    before clipping      each rank divides its gradients by this number
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.lightning_api import pl
from lightning_zero.settings import ConfigError

# Backwards multiply by tokens / UNIT, so that fp16 gradients are not far larger than those of a mean. It is a power of
# two, which changes no digit.
UNIT = 1024.0


class StepTokens:
    """Counts the tokens of a step, and divides the step's gradients by the number of tokens.

    Attributes:
        of_next_backward: number of tokens of the loss whose backward runs next, 0-d; None: not counted yet.
        loss: the last step's mean loss over the tokens of all ranks, 0-d; None before the first step.
        counts: whether tokens of this rank's batch count; False for a batch that zero.uneven=join repeats.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._grads = engine, engine.passes.sharded_grads
        self.of_next_backward: Tensor | None = None
        self.loss: Tensor | None = None
        self.counts = True
        self._divided: set[int] = set()  # ids of parameters whose gradients are divided, and still there
        self._forget()

    def _forget(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._engine.comm.device)  # of losses, of tokens
        self._grads.undivided = False
        self._backwards = self._grads.backwards  # with the one whose loss is weighed now

    def _refuse_uncounted(self) -> None:
        """Raise RuntimeError if this rank has gradients of a backward whose loss was not weighed."""
        if self._grads.backwards > self._backwards:
            raise RuntimeError(
                "zero.loss=tokens: expected gradients of self.manual_backward(loss), got gradients of loss.backward(), "
                "whose tokens are not counted. Call self.manual_backward(loss)."
            )

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the tensor on which to run the backward: ``loss`` (0-d) times its number of tokens / :data:`UNIT`.
        Raise ConfigError if its tokens were not counted, and RuntimeError if an earlier loss was not weighed."""
        tokens, self.of_next_backward = self.of_next_backward, None
        if tokens is None:
            raise ConfigError(
                "zero.loss=tokens: expected a backward of a loss that training_step has computed, whose tokens are "
                "counted, got another loss. Call manual_backward in training_step, or set zero.loss=batches."
            )
        tokens = tokens if self.counts else 0 * tokens
        if not self._grads.are_there:  # users may have cleared those of earlier backwards
            self._forget()
        self._refuse_uncounted()
        self._divided &= self._grads.used_params() if self._divided else set()
        self._backwards, self._grads.undivided = self._grads.backwards + 1, True
        self._sums += torch.stack([loss.detach().reshape(()).double() * tokens, tokens])
        wide = torch.promote_types(loss.dtype, torch.float32)
        return loss.to(wide) * (tokens / UNIT).to(wide)

    def divide(self, optimizers: Iterable[Optimizer], divisor: int = 1) -> None:
        """Divide the gradients of ``optimizers`` by the number of tokens since the last call. Collective.

        ``divisor``: the number by which each loss was divided (``accumulate_grad_batches``). If no rank has tokens,
        gradients and :attr:`loss` are 0.
        Raises RuntimeError if gradients of other optimizers are not divided yet, or old gradients were not cleared.
        """
        self._refuse_uncounted()
        engine = self._engine
        total, tokens = engine.comm.sum_(self._sums).unbind()
        self._forget()
        own = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
        self._check({id(param) for param in own})
        tokens = torch.where(tokens > 0, tokens, torch.inf)
        self.loss = divisor * total / tokens
        places = [engine.units.place_of(param) for param in own]
        self._grads.scale(places, engine.comm.world_size * UNIT * divisor / tokens)

    def _check(self, own: set[int]) -> None:
        there = self._grads.used_params()
        all_places = [place for stepper in self._engine.optimizers for group in stepper.places() for place in group]
        others = {id(place.info.param) for place in all_places} - own
        for ids, why in (
            (
                own & there & self._divided,
                "no gradients of an earlier step for {}. Clear gradients with zero_grad(set_to_none=True)",
            ),
            (
                (others & there) - self._divided,
                "the optimizers of all parameters with gradients, got none for {}. Pass all optimizers to "
                "lightning_zero.divide_by_tokens",
            ),
        ):
            if ids:
                names = [place.info.fqn for place in all_places if id(place.info.param) in ids][:3]
                raise RuntimeError(f"zero.loss=tokens: expected {why.format(', '.join(names))}.")
        self._divided |= own & there

    def around(self, closure: Callable[[], Any], optimizer: Optimizer, module: Any) -> Callable[[], Any]:
        """Return ``closure`` or, with automatic optimization, a closure that also divides the gradients of
        ``optimizer`` by the number of tokens after the backward."""
        if not module.automatic_optimization:
            self._refuse_uncounted()
            return closure

        def divided() -> Any:
            result = closure()
            self.divide([optimizer], module.trainer.accumulate_grad_batches)
            return result

        return divided


def divide_by_tokens(module: pl.LightningModule, *optimizers: Optimizer) -> None:
    """With ``zero.loss=tokens`` and manual optimization, divide gradients by the step's number of tokens. Collective.

    Call this after the last backward of a step, before gradients are read or clipped. Without ``zero.loss=tokens``, or
    under another strategy, it does nothing.

    Args:
        module: the LightningModule.
        optimizers: the optimizers whose parameters got gradients in these backwards; default: all.

    Raises:
        RuntimeError: other parameters have undivided gradients too, or gradients of an earlier step were not cleared.
    """
    strategy: Any = module.trainer.strategy
    tokens = step_tokens(strategy)
    if tokens is not None and strategy._steps.sequences.trying is None:
        tokens.divide([getattr(o, "optimizer", o) for o in optimizers] or strategy.optimizers)


def step_tokens(strategy: Any) -> StepTokens | None:
    """Return the StepTokens of ``strategy``; None without ``zero.loss=tokens``, and under other strategies."""
    steps = getattr(strategy, "_steps", None)
    return None if steps is None else steps.sequences.tokens
