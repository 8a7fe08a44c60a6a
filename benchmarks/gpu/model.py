"""A GPT of torch alone: importing it takes no Lightning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.plan import Size


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm. It recomputes itself, so that it can be a unit of any side."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.d_model
        self.n_head, self.recompute = size.n_head, size.recompute
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.n_head, width // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """``tokens [batch, length] -> logits [batch, length, vocab_size]``."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab_size, size.d_model)
        self.position = nn.Embedding(size.length, size.d_model)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.n_layer))
        self.norm = nn.LayerNorm(size.d_model)
        self.head = nn.Linear(size.d_model, size.vocab_size, bias=False)
        for param in self.parameters():
            if param.ndim >= 2:
                nn.init.normal_(param, std=0.5 * size.d_model**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(size: Size, device: str) -> GPT:
    """The same on all sides: weights are drawn on ``device``, from one seed."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(size)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of the next token; ``tokens [batch, length + 1]``."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
