"""Copy a module with fake tensors, which have no memory, to run its steps without effects, and plan the state that its
optimizers will have."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

from lightning_zero.engine.units.describe import UnitGroup
from lightning_zero.lightning_api import LightningEnvironment, isolate_rng, pl
from lightning_zero.optimizers.known import count_states
from lightning_zero.optimizers.probe import probe
from lightning_zero.optimizers.refused import is_stepped_whole
from lightning_zero.planning.memory import ADAM_STATES
from lightning_zero.planning.owners import matrix_work
from lightning_zero.planning.tensor_states import TensorState, TensorStates
from lightning_zero.settings import ConfigError, OptimizerConfig, ZeroConfig

CPU = torch.device("cpu")


class _Stand:
    """Replaces the Trainer of a fake copy. It has its own ``optimizers``. All its other attributes are those of
    ``trainer`` or, if ``trainer`` is None, of a new Trainer."""

    def __init__(self, trainer: Any, optimizers: list[Any]) -> None:
        self.__dict__.update(_trainer=trainer or _new_trainer(), optimizers=optimizers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_trainer"], name)


def _new_trainer() -> pl.Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPUs that it does not use
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[LightningEnvironment()],
        )
    trainer.training = True
    return trainer


def fake_copy(
    module: pl.LightningModule, dtypes: Mapping[int, torch.dtype], mode: FakeTensorMode
) -> pl.LightningModule:
    """Copy ``module`` with fake tensors. ``dtypes`` maps ids of tensors to new dtypes. Tied parameters stay tied."""
    memo = _without_owners(module)
    with mode:
        for param in module.parameters():
            fake = torch.empty_strided(
                param.shape, param.stride(), dtype=dtypes.get(id(param), param.dtype), device=CPU
            )
            memo[id(param)] = nn.Parameter(fake, requires_grad=param.requires_grad)
        for buffer in module.buffers():
            dtype = dtypes.get(id(buffer), buffer.dtype)
            memo[id(buffer)] = torch.empty_strided(buffer.shape, buffer.stride(), dtype=dtype, device=CPU)
    with FakeCopyMode(mode):
        return copy.deepcopy(module, memo)


def meta_copy(module: nn.Module) -> nn.Module:
    """Copy ``module`` with parameters and buffers on meta."""
    memo = _without_owners(module)
    memo |= {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in module.parameters()}
    memo |= {id(buffer): buffer.detach().to("meta") for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def _without_owners(module: nn.Module) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy`` that leaves out the Trainer and Fabric of ``module``."""
    return {id(module.__dict__.get(owner)): None for owner in ("_trainer", "_fabric")} | {id(None): None}


def detach_from_lightning(module: pl.LightningModule, trainer: Any, backward: Callable[..., Any]) -> None:
    """Change the copy ``module`` so that it logs nothing and issues no collectives. It gets a stand-in for a Trainer
    and no schedulers, and its ``manual_backward`` calls ``backward``."""
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)]
    module.__dict__["_trainer"] = _Stand(trainer, optimizers)

    def nothing(self: Any, *_: Any, **__: Any) -> None: ...

    zero = lambda *_, **__: torch.zeros(())  # noqa: E731

    for name in ("log", "log_dict", "print", "toggle_optimizer", "untoggle_optimizer", "clip_gradients"):
        module.__dict__[name] = MethodType(nothing, module)
    module.__dict__["manual_backward"] = lambda loss, *_, **__: backward(loss)
    module.__dict__["lr_schedulers"] = lambda: None
    module.__dict__["all_gather"] = lambda data, *_, **__: data
    for metric in (inner for inner in module.modules() if isinstance(inner, Metric | MetricCollection)):
        # Metrics keep no activations, and many of them need values: counts of classes, for example.
        vars(metric).update(update=MethodType(nothing, metric))
        if isinstance(metric, Metric):
            vars(metric).update(forward=zero, compute=zero)


def give_fake_optimizers(module: pl.LightningModule) -> None:
    """Let ``module.optimizers()``, in a copy with manual optimization, return fakes of the configured optimizers."""

    class Nothing:
        param_groups = ({"lr": 0.0},)

        def step(self, closure: Any = None, **_: Any) -> Any:
            return closure() if closure is not None else None

        def zero_grad(self, *_: Any, **__: Any) -> None: ...

        def toggle_model(self, *_: Any, **__: Any) -> Any:
            return contextlib.nullcontext()

    made = [Nothing() for _ in _optimizers_in(module.configure_optimizers())]
    module.__dict__["optimizers"] = lambda *_, **__: made if len(made) > 1 else made[0]


def states_of(
    module: pl.LightningModule, trainer: Any, units: Sequence[UnitGroup], config: ZeroConfig
) -> tuple[int | TensorStates, str]:
    """Return the state that ``module``'s optimizers will have, and "". If it is unknown, return Adam's number of state
    tensors, and the reason."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with isolate_rng(include_cuda=False):
            made = fake_copy(module, {}, mode)
            detach_from_lightning(made, trainer, lambda _: None)
            with mode:
                found: Any = made.configure_optimizers()
            optimizers = _optimizers_in(found)
            own = dict(zip(map(id, made.parameters()), module.parameters(), strict=True))
            found = planned_states(
                units, optimizers, config.optimizer, config.reduce_bucket_bytes, lambda param: own[id(param)]
            )
    except UnknownStateError as error:
        return ADAM_STATES, str(error)
    except Exception as error:  # of users' code; training will raise it again
        return ADAM_STATES, f"configure_optimizers fails on tensors without values: {type(error).__name__}: {error}"
    return found, ""


def watch_gradients(wanted: Iterable[tuple[nn.Parameter, Callable[[], None]]]) -> list[RemovableHandle]:
    """Register a hook on each parameter in ``wanted`` that drops the gradient when it arrives, then calls the
    parameter's function. Return the handles."""

    def drop(arrived: Callable[[], None], param: Tensor) -> None:
        param.grad = None
        arrived()

    return [param.register_post_accumulate_grad_hook(partial(drop, arrived)) for param, arrived in wanted]


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In the body, move parameters to meta when modules register them. Other tensors keep their values."""

    def move_to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
        if param is None or param.is_meta:  # a tied parameter stays one object
            return None
        return nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    hook = nn.modules.module.register_module_parameter_registration_hook(move_to_meta)
    try:
        yield
    finally:
        hook.remove()


def _optimizers_in(found: object) -> list[Optimizer]:
    if isinstance(found, Mapping):
        found = found.get("optimizer")
    if isinstance(found, list | tuple):
        return [optimizer for part in found for optimizer in _optimizers_in(part)]
    return [found] if isinstance(found, Optimizer) else []


class UnknownStateError(Exception):
    """Raised if an optimizer's state cannot be known before training. The message names optimizer and reason."""


def planned_states(
    units: Sequence[UnitGroup],
    optimizers: Sequence[Optimizer],
    settings: OptimizerConfig,
    message_nbytes: int,
    param_of: Callable[[nn.Parameter], nn.Parameter] = lambda param: param,
) -> int | TensorStates:
    """Return the number of state tensors per parameter, or each parameter's state if an optimizer steps whole tensors.

    Raises UnknownStateError if trial steps cannot reveal the state of an optimizer.

    Args:
        optimizers: optimizers, which stay unchanged. Their parameters can be on meta, or fake tensors.
        message_nbytes: bytes of gradients in transit at a time.
        param_of: given an optimizer's parameter, returns the parameter in ``units`` that it is a copy of.
    """
    stepped_whole = [is_stepped_whole(o, settings.sharding) for o in optimizers]
    if not any(stepped_whole):
        return max(map(count_states, optimizers), default=0)
    dtypes = {
        id(info.param): bucket.dtypes.master for unit in units for bucket in unit.buckets for info in bucket.params
    }
    found: dict[int, TensorState] = {}
    for number, (optimizer, whole) in enumerate(zip(optimizers, stepped_whole, strict=True)):
        if not whole:
            state = TensorState(slices=count_states(optimizer))
            found |= {id(param_of(p)): state for group in optimizer.param_groups for p in group["params"]}
            continue
        try:
            cpu = torch.device("cpu")
            probed = probe(optimizer, lambda p: dtypes[id(param_of(p))], cpu, true_shapes=False)
        except (ConfigError, KeyError) as error:
            raise UnknownStateError(f"{type(optimizer).__name__} cannot be tried: {error}") from error
        if probed.failed is not None or probed.couples:
            raise UnknownStateError(f"{type(optimizer).__name__} is not known")
        for index, group in enumerate(optimizer.param_groups):
            for param in map(param_of, group["params"]):
                shapes = probed.states.get((index, param.dim(), dtypes[id(param)]), ())
                nbytes = tuple(shape.nbytes(param.shape) for shape in shapes)
                found[id(param)] = TensorState(number, matrix_work(param.shape), nbytes)
    tensors = tuple(
        tuple(found.get(id(info.param), TensorState()) for info in bucket.params)
        for unit in units
        for bucket in unit.buckets
    )
    return TensorStates(tensors, message_nbytes)
