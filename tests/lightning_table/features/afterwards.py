"""What users do with the module before and after fit, without the Trainer."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lightning_zero
from tests.lightning_table.bench import Bench, Notes, Ran
from tests.lightning_table.table import heading
from tests.trainer.toys import Lit, seeded

feature = heading("The module without the Trainer")


@feature("model.state_dict() after fit, on one rank alone")
def state_dict(bench: Bench) -> Any:
    """Keys, values, order"""
    module = bench.fit().module
    found = copy.deepcopy(module.state_dict()) if dist.get_rank() == 0 else {"rank": 1}
    dist.barrier()
    return found


@feature("torch.save(model.state_dict()), loaded into another model")
def save_state(bench: Bench) -> Any:
    """What the other model gives"""
    module = bench.fit().module
    if dist.get_rank() == 0:
        torch.save(module.state_dict(), file := bench.root / "weights.pt")
        assert file.stat().st_size < 3 * sum(v.nbytes for v in module.state_dict().values()) + 10_000
    dist.barrier()
    other = seeded(Lit, 5)
    other.load_state_dict(torch.load(bench.root / "weights.pt"))
    return other(torch.ones(2, 4)).detach()


@feature("model(x), model.eval() and no_grad after fit, on one rank alone")
def call(bench: Bench) -> Any:
    """Outputs"""
    module = bench.fit().module
    module.eval()
    with torch.no_grad():
        found = module(torch.ones(2, 4)) if dist.get_rank() == 1 else "none"
    dist.barrier()
    return found


@feature("copy.deepcopy(model) after fit")
def deepcopy(bench: Bench) -> Any:
    """Outputs and gradients of the copy"""
    ran = bench.fit()
    ran.module.trainer = None
    own = copy.deepcopy(ran.module)
    own(torch.ones(2, 4)).sum().backward()
    return own(torch.ones(2, 4)).detach(), [p.grad for p in own.parameters()]


@feature("weights changed between two fits")
def changed(bench: Bench) -> Any:
    module = bench.fit(max_epochs=1).module
    with torch.no_grad():
        module.head.weight.mul_(0.5)
    module.load_state_dict({**module.state_dict(), "head.bias": torch.ones(1)})
    nn.init.ones_(module.blocks[0].norm.weight)
    return bench.fit(module).seen


@feature("a pretrained part loaded in __init__, in setup and in configure_model")
class Loads(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.first.load_state_dict({n: v + 0.1 for n, v in self.first.state_dict().items()})

    def setup(self, stage: str) -> None:
        self.head.load_state_dict({n: torch.full(v.shape, 0.1) for n, v in Lit().head.state_dict().items()})

    def configure_model(self) -> None:
        nn.init.constant_(self.blocks[0].up.bias, 0.3)


@feature("validate and test of a trained module")
def evaluated(bench: Bench) -> Any:
    """Metrics, and the same again after weights were changed"""
    ran = bench.fit()
    found = [bench.trainer().test(ran.module, bench.loader(), verbose=False)]
    with torch.no_grad():
        ran.module.head.bias.add_(1)
    of = bench.trainer()
    found.append(of.test(ran.module, bench.loader(), verbose=False))
    assert found[0] != found[1]
    return found, Ran(of, ran.module).weights


@feature("weights read in steps")
class Penalty(Lit):
    """Losses, weights, with a penalty of weights in the loss; norms that a step of validation logs"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(p.square().sum() for p in self.blocks.parameters())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log_dict({name: p.norm() for name, p in self.named_parameters()})


@feature("weights read and loaded in hooks between steps")
class Reads(Notes):
    """Norms of all weights at the end of validations; a state dict that is loaded after batches"""

    def on_train_batch_end(self, *_: Any) -> None:
        best = copy.deepcopy(self.blocks.state_dict())
        self.blocks.load_state_dict({name: value * 0.99 for name, value in best.items()})

    def on_validation_epoch_end(self) -> None:
        self.noted.append({name: float(p.detach().norm()) for name, p in self.named_parameters()})


@feature("weights read and changed inside lightning_zero.gather(self)")
def reads_gathered(bench: Bench) -> Any:
    """Norms of all weights at the end of validations; a weight that is changed there"""

    class Gathers(Reads):
        def on_validation_epoch_end(self) -> None:
            with lightning_zero.gather(self) if bench.row != "ddp" else contextlib.nullcontext(), torch.no_grad():
                super().on_validation_epoch_end()
                self.head.weight.mul_(0.9)

    return bench.fit(seeded(Gathers)).seen


@feature("averages of weights, updated after each batch, swapped in for validation")
class Averages(Notes):
    """Losses of the averages in validations, and those of training"""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.blocks).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for mean, weight in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
            mean.lerp_(weight, 0.1)

    @torch.no_grad()
    def on_validation_start(self) -> None:
        for mean, weight in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
            before = weight.clone()
            weight.copy_(mean)
            mean.copy_(before)

    on_validation_end = on_validation_start
