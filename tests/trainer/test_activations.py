"""Activations found without memory are those of a real run on the CPU: to the byte."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_zero import ZeroStrategy
from lightning_zero.config import Precision, make_config
from lightning_zero.models.gpt import LitGPT
from lightning_zero.planning import memory
from lightning_zero.planning.activations import Activations, peaks_with
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.memory import FILE_PAGE_NBYTES, Moment
from lightning_zero.planning.placement import Tier
from lightning_zero.trainer.memory.activations import LiveBytes, NotMeasured, measure, measure_sizes
from lightning_zero.trainer.memory.held_bytes import held_bytes, limits_of, plan_of, state_tensors
from tests.harness import on_ranks
from tests.trainer.step_peak import StepPeak
from tests.trainer.toys import trainer

pytestmark = pytest.mark.full


class UNet(pl.LightningModule):
    """Down, up, and a skip over both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = (
            nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.SiLU())
            for inside, outside in ((3, 8), (8, 16), (24, 8))
        )
        self.drop = nn.Dropout(0.1)
        self.last = nn.Conv2d(8, 3, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        skip = self.first(x)
        inner = F.interpolate(self.drop(self.down(F.max_pool2d(skip, 2))), scale_factor=2)
        loss = F.mse_loss(self.last(self.up(torch.cat([skip, inner], 1))), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss


class Llama(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, **heads, attn_implementation="eager")
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(0))


def case(name: str, rows: int = 4) -> tuple[pl.LightningModule, Any]:
    torch.manual_seed(0)
    if name == "gpt":
        return LitGPT(vocab_size=64, n_layer=3, n_head=2, d_model=32, block_size=40, dropout=0.1), tokens(rows, 41)
    if name == "unet":
        return UNet(), (torch.randn(rows, 3, 16, 16), torch.randn(rows, 3, 16, 16))
    ids = tokens(rows, 32)
    return Llama(), {"input_ids": ids, "labels": ids}


def really(module: pl.LightningModule, batch: Any) -> Activations:
    """Of a real forward and backward; gradients go as they come. Without stretches."""
    held = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in held:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    for param in module.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    module.log = lambda *_, **__: None
    live = LiveBytes()
    live.ignore([list(module.parameters()), list(module.buffers()), batch])
    with live, saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module._losses(batch).mean() if isinstance(module, LitGPT) else module.training_step(batch, 0)
        forward = live.most
        live.restart()
        loss.backward()
    return Activations((), sum(saved.values()), max(forward, live.most), 0.0)


@pytest.mark.parametrize("name", ["gpt", "unet", "llama"])
def test_fake_tensors_need_what_real_ones_do(name: str) -> None:
    """(transformers' fused attention is not among them: without values it cannot leave a mask out.)"""
    module, batch = case(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    state = torch.random.get_rng_state()
    found = measure(module, batch, make_config(), Precision.fp32)
    assert torch.equal(torch.random.get_rng_state(), state)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} has changed"
    assert not getattr(module, "losses", [])
    expected = really(module, batch)
    assert found.saved == expected.saved > 0
    peak = max(found.peak(backward=True), found.peak(backward=False))
    assert peak == (pytest.approx(expected.batch, rel=0.03) if name == "unet" else expected.batch)
    leaves = torch.utils._pytree.tree_leaves(batch)
    assert found.batch == sum({t.data_ptr(): t.nbytes for t in leaves}.values())
    assert found.flops > 0


@pytest.mark.sample
@pytest.mark.mainly(lambda name: name == "unet")
@pytest.mark.parametrize("name", ["gpt", "unet", "llama"])
def test_other_batch_sizes_follow_from_two(name: str) -> None:
    module, batch = case(name)
    sizes = measure_sizes(module, batch, make_config(), Precision.fp32)
    assert sizes.sizes == (4, 8) and sizes.scales
    for rows in (5, 16):
        exact = measure(*case(name, rows), make_config(), Precision.fp32)
        found = sizes.of(rows)
        assert found.peak(backward=True) == pytest.approx(exact.peak(backward=True), rel=0.05)
        assert found.saved == pytest.approx(exact.saved, rel=0.01)
        assert (found.batch, found.flops) == (exact.batch, exact.flops)


class Reads(UNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss > 1 else loss


@pytest.mark.sample
def test_step_that_goes_by_values_is_refused_with_its_name() -> None:
    _, batch = case("unet")
    with pytest.raises(NotMeasured, match="training_step of Reads fails on tensors that have no values"):
        measure(Reads(), batch, make_config(), Precision.fp32)


# -- the plan of a step beside what a step allocates ------------------------------------------------------------------


LENGTH = 96
# No plan knows whether the reduction before has landed when the next unit's gradients begin to come (a buffer of one
# unit, more or less), nor the scratch memory of oneDNN's products in bf16: 0.2 to 0.9 MB, which hardly grows with the
# product. Beside the activations of more samples that is small.
SAMPLES = {"32-true": 8, "bf16-true": 8, "bf16-mixed": 32}


def gpt() -> LitGPT:
    return LitGPT(vocab_size=64, n_layer=3, n_head=2, d_model=64, block_size=LENGTH)


CASES = [
    ("zero0", "none", "32-true", "none", 1),
    ("zero1", "none", "32-true", "none", 1),
    ("zero1", "none", "32-true", "none", 2),
    ("zero2", "optimizer_cpu", "bf16-mixed", "none", 1),
    ("zero3", "none", "32-true", "none", 1),
    ("zero3", "none", "bf16-mixed", "blocks", 1),
    ("zero3", "cpu", "32-true", "blocks", 1),
    ("zero3", "nvme", "bf16-mixed", "none", 1),
    ("zero3", "none", "bf16-true", "none", 2),
    ("zero3", "none", "32-true", "blocks in 4 parts", 1),
    ("zero3", "cpu", "32-true", "offload in 4 parts", 1),
]
MAIN = [("zero0", "none", "none"), ("zero3", "none", "blocks"), ("zero3", "nvme", "none")]
MAIN += [("zero3", "none", "blocks in 4 parts")]


@on_ranks(1, 2)
@pytest.mark.mainly(lambda stage, offload, recompute: (stage, offload, recompute) in MAIN)
@pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")
@pytest.mark.parametrize(("stage", "offload", "precision", "recompute", "micro_batches"), CASES)
def test_planned_peak_and_bytes_are_those_of_a_run(
    stage: str, offload: str, precision: str, recompute: str, micro_batches: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"name": offload} | ({"nvme_path": str(tmp_path)} if "nvme" in offload else {})
    how, _, parts = recompute.partition(" in ")
    in_parts = {"vertical_chunks": int(parts.split()[0])} if parts else {}
    config = make_config(stage=stage, offload=settings, activation_checkpointing=how, **in_parts)
    found = measure(gpt(), torch.zeros(SAMPLES[precision], LENGTH + 1, dtype=torch.int64), config, Precision(precision))
    strategy, peak = ZeroStrategy(config=config), StepPeak()
    run: dict[str, Any] = {"precision": precision, "max_steps": 5, "accumulate_grad_batches": micro_batches}
    run |= {"callbacks": [peak] if dist.get_rank() == 0 else [], "max_epochs": None}
    tokens = torch.randint(0, 64, (512, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    trainer(strategy, tmp_path, **run).fit(gpt(), torch.utils.data.DataLoader(tokens, SAMPLES[precision]))
    engine = strategy.engine
    states = state_tensors(engine)
    assert states == 2
    planned = memory.planned_bytes(plan_of(engine), engine.comm.rank, state_tensors=2, moment=Moment.reduced)
    held = held_bytes(engine)
    in_files = (Role.optim_state, Tier.nvme)  # each param group has pages of its own in a bucket
    assert 0 <= held[in_files] - planned[in_files] <= 2 * states * FILE_PAGE_NBYTES * len(engine.buckets)
    assert +held - Counter({in_files: held[in_files]}) == +planned - Counter({in_files: planned[in_files]})
    if dist.get_rank() == 0:
        peaks = peaks_with(
            plan_of(engine), limits_of(engine, micro_batches), found, engine.comm.shard_rank, state_tensors=states
        )
        most = max(memory.on_tier(h, Tier.device) + memory.on_tier(h, Tier.host) for h in peaks.values())
        measured = peak.nbytes
        assert measured is not None
        print(f"{measured / most:.4f} of {most:,}")
        assert measured == pytest.approx(most, rel=0.05), f"{measured / most:.3f} of {most:,}"
