"""Runs of the Trainer: stages beside DDP, modules that are sharded or forgotten, and what is refused with a way out.

Lightning's features beside DDP are in ``tests/lightning_table``.
"""

from __future__ import annotations

import io
import pickle
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks as cb
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch._inductor.exc import InvalidCxxCompiler

from lightning_zero import ZeroStrategy
from lightning_zero.settings import ConfigError
from lightning_zero.trainer.loops import adapt_run
from tests.harness import on_ranks
from tests.models import Does
from tests.trainer import toys
from tests.trainer.test_checkpoints import saves_at_epoch
from tests.trainer.toys import ALL_STAGES, ByHand, Lit, assert_same, assert_weights, fit, loader, seeded, trainer


@pytest.mark.smoke
@pytest.mark.sample
@on_ranks(2, full=(1, 3))
def test_fit_with_clipping_accumulation_and_evaluations_equals_ddp(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3}
    settings |= {"val_check_interval": 2, "num_sanity_val_steps": 1, "limit_val_batches": 2}
    expected = fit("ddp", tmp_path, **settings)
    for stage in ALL_STAGES:
        assert_same(fit(stage, tmp_path, **settings), expected, what=stage)


@pytest.mark.full
@on_ranks(2)
def test_sharded_module_is_refused_by_another_strategy_until_it_is_released(tmp_path: Path) -> None:
    module = seeded(Lit)
    of = fit(ZeroStrategy("zero3", gather_after_fit=False), tmp_path, module).trainer
    with pytest.raises(RuntimeError, match="sharded"):
        fit("ddp", tmp_path, module)
    of.strategy.connect(module)
    of.strategy.engine.release()
    fit("ddp", tmp_path, module)


class AsksForDDP(Lit):
    """As scvi-tools does."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("asked", self.loss(batch), sync_dist=isinstance(self.trainer.strategy, DDPStrategy))


@on_ranks(2, full=(1,))
def test_alias_equals_ddp_where_code_asks_for_its_class(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": True}
    expected = fit("ddp", tmp_path, seeded(AsksForDDP), **settings)
    assert_same(fit("ddp_zero3", tmp_path, seeded(AsksForDDP), **settings), expected)


class Thaws(cb.BaseFinetuning):
    def __reduce__(self) -> Any:
        return Thaws, ()

    def freeze_before_training(self, pl_module: Any) -> None: ...

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...


@on_ranks(1)
@pytest.mark.parametrize("protocol", [2, 5])
def test_objects_with_our_methods_are_pickled_as_lightnings(protocol: int, tmp_path: Path) -> None:
    callbacks = [cb.ModelCheckpoint(tmp_path, save_last=True), cb.WeightAveraging(), Thaws()]
    callbacks += [cb.StochasticWeightAveraging(0.1, 1), cb.ModelPruning("l1_unstructured", amount=0.1)]
    of = trainer("zero3", tmp_path, callbacks=callbacks, enable_checkpointing=True)
    adapt_run(of)
    things = [of, of.fit_loop, of.fit_loop.epoch_loop, *callbacks]
    assert all(any(c.__module__.startswith("lightning_zero") for c in type(thing).__mro__) for thing in things)
    for thing in things:
        for pickler in (pickle.Pickler, pickle._Pickler):  # type: ignore[attr-defined]
            file = io.BytesIO()
            pickler(file, protocol).dump(thing)
            loaded = pickle.loads(file.getvalue())
            assert type(loaded) is getattr(sys.modules[type(thing).__module__], type(thing).__name__)
            assert (
                b"lightning_zero" not in file.getvalue() or isinstance(thing, pl.Trainer) or hasattr(thing, "trainer")
            )
    fit("zero3", tmp_path, callbacks=callbacks[:1], enable_checkpointing=True)
    assert pickle.loads(pickle.dumps(callbacks[0])).state_dict() == callbacks[0].state_dict()


class Converts(Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        blocks = self.blocks
        for convert in (blocks.half, lambda: blocks.to(torch.float64), blocks.share_memory, lambda: blocks.to("meta")):
            with pytest.raises(RuntimeError, match=r"converting .* of a sharded module"):
                convert()
        assert self.to(self.device) is self
        assert blocks.to(memory_format=torch.channels_last, dtype=torch.float32) is blocks


@on_ranks(1)
def test_conversions_that_change_parameters_are_refused(tmp_path: Path) -> None:
    assert_same(fit("zero3", tmp_path, seeded(Converts), max_steps=2), fit("zero3", tmp_path, max_steps=2))


class NothingToLearn(Lit):
    """One rank's batches give no parameter a gradient in every other step; it does not even call its layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 and dist.is_initialized() and dist.get_rank() == 1:
            return torch.zeros((), requires_grad=True)
        return self.loss(batch)


@pytest.mark.sample
@on_ranks(2)
def test_rank_without_any_gradient_steps_with_the_others(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"limit_val_batches": 0, "gradient_clip_val": 0.4}
    first, *others = [fit(stage, tmp_path, seeded(NothingToLearn), **settings) for stage in ALL_STAGES]
    for run in others:
        assert_weights(run.weights, first.weights)


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_fit_after_an_exception_of_all_ranks_goes_on_from_its_weights(stage: str, tmp_path: Path) -> None:
    module, three = seeded(lambda: toys.Fails(3)), seeded(Lit)
    with pytest.raises(KeyError, match="planned"):
        fit(stage, tmp_path, module)
    fit(stage, tmp_path, three, max_steps=3, limit_val_batches=0)
    module.ranks = ()
    for one in (module, three):
        one.losses.clear()
    found, expected = (fit(stage, tmp_path, one, limit_val_batches=0) for one in (module, three))
    assert_same(found, expected, tolerance=0)


class SyncGrad(ByHand):
    """Accumulates by ``toggle_model(sync_grad=)``. The batch between two of a window has no backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if batch_idx % 3 == 1:
            return
        last = batch_idx % 3 == 2
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(loss)
        if last:
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class ParameterInTwoOptimizers(ByHand):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.AdamW(self.head.parameters(), lr=0.01)]


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("kind", [SyncGrad, ParameterInTwoOptimizers])
def test_manual_steps_equal_ddps(kind: type[ByHand], tmp_path: Path) -> None:
    expected = fit("ddp", tmp_path, seeded(kind))
    for row in ("zero0", "zero1", "zero3", "zero3_offload"):
        assert_same(fit(toys.strategy_of(row), tmp_path, seeded(kind)), expected, what=row)


@pytest.mark.full
@on_ranks(2)
def test_module_on_meta_is_the_same_at_all_stages_and_learns(tmp_path: Path) -> None:
    """Other initial values than on the host, but the same at all stages, finite, and they learn."""

    def body(stage: str) -> Any:
        with torch.device("meta"):
            module = seeded(Lit)
        return fit(stage, tmp_path, module, max_epochs=3)

    first, *others = map(body, ALL_STAGES)
    epoch = len(first.losses) // 3
    assert sum(first.losses[-epoch:]) < sum(first.losses[:epoch])
    for other in others:
        assert_same(other, first)


@pytest.mark.full
@on_ranks(2)
def test_buffers_that_training_reads_are_rank_0s_as_under_ddp(tmp_path: Path) -> None:
    def centered(m: Any, x: Tensor) -> Tensor:
        if m.training:
            mean = m.mean.data if hidden else m.mean  # the usual style of EMA codebooks, which raises no version
            mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x - m.mean.clone()

    def body(strategy: str) -> Any:
        module = seeded(Lit)
        module.first = nn.Sequential(Does(centered, mean=nn.Buffer(torch.zeros(4))), module.first)
        for _ in range(3):  # what is written to buffers in training is found after evaluations too
            trainer(strategy, tmp_path).validate(module, loader(), verbose=False)
        return fit(strategy, tmp_path, module)

    hidden = False
    expected = body("ddp")
    for stage, hidden in (("zero1", False), ("zero1", True), ("zero3", True)):
        assert_same(body(stage), expected, what=f"{stage} {hidden}")


@on_ranks(2)
def test_manual_optimization_leaves_its_buffers_to_each_rank_as_under_ddp(tmp_path: Path) -> None:
    def body(strategy: str) -> Any:
        module = seeded(toys.ByHand)
        module.first = nn.Sequential(module.first, nn.BatchNorm1d(8))
        return fit(strategy, tmp_path, module)

    assert_same(body("zero3"), body("ddp"))


# -- averages of weights, and pruning: what Lightning's table does not show of them -----------------------------------


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("ddp", "zero3"), ("zero1", "ddp")])
def test_runs_go_on_from_averages_of_ddp_and_ddp_from_ours(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    def run(strategy: str, epochs: int, seed: int = 3, **settings: Any) -> Any:
        save = cb.ModelCheckpoint(tmp_path / f"{strategy}{epochs}", filename="end")
        settings |= {"callbacks": [cb.EMAWeightAveraging(decay=0.8), save], "enable_checkpointing": True}
        return fit(strategy, tmp_path, seeded(toys.WithBatchNorm, seed), max_epochs=epochs, **settings)

    whole, saved, path = run("ddp", 3), run(saved_by, 2), tmp_path / f"{saved_by}2" / "end.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    assert {"current_model_state", "averaging_state"} <= checkpoint.keys()
    assert_weights(checkpoint["state_dict"], saved.weights)
    resumed = run(loaded_by, 3, ckpt_path=path, seed=5)
    assert_weights(resumed.weights, whole.weights)
    torch.testing.assert_close(resumed.losses, whole.losses[-len(resumed.losses) :], rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_averages_are_of_what_is_written_after_a_step(tmp_path: Path) -> None:
    class Clamped(toys.ByHand):
        def training_step(self, batch: Any, number: int) -> None:
            super().training_step(batch, number)
            for param in self.parameters():
                param.data.clamp_(-0.2, 0.2)

    run = lambda of: fit(of, tmp_path, seeded(Clamped), callbacks=[cb.EMAWeightAveraging(decay=0.5)])  # noqa: E731
    expected = run("ddp")
    for strategy in ("zero2_offload", "zero3"):
        assert_same(run(strategy), expected, what=strategy)


@on_ranks(1)
def test_modules_of_an_average_are_refused_by_name(tmp_path: Path) -> None:
    averaging = cb.EMAWeightAveraging()
    fit("zero3", tmp_path, max_epochs=1, callbacks=[averaging])
    with pytest.raises(AttributeError, match=r"module\.first: .* Use first of the LightningModule"):
        averaging._average_model.module.first  # noqa: B018


@on_ranks(1)
def test_step_of_an_optimizer_may_be_a_mock(tmp_path: Path) -> None:
    with mock.patch("torch.optim.SGD.step") as step:
        losses = fit("zero3", tmp_path, max_epochs=2).losses
    assert step.called and losses[: len(losses) // 2] == losses[len(losses) // 2 :]


@pytest.mark.full
@on_ranks(2)
def test_checkpoint_without_averages_starts_both(tmp_path: Path) -> None:
    fit("zero3", tmp_path).trainer.save_checkpoint(tmp_path / "plain.ckpt")
    settings: dict[str, Any] = {"max_epochs": 3, "ckpt_path": tmp_path / "plain.ckpt"}
    assert_same(*[fit(s, tmp_path, callbacks=[cb.EMAWeightAveraging(decay=0.8)], **settings) for s in ("zero3", "ddp")])


@pytest.mark.full
@on_ranks(2)
def test_averages_of_bf16_mixed_are_of_the_fp32_masters(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "bf16-mixed"}
    runs = [fit(s, tmp_path, callbacks=[cb.EMAWeightAveraging(decay=0.5)], **settings) for s in ("zero0", "zero3")]
    assert_same(runs[1], runs[0], tolerance=0)
    last = fit("zero3", tmp_path, **settings).weights["head.weight"]
    rounded = runs[0].weights["head.weight"]
    assert not torch.equal(rounded, rounded.bfloat16().float()) and not torch.equal(rounded, last)


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize(("stage", "checkpoint"), [("zero1", "full"), ("zero3", "sharded")], ids=str)
def test_stochastic_averaging_goes_on_from_its_file_as_under_ddp(stage: str, checkpoint: str, tmp_path: Path) -> None:
    def body(strategy: Any, path: Path | None = None) -> Any:
        ema = lambda average, now, count: 0.9 * average + 0.1 * now  # noqa: E731
        averages = cb.StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2, avg_fn=ema)
        callbacks = [averages, saves_at_epoch(saved, 2)]
        return fit(strategy, tmp_path, seeded(toys.WithBatchNorm), callbacks=callbacks, max_epochs=5, ckpt_path=path)

    saved = tmp_path / "ddp.ckpt"
    body("ddp")
    expected = body("ddp", saved)
    saved = tmp_path / "ours.ckpt"
    whole = body(ZeroStrategy(stage, checkpoint=checkpoint))
    assert_same(body(ZeroStrategy(stage, checkpoint=checkpoint), saved), expected, tolerance=0)
    assert_same(whole, body("ddp"), tolerance=0)


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_random_masks_of_pruning_are_the_same_on_all_ranks(stage: str, tmp_path: Path) -> None:
    module, seen = seeded(Lit), list[bool]()
    for block in module.blocks:
        block.norm = nn.Identity()  # whose weights have one dimension

    def look(of: Any, module: Any, *_: Any) -> None:
        for mask in [buffer for name, buffer in module.named_buffers() if name.endswith("_mask")]:
            other = mask.clone()
            dist.broadcast(other, 0)
            seen.append(torch.equal(mask, other))

    torch.manual_seed(5 + dist.get_rank())
    callbacks = [cb.ModelPruning("random_unstructured", amount=0.4), cb.LambdaCallback(on_train_batch_start=look)]
    fit(stage, tmp_path, module, callbacks=callbacks)
    assert seen and all(seen)


@on_ranks(2)
def test_another_number_of_ranks_than_the_script_has_is_refused(tmp_path: Path) -> None:
    for devices in (1, 3):
        with pytest.raises(ConfigError, match=rf"expected 2, .* already .*, got 1 x {devices}\. Give the same"):
            trainer("zero3", tmp_path, devices=devices).validate(seeded(Lit), loader(), verbose=False)


@on_ranks(2)
def test_engine_before_there_is_one_is_refused(tmp_path: Path) -> None:
    module = seeded(Lit)
    module.setup = lambda stage: module.trainer.strategy.engine
    with pytest.raises(RuntimeError, match="on_fit_start"):
        fit("zero3", tmp_path, module)


@pytest.mark.full
@on_ranks(2)
def test_synchronized_batch_norm_is_converted_also_in_a_sharded_module(tmp_path: Path) -> None:
    """Torch has no SyncBatchNorm for the CPU: ours gets as far as torch's own error."""
    module = seeded(toys.WithBatchNorm)
    of = trainer("zero3", tmp_path, sync_batchnorm=True)
    of.validate(module, loader(), verbose=False)
    assert isinstance(module.norm, nn.BatchNorm1d)
    with pytest.raises(ValueError, match="SyncBatchNorm.* GPU"):
        of.fit(module, loader())
    assert isinstance(module.norm, nn.SyncBatchNorm)
    assert of.strategy.engine.units.owns(module.norm.weight)  # type: ignore[attr-defined]


def test_compiled_module_without_a_compiler_is_refused_before_a_process_starts() -> None:
    missing = mock.patch("torch._inductor.cpp_builder.get_cpp_compiler", side_effect=InvalidCxxCompiler)
    of = pl.Trainer(strategy="zero3", accelerator="cpu", devices=2, logger=False)
    launches = mock.patch.object(of.strategy.launcher, "launch", side_effect=AssertionError("processes start"))
    with missing, launches:
        with pytest.raises(ConfigError, match=r"^compile='blocks': expected a C\+\+ compiler.*compile='none'"):
            ZeroStrategy(3, compile="blocks")
        with pytest.raises(ConfigError, match=r"torch\.compile: expected a C\+\+ compiler"):
            of.fit(torch.compile(Lit()), [])
        ZeroStrategy(3, compile={"name": "blocks", "arguments": {"backend": "eager"}})


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("where", ["setup", "configure_model", "configure_optimizers"])
def test_rank_that_fails_before_the_first_step_keeps_no_other_waiting(where: str, tmp_path: Path) -> None:
    """Its script catches the exception and goes on, so nothing breaks: the others would wait for ever."""
    module = seeded(Lit)
    if dist.get_rank() == 1:
        with mock.patch.object(module, where, lambda *_, **__: 1 / 0), pytest.raises(ZeroDivisionError):
            fit(ZeroStrategy("zero3", stall_timeout_s=4.0), tmp_path, module)
    with pytest.raises(RuntimeError, match="different places|did not come"):
        fit(ZeroStrategy("zero3", stall_timeout_s=4.0), tmp_path, module)


@on_ranks(2)
def test_callbacks_of_some_ranks_that_take_all_are_refused(tmp_path: Path) -> None:
    """They would send messages alone, some of another size than the next one: gloo would abort the process."""

    def on_one_rank(callback: pl.Callback) -> pl.LightningModule:
        module = seeded(Lit)
        module.configure_callbacks = lambda: [callback] if dist.get_rank() == 1 else []
        return module

    says = r"^callbacks: .* got none on rank 0 and StochasticWeightAveraging on rank 1\. .* configure_callbacks"
    with pytest.raises(ConfigError, match=says):
        fit("zero1", tmp_path, on_one_rank(cb.StochasticWeightAveraging(0.1)))
    assert fit("zero1", tmp_path, on_one_rank(cb.LambdaCallback()), max_epochs=1).losses


@pytest.mark.full
@on_ranks(2)
def test_rank_that_prepares_for_long_is_waited_for(tmp_path: Path) -> None:
    module = seeded(Lit)
    module.prepare_data = lambda: time.sleep(2.5)  # on rank 0
    assert fit(ZeroStrategy("zero3", stall_timeout_s=1.0), tmp_path, module, max_epochs=1).losses
