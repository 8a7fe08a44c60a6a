"""The steps of a Trainer's run: on parts of sequences, with means over tokens and with fingerprints where asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_zero.settings import LossMean
from lightning_zero.trainer.fingerprints import Fingerprints
from lightning_zero.trainer.long_sequences import LongSequences
from lightning_zero.trainer.run import Run
from lightning_zero.trainer.step_tokens import StepTokens


class Steps:
    """Runs the steps of one run. Each method takes the method of Lightning's strategy that it runs.

    Attributes:
        sequences: cuts batches into parts of sequences, and holds the :class:`StepTokens` for ``zero.loss=tokens``.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.sequences = LongSequences()
        self._fingerprints: Fingerprints | None = None
        self._evaluation_begins = False

    def begin_run(self) -> None:
        """Prepare for steps of the module, which is sharded now. Collective."""
        run = self._run
        tokens = StepTokens(run.engine) if run.config.loss is LossMean.tokens else None
        run.engine.passes.sharded_grads.undivided = False  # an earlier run may have been cut off in a step
        self.sequences = LongSequences(run.model, run.engine, run._ranks, tokens)

    def begin_training(self) -> None:
        self.sequences.seed_alike()
        if (every := self._run.config.fingerprint) is not None:
            assert self._run.lightning_module is not None
            self._fingerprints = Fingerprints(self._run.lightning_module.trainer, self._run.engine, every)

    def end_training(self) -> None:
        if self._fingerprints is not None:
            self._fingerprints.write()

    def begin_evaluation(self) -> None:
        self._evaluation_begins = True

    @property
    def _is_manual(self) -> bool:
        module = self._run.lightning_module
        return module is not None and not module.automatic_optimization

    def train(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._is_manual:  # as under DDP, all ranks compute with rank 0's buffers
            self._run.engine.passes.buffers.sync()
        self.sequences.check("training_step", step, args, kwargs)
        with self._run.engine.step_scope("training_step"):
            return self.sequences.training_step(step, *args, **kwargs)

    def backward(self, act: Callable[..., Tensor], loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._is_manual:
            loss = self.sequences.manual_loss(loss)
        if (check := self.sequences.trying) is not None:
            check.backward(loss, *args, **kwargs)
            return loss
        if self.sequences.tokens is not None:
            loss = self.sequences.tokens.weigh(loss)
        with self.sequences.backward():
            return act(loss, optimizer, *args, **kwargs)

    def optimizer_step(self, step: Callable[..., Any], optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        if self.sequences.trying is not None:
            return closure()
        if self.sequences.tokens is not None:
            closure = self.sequences.tokens.around(closure, optimizer, self._run.lightning_module)
        if self._fingerprints is None:
            return step(optimizer, closure, *args, **kwargs)
        return self._fingerprints.step(closure, lambda closure: step(optimizer, closure, *args, **kwargs))

    def evaluate(self, key: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begins = self._sync_buffers_once()
        self.sequences.check(key, step, args, kwargs, together=begins)
        with self._run.engine.step_scope(key, evaluation=True):
            return self.sequences.evaluation_step(step, *args, **kwargs)

    def evaluate_nothing(self, key: str) -> None:
        """Take part in the evaluation step ``key`` of other ranks: this rank has no batch. Collective."""
        self._sync_buffers_once()
        with self._run.engine.step_scope(key, evaluation=True):
            pass

    def _sync_buffers_once(self) -> bool:
        """Send buffers before the first step of an evaluation, which changes none. Return whether it is the first."""
        begins, self._evaluation_begins = self._evaluation_begins, False
        if begins and not self._is_manual:
            self._run.engine.passes.buffers.sync(evaluates=True)
        return begins
