"""Save and load the Trainer's checkpoints, as one file (``range_saves.py``) or as a folder
(``sharded_checkpoints.py``).

Checkpoints also hold the states of all ranks' random number generators, and the model's Hugging Face record.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.hugging_face.files import RECORD as HUGGING_FACE
from lightning_zero.checkpoint.hugging_face.files import record_of
from lightning_zero.checkpoint.sharded.save import Behind
from lightning_zero.comm.agreements import ApartError, gather_rows
from lightning_zero.device import accelerator_of
from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.whole import state_dicts
from lightning_zero.engine.whole.state_dicts import (
    check_optimizer,
    keeping_frozen,
    sharded_optimizer_state,
    sharded_state_dict,
)
from lightning_zero.engine.whole.values import FakeTensors
from lightning_zero.engine.whole.whole_params import shard_again
from lightning_zero.lightning_api import (
    LightningOptimizer,
    NoOptimizer,
    TrainerFn,
    TrainerStatus,
    is_local,
    rank_zero_info,
)
from lightning_zero.planning.choose import human_bytes
from lightning_zero.ranks.messages import dumps
from lightning_zero.ranks.verdict import PeerError, StallError
from lightning_zero.settings import CheckpointFormat
from lightning_zero.tiers.limits import available_host_memory
from lightning_zero.trainer import uneven
from lightning_zero.trainer.callbacks import averaging
from lightning_zero.trainer.interruptions import ON_ALL_RANKS, failed_on_all_ranks, refuse_lonely_save
from lightning_zero.trainer.processes import Ended
from lightning_zero.trainer.run import Run
from lightning_zero.trainer.saves.background_saves import BackgroundSaves
from lightning_zero.trainer.saves.checkpoint_fits import (
    check_frozen,
    check_model,
    check_states,
    of_lightning,
    warn_of_overruled,
)
from lightning_zero.trainer.saves.checkpoint_io import (
    after_writes,
    async_writer,
    lacks_memory,
    remove,
    wait_for_writes,
    writes_files,
)
from lightning_zero.trainer.saves.random_numbers import KEY as RNG_KEY
from lightning_zero.trainer.saves.random_numbers import Saved, saved_ranks
from lightning_zero.trainer.saves.range_saves import RangeSave


class Checkpoints:
    """Saves and loads a strategy's checkpoints. ``next_may_fail``: whether training continues if the next background
    save fails. ``range_save``: the save under way if all ranks write ranges of one file, else None. ``fakes``: tensors
    without values that the last RangeSave made, and that the next RangeSave reuses.
    """

    def __init__(self, strategy: Run) -> None:
        self._strategy = strategy
        self._saves_folders = strategy.config.checkpoint.name is CheckpointFormat.sharded
        self.background = BackgroundSaves()
        self.next_may_fail = False
        self.range_save: RangeSave | None = None
        self.fakes: FakeTensors | None = None
        self.loaders = LoaderStates()
        self.begin_run()
        self._waits_for_setup = False

    def begin_run(self) -> None:
        self._to_load: tuple[Mapping[str, Any], bool] | None = None  # the checkpoint to load in setup(), and ``strict``
        self._waits_for_setup = True
        self._loaded_from: Any = "the checkpoint"
        self.saved_rng: Saved | None = None
        self.loaders.take()

    def before_save(self) -> None:
        """Wait for the previous save. Raise RuntimeError if, after an exception, only some ranks save. Collective."""
        module = self._strategy.lightning_module
        if module is not None and (engine := engine_of(module)) is not None:
            refuse_lonely_save(engine)  # before any collective
        self.wait_for_writes()

    def module_state(self) -> dict[str, Any]:
        assert self._strategy.lightning_module is not None
        engine = engine_of(self._strategy.lightning_module)
        if engine is None:  # before any run
            return self._strategy.lightning_module.state_dict()
        if self.range_save is None:  # else Trainer.save_checkpoint has done this
            self.before_save()
        without_frozen = self._strategy.config.checkpoint.exclude_frozen
        if self._saves_folders:
            return sharded_state_dict(engine, trainable_only=without_frozen)
        if self.range_save is not None:
            return self.range_save.module_state()
        if self._strategy.is_global_zero and lacks_memory(nbytes := _gathered_nbytes(engine)):
            warnings.warn(
                f"this save needs {human_bytes(nbytes)} of host memory on rank 0 for whole tensors, and "
                f"{human_bytes(available_host_memory())} are free: the system may kill the process. Choose "
                "zero/checkpoint=sharded, which needs no whole tensors, also in an object store.",
                stacklevel=2,
            )
        return engine.state_dict(trainable_only=without_frozen)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if isinstance(optimizer, NoOptimizer):
            return optimizer.state_dict()
        if self._saves_folders:
            return sharded_optimizer_state(self._strategy.engine, optimizer)
        if self.range_save is not None:
            return self.range_save.optimizer_state(optimizer)
        return state_dicts.optimizer_state(self._strategy.engine, optimizer)

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint``, together with the states of random number generators and the model's Hugging Face
        record. All ranks raise if this fails. Collective."""
        strategy, module = self._strategy, self._strategy.lightning_module
        checkpoint = dict(checkpoint)  # users' hooks may have kept the mapping that they were given
        if "optimizer_states" in checkpoint and (numbers := strategy._random_numbers) is not None:
            row, waits, what = numbers.row(), strategy._waits, "states of random numbers"
            rows = row[None] if waits is None else gather_rows(dist.group.WORLD, row, waits, what)
            if rows is not None:
                checkpoint[RNG_KEY] = numbers.record_of(rows)
        self.loaders.save(strategy, checkpoint)
        if module is not None and (model := record_of(module, strategy.config.init_from)):
            checkpoint[HUGGING_FACE] = model
        if strategy.config.checkpoint.exclude_frozen:
            checkpoint[averaging.EXCLUDES_FROZEN] = True
        with self.noting_failure():
            if module is not None and (engine := engine_of(module)) is not None:
                strategy._put_values([engine], checkpoint, self.range_save)
            if self._saves_folders:
                if strategy._waits is not None or strategy.is_global_zero:  # before any run only rank 0 writes
                    strategy._write_folder(checkpoint, filepath, storage_options, behind=self._behind)
                return
            if writes_files(strategy.checkpoint_io):
                strategy.checkpoint_io.long_work = strategy._long_work
            if self.range_save is None or not self.range_save.write(checkpoint):
                write = partial(strategy._write_file, checkpoint, filepath, storage_options)
                strategy._together("writing a checkpoint", write)

    @contextlib.contextmanager
    def noting_failure(self) -> Generator[None, None, None]:
        """Mark an exception in the body as the failure of a save on all ranks, after which all ranks can continue."""
        try:
            yield
        except (StallError, PeerError, ApartError):  # after these the ranks cannot go on
            raise
        except Exception as error:
            error.__dict__[ON_ALL_RANKS] = True  # a mark, because keeping the exception would keep the saved tensors
            raise

    @property
    def _behind(self) -> Behind | None:
        """Return function, streams and spare memory for a background save; None if training must wait for the save."""
        trainer = self._strategy._trainer_of_run
        if not self._strategy.config.checkpoint.background or trainer is None:
            return None
        state = trainer.state
        if state.fn != TrainerFn.FITTING or state.status != TrainerStatus.RUNNING:
            return None
        begin = partial(self.background.begin, self._strategy._waits, may_fail=self.next_may_fail)
        return Behind(begin, self._strategy.engine.comm.streams, self.background.spare)

    def after_writes(self, act: Callable[[], Any]) -> None:
        """Call ``act`` once all saves that have begun are on disk; never if one of them fails."""
        if self.background.is_under_way:
            self.background.then(act)
        else:
            after_writes(self._strategy.checkpoint_io, act)

    def wait_for_writes(self) -> None:
        """Wait for the save under way. If it failed, raise its error, or only warn if the save ``may_fail``.
        Collective."""
        strategy, what = self._strategy, "the save before this one"
        if self.background.is_under_way:
            try:
                with self.noting_failure():
                    strategy._together(what, partial(self.background.wait, strategy._long_work))
            except Exception as error:
                if not failed_on_all_ranks(error) or not self.background.may_fail:
                    raise
                rank_zero_warn(f"{error} Training continues, and the save is tried again later (save_minutes).")
        if async_writer(io := strategy.checkpoint_io) is not None:
            with self.noting_failure():
                strategy._together(what, partial(wait_for_writes, io, strategy._long_work))

    def remove(self, filepath: Any) -> None:
        if self._strategy.is_global_zero:
            self.after_writes(partial(remove, self._strategy.checkpoint_io, filepath))

    def finish_writes(self) -> None:
        """Wait until all background saves are on disk. Raise on all ranks if one has failed. Collective."""
        if self.background.is_under_way:
            self.wait_for_writes()
        # A wrapping CheckpointIO would not pass teardown() on to the writer.
        if (writer := async_writer(self._strategy.checkpoint_io)) is not None:

            def finish() -> None:
                try:
                    wait_for_writes(writer, self._strategy._long_work)
                finally:
                    writer.teardown()

            self._strategy._together("the last writes of checkpoints", finish)

    def load(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint on every rank and return it. Keep its states of random number generators. Collective.

        Raises:
            ConfigError: the file is damaged or not a checkpoint, or it holds code and ``weights_only`` is not
                ``False``. All ranks raise this.
            OSError: reading failed, but another try may succeed. Other ranks raise a RuntimeError.
        """
        if self.background.is_under_way:
            self.wait_for_writes()
        strategy = self._strategy
        accelerator_of(strategy.root_device).release_cached()
        wanted = strategy.config.checkpoint.verify
        self._loaded_from = checkpoint_path
        verified = strategy.run_plan.resumes_job and is_local(checkpoint_path) if wanted is None else wanted
        read = strategy._read_checkpoint(checkpoint_path, weights_only, verified=verified)
        checkpoint = strategy._together("looking at a checkpoint", lambda: of_lightning(read, checkpoint_path))
        ranks = strategy.world_size
        if self._is_fitting:
            self.loaders.load(strategy, checkpoint, checkpoint_path)
        record = checkpoint.pop(RNG_KEY, None)  # checkpoints of other strategies have none
        if record is not None and self._is_fitting:
            # Ranks that share a batch or a sequence go on with equal states, those of the first of them.
            first = strategy._ranks.same_batch.ranks[0]
            self.saved_rng = Saved.of_rank(record, first, ranks, strategy.root_device)
            if (saved := saved_ranks(record)) != ranks:
                rank_zero_info(
                    f"{checkpoint_path} has the states of random number generators of {saved} ranks: each of the "
                    f"{ranks} ranks of this run continues with a seed that is derived from these states. Schedules and "
                    "max_steps are not scaled to the new number of samples in a step."
                )
        return checkpoint

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Check that a checkpoint's weights fit the model. Load them now or, if the module is not sharded yet or the
        run resumes, later in setup. Collective.

        Raises:
            OtherModelError: the weights are of another model. All ranks raise this, and nothing is loaded.
            OnlyWeightsError: the run resumes, but the checkpoint has only weights. All ranks raise; nothing is loaded.
        """
        module, state, path = self._strategy.lightning_module, checkpoint["state_dict"], self._loaded_from
        assert module is not None
        if checkpoint.get(averaging.EXCLUDES_FROZEN):
            state = keeping_frozen(module, state)

        def check() -> None:
            if self._waits_for_setup and self._goes_on:
                check_states(checkpoint, path)
            check_model(module, state, path, strict=strict)

        self._strategy._together("comparing a checkpoint with the model", check)
        engine = engine_of(module)
        if engine is None or (self._waits_for_setup and self._goes_on):
            self._to_load = checkpoint, strict
        else:
            self._load_into_shards(engine, checkpoint, checkpoint["state_dict"], strict)

    @property
    def _goes_on(self) -> bool:
        """Return whether this run resumes training, so that it also loads optimizer states from its checkpoint."""
        return self._strategy.lightning_restore_optimizer and self._is_fitting

    @property
    def _is_fitting(self) -> bool:
        trainer = self._strategy._trainer_of_run
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING

    def load_what_waits(self) -> None:
        """Load the weights that ``load_model`` has left for setup. Collective."""
        waits, self._to_load = self._to_load, None
        self._waits_for_setup = False
        if waits is not None:
            checkpoint, strict = waits
            self._load_into_shards(self._strategy.engine, checkpoint, checkpoint["state_dict"], strict)

    def first_values(self, model: nn.Module) -> Mapping[str, Tensor] | None:
        """If any rank's module has parameters on meta, return the loaded checkpoint's tensors, as initial values for
        sharding; else return None. Collective.

        Raises ConfigError if frozen parameters on meta get values neither from the checkpoint nor from ``init_from``.
        """
        if self._to_load is None:
            return None
        on_meta = {name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta}
        if not any(self._strategy._gather_objects(bool(on_meta), "whose module has no values")):
            return None
        checkpoint, _ = self._to_load
        state = checkpoint["state_dict"]
        check = partial(check_frozen, checkpoint, on_meta, self._loaded_from, self._strategy.config)
        self._strategy._together("comparing a checkpoint with the module", check)
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def _load_into_shards(
        self, engine: Engine, checkpoint: Mapping[str, Any], state: Mapping[str, Any], strict: bool
    ) -> None:
        if checkpoint.get(averaging.EXCLUDES_FROZEN):
            state = keeping_frozen(engine.module, state)
        shard_again(engine, keep=False)  # a whole copy would overwrite the loaded values when the run begins
        try:
            engine.load_state_dict(state, strict=strict)
        except OSError as error:
            raise OSError(error.errno, f"{self._loaded_from}: the checkpoint could not be read: {error}") from error

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        states, optimizers = checkpoint["optimizer_states"], self._strategy.optimizers
        if len(states) != len(optimizers):  # DDP does the same, but silently
            rank_zero_warn(
                f"the checkpoint holds the states of {len(states)} optimizers, and configure_optimizers() returns "
                f"{len(optimizers)} optimizers: the first {min(len(states), len(optimizers))} states are loaded, and "
                "the other optimizers start without a state. To resume exactly, return as many optimizers as were "
                "saved."
            )
        frozen = [bucket for bucket in self._strategy.engine.buckets if not bucket.plan.trainable]
        pairs = self._check_optimizers(states)
        scheduled = [config.scheduler.optimizer for config in self._strategy.lr_scheduler_configs]
        warn_of_overruled(pairs, scheduled, self._loaded_from)
        for optimizer, state in pairs:
            state_dicts.load_optimizer_state(self._strategy.engine, optimizer, state)
        if any(bucket.plan.trainable for bucket in frozen):  # weights loaded while frozen were rounded
            # Averaging callbacks save the averages as the module's state.
            weights = checkpoint.get("current_model_state", checkpoint["state_dict"])
            self._load_into_shards(self._strategy.engine, checkpoint, weights, strict=False)

    def _check_optimizers(self, states: Sequence[Mapping[str, Any]]) -> list[tuple[Optimizer, Mapping[str, Any]]]:
        """Return each optimizer with its saved state. Raise on all ranks if a state does not match. Collective."""
        pairs = [
            (o, s) for o, s in zip(self._strategy.optimizers, states, strict=False) if not isinstance(o, NoOptimizer)
        ]

        def check() -> None:
            for optimizer, state in pairs:
                check_optimizer(self._strategy.engine, optimizer, state, f"ckpt_path: {self._loaded_from}")

        self._strategy._together("comparing a checkpoint with the optimizers", check)
        return pairs

    def end(self) -> None:
        if Ended.failed:
            self.background.wait_alone(self._strategy._long_work)
        else:
            self.finish_writes()
        try:
            self.background.close()
            if (writer := async_writer(self._strategy.checkpoint_io)) is not None:
                writer.teardown()
            self._strategy.checkpoint_io.teardown()
        except Exception as error:
            if not Ended.failed:
                raise
            rank_zero_warn(str(error))  # raising would hide the error that ended the run


def _gathered_nbytes(engine: Engine) -> int:
    """Return how many bytes all masters and optimizer states take, unsharded."""
    plans = [bucket.plan for bucket in engine.buckets]
    masters = sum(plan.layout.numel * plan.itemsizes.master for plan in plans)
    return masters + sum(
        stepper.states_per_element() * bucket.plan.state_nbytes(bucket.plan.layout.numel)
        for stepper in engine.optimizers
        for bucket in stepper.buckets()
    )


# -- loaders ----------------------------------------------------------------------------------------------------------

_LIGHTNINGS, _RANKS = "combined_loader", "lightning_zero_loaders"  # keys in the state of a fit loop


class LoaderStates:
    """Saves the states of each rank's stateful loaders, which are their positions in an epoch. (Lightning saves only
    the states of rank 0's loaders, and loads them on all ranks.) A rank's list of states is empty when an epoch begins,
    and when the rank has no more batches in the epoch.

    Attributes:
        loaded: the states from which the run resumes; empty once the first epoch has begun.
        out: whether this rank had no batches left in the epoch in which the run resumes, but other ranks had some.
    """

    def __init__(self) -> None:
        self.loaded: Sequence[Any] = []
        self.out = False
        self._last: Sequence[Any] | None = None  # when a fit ended

    def take(self) -> tuple[Sequence[Any], bool]:
        taken = self.loaded, self.out
        self.loaded, self.out = [], False
        return taken

    def fit_ends(self, trainer: Any) -> None:
        """Note the states of loaders at the end of a fit, before Lightning resets the loaders."""
        if trainer is not None and trainer.fit_loop._data_fetcher is not None:
            self._last = uneven.states_to_save(trainer.fit_loop)

    def save(self, strategy: Any, checkpoint: dict[str, Any]) -> None:
        """Put the states of this rank's loaders in ``checkpoint``, and of all ranks' if they differ. Collective."""
        trainer = strategy.lightning_module._trainer
        if "loops" not in checkpoint or trainer is None:
            return
        loop, state = trainer.fit_loop, _fit_loop(checkpoint)
        own = self._last if loop._data_fetcher is None else uneven.states_to_save(loop)
        if own is not None:
            state[_LIGHTNINGS] = own
        if _LIGHTNINGS not in state:
            return
        try:
            found = strategy._gather_objects(list(state[_LIGHTNINGS]), "states of loaders")
        except TypeError as error:
            rank_zero_warn(f"only the state_dict() of rank 0's training loaders is saved: {error}")
            return
        if len({dumps(states) for states in found}) > 1:
            state[_RANKS] = found

    def load(self, strategy: Any, checkpoint: dict[str, Any], path: Any) -> None:
        """Replace the states of rank 0's loaders in ``checkpoint`` by those of this rank. If the number of ranks has
        changed, only warn."""
        state = _fit_loop(checkpoint)
        found = state.pop(_RANKS, None)
        if found is not None and len(found) != strategy.world_size:
            rank_zero_warn(
                f"{path} has different states of loaders for {len(found)} ranks: all {strategy.world_size} ranks use "
                "the states of rank 0, so samples of this epoch may be repeated or left out."
            )
        elif found is not None:
            state[_LIGHTNINGS] = found[strategy.global_rank]
            self.out = not state[_LIGHTNINGS]  # while others have some
        self.loaded = state.get(_LIGHTNINGS, [])


def _fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state
