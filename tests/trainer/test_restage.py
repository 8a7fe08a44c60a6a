"""``strategy.restage``: a run goes on at another stage or with another offload row, and its numbers are the same."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from torch import Tensor

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.engine import engine_of
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.settings import ConfigError
from tests.engine.support import Model, Sharded, assert_equal, language_work
from tests.harness import on_ranks
from tests.trainer import toys
from tests.trainer.test_checkpoints import Thaw, TrainsHead
from tests.trainer.toys import At, Lit, Odd, Run, fit, loader, optimizer_states, same, seeded, trainer

pytestmark = pytest.mark.full


def restage(stage: int | str | None = None, offload: Any = None) -> Callable[[pl.Trainer], None]:
    return lambda of: of.strategy.restage(stage, offload)


def assert_runs_equal(found: Run, expected: Run) -> None:
    assert found.losses == expected.losses and found.metrics == expected.metrics
    assert same(found.weights, expected.weights)
    assert same(optimizer_states(found.trainer), optimizer_states(expected.trainer))


@functools.cache
def expected_of(kind: str, **settings: Any) -> Run:
    """A run that is never restaged. (Workers are used again, and so is this.)"""
    module, callbacks = KINDS[kind]
    return fit(ZeroStrategy("zero3"), tempfile.mkdtemp(), seeded(module), callbacks=callbacks(), **settings)


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
    first, second = MOMENTS[hook]
    at = At(hook, {first: restage("zero1"), second: restage(3, "cpu")})
    objects: list[Any] = []

    def keep(of: Any) -> None:
        objects.append([of.strategy.engine, *of.optimizers, of.lr_scheduler_configs[0].scheduler.optimizer])

    callbacks = [At("on_train_start", {0: keep}), at]
    expected = expected_of("odd", precision="16-mixed")
    found = fit(ZeroStrategy("zero3"), tmp_path, seeded(Odd), precision="16-mixed", callbacks=callbacks)
    assert not at.acts
    assert_runs_equal(found, expected)
    keep(found.trainer)
    assert all(one is other for one, other in zip(*objects, strict=True))
    assert found.trainer.precision_plugin.state_dict() == expected.trainer.precision_plugin.state_dict()


@on_ranks(1, 2)
def test_restage_between_two_fits_and_before_the_first_keeps_the_engine(tmp_path: Path) -> None:
    def body(change: bool) -> Run:
        strategy, module = ZeroStrategy("zero2"), seeded(lambda: Lit(optimizer="adamw"))
        of = trainer(strategy, tmp_path, max_epochs=1)
        if change:
            strategy.restage("zero3", "optimizer_cpu")
            assert strategy.config.stage.name.name == "zero3"
        of.fit(module, loader())
        engine = strategy.engine
        if change:
            strategy.restage(stage=0, offload="none")
            assert not engine.buckets[0].plan.reshards
            of.validate(module, loader(), verbose=False)
        of.fit_loop.max_epochs = 2
        of.fit(module, loader())
        assert strategy.engine is engine or not change
        return toys.record(of, module)

    found, expected = body(True), body(False)
    found.metrics = expected.metrics = {}
    assert_runs_equal(found, expected)


@on_ranks(2)
@pytest.mark.parametrize(
    ("before", "after", "near"), [("zero2", "zero3", 0.0), ("zero3", "zero0", 1e-6), ("zero1", "zero0", 0.0)]
)
def test_gradients_of_an_accumulation_window_are_kept(before: str, after: str, near: float, tmp_path: Path) -> None:
    """Those that are reduced, and those that wait for it. ``near``: sums may be rounded in another order."""
    done = []

    def between(of: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if of.global_step == 1 and batch_idx == 4:  # the second of three batches of a window
            done.append(of.strategy.restage(after))

    expected = fit(ZeroStrategy(before), tmp_path, accumulate_grad_batches=3)
    callbacks = [LambdaCallback(on_train_batch_end=between)]
    found = fit(ZeroStrategy(before), tmp_path, accumulate_grad_batches=3, callbacks=callbacks)
    assert done
    torch.testing.assert_close(found.losses, expected.losses, rtol=near, atol=near)
    toys.assert_weights(found.weights, expected.weights, tolerance=near)


KINDS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], list[Callback]]]] = {
    "plain": (Lit, list),
    "odd": (Odd, list),
    "ema": (Lit, lambda: [EMAWeightAveraging(decay=0.8)]),
    "fine-tuning": (TrainsHead, lambda: [Thaw()]),
}


@on_ranks(2)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start"])
@pytest.mark.parametrize("name", ["ema", "fine-tuning"])
def test_averages_and_thawed_parameters_move_with_their_shards(name: str, hook: str, tmp_path: Path) -> None:
    """Averages move with the masters, also while they stand in for them in a validation."""
    module, callbacks = KINDS[name]
    settings: dict[str, Any] = {"precision": "bf16-mixed", "max_epochs": 3}
    at = At(hook, {6: restage(0), 12: restage(2, "optimizer_cpu")})
    found = fit(ZeroStrategy("zero3"), tmp_path, seeded(module), callbacks=[*callbacks(), at], **settings)
    assert not at.acts
    assert_runs_equal(found, expected_of(name, **settings))


@on_ranks(3)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_checkpoint_of_a_restaged_run_loads(form: str, tmp_path: Path) -> None:
    def run(epochs: int, *callbacks: Callback, seed: int = 3, **settings: Any) -> Run:
        module = seeded(lambda: Lit(optimizer="adamw"), seed)
        strategy = ZeroStrategy("zero2", checkpoint=form)
        return fit(strategy, tmp_path, module, max_epochs=epochs, callbacks=list(callbacks), **settings)

    whole = run(3)
    at = At("on_train_batch_end", {2: restage(3, "cpu"), 6: restage(1, "none")})
    saves = ModelCheckpoint(tmp_path, filename="at{step}", every_n_train_steps=4, save_top_k=-1)
    run(2, at, saves, enable_checkpointing=True)
    for step in (4, 8)[form == "full" :]:  # ends of epochs
        resumed = run(3, ckpt_path=tmp_path / f"atstep={step}.ckpt", seed=5)
        toys.assert_goes_on(resumed, whole)
        assert_equal(optimizer_states(resumed.trainer), optimizer_states(whole.trainer))


@on_ranks(4)
@pytest.mark.parametrize("stage", ["zero0", "zero1"])
def test_ranks_of_a_node_share_shards_before_and_after(stage: str) -> None:
    def train(ways: dict[int, tuple[str, str]]) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch.manual_seed(3)
        node = f"node{dist.get_rank() // 2}"
        with Sharded(Model(), stage=3, hybrid_shard="node", node=node) as side:
            losses = []
            for step in range(6):
                if step in ways:
                    side.engine.restage(*ways[step])
                losses.append(language_work(side, step).detach())
                side.step()
                side.zero_grad()
            assert side.engine.comm.shard.size == 2
            return losses, side.engine.state_dict(only_rank_0=False)

    assert same(train({2: (stage, "none"), 4: ("zero3", "optimizer_cpu")}), train({}))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such stage": ({"stage": "zero4"}, "^stage: expected one of zero0"),
    "no such row": ({"offload": "gpu"}, "^offload: expected one of none"),
    "rows that do not go together": ({"stage": 2, "offload": "cpu"}, "parameters can be offloaded at stage 3 only"),
    "neither": ({}, "expected another stage, another offload"),
    "no folder": ({"offload": "nvme"}, r"^offload\['nvme_path'\]: expected a folder"),
    "a folder that is not there": ({"offload": {"name": "nvme", "nvme_path": "/nowhere"}}, "/nowhere"),
    "no such setting": ({"offload": {"name": "cpu", "disk": 3}}, r"^offload\['disk'\]: no such setting"),
    "no room": ({"offload": {"name": "cpu", "host_budget": 100}}, r"^offload\['host_budget'\]: rank 0 needs"),
}


def refused(message: str) -> Any:
    return pytest.raises(ConfigError, match=message)


def bad_settings(of: Any) -> None:
    for way, message in BAD.values():
        with refused(message):
            of.strategy.restage(**way)


def ranks_disagree(of: Any) -> None:
    stages = {"zero2": "zero1 with offload none on rank 0 and .*zero2.* on rank 1", "zero9": "stage: .*zero9"}
    for stage, message in stages.items():
        with refused(message):
            of.strategy.restage(("zero1", stage)[of.global_rank])


def between_a_forward_and_its_backward(of: Any) -> None:
    with refused("between steps, got a call between a forward and its backward"):
        of.strategy.restage("zero1")


def inside_gather(of: Any) -> None:
    with lightning_zero.gather(of.lightning_module), refused(r"outside of gather\(\), got a call inside"):
        of.strategy.restage("zero1")


def inside_a_save(of: Any) -> None:
    def on_save_checkpoint(*_: Any) -> None:
        with refused("inside of trainer.save_checkpoint"):
            of.strategy.restage("zero1")

    with mock.patch.object(of.lightning_module, "on_save_checkpoint", on_save_checkpoint):
        of.save_checkpoint(Path(of.default_root_dir) / "a.ckpt")


REFUSED: list[tuple[str, Callable[[Any], None]]] = [
    ("on_train_batch_end", bad_settings),
    ("on_train_batch_end", ranks_disagree),
    ("on_before_zero_grad", between_a_forward_and_its_backward),
    ("on_before_backward", between_a_forward_and_its_backward),
    ("on_train_batch_end", inside_gather),
    ("on_train_batch_end", inside_a_save),
]


class Inside(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.refused("inside a step")
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: self.refused("inside a backward"))
        return loss

    def refused(self, where: str) -> None:
        with refused(f"got a call {where}"):
            self.trainer.strategy.restage("zero1")


@pytest.mark.sample
@on_ranks(2)
def test_refused_restage_changes_nothing(tmp_path: Path) -> None:
    """On all ranks; and the run goes on as if nothing had been asked."""

    def tries(act: Callable[[Any], None], of: Any) -> None:
        strategy, engine = of.strategy, of.strategy.engine
        config, before, tiers = strategy.config, engine.config, engine.tiers
        act(of)
        assert strategy.config == config and engine.config is before and engine.tiers is tiers

    callbacks = [At(hook, {3: functools.partial(tries, act)}) for hook, act in REFUSED]
    found = fit(ZeroStrategy("zero3"), tmp_path, seeded(Inside), callbacks=callbacks)
    assert not any(at.acts for at in callbacks)
    assert_runs_equal(found, expected_of("plain"))
    assert not list(tmp_path.rglob("*.lock"))


@on_ranks(2)
def test_failure_in_the_middle_of_a_restage_ends_all_use(tmp_path: Path) -> None:
    """One rank has no memory for the third bucket: all ranks raise, and so does all that follows."""
    strategy: Any = ZeroStrategy("zero3")
    of, module = trainer(strategy, tmp_path), seeded(Lit)
    of.fit(module, loader())
    rest_as, calls = Bucket.rest_as, []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 3 and dist.get_rank() == 1:
            raise MemoryError("no more")
        rest_as(*args, **kwargs)

    with mock.patch.object(Bucket, "rest_as", failing), pytest.raises((MemoryError, RuntimeError), match="no more"):
        strategy.restage("zero1")
    assert len(calls) == 3
    for use in (
        lambda: strategy.engine.state_dict(),
        lambda: module(torch.zeros(2, 4)),
        lambda: of.optimizers[0].step(),
        lambda: strategy.restage("zero2"),
        lambda: of.save_checkpoint(tmp_path / "wrong.ckpt"),
        lambda: trainer(ZeroStrategy("zero3"), tmp_path).fit(module, loader()),
    ):
        with pytest.raises(RuntimeError, match="was being restaged when this was raised: .*no more"):
            use()
    assert not (tmp_path / "wrong.ckpt").exists()
    assert engine_of(module) is strategy.engine
