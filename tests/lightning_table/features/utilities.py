"""Utilities, profilers, the tuner, torch.compile, the CLI."""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn

from tests.lightning_table.bench import Bench, Notes, Ran
from tests.lightning_table.table import heading
from tests.trainer.toys import Lit, _quiet, seeded

feature = heading("Utilities, profilers, the tuner, the CLI")


@feature("self.all_gather")
class Contrasts(Notes):
    """Tensors, dicts, numbers; losses and weights where gradients go through it"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        self.noted.append(self.all_gather({"a": out.detach(), "b": [torch.tensor(self.global_rank), 1.5]}))
        every = self.all_gather(out, sync_grads=True)
        loss = nn.functional.mse_loss(out, batch[1]) + every.square().mean()
        self.losses.append(loss.item())
        return loss


@feature("trainer.strategy.barrier, broadcast, reduce, reduce_boolean_decision, all_gather")
def collectives(bench: Bench) -> Any:
    """What each rank gets, before and after a fit too"""

    class Talks(Notes):
        def on_train_epoch_end(self) -> None:
            of, rank = self.trainer.strategy, self.global_rank
            of.barrier("here")
            self.noted += [
                of.broadcast({"rank": rank, "t": torch.ones(2) * rank}, src=1),
                [of.reduce(torch.tensor(rank + 1.0), reduce_op=op) for op in ("mean", "sum")],
                [of.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)],
                of.all_gather(torch.tensor([rank])),
                (of.reduce(1.5), of.global_rank, of.local_rank, of.node_rank, of.world_size, of.is_global_zero),
            ]

    ran = bench.fit(seeded(Talks))
    ran.trainer.strategy.barrier()
    return ran.module.noted, ran.trainer.strategy.broadcast(dist.get_rank(), 1)


@feature("seed_everything(workers=True)")
def seeds(bench: Bench) -> Any:
    """Dropout's losses, random numbers of torch, numpy and random in steps and workers"""

    class Draws(Notes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.noted.append((float(torch.rand(())), float(np.random.rand()), random.random()))
            return super().training_step((nn.functional.dropout(batch[0], 0.5), batch[1]), batch_idx)

    pl.seed_everything(11, workers=True, verbose=False)
    return bench.fit(Draws()).seen


@feature("grad_norm")
class LogsNorms(Lit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


@feature("summarize, measure_flops, self.example_input_array")
class Looks(Notes):
    """Sizes and counts in on_fit_start, FLOPs in setup"""

    def setup(self, stage: str) -> None:
        self.noted.append(measure_flops(self, lambda: self(torch.ones(2, 4)), lambda y: y.sum()))

    def on_fit_start(self) -> None:
        self.noted.append(str(summarize(self, max_depth=-1)))


def _profiled(kind: Any, actions: Any) -> Any:
    def body(bench: Bench) -> Any:
        """Names of actions, of a SimpleProfiler with their numbers; files"""
        profiler = kind(bench.root, "out")
        ran = bench.fit(profiler=profiler)
        # Actions of a strategy have its class in their name.
        names = {re.sub(r"]\w+Strategy", "]", name): number for name, number in actions(profiler).items()}
        return ran.seen, dict(sorted(names.items())), bench.files("out*")

    return body


feature("SimpleProfiler")(
    _profiled(SimpleProfiler, lambda of: {name: len(times) for name, times in of.recorded_durations.items()})
)
feature("AdvancedProfiler")(_profiled(AdvancedProfiler, lambda of: dict.fromkeys(of.profiled_actions)))


@feature("PyTorchProfiler", slow=True)
def pytorch_profiler(bench: Bench) -> Any:
    """Losses, weights; that operations and steps are in what it says, files"""
    # All rows: which of them are the dearest 20 is not the same on each machine.
    profiler = PyTorchProfiler(bench.root, "out", export_to_chrome=True, schedule=None, row_limit=-1)
    ran = bench.fit(profiler=profiler, max_epochs=1)
    dist.barrier()
    texts = [path.read_text() for path in sorted(bench.root.glob("fit-out*.txt"))]
    said = [[word in text for word in ("aten::addmm", "optimizer_step", "training_step")] for text in texts]
    assert said and all(any(words) for words in said)
    return ran.seen, said


@feature("Tuner.lr_find")
def lr_find(bench: Bench) -> Any:
    """Rates, losses, the suggestion; losses and weights after it"""
    module, of = seeded(Lit), bench.trainer()
    with contextlib.redirect_stderr(io.StringIO()):
        found = Tuner(of).lr_find(module, bench.loader(count=96), num_training=16, update_attr=True)
    return dict(found.results), found.suggestion(), bench.fit(module).seen


@feature("Tuner.scale_batch_size", ddp_raises="distributed")
def scale_batch_size(bench: Bench) -> Any:
    """Lightning finds a batch size on one rank only"""
    return Tuner(bench.trainer()).scale_batch_size(seeded(Lit), bench.loader())


@feature("torch.compile(module)", slow=True)
def compiled(bench: Bench) -> Any:
    class Quiet(Lit):
        """Nothing is logged: that fails inside of a graph, under DDP too."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    torch._dynamo.reset()
    module, of = seeded(Quiet), bench.trainer(max_epochs=1)
    of.fit(torch.compile(module), bench.loader(), bench.loader())
    return Ran(of, module).seen


@feature("LightningCLI", needs=("jsonargparse",))
def cli(bench: Bench) -> Any:
    """Losses, weights, its config file"""
    from lightning.pytorch.cli import LightningCLI

    class Loads(Lit):
        def train_dataloader(self) -> Any:
            return bench.loader()

    pl.seed_everything(3, verbose=False)
    silent = ["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"]
    args = ["fit", "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    args += [f"--trainer.strategy={bench.row}", f"--trainer.default_root_dir={bench.root}", "--seed_everything=3"]
    args += [f"--trainer.{name}=false" for name in silent] + ["--model.width=6", "--model.lr=0.02"]
    before, sys.argv = sys.argv, ["script"]
    try:
        ran = LightningCLI(Loads, args=args)
    finally:
        sys.argv = before
    config = (bench.root / "config.yaml").read_text().replace(bench.row, "ROW").replace(str(bench.root), "ROOT")
    return Ran(ran.trainer, ran.model).seen, config


@feature("strategies selected by name")
def by_name(bench: Bench) -> Any:
    _quiet()
    silent = ("logger", "enable_progress_bar", "enable_checkpointing", "use_distributed_sampler")
    settings: dict[str, Any] = {"devices": 2, "accelerator": "cpu", "max_epochs": 2} | dict.fromkeys(silent, False)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        of = pl.Trainer(strategy=bench.row, **settings)
        module = seeded(Lit)
        of.fit(module, bench.loader(), bench.loader())
    return Ran(of, module).seen
