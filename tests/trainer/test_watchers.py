"""What watches a run. ZeroMonitor logs what the engine holds, and that is what was planned."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_zero import ZeroMonitor, ZeroStrategy
from lightning_zero.device import recording
from lightning_zero.planning.peaks import peak_flops
from lightning_zero.ranks import waits
from lightning_zero.settings import ConfigError
from lightning_zero.trainer.memory.held_bytes import held_bytes
from tests.engine.support import places_posted_often
from tests.engine.test_alone import in_a_pool
from tests.harness import on_ranks
from tests.trainer import toys
from tests.trainer.toys import ALL_STAGES, Lit, assert_same, assert_weights, fit, loader, seeded, strategy_of

pytestmark = pytest.mark.full


class Kept(DummyLogger):
    """Keeps what loggers are given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if mine := {name: value for name, value in metrics.items() if name.startswith("zero/")}:
            self.rows.append(mine)


def monitored(stage: Any, root: Path, module: Any = None, **settings: Any) -> tuple[toys.Run, list[dict[str, float]]]:
    """A run, and what was logged at each of its steps."""
    kept, monitor = Kept(), settings.pop("monitor", None) or ZeroMonitor(1)
    callbacks = [monitor, *settings.pop("callbacks", ())]
    return fit(stage, root, module, logger=kept, callbacks=callbacks, **{"max_epochs": 1, **settings}), kept.rows


@pytest.mark.sample
@on_ranks(2)
def test_rows_of_a_logger_hold_bytes_speeds_and_waits(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path, name="", version=""), ZeroMonitor(prog_bar=True)
    run = fit("zero3", tmp_path, logger=logger, callbacks=[monitor], log_every_n_steps=2, max_epochs=1)
    dist.barrier()
    assert "zero/samples_per_s" in run.trainer.progress_bar_metrics
    assert "zero/bytes/grad/device" in run.trainer.callback_metrics
    if dist.get_rank():
        return
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [row["step"] for row in rows if row["loss_step"]]
    rows = [row for row in rows if row["zero/steps_per_s"]]
    assert len(rows) == 3  # of six steps
    assert [row["step"] for row in rows] == losses
    for (role, tier), nbytes in held_bytes(run.trainer.strategy.engine).items():
        assert float(rows[-1][f"zero/bytes/{role.value}/{tier.value}"]) == nbytes
    for row in rows:
        assert 0 < float(row["zero/steps_per_s"]) < 1e5
        assert 0 <= float(row["zero/wait_s_per_step"]) < 10
        assert float(row["zero/bytes_over_plan"]) == 1
        assert 0 < float(row["zero/tflops_per_s"]) < 1
    assert "zero/mfu" not in rows[0]  # nobody knows the peak of a CPU
    assert not any("disk" in name or "transfer" in name for name in rows[0])
    names = rows[0].keys()  # MLflow takes no other letters, and keeps metrics in files: none is the folder of another
    assert all(re.fullmatch(r"[\w./ -]+", name) for name in names)
    assert not any(other.startswith(f"{name}/") for name in names for other in names)


@on_ranks(2)
@pytest.mark.parametrize("row, settings", [
    ("zero1", {"accumulate_grad_batches": 2}),
    ("zero3", {"gradient_clip_val": 0.5}),
    ("zero3_nvme", {}),
])  # fmt: skip
def test_monitor_changes_no_number_and_sends_nothing(row: str, settings: dict[str, Any], tmp_path: Path) -> None:
    def sent(run: toys.Run) -> Any:
        comm = run.trainer.strategy.engine.comm
        return comm.counts, comm.waits.issued

    plain = fit(strategy_of(row, tmp_path), tmp_path, logger=Kept(), **settings)
    expected = sent(plain)
    found, rows = monitored(strategy_of(row, tmp_path), tmp_path, max_epochs=2, **settings)
    assert sent(found) == expected
    assert found.losses == plain.losses
    assert_weights(found.weights, plain.weights, tolerance=0)
    if row == "zero3_nvme":
        assert {"zero/wait_s/transfer", "zero/wait_s/step", "zero/moved_bytes/h2d"} <= set(rows[0])
        assert rows[-1]["zero/moved_bytes/d2h"] > 0
        for way in ("read", "write"):  # behind the steps: not in each row
            assert sum(row[f"zero/moved_bytes/disk_{way}"] for row in rows) > 0
    assert ("zero/moved_bytes/disk_read" in rows[-1]) == (row == "zero3_nvme")
    assert recording.recorder is None


@pytest.mark.sample
@on_ranks(2)
def test_bytes_that_move_between_ranks(tmp_path: Path) -> None:
    for stage, gathers in (("zero1", 1), ("zero3", 2)):
        run, rows = monitored(stage, tmp_path, limit_val_batches=0)
        engine = run.trainer.strategy.engine
        # Of the other rank; what stays replicated is summed by two such messages.
        half = {u: sum(b.full.nbytes for b in u.buckets if b.plan.shards_master) / 2 for u in engine.units}
        whole = sum(half.values())
        replicated = sum(b.full.nbytes for b in engine.buckets if not b.plan.shards_master)
        assert rows[-1]["zero/moved_bytes/reduce"] == whole + replicated
        # At stage 3 the root is gathered once a pass, and so is the last unit.
        kept = half[engine.units[0]] + half[engine.units[-1]] if stage == "zero3" else 0
        assert rows[-1]["zero/moved_bytes/gather"] == gathers * whole - kept


class Tokens(Lit):
    """Batches of whole numbers [samples, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, toys.FEATURES)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"ids": [(batch[0].abs() * 5).long() % 5]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(self.embed(batch["ids"][0])).square().mean()


class Passes(Callback):
    """Has half a second pass in each batch of training, and much in a validation."""

    def __init__(self) -> None:
        self.now = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 0.5

    def on_validation_batch_start(self, *_: Any) -> None:
        self.now += 100

    def monotonic(self) -> float:
        """In the place of the module ``time``."""
        return self.now


def timed(strategy: Any, root: Path, module: Any = None, **settings: Any) -> list[dict[str, float]]:
    passes = Passes()
    with mock.patch("lightning_zero.trainer.callbacks.monitor.time", passes):
        return monitored(strategy, root, module, callbacks=[passes], **settings)[1]


@on_ranks(2)
def test_speeds_are_of_all_ranks_and_of_training_alone(tmp_path: Path) -> None:
    for row in timed("zero1", tmp_path, max_epochs=2, limit_val_batches=1):
        assert row["zero/steps_per_s"] == 2 and row["zero/samples_per_s"] == 2 * 2 * 2
    row = timed("zero1", tmp_path, seeded(Tokens), limit_val_batches=0)[-1]
    assert row["zero/tokens_per_s"] == 2 * 2 * 2 * toys.FEATURES and "zero/samples_per_s" not in row
    row = timed("zero1", tmp_path, accumulate_grad_batches=3, limit_val_batches=0)[-1]
    assert row["zero/steps_per_s"] == pytest.approx(2 / 3) and row["zero/samples_per_s"] == 8


@on_ranks(2)
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_flops_are_those_of_the_plain_model(checkpointing: str, tmp_path: Path) -> None:
    with FlopCounterMode(display=False) as counter:
        seeded(Lit).loss(next(iter(loader()))).backward()
    expected = counter.get_total_flops()
    settings: dict[str, Any] = {"activation_checkpointing": checkpointing}
    for stage in ALL_STAGES:
        monitor = ZeroMonitor(1, peak_flops=1e6)
        row = timed(ZeroStrategy(stage, **settings), tmp_path, monitor=monitor, limit_val_batches=0)[-1]
        # What is computed again is no part of the model. The first layer asks for no gradient of its input.
        found = row["zero/tflops_per_s"] * 1e12 / 2
        most = 1.1 if checkpointing == "blocks" else 1.0
        assert expected * 0.999 <= found <= expected * most * 1.001
        assert row["zero/mfu"] == pytest.approx(2 * found / 1e6)


@on_ranks(2)
def test_flops_that_are_not_known_are_no_column(tmp_path: Path) -> None:
    compiled, given = seeded(Lit), seeded(Lit)
    for block in compiled.blocks:
        block.compile(backend="eager")
    for module, monitor in ((compiled, ZeroMonitor(1, peak_flops=1e6)), (None, ZeroMonitor(1, count_flops=False))):
        _, rows = monitored("zero1", tmp_path, module, monitor=monitor)
        assert rows and not any("flops" in name or "mfu" in name for name in rows[-1])
    given.flops_per_batch = 5e9
    _, rows = monitored("zero1", tmp_path, given)
    assert rows[-1]["zero/tflops_per_s"] == pytest.approx(5e9 / 1e12 * rows[-1]["zero/steps_per_s"])


@on_ranks(2)
def test_run_that_raises_or_leaves_batches_out_leaves_no_counting_behind(tmp_path: Path) -> None:
    before, leaves_out = torch._C._len_torch_dispatch_stack(), Callback()
    leaves_out.on_train_batch_start = lambda of, *_: -1 if of.current_epoch == 0 else None  # ends the first epoch
    monitored("zero3", tmp_path, callbacks=[leaves_out], max_epochs=2)
    with pytest.raises(KeyError, match="planned"):
        fit("zero3", tmp_path, seeded(lambda: toys.Fails(0)), callbacks=[ZeroMonitor(1)], max_epochs=1)
    assert recording.recorder is None
    assert torch._C._len_torch_dispatch_stack() == before


@pytest.mark.parametrize(("gpu", "dtype", "tf32", "expected"), [
    ("NVIDIA H100 80GB HBM3", "bf16", False, 989e12),
    ("NVIDIA H100 PCIe", "bf16", False, 756e12),
    ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5e12),
    ("NVIDIA A100-SXM4-80GB", "fp32", True, 156e12),
    ("Tesla T4", "bf16", False, None),
    ("Tesla T4", "fp32", True, 8.1e12),
    ("", "fp32", False, None),
])  # fmt: skip
def test_peaks_of_gpus_are_known_by_name_and_dtype(gpu: str, dtype: str, tf32: bool, expected: float | None) -> None:
    assert peak_flops(gpu, dtype, tf32=tf32) == expected


@on_ranks(2)
def test_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ZeroStrategy"):
        fit("ddp", tmp_path, callbacks=[ZeroMonitor()])
    with pytest.raises(ConfigError, match="every_n_steps"):
        ZeroMonitor(0)


# -- from outside: the values that are seen under DDP, or an error that says how ---------------------------------------


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
    with contextlib.suppress(Exception):  # a rank has ended
        in_a_pool(read_on_rank_0, str(tmp_path))
    said = (tmp_path / "said").read_text()
    assert "All ranks must call this, or none" in said and "self.log(sync_dist=True)" in said
