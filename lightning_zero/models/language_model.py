"""What is common to the language models of the main job: steps, metrics, the learning rate, and text out of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_zero.config import ConfigError
from lightning_zero.sequence.part import SequencePart, mean_over_tokens

SHOWN_EVERY = 10  # batches between two losses in the progress bar, where nothing is logged

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class LanguageModel(LightningModule):
    """Next-token training of a module whose ``forward`` takes ``tokens [batch, length] int64`` to logits
    ``[batch, length, vocab_size]``.

    A batch is a tensor of tokens ``[batch, length + 1]``. Bits per byte are bits per token divided by the data's
    ``bytes_per_token`` (1 where the data has none), so that models with other tokens can be compared.

    Args:
        optimizer: makes the optimizer from a list of param groups, as ``functools.partial(torch.optim.SGD, lr=0.1)``
            does. Default: AdamW at 3e-3. It gets those of :func:`decay_groups`.
        warmup_steps: steps over which the learning rate rises; from there it falls by a cosine.
        min_lr_ratio: what share of the learning rate is left at the end of training.

    Attributes:
        vocab_size: tokens that there are.
        context: tokens that ``forward`` takes at most; ``None``: any number.
    """

    vocab_size: int
    context: int | None = None

    def __init__(self, optimizer: MakeOptimizer | None, warmup_steps: int, min_lr_ratio: float) -> None:
        super().__init__()
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ConfigError(f"model.warmup_steps: expected a whole number >= 0, got {warmup_steps!r}.")
        if not 0 <= min_lr_ratio <= 1:
            raise ConfigError(f"model.min_lr_ratio: expected a number from 0 to 1, got {min_lr_ratio!r}.")
        self.make_optimizer = optimizer
        self.schedule = (warmup_steps, min_lr_ratio)
        self.bits_per_byte = MeanMetric()
        self._train_loss: Tensor | None = None  # of the last batch

    def _losses(self, batch: Tensor) -> Tensor:
        """Nats of each token ``[batch, length]``."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none").view(
            batch.shape[0], -1
        )

    def split_sequence(self, batch: Tensor, part: SequencePart) -> Tensor:
        """Under ``zero.sequence_parallel``: a part's tokens, and the one that its last token is to predict."""
        return part.of(batch, overlap=1)

    def _bits_per_byte(self, nats: Tensor) -> Tensor:
        datamodule = getattr(self.trainer, "datamodule", None)
        return nats / (math.log(2) * getattr(datamodule, "bytes_per_token", 1.0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = mean_over_tokens(self._losses(batch))
        # Read where it is logged, every few steps. The progress bar's values Lightning reads after every batch, and the
        # read of a value on a GPU waits for all that the GPU has to do: see :meth:`on_train_batch_end`.
        self.log("train_loss", loss)
        self._train_loss = loss.detach()
        self.log("lr", _on_host(self.trainer.optimizers[0].param_groups[0]["lr"]))
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
        """Bits per byte of each text of the batch ``[batch]``: how much it surprises the model."""
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

    @torch.no_grad()
    def generate(self, tokens: Tensor, max_new_tokens: int, temperature: float = 0.8, seed: int = 0) -> Tensor:
        """Continue ``tokens [batch, length]``; returns ``[batch, length + max_new_tokens]``.

        Deterministic for a seed, so that all ranks of a sharded model run the same calls and agree on the text.
        """
        generator = torch.Generator(device=tokens.device).manual_seed(seed)
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -(self.context or 0) :])[:, -1].float()
            probs = F.softmax(logits / max(temperature, 1e-4), dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], dim=1)
        return tokens


def _on_host(value: float) -> Tensor:
    """What ``log`` takes as it is. A number it would send to the device, and the host would wait for that."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def decay_groups(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Param groups in which matrices decay and vectors (biases, norms) do not."""
    trainable = [p for p in params if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2]},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def warmup_cosine(warmup_steps: int, total_steps: float, min_ratio: float) -> Callable[[int], float]:
    """The factor on the learning rate at each step; constant after the warmup where training has no end."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if math.isinf(total_steps) or total_steps < 0:
            return 1.0
        done = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return factor
