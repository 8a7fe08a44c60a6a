"""ModelPruning: masks, losses and files as under DDP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning

from lightning_zero import ZeroStrategy
from tests.harness import on_ranks
from tests.trainer.toys import Lit, Run, assert_same, assert_weights, fit, loader, record, seeded, some_of, trainer

pytestmark = pytest.mark.full

STAGES = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")
CASES: dict[str, dict[str, Any]] = {
    "global": {"pruning_fn": "l1_unstructured", "amount": 0.3},
    "without lottery ticket": {"pruning_fn": "l1_unstructured", "amount": 0.3, "use_lottery_ticket_hypothesis": False},
    "local": {
        "pruning_fn": "l1_unstructured",
        "amount": 0.3,
        "use_global_unstructured": False,
        "use_lottery_ticket_hypothesis": False,
    },
    "structured": {
        "pruning_fn": "ln_structured",
        "amount": 0.3,
        "use_global_unstructured": False,
        "pruning_dim": 0,
        "pruning_norm": 1,
        "parameter_names": ["weight"],
    },
    "after validation": {"pruning_fn": "l1_unstructured", "amount": 0.3, "prune_on_train_epoch_end": False},
    "not permanent": {"pruning_fn": "l1_unstructured", "amount": 0.3, "make_pruning_permanent": False},
}


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


def pruned(strategy: str, root: Path, case: str, **settings: Any) -> Run:
    module = seeded(lambda: Plain(optimizer="adamw", lr=0.2))
    of: Any = ZeroStrategy(3, offload="cpu") if strategy == "zero3_offload" else strategy
    run = fit(of, root, module, max_epochs=3, callbacks=[Pruning(**CASES[case])], **settings)
    run.trainer.save_checkpoint(root / f"{strategy}.ckpt")
    return run


@on_ranks(2)
@pytest.mark.parametrize("case", some_of(CASES, "global", "local"))
def test_pruning(case: str, tmp_path: Path) -> None:
    expected = pruned("ddp", tmp_path, case)
    zeros = sum(int((value == 0).sum()) for value in expected.weights.values())
    assert zeros > 50
    for stage in STAGES:
        found = pruned(stage, tmp_path, case)
        assert_same(found, expected, what=stage)
        assert sum(int((value == 0).sum()) for value in found.weights.values()) == zeros
        dist.barrier()
        files = [torch.load(tmp_path / f"{s}.ckpt", weights_only=False)["state_dict"] for s in ("ddp", stage)]
        assert sorted(files[1]) == sorted(files[0])
        assert_weights({k: files[1][k] for k in files[0]}, files[0], what=stage)


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
