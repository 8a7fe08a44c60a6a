"""What cannot work is refused with a reason and a way out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.config import ConfigError
from tests.harness import on_ranks
from tests.models import Does
from tests.trainer.toys import Lit, WithBatchNorm, assert_same, fit, loader, seeded, trainer


def test_unknown_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero/stage: expected one of zero0, zero1, zero2, zero3, auto, got 'zero4'"):
        ZeroStrategy("zero4")


OPTIMIZERS: list[tuple[Callable[[Any], torch.optim.Optimizer], str]] = [
    (torch.optim.LBFGS, r"LBFGS, whose step\(\) calls its closure itself.*DDPStrategy"),
    (torch.optim.Adafactor, r"zero\.optimizer\.sharding: expected a class that computes each element"),
    (lambda _: torch.optim.SGD([nn.Parameter(torch.ones(2))]), "not part of the sharded module"),
]


@on_ranks(2)
def test_optimizers_that_cannot_step_slices_of_the_module_are_refused(tmp_path: Path) -> None:
    for make, says in OPTIMIZERS:
        module = seeded(Lit)
        module.configure_optimizers = lambda make=make, m=module: make(m.parameters())
        with pytest.raises(ConfigError, match=says):
            fit(ZeroStrategy("zero3", optimizer={"sharding": "slices"}), tmp_path, module)


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
    module = seeded(Lit)
    module.bare = Does(lambda m, x: x, scale=nn.Parameter(torch.empty(4, device="meta")))
    with pytest.raises(ConfigError, match=r"bare \(Does\).*reset_parameters"):
        fit("zero3", tmp_path, module)


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
    assert of.strategy.engine.units.owns(module.norm.weight)  # type: ignore[attr-defined]


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
    module = seeded(Lit)
    if dist.get_rank() == 1:
        with mock.patch.object(module, where, lambda *_, **__: 1 / 0), pytest.raises(ZeroDivisionError):
            fit(ZeroStrategy("zero3", stall_timeout_s=4.0), tmp_path, module)
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
