"""What is planned before a run: activations, found without memory, are those of a real run on the CPU, to the byte."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_zero import ZeroStrategy
from lightning_zero.engine.units.describe import describe_units
from lightning_zero.models.gpt import LitGPT
from lightning_zero.planning import memory
from lightning_zero.planning.activations import Activations, peaks_with
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.memory import FILE_PAGE_NBYTES, Moment
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import ConfigError, Precision, candidate_rows, make_config
from lightning_zero.trainer.memory import auto_row
from lightning_zero.trainer.memory.activations import LiveBytes, measure, measure_sizes
from lightning_zero.trainer.memory.fake_module import states_of
from lightning_zero.trainer.memory.held_bytes import held_bytes, limits_of, plan_of, state_tensors
from tests.harness import on_ranks
from tests.lightning_table.bench import variant
from tests.trainer import toys
from tests.trainer.step_peak import StepPeak
from tests.trainer.toys import trainer

pytestmark = pytest.mark.full


class Classifier(pl.LightningModule):
    """With a metric of torchmetrics, which counts classes by their values."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
        self.accuracy = MetricCollection([MulticlassAccuracy(5), MulticlassF1Score(5)]) if counts else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.net(batch[0])
        if self.accuracy is not None:
            self.log_dict(self.accuracy(found, batch[1]))
            self.accuracy.update(found, batch[1])
            self.log("both", sum(self.accuracy.compute().values()))
        return F.cross_entropy(found, batch[1])


@on_ranks(1)
def test_metrics_keep_no_activations() -> None:
    batch = torch.randn(4, 8), torch.randint(5, (4,))
    counts, plain = (measure(Classifier(each), batch, make_config(), Precision.fp32) for each in (True, False))
    assert counts == plain


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


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(0))


def case(name: str, rows: int = 4) -> tuple[pl.LightningModule, Any]:
    torch.manual_seed(0)
    if name == "gpt":
        return LitGPT(vocab_size=64, n_layer=3, n_head=2, d_model=32, block_size=40, dropout=0.1), tokens(rows, 41)
    if name == "unet":
        return UNet(), (torch.randn(rows, 3, 16, 16), torch.randn(rows, 3, 16, 16))
    from tests.trainer.test_long_sequences_models import Model  # needs transformers

    ids, sizes = tokens(rows, 32), {"vocab_size": 64, "hidden_size": 32, "max_position_embeddings": 64}
    return Model(**sizes, num_key_value_heads=2, attn_implementation="eager", use_cache=False), {
        "input_ids": ids,
        "labels": ids,
    }


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


@on_ranks(1)
@pytest.mark.parametrize("name", ["gpt", "unet", "llama"])
def test_fake_tensors_need_what_real_ones_do(name: str) -> None:
    """(transformers' fused attention is not among them: without values it cannot leave a mask out.)"""
    module, batch = case(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    state = torch.random.get_rng_state()
    found = measure(module, batch, make_config(), Precision.fp32)
    assert torch.equal(torch.random.get_rng_state(), state)
    toys.assert_weights(module.state_dict(), before, tolerance=0)
    assert not getattr(module, "losses", [])
    expected = really(module, batch)
    assert found.saved == expected.saved > 0
    peak = max(found.peak(backward=True), found.peak(backward=False))
    assert peak == (pytest.approx(expected.batch, rel=0.03) if name == "unet" else expected.batch)
    assert found.batch == sum({t.data_ptr(): t.nbytes for t in torch.utils._pytree.tree_leaves(batch)}.values())
    assert found.flops > 0


@on_ranks(1)
@pytest.mark.sample
@pytest.mark.mainly(lambda name: name == "unet")
@pytest.mark.parametrize("name", ["gpt", "unet", "llama"])
def test_other_batch_sizes_follow_from_two(name: str) -> None:
    module, batch = case(name)
    sizes = measure_sizes(module, batch, make_config(), Precision.fp32)
    assert sizes.sizes == (4, 8) and sizes.scales
    for rows in (5, 16):
        exact = measure(*case(name, rows), make_config(), Precision.fp32)
        found = sizes.interpolate(rows)
        assert found.peak(backward=True) == pytest.approx(exact.peak(backward=True), rel=0.05)
        assert found.saved == pytest.approx(exact.saved, rel=0.01)
        assert (found.batch, found.flops) == (exact.batch, exact.flops)


# -- the plan of a step beside what a step allocates ------------------------------------------------------------------

LENGTH = 96
# No plan knows whether the reduction before has landed when the next unit's gradients begin to come (a buffer of one
# unit, more or less). Beside the activations of more samples that is small.
SAMPLES = 8


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
]
MAIN = [("zero0", "none", "none"), ("zero3", "none", "blocks"), ("zero3", "nvme", "none")]


@on_ranks(1, 2)
@pytest.mark.mainly(lambda stage, offload, recompute: (stage, offload, recompute) in MAIN)
@pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")
@pytest.mark.parametrize(("stage", "offload", "precision", "recompute", "micro_batches"), CASES)
def test_planned_peak_and_bytes_are_those_of_a_run(
    stage: str, offload: str, precision: str, recompute: str, micro_batches: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"name": offload} | ({"nvme_path": str(tmp_path)} if "nvme" in offload else {})
    config = make_config(stage=stage, offload=settings, activation_checkpointing=recompute)
    found = measure(gpt(), torch.zeros(SAMPLES, LENGTH + 1, dtype=torch.int64), config, Precision(precision))
    strategy, peak = ZeroStrategy(config=config), StepPeak()
    run: dict[str, Any] = {"precision": precision, "max_steps": 5, "accumulate_grad_batches": micro_batches}
    run |= {"callbacks": [peak] if dist.get_rank() == 0 else [], "max_epochs": None}
    tokens = torch.randint(0, 64, (512, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    with torch.backends.mkldnn.flags(enabled=False):  # in bf16 its products take memory, how much depends on the CPU
        trainer(strategy, tmp_path, **run).fit(gpt(), torch.utils.data.DataLoader(tokens, SAMPLES))
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
            plan_of(engine), limits_of(engine, micro_batches), found, engine.comm.shard.index, state_tensors=states
        )
        most = max(memory.on_tier(h, Tier.device) + memory.on_tier(h, Tier.host) for h in peaks.values())
        assert peak.nbytes == pytest.approx(most, rel=0.05)


# -- ``zero/stage=auto``: one row for all ranks, that of the plan -----------------------------------------------------


def fit_auto(root: Path, **settings: Any) -> Any:
    strategy = ZeroStrategy("auto", offload=settings.pop("offload", "auto"), **settings.pop("zero", {}))
    return strategy, toys.fit(strategy, root, **settings)


def room(nbytes: int) -> Any:
    return mock.patch.object(auto_row, "available_host_memory", lambda: nbytes)


@pytest.mark.sample
@on_ranks(1, 2)
def test_all_ranks_take_one_row_and_train_as_with_it(tmp_path: Path) -> None:
    """Although each rank finds other memory. The batch that is taken for the plan changes no order of shuffled data."""
    rank = dist.get_rank()

    def train(strategy: ZeroStrategy) -> toys.Run:
        module, of = toys.seeded(toys.Lit), trainer(strategy, tmp_path)
        generator = torch.Generator().manual_seed(3 + rank)
        of.fit(module, torch.utils.data.DataLoader(toys.Samples(12), 2, shuffle=True, generator=generator))
        return toys.record(of, module)

    strategy = ZeroStrategy("auto", offload="auto")
    with room(10**9 + rank):
        run = train(strategy)
    decision = strategy._auto.decision
    assert strategy._gather_objects(decision, "test") == [decision] * dist.get_world_size()
    assert strategy.engine.config.stage.name.value == decision.stage != "auto"
    if rank == 0:  # where it was decided
        assert pickle.loads(pickle.dumps(strategy.run_plan.activations)) == strategy.run_plan.activations
    assert decision.samples is not None and decision.samples > 2 and "activations are not" not in decision.reason
    toys.assert_same(run, train(ZeroStrategy(decision.stage, offload=decision.offload)), tolerance=0.0)


@on_ranks(2)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_resumed_run_decides_its_row_anew(form: str, tmp_path: Path) -> None:
    path, decided, zero = tmp_path / "saved.ckpt", [], {"checkpoint": form}
    for offload, settings in (("none", {"max_epochs": 1}), ("optimizer_cpu", {"ckpt_path": path})):
        with room(10**9):
            strategy, run = fit_auto(tmp_path, offload=offload, zero=dict(zero), **settings)
        decided.append(strategy._auto.decision.offload)
        run.trainer.save_checkpoint(path)
    assert decided == ["none", "optimizer_cpu"]


@pytest.mark.sample
@on_ranks(1, 2)
def test_run_that_fits_nowhere_or_cannot_be_planned_is_refused_on_all_ranks(tmp_path: Path) -> None:
    nowhere = pytest.raises(ConfigError, match="expected a combination that fits into .*, got none of .* Use more")
    with room(1000), nowhere:
        fit_auto(tmp_path)
    broken = mock.patch.object(auto_row, "model_of", side_effect=KeyError("a bug"))
    with broken, pytest.raises(RuntimeError, match="zero/stage=auto: rank 0 could not decide: KeyError: 'a bug'"):
        fit_auto(tmp_path)


@on_ranks(1)
def test_step_that_reads_values_is_planned_without_activations(tmp_path: Path) -> None:
    class Reads(toys.Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            assert not loss > 1e30
            return loss

    decision = fit_auto(tmp_path, module=toys.seeded(Reads), count=8)[0]._auto.decision
    assert "activations are not in the plan" in decision.reason and "training_step of" in decision.reason
    assert decision.samples is None


@pytest.mark.sample
@on_ranks(2)
def test_host_with_the_least_memory_decides(tmp_path: Path) -> None:
    """As if the ranks were on two hosts."""
    host = f"host {dist.get_rank()}"
    with (
        room(10**9 if dist.get_rank() else 1000),
        mock.patch.object(auto_row, "machine", lambda: host),
        pytest.raises(ConfigError, match="2 host.s.: 900 B of a host's memory"),
    ):
        fit_auto(tmp_path)


@pytest.mark.parametrize(("make", "states", "why"), [
    (lambda p: torch.optim.SGD(p, 0.1), 0, ""),
    (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1, ""),
    (lambda p: {"optimizer": torch.optim.AdamW(p, amsgrad=True)}, 3, ""),
    (lambda p: ([torch.optim.SGD(p, 0.1), torch.optim.Adam(p)], []), 2, ""),
    (lambda p: None, 0, ""),
    (lambda p: 1 / 0, 2, "configure_optimizers fails on tensors without values: ZeroDivisionError"),
    (lambda p: torch.optim.LBFGS(p), 2, "LBFGS is not known"),
])  # fmt: skip
def test_state_of_optimizers_is_known_before_they_step(make: Any, states: int, why: str) -> None:
    module, config = variant(configure_optimizers=lambda m: make(list(m.parameters())))(), make_config()
    before = {name: (id(p), p.clone()) for name, p in module.named_parameters()}
    found, said = states_of(module, None, describe_units(module, config, Precision.fp32), config)
    assert found == states and said.startswith(why) and bool(said) == bool(why)
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in module.named_parameters())


def rows(**settings: Any) -> list[str]:
    return [offload.name.name for _, offload in candidate_rows(make_config(**{"stage": "auto", **settings}))]


def test_rows_in_files_are_candidates_if_there_is_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And settings take rows out, or say so."""
    monkeypatch.delenv("LIGHTNING_ZERO_NVME_PATH", raising=False)
    assert set(rows(offload="auto")) == {"none", "optimizer_cpu", "cpu", "auto"}
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", str(tmp_path))
    assert len(rows(offload="auto")) == len(rows(offload="auto", prefetch_bytes=1)) == 16
    assert rows(offload="none") == ["none"] * 4
    in_node = rows(stage="zero3", offload="auto", hybrid_shard="node_backward")
    assert set(in_node) == {"none", "optimizer_cpu", "optimizer_nvme", "auto"}
    with pytest.raises(ConfigError, match=r"zero\.compile\.arguments.*at stage 3"):
        rows(compile={"name": "blocks", "arguments": {"mode": "reduce-overhead"}})


def at_rest(of: Any) -> int:
    """Bytes of the parameters of all ranks."""
    held = held_bytes(of.strategy.engine)
    own = sum(n for (role, _), n in held.items() if role in (Role.compute_param, Role.master_param))
    return sum(of.strategy.engine.comm.all_gather_objects(own, "bytes"))


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("row", ["zero0", "zero3", "zero3_offload"])
def test_a_host_without_room_for_the_parameters_refuses_them(row: str, tmp_path: Path) -> None:
    """Without GPUs all ranks' devices are their host. What fits to the byte is not refused, nor what is there."""

    def of(nbytes: int, device: str) -> Any:
        with torch.device(device):
            module = toys.Lit()
        room = mock.patch.object(auto_row, "available_host_memory", lambda: nbytes + 1 - rank)  # the least counts
        with room, mock.patch.object(auto_row, "free_swap", lambda: 1):
            return toys.fit(toys.strategy_of(row), tmp_path, module, max_epochs=1).trainer

    rank = dist.get_rank()
    needed = at_rest(of(1 << 30, "meta"))
    said = rf"the parameters of 2 rank\(s\) on host .*, {needed:,} bytes, got {needed - 1:,} available bytes"
    with pytest.raises(ConfigError, match=said):
        of(needed - 2, "meta")
    of(needed - 1, "meta")
    of(0, "cpu")
