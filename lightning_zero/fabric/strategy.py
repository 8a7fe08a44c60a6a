"""ZeroFabricStrategy: maps Fabric's calls to calls of the engine. It holds no sharding logic.

It saves and loads the mapping of objects that users give to fabric.save, as one file or as a folder in DCP's format.
The file is the same as under DDP. All ranks write it if it holds exactly one sharded module; otherwise rank 0 does.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Unpack

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import Module
from torch.optim import Optimizer

from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.engine import engines
from lightning_zero.engine.torch_modes import outside_graphs
from lightning_zero.engine.units.describe import AUTOCAST_DTYPES
from lightning_zero.engine.whole import state_dicts
from lightning_zero.engine.whole.state_dicts import (
    check_optimizer,
    keeping_frozen,
    sharded_optimizer_state,
    sharded_state_dict,
)
from lightning_zero.lightning_api import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    FabricForkingLauncher,
    FabricScriptLauncher,
    fabric,
    get_filesystem,
    is_local,
)
from lightning_zero.settings import (
    CheckpointFormat,
    ConfigError,
    Signature,
    ZeroConfig,
    check_decided,
    keywords,
    names_arguments,
)
from lightning_zero.sharding import shard
from lightning_zero.trainer.launchers import Forking
from lightning_zero.trainer.precision import PrecisionRow, to_dtype
from lightning_zero.trainer.saves.checkpoint_files import CheckpointFiles
from lightning_zero.trainer.saves.checkpoint_fits import check_model
from lightning_zero.trainer.saves.checkpoint_io import writes_files
from lightning_zero.trainer.saves.range_saves import RangeSave
from lightning_zero.trainer.settings import settings_of, strategies, with_precision
from lightning_zero.trainer.summary import print_units


class FabricPrecision(PrecisionRow, fabric.plugins.precision.Precision):
    """Precision plugin of :class:`~lightning_zero.ZeroFabricStrategy`, with the arguments of :class:`PrecisionRow`."""

    front: ClassVar = "Fabric"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.overflowed: dict[Optimizer, bool] = {}  # whether gradients overflowed; until the optimizer steps

    def convert_input(self, data: Any) -> Any:
        """Convert floating-point inputs to the precision's dtype, also under autocast, as Fabric does."""
        dtype = AUTOCAST_DTYPES.get(self.row, self._default_dtype)
        return data if dtype is None else to_dtype(data, dtype)

    def convert_output(self, data: Any) -> Any:
        keeps = self.row not in AUTOCAST_DTYPES and self._default_dtype is None
        return data if keeps else to_dtype(data, torch.get_default_dtype())

    @outside_graphs
    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward of ``tensor``, and reduce all gradients before returning. Collective."""
        engines: Sequence[Engine] = self.strategy.engines_of_backward(model)
        if self.scaler is not None:
            self._forget_left_out(engines)
            tensor = tensor * self.scaler.scale
        with contextlib.ExitStack() as scopes:
            for engine in engines:
                if self.scaler is not None:
                    engine.passes.reducer.set_loss_scale(self.scaler.scale)
                scopes.enter_context(engine.passes.backward_scope())
            super().backward(tensor, model, *args, **kwargs)

    def _forget_left_out(self, engines: Sequence[Engine]) -> None:
        """Before a backward, update ``overflowed`` for optimizers that did not step after unscaling. Collective.

        Entries for finite gradients are removed, because they say nothing about the next backward. If gradients have
        overflowed and were not cleared, their entry stays, so that the next step is skipped. If users have cleared
        them, the entry is removed, and the scale is lowered as after a skipped step.
        """
        assert self.scaler is not None
        self.overflowed = {optimizer: True for optimizer, overflowed in self.overflowed.items() if overflowed}
        for optimizer in list(self.overflowed):
            engine: Engine = self.strategy.engine_of_optimizer(optimizer)
            if engine not in engines or engine.passes.reducer.unreduced:
                continue
            engine.passes.meet("a look at gradients of a step that was left out")
            places = map(engine.units.place_of, self.main_params(optimizer))
            if engine.passes.sharded_grads.total_norm(places).isfinite():
                del self.overflowed[optimizer]
                self.scaler.update(overflowed=True)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """With loss scaling, determine once per step whether gradients of ``optimizer`` overflowed, and divide the
        gradients that users see by the loss scale. Collective."""
        if self.scaler is not None and optimizer not in self.overflowed:
            engine: Engine = self.strategy.engine_of_optimizer(optimizer)
            params = self.main_params(optimizer)
            self.overflowed[optimizer] = engine.passes.sharded_grads.overflowed(map(engine.units.place_of, params))
            engine.passes.reducer.unscale(params)

    @outside_graphs
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step the optimizer. With loss scaling, all ranks skip the step if a gradient overflowed on any rank.
        Collective."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        if "closure" in kwargs:  # as torch.amp.GradScaler
            raise RuntimeError(
                "optimizer.step(closure): expected no closure with loss scaling (precision='16-mixed'). Call "
                "fabric.backward, then optimizer.step(), or set precision='bf16-mixed'."
            )
        self.unscale_gradients(optimizer)
        overflowed = self.overflowed.pop(optimizer)
        result = None if overflowed else optimizer.step()
        self.scaler.update(overflowed=overflowed)
        return result


class ZeroModule(nn.Module):
    """Wraps the user's ``module``, which is sharded in place. Fabric calls methods marked as forward through it too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._buffers_may_differ = False

    @property
    def engine(self) -> Engine:
        """Return the module's engine. Raise RuntimeError if the module was released."""
        engine = engine_of(self.module)
        if engine is None:
            raise RuntimeError("expected a sharded module, got one after engine.release(). Call fabric.setup again.")
        return engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._sync_buffers()
        return self.module(*args, **kwargs)

    @outside_graphs
    def _sync_buffers(self) -> None:
        """Send rank 0's buffers to all ranks, as DDP does, if training may have changed buffers. Collective."""
        trains = self.training and torch.is_grad_enabled()
        if trains or self._buffers_may_differ:
            self.engine.passes.buffers.sync(evaluates=not trains)
        self._buffers_may_differ = trains


class ForkLauncher(Forking, FabricForkingLauncher):
    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        with self._fit_to_fork():
            return super().launch(function, *args, **kwargs)


class ZeroFabricStrategy(CheckpointFiles, fabric.strategies.ParallelStrategy):
    """A strategy of Fabric for ZeRO stages 0-3, with the arguments of :class:`~lightning_zero.ZeroStrategy`.

    ``precision``: Fabric's plugin, or settings of ``zero.precision``. A setting that cannot work raises ConfigError.
    """

    __signature__ = Signature()
    _launchers: ClassVar = (FabricScriptLauncher, ForkLauncher)

    def __init__(
        self,
        stage: keywords.Stage = None,
        *,
        config: ZeroConfig | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: fabric.plugins.precision.Precision | keywords.Precision = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        **settings: Unpack[keywords.FabricKeywords],
    ) -> None:
        plugin = precision if isinstance(precision, fabric.plugins.precision.Precision) else None
        self._given_config = config
        with names_arguments(config):
            self.config = settings_of(config, stage=stage, precision=None if plugin else precision, **settings)
            _refuse_settings_of_the_trainer(self.config)
        strategies.add(self)
        self._asked_precision = self.config.precision.name
        self._set_up: list[weakref.ref[Engine]] = []  # the same order on all ranks
        self._unsharded: list[weakref.ref[Optimizer]] = []  # set up, with parameters of no sharded module
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = _Accumulation()  # type: ignore[assignment]  # Fabric asks for no class

    # -- processes ------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._start_waits is not None:
            # Not closed by the first engine: barriers need these waits whenever there is no engine.
            self._start_waits.place = "the user's code, outside of the calls of sharded modules"
            weakref.finalize(self, self._start_waits.close)

    def _settings_of_front(self) -> dict[str, Any]:
        return {"zero.precision.name": self.precision.row.name}

    @property
    def _engine_that_waits(self) -> Engine | None:
        """Return the engine of the first module that was set up, or None. Through the engine's Waits, a rank in a step
        learns that another rank is saving, and a rank that saves learns that another is in a step."""
        return next(iter(self._engines), None)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)

    # -- setup ----------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> FabricPrecision:
        return self._precision if self._precision is not None else FabricPrecision()  # type: ignore

    @precision.setter
    def precision(self, plugin: fabric.plugins.precision.Precision | None) -> None:
        """Replace the plugin that Fabric chose from ``Fabric(precision=)`` with a FabricPrecision."""
        asked = self._asked_precision
        self._precision = None if plugin is None else FabricPrecision.from_plugin(plugin, asked).attach(self)

    @contextlib.contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create the body's modules on the host, or on meta if ``empty_init``, because the device may be too small."""
        place = torch.device("meta") if empty_init else contextlib.nullcontext()
        with place, self.precision.module_init_context():
            yield

    def module_to_device(self, module: Module) -> None:
        """Move ``module`` to the device if it has no parameters, like a metric. Sharding moves other modules."""
        if next(module.parameters(), None) is None:
            module.to(self.root_device)

    def setup_module(self, module: Module) -> ZeroModule:
        """Shard ``module`` in place, and return a ZeroModule of it. All ranks raise ConfigError on failure.
        Collective."""
        config = with_precision(self.config, self.precision.row)
        with names_arguments(self._given_config):
            engine = shard(module, config=config, device=self.root_device, node=self._node)
        self._set_up.append(weakref.ref(engine))
        before, self._unsharded = self._unsharded, []
        for optimizer in filter(None, (reference() for reference in before)):  # may be this module's, set up first
            self.setup_optimizer(optimizer)
        engine.passes.between.begin_run()
        with engine.passes.fence.lowered():
            module.to(self.root_device)  # moves the rest: states of metrics
        if self.is_global_zero and logging.getLogger("lightning.fabric").isEnabledFor(logging.INFO):
            print_units(engine)
        return ZeroModule(module)

    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Module, list[Optimizer], Any]:
        found = self.setup_module(module)
        try:
            return found, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler
        except ConfigError:  # raised on all ranks
            found.engine.release()
            raise

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make ``optimizer`` step its module's shards, and return it. If it has no parameters of sharded modules, warn
        that it steps whole parameters. Raise ConfigError on all ranks if it has parameters of several sharded modules.
        Collective."""
        if self.steps_shards(optimizer):
            with names_arguments(self._given_config):
                self.engine_of_optimizer(optimizer).add_optimizer(optimizer)
        else:
            if self.precision.scaler is not None:
                self.engine_of_optimizer(optimizer)  # raises: the gradients would keep the loss scale
            self._unsharded.append(weakref.ref(optimizer))
            rank_zero_warn(
                f"fabric.setup_optimizers: {type(optimizer).__name__} has no parameters of a module that was set up. "
                "Each rank keeps its parameters whole, and steps them with its own gradients."
            )
        return optimizer

    def steps_shards(self, optimizer: Any) -> bool:
        """Return whether ``optimizer`` is an Optimizer with a parameter of a sharded module."""
        return isinstance(optimizer, Optimizer) and any(
            engine.units.owns(param)
            for group in optimizer.param_groups
            for param in group["params"]
            for engine in engines()
        )

    def engine_of_optimizer(self, optimizer: Optimizer) -> Engine:
        """Return the engine of the optimizer's parameters. Raise ConfigError if they have no engine or several."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        found = {engine for param in params for engine in engines() if engine.units.owns(param)}
        if len(found) != 1:
            raise ConfigError(
                f"fabric.setup: expected {type(optimizer).__name__} with parameters of one module that was set up, got "
                f"parameters of {len(found)} such modules. Set the module up first (fabric.setup(model, optimizer), or "
                "setup_module), and put modules that one optimizer steps into one module."
            )
        return found.pop()

    # -- steps ----------------------------------------------------------------------------------------------------

    def engines_of_backward(self, module: Module | None) -> Sequence[Engine]:
        """Return the engines to prepare for a backward: the engine of ``module`` if given, else the only engine or, if
        there are several, those that have begun a forward."""
        if isinstance(module, ZeroModule):
            return [module.engine]
        found = self._engines
        return found if len(found) == 1 else [engine for engine in found if engine.passes.key is not None]

    @property
    def _engines(self) -> list[Engine]:  # type: ignore[override]
        """Return the engines of modules that are still sharded, in the order of setup, the same on all ranks."""
        live = set(engines())
        return [engine for reference in self._set_up if (engine := reference()) is not None and engine in live]

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        self.precision.backward(tensor, module, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of ``optimizer``, and return the norm before clipping, 0-d. Raise RuntimeError on all
        ranks if the norm is not finite and ``error_if_nonfinite``. Collective."""
        if not self.steps_shards(optimizer):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        engine = self.engine_of_optimizer(optimizer)
        places = list(map(engine.units.place_of, self.precision.main_params(optimizer)))
        return engine.passes.sharded_grads.clip_by_norm(
            places, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        if not self.steps_shards(optimizer):
            super().clip_gradients_value(module, optimizer, clip_val)
            return
        self.precision.unscale_gradients(optimizer)
        if self.precision.overflowed.get(optimizer):  # the step is skipped, so inf and NaN do not matter
            return
        engine = self.engine_of_optimizer(optimizer)
        engine.passes.sharded_grads.clip_by_value(
            map(engine.units.place_of, self.precision.main_params(optimizer)), clip_val
        )

    # -- states ---------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """Return the module's state dict with full tensors, on all ranks. Collective."""
        if not isinstance(module, ZeroModule):
            return module.state_dict()
        return module.engine.state_dict(only_rank_0=False, trainable_only=self.config.checkpoint.exclude_frozen)

    def load_module_state_dict(self, module: Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load full tensors, which are the same on all ranks, into the module's shards. Collective."""
        if not isinstance(module, ZeroModule):
            module.load_state_dict(state_dict, strict=strict)
            return
        module.engine.load_state_dict(self._with_frozen(module, state_dict), strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's unsharded state on all ranks. Collective."""
        if not self.steps_shards(optimizer):
            return optimizer.state_dict()
        return state_dicts.optimizer_state(self.engine_of_optimizer(optimizer), optimizer, only_rank_0=False)

    def _with_frozen(self, module: ZeroModule, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return keeping_frozen(module.module, state) if self.config.checkpoint.exclude_frozen else state

    # -- save -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: Mapping[str, Any], storage_options: Any | None = None, filter: Filter | None = None
    ) -> None:
        """Save the modules, optimizers and other objects in ``state``. Raise on all ranks if writing fails. Collective.

        Args:
            filter: maps keys of ``state`` to functions, which rank 0 calls with the name and value of each part of the
                entry. They return whether to save the part. For a folder, values have only a shape and a dtype.
        """
        path, filter, without_frozen = self.broadcast(path), filter or {}, self.config.checkpoint.exclude_frozen
        folder = self.config.checkpoint.name is CheckpointFormat.sharded
        save = None if folder or storage_options is not None else self._save_by_ranges(path, state, filter)
        if save is not None:
            content = self._converted(state, lambda _: save.module_state(), save.optimizer_state)
        else:
            of_module = sharded_state_dict if folder else Engine.state_dict
            of_optimizer = sharded_optimizer_state if folder else state_dicts.optimizer_state
            content = self._converted(
                state,
                lambda module: of_module(module.engine, trainable_only=without_frozen),
                lambda optimizer: of_optimizer(self.engine_of_optimizer(optimizer), optimizer),
            )
        content = self._filtered(content, filter)
        self._put_values(self._engines, content, save)
        if folder:
            optimizers = [key for key, entry in state.items() if self.steps_shards(entry)]
            self._write_folder(content, path, storage_options, named=optimizers)
        elif save is None or not save.write(content):
            self._together("writing a checkpoint", lambda: self._write(content, path, storage_options))

    def _converted(
        self,
        state: Mapping[str, Any],
        of_module: Callable[[ZeroModule], dict[str, Any]],
        of_optimizer: Callable[[Optimizer], dict[str, Any]],
    ) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key, entry in state.items():
            content[key] = entry
            if isinstance(entry, ZeroModule):
                content[key] = of_module(entry)
            elif self.steps_shards(entry):
                content[key] = of_optimizer(entry)
            elif isinstance(entry, Stateful):
                content[key] = entry.state_dict()
        return content

    def _write(self, content: dict[str, Any], path: Any, storage_options: Any) -> None:
        if self.is_global_zero:
            if writes_files(self.checkpoint_io):
                self.checkpoint_io.long_work = self._long_work
            self.checkpoint_io.save_checkpoint(content, path, storage_options)

    def _save_by_ranges(self, path: Any, state: Mapping[str, Any], filter: Filter) -> RangeSave | None:
        """Return a RangeSave if all ranks can write ranges of the file; None if rank 0 must write all values."""
        owners = {module.engine for module in state.values() if isinstance(module, ZeroModule)}
        owners |= {self.engine_of_optimizer(entry) for entry in state.values() if self.steps_shards(entry)}
        io = self.checkpoint_io
        if len(owners) != 1 or not writes_files(io) or not is_local(path):
            return None
        file = Path(get_filesystem(path)._strip_protocol(str(path)))
        # A filter may look at values.
        return RangeSave(owners.pop(), io, file, with_values=bool(filter), noting=contextlib.nullcontext)

    def _filtered(self, content: dict[str, Any], filter: Filter) -> dict[str, Any]:
        """Return ``content`` without entries that ``filter`` rejects on rank 0, the only rank with values.
        Collective."""

        def ask() -> dict[str, list[str]]:
            parts = {key: content[key] for key in filter if self.is_global_zero and isinstance(content.get(key), dict)}
            return {key: [n for n, part in of.items() if filter[key](n, part)] for key, of in parts.items()}

        if filter:
            kept = self.broadcast(self._together("filtering a checkpoint", ask))
            for key, names in kept.items():
                content[key] = {name: content[key][name] for name in names if name in content[key]}
        return {key: value for key, value in content.items() if key not in filter or value != {}}

    # -- load -----------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file or a folder, saved at any stage by any number of ranks, into ``state``. Return the entries whose
        keys are not in ``state``. Collective.

        Args:
            state: a mapping with keys as saved; or one module or optimizer, if the checkpoint is its state alone.
            strict: require that the checkpoint has all keys of ``state``, and exactly the entries of each module.

        Raises:
            ConfigError: the checkpoint is damaged or of another model. All ranks raise, and nothing is loaded.
            KeyError: the checkpoint lacks a key of ``state``, and ``strict`` is true.
        """
        path = self.broadcast(path)
        checkpoint = self._read_checkpoint(
            path, weights_only, verified=bool(self.config.checkpoint.verify), of_trainer=False
        )
        if not state:
            return checkpoint
        if isinstance(state, Module | Optimizer):
            self._load_into({"": state}, {"": checkpoint}, path, strict)
            return {}
        missing = [key for key in state if key not in checkpoint]
        if strict and missing:
            raise KeyError(
                f"fabric.load: expected {missing[0]!r} in the checkpoint {path}, got none. Remove {missing[0]!r} from "
                "the state, or pass strict=False."
            )
        found = {key: checkpoint.pop(key) for key in list(state) if key in checkpoint}
        self._load_into(state, found, path, strict)
        return checkpoint

    def _load_into(self, state: Any, found: Mapping[str, Any], path: Any, strict: bool) -> None:
        optimizers = {key: entry for key, entry in state.items() if self.steps_shards(entry) and key in found}
        modules = {key: entry for key, entry in state.items() if isinstance(entry, Module) and key in found}

        def check() -> None:
            for key, module in modules.items():
                if isinstance(module, ZeroModule):
                    check_model(module.module, self._with_frozen(module, found[key]), path, strict=strict)
            for key, optimizer in optimizers.items():
                engine = self.engine_of_optimizer(optimizer)
                check_optimizer(engine, optimizer, found[key], f"fabric.load: {path}")

        self._together("comparing a checkpoint with the state to load", check)
        # First optimizers: parameters that are frozen now, and were not when saved, get masters for their values.
        for key in sorted(found, key=lambda key: key not in optimizers):
            entry, value = state[key], found[key]
            if key in modules:
                self.load_module_state_dict(entry, value, strict=strict)
            elif key in optimizers:
                state_dicts.load_optimizer_state(self.engine_of_optimizer(entry), entry, value)
            elif isinstance(entry, Stateful):
                entry.load_state_dict(value)
            else:
                state[key] = value

    # -- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """End the run. Modules stay sharded."""
        for engine in self._engines:
            engine.passes.end_run()
            engine.passes.between.end_run()
        super().teardown()


class DDPZeroFabricStrategy(ZeroFabricStrategy):
    """Fabric's strategy ``ddp_zero3``. Packages that check the class take it for a DDPStrategy."""


fabric.strategies.DDPStrategy.register(DDPZeroFabricStrategy)


class _Accumulation:
    def no_backward_sync(self, module: Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which backwards, if ``enabled``, reduce gradients only at stages 2 and 3."""
        if not enabled:
            return contextlib.nullcontext()
        engine = module.engine if isinstance(module, ZeroModule) else engine_of(module)
        if engine is None:
            raise TypeError(
                "fabric.no_backward_sync: expected a module that fabric.setup has returned, got "
                f"{type(module).__name__}."
            )
        return engine.passes.reducer.no_sync()


def _refuse_settings_of_the_trainer(config: ZeroConfig) -> None:
    check_decided(config)
    if config.splits:
        raise ConfigError(
            f"{config.splits}: expected 1 with Fabric, where optimizers are made before a module is split. Train with "
            "ZeroStrategy, or shard the module with lightning_zero.shard."
        )
    if config.checkpoint.background:
        raise ConfigError(
            "zero.checkpoint.background: expected false with Fabric, because fabric.save returns only after a "
            "checkpoint is written, got true. Drop zero.checkpoint.background."
        )
    if config.gather_after_fit is True:
        raise ConfigError(
            "zero.gather_after_fit: expected null or false with Fabric, where a strategy cannot tell when a run ends, "
            "got true. Drop zero.gather_after_fit, and read values inside `with lightning_zero.gather(model):`."
        )


T = TypeVar("T")
Filter = Mapping[str, Callable[[str, Any], bool]]
