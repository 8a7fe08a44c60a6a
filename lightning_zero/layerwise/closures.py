"""Step an optimizer whose ``step`` calls its closure itself: after it has changed parameters, or several times (LBFGS,
sharpness-aware classes)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.steps.interception import AroundStep
from lightning_zero.engine.torch_modes import without_autocast
from lightning_zero.layerwise.owned import WholeTensor
from lightning_zero.optimizers.known import hooks_set_aside
from lightning_zero.optimizers.side_effects import Watch, listed
from lightning_zero.optimizers.trial import step_of

if TYPE_CHECKING:
    from lightning_zero.layerwise.whole_optimizer import Message, WholeOptimizer


class StepWithClosure:
    """One step. Owners call the class's ``step``; other ranks run the closure when the owners' steps do. In the closure
    parameters have the values that the step has written, and param groups list the model's parameters.

    All owners, of which each replica of the shards has one, see the loss of rank 0, so that they take the same way."""

    def __init__(
        self, whole: WholeOptimizer, around: AroundStep, comm: Communicator, closure: Callable[[], object]
    ) -> None:
        self._whole, self._around, self._comm, self._closure = whole, around, comm, closure
        self._places = [place for group in whole.places() for place in group]
        self._messages: list[Message] = []  # empty while the closure runs
        self._here: list[WholeTensor] = []
        self._grads: list[tuple[Tensor | None, int]] = []  # of tensors here when they came, with versions
        self._listed = contextlib.ExitStack()
        self._loss: object = None  # of this rank's first closure

    def run(self) -> object:
        """Return the result of the class's ``step`` or, on ranks that own nothing, of the first closure. Collective."""
        whole, optimizer, result = self._whole, self._whole.optimizer, None
        error: Exception | None = None
        with torch.inference_mode(False), torch.no_grad(), without_autocast(self._comm.device.type):
            self._bring(state=True)
            before, is_owner = Watch(optimizer), bool(self._here)
            try:
                if is_owner:
                    with hooks_set_aside(optimizer):
                        result = step_of(optimizer)(optimizer, self._evaluate)
                    whole.look_at_state(self._here)
                else:
                    while self._agree_to_call(None):
                        self._call()
                    result = self._loss
            except Exception as raised:
                if not self._messages:  # the closure has raised
                    raise
                error = raised
            if is_owner:
                self._agree_to_call(False)
            effects = before.effects([is_owner] * len(optimizer.param_groups))
            messages = self._messages
            error = self._give_back(state=True) or error
            whole.agree(effects, error)
        whole.stepped(messages)
        self._finish()
        return result

    def _evaluate(self) -> object:
        """Run the closure on all ranks, for the step of an owner. Return rank 0's loss."""
        self._agree_to_call(True)
        return self._call()

    def _agree_to_call(self, calls: bool | None) -> bool:
        """Return whether the owners' steps call the closure. If they have cleared gradients before, clear them on all
        ranks. ``calls``: whether this rank's step does; None: this rank owns nothing. Collective."""
        cleared = calls is True and self._has_cleared()
        called, ended, cleared = self._comm.max_(torch.tensor([calls is True, calls is False, cleared]).byte()).tolist()
        if called and ended:
            raise RuntimeError("the step of an optimizer called its closure more often on some ranks than on others.")
        if cleared:
            for place in self._places:
                place.info.param.grad = None
        return bool(called)

    def _has_cleared(self) -> bool:
        """Return whether the step has cleared all gradients. Raise RuntimeError if it has changed them otherwise."""
        now = [tensor.key.grad for tensor in self._here]
        pairs = zip(now, self._grads, strict=True)
        if all(grad is known and (grad is None or grad._version == version) for grad, (known, version) in pairs):
            return False
        if any(grad is not None and bool(grad.any()) for grad in now):
            raise RuntimeError(
                f"{type(self._whole.optimizer).__qualname__}: expected a step that clears all gradients, or none, "
                "before it calls its closure, got one that changes them. Change gradients in the closure."
            )
        return True

    def _call(self) -> object:
        """Give the written values back, run the closure, and bring the new values and gradients. Return the loss of
        rank 0. Collective."""
        error = self._give_back()
        if error is not None:
            raise error
        self._finish()
        with torch.enable_grad():
            loss = self._closure()
        if self._loss is None:
            self._loss = loss
        if isinstance(loss, (Tensor, float)):
            shared = torch.as_tensor(loss, dtype=None if isinstance(loss, Tensor) else torch.float64).detach().clone()
            self._comm.broadcast(shared)
            loss = shared if isinstance(loss, Tensor) else float(shared)
        self._bring()
        return loss

    def _bring(self, *, state: bool = False) -> None:
        grads = self._around.passes.sharded_grads
        self._around.begins(self._places)
        grads.refuse_undivided()
        buckets = {place.bucket for place in self._places if place.bucket.plan.trainable}
        self._messages = self._whole.messages(grads.used_params(), buckets)
        for message in self._messages:
            message.bring(state=state)
        self._here, lists = self._whole.here(self._messages)
        grads_here = [tensor.key.grad for tensor in self._here]
        self._grads = [(grad, 0 if grad is None else grad._version) for grad in grads_here]
        if self._here:
            self._listed.enter_context(listed(self._whole.optimizer, lists))

    def _give_back(self, *, state: bool = False) -> Exception | None:
        """Return the error if a write to a tier fails. Until the end of a step, which refers to the state, leave the
        state where it is."""
        self._listed.close()
        messages, self._messages, error = self._messages, [], None
        for message in messages:
            error = message.give_back(state=state) or error
        for message in messages:
            message.wait_for_rest()
        return error

    def _finish(self) -> None:
        changed = {place.bucket for place in self._places if place.bucket.plan.trainable}
        self._around.ends(changed, [place.info for place in self._places if place.bucket.plan.trainable])
