"""A small GPT, and the LightningModule that the main job trains.

``GPT`` is an ordinary ``nn.Module``: nothing in it knows about sharding. Its blocks sit in a ``ModuleList``, which is
where the engine finds its units.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_zero.config import ConfigError

RATE_WINDOW_S = 0.25  # tokens per second are averaged over at least this long
SHOWN_EVERY = 10  # batches between two losses in the progress bar, where nothing is logged


class Block(nn.Module):
    """One transformer block: causal attention and an MLP, each behind a norm and a residual."""

    def __init__(self, d_model: int, n_head: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.n_head, width // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        y = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, drop, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, drop, self.training)


class GPT(nn.Module):
    """Decoder-only transformer: ``tokens [batch, length] int64 -> logits [batch, length, vocab_size]``.

    Raises:
        ConfigError: a size that cannot work; the message names the key of the Hydra group ``model``.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        n_layer: int = 4,
        n_head: int = 4,
        d_model: int = 128,
        block_size: int = 256,
        dropout: float = 0.0,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "n_layer": n_layer, "n_head": n_head, "d_model": d_model}
        _check_sizes(sizes | {"block_size": block_size})
        if d_model % n_head:
            raise ConfigError(
                f"model.d_model: expected a multiple of model.n_head ({n_head}), got {d_model}. "
                "Change model.d_model or model.n_head."
            )
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ConfigError(f"model.dropout: expected a number >= 0 and < 1, got {dropout!r}. Change model.dropout.")
        self.block_size = block_size
        self.embed = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(block_size, d_model)
        self.blocks = nn.ModuleList(Block(d_model, n_head, dropout) for _ in range(n_layer))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self._init_weights(n_layer, std=0.5 * d_model**-0.5)  # GPT-2's 0.02 at its width
        if tie_weights:
            self.head.weight = self.embed.weight

    def _init_weights(self, n_layer: int, std: float) -> None:
        for name, p in self.named_parameters():
            if name.endswith(
                ("proj.weight", "down.weight")
            ):  # keeps the variance of the residual stream, as GPT-2 does
                nn.init.normal_(p, std=std / math.sqrt(2 * n_layer))
            elif p.ndim >= 2:
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _check_sizes(sizes: dict[str, Any]) -> None:
    for key, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"model.{key}: expected a whole number > 0, got {value!r}. Change model.{key}.")


class LitGPT(LightningModule):
    """Next-token training of a :class:`GPT`.

    A batch is a tensor of tokens ``[batch, length + 1]``.

    Args:
        optimizer: makes the optimizer from a list of param groups, as ``functools.partial(torch.optim.SGD, lr=0.1)``
            does. Default: AdamW at 3e-3.
        warmup_steps: steps over which the learning rate rises; from there it falls by a cosine.
        min_lr_ratio: what share of the learning rate is left at the end of training.
        sizes: the arguments of :class:`GPT`.
    """

    def __init__(
        self,
        *,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
        warmup_steps: int = 20,
        min_lr_ratio: float = 0.1,
        vocab_size: int = 256,
        n_layer: int = 4,
        n_head: int = 4,
        d_model: int = 128,
        block_size: int = 256,
        dropout: float = 0.0,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ConfigError(f"model.warmup_steps: expected a whole number >= 0, got {warmup_steps!r}.")
        if not 0 <= min_lr_ratio <= 1:
            raise ConfigError(f"model.min_lr_ratio: expected a number from 0 to 1, got {min_lr_ratio!r}.")
        # A callable in the checkpoint would break torch.load(weights_only=True).
        self.save_hyperparameters(ignore=["optimizer"])
        self.make_optimizer = optimizer
        self.gpt = GPT(vocab_size, n_layer, n_head, d_model, block_size, dropout, tie_weights)
        self.bits_per_byte = MeanMetric()
        self._rate_start: tuple[float, int] | None = None  # (seconds, tokens seen since)
        self._train_loss: Tensor | None = None  # of the last batch

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        # Read where it is logged, every few steps. The progress bar's values Lightning reads after every batch, and the
        # read of a value on a GPU waits for all that the GPU has to do: see :meth:`on_train_batch_end`.
        self.log("train_loss", loss)
        self._train_loss = loss.detach()
        self.log("lr", _on_host(self.trainer.optimizers[0].param_groups[0]["lr"]))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        bits = self._loss(batch) / math.log(2)
        self.bits_per_byte.update(bits, weight=batch[:, 1:].numel())
        self.log("val_bits_per_byte", self.bits_per_byte, prog_bar=True)

    def on_train_start(self) -> None:
        self._rate_start = None

    def on_validation_end(self) -> None:
        self._rate_start = None  # the clock must not count the time of a validation

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self._count_tokens(batch)
        every = getattr(self.trainer, "log_every_n_steps", 0) or SHOWN_EVERY
        if self._train_loss is not None and (batch_idx == 0 or (batch_idx + 1) % every == 0):
            self.log("train_loss", self._train_loss.cpu(), prog_bar=True, logger=False)
        self._train_loss = None

    def _count_tokens(self, batch: Tensor) -> None:
        now = time.perf_counter()
        if self._rate_start is None:
            self._rate_start = (now, 0)
            return
        start, tokens = self._rate_start
        tokens += batch[:, 1:].numel() * self.trainer.world_size
        self._rate_start = (start, tokens)
        first = "tokens_per_s" not in self.trainer.callback_metrics  # a short run shows one too
        if now - start >= RATE_WINDOW_S or (first and now > start):
            self.log("tokens_per_s", _on_host(tokens / (now - start)), prog_bar=True)
            self._rate_start = (now, 0)

    def configure_optimizers(self) -> Any:
        make = self.make_optimizer or (lambda groups: torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1))
        optimizer = make(decay_groups(self.parameters()))
        total_steps = self.trainer.estimated_stepping_batches
        schedule = warmup_cosine(self.hparams["warmup_steps"], total_steps, self.hparams["min_lr_ratio"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, tokens: Tensor, max_new_tokens: int, temperature: float = 0.8, seed: int = 0) -> Tensor:
        """Continue ``tokens [batch, length]``; returns ``[batch, length + max_new_tokens]``.

        Deterministic for a seed, so that all ranks of a sharded model run the same calls and agree on the text.
        """
        generator = torch.Generator(device=tokens.device).manual_seed(seed)
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.gpt.block_size :])[:, -1].float()
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
