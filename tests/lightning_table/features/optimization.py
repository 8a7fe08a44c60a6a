"""Optimizers, schedulers, clipping, accumulation, automatic and by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.lightning_table.bench import Bench, Notes, variant
from tests.lightning_table.table import heading
from tests.trainer.toys import Block, ByHand, Lit, seeded

feature = heading("Optimization")

feature("gradient_clip_val", fit={"gradient_clip_val": 0.1})(Lit)
feature('gradient_clip_algorithm="value"', fit={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"})(Lit)
# With a short last window.
feature("accumulate_grad_batches", fit={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})(Lit)

for _name, _make in {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW(fused)": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "NAdam(foreach)": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01, foreach=True),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2),
}.items():
    feature(f"torch.optim.{_name}")(variant(configure_optimizers=_make))


@feature("param groups by shape")
class ByShape(Notes):
    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim == 1]
        self.noted.append((sum(p.numel() for p in decay), len(rest)))
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.1}]
        return torch.optim.AdamW(groups, lr=0.01)


feature("no optimizer")(variant(configure_optimizers=lambda _: None))


@feature("frozen parameters")
class Frozen(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)


LOOKS = {"ddp": {"find_unused_parameters": True}}


@feature("unused and shared parameters", fit=LOOKS)
class Odd(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 5)
        self.blocks[1].up.weight = self.blocks[0].up.weight


# With what Lightning is told of each.
SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "StepLR by epoch": (lambda o: lr_scheduler.StepLR(o, 1, 0.5), {}),
    "OneCycleLR by step": (lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10), {"interval": "step"}),
    "ReduceLROnPlateau": (
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
        {"monitor": "val"},
    ),
    "SequentialLR with frequency=2": (
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 4)], [2]),
        {"interval": "step", "frequency": 2},
    ),
    "LambdaLR": (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch), {}),
}


def _scheduled(make: Any, told: dict[str, Any]) -> type:
    def both(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": make(optimizer), **told}]

    def rates_change(module: Any) -> None:
        assert len(set(module.rates)) > 1

    return variant(configure_optimizers=both, on_train_end=rates_change)


for _name, _how in SCHEDULERS.items():
    feature(_name, fit={"max_epochs": 3})(_scheduled(*_how))


@feature("manual optimization", fit={"count": 16})
class StepsEverySecond(ByHand):
    def __init__(self) -> None:
        super().__init__(scheduler="step")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.losses.append(loss.item())
        self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


@feature("manual optimization with two backwards in a closure")
class Closes(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss * 0.5)
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure=closure)


@feature("several optimizers, toggle_optimizer, toggled_optimizer", fit=LOOKS)
class Gan(ByHand):
    """Losses, weights, rates of a generator and a discriminator that take turns"""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), Block(8), nn.Linear(8, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 8), Block(8), nn.Linear(8, 1))
        del self.first, self.blocks, self.head

    def forward(self, x: Any) -> Any:
        return self.generator(x)

    def configure_optimizers(self) -> Any:
        g = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=0.02, betas=(0.5, 0.9))
        return [g, d], [lr_scheduler.ExponentialLR(g, 0.9), lr_scheduler.ExponentialLR(d, 0.8)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        x, y = batch
        like = nn.functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        with self.toggled_optimizer(g):
            loss = like(self.discriminator(self(x)), ones)
            self.manual_backward(loss)
            g.step()
            g.zero_grad()
        self.toggle_optimizer(d)
        d_loss = like(self.discriminator(y), ones) + like(self.discriminator(self(x).detach()), zeros)
        self.manual_backward(d_loss)
        d.step()
        d.zero_grad()
        self.untoggle_optimizer(d)
        self.losses += [loss.item(), d_loss.item()]

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()


@feature("several optimizers, saved and resumed")
def gan_resumed(bench: Bench) -> Any:
    path = bench.fit(seeded(Gan), max_epochs=1, **LOOKS).save()
    return bench.fit(seeded(Gan, 5), ckpt_path=path, **LOOKS).seen


@feature("self.freeze and self.unfreeze between fits")
def freeze(bench: Bench) -> Any:
    module = seeded(Lit)
    bench.fit(module, max_epochs=1)
    module.freeze()
    bench.trainer().validate(module, bench.loader(), verbose=False)
    module.unfreeze()
    return bench.fit(module, max_epochs=1).seen
