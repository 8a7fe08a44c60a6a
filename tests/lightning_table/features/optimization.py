"""Optimizers, schedulers, clipping, accumulation, automatic and by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lightning_table.bench import Bench
from tests.lightning_table.table import Refusal, feature
from tests.trainer.toys import Block, Lit, seeded


def _optimizers(make: Any) -> Any:
    class With(Lit):
        def configure_optimizers(self) -> Any:
            return make(self)

    return seeded(With)


@feature("gradient_clip_val")
def clip_norm(bench: Bench) -> Any:
    """Losses, metrics, weights"""
    return bench.fit(gradient_clip_val=0.1).seen


@feature('gradient_clip_algorithm="value"')
def clip_value(bench: Bench) -> Any:
    """Losses, metrics, weights"""
    return bench.fit(gradient_clip_val=0.02, gradient_clip_algorithm="value").seen


@feature("accumulate_grad_batches")
def accumulation(bench: Bench) -> Any:
    """Losses, metrics, weights, steps, with a short last window, and clipping"""
    return bench.fit(accumulate_grad_batches=2, gradient_clip_val=0.1).seen


for _name, _make in {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW(fused)": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "NAdam, foreach": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01, foreach=True),
}.items():

    def _optimizer(bench: Bench, make: Any = _make) -> Any:
        return bench.fit(_optimizers(make)).seen

    _optimizer.__doc__ = "Losses, metrics, weights"
    feature(f"torch.optim.{_name}")(_optimizer)


@feature("torch.optim.LBFGS", refused=Refusal("`torch.optim.LBFGS`", r"LBFGS, whose step\(\) calls its closure itself"))
def lbfgs(bench: Bench) -> Any:
    """Losses, metrics, weights"""
    return bench.fit(_optimizers(lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2))).seen


@feature("param groups by shape")
def groups(bench: Bench) -> Any:
    """Losses, metrics, weights, sizes and rates of the groups"""

    def make(module: Any) -> Any:
        decay = [p for p in module.parameters() if p.ndim > 1]
        rest = [p for p in module.parameters() if p.ndim == 1]
        sizes.append((sum(p.numel() for p in decay), len(rest)))
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.1}]
        return torch.optim.AdamW(groups, lr=0.01)

    sizes: list[Any] = []
    ran = bench.fit(_optimizers(make))
    return sizes, ran.seen, [group["lr"] for group in ran.trainer.optimizers[0].param_groups]


@feature("no optimizer")
def no_optimizer(bench: Bench) -> Any:
    """Losses, metrics, weights"""
    return bench.fit(_optimizers(lambda _: None)).seen


@feature("frozen parameters")
def frozen(bench: Bench) -> Any:
    """Losses, metrics, weights"""
    module = seeded(Lit)
    module.blocks[0].requires_grad_(False)
    module.head.bias.requires_grad_(False)
    return bench.fit(module).seen


@feature("unused and shared parameters")
def unused(bench: Bench) -> Any:
    """Losses, metrics, weights, beside DDP that looks for the unused"""

    class Odd(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 5)
            self.blocks[1].up.weight = self.blocks[0].up.weight

    return bench.fit(seeded(Odd), ddp={"find_unused_parameters": True}).seen


SCHEDULERS: dict[str, Any] = {
    "StepLR by epoch": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR by step": lambda o: {
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        "interval": "step",
    },
    "ReduceLROnPlateau": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
        "monitor": "val",
    },
    "SequentialLR, every second step": lambda o: {
        "scheduler": torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 4)],
            milestones=[2],
        ),
        "interval": "step",
        "frequency": 2,
    },
    "LambdaLR": lambda o: [torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)],
}
for _name, _make in SCHEDULERS.items():

    def _scheduler(bench: Bench, make: Any = _make) -> Any:
        def both(module: Any) -> Any:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
            return [optimizer], made if isinstance(made := make(optimizer), list) else [made]

        ran = bench.fit(_optimizers(both), max_epochs=3)
        assert len(set(ran.module.rates)) > 1
        return ran.module.rates, ran.seen

    _scheduler.__doc__ = "Rates, losses, metrics, weights"
    feature(_name)(_scheduler)


class Manual(Lit):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False


@feature("manual optimization")
def manual(bench: Bench) -> Any:
    """Losses, metrics, weights, rates, with accumulation, clipping and a scheduler by hand"""

    class ByHand(Manual):
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

    ran = bench.fit(seeded(lambda: ByHand(scheduler="step")), count=16)
    return ran.seen, ran.module.rates


@feature("manual optimization with a closure, two backwards")
def manual_closure(bench: Bench) -> Any:
    """Losses, metrics, weights"""

    class Closes(Manual):
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

    return bench.fit(seeded(Closes)).seen


class Gan(Manual):
    """A generator and a discriminator that take turns."""

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
        return [g, d], [torch.optim.lr_scheduler.ExponentialLR(g, 0.9), torch.optim.lr_scheduler.ExponentialLR(d, 0.8)]

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


@feature("several optimizers, toggle_optimizer, toggled_optimizer")
def gan(bench: Bench) -> Any:
    """Losses, weights, rates of a GAN"""
    ran = bench.fit(seeded(Gan), ddp={"find_unused_parameters": True})
    return ran.seen, ran.module.rates


@feature("several optimizers, saved and resumed")
def gan_resumed(bench: Bench) -> Any:
    """Losses, weights"""
    first = bench.fit(seeded(Gan), ddp={"find_unused_parameters": True}, max_epochs=1)
    first.trainer.save_checkpoint(bench.root / "a.ckpt")
    settings: dict[str, Any] = {"ddp": {"find_unused_parameters": True}, "ckpt_path": bench.root / "a.ckpt"}
    return bench.fit(seeded(Gan, 5), **settings).seen


@feature("self.freeze and self.unfreeze between fits")
def freeze(bench: Bench) -> Any:
    """Losses, metrics, weights"""
    module = seeded(Lit)
    bench.fit(module, max_epochs=1)
    module.freeze()
    bench.trainer().validate(module, bench.loader(), verbose=False)
    module.unfreeze()
    return bench.fit(module, max_epochs=1).seen
