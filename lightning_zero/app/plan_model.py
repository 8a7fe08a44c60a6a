"""Describe a model for the memory plan: the units and buckets of its module on the meta device, and its activations."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero.app.parts import (
    OUR_DATA,
    PRECISION_ALIASES,
    agreed_precision,
    build_data,
    build_model,
    build_optimizer,
)
from lightning_zero.app.plan_output import Described
from lightning_zero.app.schema import TrainConfig
from lightning_zero.engine.torch_modes import default_dtype
from lightning_zero.engine.units.describe import TRUE_DTYPES, UnitGroup, describe_units
from lightning_zero.lightning_api import pl
from lightning_zero.mesh.plans import device_mesh, split_module
from lightning_zero.models.language_model import decay_groups
from lightning_zero.optimizers.known import states_after_step
from lightning_zero.optimizers.refused import is_stepped_whole
from lightning_zero.planning.memory import ADAM_STATES
from lightning_zero.planning.tensor_states import TensorStates
from lightning_zero.settings import ConfigError, Precision, Recompute, Sharding, ZeroConfig, for_layout, make_config
from lightning_zero.trainer.memory.activations import NotMeasured, measure, measure_sizes
from lightning_zero.trainer.memory.auto_row import batch_from, planned_model
from lightning_zero.trainer.memory.fake_module import UnknownStateError, parameters_on_meta, planned_states

M = TypeVar("M", bound=nn.Module)


def precision_row(config: TrainConfig) -> Precision:
    """Return the run's precision, from ``zero/precision`` or ``trainer.precision``; fp32 if neither is given."""
    asked = agreed_precision(config)
    asked = PRECISION_ALIASES.get(asked or "", asked)
    return next((row for row in Precision if row.value == asked), Precision.fp32)


def describe(
    config: TrainConfig,
    explicit: set[str],
    *,
    states: int | None = None,
    activations: bool = False,
    both_ways: bool = True,
) -> Described:
    """Return a description of the configured model, built on meta. Errors of the model's own code are not caught.

    Args:
        explicit: keys that the user has set, on the command line or in files.
        states: number of optimizer state tensors per parameter; ``None``: count them by a trial step.
        activations: measure the activations of one batch.
        both_ways: measure activations with and without checkpointing.
    """

    def build() -> LightningModule:
        module = build_model(config, explicit)
        module.configure_model()
        return module

    def counted(units: Sequence[UnitGroup], module: nn.Module) -> tuple[int | TensorStates, str]:
        return states if states is not None else counted_states(config, units, module), ""

    return describe_module(
        on_meta(build, precision := precision_row(config)),
        config.zero,
        precision,
        micro_batches=config.trainer.get("accumulate_grad_batches", 1),
        states=counted,
        take_batch=partial(batch_of, config, explicit) if activations else None,
        both_ways=both_ways,
    )


def describe_module(
    module: nn.Module,
    zero: ZeroConfig,
    precision: Precision,
    *,
    micro_batches: int,
    states: Callable[[Sequence[UnitGroup], nn.Module], tuple[int | TensorStates, str]],
    take_batch: Callable[[], Any] | None,
    both_ways: bool = True,
) -> Described:
    """Return a description of ``module``, which can be on meta.

    Args:
        states: returns the planned state of the optimizers, and the reason if it is only assumed, else "".
        take_batch: returns the batch whose activations are measured; ``None``: measure none.
        both_ways: measure activations with and without checkpointing.
    """
    zero = for_layout(zero)
    with on_paper(math.lcm(zero.tensor_parallel, zero.expert_parallel)):
        split_module(module, zero, torch.device("cpu"))
        units = describe_units(module, zero, precision)
        counted, why = states(units, module)
        found = Described(planned_model(units, zero, micro_batches, counted), precision.name, assumed_states=why)
        return with_activations(found, module, zero, precision, take_batch, both_ways) if take_batch else found


@contextlib.contextmanager
def on_paper(ranks: int) -> Iterator[None]:
    """During the body, use a fake process group of ``ranks`` ranks, which sends nothing, so that modules can be
    split."""
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        device_mesh.cache_clear()


def on_meta(build: Callable[[], M], precision: Precision) -> M:
    """Return the module that ``build`` makes on the meta device under the default dtype of a run with ``precision``."""
    dtype = TRUE_DTYPES.get(precision, torch.get_default_dtype())
    # Keep what a model prints out of the JSON document.
    with contextlib.redirect_stdout(sys.stderr), default_dtype(dtype):
        try:
            with torch.device("meta"):
                return build()
        except ConfigError:
            raise
        except Exception as error:
            return _parameters_on_meta(build, error)


def _parameters_on_meta(build: Callable[[], M], error: Exception) -> M:
    """Return the module built with only parameters on meta. With all tensors on meta, ``build`` has raised ``error``.

    The code of some models needs values: ``[x.item() for x in torch.linspace(0, 0.1, depth)]``.
    """
    try:
        with parameters_on_meta():
            return build().to("meta")
    except Exception as again:
        again.add_note(
            "(A plan builds the model without the values of its parameters. Built without any values it raised "
            f"{type(error).__name__}: {error})"
        )
        raise


def counted_states(config: TrainConfig, units: Sequence[UnitGroup], module: nn.Module) -> int | TensorStates:
    """Return the number of state tensors per parameter, or each parameter's state if the optimizer steps whole
    tensors."""
    zero = config.zero
    if config.optimizer:
        with contextlib.suppress(UnknownStateError, TypeError, ValueError, RuntimeError):  # Muon takes matrices only
            make = build_optimizer(config)
            made = make(decay_groups(module.parameters()))
            return planned_states(units, [made], zero.optimizer, zero.reduce_bucket_bytes)
    return optimizer_states(config)[0]


def optimizer_states(config: TrainConfig) -> tuple[int, bool]:
    """Step one parameter as a trial. Return how many state tensors of its shape the optimizer makes, and whether a run
    would step slices of parameters, not whole tensors."""
    sharding = config.zero.optimizer.sharding
    if not config.optimizer:
        return ADAM_STATES, sharding is not Sharding.tensors
    make = build_optimizer(config)
    try:
        param = torch.nn.Parameter(torch.zeros(2))
        made = make([param])
    except ValueError:  # Muon takes matrices only
        param = torch.nn.Parameter(torch.eye(2))
        made = make([param])
    return states_after_step(made, param), not is_stepped_whole(made, sharding)


# -- activations ------------------------------------------------------------------------------------------------------


def with_activations(
    found: Described,
    module: nn.Module,
    zero: ZeroConfig,
    precision: Precision,
    take_batch: Callable[[], Any],
    both_ways: bool,
) -> Described:
    """Return ``found`` with a batch's measured activations or, if they cannot be measured, the reason. ``both_ways``:
    measure with and without activation checkpointing."""
    if not isinstance(module, pl.LightningModule):
        return replace(found, why_not=f"a {type(module).__name__} has no training_step; give one to plan_memory")
    try:
        batch = take_batch()
    except ConfigError:
        raise
    except Exception as error:
        return replace(found, why_not=f"data gives no batch here: {type(error).__name__}: {error}")
    try:
        sizes = measure_sizes(module, batch, zero, precision)
    except NotMeasured as error:
        return replace(found, why_not=str(error).partition(": ")[2])
    other = None
    if both_ways and len(found.model.names) > 1:
        how = Recompute.none if found.model.recomputes else Recompute.blocks
        config_of_other = make_config(zero, activation_checkpointing=how)
        with contextlib.suppress(NotMeasured):
            other = measure(module, batch, config_of_other, precision)
    return replace(found, model=replace(found.model, activations=sizes, samples=sizes.sizes[0]), other=other)


def batch_of(config: TrainConfig, explicit: set[str]) -> Any:
    """Return a batch to measure: zeros on meta for this package's data classes, otherwise the first batch of the data.
    ``explicit``: keys that the user has set."""
    data = config.data
    if data.get("_target_") in OUR_DATA:
        return torch.zeros(data["batch_size"], data["block_size"] + 1, dtype=torch.int64, device="meta")
    module = build_data(config, explicit)
    with contextlib.redirect_stdout(sys.stderr):
        module.prepare_data()
        module.setup("fit")
        return batch_from(module.train_dataloader())
