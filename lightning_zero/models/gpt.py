"""A small GPT, which ``lightning_zero.train`` trains by default.

``GPT`` has no code for sharding; it only asks for the positions of its tokens in the whole sequence. Each block of its
``ModuleList`` becomes a unit.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.models.language_model import LanguageModel, MakeOptimizer
from lightning_zero.sequence.part import current, sequence_positions
from lightning_zero.settings import ConfigError, check_whole_number

POSITIONS = ("learned", "rotary")
ROTARY_BASE = 10_000.0


class Block(nn.Module):
    """A transformer block: causal attention and MLP, each with pre-norm and residual."""

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

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        """Map ``x [batch, length, d_model]`` to the same shape. ``rotation [1, 2, length, head_width / 2]`` or None."""
        batch, length, width = x.shape
        # Heads come first in the rows of qkv, so that tensor parallelism can divide them among ranks.
        heads = self.qkv(self.norm1(x)).view(batch, length, -1, 3, width // self.n_head)
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        if rotation is not None:
            q, k = rotate(q, rotation[0]), rotate(k, rotation[0])
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        y = self.proj(y.transpose(1, 2).flatten(2))
        x = x + F.dropout(y, drop, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, drop, self.training)


def rotations(positions: Tensor, head_width: int) -> Tensor:
    """Return rotary cosines and sines ``[2, length, head_width / 2]`` (Su et al. 2021, arXiv 2104.09864)."""
    even = torch.arange(0, head_width, 2, device=positions.device)
    angles = torch.outer(positions, ROTARY_BASE ** (-even / head_width))
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Return ``x [batch, heads, length, head_width]`` rotated by the cosines and sines in ``rotation``."""
    cos, sin = rotation.to(x.dtype)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class GPT(nn.Module):
    """Decoder-only transformer: ``tokens [batch, length] int64 -> logits [batch, length, vocab_size]``.

    ``position``: a ``learned`` embedding, as in GPT-2, or ``rotary``, which has no parameters and learns faster. Raises
    ConfigError for invalid arguments; the message names the setting, such as ``model.d_model``.
    """

    tensor_plan: ClassVar = {
        "embed": "embedding_rowwise",
        "blocks.*.qkv": "colwise",
        "blocks.*.proj": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(
        self,
        vocab_size: int = 256,
        n_layer: int = 4,
        n_head: int = 4,
        d_model: int = 128,
        block_size: int = 256,
        dropout: float = 0.0,
        tie_weights: bool = False,
        position: str = "learned",
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "n_layer": n_layer, "n_head": n_head, "d_model": d_model}
        for key, value in (sizes | {"block_size": block_size}).items():
            check_whole_number(f"model.{key}", value, 1)
        if d_model % n_head:
            raise ConfigError(
                f"model.d_model: expected a multiple of model.n_head ({n_head}), got {d_model}. "
                "Change model.d_model or model.n_head."
            )
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ConfigError(f"model.dropout: expected a number >= 0 and < 1, got {dropout!r}. Change model.dropout.")
        if position not in POSITIONS:
            raise ConfigError(
                f"model.position: expected one of {', '.join(POSITIONS)}, got {position!r}. Change model.position."
            )
        if position == "rotary" and (d_model // n_head) % 2:
            raise ConfigError(
                f"model.d_model: expected heads of even width under model.position=rotary, got {d_model} / {n_head}. "
                "Change model.d_model or model.n_head."
            )
        self.block_size = block_size
        self.head_width = d_model // n_head
        self.embed = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(block_size, d_model) if position == "learned" else None
        self.blocks = nn.ModuleList(Block(d_model, n_head, dropout) for _ in range(n_layer))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        std = 0.5 * d_model**-0.5  # equals GPT-2's 0.02 at its width
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):  # keeps the variance of the residual stream, as in GPT-2
                nn.init.normal_(p, std=std / math.sqrt(2 * n_layer))
            elif p.ndim >= 2:
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if tie_weights:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, rotation = self.embed(tokens), None
        positions = sequence_positions(tokens.shape[1], tokens.device)
        if self.position is not None:
            length = tokens.shape[1] * (part.size if (part := current()) is not None else 1)
            if length > self.block_size:
                raise ConfigError(
                    f"model.block_size: expected at least the {length} positions of a sequence in the batch, got "
                    f"{self.block_size}. Give model.block_size and data.block_size the same value."
                )
            x = x + self.position(positions)
        else:
            rotation = rotations(positions, self.head_width)[None]
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


class LitGPT(LanguageModel):
    """A :class:`GPT` that is trained as :class:`LanguageModel` describes, with the arguments of both."""

    def __init__(
        self,
        *,
        optimizer: MakeOptimizer | None = None,
        warmup_steps: int = 20,
        min_lr_ratio: float = 0.1,
        vocab_size: int = 256,
        n_layer: int = 4,
        n_head: int = 4,
        d_model: int = 128,
        block_size: int = 256,
        dropout: float = 0.0,
        tie_weights: bool = False,
        position: str = "learned",
    ) -> None:
        super().__init__(optimizer, warmup_steps, min_lr_ratio)
        # A callable in the checkpoint would break torch.load(weights_only=True).
        self.save_hyperparameters(ignore=["optimizer"])
        self.gpt = GPT(vocab_size, n_layer, n_head, d_model, block_size, dropout, tie_weights, position)
        self.vocab_size = vocab_size

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)
