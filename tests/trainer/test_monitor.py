"""ZeroMonitor logs what the engine holds, and that is what was planned."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_zero import ZeroMonitor
from lightning_zero.config import ConfigError
from lightning_zero.engine.whole.held_bytes import held_bytes, plan_of
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.memory import Moment, planned_bytes
from lightning_zero.planning.placement import Tier
from tests.harness import on_ranks
from tests.trainer.toys import STAGES, Lit, fit, seeded


class Measure(Callback):
    def __init__(self) -> None:
        self.held: dict[Moment, Any] = {}

    def _note(self, trainer: Any, moment: Moment) -> None:
        self.held[moment] = held_bytes(trainer.strategy.engine)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note(trainer, Moment.reduced if batch_idx % 2 else Moment.accumulating)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].zero_grad()
        trainer.strategy.engine.forget_zeroed()
        self._note(trainer, Moment.cleared)


def partly_frozen() -> Lit:
    module: Lit = seeded(lambda: Lit(optimizer="adamw", width=24))
    module.first.requires_grad_(False)
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@on_ranks(3, full=(1,))
def test_measured_bytes_are_the_planned_ones(precision: str, tmp_path: Path) -> None:
    for stage in STAGES:
        for make, states in ((lambda: seeded(Lit), 1), (partly_frozen, 2)):
            measure = Measure()
            settings: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 2, "precision": precision}
            run = fit(stage, tmp_path, make(), callbacks=[measure], limit_val_batches=0, **settings)
            plan = plan_of(run.trainer.strategy.engine)  # type: ignore[attr-defined]
            for moment, held in measure.held.items():
                expected = planned_bytes(plan, dist.get_rank(), state_tensors=states, moment=moment)
                assert held == expected, (stage, moment)
            assert held[Role.compute_param, Tier.device] + held[Role.master_param, Tier.device] > 0


class Counting(ZeroMonitor):
    measured = 0

    def _speed(self, trainer: Any) -> dict[str, float]:
        self.measured += 1
        return super()._speed(trainer)


@on_ranks(2)
def test_the_log(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = Counting(prog_bar=True)
    run = fit("zero3", tmp_path, logger=logger, callbacks=[monitor], log_every_n_steps=2, max_epochs=1)
    dist.barrier()
    assert monitor.measured == 3  # of six steps
    if dist.get_rank():
        return
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["zero/steps_per_s"]]
    assert len(rows) == 3
    held = held_bytes(run.trainer.strategy.engine)  # type: ignore[attr-defined]
    for (role, tier), nbytes in held.items():
        assert float(rows[-1][f"zero/bytes/{role.value}/{tier.value}"]) == nbytes
    for row in rows:
        assert 0 < float(row["zero/steps_per_s"]) < 1e5
        assert 0 <= float(row["zero/wait_s_per_step"]) < 10
    assert "zero/steps_per_s" in run.trainer.progress_bar_metrics


@on_ranks(2)
def test_waiting_is_counted_where_it_happens(tmp_path: Path) -> None:
    """A rank that comes late is waited for; it waits itself for nobody."""
    import time

    class Late(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if dist.get_rank() == 1:
                time.sleep(0.1)
            return super().training_step(batch, batch_idx)

    run = fit("zero3", tmp_path, seeded(Late), max_epochs=1, limit_val_batches=0)
    waited = run.trainer.strategy.engine.comm.waits.waited_s  # type: ignore[attr-defined]
    assert (waited > 0.4) == (dist.get_rank() == 0)


@on_ranks(2)
def test_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ZeroStrategy"):
        fit("ddp", tmp_path, callbacks=[ZeroMonitor()])
    with pytest.raises(ConfigError, match="every_n_steps"):
        ZeroMonitor(0)
