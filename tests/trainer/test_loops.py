"""Trainer entry points, in any order and repeatedly, give what they give under DDP."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.planning.placement import logical_collectives
from tests.harness import on_ranks
from tests.trainer.toys import (
    ALL_STAGES,
    SAMPLES,
    SCHEDULERS,
    STAGES,
    Lit,
    Run,
    Samples,
    assert_changed,
    assert_same,
    assert_weights,
    fit,
    loader,
    record,
    seeded,
    some_of,
    trainer,
    weights,
)

pytestmark = pytest.mark.full

SOME = ("zero1", "zero3")  # the stages that differ most in what Lightning sees


def same_as_ddp(body: Callable[[str], Run], stages: tuple[str, ...] = SOME, **how: Any) -> None:
    """``body(strategy)`` gives what it gives under DDP."""
    expected = body("ddp")
    for stage in stages:
        assert_same(body(stage), expected, what=stage, **how)


# -- fit --------------------------------------------------------------------------------------------------------------

FITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation with a short last window": {"accumulate_grad_batches": 5},
    "clipping by norm": {"gradient_clip_val": 0.3},
    "clipping by value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "clipping and accumulation": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3},
    "evaluation between steps": {"val_check_interval": 2},
    "sanity check": {"num_sanity_val_steps": 2},
    "limits": {"max_steps": 5, "max_epochs": -1, "limit_val_batches": 1},
}


@pytest.mark.smoke
@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("case", some_of(FITS, "clipping and accumulation", "evaluation between steps", "limits"))
def test_fit(case: str, tmp_path: Path) -> None:
    same_as_ddp(lambda strategy: fit(strategy, tmp_path, **FITS[case]), STAGES)


@on_ranks(3)
def test_fit_on_three_ranks(tmp_path: Path) -> None:
    same_as_ddp(lambda s: fit(s, tmp_path, accumulate_grad_batches=3, gradient_clip_val=0.3), ALL_STAGES)


@on_ranks(1)
def test_fit_on_one_rank(tmp_path: Path) -> None:
    same_as_ddp(lambda s: fit(s, tmp_path, accumulate_grad_batches=3, gradient_clip_val=0.3), STAGES)


@on_ranks(2)
def test_fit_with_adamw(tmp_path: Path) -> None:
    same_as_ddp(lambda s: fit(s, tmp_path, seeded(lambda: Lit(optimizer="adamw")), gradient_clip_val=0.5))


@on_ranks(2)
def test_training_is_the_same_with_and_without_evaluation_between_steps(tmp_path: Path) -> None:
    for stage in ("zero1", "zero3"):
        without = fit(stage, tmp_path, limit_val_batches=0)
        between = fit(stage, tmp_path, val_check_interval=1)
        assert between.losses == without.losses
        assert_weights(between.weights, without.weights, tolerance=0, what=stage)


@pytest.mark.sample
@on_ranks(2)
def test_stages_agree_to_the_bit(tmp_path: Path) -> None:
    runs = [fit(stage, tmp_path, seeded(lambda: Lit(optimizer="adamw")), gradient_clip_val=0.5) for stage in ALL_STAGES]
    for stage, run in zip(ALL_STAGES[1:], runs[1:], strict=True):
        assert_same(run, runs[0], tolerance=0, what=stage)


@on_ranks(2)
@pytest.mark.parametrize("windows", [1, 3])
def test_accumulation_costs_the_collectives_of_the_architectures_table(windows: int, tmp_path: Path) -> None:
    for stage in STAGES:
        settings: dict[str, Any] = {"accumulate_grad_batches": windows, "limit_val_batches": 0, "max_epochs": 2}
        engine = fit(stage, tmp_path, **settings).trainer.strategy.engine  # type: ignore[attr-defined]
        steps = 12 // windows
        for unit in engine.units:
            for bucket in unit.buckets:
                expected = logical_collectives(bucket.plan.row, windows, stays_gathered=unit.index in (0, 2))
                kinds = ("reduce_scatter", "all_reduce")
                found = {kind: engine.comm.counts[kind, bucket.label] / steps for kind in kinds}
                assert found == {kind: expected[kind] for kind in kinds}, (stage, bucket.label)


@on_ranks(2)
@pytest.mark.parametrize("scheduler", some_of(sorted(set(SCHEDULERS) - {"none"}), "onecycle", "plateau by step"))
def test_schedulers(scheduler: str, tmp_path: Path) -> None:
    def body(strategy: str) -> tuple[Run, list[float]]:
        run = fit(strategy, tmp_path, seeded(lambda: Lit(scheduler=scheduler)), max_epochs=3)
        return run, run.module.rates

    expected, rates = body("ddp")
    assert len(set(rates)) > 1
    for stage in ("zero1", "zero3"):
        found, found_rates = body(stage)
        assert found_rates == rates
        assert_same(found, expected, what=stage)


@on_ranks(2)
def test_scheduled_accumulation(tmp_path: Path) -> None:
    def body(strategy: str) -> Run:
        callback = GradientAccumulationScheduler({0: 3, 1: 1, 2: 4})
        return fit(strategy, tmp_path, max_epochs=3, callbacks=[callback])

    same_as_ddp(body)


# -- other entry points -----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_any_order_and_repeatedly(tmp_path: Path) -> None:
    """One Trainer and one module; every entry point before and after every other."""

    def body(strategy: str) -> Run:
        module = seeded(Lit)
        of = trainer(strategy, tmp_path, max_epochs=1)
        data = loader()
        results: list[float] = []

        def evaluate() -> None:
            results.extend(row["val"] for row in of.validate(module, data, verbose=False))
            results.extend(row["val"] for row in of.test(module, data, verbose=False))
            predictions = of.predict(module, data)
            results.extend(float(p.sum()) for p in predictions)  # type: ignore[union-attr]

        evaluate()
        of.fit(module, data)
        evaluate()
        of.fit_loop.max_epochs = 2
        of.fit(module, data, data)
        evaluate()
        evaluate()
        run = record(of, module)
        run.metrics = {str(i): value for i, value in enumerate(results)}
        return run

    same_as_ddp(body)


@on_ranks(2)
@pytest.mark.parametrize("second", ["zero3", "zero1", "zero0"])
def test_two_trainers_on_one_module(second: str, tmp_path: Path) -> None:
    def body(first: str, then: str) -> Run:
        module = seeded(Lit)
        fit(first, tmp_path, module)
        trainer(then, tmp_path).test(module, loader(), verbose=False)
        return fit(then, tmp_path, module)

    assert_same(body("zero3", second), body("ddp", "ddp"))


@pytest.mark.sample
@on_ranks(2)
def test_two_modules_alternate_in_one_process(tmp_path: Path) -> None:
    def body(strategy: str) -> Run:
        a, b = seeded(Lit), seeded(lambda: Lit(width=6), seed=5)
        for _ in range(2):
            fit(strategy, tmp_path, a, max_epochs=1)
            last = fit(strategy, tmp_path, b, max_epochs=1)
        return last

    assert_same(body("zero3"), body("ddp"))


@on_ranks(2)
def test_a_module_that_grew_between_fits_is_sharded_again(tmp_path: Path) -> None:
    def body(strategy: str) -> Run:
        module = seeded(Lit)
        fit(strategy, tmp_path, module)
        module.head = seeded(lambda: nn.Linear(8, 1), seed=9)
        return fit(strategy, tmp_path, module)

    assert_same(body("zero3"), body("ddp"))


@on_ranks(2)
def test_a_sharded_module_is_refused_by_another_strategy_until_it_is_released(tmp_path: Path) -> None:
    module = seeded(Lit)
    of = fit(ZeroStrategy("zero3", gather_after_fit=False), tmp_path, module).trainer
    with pytest.raises(RuntimeError, match="sharded"):
        fit("ddp", tmp_path, module)
    of.strategy.connect(module)
    of.strategy.engine.release()  # type: ignore[attr-defined]
    fit("ddp", tmp_path, module)


@on_ranks(2)
def test_ranks_with_different_seeds_agree_after_the_start(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    for stage in ("zero0", "zero3"):
        module = seeded(Lit, seed=3 + rank)
        run = fit(stage, tmp_path, module, limit_val_batches=0)
        assert_same(run, fit("ddp", tmp_path, seeded(Lit, seed=3 + rank), limit_val_batches=0), what=stage)
        with lightning_zero.gather(module):
            mine = torch.cat([p.detach().flatten() for p in module.parameters()])
        theirs = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(theirs, mine)
        assert torch.equal(theirs[0], theirs[1])


@on_ranks(2)
def test_lightning_puts_a_distributed_sampler_in(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    of = trainer("zero3", tmp_path, max_epochs=1, use_distributed_sampler=True)
    of.fit(seeded(Counting), DataLoader(Samples(), batch_size=2))
    assert sum(seen) == SAMPLES // 2


class NothingToLearn(Lit):
    """One rank's batches give no parameter a gradient in every other step; it does not even call its layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 and dist.is_initialized() and dist.get_rank() == 1:
            return torch.zeros((), requires_grad=True)
        return self.loss(batch)


@pytest.mark.sample
@on_ranks(2)
def test_a_rank_without_any_gradient(tmp_path: Path) -> None:
    """It steps with the others, on half of the other rank's gradient."""
    runs = [
        fit(stage, tmp_path, seeded(NothingToLearn), limit_val_batches=0, gradient_clip_val=0.4) for stage in STAGES
    ]
    for stage, run in zip(STAGES[1:], runs[1:], strict=True):
        assert_weights(run.weights, runs[0].weights, what=stage)


@on_ranks(2)
def test_nothing_of_a_forgotten_run_lives_on(tmp_path: Path) -> None:
    threads = []
    for _ in range(6):
        run = fit("zero3", tmp_path, max_epochs=1)
        engine = run.trainer.strategy.engine  # type: ignore[attr-defined]
        left = [weakref.ref(engine), weakref.ref(run.module), *(weakref.ref(b) for b in engine.buckets)]
        left += [weakref.ref(info.param) for u in engine.units for info in u.infos]
        del run, engine
        gc.collect()
        gc.collect()  # what C++ held in the first round
        assert not any(ref() is not None for ref in left)
        threads.append(_threads())
    # Process groups are used again. Threads that have done their work (a backward's, say) may take a while to end.
    deadline = time.monotonic() + 30
    while (left := _threads()) > threads[2] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left <= threads[2], (threads, left)


def _threads() -> int:
    """How many threads this process has, those of C++ among them."""
    return len(os.listdir("/proc/self/task"))


class NoOptimizer(Lit):
    def configure_optimizers(self) -> None:
        return None


@on_ranks(2)
def test_no_optimizer_at_all(tmp_path: Path) -> None:
    for stage in ("zero1", "zero3"):
        module = seeded(NoOptimizer)
        before = {k: v.clone() for k, v in module.state_dict().items()}
        run = fit(stage, tmp_path, module)
        assert_weights(run.weights, before, tolerance=0)
        run.trainer.save_checkpoint(tmp_path / f"{stage}.ckpt")
        fit(stage, tmp_path, seeded(NoOptimizer), max_epochs=3, ckpt_path=tmp_path / f"{stage}.ckpt")


class InferenceMode(Lit):
    """Enters inference mode itself, as Lightning does for every strategy on NCCL."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode():
            loss = self.loss(batch).item()
        self.log("val", loss, sync_dist=True)


@on_ranks(2)
def test_inference_mode_between_steps(tmp_path: Path) -> None:
    same_as_ddp(lambda s: fit(s, tmp_path, seeded(InferenceMode), val_check_interval=2, num_sanity_val_steps=2))


@on_ranks(2)
def test_a_whole_run_under_inference_mode_before_training(tmp_path: Path) -> None:
    def body(strategy: str) -> Run:
        module = seeded(Lit)
        of = trainer(strategy, tmp_path)
        with torch.inference_mode():
            of.validate(module, loader(), verbose=False)
        of.fit(module, loader(), loader())
        return record(of, module)

    expected = fit("ddp", tmp_path)
    for stage in ("zero1", "zero3"):
        found = body(stage)
        assert_weights(found.weights, expected.weights, what=stage)


# -- configure_model --------------------------------------------------------------------------------------------------


class Late(Lit):
    """Builds its layers in configure_model."""

    on: str = "cpu"

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks, self.head

    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        pl.seed_everything(3, verbose=False)
        with torch.device(self.on):
            built = Lit()
        self.first, self.blocks, self.head = built.first, built.blocks, built.head


class LateOnMeta(Late):
    on = "meta"


@on_ranks(2)
def test_configure_model(tmp_path: Path) -> None:
    def body(strategy: str) -> Run:
        module = seeded(Late)
        of = trainer(strategy, tmp_path)
        of.validate(module, loader(), verbose=False)
        of.fit(module, loader(), loader())
        return record(of, module)

    same_as_ddp(body)


@pytest.mark.sample
@on_ranks(2)
def test_configure_model_on_meta(tmp_path: Path) -> None:
    """Other initial values than on the host, but the same at all stages, finite, and they learn."""
    runs = []
    for stage in STAGES:
        module = seeded(LateOnMeta)
        of = trainer(stage, tmp_path, max_epochs=3)
        of.validate(module, loader(), verbose=False)
        before = weights(of)
        assert all(torch.isfinite(value).all() for value in before.values())
        of.fit(module, loader(), loader())
        runs.append(record(of, module))
        assert_changed(before, runs[-1].weights)
        epoch = len(runs[-1].losses) // 3
        assert sum(runs[-1].losses[-epoch:]) < sum(runs[-1].losses[:epoch])
    for run in runs[1:]:
        assert_same(run, runs[0])


@on_ranks(2)
def test_weights_of_a_checkpoint_reach_a_module_on_meta(tmp_path: Path) -> None:
    saved = fit("zero1", tmp_path)
    saved.trainer.save_checkpoint(tmp_path / "some.ckpt")
    of = trainer("zero3", tmp_path)
    of.validate(seeded(LateOnMeta), loader(), ckpt_path=tmp_path / "some.ckpt", verbose=False)
    assert_weights(weights(of), saved.weights, tolerance=0)


@on_ranks(2)
def test_init_module_builds_on_meta(tmp_path: Path) -> None:
    of = trainer("zero3", tmp_path, max_epochs=1)
    with of.init_module(empty_init=True):
        module = Lit()
    assert all(p.is_meta for p in module.parameters())
    of.fit(module, loader())
    assert all(torch.isfinite(value).all() for value in weights(of).values())


# -- hooks ------------------------------------------------------------------------------------------------------------


class Watching(Lit):
    """Looks at gradients and parameters where users do."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.seen: list[float] = []

    def _norm(self) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        assert len(grads) == len(list(self.parameters()))
        if isinstance(self.trainer.strategy, ZeroStrategy):
            norm = lightning_zero.grad_norm(self)
        else:
            norm = torch.nn.utils.get_total_norm(grads)
        self.norms.append(float(norm))

    def on_after_backward(self) -> None:
        if not self.trainer.fit_loop._should_accumulate():  # inside a window a norm is nobody's: DDP's is a rank's own
            self._norm()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._norm()

    def _look(self) -> None:
        if isinstance(self.trainer.strategy, ZeroStrategy):
            with lightning_zero.gather(self):
                self.seen.append(sum(float(p.detach().abs().sum()) for p in self.parameters()))
        else:
            self.seen.append(sum(float(p.detach().abs().sum()) for p in self.parameters()))

    def on_train_batch_start(self, *_: Any) -> None:
        self._look()

    def on_train_batch_end(self, *_: Any) -> None:
        self._look()

    def on_validation_epoch_end(self) -> None:
        self._look()

    def on_train_epoch_end(self) -> None:
        self._look()


@on_ranks(2)
@pytest.mark.parametrize("windows", [1, 3])
def test_hooks_find_finished_gradients_and_true_parameters(windows: int, tmp_path: Path) -> None:
    def body(strategy: str) -> Run:
        run = fit(strategy, tmp_path, seeded(Watching), accumulate_grad_batches=windows)
        run.metrics = {str(i): value for i, value in enumerate(run.module.norms + run.module.seen)}
        return run

    same_as_ddp(body, STAGES)


class ClippingInHook(Lit):
    """Clips in a hook, with another limit for the head."""

    def _clip(self, max_norm: float) -> None:
        ours = isinstance(self.trainer.strategy, ZeroStrategy)
        clip = lightning_zero.clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_
        clip(self.blocks.parameters(), max_norm)
        clip(self.head.parameters(), max_norm / 2)


class ClippingBeforeStep(ClippingInHook):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._clip(0.2)


class ConfiguringClipping(ClippingInHook):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        self._clip(0.2)
        self.clip_gradients(optimizer, gradient_clip_val=0.25, gradient_clip_algorithm="norm")


@on_ranks(2)
@pytest.mark.parametrize("kind", [ClippingBeforeStep, ConfiguringClipping])
def test_clipping_in_hooks(kind: type[Lit], tmp_path: Path) -> None:
    same_as_ddp(lambda s: fit(s, tmp_path, seeded(kind)))


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_module_goes_to_torchscript_and_into_a_pickle_after_fit(stage: str, tmp_path: Path) -> None:
    class Small(Lit):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.first(x))
            return out

    module = fit(stage, tmp_path, seeded(Small), max_steps=2).module
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    with lightning_zero.gather(module):
        expected = module(x)
        scripted = module.to_torchscript(tmp_path / f"script{dist.get_rank()}.pt")
        traced = module.to_torchscript(method="trace", example_inputs=x)
        assert torch.equal(scripted(x), expected) and torch.equal(traced(x), expected)
        torch.save(module.first, tmp_path / f"part{dist.get_rank()}.pt")
    loaded = torch.jit.load(tmp_path / f"script{dist.get_rank()}.pt")
    assert torch.equal(loaded(x), expected)
    assert torch.load(tmp_path / f"part{dist.get_rank()}.pt", weights_only=False)(x).shape == (2, 8)
