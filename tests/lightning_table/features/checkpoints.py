"""Files that are saved, resumed from and loaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from tests.lightning_table.bench import Bench, Ran, checkpoint
from tests.lightning_table.features.callbacks import _content
from tests.lightning_table.table import feature
from tests.trainer.toys import Lit, seeded


def _adam() -> Any:
    return seeded(lambda: Lit(optimizer="adamw", scheduler="step"))


@feature("trainer.save_checkpoint")
def save(bench: Bench) -> Any:
    """What is in the file: weights, optimizer states, schedulers, loops, hyper-parameters, all keys"""
    bench.fit(_adam()).trainer.save_checkpoint(bench.root / "a.ckpt")
    return _content(checkpoint(bench.root / "a.ckpt"))


@feature("trainer.save_checkpoint(weights_only=True)")
def save_weights(bench: Bench) -> Any:
    """What is in the file"""
    bench.fit(_adam()).trainer.save_checkpoint(bench.root / "a.ckpt", weights_only=True)
    return _content(checkpoint(bench.root / "a.ckpt"))


@feature("resume: fit(ckpt_path)")
def resume(bench: Bench) -> Any:
    """Losses, metrics, weights, rates, steps"""
    bench.fit(_adam(), max_epochs=1).trainer.save_checkpoint(bench.root / "a.ckpt")
    ran = bench.fit(seeded(lambda: Lit(optimizer="adamw", scheduler="step"), 5), ckpt_path=bench.root / "a.ckpt")
    return ran.seen, ran.module.rates


@feature("resume in the middle of an epoch")
def resume_inside(bench: Bench) -> Any:
    """Losses, metrics, weights, steps"""
    bench.fit(_adam(), max_steps=2, max_epochs=-1).trainer.save_checkpoint(bench.root / "a.ckpt")
    return bench.fit(seeded(lambda: Lit(optimizer="adamw", scheduler="step"), 5), ckpt_path=bench.root / "a.ckpt").seen


@feature("resume from a file of DDP, and DDP from ours")
def across(bench: Bench) -> Any:
    """Losses, metrics, weights of both"""
    ddp = Bench("ddp", bench.root)
    found = []
    for number, (first, then) in enumerate([(ddp, bench), (bench, ddp)]):
        path = bench.root / f"{number}.ckpt"
        first.fit(_adam(), max_epochs=1).trainer.save_checkpoint(path)
        again = seeded(lambda: Lit(optimizer="adamw", scheduler="step"), 5)
        found.append(then.fit(again, ckpt_path=path).seen)
    return found


@feature('ckpt_path="best" and "last"')
def best_and_last(bench: Bench) -> Any:
    """Metrics of validate and test, losses and weights of a fit that goes on"""

    class Counts(Lit):
        def on_validation_epoch_end(self) -> None:
            self.log("number", float(self.current_epoch))

    callback = ModelCheckpoint(bench.root, "{epoch}", monitor="number", mode="min", save_top_k=2, save_last=True)
    ran = bench.fit(seeded(Counts), enable_checkpointing=True, callbacks=[callback])
    of = ran.trainer
    found = [of.validate(dataloaders=bench.loader(), ckpt_path="best", verbose=False)]
    found.append(of.test(dataloaders=bench.loader(), ckpt_path="last", verbose=False))
    assert found[0][0]["val"] != found[1][0]["val"]
    of.fit_loop.max_epochs = 3
    of.fit(ran.module, bench.loader(), bench.loader(), ckpt_path="last")
    return found, Ran(of, ran.module).seen


@feature("load_from_checkpoint, save_hyperparameters")
def load_from(bench: Bench) -> Any:
    """Hyper-parameters, weights, what the module gives in the process that loads it"""
    bench.fit(seeded(lambda: Lit(width=6, lr=0.1))).trainer.save_checkpoint(bench.root / "a.ckpt")
    module = Lit.load_from_checkpoint(bench.root / "a.ckpt", lr=0.2, weights_only=False)
    return dict(module.hparams), dict(module.state_dict()), module(torch.ones(2, 4)).detach()


@feature("load_from_checkpoint, then validate and fit")
def load_then_fit(bench: Bench) -> Any:
    """Metrics, losses, weights"""
    bench.fit(max_epochs=1).trainer.save_checkpoint(bench.root / "a.ckpt")
    module = Lit.load_from_checkpoint(bench.root / "a.ckpt", weights_only=False)
    result = bench.trainer().validate(module, bench.loader(), verbose=False)
    return result, bench.fit(module).seen


@feature("strict_loading=False")
def strict(bench: Bench) -> Any:
    """Metrics; an error that names the parameters without it"""

    class More(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)
            self.more.requires_grad_(False)

    bench.fit(max_epochs=1).trainer.save_checkpoint(bench.root / "a.ckpt")
    of = bench.trainer()
    error = bench.raised(lambda: of.validate(seeded(More), bench.loader(), ckpt_path=bench.root / "a.ckpt"))
    loose = seeded(More)
    loose.strict_loading = False
    result = of.validate(loose, bench.loader(), ckpt_path=bench.root / "a.ckpt", verbose=False)
    assert "more.weight" in error
    return result


@feature("AsyncCheckpointIO")
def asynchronous(bench: Bench) -> Any:
    """Names and contents of files"""
    callback = ModelCheckpoint(bench.root, "{step}", every_n_train_steps=2, save_top_k=-1)
    bench.fit(_adam(), enable_checkpointing=True, callbacks=[callback], plugins=AsyncCheckpointIO())
    files = bench.files("*.ckpt")
    assert len(files) > 1
    return {name: _content(checkpoint(bench.root / name)) for name in files}


@feature("CheckpointIO of one's own")
def own_io(bench: Bench) -> Any:
    """Calls of each rank; losses and weights of a fit that goes on"""

    class Notes(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            calls.append(("save", storage_options, sorted(checkpoint.keys() - {"lightning_zero_rng"})))
            super().save_checkpoint(checkpoint, path)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("load")
            return super().load_checkpoint(path, *args, **kwargs)

        def remove_checkpoint(self, path: Any) -> None:
            calls.append("remove")
            super().remove_checkpoint(path)

    calls: list[Any] = []
    save = ModelCheckpoint(bench.root, "{epoch}")
    ran = bench.fit(enable_checkpointing=True, callbacks=[save], plugins=Notes())
    ran.trainer.save_checkpoint(bench.root / "a.ckpt", storage_options={"to": 1})
    again = bench.fit(seeded(Lit, 5), plugins=Notes(), ckpt_path=bench.root / "a.ckpt", max_epochs=3)
    return calls, again.seen


@feature("saving inside of hooks")
def inside(bench: Bench) -> Any:
    """What is in the files of three hooks"""

    class Saves(Lit):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            if self.trainer.global_step == 2:
                self.trainer.save_checkpoint(bench.root / "batch.ckpt")

        def on_validation_epoch_end(self) -> None:
            self.trainer.save_checkpoint(bench.root / "validation.ckpt")

        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(bench.root / "end.ckpt")

    ran = bench.fit(seeded(Saves))
    files = bench.files("*.ckpt")
    return ran.seen, {name: _content(checkpoint(bench.root / name)) for name in files}


@feature("a missing file")
def missing(bench: Bench) -> Any:
    """The error"""
    error = bench.raised(lambda: bench.fit(ckpt_path=bench.root / "none.ckpt"))
    dist.barrier()
    return error.partition(":")[0]
