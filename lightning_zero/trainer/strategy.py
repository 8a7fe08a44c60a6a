"""ZeroStrategy: Lightning's lifecycle in terms of the engine. No sharding logic here."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_zero.checkpoint.hugging_face.export import export
from lightning_zero.checkpoint.hugging_face.files import parse_dtype
from lightning_zero.checkpoint.hugging_face.record import RECORD as HUGGING_FACE
from lightning_zero.checkpoint.hugging_face.record import record_of
from lightning_zero.checkpoint.sharded.save import ShardedSaver
from lightning_zero.comm.agreements import (
    ApartError,
    barrier,
    broadcast_object,
    gather_objects,
    gather_rows,
    open_waits,
    together,
)
from lightning_zero.config import CheckpointFormat, ConfigError, ZeroConfig, make_config, parse_bytes
from lightning_zero.device import accelerator_of
from lightning_zero.device.cuda import default_device
from lightning_zero.engine import Engine, engine_of, shard
from lightning_zero.engine.units.describe import TRUE_DTYPES
from lightning_zero.engine.whole.module_state import keeping_frozen
from lightning_zero.engine.whole.sharded_state import sharded_optimizer_state, sharded_state_dict
from lightning_zero.ranks import rendezvous
from lightning_zero.ranks.allocation import check_allocation
from lightning_zero.ranks.environments import own_environment
from lightning_zero.ranks.peers import PeerError
from lightning_zero.ranks.waits import StallError, Waits
from lightning_zero.tiers.claims import check_folder
from lightning_zero.trainer import averaging, finetuning, kept_files, pruning, range_saves, validations
from lightning_zero.trainer.checkpoint_fits import check_model
from lightning_zero.trainer.checkpoint_io import async_writer, load, remove_behind_writes, wait_for_writes, with_default
from lightning_zero.trainer.interruptions import Interruptions, Left, refuse_lonely_save
from lightning_zero.trainer.precision import ZeroPrecision
from lightning_zero.trainer.random_numbers import KEY as RNG_KEY
from lightning_zero.trainer.random_numbers import RandomNumbers, Saved, saved_ranks
from lightning_zero.trainer.range_saves import RangeSave
from lightning_zero.trainer.sharded_checkpoints import divide, is_folder, local_path, refuse_writer
from lightning_zero.trainer.sharded_checkpoints import read as read_folder
from lightning_zero.trainer.summary import print_units
from lightning_zero.trainer.verified_loads import verify

EXIT_BARRIER_S = 20.0
T = TypeVar("T")
OWN_RENDEZVOUS = frozenset({"mpi", "fake"})  # backends whose ranks need no store to find each other


class ZeroStrategy(ParallelStrategy):
    """ZeRO stages 0-3 as a Lightning strategy.

    Args:
        stage: a row of ``zero/stage`` (``"zero0"`` .. ``"zero3"``, or 0 .. 3); default ``zero3``.
        offload: a row of ``zero/offload``.
        checkpoint: a row of ``zero/checkpoint``.
        config: a whole :class:`ZeroConfig`; other arguments are set on top of it.
        settings: fields of :class:`ZeroConfig`, such as ``prefetch_bytes`` or ``unit={"classes": ["Block"]}``.
        timeout: of the process group; ``None``: torch's, and ``stall_timeout_s`` where only the hosts wait (gloo).

    The remaining arguments are those of every Lightning strategy.

    Attributes:
        run_settings: settings of the run that all ranks must have alike, besides the strategy's own. They are compared
            at the start.
        saves_on_sigterm: a run that gets SIGTERM saves ``hpc_ckpt_*.ckpt`` in ``default_root_dir`` before it leaves; on
            SLURM it always does.
        save_every_s: a run saves it every so many seconds too.
        resumes_job: the checkpoint to go on from was written by an earlier start of this job; it is compared with its
            checksums, unless ``zero.checkpoint.verify`` is false.

    Raises:
        ConfigError: a setting that cannot work; the message names the key to change.
    """

    def __init__(
        self,
        stage: int | str | None = None,
        *,
        offload: str | None = None,
        checkpoint: str | Mapping[str, Any] | None = None,
        config: ZeroConfig | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: LightningPrecision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **settings: Any,
    ) -> None:
        rows = {"stage": stage, "offload": offload, "checkpoint": checkpoint}
        self.config = make_config(config, **{k: v for k, v in rows.items() if v is not None}, **settings)
        path = self.config.offload.nvme_path
        if path is not None and "$" not in path:  # variables are those of the ranks
            check_folder(os.path.expanduser(path))
        refuse_writer(checkpoint_io, self.config.checkpoint)
        self._saves_folders = self.config.checkpoint.name is CheckpointFormat.sharded
        self._saver: ShardedSaver | None = None
        self._asked_precision = self.config.precision.name
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment or own_environment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.run_settings: Mapping[str, Any] = {}
        self.saves_on_sigterm = False
        self.save_every_s: float | None = None
        self.resumes_job = False
        self._num_nodes = 1
        self._to_load: tuple[Mapping[str, Any], bool] | None = (
            None  # a checkpoint that waits for the shards, and strict
        )
        self._interruptions: Interruptions | None = None
        self._random_numbers: RandomNumbers | None = None
        self._loaded_from: Any = "the checkpoint"
        self._saved_rng: Saved | None = None  # of a checkpoint, until there is one who needs it
        self.failed_save: Exception | None = None  # the last that has failed, on all ranks
        self.range_save: RangeSave | None = None  # inside of Trainer.save_checkpoint
        self._evaluation_starts = False
        self._start_waits: Waits | None = None  # until there is an engine
        self._process_group_backend = process_group_backend
        self._timeout = timeout

    # -- what the Trainer asks and tells --------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Without this Lightning would leave the samplers alone and every rank would train on the same data."""
        return self.num_nodes * self.num_processes > 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @property
    def precision_plugin(self) -> ZeroPrecision:
        return self._precision_plugin if self._precision_plugin is not None else ZeroPrecision()  # type: ignore

    @precision_plugin.setter
    def precision_plugin(self, plugin: LightningPrecision | None) -> None:
        """Lightning hands over the plugin it chose from ``Trainer(precision=)``; ours takes its place.

        Raises:
            ConfigError: another precision than ``zero.precision.name`` asks for.
        """
        if plugin is None:
            self._precision_plugin = None
            return
        ours = ZeroPrecision.from_plugin(plugin)
        if self._asked_precision is not None and ours.row is not self._asked_precision:
            raise ConfigError(
                f"trainer.precision: expected {self._asked_precision.value!r}, which "
                f"zero/precision={self._asked_precision.name} means, got {ours.precision!r}. Set "
                f"Trainer(precision={self._asked_precision.value!r}), or drop zero.precision.name."
            )
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

    @contextlib.contextmanager
    def step_scope(self, key: str = "step_scope") -> Generator[None, None, None]:
        """Inside, the sharded module may be called outside of a Lightning step (generation, say). All ranks enter."""
        precision = self.precision_plugin.forward_context()
        with torch.no_grad(), precision, self.engine.step_scope(key, evaluation=True):
            yield

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._precision_plugin is not None:
            self.precision_plugin.attach(self)

    # -- processes ------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # Also where something else has made the processes: it sets the number of threads of every rank.
        assert self.cluster_environment is not None
        check_allocation(self.cluster_environment, nodes=self.num_nodes, devices=self.num_processes)
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        global _FAILED
        _FAILED = False  # an exception of an earlier run was survived, by all ranks
        self._to_load = self._saved_rng = self._saver = None
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            device
        )
        if not dist.is_initialized():
            self._join()
            atexit.register(_destroy_process_group)
        if self._waits is None and dist.is_initialized():
            self._start_waits = open_waits(dist.group.WORLD, device, self.config.stall_timeout_s)
            self._start_waits.place = "the start of the run (prepare_data and setup hooks)"
        if self.lightning_module is not None:
            averaging.attach(self.lightning_module.trainer)
            finetuning.attach(self.lightning_module.trainer)
            pruning.attach(self.lightning_module.trainer)
            kept_files.attach(self.lightning_module.trainer)
            range_saves.attach(self.lightning_module.trainer)

    def _join(self) -> None:
        """Come together with the other ranks, and make the default process group. It is not bound to a device: NCCL
        would make its communicator at once, of up to a gigabyte, and the engine sends nothing over this group."""
        assert self.cluster_environment is not None and self._process_group_backend is not None
        timeout = self._timeout or default_pg_timeout
        if self.world_size == 1 or self._process_group_backend in OWN_RENDEZVOUS:
            _init_dist_connection(self.cluster_environment, self._process_group_backend, timeout=timeout)
            return
        settings = rendezvous.shared_settings(self.config, self._settings_of_trainer() | dict(self.run_settings))
        rendezvous.join(
            self.cluster_environment,
            self._process_group_backend,
            {"versions": rendezvous.versions(), "settings": settings},
            timeout=timeout,
            stall_timeout_s=self.config.stall_timeout_s if self._timeout is None else None,
            wait_s=self.config.stall_timeout_s,
            per_node=self.num_processes,
        )

    def _settings_of_trainer(self) -> dict[str, Any]:
        """Those that make ranks issue other collectives, or other numbers."""
        settings: dict[str, Any] = {"zero.precision.name": self.precision_plugin.row.name}
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            names = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val")
            settings |= {f"trainer.{name}": getattr(trainer, name) for name in names}
        return settings

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @property
    def _waits(self) -> Waits | None:
        """What Lightning's own collectives wait with: some rank may be at work for long in between."""
        engine = engine_of(self.lightning_module) if self.lightning_module is not None else None
        return engine.comm.waits if engine is not None else self._start_waits

    def barrier(self, name: str | None = None) -> None:
        if (waits := self._waits) is not None:
            barrier(dist.group.WORLD, waits, f"Lightning's barrier {name!r}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        waits = self._waits
        return obj if waits is None else broadcast_object(dist.group.WORLD, obj, src, waits)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    # -- setup and teardown ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are built on the host (on meta with ``empty_init``): the whole need not fit on the device."""
        if empty_init:
            with torch.device("meta"), self.precision_plugin.tensor_init_context():
                yield
        else:
            with _EmptyInit(enabled=False), self.precision_plugin.tensor_init_context():
                yield

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        _refuse_callbacks(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._sync_layers(self.model)
        self.model = self._setup_model(self.model)
        if fitting:
            saved, self._saved_rng = self._saved_rng, None
            self._random_numbers = RandomNumbers(trainer, self.root_device, saved)
            self.setup_optimizers(trainer)
            self.precision_plugin.check_early_steps(trainer)
            averaging.average_shards(trainer, self.engine)
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
        wanted = self._engine_config()
        engine = engine_of(model)
        if engine is not None and not self._still_fits(engine, model, wanted):
            engine.release()
            engine = None
        if engine is None:
            sources = self._first_values(model)
            engine = shard(model, config=wanted, device=self.root_device, node=self._node, sources=sources)
            if self._start_waits is not None:
                self._start_waits.close()
                self._start_waits = None
            if self.config.summary and self.is_global_zero:
                print_units(engine)
        else:
            engine.comm.waits.forget_failures()
        with engine.placeholders_allowed():
            model.to(self.root_device)  # what is neither parameter nor buffer: module.device, states of metrics
        if (dtype := TRUE_DTYPES.get(self.precision_plugin.row)) is not None:
            model.__dict__["_dtype"] = dtype  # module.dtype
        if self._to_load is not None:
            (checkpoint, strict), self._to_load = self._to_load, None
            self._load_into_shards(engine, checkpoint, checkpoint["state_dict"], strict)
        return model

    def _first_values(self, model: Module) -> Mapping[str, Tensor] | None:
        """The checkpoint that waits to be loaded, for a module that has no values of its own."""
        if self._to_load is None or not any(p.is_meta for p in model.parameters()):
            return None
        return {key: value for key, value in self._to_load[0]["state_dict"].items() if isinstance(value, Tensor)}

    def _still_fits(self, engine: Engine, model: Module, wanted: ZeroConfig) -> bool:
        same_params = {id(p) for p in model.parameters()} == {id(i.param) for u in engine.units for i in u.infos()}
        return same_params and engine.config == wanted and engine.comm.device == self.root_device

    @property
    def _node(self) -> str | None:
        """The node of this rank, as the cluster environment numbers it: several may be on one host."""
        return f"{socket.gethostname()}/{self.node_rank}" if self.num_nodes > 1 else None

    def _engine_config(self) -> ZeroConfig:
        row = replace(self.config.precision, name=self.precision_plugin.row)
        return make_config(self.config, precision=row)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self.engine.drop_optimizers()
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, _MockOptimizer):  # configure_optimizers returned None
                self.engine.add_optimizer(optimizer)

    def teardown(self) -> None:
        """Shards stay where they are: saving, testing and fitting again work afterwards."""
        assert self.cluster_environment is not None and self.accelerator is not None
        module = self.lightning_module
        if module is not None:
            engine = engine_of(module)
            if engine is not None:
                engine.rest()
            if module._trainer is not None:
                averaging.let_go(module.trainer)
                finetuning.let_go(module.trainer)
                pruning.let_go(module.trainer)
                kept_files.let_go(module.trainer)
        if self._interruptions is not None:
            self._interruptions.let_go()
            self._interruptions = None
        if self._random_numbers is not None:
            self._random_numbers.let_go()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._end_writing()

    def on_exception(self, exception: BaseException) -> None:
        """No collective here: the other ranks may be gone."""
        global _FAILED
        if isinstance(exception, Left):  # between two steps, on all ranks
            return
        _FAILED = True
        module = self.lightning_module
        engine = engine_of(module) if module is not None else None
        if self._waits is not None:
            self._waits.explain(exception)
        if engine is not None:
            engine.abort()

    # -- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.sync_buffers()  # as DDP does: ranks compute with rank 0's, which its own batches have changed
        with self.engine.step_scope("training_step"):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._interruptions is not None:
            self._interruptions.between_validation_batches()
        with self._evaluation("validation_step"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation("test_step"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation("predict_step"):
            return super().predict_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        self._evaluation_starts = True

    def on_validation_end(self) -> None:
        assert self.lightning_module is not None
        if self._interruptions is not None and self._interruptions.training:
            validations.step_plateau_schedulers(self.lightning_module.trainer)

    def on_test_start(self) -> None:
        self._evaluation_starts = True

    def on_predict_start(self) -> None:
        self._evaluation_starts = True

    def _evaluation(self, key: str) -> contextlib.AbstractContextManager[None]:
        if self._evaluation_starts:  # once: nothing changes buffers now, and ranks may have more or fewer batches
            self._evaluation_starts = False
            self.engine.sync_buffers()
        return self.engine.step_scope(key, evaluation=True)

    def on_train_start(self) -> None:
        if self._random_numbers is not None:
            self._random_numbers.on_train_start()
        assert self.lightning_module is not None
        validations.repair_counts(self.lightning_module.trainer)

    def on_train_end(self) -> None:
        if self._interruptions is not None:
            self._interruptions.at_boundary(last=True)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate locally where gradients rest replicated (stages 0 and 1); elsewhere reduce every time."""
        with self.engine.no_sync():
            yield

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """As under DDP: hooks see the checkpoint before configure_optimizers and on_fit_start (BaseFinetuning needs
        it so), and Lightning passes the user's ``weights_only`` on. Weights wait until there are shards."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        engine = engine_of(self.lightning_module)
        if engine is None:  # before any run
            return self.lightning_module.state_dict()
        refuse_lonely_save(engine)
        without_frozen = self.config.checkpoint.exclude_frozen
        if self._saves_folders:
            return sharded_state_dict(engine, trainable_only=without_frozen)
        if self.range_save is not None:
            return self.range_save.module_state()
        return engine.state_dict(trainable_only=without_frozen)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if isinstance(optimizer, _MockOptimizer):
            return optimizer.state_dict()
        if self._saves_folders:
            return sharded_optimizer_state(self.engine, optimizer)
        save = self.range_save if self.range_save is not None else self.engine
        return save.optimizer_state(optimizer)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, else ours; an AsyncCheckpointIO without one of its own writes by ours too."""
        self._checkpoint_io = with_default(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        refuse_writer(io, self.config.checkpoint)
        self._checkpoint_io = io

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """On all ranks; rank 0 writes. A whole state holds the random number generators of all ranks.

        Raises:
            Exception: on all ranks, with file and cause: it could not be written.
        """
        if "optimizer_states" in checkpoint and self._random_numbers is not None:
            rows = self._gather_rows(self._random_numbers.row())
            if rows is not None:
                checkpoint[RNG_KEY] = self._random_numbers.record_of(rows)
        if self.lightning_module is not None and (model := record_of(self.lightning_module, self.config.init_from)):
            checkpoint[HUGGING_FACE] = model
        if self.config.checkpoint.exclude_frozen:
            checkpoint[averaging.EXCLUDES_FROZEN] = True
        if self._saves_folders:
            with self._noting_failure():
                self._save_folder(checkpoint, filepath)
            return
        write = super().save_checkpoint
        with self._noting_failure():
            if self.range_save is None or not self.range_save.write(checkpoint):
                self.together("writing a checkpoint", lambda: write(checkpoint, filepath, storage_options))

    @contextlib.contextmanager
    def _noting_failure(self) -> Generator[None, None, None]:
        """Note that a save has failed, on all ranks alike: they can go on together."""
        try:
            yield
        except (StallError, PeerError, ApartError):  # they cannot
            raise
        except Exception as error:
            self.failed_save = error
            raise

    def wait_for_writes(self) -> None:
        """On all ranks, before a save: one at a time is in flight.

        Raises:
            Exception: on all ranks: the last one has failed.
        """
        io = self.checkpoint_io
        if async_writer(io) is not None:
            with self._noting_failure():
                self.together("the save before this one", lambda: wait_for_writes(io))

    def _save_folder(self, checkpoint: Mapping[str, Any], filepath: Any) -> None:
        waits = self._waits
        if waits is None and not self.is_global_zero:
            return  # before any run, as Lightning does: nobody can be waited for
        path = local_path(self.broadcast(str(filepath)))
        if self._saver is None:
            self._saver = ShardedSaver(self.global_rank)
        group = dist.group.WORLD if waits is not None else None
        self._saver.save(*divide(checkpoint), path, group, waits)

    def export(self, path: Any, *, dtype: str | torch.dtype | None = None, shard_size: str | int = "5GB") -> None:
        """Write the model to a new folder as Hugging Face's ``from_pretrained`` loads it. On all ranks, each its part.

        Args:
            dtype: of floating-point tensors, such as ``"bf16"``; ``None``: those that the module was built with.
            shard_size: of a file at most.

        Raises:
            ConfigError: the folder has something in it, or not all ranks see it.
            RuntimeError: the module is not sharded yet.
            Exception: on all ranks, with folder and cause: it could not be written.
        """
        folder = local_path(self.broadcast(str(path)))
        export(
            self.engine, folder, parse_dtype("export(dtype=)", dtype), parse_bytes("export(shard_size=)", shard_size)
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            remove_behind_writes(self.checkpoint_io, filepath)

    def finish_writes(self) -> None:
        """On all ranks: what was handed over for writing behind training is written.

        Raises:
            Exception: on all ranks, with file and cause: it could not be written.
        """
        if (writer := async_writer(self.checkpoint_io)) is not None:  # a wrapper around it does not pass this on
            self.together("the last writes of checkpoints", writer.teardown)

    def _end_writing(self) -> None:
        if not _FAILED:
            self.finish_writes()
        try:
            if (writer := async_writer(self.checkpoint_io)) is not None:
                writer.teardown()
            self.checkpoint_io.teardown()
        except Exception as error:
            if not _FAILED:
                raise
            rank_zero_warn(str(error))  # in place of what has ended the run it would be misleading

    def _gather_rows(self, row: Tensor) -> Tensor | None:
        waits = self._waits
        return row[None] if waits is None else gather_rows(dist.group.WORLD, row, waits, "states of random numbers")

    def _gather_objects(self, value: Any, what: str) -> list[Any]:
        waits = self._waits
        return [value] if waits is None else gather_objects(dist.group.WORLD, value, waits, what, patient=True)

    def together(self, what: str, act: Callable[[], T]) -> T:
        """Do this on all ranks, without messages; where it fails on one, all raise, and none waits for it."""
        waits = self._waits
        return act() if waits is None else together(dist.group.WORLD, waits, what, act, patient=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """On all ranks, which read it each.

        Raises:
            ConfigError: on all ranks: it would run code, and the user has not said ``weights_only=False``; or it is no
                whole checkpoint.
            OSError: the system's, as a RuntimeError on other ranks: another try may not meet it.
        """
        accelerator_of(self.root_device).release_cached()
        wanted = self.config.checkpoint.verify
        if self.resumes_job if wanted is None else wanted:
            verify(
                checkpoint_path,
                self.global_rank,
                lambda value: self._gather_objects(value, "checksums"),
                lambda act: self.together("reading checksums", act),
            )
        self._loaded_from = checkpoint_path
        read: Callable[[], dict[str, Any]] = partial(load, self.checkpoint_io, checkpoint_path, weights_only)
        if is_folder(checkpoint_path):
            read = partial(read_folder, checkpoint_path, weights_only)
        checkpoint = self.together("reading a checkpoint", read)
        self._take_random_numbers(checkpoint.pop(RNG_KEY, None), checkpoint_path)
        return checkpoint

    def _take_random_numbers(self, record: Mapping[str, Any] | None, path: Any) -> None:
        if record is None or self.lightning_module is None:  # DDP's have none
            return
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._saved_rng = Saved.of_rank(record, self.global_rank, self.world_size, self.root_device)
            if (saved := saved_ranks(record)) != self.world_size:
                rank_zero_info(
                    f"{path} has the random number generators of {saved} ranks: each of these {self.world_size} goes "
                    "on with a seed that is derived from them"
                )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """
        Raises:
            OtherModelError: on all ranks, with the file: these are not the weights of this model. Nothing is loaded.
        """
        module, state, path = self.lightning_module, checkpoint["state_dict"], self._loaded_from
        assert module is not None
        if checkpoint.get(averaging.EXCLUDES_FROZEN):
            state = keeping_frozen(module, state)
        fits = partial(check_model, module, state, path, strict=strict)
        self.together("comparing a checkpoint with the model", fits)
        engine = engine_of(module)
        if engine is None:
            self._to_load = checkpoint, strict
        else:
            self._load_into_shards(engine, checkpoint, checkpoint["state_dict"], strict)

    @staticmethod
    def _load_into_shards(
        engine: Engine, checkpoint: Mapping[str, Any], state: Mapping[str, Any], strict: bool
    ) -> None:
        if checkpoint.get(averaging.EXCLUDES_FROZEN):
            state = keeping_frozen(engine.module, state)
        engine.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):  # as under DDP, which says nothing
            rank_zero_warn(
                f"the checkpoint holds the states of {len(states)} optimizers, configure_optimizers() gives "
                f"{len(self.optimizers)}: the first {min(len(states), len(self.optimizers))} are loaded, and those "
                "without a state start anew. Give the optimizers it was saved with to go on as it was."
            )
        frozen = [bucket for bucket in self.engine.buckets if not bucket.trainable]
        pairs = [(o, s) for o, s in zip(self.optimizers, states, strict=False) if not isinstance(o, _MockOptimizer)]

        def check() -> None:
            for optimizer, state in pairs:
                self.engine.check_optimizer_state(optimizer, state, f"ckpt_path: {self._loaded_from}")

        self.together("comparing a checkpoint with the optimizers", check)
        for optimizer, state in pairs:
            self.engine.load_optimizer_state(optimizer, state)
        if any(bucket.trainable for bucket in frozen):  # weights of frozen buckets were rounded when they were loaded
            self._load_into_shards(self.engine, checkpoint, averaging.current_weights(checkpoint), strict=False)


_FAILED = False


def _refuse_callbacks(trainer: pl.Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigError(
                "StochasticWeightAveraging copies parameters one by one and would average placeholders. Use "
                "lightning.pytorch.callbacks.WeightAveraging, whose copy is kept on shards."
            )


def _destroy_process_group() -> None:
    """Destroy the process group at exit. At a clean exit ranks wait for each other first, or gloo aborts at random.

    After an exception this rank does not wait: the others may never come.
    """
    if _FAILED or hasattr(sys, "last_value") or not dist.is_initialized():
        return
    with contextlib.suppress(Exception):
        if dist.get_backend() == "nccl":
            accelerator_of(default_device()).synchronize()
        else:
            work = dist.barrier(async_op=True)
            work.wait(timedelta(seconds=EXIT_BARRIER_S))
        dist.destroy_process_group()
