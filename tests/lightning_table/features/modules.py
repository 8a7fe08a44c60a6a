"""What modules do in their steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from tests.lightning_table.bench import Bench, Notes, variant
from tests.lightning_table.table import heading
from tests.trainer.toys import Block, Lit, seeded

feature = heading("Modules and their steps")

_CLIPS = variant(on_before_optimizer_step=lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
feature("torch.nn.utils.clip_grad_norm_ in on_before_optimizer_step")(_CLIPS)


@feature("lightning_zero.clip_grad_norm_, compared with torch's")
def own_clipping(bench: Bench) -> Any:
    ours = variant(on_before_optimizer_step=lambda m, _: lightning_zero.clip_grad_norm_(m, 0.1))
    return bench.fit(seeded(_CLIPS if bench.row == "ddp" else ours)).seen


@feature("LightningModules inside a LightningModule")
class Outer(Lit):
    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks, self.head
        self.parts = nn.ModuleList([Lit(width=6), Lit(width=6)])

    def forward(self, x: Any) -> Any:
        return self.parts[0](x) + self.parts[1](x)


@feature("torch.utils.checkpoint in forward")
class Checkpoints(Lit):
    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@feature("autograd.grad(create_graph=True) for a gradient penalty")
class Penalized(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        loss = super().training_step(batch, batch_idx) + 0.1 * slope.square().mean()
        self.losses.append(loss.item())
        return loss


@feature("parametrizations: weight_norm, spectral_norm, orthogonal")
class Parametrized(Lit):
    def __init__(self) -> None:
        super().__init__()
        of = nn.utils.parametrizations
        of.weight_norm(self.blocks[0].up)
        of.spectral_norm(self.blocks[0].down)
        of.orthogonal(self.blocks[1].up)


@feature("nn.MultiheadAttention, nn.GRU, nn.Embedding, nn.ParameterList, buffers")
class Layers(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True, num_layers=2)
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(())])
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Any) -> Any:
        self.count += 1
        y = self.embed((x.abs() * 4).long().clamp(max=7))
        y = y + self.attention(y, y, y, need_weights=False)[0]
        y = self.gru(y)[0].mean(1) * self.scales[0] * self.scales[1]
        rest = [*self.first.parameters(), *self.blocks[1].parameters()]
        return self.head(self.blocks[0](y)) + 0 * sum(p.sum() for p in rest)


@feature("forward and backward hooks of modules, hooks of tensors")
class Hooked(Notes):
    """What they see; losses, metrics, weights"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(lambda m, i, o: self.noted.append(o.detach().clone()))
        self.blocks[1].register_forward_pre_hook(lambda m, i: (i[0] * 1.5,))
        self.blocks[1].register_full_backward_hook(lambda m, i, o: self.noted.append(o[0].clone()))

    def forward(self, x: Any) -> Any:
        y = self.blocks[1](self.blocks[0](self.first(x)))
        if y.requires_grad:
            y.register_hook(lambda g: g * 0.5)
        return self.head(y)


@feature("layers that all ranks skip in the same steps", fit={"ddp": {"find_unused_parameters": True}})
class Drops(Lit):
    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if not self.training or (len(self.losses) + index) % 3:
                x = block(x)
        return self.head(x)


@feature("a frozen teacher, and a module that is not registered")
class Learns(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 8), Block(8), nn.Linear(8, 1)).requires_grad_(False)
        self.hidden = [nn.Linear(4, 1)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            wished = self.teacher(batch[0]) + self.hidden[0](batch[0])
        return super().training_step((batch[0], wished), batch_idx)
