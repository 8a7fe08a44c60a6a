"""ModelPruning: masks of ranks, and files and fits with them (the rest is in ``tests/lightning_table``)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning

from tests.harness import on_ranks
from tests.trainer.toys import Lit, Run, assert_same, assert_weights, fit, loader, record, seeded, trainer

pytestmark = pytest.mark.full


class Plain(Lit):
    """Without layer norms, whose weights have one dimension."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for block in self.blocks:
            block.norm = torch.nn.Identity()


class Pruning(ModelPruning):
    """On the CPU Lightning's lottery ticket shares memory with the parameters, so that training changes it. On GPUs,
    and with shards, it does not."""

    @staticmethod
    def _copy_param(new: torch.nn.Module, old: torch.nn.Module, name: str) -> None:
        ModelPruning._copy_param(new, copy.deepcopy(old), name)


@on_ranks(2)
def test_random_masks_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    class Look(Plain):
        def on_train_batch_start(self, *_: Any) -> None:
            masks = [
                b.float().sum() * 0 + (b.float() * torch.arange(b.numel()).reshape(b.shape)).sum()
                for n, b in self.named_buffers()
                if n.endswith("_mask")
            ]
            if masks:
                own = torch.stack(masks)
                other = own.clone()
                dist.broadcast(other, 0)
                self.seen.append(torch.equal(own, other))

    for stage in ("zero1", "zero3"):
        module = seeded(Look)
        module.seen = []
        torch.manual_seed(5 + dist.get_rank())
        fit(stage, tmp_path, module, max_epochs=2, callbacks=[Pruning("random_unstructured", amount=0.4)])
        assert module.seen and all(module.seen)


@on_ranks(2)
def test_saving_inside_and_a_second_fit(tmp_path: Path) -> None:
    def body(strategy: str) -> Run:
        module = seeded(Plain)
        callback = Pruning("l1_unstructured", amount=0.2)
        save = ModelCheckpoint(tmp_path / strategy, filename="{epoch}", save_top_k=-1, monitor="val")
        of = trainer(strategy, tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[callback, save])
        of.fit(module, loader(), loader())
        of.fit_loop.max_epochs = 3
        of.fit(module, loader(), loader())
        return record(of, module)

    expected = body("ddp")
    for stage in ("zero1", "zero3"):
        assert_same(body(stage), expected, what=stage)
        dist.barrier()
        paths = (tmp_path / strategy / "epoch=1.ckpt" for strategy in ("ddp", stage))
        files = [torch.load(path, weights_only=False)["state_dict"] for path in paths]
        assert sorted(files[1]) == sorted(files[0]) == sorted(Plain().state_dict())
        assert_weights({name: files[1][name] for name in files[0]}, files[0], what=stage)
