"""The Trainer with tensor parallelism, beside DDP, and checkpoints of one mesh in another."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.lightning_api import pl
from lightning_zero.mesh.local_leaves import split_of
from lightning_zero.settings import ConfigError
from tests.engine import test_tensor_parallel as engine_tests
from tests.engine.support import sgd
from tests.engine.test_tensor_parallel import PLAN, STEPS, WIDTH, Scaled, batch, loss_of, net, parallelized
from tests.harness import on_ranks
from tests.trainer.toys import Run, record, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*not resumable")


class Lit(pl.LightningModule):
    """Makes its loaders itself, so that each step has the same four samples on any mesh."""

    def __init__(self, *, by_hand: bool = False, seed: int = 0, shuffled: bool = False, bad: int | None = None) -> None:
        super().__init__()
        self.net: Any = None
        self.by_hand, self.seed, self.shuffled, self.bad = by_hand, seed, shuffled, bad
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = net(seed=self.seed)
            if self.by_hand:
                parallelized(self.net, self.device_mesh["tensor_parallel"])

    def training_step(self, tokens: Tensor, number: int) -> Tensor:
        loss = loss_of(self.net, tokens)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss * torch.nan if self.bad == number and self.global_rank == 3 else loss

    def validation_step(self, tokens: Tensor, number: int) -> None:
        self.log("validation", loss_of(self.net, tokens), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)

    def train_dataloader(self) -> Any:
        rows = torch.cat([batch(step) for step in range(STEPS)])
        if self.shuffled:
            return DataLoader(rows, 2, shuffle=True, generator=torch.Generator().manual_seed(dist.get_rank()))
        kwargs = self.trainer.distributed_sampler_kwargs or {}
        sampler: Any = DistributedSampler(rows, shuffle=False, **kwargs)
        return DataLoader(rows, 4 // kwargs["num_replicas"], sampler=sampler)

    val_dataloader = train_dataloader


def strategy_of(parts: int, stage: int | str = 3, by_hand: bool = False, **settings: Any) -> ZeroStrategy:
    if parts > 1 and not by_hand:
        settings["tensor_plan"] = {f"net.{name}": style for name, style in PLAN.items()}
    return ZeroStrategy(stage, unit={"classes": ["Attention", "Mlp"]}, tensor_parallel=parts, **settings)


def run(strategy: Any, root: Path, module: Any = None, *, ckpt_path: Any = None, **settings: Any) -> Run:
    module = Lit() if module is None else module
    of = trainer(strategy, root, gradient_clip_val=0.5, **{"max_epochs": 1, **settings})
    of.fit(module, ckpt_path=ckpt_path)
    return record(of, module)


def averaged(strategy: Any, root: Path, module: Any = None, name: str = "end", **settings: Any) -> Run:
    callbacks = [EMAWeightAveraging(decay=0.8), ModelCheckpoint(root, filename=name)]
    return run(strategy, root, module, callbacks=callbacks, enable_checkpointing=True, **settings)


def assert_near(found: Run, expected: Run) -> None:
    torch.testing.assert_close(found.metrics, expected.metrics, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=3e-6)


@on_ranks(4)
def test_fits_equal_ddp(tmp_path: Path) -> None:
    expected = run(DDPStrategy(), tmp_path, accumulate_grad_batches=2)
    for parts, stage, by_hand in ((2, 0, False), (4, 2, True), (2, 3, True)):
        module = Lit(by_hand=by_hand, seed=dist.get_rank() if by_hand else 0)
        found = run(strategy_of(parts, stage, by_hand=by_hand), tmp_path, module, accumulate_grad_batches=2)
        assert_near(found, expected)
        assert split_of(module.net.head.weight) is not None


MESHES = {"1": (1, 3), "2": (2, 2), "4": (4, 3), "2 at stage 0": (2, 0)}
ALL = (MESHES, ((2, 3), (4, 1)))


@on_ranks(4, timeout=180)  # 17 fits with all
@pytest.mark.parametrize(
    ("kind", "meshes", "others"),
    [
        pytest.param("full", *ALL, marks=pytest.mark.full),
        pytest.param("sharded", *ALL, marks=pytest.mark.full),
        ("sharded", {"4": MESHES["4"]}, ((2, 3),)),
    ],
)
def test_checkpoints_of_every_mesh_load_in_every_other(kind: str, meshes: Any, others: Any, tmp_path: Path) -> None:
    """DDP's file among them, with averages. All are saved after the first of two epochs."""
    near = partial(torch.testing.assert_close, rtol=0, atol=3e-6)
    whole = averaged(DDPStrategy(), tmp_path, max_epochs=2)
    averaged(DDPStrategy(), tmp_path, name="ddp")
    saved = torch.load(tmp_path / "ddp.ckpt", weights_only=False)
    for name, mesh in meshes.items():
        averaged(strategy_of(*mesh, checkpoint=kind), tmp_path, name=name)
        if kind == "full":
            found = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
            near(found["state_dict"], saved["state_dict"])
            near(found["optimizer_states"][0]["state"], saved["optimizer_states"][0]["state"], rtol=1e-4)
    for name, mesh in itertools.product(["ddp", *meshes], others):
        settings: dict[str, Any] = {"ckpt_path": tmp_path / f"{name}.ckpt", "max_epochs": 2}
        module = Lit(seed=9)
        for _ in range(1 if name != "ddp" else 2):  # the second time the module is split already
            resumed = averaged(strategy_of(*mesh, checkpoint=kind), tmp_path, module, **settings)
            near(resumed.weights, whole.weights, atol=6e-6)


@on_ranks(4)
def test_steps_that_overflow_on_one_rank_are_skipped_on_all(tmp_path: Path) -> None:
    meshes, skips = ((2, 0), (4, 3)), {"skip_nonfinite": 3}
    first, *others = [run(strategy_of(*mesh, optimizer=skips), tmp_path, Lit(bad=1)).weights for mesh in meshes]
    assert all(value.isfinite().all() for value in first.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=3e-6)


@on_ranks(4)
def test_ranks_that_share_a_batch_must_have_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel: expected the same batch on all 2 ranks of a group"):
        run(strategy_of(2), tmp_path, Lit(shuffled=True))


@on_ranks(2)
def test_pruning_of_split_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ModelPruning: .* got tensor_parallel=2\. Drop"):
        run(strategy_of(2), tmp_path, callbacks=[ModelPruning("l1_unstructured", parameter_names=["weight"])])


@on_ranks(2)
def test_dropout_of_ranks_that_share_a_batch_agrees_without_a_seed(tmp_path: Path) -> None:
    class Drops(Lit):
        def on_fit_start(self) -> None:
            torch.manual_seed(dist.get_rank())

        def training_step(self, tokens: Tensor, number: int) -> Tensor:
            self.drawn = torch.rand(())
            return super().training_step(tokens, number)

    saved = run(strategy_of(1), tmp_path, Drops()).trainer  # each rank with numbers of its own
    saved.save_checkpoint(tmp_path / "a.ckpt")
    for path in (None, tmp_path / "a.ckpt"):
        module, drawn = Drops(), [torch.zeros(()) for _ in range(2)]
        run(strategy_of(2), tmp_path, module, ckpt_path=path, max_epochs=2)
        dist.all_gather(drawn, module.drawn)
        assert torch.equal(*drawn)


@on_ranks(2)
@pytest.mark.parametrize(("thawed_in", "zeros"), [(0, False), (1, False), (0, True)])
def test_whole_parameters_with_parts_of_gradients_are_named(thawed_in: int, zeros: bool, tmp_path: Path) -> None:
    """Also behind a layer that begins with zeros, where the first gradients are zero on all ranks."""

    class Heads(Lit):
        def configure_model(self) -> None:
            self.net = Scaled() if self.net is None else self.net
            self.net.norm.requires_grad_(thawed_in == 0)
            if zeros:
                nn.init.zeros_(self.net.down.weight)

        def on_train_batch_start(self, tokens: Tensor, number: int) -> None:
            self.net.norm.requires_grad_(number >= thawed_in)

        def training_step(self, tokens: Tensor, number: int) -> Tensor:
            return self.net(tokens[:, :1].float().expand(-1, WIDTH)).square().mean()

    settings: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    plan = {"net.up": "colwise", "net.down": "rowwise"}
    with pytest.raises(ConfigError, match=r"equal gradients of net.norm.weight \(and 1 others\) on ranks that"):
        run(ZeroStrategy(3, tensor_parallel=2, tensor_plan=plan), tmp_path, Heads(), **settings)
    plan["net.norm"] = "replicated_with_grad_allreduce"
    run(ZeroStrategy(3, tensor_parallel=2, tensor_plan=plan), tmp_path, Heads(), **settings)


@on_ranks(2)
def test_export_and_stream_give_whole_tensors(tmp_path: Path) -> None:
    found = run(strategy_of(2, 3), tmp_path, max_steps=1)
    found.trainer.strategy.export(tmp_path / "model")
    streamed = {name: value.cpu().clone() for name, value in lightning_zero.stream(found.module)}
    written = load_file(tmp_path / "model" / "model.safetensors")
    torch.testing.assert_close([written, streamed], [found.weights] * 2, rtol=0, atol=0)
    again = run(strategy_of(2, 2, init_from=str(tmp_path / "model")), tmp_path, Lit(seed=4), max_steps=0)
    torch.testing.assert_close(again.weights, found.weights, rtol=0, atol=0)


class Mixture(pl.LightningModule):
    """A balance loss of experts over the batch of all ranks, as docs/tensor_parallel.md writes it."""

    def __init__(self, sharing: int) -> None:
        super().__init__()
        self.model: Any = engine_tests.of_transformers("qwen3_moe")
        self.model.router_aux_loss_coef = 0.0
        self.sharing = sharing

    def training_step(self, tokens: Tensor, number: int) -> Tensor:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        out = self.model(input_ids=tokens, labels=tokens, output_router_logits=True)
        logits = out.router_logits
        if self._trainer is not None:
            logits = tuple(self.all_gather(one, sync_grads=True).flatten(0, 1) for one in logits)
        return out.loss + load_balancing_loss_func(logits, num_experts=4, top_k=2)

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())

    def train_dataloader(self) -> Any:
        mine = [batch(step, engine_tests.own_rows(self.sharing)) for step in range(STEPS)]
        return DataLoader(torch.cat(mine), len(mine[0]))


@pytest.mark.full
@on_ranks(4)
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_balance_loss_over_all_ranks_is_that_of_the_whole_batch(tensor: int, expert: int, tmp_path: Path) -> None:
    expected = Mixture(1)
    optimizer = expected.configure_optimizers()
    for step in range(STEPS):
        expected.training_step(batch(step), step).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 3):
        found = run(ZeroStrategy(stage, tensor_parallel=tensor, expert_parallel=expert), tmp_path, Mixture(tensor))
        torch.testing.assert_close(found.weights, expected.state_dict(), rtol=0, atol=2e-6)
