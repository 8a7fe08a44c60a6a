"""What cannot work is refused with a reason and a way out."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError
from tests.harness import on_ranks
from tests.trainer.toys import Lit, WithBatchNorm, assert_same, fit, loader, seeded, trainer

# -- names ------------------------------------------------------------------------------------------------------------


def test_unknown_settings_and_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero\.prefetch: no such setting; there are .*prefetch_bytes"):
        ZeroStrategy("zero3", prefetch=3)
    with pytest.raises(ConfigError, match=r"zero/stage: expected one of zero0, zero1, zero2, zero3, auto, got 'zero4'"):
        ZeroStrategy("zero4")
    assert ZeroStrategy(2).config.stage.name.name == "zero2"


# -- optimizers -------------------------------------------------------------------------------------------------------


def with_optimizer(make: Any) -> Lit:
    class Other(Lit):
        def configure_optimizers(self) -> Any:
            return make(self)

    return seeded(Other)


@on_ranks(2)
def test_optimizers_that_call_their_closure_or_need_whole_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LBFGS, whose step\(\) calls its closure itself.*DDPStrategy"):
        fit("zero0", tmp_path, with_optimizer(lambda m: torch.optim.LBFGS(m.parameters())))
    with pytest.raises(ConfigError, match=r"zero\.optimizer\.sharding: expected a class that computes each element"):
        strategy = ZeroStrategy("zero3", optimizer={"sharding": "slices"})
        fit(strategy, tmp_path, with_optimizer(lambda m: torch.optim.Adafactor(m.parameters())))


@on_ranks(2)
def test_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not part of the sharded module"):
        fit("zero3", tmp_path, with_optimizer(lambda m: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)))


# -- the module -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_reads_of_placeholders_are_refused(tmp_path: Path) -> None:
    module = seeded(Lit)
    of = fit(ZeroStrategy("zero3", gather_after_fit=False), tmp_path, module).trainer
    for look in (lambda: module.state_dict(), lambda: copy.deepcopy(module), lambda: module.double()):
        with pytest.raises(RuntimeError, match=r"trainer\.save_checkpoint.*trainer\.strategy\.export\(folder\)"):
            look()
    with pytest.raises(RuntimeError, match=r"engine\.optimizer_state|trainer\.save_checkpoint"):
        of.optimizers[0].state_dict()
    with lightning_zero.gather(module):
        assert all(torch.isfinite(value).all() for value in module.state_dict().values())


@on_ranks(2)
def test_another_number_of_ranks_than_the_script_has_is_refused(tmp_path: Path) -> None:
    for devices in (1, 3):
        with pytest.raises(ConfigError, match=rf"expected 2, as many as .* already, got 1 x {devices}\. Use the same"):
            trainer("zero3", tmp_path, devices=devices).validate(seeded(Lit), loader(), verbose=False)


@on_ranks(2)
def test_engine_before_there_is_one_is_refused(tmp_path: Path) -> None:
    class TooEarly(Lit):
        def setup(self, stage: str) -> None:
            self.trainer.strategy.engine  # noqa: B018

    with pytest.raises(RuntimeError, match="on_fit_start"):
        fit("zero3", tmp_path, seeded(TooEarly))


@on_ranks(2)
def test_module_on_meta_without_a_way_to_initialise_is_refused(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))

    class OnMeta(Lit):
        def configure_model(self) -> None:
            if not hasattr(self, "bare"):
                with torch.device("meta"):
                    self.bare = Bare()

    with pytest.raises(ConfigError, match=r"bare \(Bare\).*reset_parameters"):
        fit("zero3", tmp_path, seeded(OnMeta))


@pytest.mark.full
@on_ranks(2)
def test_synchronized_batch_norm_is_converted_also_in_a_sharded_module(tmp_path: Path) -> None:
    """Torch has no SyncBatchNorm for the CPU: ours gets as far as torch's own error."""
    module = seeded(WithBatchNorm)
    of = trainer("zero3", tmp_path, sync_batchnorm=True)
    of.validate(module, loader(), verbose=False)
    assert isinstance(module.norm, nn.BatchNorm1d)
    with pytest.raises(ValueError, match="SyncBatchNorm.* GPU"):
        of.fit(module, loader())
    assert isinstance(module.norm, nn.SyncBatchNorm)
    assert of.strategy.engine.units.owns(module.norm.weight)


@pytest.mark.full
@on_ranks(2)
def test_buffers_are_rank_0s_as_under_ddp(tmp_path: Path) -> None:
    class Memory(Lit):
        """A buffer that each rank's batches change, and that training reads."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            if self.training:
                self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
            return super().forward(x - self.mean.clone())

    expected = fit("ddp", tmp_path, seeded(Memory))
    for stage in ("zero1", "zero3"):
        assert_same(fit(stage, tmp_path, seeded(Memory)), expected, what=stage)


# -- ranks that are apart before there is an engine -------------------------------------------------------------------


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("where", ["setup", "configure_model", "configure_optimizers"])
def test_rank_that_fails_before_the_first_step_keeps_no_other_waiting(where: str, tmp_path: Path) -> None:
    """Its script catches the exception and goes on, so nothing breaks: the others would wait for ever."""

    class Fails(Lit):
        failed = False

        def _fail(self) -> None:
            if dist.get_rank() == 1 and not self.failed:
                self.failed = True
                raise ZeroDivisionError

        def setup(self, stage: str) -> None:
            if where == "setup":
                self._fail()

        def configure_model(self) -> None:
            if where == "configure_model":
                self._fail()

        def configure_optimizers(self) -> Any:
            if where == "configure_optimizers":
                self._fail()
            return super().configure_optimizers()

    module = seeded(Fails)
    strategy = ZeroStrategy("zero3", stall_timeout_s=4.0)
    if dist.get_rank() == 1:
        with pytest.raises(ZeroDivisionError):
            fit(strategy, tmp_path, module)
    with pytest.raises(RuntimeError, match="different places|did not come"):
        fit(ZeroStrategy("zero3", stall_timeout_s=4.0), tmp_path, module)


@pytest.mark.full
@on_ranks(2)
def test_rank_that_prepares_for_long_is_waited_for(tmp_path: Path) -> None:
    class Prepares(Lit):
        def prepare_data(self) -> None:
            time.sleep(2.5)  # on rank 0

    run = fit(ZeroStrategy("zero3", stall_timeout_s=1.0), tmp_path, Prepares(), max_epochs=1)
    assert run.losses


@pytest.mark.full
@on_ranks(2)
def test_accumulation_with_bf16_messages_is_refused_where_gradients_add_up(tmp_path: Path) -> None:
    comm, settings = {"grad_comm_dtype": "bf16"}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    with pytest.raises(ConfigError, match=r"grad_comm_dtype: .*accumulate_grad_batches.*zero/stage=zero1"):
        fit(ZeroStrategy(1, comm=comm), tmp_path, **settings)
    fit(ZeroStrategy(2, comm=comm), tmp_path, max_epochs=1, **settings)
