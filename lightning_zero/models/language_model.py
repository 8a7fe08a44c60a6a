"""The base class of the main job's language models: steps, metrics and learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_zero.sequence.part import SequencePart, mean_over_tokens
from lightning_zero.settings import ConfigError, check_whole_number

SHOWN_EVERY = 10  # batches between updates of the progress bar where nothing is logged

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class LanguageModel(LightningModule):
    """Base class of models that predict the next token. The ``forward`` of a subclass maps tokens to logits.

    Tokens are ``[batch, length] int64``, logits ``[batch, length, vocab_size]``, and a batch of data is ``[batch,
    length + 1]``. Bits per byte are bits per token divided by the data's ``bytes_per_token`` (default 1), so that
    models with different tokens can be compared.

    Args:
        optimizer: makes the optimizer from the param groups of :func:`decay_groups`, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``. Default: AdamW at 3e-3.
        warmup_steps: optimizer steps of warmup, before a cosine decay.
        min_lr_ratio: learning rate at the end of training, divided by the highest learning rate.

    Attributes:
        vocab_size: number of tokens.
    """

    vocab_size: int

    def __init__(self, optimizer: MakeOptimizer | None, warmup_steps: int, min_lr_ratio: float) -> None:
        super().__init__()
        check_whole_number("model.warmup_steps", warmup_steps, 0)
        if not 0 <= min_lr_ratio <= 1:
            raise ConfigError(
                f"model.min_lr_ratio: expected a number from 0 to 1, got {min_lr_ratio!r}. Change model.min_lr_ratio."
            )
        self.make_optimizer = optimizer
        self.schedule = (warmup_steps, min_lr_ratio)
        self.bits_per_byte = MeanMetric()
        self._train_loss: Tensor | None = None  # of the last batch

    def _losses(self, batch: Tensor) -> Tensor:
        """Return the loss of each token in nats, ``[batch, length]``."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none").view(
            batch.shape[0], -1
        )

    def split_sequence(self, batch: Tensor, part: SequencePart) -> Tensor:
        """Return this rank's part of ``batch`` under ``zero.sequence_parallel``, with one more token as last target."""
        return part.of(batch, overlap=1)

    def _bits_per_byte(self, nats: Tensor) -> Tensor:
        datamodule = getattr(self.trainer, "datamodule", None)
        return nats / (math.log(2) * getattr(datamodule, "bytes_per_token", 1.0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = mean_over_tokens(self._losses(batch))
        # Lightning reads logged values every few steps, but values of the progress bar after every batch, which would
        # wait for the GPU: see :meth:`on_train_batch_end`.
        self.log("train_loss", loss)
        self.log("train_bits_per_byte", self._bits_per_byte(loss.detach()))  # in the unit of validation
        self._train_loss = loss.detach()
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        # On the host: ``log`` would send a number to the device and wait.
        self.log("lr", torch.as_tensor(lr, dtype=torch.float64, device="cpu"))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "val_bits_per_byte")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "test_bits_per_byte")

    def _evaluate(self, batch: Tensor, name: str) -> None:
        bits = self._bits_per_byte(self._losses(batch).mean())
        self.bits_per_byte.update(bits, weight=batch[:, 1:].numel())
        self.log(name, self.bits_per_byte, prog_bar=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the bits per byte of each text of the batch, ``[batch]``."""
        return self._bits_per_byte(mean_over_tokens(self._losses(batch), dim=1))

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        every = getattr(self.trainer, "log_every_n_steps", 0) or SHOWN_EVERY
        if self._train_loss is not None and (batch_idx == 0 or (batch_idx + 1) % every == 0):
            self.log("train_loss", self._train_loss.cpu(), prog_bar=True, logger=False)
        self._train_loss = None

    def configure_optimizers(self) -> Any:
        make = self.make_optimizer or (lambda groups: torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1))
        optimizer = make(decay_groups(self.parameters()))
        warmup_steps, min_lr_ratio = self.schedule
        schedule = warmup_cosine(warmup_steps, self.trainer.estimated_stepping_batches, min_lr_ratio)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def decay_groups(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two param groups of trainable parameters: matrices, and vectors (biases, norms) without weight decay."""
    trainable = [p for p in params if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2]},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def warmup_cosine(warmup_steps: int, total_steps: float, min_ratio: float) -> Callable[[int], float]:
    """Return a function from steps to learning-rate factors. In endless training the factor stays 1 after warmup."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if math.isinf(total_steps) or total_steps < 0:
            return 1.0
        done = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return factor
