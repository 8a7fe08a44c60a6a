"""ZeroStrategy: maps the hooks of Lightning's Trainer to calls of the engine. It holds no sharding logic."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Mapping
from datetime import timedelta
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_zero.checkpoint.hugging_face.export import export
from lightning_zero.checkpoint.hugging_face.files import parse_dtype
from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.passes.compiled import find_compiler, needs_compiler
from lightning_zero.engine.units.describe import TRUE_DTYPES, bucket_shapes, describe_units, refuse_scripted
from lightning_zero.engine.whole import whole_params
from lightning_zero.lightning_api import (
    CheckpointIO,
    ClusterEnvironment,
    NoOptimizer,
    TrainerFn,
    pl,
    rank_zero_info,
    reset_seed,
)
from lightning_zero.mesh.plans import mesh_for, split_module
from lightning_zero.planning.memory import copy_nbytes
from lightning_zero.settings import (
    ConfigError,
    Signature,
    ZeroConfig,
    for_layout,
    is_decided,
    keywords,
    names_arguments,
    parse_bytes,
    with_rows,
)
from lightning_zero.sharding import shard
from lightning_zero.trainer import interruptions, loops, uneven
from lightning_zero.trainer.callbacks import averaging
from lightning_zero.trainer.interruptions import Interruptions, Left, repair_counts, step_plateau_schedulers
from lightning_zero.trainer.launchers import TRAINERS
from lightning_zero.trainer.memory import auto_row
from lightning_zero.trainer.memory.auto_row import check_host_room
from lightning_zero.trainer.processes import Ended
from lightning_zero.trainer.run import Run
from lightning_zero.trainer.saves.checkpointing import Checkpoints
from lightning_zero.trainer.saves.random_numbers import RandomNumbers
from lightning_zero.trainer.saves.sharded_checkpoints import refuse_writer
from lightning_zero.trainer.settings import settings_of, strategies, with_precision
from lightning_zero.trainer.steps import Steps
from lightning_zero.trainer.summary import held_rows, print_held, print_units

# Prefixes of hooks between steps. There restage() may end a pass that is still open (training_step returned None).
_BETWEEN_STEPS = ("on_train_", "on_validation_", "on_test_", "on_predict_", "on_fit_", "on_sanity_check_")


class ZeroStrategy(Run):
    """Trains a LightningModule with ZeRO stages 0-3. Raises ConfigError if a setting cannot work.

    Args:
        stage: ``"zero0"`` .. ``"zero3"`` (default), 0 .. 3, or ``"auto"``, the fastest stage that fits in memory.
        config: a complete :class:`ZeroConfig`; other arguments override its fields.
        settings: fields of :class:`ZeroConfig`, such as ``offload="cpu"`` or ``unit={"classes": ["Block"]}``.
        timeout: timeout of the process group's collectives; default: torch's, but on gloo ``zero.stall_timeout_s``.
        start_method: ``"popen"`` starts processes by running the script again; ``"fork"`` is for notebooks.

    Attributes:
        config: the settings of this run.
        saves_on_sigterm: whether SIGTERM saves ``hpc_ckpt_*.ckpt`` in ``default_root_dir``. On SLURM it always does.
        save_every_s: seconds between periodic saves of such a checkpoint; None: no periodic saves.
        run_plan: facts about the run from the program that starts it; see :class:`RunPlan`.

    The other arguments are those of every Lightning strategy.
    """

    __signature__ = Signature()
    _launchers: ClassVar = TRAINERS

    def __init__(
        self,
        stage: keywords.Stage = None,
        *,
        config: ZeroConfig | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: pl.plugins.precision.Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        **settings: Unpack[keywords.Keywords],
    ) -> None:
        self._given_config = config
        with names_arguments(config):
            self.config = settings_of(config, stage=stage, **settings)
            refuse_writer(checkpoint_io, self.config.checkpoint)
        strategies.add(self)
        self._asked_precision = self.config.precision.name
        self._module: pl.LightningModule | None = None
        self._given_offload = (
            self.config.offload
        )  # has settings, such as budgets, of offloads that restage() may choose
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.saves_on_sigterm = False
        self.save_every_s: float | None = None
        self._auto = auto_row.Auto(None if is_decided(self.config) else self.config)
        self._checkpoints = Checkpoints(self)
        self._interruptions: Interruptions | None = None
        self._steps = Steps(self)
        self._trained = False
        self._left = False  # whether a signal ended the run
        self._has_values = False  # whether an earlier run left values in the module

    # -- what users call --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step_scope(self, key: str = "step_scope") -> Generator[None, None, None]:
        """Context manager in which to call the module outside of a Lightning step, for example to generate text. Calls
        with the same ``key`` share one plan of gathers. Collective."""
        precision = self.precision_plugin.forward_context()
        with torch.no_grad(), precision, self.engine.step_scope(key, evaluation=True):
            yield

    def export(self, path: Any, *, dtype: str | torch.dtype | None = None, shard_size: str | int = "5GB") -> None:
        """Write the model to the new folder ``path``, for ``from_pretrained``; each rank writes its part. Collective.

        Args:
            dtype: dtype of written floating-point tensors, such as ``"bf16"``. Default: the dtype that each tensor had
                when the model was built.
            shard_size: the largest size of a file.

        Raises:
            ConfigError: the folder is not empty, or some rank does not see it.
            Exception: writing failed. All ranks raise this error, with the folder and the cause.
        """
        wanted, nbytes = parse_dtype("export(dtype=)", dtype), parse_bytes("export(shard_size=)", shard_size)
        export(self.engine, self.broadcast(str(path)), wanted, nbytes)

    def finish_writes(self) -> None:
        """Wait until all background saves are on disk. Raise on all ranks if one has failed. Collective."""
        self._checkpoints.finish_writes()

    @names_arguments()
    def restage(self, stage: int | str | None = None, offload: str | Mapping[str, Any] | None = None) -> None:
        """Change the stage, the offload, or both, between two steps or between two fits. Collective.

        Inside a fit, call this in ``on_train_batch_end``, ``on_train_epoch_end`` and the like. The module, parameters
        and optimizers stay the same objects. Losses equal those of a run that had the new stage and offload from its
        start. Before the module is sharded, only settings change.

        Args:
            stage: ``"zero0"`` .. ``"zero3"``, or 0 .. 3; default: no change.
            offload: a name, or all offload settings. With a name, other offload settings are kept. Default: no change.

        Raises:
            ConfigError: the arguments cannot work or differ between ranks, or a step is under way. All ranks raise, and
                nothing changes.
            Exception: moving values failed. Every later use of the engine raises.
        """

        def wanted() -> ZeroConfig:
            if self._checkpoints.range_save is not None:
                raise ConfigError(
                    "restage: expected a call between steps, got a call inside of trainer.save_checkpoint(). Call "
                    "restage before or after save_checkpoint."
                )
            return with_rows(self.config, stage, offload, settings=self._given_offload)

        config = self._together("restage: its stage and offload", wanted)
        module, engine = self.lightning_module, self._engine_that_waits
        if module is not None and engine is not None:
            self._move(engine, module, config)
        self.config = config
        if offload is not None and not isinstance(offload, str):
            self._given_offload = config.offload

    def _move(self, engine: Engine, module: pl.LightningModule, config: ZeroConfig) -> None:
        """Restage ``engine`` and callbacks' averages to the stage and offload of ``config``. Collective."""
        trainer = module._trainer
        self._checkpoints.wait_for_writes()
        if (module._current_fx_name or "").startswith(_BETWEEN_STEPS):
            engine.passes.end_run()
        before = engine.config
        follow = averaging.followers(trainer, engine) if trainer is not None else []
        engine.restage(config.stage.name, config.offload, follow=follow)
        if engine.config != before:
            old, new = ((c.stage.name.name, c.offload.name.name) for c in (before, engine.config))
            rank_zero_info(f"restaged from {old[0]} to {new[0]}, offload {old[1]} to {new[1]}")
            if self._shows_tables:
                print_units(engine)

    # -- the start --------------------------------------------------------------------------------------------------

    @property
    def _lightning_module(self) -> pl.LightningModule | None:
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:  # type: ignore[override]
        """Check and store the run's module. The Trainer sets this attribute before it starts processes."""
        if module is not None and module is not self._module:
            with names_arguments(self._given_config):
                self._check_before_start(module)
        self._module = module

    def _check_before_start(self, model: pl.LightningModule) -> None:
        """Raise ConfigError before processes start if ``model`` is scripted, if the C++ compiler that it needs is
        missing, or if this host lacks memory for the whole model after the fit."""
        refuse_scripted(model)
        if needs_compiler(model):
            find_compiler("torch.compile", "compile with another backend")
        if self.config.gather_after_fit is True and self._speaks_for_all and engine_of(model) is None:
            units = describe_units(model, for_layout(self.config), self.precision_plugin.row)
            whole_params.check_free_memory_here(
                copy_nbytes(nbytes for shape in bucket_shapes(units) for nbytes in shape.built_nbytes)
            )

    def setup_environment(self) -> None:
        self._left = False
        self._checkpoints.begin_run()
        super().setup_environment()
        if self.world_size == 1:  # on one rank Lightning drops sync_dist=True of a log call, then warns that it lacks
            warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True", UserWarning)
        reset_seed()
        if (trainer := self._trainer_of_run) is not None:
            loops.adapt_run(trainer)
            loops.compare_callbacks(trainer)
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = mesh_for(self.config, self.root_device)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create the body's tensors on the host, or on meta if ``empty_init``, because the device may be too small."""
        place = torch.device("meta") if empty_init else contextlib.nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    # -- setup ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        loops.adapt_run(trainer)  # again, for callbacks that setup hooks have added
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        was_sharded = (engine := engine_of(self.model)) is not None
        if engine is not None:
            reshaped = whole_params.take_reshaped(engine)
            whole_params.shard_again(engine, keep=not fitting)  # a fit changes all values
            if any(engine.comm.gather_checked(bool(reshaped), "whether parameters have other shapes than before")):
                self._reset_optimizers_and_schedulers()
                engine.release()
                for param, values in reshaped.items():
                    param.data = values
        if self.lightning_module is not None:
            split_module(self.lightning_module, self.config, self.root_device)  # first, because a plan counts the parts
            self._auto.decide(self, trainer, self.lightning_module, fitting=fitting)
        self._has_values = was_sharded  # from an earlier run, whatever its settings
        if fitting and self._layer_sync:
            self.model = self._sync_layers(self.model)
        self.model = self._setup_model(self.model)
        self._steps.begin_run()
        if fitting:
            saved, self._checkpoints.saved_rng = self._checkpoints.saved_rng, None
            self._random_numbers = RandomNumbers(trainer, self.root_device, saved)
        self._checkpoints.load_what_waits()  # first, because configure_optimizers may read weights
        if fitting:
            self.setup_optimizers(trainer)
            averaging.average_shards(trainer, self.engine)
        self.setup_precision_plugin()
        for wrapper in self._lightning_optimizers:  # they inherit methods of the optimizer's class, not of the object
            names = ("state_dict", "load_state_dict")
            vars(wrapper).update({name: getattr(wrapper.optimizer, name) for name in names})
        self._interruptions = Interruptions(
            trainer,
            self.engine,
            training=fitting,
            saves_on_sigterm=self.saves_on_sigterm,
            save_every_s=self.save_every_s,
        )

    def _sync_layers(self, model: Module) -> Module:
        """Return ``model`` with batch norms replaced by SyncBatchNorm. Unshard a sharded model first, because new
        modules must be created before sharding."""
        assert self._layer_sync is not None
        plain = [m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm)]
        if not plain:
            return model
        if (engine := engine_of(model)) is not None:
            engine.release()
        return self._layer_sync.apply(model)

    def model_to_device(self) -> None:
        """Do nothing, because the engine moves buckets and buffers."""

    def _setup_model(self, model: Module) -> Module:
        """Shard ``model`` and return it; keep its engine if parameters, settings and device are unchanged.
        Collective."""
        wanted = with_precision(self.config, self.precision_plugin.row)
        engine = engine_of(model)
        if engine is not None:
            same_params = {id(p) for p in model.parameters()} == {id(i.param) for u in engine.units for i in u.infos}
            if not same_params or engine.config != wanted or engine.comm.device != self.root_device:
                self._reset_optimizers_and_schedulers()  # an optimizer that the user's code holds keeps its state
                engine.release()
                engine = None
        if engine is None:
            sources = self._checkpoints.first_values(model)
            check_host_room(self, model, wanted)
            engine = shard(
                model,
                config=wanted,
                device=self.root_device,
                node=self._node,
                sources=sources,
                has_values=self._has_values,
                long_work=self._long_work,
            )
            self._start_is_over()
            if self._shows_tables:
                print_units(engine)
            whole_params.check_free_memory(engine)
        else:
            engine.comm.waits.forget_failures()
            engine.comm.long_work = self._long_work
        engine.passes.between.begin_run(in_trainer=True)
        with engine.passes.fence.lowered():
            model.to(self.root_device)  # sets module.device, and moves states of metrics
        if (dtype := TRUE_DTYPES.get(self.precision_plugin.row)) is not None:
            model.__dict__["_dtype"] = dtype  # module.dtype
        return model

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        configure = super().setup_optimizers

        def make() -> list[Optimizer]:
            configure(trainer)
            # configure_optimizers() may have returned None
            return [optimizer for optimizer in self.optimizers if not isinstance(optimizer, NoOptimizer)]

        self.engine.renew_optimizers(make)

    # -- steps ------------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if name == "run-stage" and self._interruptions is not None:
            self._interruptions.take_signals()
        super().barrier(name)

    def process_dataloader(self, dataloader: Any) -> Any:
        numbers = self._random_numbers
        if numbers is not None and numbers.watches and self._trainer_of_run.training:
            numbers.before_iterator(dataloader)
        return dataloader

    def on_train_start(self) -> None:
        self.engine.comm.streams.accelerator.reset_peak()  # forget the peak of building the model
        if self._random_numbers is not None:
            self._random_numbers.on_train_start()
        if self.engine.compiled.are_there:
            rank_zero_info("compiling: the first steps of training and of validation may take minutes")
        repair_counts(self._trainer_of_run)
        self._steps.begin_training()

    def on_train_end(self) -> None:
        self._trained = True
        self._steps.end_training()
        if self._interruptions is not None:
            self._interruptions.at_boundary(last=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.train(super().training_step, args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self._steps.backward(super().backward, closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        return self._steps.optimizer_step(super().optimizer_step, optimizer, closure, *args, **kwargs)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._steps.sequences.check_alike(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate("validation_step", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate("test_step", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate("predict_step", super().predict_step, args, kwargs)

    def on_validation_start(self) -> None:
        self._steps.begin_evaluation()
        uneven.serve_others(self)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        if self._interruptions is not None and self._interruptions.training:
            step_plateau_schedulers(self._trainer_of_run)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """At stages 0 and 1, only accumulate gradients of backwards in the body. Stages 2 and 3 still reduce them."""
        with self.engine.passes.reducer.no_sync():
            yield

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return False, as under DDP, because BaseFinetuning's hooks must see the checkpoint before
        configure_optimizers. Weights are loaded later, in setup."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoints.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._checkpoints.save(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoints.load(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_model(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(checkpoint)

    # -- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """End the run. Shards stay, so the module can be saved, tested and fitted again."""
        assert self.cluster_environment is not None and self.accelerator is not None
        module, engine = self.lightning_module, self._engine_that_waits
        if module is not None and engine is not None:
            engine.passes.end_run()
            engine.passes.between.end_run()
            self._checkpoints.loaders.fit_ends(module._trainer)
            self._show_held(engine, module)
            if not self._left:
                alone = engine.comm.world_size == 1 and engine.passes.after_step.failed is None
                (whole_params.show_whole if alone or not Ended.failed else whole_params.show_again)(engine)
        self._interruptions = None
        if self._random_numbers is not None:
            self._random_numbers.stop()
        self._steps = Steps(self)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._checkpoints.end()

    def _show_held(self, engine: Engine, module: pl.LightningModule) -> None:
        trained, self._trained = self._trained, False
        if trained and self._shows_tables:
            found = self.run_plan.activations
            activations = found() if callable(found) else found
            self.run_plan.held = held_rows(engine, module.trainer.accumulate_grad_batches, activations)
            print_held(self.run_plan.held)

    def on_exception(self, exception: BaseException) -> None:
        """Mark the run as failed, unless a signal ended it. Issues no collectives, because other ranks may be gone."""
        if isinstance(exception, Left):  # raised on all ranks between two steps, so the engine is intact
            self._left = True
            return
        Ended.failed = True
        if (trainer := self._trainer_of_run) is None or trainer.global_step == 0:
            interruptions.note_failure(exception)
        if self._waits is not None:
            self._waits.explain(exception)
        if (engine := self._engine_that_waits) is not None:
            engine.passes.abort()


# Lightning accepts a module made by ``torch.compile`` only with three strategy classes of its own, so ZeroStrategy
# registers as one of them. Lightning asks for this class nowhere else.
pl.strategies.SingleDeviceStrategy.register(ZeroStrategy)


class DDPZeroStrategy(ZeroStrategy):
    """The strategy of ``Trainer(strategy="ddp_zero3")``. Packages that check the class take it for a DDPStrategy. So
    does Lightning, for which a run on one device therefore counts as distributed, as under DDP."""


pl.strategies.DDPStrategy.register(DDPZeroStrategy)
