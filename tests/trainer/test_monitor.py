"""ZeroMonitor logs what the engine holds, and that is what was planned."""

from __future__ import annotations

import csv
import re
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_zero import ZeroMonitor, ZeroStrategy, device
from lightning_zero.config import ConfigError
from lightning_zero.device import recording
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.planning.peaks import peak_flops
from lightning_zero.trainer.memory.held_bytes import held_bytes
from tests.harness import on_ranks
from tests.trainer.toys import ALL_STAGES, FEATURES, Fails, Lit, Run, fit, loader, seeded, strategy_of

pytestmark = pytest.mark.full


class Kept(Logger):
    """What loggers are given: every logger of Lightning has this method."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = version = "kept"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        if mine := {name: value for name, value in metrics.items() if name.startswith("zero/")}:
            self.rows.append((step, mine))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def monitored(stage: str, root: Path, module: Any = None, **settings: Any) -> tuple[Run, list[dict[str, float]]]:
    """A run, and what was logged at each of its steps."""
    kept = Kept()
    monitor = settings.pop("monitor", None) or ZeroMonitor(1)
    callbacks = [monitor, *settings.pop("callbacks", ())]
    run = fit(stage, root, module, logger=kept, callbacks=callbacks, **{"max_epochs": 1, **settings})
    return run, [row for _, row in kept.rows]


class Device(Accelerator):
    """One that counts its peak, as torch does for GPUs: since the process began, unless it is told otherwise."""

    has_streams = True
    peak = 1000

    def new_stream(self) -> Any:
        return "stream"

    def record(self) -> Any:
        return "event"

    def peak_nbytes(self) -> int:
        return Device.peak

    def reset_peak(self) -> None:
        Device.peak = 7


@on_ranks(1)
def test_peak_of_a_device_is_of_training_and_not_of_the_build(tmp_path: Path) -> None:
    with mock.patch.dict(device._KINDS, {"cpu": Device}), mock.patch.object(Device, "peak", 1000):
        _, rows = monitored("zero1", tmp_path)
    assert [row["zero/peak_bytes/device"] for row in rows] == [7.0] * len(rows) != []


@pytest.mark.sample
@on_ranks(2)
def test_rows_of_a_logger_hold_bytes_speeds_and_waits(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = ZeroMonitor(prog_bar=True)
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
    held = held_bytes(run.trainer.strategy.engine)
    for (role, tier), nbytes in held.items():
        assert float(rows[-1][f"zero/bytes/{role.value}/{tier.value}"]) == nbytes
    for row in rows:
        assert 0 < float(row["zero/steps_per_s"]) < 1e5
        assert 0 <= float(row["zero/wait_s_per_step"]) < 10
        assert float(row["zero/bytes_over_plan"]) == 1
        assert 0 < float(row["zero/tflops_per_s"]) < 1
    assert "zero/mfu" not in rows[0]  # nobody knows the peak of a CPU
    assert not any("disk" in name or "transfer" in name for name in rows[0])


@on_ranks(2)
def test_every_n_steps_are_logged_whatever_lightning_logs(tmp_path: Path) -> None:
    _, rows = monitored("zero1", tmp_path, log_every_n_steps=50, monitor=ZeroMonitor(2))
    assert len(rows) == 3


@on_ranks(2)
@pytest.mark.parametrize("row, settings", [
    ("zero1", {"accumulate_grad_batches": 2}),
    ("zero3", {"gradient_clip_val": 0.5}),
    ("zero3_nvme", {}),
])  # fmt: skip
def test_monitor_changes_no_number_and_sends_nothing(row: str, settings: dict[str, Any], tmp_path: Path) -> None:
    def strategy() -> Any:
        return strategy_of(row, tmp_path)

    def sent(run: Run) -> Any:
        comm = run.trainer.strategy.engine.comm
        return comm.counts, comm.waits.issued

    plain = fit(strategy(), tmp_path, logger=Kept(), **settings)
    expected = sent(plain)
    found, rows = monitored(strategy(), tmp_path, max_epochs=2, **settings)
    assert sent(found) == expected
    assert found.losses == plain.losses
    for name, value in plain.weights.items():
        assert torch.equal(found.weights[name], value), name
    if "_" in row:
        assert {"zero/wait_s/transfer", "zero/wait_s/step", "zero/moved_bytes/h2d"} <= set(rows[0])
        assert rows[-1]["zero/moved_bytes/d2h"] > 0
    assert ("zero/moved_bytes/disk_read" in rows[-1]) == (row == "zero3_nvme")
    if row == "zero3_nvme":
        for way in ("read", "write"):  # behind the steps: not in each row
            assert sum(row[f"zero/moved_bytes/disk_{way}"] for row in rows) > 0
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


@on_ranks(2)
def test_prefetch_hits_are_all_with_room_and_none_without(tmp_path: Path) -> None:
    for nbytes, hits in ((0, 0.0), (1 << 20, 1.0)):
        strategy = ZeroStrategy("zero3", prefetch_bytes=nbytes)
        _, rows = monitored(strategy, tmp_path, seeded(lambda: Lit(depth=4)))
        # The first unit of a pass is demanded as it begins: nothing is there that could have come ahead of it.
        assert rows[-1]["zero/prefetch_hits"] == pytest.approx(hits, abs=0.2), rows[-1]
    assert "zero/prefetch_hits" not in monitored("zero1", tmp_path)[1][-1]


class Tokens(Lit):
    """Batches of whole numbers [samples, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, FEATURES)

    def loss(self, batch: Any) -> Tensor:
        ids = (batch[0].abs() * 5).long() % 5
        return self(self.embed(ids)).square().mean()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"ids": [(batch[0].abs() * 5).long() % 5]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(self.embed(batch["ids"][0])).square().mean()


class Clock:
    """Time that passes by the second, in the place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@on_ranks(2)
def test_speeds_are_of_all_ranks_and_of_training_alone(tmp_path: Path) -> None:
    clock = Clock()

    class Passes(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            clock.now += 0.5

        def on_validation_batch_start(self, *_: Any) -> None:
            clock.now += 100

    with mock.patch("lightning_zero.trainer.callbacks.monitor.time", clock):
        _, rows = monitored("zero1", tmp_path, callbacks=[Passes()], max_epochs=2, limit_val_batches=1)
        for row in rows:
            assert row["zero/steps_per_s"] == 2 and row["zero/samples_per_s"] == 2 * 2 * 2
        _, rows = monitored("zero1", tmp_path, seeded(Tokens), callbacks=[Passes()], limit_val_batches=0)
        assert rows[-1]["zero/tokens_per_s"] == 2 * 2 * 2 * FEATURES and "zero/samples_per_s" not in rows[-1]
        settings = {"accumulate_grad_batches": 3, "limit_val_batches": 0, "callbacks": [Passes()]}
        _, rows = monitored("zero1", tmp_path, **settings)
        assert rows[-1]["zero/steps_per_s"] == pytest.approx(2 / 3) and rows[-1]["zero/samples_per_s"] == 8


def flops_of(module: Lit, batch: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        module.loss(batch).backward()
    return counter.get_total_flops()


@on_ranks(2)
@pytest.mark.parametrize(("checkpointing", "parts"), [("none", 1), ("blocks", 1), ("blocks", 2)])
def test_flops_are_those_of_the_plain_model(checkpointing: str, parts: int, tmp_path: Path) -> None:
    expected = flops_of(seeded(Lit), next(iter(loader())))
    clock = Clock()
    settings: dict[str, Any] = {"activation_checkpointing": checkpointing, "vertical_chunks": parts}

    class Passes(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            clock.now += 0.5

    with mock.patch("lightning_zero.trainer.callbacks.monitor.time", clock):
        for stage in ALL_STAGES if parts == 1 else [3]:
            monitor = ZeroMonitor(1, peak_flops=1e6)
            strategy: Any = ZeroStrategy(stage, **settings)
            _, rows = monitored(strategy, tmp_path, callbacks=[Passes()], monitor=monitor, limit_val_batches=0)
            # What is computed again is no part of the model. The first layer asks for no gradient of its input.
            found = rows[-1]["zero/tflops_per_s"] * 1e12 / 2
            most = 1.1 if checkpointing == "blocks" else 1.0
            assert expected * 0.999 <= found <= expected * most * 1.001
            assert rows[-1]["zero/mfu"] == pytest.approx(2 * found / 1e6)


@on_ranks(2)
def test_flops_that_are_not_known_are_no_column(tmp_path: Path) -> None:
    module = seeded(Lit)
    for block in module.blocks:
        block.compile(backend="eager")
    _, rows = monitored("zero1", tmp_path, module, monitor=ZeroMonitor(1, peak_flops=1e6))
    assert rows and not any("flops" in name or "mfu" in name for name in rows[-1])
    _, rows = monitored("zero1", tmp_path, monitor=ZeroMonitor(1, count_flops=False))
    assert rows and not any("flops" in name or "mfu" in name for name in rows[-1])
    given = seeded(Lit)
    given.flops_per_batch = 5e9
    with mock.patch("lightning_zero.trainer.callbacks.monitor.FlopCount", side_effect=AssertionError):
        _, rows = monitored("zero1", tmp_path, given)
    assert rows[-1]["zero/tflops_per_s"] == pytest.approx(5e9 / 1e12 * rows[-1]["zero/steps_per_s"])


class TwoOptimizers(Lit):
    """As in a GAN: two optimizers, stepped by hand, the second every other time."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()
        for optimizer in (body, head) if batch_idx % 2 else (body,):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)


@on_ranks(2)
def test_several_optimizers_give_one_row_for_each_batch(tmp_path: Path) -> None:
    run, rows = monitored("zero3", tmp_path, seeded(TwoOptimizers))
    assert run.trainer.global_step == 9 and len(rows) == 6
    assert all(row["zero/bytes_over_plan"] == 1 for row in rows)


@on_ranks(2)
def test_names_of_columns_are_ones_that_loggers_take(tmp_path: Path) -> None:
    """MLflow refuses other letters, and where it keeps metrics in files none may be the folder of another."""
    _, rows = monitored("zero3", tmp_path)
    names = set(rows[-1])
    assert all(re.fullmatch(r"[\w./ -]+", name) for name in names)
    assert not any(other.startswith(f"{name}/") for name in names for other in names)
    assert all(isinstance(value, float) for value in rows[-1].values())


@on_ranks(2)
def test_calls_of_the_monitor_do_not_grow_with_the_model(tmp_path: Path) -> None:
    """Its cost, in calls of Python: between two logs a few for each wait, and nothing for each parameter."""

    def calls(depth: int, monitor: bool) -> int:
        counted = 0

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal counted
            code = frame.f_code.co_filename
            counted += event == "call" and code.endswith(("trainer/callbacks/monitor.py", "device/recording.py"))

        class Count(Callback):
            """Of the last batch, hooks of the monitor among it."""

            def on_train_batch_start(self, *args: Any) -> None:
                if args[-1] == 5:
                    sys.setprofile(count)

            def on_train_end(self, *_: Any) -> None:
                sys.setprofile(None)

        callbacks = [Count(), *([ZeroMonitor(100)] if monitor else [])]
        module = seeded(lambda: Lit(depth=depth))
        try:
            fit("zero1", tmp_path, module, callbacks=callbacks, limit_val_batches=0, max_epochs=1)
        finally:
            sys.setprofile(None)
        return counted

    few, many = calls(2, True) - calls(2, False), calls(12, True) - calls(12, False)
    # Ten more units: for each a gather and a reduction are counted and waited for.
    assert 0 < few < 100 and (many - few) / 10 <= 20, (few, many)


@on_ranks(2)
def test_wait_is_counted_on_the_rank_that_waits(tmp_path: Path) -> None:
    """A rank that comes late is waited for; it waits itself for nobody."""

    class Late(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if dist.get_rank() == 1:
                time.sleep(0.1)
            return super().training_step(batch, batch_idx)

    run, rows = monitored("zero3", tmp_path, seeded(Late), limit_val_batches=0)
    waited = run.trainer.strategy.engine.comm.waits.waited_s
    assert (waited > 0.4) == (dist.get_rank() == 0)
    stood = [sum(value for name, value in row.items() if name.startswith("zero/wait_s/")) for row in rows]
    assert stood == pytest.approx([row["zero/wait_s_per_step"] for row in rows])
    assert (sum(stood) > 0.4) == (dist.get_rank() == 0)


class LeavesOut(Callback):
    """Ends the first epoch before its first batch, as Lightning's hook may."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if trainer.current_epoch == 0 else None


@on_ranks(2)
def test_run_that_raises_or_leaves_batches_out_leaves_no_counting_behind(tmp_path: Path) -> None:
    before = torch._C._len_torch_dispatch_stack()
    monitored("zero3", tmp_path, callbacks=[LeavesOut()], max_epochs=2)
    with pytest.raises(KeyError, match="planned"):
        fit("zero3", tmp_path, seeded(lambda: Fails(0)), callbacks=[ZeroMonitor(1)], max_epochs=1)
    assert recording.recorder is None
    assert torch._C._len_torch_dispatch_stack() == before


PEAKS = [
    ("NVIDIA H100 80GB HBM3", "bf16", False, 989e12),
    ("NVIDIA H100 PCIe", "bf16", False, 756e12),
    ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5e12),
    ("NVIDIA A100-SXM4-80GB", "fp32", True, 156e12),
    ("NVIDIA H200", "fp16", False, 989e12),
    ("Tesla T4", "bf16", False, None),
    ("Tesla T4", "fp32", True, 8.1e12),
    ("NVIDIA L40S", "fp64", False, None),
    ("NVIDIA GeForce RTX 4090", "bf16", False, None),
    ("", "fp32", False, None),
]


def test_peaks_of_gpus_are_known_by_name_and_dtype() -> None:
    for gpu, dtype, tf32, expected in PEAKS:
        assert peak_flops(gpu, dtype, tf32=tf32) == expected, (gpu, dtype)


@on_ranks(2)
def test_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ZeroStrategy"):
        fit("ddp", tmp_path, callbacks=[ZeroMonitor()])
    with pytest.raises(ConfigError, match="every_n_steps"):
        ZeroMonitor(0)
