"""``zero/stage=auto``: one row for all ranks, that of the plan."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError, Precision, candidate_rows, make_config
from lightning_zero.engine.units.describe import describe_units
from lightning_zero.trainer.memory import auto_row
from lightning_zero.trainer.memory.fake_module import states_of
from tests.harness import on_ranks
from tests.trainer import toys

pytestmark = pytest.mark.full


def fit(root: Path, **settings: Any) -> Any:
    zero = settings.pop("zero", {})
    strategy = ZeroStrategy("auto", offload=settings.pop("offload", "auto"), **zero)
    return strategy, toys.fit(strategy, root, **settings)


def memory(nbytes: int) -> Any:
    return mock.patch.object(auto_row, "available_host_memory", lambda: nbytes)


@pytest.mark.sample
@on_ranks(1, 2)
def test_all_ranks_take_one_row_and_train_as_with_it(tmp_path: Path) -> None:
    """Although each rank finds other memory."""
    rank = dist.get_rank()
    with memory(10**9 + rank):
        strategy, run = fit(tmp_path / "auto", count=12)
    decision = strategy._auto.decision
    assert strategy._gather_objects(decision, "test") == [decision] * dist.get_world_size()
    assert strategy.engine.config.stage.name.value == decision.stage != "auto"
    if rank == 0:  # where it was decided
        assert pickle.loads(pickle.dumps(strategy.run_plan.activations)) == strategy.run_plan.activations
    assert decision.samples is not None and decision.samples > 2 and "activations are not" not in decision.reason
    plain = toys.fit(ZeroStrategy(decision.stage, offload=decision.offload), tmp_path / "plain", count=12)
    toys.assert_same(run, plain, tolerance=0.0)


@on_ranks(2)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_resumed_run_decides_its_row_anew(form: str, tmp_path: Path) -> None:
    path, decided, zero = tmp_path / "saved.ckpt", [], {"checkpoint": form}
    for offload, settings in (("none", {"max_epochs": 1}), ("optimizer_cpu", {"ckpt_path": path})):
        with memory(10**9):
            strategy, run = fit(tmp_path, offload=offload, zero=dict(zero), **settings)
        decided.append(strategy._auto.decision.offload)
        run.trainer.save_checkpoint(path)
    assert decided == ["none", "optimizer_cpu"]


@pytest.mark.sample
@on_ranks(1, 2)
def test_run_that_fits_nowhere_or_cannot_be_planned_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with memory(1000), pytest.raises(ConfigError, match="expected a row that fits into .*, got none of .* Use more"):
        fit(tmp_path)
    broken = mock.patch.object(auto_row, "model_of", side_effect=KeyError("a bug"))
    with broken, pytest.raises(RuntimeError, match="zero/stage=auto: rank 0 could not decide: KeyError: 'a bug'"):
        fit(tmp_path)


@on_ranks(1)
def test_step_that_reads_values_is_planned_without_activations(tmp_path: Path) -> None:
    class Reads(toys.Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            assert not loss > 1e30
            return loss

    decision = fit(tmp_path, module=toys.seeded(Reads), count=8)[0]._auto.decision
    assert "activations are not in the plan" in decision.reason and "training_step of" in decision.reason
    assert decision.samples is None


@pytest.mark.sample
@on_ranks(2)
def test_host_with_the_least_memory_decides(tmp_path: Path) -> None:
    """As if the ranks were on two hosts."""
    host = f"host {dist.get_rank()}"
    with (
        memory(10**9 if dist.get_rank() else 1000),
        mock.patch.object(auto_row, "machine", lambda: host),
        pytest.raises(ConfigError, match="2 host.s.: 900 B of a host's memory"),
    ):
        fit(tmp_path)


@pytest.mark.parametrize(("make", "states", "why"), [
    (lambda p: torch.optim.SGD(p, 0.1), 0, ""),
    (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1, ""),
    (lambda p: {"optimizer": torch.optim.AdamW(p, amsgrad=True)}, 3, ""),
    (lambda p: ([torch.optim.SGD(p, 0.1), torch.optim.Adam(p)], []), 2, ""),
    (lambda p: None, 0, ""),
    (lambda p: 1 / 0, 2, "configure_optimizers cannot be asked before: ZeroDivisionError"),
    (lambda p: torch.optim.LBFGS(p), 2, "LBFGS cannot be tried"),
])  # fmt: skip
def test_state_of_optimizers_is_known_before_they_step(make: Any, states: int, why: str) -> None:
    class Own(toys.Lit):
        def configure_optimizers(self) -> Any:
            return make(list(self.parameters()))

    module, config = Own(), make_config()
    before = {name: (id(p), p.clone()) for name, p in module.named_parameters()}
    found, said = states_of(module, None, describe_units(module, config, Precision.fp32), config)
    assert found == states and said.startswith(why) and bool(said) == bool(why)
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in module.named_parameters())


@on_ranks(1)
def test_batch_taken_for_the_plan_changes_no_order(tmp_path: Path) -> None:
    """Losses are those of a run whose row was given, with shuffled data and a generator of its own."""
    losses = []
    for stage in ("auto", "zero0"):
        generator = torch.Generator().manual_seed(3)
        data = toys.loader(2, 12).dataset
        loader = torch.utils.data.DataLoader(data, 2, shuffle=True, generator=generator)
        strategy = ZeroStrategy(stage, offload="auto" if stage == "auto" else "none")
        module = toys.seeded(toys.Lit)
        toys.trainer(strategy, tmp_path).fit(module, loader)
        losses.append(module.losses)
    assert losses[0] == losses[1] and len(losses[0]) > 2


def rows(**settings: Any) -> list[str]:
    return [offload.name.name for _, offload in candidate_rows(make_config(**{"stage": "auto", **settings}))]


def test_rows_in_files_are_candidates_if_there_is_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And settings take rows out, or say so."""
    monkeypatch.delenv("LIGHTNING_ZERO_NVME_PATH", raising=False)
    assert set(rows(offload="auto")) == {"none", "optimizer_cpu", "cpu", "auto"}
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", str(tmp_path))
    assert len(rows(offload="auto")) == len(rows(offload="auto", prefetch_bytes=1)) == 16
    assert rows(offload="none") == ["none"] * 4
    in_node = rows(stage="zero3", offload="auto", comm={"hybrid_shard": "node_backward"})
    assert set(in_node) == {"none", "optimizer_cpu", "optimizer_nvme", "auto"}
    with pytest.raises(ConfigError, match=r"zero\.compile\.arguments.*at stage 3"):
        rows(compile={"name": "blocks", "arguments": {"mode": "reduce-overhead"}})


def test_stage_auto_is_refused_outside_of_the_strategy() -> None:
    with pytest.raises(ConfigError, match="got auto, which ZeroStrategy decides"):
        lightning_zero.shard(torch.nn.Linear(2, 2), stage="auto")
    with pytest.raises(ConfigError, match="restage: expected zero0"):
        ZeroStrategy("zero1").restage(stage="auto")
