"""``strategy.restage``: a run goes on at another stage or with another offload row, and its numbers are the same."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, Callback, EMAWeightAveraging, ModelCheckpoint
from lightning_utilities.core import rank_zero
from torch import Tensor

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError
from lightning_zero.engine import engine_of
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.planning.memory import Moment, planned_bytes
from lightning_zero.trainer.memory.held_bytes import held_bytes, plan_of, state_tensors
from tests.engine.support import Model, language_loss, tokens
from tests.engine.test_restage import assert_equal
from tests.harness import on_ranks
from tests.trainer.toys import Lit, Odd, Run, fit, loader, odd, optimizer_states, record, seeded, trainer

pytestmark = pytest.mark.full


class At(Callback):
    """Restages in a hook, each time the hook is called for the steps that are named."""

    def __init__(self, hook: str, ways: dict[int, dict[str, Any]]) -> None:
        self.ways = dict(ways)
        self.done: list[int] = []
        setattr(self, hook, self._restage)

    def _restage(self, of: pl.Trainer, *_: Any, **__: Any) -> None:
        if (way := self.ways.pop(of.global_step, None)) is not None:
            of.strategy.restage(**way)
            self.done.append(of.global_step)
            check_held(of)


def check_held(of: pl.Trainer) -> None:
    engine = of.strategy.engine
    engine.passes.wait_for_all()
    gone = not any(bucket.grad_store.is_there for bucket in engine.buckets)
    moment = Moment.cleared if gone else Moment.reduced
    expected = planned_bytes(plan_of(engine), engine.comm.rank, state_tensors=state_tensors(engine), moment=moment)
    held = held_bytes(engine)
    assert held == expected


def assert_runs_equal(found: Run, expected: Run) -> None:
    assert found.losses == expected.losses and found.metrics == expected.metrics
    assert_equal(found.weights, expected.weights)
    assert_equal(optimizer_states(found.trainer), optimizer_states(expected.trainer))


@functools.cache
def expected_of(kind: str, **settings: Any) -> Run:
    """A run that is never restaged. (Workers are used again, and so is this.)"""
    module, callbacks = KINDS[kind]
    return fit(ZeroStrategy("zero3"), tempfile.mkdtemp(), seeded(module), callbacks=callbacks(), **settings)


# -- moments ----------------------------------------------------------------------------------------------------------


MOMENTS = {  # at which steps the hook is called, in 2 epochs of 6 steps
    "on_train_batch_end": (2, 9),
    "on_train_batch_start": (2, 9),
    "on_train_epoch_end": (6, 12),
    "on_train_epoch_start": (0, 6),
    "on_validation_end": (6, 12),
    "on_train_start": (0, 0),
}


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("hook", MOMENTS)
def test_restaged_run_is_the_one_that_was_not(hook: str, tmp_path: Path) -> None:
    """There and back, with a scheduler and a loss scale; the objects of before are those of after."""
    precision: Any = "16-mixed"
    first, second = MOMENTS[hook]
    expected = expected_of("odd", precision=precision)
    ways = {first: {"stage": "zero1"}, second: {"stage": 3, "offload": "cpu"}}
    at = At(hook, ways)
    held: list[Any] = []

    class Objects(Callback):
        def on_train_start(self, of: pl.Trainer, *_: Any) -> None:
            held.extend([of.strategy.engine, *of.optimizers, of.lr_scheduler_configs[0].scheduler.optimizer])

    found = fit(ZeroStrategy("zero3"), tmp_path, odd(), precision=precision, callbacks=[Objects(), at])
    assert at.done == list(dict.fromkeys((first, second)))
    assert_runs_equal(found, expected)
    of = found.trainer
    now = [of.strategy.engine, *of.optimizers, of.lr_scheduler_configs[0].scheduler.optimizer]
    assert all(one is other for one, other in zip(held, now, strict=True))
    assert of.precision_plugin.state_dict() == expected.trainer.precision_plugin.state_dict()


@on_ranks(1, 2)
def test_restage_between_two_fits_and_before_the_first_keeps_the_engine(tmp_path: Path) -> None:
    def body(change: bool) -> Run:
        strategy, module = ZeroStrategy("zero2"), seeded(lambda: Lit(optimizer="adamw"))
        of = trainer(strategy, tmp_path, max_epochs=1)
        if change:
            strategy.restage("zero3", "optimizer_cpu")
            assert strategy.config.stage.name.name == "zero3"
        of.fit(module, loader())
        if change:
            engine = strategy.engine
            strategy.restage(stage=0, offload="none")
            assert strategy.engine is engine and not engine.buckets[0].reshards
            of.validate(module, loader(), verbose=False)
        of.fit_loop.max_epochs = 2
        of.fit(module, loader())
        assert not change or strategy.engine is engine  # it was not made anew
        return record(of, module)

    found, expected = body(True), body(False)
    found.metrics = expected.metrics = {}
    assert_runs_equal(found, expected)


@on_ranks(2)
@pytest.mark.parametrize(("before", "after"), [("zero2", "zero3"), ("zero3", "zero0"), ("zero1", "zero0")])
def test_gradients_of_an_accumulation_window_are_kept(before: str, after: str, tmp_path: Path) -> None:
    """Gradients of the window are kept: those that are reduced, and those that wait for it."""
    ways: dict[str, Any] = {}

    class Between(Callback):
        def on_train_batch_end(self, of: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if of.global_step == 1 and batch_idx == 4:  # the second of three batches of a window
                of.strategy.restage(after)
                ways["done"] = True

    settings = {"accumulate_grad_batches": 3}
    expected = fit(ZeroStrategy(before), tmp_path, **settings)
    found = fit(ZeroStrategy(before), tmp_path, callbacks=[Between()], **settings)
    assert ways["done"]
    same = {before, after} in ({"zero0", "zero1"}, {"zero2", "zero3"})
    tolerance = 0.0 if same else 1e-6  # sums of a window are rounded in another order
    torch.testing.assert_close(found.losses, expected.losses, rtol=tolerance, atol=tolerance)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=tolerance, atol=tolerance)


# -- what else holds shards, or is held by them -----------------------------------------------------------------------


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer, train_bn=False)


KINDS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], list[Callback]]]] = {
    "plain": (Lit, list),
    "odd": (Odd, list),
    "ema": (Lit, lambda: [EMAWeightAveraging(decay=0.8)]),
    "fine-tuning": (Lit, lambda: [Thaw()]),
}


@on_ranks(2)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start"])
@pytest.mark.parametrize("name", ["ema", "fine-tuning"])
def test_averages_and_thawed_parameters_move_with_their_shards(name: str, hook: str, tmp_path: Path) -> None:
    """Averages move with the masters, also while they stand in for them in a validation."""
    expected = expected_of(name, precision="bf16-mixed", max_epochs=3)
    ways: dict[int, dict[str, Any]] = {6: {"stage": 0}, 12: {"stage": 2, "offload": "optimizer_cpu"}}
    at = At(hook, ways)
    callbacks = [*KINDS[name][1](), at]
    found = fit(ZeroStrategy("zero3"), tmp_path, callbacks=callbacks, precision="bf16-mixed", max_epochs=3)
    assert len(at.done) == 2
    assert_runs_equal(found, expected)


@on_ranks(3)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_checkpoint_of_a_restaged_run_loads(form: str, tmp_path: Path) -> None:
    def run(epochs: int, *callbacks: Callback, **settings: Any) -> Run:
        module = seeded(lambda: Lit(optimizer="adamw"), seed=settings.pop("seed", 3))
        strategy = ZeroStrategy("zero2", checkpoint=form)
        return fit(strategy, tmp_path, module, max_epochs=epochs, callbacks=list(callbacks), **settings)

    whole = run(3)
    at = At("on_train_batch_end", {2: {"stage": 3, "offload": "cpu"}, 6: {"stage": 1, "offload": "none"}})
    saves = ModelCheckpoint(tmp_path, filename="at{step}", every_n_train_steps=4, save_top_k=-1)
    run(2, at, saves, enable_checkpointing=True)
    for step in (4, 8)[form == "full" :]:  # ends of epochs
        path = tmp_path / f"atstep={step}.ckpt"
        resumed = run(3, ckpt_path=str(path), seed=5)
        assert resumed.losses == whole.losses[-len(resumed.losses) :]
        assert_equal(resumed.weights, whole.weights)
        assert_equal(optimizer_states(resumed.trainer), optimizer_states(whole.trainer))


@on_ranks(4)
@pytest.mark.parametrize("stage", ["zero0", "zero1"])
def test_ranks_of_a_node_share_shards_before_and_after(stage: str) -> None:
    def losses(change: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch.manual_seed(3)
        node = f"node{dist.get_rank() // 2}"
        model = Model()
        engine = lightning_zero.shard(model, stage=3, comm={"hybrid_shard": "node"}, device="cpu", node=node)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine.add_optimizer(optimizer)
        found = []
        for step in range(6):
            if change and step == 2:
                engine.restage(stage)
            if change and step == 4:
                engine.restage("zero3", "optimizer_cpu")
            loss = language_loss(model, tokens(step))
            engine.passes.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        assert engine.comm.shard_size == 2
        state = engine.state_dict(only_rank_0=False)
        engine.release()
        return found, state

    assert_equal(losses(True), losses(False))


# -- what it says -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_restage_says_what_it_has_done(tmp_path: Path) -> None:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            lines.append(entry.getMessage())

    class Loud(Callback):
        def on_train_epoch_end(self, of: pl.Trainer, *_: Any) -> None:
            rank_zero.log.addHandler(handler)  # that of the package which was imported last
            rank_zero.log.setLevel(logging.INFO)
            of.strategy.restage("zero3", "cpu")
            of.strategy.restage("zero3", "cpu")  # nothing to do, and nothing to say
            rank_zero.log.removeHandler(handler)

    handler = Lines()
    fit(ZeroStrategy("zero2"), tmp_path, callbacks=[Loud()], max_epochs=1)
    assert lines == (["restaged from zero2 to zero3, offload none to cpu"] if dist.get_rank() == 0 else [])


@on_ranks(2)
def test_folder_of_a_row_comes_back_with_it(tmp_path: Path) -> None:
    offload = {"name": "nvme", "nvme_path": str(tmp_path)}
    of = trainer(ZeroStrategy("zero3", offload=offload), tmp_path)
    strategy: Any = of.strategy
    of.fit(seeded(Lit), loader())
    assert list(tmp_path.rglob("rank*.bin"))
    strategy.restage(offload="cpu")
    assert strategy.config.offload.nvme_path is None
    strategy.barrier()
    assert not list(tmp_path.rglob("rank*.bin"))
    strategy.barrier()
    strategy.restage(offload="nvme")
    assert strategy.config.offload.nvme_path == str(tmp_path)
    assert list(tmp_path.rglob("rank*.bin"))


# -- refusals ---------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such stage": ({"stage": "zero4"}, "zero/stage: expected one of zero0"),
    "no such row": ({"offload": "gpu"}, "zero/offload: expected one of none"),
    "rows that do not go together": ({"stage": 2, "offload": "cpu"}, "parameters can be offloaded at stage 3 only"),
    "neither": ({}, "expected another stage, another offload"),
    "no folder": ({"offload": "nvme"}, "nvme_path: expected a folder"),
    "a folder that is not there": ({"offload": {"name": "nvme", "nvme_path": "/nowhere"}}, "/nowhere"),
    "no such setting": ({"offload": {"name": "cpu", "disk": 3}}, "zero.offload.disk: no such setting"),
    "no room": ({"offload": {"name": "cpu", "host_budget": 100}}, "zero.offload.host_budget: rank 0 needs"),
    "no room in files": (
        {"offload": {"name": "optimizer_nvme", "nvme_path": "TMP", "nvme_budget": 100}},
        "zero.offload.nvme_budget: rank 0 needs",
    ),
}


def refused_then_equal(tmp_path: Path, hook: str, act: Callable[[pl.Trainer], None]) -> None:
    """``act`` in a hook raises on all ranks, and the run goes on as if nothing had been asked."""
    seen: list[int] = []

    class Tries(Callback):
        def _act(self, of: pl.Trainer, *_: Any, **__: Any) -> None:
            if of.global_step == 3 and not seen:
                seen.append(1)
                strategy: Any = of.strategy
                config, engine = strategy.config, strategy.engine
                before = engine.config, engine.tiers
                act(of)
                assert strategy.config == config
                assert engine.config is before[0] and engine.tiers is before[1]

    tries = Tries()
    setattr(tries, hook, tries._act)
    found = fit(ZeroStrategy("zero3"), tmp_path, callbacks=[tries])
    assert seen
    assert_runs_equal(found, expected_of("plain"))
    assert not list(tmp_path.rglob("*.lock"))


@pytest.mark.sample
@on_ranks(2)
def test_bad_settings_and_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    def act(of: pl.Trainer) -> None:
        strategy: Any = of.strategy
        for way, message in BAD.values():
            offload = way.get("offload")
            if isinstance(offload, dict) and offload.get("nvme_path") == "TMP":
                way = {"offload": offload | {"nvme_path": str(tmp_path)}}
            with pytest.raises(ConfigError, match=message):
                strategy.restage(**way)
        stages = {"zero2": "zero1 with offload none on rank 0 and .*zero2.* on rank 1", "zero9": "zero/stage.*zero9"}
        for stage, message in stages.items():
            with pytest.raises(ConfigError, match=message):
                strategy.restage(("zero1", stage)[of.global_rank])

    refused_then_equal(tmp_path, "on_train_batch_end", act)


@on_ranks(2)
@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_before_backward"])
def test_restage_between_forward_and_backward_is_refused(hook: str, tmp_path: Path) -> None:
    def act(of: pl.Trainer) -> None:
        with pytest.raises(ConfigError, match="between steps, got a call between a forward and its backward"):
            of.strategy.restage("zero1")

    refused_then_equal(tmp_path, hook, act)


class Inside(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with pytest.raises(ConfigError, match="got a call inside a step"):
            self.trainer.strategy.restage("zero1")
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: self.refused("inside a backward"))
        return loss

    def refused(self, where: str) -> None:
        with pytest.raises(ConfigError, match=f"got a call {where}"):
            self.trainer.strategy.restage("zero1")


@on_ranks(2)
def test_restage_in_a_step_or_a_backward_is_refused(tmp_path: Path) -> None:
    assert fit(ZeroStrategy("zero3"), tmp_path, seeded(Inside)).losses == expected_of("plain").losses


@on_ranks(2)
def test_restage_inside_gather_or_a_save_is_refused(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_save_checkpoint(self, of: pl.Trainer, *_: Any) -> None:
            with pytest.raises(ConfigError, match="inside of trainer.save_checkpoint"):
                of.strategy.restage("zero1")

    def act(of: pl.Trainer) -> None:
        with (
            lightning_zero.gather(of.lightning_module),
            pytest.raises(ConfigError, match=r"outside of gather\(\), got a call inside"),
        ):
            of.strategy.restage("zero1")
        saves = Saves()
        of.callbacks.append(saves)
        of.save_checkpoint(tmp_path / "a.ckpt")
        of.callbacks.remove(saves)

    refused_then_equal(tmp_path, "on_train_batch_end", act)


# -- a failure in the middle ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_failure_in_the_middle_of_a_restage_ends_all_use(tmp_path: Path) -> None:
    """One rank has no memory for the third bucket: all ranks raise, and so does all that follows."""
    of = trainer(ZeroStrategy("zero3"), tmp_path)
    module = seeded(Lit)
    of.fit(module, loader())
    strategy: Any = of.strategy
    engine = strategy.engine
    original, calls = Bucket.rest_as, []

    def failing(self: Bucket, *args: Any, **kwargs: Any) -> None:
        calls.append(self)
        if len(calls) == 3 and dist.get_rank() == 1:
            raise MemoryError("no more")
        original(self, *args, **kwargs)

    Bucket.rest_as = failing  # type: ignore[method-assign]
    try:
        with pytest.raises((MemoryError, RuntimeError), match="no more"):
            strategy.restage("zero1")
    finally:
        Bucket.rest_as = original  # type: ignore[method-assign]
    assert len(calls) == 3
    for use in (
        lambda: engine.state_dict(),
        lambda: module(torch.zeros(2, 4)),
        lambda: of.optimizers[0].step(),
        lambda: strategy.restage("zero2"),
        lambda: of.save_checkpoint(tmp_path / "wrong.ckpt"),
        lambda: trainer(ZeroStrategy("zero3"), tmp_path).fit(module, loader()),
    ):
        with pytest.raises(RuntimeError, match="was being restaged when this was raised: .*no more"):
            use()
    assert not (tmp_path / "wrong.ckpt").exists()
    assert engine_of(module) is engine
