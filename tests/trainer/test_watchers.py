"""What watches parameters and gradients from outside: the values that it sees under DDP, or an error that says how."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_zero import ZeroStrategy
from lightning_zero.ranks import waits
from tests.engine.support import places_posted_often
from tests.harness import Pool, on_ranks
from tests.trainer.toys import ALL_STAGES, Block, Lit, assert_same, fit, seeded

pytestmark = pytest.mark.full


class Watch:
    """As ``wandb.watch(model, log="all")`` does: hooks on parameters, and on the module, which reads them there."""

    def __init__(self, module: nn.Module, every: int = 1) -> None:
        self.seen: list[tuple[str, float]] = []
        self.every, self.calls, self.root = every, 0, module
        for name, param in module.named_parameters():
            param.register_hook(lambda grad, name=name: self.note(f"gradients/{name}", grad.data))
        module.head.register_forward_hook(self.forward)  # DDP calls the root twice in a step

    def forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls += 1
        if torch.is_grad_enabled() and self.calls % self.every == 0:
            for name, param in self.root.named_parameters():
                self.note(f"parameters/{name}", param.data.cpu())

    def note(self, name: str, values: Tensor) -> None:
        self.seen.append((name, float(values.reshape(-1).double().sum())))


class Watched(Lit):
    def __init__(self, every: int = 1, only_rank_0: bool = False) -> None:
        super().__init__()
        self.every, self.only_rank_0 = every, only_rank_0

    def on_train_start(self) -> None:
        if not self.only_rank_0 or self.global_rank == 0:
            self.watch = Watch(self, self.every)


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_watcher_sees_what_it_sees_under_ddp(stage: str, tmp_path: Path) -> None:
    seen = {}
    for strategy in ("ddp", stage):
        module = seeded(Watched)
        fit(strategy, tmp_path, module, max_epochs=1)
        seen[strategy] = sorted(module.watch.seen)
    names = [name for name, _ in seen["ddp"]]
    assert names == [name for name, _ in seen[stage]] and any("gradients" in name for name in names)
    torch.testing.assert_close([v for _, v in seen[stage]], [v for _, v in seen["ddp"]], rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("dynamic_graph", [False, True])
def test_watcher_on_rank_0_alone_reads_and_changes_nothing(dynamic_graph: bool, tmp_path: Path) -> None:
    """As Lightning's ``WandbLogger.watch`` does. The gathers that it needs are those of the backward, ahead of it;
    under ``zero.dynamic_graph`` the other rank answers it at the end of its call."""
    module = seeded(lambda: Watched(every=4, only_rank_0=True))
    found = fit(ZeroStrategy("zero3", dynamic_graph=dynamic_graph), tmp_path, module)
    assert_same(found, fit("ddp", tmp_path, seeded(Lit)), tolerance=0)
    if dist.get_rank() == 0:
        values = [value for name, value in module.watch.seen if name.startswith("parameters")]
        assert len(values) >= 32 and all(map(math.isfinite, values))


class ReadsBehindTheCall(Lit):
    """Rank 0 alone reads a parameter when the forward is over, and all ranks log then."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self.global_rank == 0 and self.trainer.training:
            for param in self.parameters():
                float(param.detach().sum())
        super().log(*args, **kwargs)


def read_on_rank_0(folder: str) -> None:
    with places_posted_often(), mock.patch.object(waits, "ASK_S", 0.5):
        strategy = ZeroStrategy("zero3", stall_timeout_s=3600.0, dynamic_graph=True)
        try:
            fit(strategy, folder, seeded(ReadsBehindTheCall))
        except Exception as error:
            if dist.get_rank() == 0:
                (Path(folder) / "said").write_text(str(error))
                os._exit(1)  # as the process would: only then rank 1 hears of it, inside of Lightning's call


def test_read_on_rank_0_while_others_log_is_refused(tmp_path: Path) -> None:
    """Rank 1 is in a reduction of Lightning's, which does not know of gathers."""
    pool = Pool(2)  # of its own: messages are left over
    try:
        with contextlib.suppress(Exception):  # a rank has ended
            pool.run(pickle.dumps((read_on_rank_0, (str(tmp_path),), {})), timeout=60.0)
    finally:
        pool.kill()
    said = (tmp_path / "said").read_text()
    assert "All ranks must call this, or none" in said and "self.log(sync_dist=True)" in said


LOOKS = {
    "a histogram": lambda p: numpy.histogram(p.detach().cpu().numpy()),
    "an array": lambda p: numpy.asarray(p.detach()),
    "data": lambda p: p.data.cpu(),
    "a list": lambda p: p.tolist(),
    "a copy": lambda p: p.clone(),
}


class Histograms(Lit):
    """Looks at a parameter and at its gradient outside of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, str] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        param = self.blocks[0].up.weight
        for what, look in LOOKS.items():
            for of, tensor in (("parameter", param), ("gradient", param.grad)):
                try:
                    found = torch.as_tensor(look(tensor)[0] if what == "a histogram" else look(tensor))
                    self.said[f"{of}: {what}"] = "" if bool(found.isfinite().all()) else "NaN"
                except RuntimeError as error:
                    self.said[f"{of}: {what}"] = str(error)
        self.said["printed"] = f"{param} {param.grad}"


@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_look_outside_of_a_step_is_true_or_refused_with_the_way(stage: str, tmp_path: Path) -> None:
    module = seeded(Histograms)
    fit(stage, tmp_path, module, max_epochs=1)
    assert "nan" not in module.said.pop("printed")
    for what, said in module.said.items():
        if "gradient" in what or stage == "zero1":
            assert said == "", what
        else:
            assert "lightning_zero.gather" in said, what
    for look in LOOKS.values():
        look(module.blocks[0].up.weight.detach())


# -- norms of gradients in hooks --------------------------------------------------------------------------------------


class Watches(Lit):
    """Has frozen, unused and tied parameters, and one of one element; notes all norms in every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks, self.norms = list[tuple[str, bool]](), list[dict[str, float]]()
        self.blocks.append(Block(8))
        self.blocks[0].up.weight.requires_grad_(False)
        self.blocks[1].norm.weight = self.blocks[0].norm.weight
        self.unused = nn.Linear(3, 5)
        for hook in ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"):
            setattr(self, hook, partial(self._note, hook))

    def _note(self, hook: str, *_: Any) -> None:
        norms = {}
        for norm_type in (1, 2, 3.5, "inf"):
            norms |= {name: value.item() for name, value in grad_norm(self, norm_type).items()}
        for name, grad in ((name, p.grad) for name, p in self.named_parameters() if p.grad is not None):
            norms[f"own {name}"] = grad.norm().item()
            norms[f"values {name}"] = (grad * torch.arange(grad.numel()).view_as(grad)).mean().item()
            norms[f"vector {name}"] = torch.linalg.vector_norm(grad.detach(), 1).item()
        self.hooks.append((hook, not self.trainer.fit_loop.epoch_loop._should_accumulate()))
        self.norms.append(norms)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_norms_in_every_hook_are_ddps(micro_batches: int, tmp_path: Path) -> None:
    """Of all types, before and after clipping, at every stage."""
    settings: dict[str, Any] = {"accumulate_grad_batches": micro_batches, "gradient_clip_val": 0.05, "max_epochs": 1}
    ddp = fit("ddp_find_unused_parameters_true", tmp_path, seeded(Watches), **settings)
    hooks, norms = ddp.module.hooks, ddp.module.norms
    assert not any("unused" in name or "blocks.0.up.weight" in name for name in norms[1])
    assert any(norms[at] for at, (hook, _) in enumerate(hooks) if hook == "on_before_zero_grad") and len(hooks) > 6
    for stage in ALL_STAGES:
        run = fit(stage, tmp_path, seeded(Watches), **settings)
        assert_same(run, ddp, what=stage)
        assert run.module.hooks == hooks
        # From stage 2 on no rank has its own gradient any more: the average's of what has come so far is shown.
        shown = [synced or stage in ("zero0", "zero1") for _, synced in hooks]
        found, expected = (list(itertools.compress(noted, shown)) for noted in (run.module.norms, norms))
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6, msg=lambda text, at=stage: f"{at}: {text}")
