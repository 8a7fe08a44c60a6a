"""ZeroStrategy: Lightning's lifecycle in terms of the engine. No sharding logic here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_zero.config import AfterFit, ZeroConfig, check_accumulation, for_layout, is_decided
from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.units.describe import TRUE_DTYPES, bucket_shapes, describe_units
from lightning_zero.engine.whole import shown
from lightning_zero.lightning_api import CheckpointIO, ClusterEnvironment, NoOptimizer, TrainerFn, pl, reset_seed
from lightning_zero.planning.activations import Activations
from lightning_zero.planning.whole import copy_nbytes
from lightning_zero.sharding import shard
from lightning_zero.trainer import compiled, processes, validations
from lightning_zero.trainer.callbacks import averaging, finetuning, pruning, stochastic_averaging
from lightning_zero.trainer.interruptions import Interruptions, Left
from lightning_zero.trainer.last_batches import check_last_batches
from lightning_zero.trainer.launchers import TRAINERS
from lightning_zero.trainer.long_sequences import LongSequences
from lightning_zero.trainer.memory import auto_row
from lightning_zero.trainer.precision import ZeroPrecision
from lightning_zero.trainer.processes import Processes
from lightning_zero.trainer.saves import kept_files, range_saves
from lightning_zero.trainer.saves.checkpoint_io import async_writer
from lightning_zero.trainer.saves.random_numbers import RandomNumbers
from lightning_zero.trainer.settings import settings_of, with_precision
from lightning_zero.trainer.steps import SteppingStrategy
from lightning_zero.trainer.summary import print_held, print_units


class ZeroStrategy(Processes, SteppingStrategy):
    """ZeRO stages 0-3 as a Lightning strategy.

    Args:
        stage: a row of ``zero/stage`` (``"zero0"`` .. ``"zero3"``, or 0 .. 3); default ``zero3``. ``"auto"``: the
            fastest that fits, decided at the start of a run.
        offload: a row of ``zero/offload``.
        checkpoint: a row of ``zero/checkpoint``.
        compile: a row of ``zero/compile``, or its settings.
        config: a whole :class:`ZeroConfig`; other arguments are set on top of it.
        settings: fields of :class:`ZeroConfig`, such as ``prefetch_bytes`` or ``unit={"classes": ["Block"]}``.
        timeout: of the process group; ``None``: torch's, and ``stall_timeout_s`` where only the hosts wait (gloo).
        start_method: how processes are started: ``"popen"``, by running the script again, or ``"fork"``, in a notebook.

    The remaining arguments are those of every Lightning strategy.

    Attributes:
        run_settings: see :class:`Processes`.
        saves_on_sigterm: a run that gets SIGTERM saves ``hpc_ckpt_*.ckpt`` in ``default_root_dir`` before it leaves; on
            SLURM it always does.
        save_every_s: a run saves it every so many seconds too.
        command_to_go_on: given a checkpoint, says how a run goes on from it that was interrupted.
        decision: the rows that ``stage="auto"`` has become, and why.
        activations_of_run: gives the activations of a micro-batch, for the plan that is shown at the end of training.
        planned_states: tensors of optimizer state for each parameter, for that decision; ``None``: those of
            ``configure_optimizers``.

    Raises:
        ConfigError: a setting that cannot work; the message names the key to change.
    """

    def __init__(
        self,
        stage: int | str | None = None,
        *,
        offload: str | None = None,
        checkpoint: str | Mapping[str, Any] | None = None,
        compile: str | Mapping[str, Any] | None = None,
        config: ZeroConfig | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: pl.plugins.precision.Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        **settings: Any,
    ) -> None:
        config = settings_of(config, stage, offload, checkpoint, compile, settings)
        self._asked_precision = config.precision.name
        super().__init__(
            config,
            checkpoint_io,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.asked_config = None if is_decided(config) else config
        self.decision: auto_row.Decision | None = None
        self.planned_states: int | None = None
        self.activations_of_run: Callable[[], Activations | None] | None = None
        self.saves_on_sigterm = False
        self.save_every_s: float | None = None
        self.command_to_go_on: Callable[[str], str] = call_to_go_on
        self._random_numbers: RandomNumbers | None = None
        self._trained = False
        self._left = False  # on a signal, in a hurry
        self._has_values = False  # the module, which was trained before

    launchers: ClassVar = TRAINERS

    # -- what the Trainer asks and tells --------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Without this Lightning would leave the samplers alone and every rank would train on the same data."""
        return self.num_nodes * self.num_processes > 1

    @property
    def precision_plugin(self) -> ZeroPrecision:
        return self._precision_plugin if self._precision_plugin is not None else ZeroPrecision()  # type: ignore

    @precision_plugin.setter
    def precision_plugin(self, plugin: pl.plugins.precision.Precision | None) -> None:
        """Lightning hands over the plugin it chose from ``Trainer(precision=)``; ours takes its place.

        Raises:
            ConfigError: another precision than ``zero.precision.name`` asks for.
        """
        if plugin is None:
            self._precision_plugin = None
            return
        ours = ZeroPrecision.from_plugin(plugin, self._asked_precision)
        ours.attach(self)
        self._precision_plugin = ours

    @property
    def engine(self) -> Engine:
        """The engine of the connected LightningModule.

        Raises:
            RuntimeError: it is not sharded yet.
        """
        module = self.lightning_module
        engine = engine_of(module) if module is not None else None
        if engine is None:
            raise RuntimeError(
                "the LightningModule is not sharded yet: that happens after the setup() and configure_model() hooks. "
                "Use this from on_fit_start on."
            )
        return engine

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._precision_plugin is not None:
            self.precision_plugin.attach(self)

    # -- processes ------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        self._left = False
        self._to_load = self._saved_rng = None
        self._waits_for_setup = True
        super().setup_environment()
        reset_seed()
        self.join_ranks()
        if self.lightning_module is not None:
            averaging.attach(self.lightning_module.trainer)
            stochastic_averaging.attach(self.lightning_module.trainer)
            finetuning.attach(self.lightning_module.trainer)
            pruning.attach(self.lightning_module.trainer)
            kept_files.attach(self.lightning_module.trainer)
            range_saves.attach(self.lightning_module.trainer)

    def _settings_of_front(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"zero.precision.name": self.precision_plugin.row.name}
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            names = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val")
            settings |= {f"trainer.{name}": getattr(trainer, name) for name in names}
        return settings

    @property
    def _engine_that_waits(self) -> Engine | None:
        return engine_of(self.lightning_module) if self.lightning_module is not None else None

    # -- before other processes start -----------------------------------------------------------------------------

    @property
    def speaks_for_all(self) -> bool:
        """Whether what this process refuses now is refused for all ranks: it starts them, all on this host."""
        environment = self.cluster_environment
        return self.num_nodes == 1 and not (environment is not None and environment.creates_processes_externally)

    def check_before_start(self, model: pl.LightningModule) -> None:
        """Lightning has been given ``model``, and has not started other processes yet. Modules may lack the parts that
        ``configure_model`` makes: what these add is found when the run is set up.

        Raises:
            ConfigError: what the settings ask for does not fit here.
        """
        if self.config.after_fit is AfterFit.whole and self.speaks_for_all and engine_of(model) is None:
            units = describe_units(model, for_layout(self.config), self.precision_plugin.row)
            shown.check_room_here(
                copy_nbytes(nbytes for shape in bucket_shapes(units) for nbytes in shape.built_nbytes)
            )

    # -- setup and teardown ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are built on the host (on meta with ``empty_init``): the whole need not fit on the device."""
        place = torch.device("meta") if empty_init else contextlib.nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if (engine := engine_of(self.model)) is not None:
            shown.hide_whole(engine, keep=not fitting)  # a step changes all values
        if self.lightning_module is not None:
            auto_row.decide(self, trainer, self.lightning_module, fitting=fitting)
        self._has_values = engine_of(self.model) is not None  # of a run before, whatever its settings
        if fitting and trainer.accumulate_grad_batches > 1:
            check_accumulation(with_precision(self.config, self.precision_plugin.row))
        if fitting and self._layer_sync:
            self.model = self._sync_layers(self.model)
        self.model = self._setup_model(self.model)
        self._sequences = LongSequences(self.model, self.engine, self.config.sequence_parallel)
        if fitting:
            saved, self._saved_rng = self._saved_rng, None
            self._random_numbers = RandomNumbers(trainer, self.root_device, saved)
            self.setup_optimizers(trainer)
        self._load_what_waits(trainer)
        if fitting:
            averaging.average_shards(trainer, self.engine)
            stochastic_averaging.average_shards(trainer, self.engine)
        self.setup_precision_plugin()
        self._interruptions = Interruptions(
            trainer,
            self.engine,
            training=fitting,
            saves_on_sigterm=self.saves_on_sigterm,
            save_every_s=self.save_every_s,
        )

    def _sync_layers(self, model: Module) -> Module:
        """Convert batch norms; they are other modules afterwards, so this comes before sharding."""
        assert self._layer_sync is not None
        plain = [m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm)]
        if not plain:
            return model
        if (engine := engine_of(model)) is not None:
            engine.release()
        return self._layer_sync.apply(model)

    def model_to_device(self) -> None:
        """The engine moves buckets and buffers itself."""

    def _setup_model(self, model: Module) -> Module:
        """Shard the module; one that is sharded already, by an earlier run, stays so if nothing has changed."""
        wanted = with_precision(self.config, self.precision_plugin.row)
        engine = engine_of(model)
        if engine is not None and not self._still_fits(engine, model, wanted):
            engine.release()
            engine = None
        if engine is None:
            sources = self._first_values(model)
            engine = shard(
                model,
                config=wanted,
                device=self.root_device,
                node=self.node,
                sources=sources,
                has_values=self._has_values,
                long_work=self.long_work,
            )
            self._start_is_over()
            if self.config.summary and self.is_global_zero:
                print_units(engine)
            shown.check_room(engine)
        else:
            engine.comm.waits.forget_failures()
            engine.long_work = self.long_work
        engine.passes.calls_meet = True
        with engine.placeholders_allowed():
            model.to(self.root_device)  # what is neither parameter nor buffer: module.device, states of metrics
        if (dtype := TRUE_DTYPES.get(self.precision_plugin.row)) is not None:
            model.__dict__["_dtype"] = dtype  # module.dtype
        return model

    def _still_fits(self, engine: Engine, model: Module, wanted: ZeroConfig) -> bool:
        same_params = {id(p) for p in model.parameters()} == {id(i.param) for u in engine.units for i in u.infos()}
        return same_params and engine.config == wanted and engine.comm.device == self.root_device

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self.engine.drop_optimizers()
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, NoOptimizer):  # configure_optimizers returned None
                self.engine.add_optimizer(optimizer)

    def teardown(self) -> None:
        """Shards stay where they are: saving, testing and fitting again work afterwards."""
        assert self.cluster_environment is not None and self.accelerator is not None
        module = self.lightning_module
        if module is not None:
            engine = engine_of(module)
            if engine is not None:
                engine.rest()
                self._show_held(engine, module)
                self._show_whole(engine)
            if module._trainer is not None:
                averaging.let_go(module.trainer)
                stochastic_averaging.let_go(module.trainer)
                finetuning.let_go(module.trainer)
                pruning.let_go(module.trainer)
                kept_files.let_go(module.trainer)
        if self._interruptions is not None:
            self._interruptions.let_go()
            self._interruptions = None
        if self._random_numbers is not None:
            self._random_numbers.let_go()
        self._sequences = LongSequences()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._end_writing()

    def _show_held(self, engine: Engine, module: pl.LightningModule) -> None:
        """At the end of training: the plan beside what was measured. On rank 0."""
        trained, self._trained = self._trained, False
        if trained and self.config.summary and self.is_global_zero and module._trainer is not None:
            activations = self.activations_of_run() if self.activations_of_run is not None else None
            print_held(engine, module.trainer.accumulate_grad_batches, activations)

    def _show_whole(self, engine: Engine) -> None:
        if self._left:
            return
        alone = engine.world_size == 1 and not engine.after_step.has_failed
        if not processes.has_failed() or alone:
            shown.show_whole(engine)
        else:
            shown.show_again(engine)

    def on_exception(self, exception: BaseException) -> None:
        """No collective here: the other ranks may be gone."""
        if isinstance(exception, Left):  # between two steps, on all ranks
            self._left = True
            return
        processes.fail()
        module = self.lightning_module
        engine = engine_of(module) if module is not None else None
        if self._waits is not None:
            self._waits.explain(exception)
        if engine is not None:
            engine.abort()

    # -- training -------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        self.engine.comm.streams.accelerator.reset_peak()  # that of the build is no step's
        if self._random_numbers is not None:
            self._random_numbers.on_train_start()
        assert self.lightning_module is not None
        check_last_batches(self.lightning_module.trainer, self.config.micro_batches)
        validations.repair_counts(self.lightning_module.trainer)

    def on_train_end(self) -> None:
        self._trained = True
        if self._interruptions is not None:
            self._interruptions.at_boundary(last=True)

    def _end_writing(self) -> None:
        if processes.has_failed():
            self._background.wait_alone(self.long_work)
        else:
            self.finish_writes()
        try:
            if (writer := async_writer(self.checkpoint_io)) is not None:
                writer.teardown()
            self.checkpoint_io.teardown()
        except Exception as error:
            if not processes.has_failed():
                raise
            rank_zero_warn(str(error))  # in place of what has ended the run it would be misleading


compiled.accept(ZeroStrategy)


def call_to_go_on(path: str) -> str:
    """How a run of a script of the user's own goes on from the checkpoint ``path``."""
    return f"trainer.fit(..., ckpt_path={path!r})"
