"""Steps of training and evaluation: what a strategy does around those of the module."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from lightning_zero.config import ZeroConfig
from lightning_zero.lightning_api import CheckpointIO
from lightning_zero.trainer import validations
from lightning_zero.trainer.interruptions import Interruptions
from lightning_zero.trainer.long_sequences import LongSequences
from lightning_zero.trainer.restaging import RestagingStrategy


class SteppingStrategy(RestagingStrategy):
    """A strategy whose steps run in scopes of the engine, and on parts of sequences where ranks share these."""

    def __init__(self, config: ZeroConfig, checkpoint_io: CheckpointIO | None, **arguments: Any) -> None:
        """See :class:`CheckpointingStrategy`."""
        super().__init__(config, checkpoint_io, **arguments)
        self._sequences = LongSequences()
        self._interruptions: Interruptions | None = None
        self._evaluation_starts = False

    @contextlib.contextmanager
    def step_scope(self, key: str = "step_scope") -> Generator[None, None, None]:
        """Inside, the sharded module may be called outside of a Lightning step (generation, say). All ranks enter."""
        precision = self.precision_plugin.forward_context()
        with torch.no_grad(), precision, self.engine.step_scope(key, evaluation=True):
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.sync_buffers()  # as DDP does: ranks compute with rank 0's, which its own batches have changed
        self._sequences.check("training_step", super().training_step, args, kwargs)
        with (
            self.engine.step_scope("training_step"),
            self.engine.vertical.step((args, kwargs), evaluation=False),
        ):
            return self._sequences.training_step(super().training_step, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        if module is not None and not module.automatic_optimization:
            closure_loss = self._sequences.manual_loss(closure_loss)
        if (check := self._sequences.trying) is not None:
            check.backward(closure_loss, *args, **kwargs)
            return closure_loss
        with self._sequences.backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sequences.trying is not None:
            return closure()
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._sequences.check_alike(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._interruptions is not None:
            self._interruptions.between_validation_batches()
        with self._evaluation("validation_step", super().validation_step, args, kwargs):
            return self._sequences.evaluation_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation("test_step", super().test_step, args, kwargs):
            return self._sequences.evaluation_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation("predict_step", super().predict_step, args, kwargs):
            return self._sequences.evaluation_step(super().predict_step, *args, **kwargs)

    def on_validation_start(self) -> None:
        self._evaluation_starts = True

    def on_validation_end(self) -> None:
        assert self.lightning_module is not None
        if self._interruptions is not None and self._interruptions.training:
            validations.step_plateau_schedulers(self.lightning_module.trainer)

    def on_test_start(self) -> None:
        self._evaluation_starts = True

    def on_predict_start(self) -> None:
        self._evaluation_starts = True

    @contextlib.contextmanager
    def _evaluation(self, key: str, step: Any, args: Any, kwargs: Any) -> Generator[None, None, None]:
        starts = self._evaluation_starts
        if starts:  # once: nothing changes buffers now, and ranks may have more or fewer batches
            self._evaluation_starts = False
            self.engine.sync_buffers()
        self._sequences.check(key, step, args, kwargs, together=starts)
        engine = self.engine
        with engine.step_scope(key, evaluation=True), engine.vertical.step((args, kwargs), evaluation=True):
            yield

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate locally where gradients rest replicated (stages 0 and 1); elsewhere reduce every time."""
        with self.engine.no_sync():
            yield
