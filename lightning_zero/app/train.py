"""The main job: ``python -m lightning_zero.train [group=file] [key=value]``.

Everything is checked and built before Lightning starts other processes, so that a single process reports a mistake,
with a sentence and exit code 2. Errors in training keep their traceback.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_zero.app import sweep
from lightning_zero.app.jobs import (
    check_inside,
    check_saves,
    checkpoint_to_resume,
    fit_trainer,
    keep_work,
    make_folders,
    slurm_plugins,
)
from lightning_zero.app.overrides import (
    FULL_ERROR,
    check_keys,
    drop_values_of_ours,
    explain,
    explain_flag,
    hydra_prints,
    hydra_raises,
)
from lightning_zero.app.overrides import explicit_keys as explicit_keys
from lightning_zero.app.parts import (
    OUR_DATA,
    TEXT_DATA,
    agreed_precision,
    build,
    build_all,
    build_data,
    build_loggers,
    build_model,
    check_data,
    check_packages,
)
from lightning_zero.app.schema import Task, TrainConfig, register_schema
from lightning_zero.data.sources import check_path
from lightning_zero.ranks.resume import REFUSED, RUN_DIR_VARIABLE, damage, refusal, write_outcome
from lightning_zero.ranks.started_by import launched
from lightning_zero.settings import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

# Lower bounds of numbers that Lightning does not check, or only after importing torch.
LEAST = {"max_steps": -1, "max_epochs": -1, "num_nodes": 1, "accumulate_grad_batches": 1, "gradient_clip_val": 0}
LEAST |= {"log_every_n_steps": 0, "num_sanity_val_steps": -1, "check_val_every_n_epoch": 1, "val_check_interval": 0}
CPU_PROCESSES = 2  # if there is no GPU and no number of devices is given

_entered = False  # Hydra has composed the configuration and called the task


def local_devices(trainer: Mapping[str, Any]) -> Any:
    """Return ``trainer.devices``. If that is ``auto``, return how many processes a launcher has started on this node.
    Without a launcher, return 2 if there is no GPU or ``accelerator`` is ``cpu``, else ``auto``."""
    if trainer.get("devices", "auto") != "auto":
        return trainer["devices"]
    place, num_nodes = launched(), trainer.get("num_nodes")
    if place is not None and place.world_size is not None and num_nodes is not None and place.by != "plain":
        return max(1, place.world_size // num_nodes)
    if place is not None and place.local_world_size is not None:
        return place.local_world_size
    from lightning_zero.device.cuda import gpu_count

    if trainer.get("accelerator") == "cpu" or not gpu_count():
        return CPU_PROCESSES
    return "auto"


def number_of_nodes(trainer: Mapping[str, Any]) -> int:
    """Return ``trainer.num_nodes`` if set, else the launcher's number of nodes (torchrun may change it), else 1."""
    place = launched()
    return trainer.get("num_nodes") or (place.nodes if place is not None else None) or 1


def build_trainer(config: TrainConfig, plugins: list[Any] | None = None) -> Trainer:
    """Build a Trainer with ZeroStrategy. ``plugins``: None for those of SLURM. Raise ConfigError for a bad setting."""
    from lightning.pytorch.callbacks import Checkpoint, ProgressBar

    from lightning_zero.app.tasks import LastValidation, LogSettings, WritePredictions
    from lightning_zero.report.record import Record
    from lightning_zero.trainer.processes import check_srun
    from lightning_zero.trainer.saves.kept_files import NoteJob
    from lightning_zero.trainer.strategy import ZeroStrategy

    values = config.trainer | {"precision": agreed_precision(config)}
    values |= {"devices": local_devices(config.trainer), "num_nodes": number_of_nodes(config.trainer)}
    if config.optimized_metric is not None and "trainer.num_sanity_val_steps" not in explicit_keys():
        values["num_sanity_val_steps"] = values.get("num_sanity_val_steps") or 1  # it shows which metrics exist
    check_srun()
    callbacks = [*build_all("callbacks", config.callbacks), NoteJob(config.run_dir)]
    callbacks.append(LastValidation(config.optimized_metric))
    callbacks += [LogSettings(asdict(config)), Record(config.run_dir)]
    if config.task is Task.predict:
        callbacks.append(WritePredictions(Path(config.run_dir, "predictions")))
    for key, kind in (("enable_progress_bar", ProgressBar), ("enable_checkpointing", Checkpoint)):
        if values.get(key) is False:  # Lightning raises if the switch is off and such a callback is given
            callbacks = [c for c in callbacks if not isinstance(c, kind)]
    ours = {
        "strategy": ZeroStrategy(config=config.zero),
        "callbacks": callbacks,
        "logger": build_loggers(config) or False,
        "plugins": [*slurm_plugins(config.cluster)] if plugins is None else plugins,
        "default_root_dir": config.run_dir,
    }
    trainer: Trainer = build("trainer", values, extra=ours)
    return trainer


def check_launch(trainer: Trainer) -> None:
    """Raise ConfigError for a Hydra sweep whose jobs start processes, each of which would run the whole sweep again."""
    launcher = trainer.strategy.launcher
    environment = getattr(trainer.strategy, "cluster_environment", None)
    external = environment is not None and environment.creates_processes_externally
    starts_processes = launcher is not None and trainer.world_size > 1 and not external
    if HydraConfig.get().mode == RunMode.MULTIRUN and starts_processes:
        raise ConfigError(
            f"--multirun: expected jobs of one process, or processes started from outside, got {trainer.world_size} "
            "processes that Lightning would start for each job (each process would run the whole sweep again). Drop "
            "hydra/launcher=basic, or set trainer.devices=1."
        )


def check_model(config: TrainConfig, trainer: Trainer) -> None:
    """Raise ConfigError for a wrong ``zero.init_from``, an unknown unit class, or no room for ``gather_after_fit``."""
    from lightning.pytorch.utilities.seed import isolate_rng

    from lightning_zero.app.plan_model import describe
    from lightning_zero.engine.whole.whole_params import check_free_memory_here
    from lightning_zero.pretrained.folder import SafetensorsFolder

    strategy: Any = trainer.strategy
    whole = config.zero.gather_after_fit is True and strategy._speaks_for_all
    if config.zero.init_from is not None:
        SafetensorsFolder(config.zero.init_from)
    if not whole and not config.zero.unit.classes:
        return
    try:
        with isolate_rng():
            model = describe(config, explicit_keys()).model
    except ConfigError:
        raise
    except Exception:  # the model's own code fails without memory; the run itself may not
        return
    if whole:
        check_free_memory_here(model.copy_nbytes)


def check_checkpoint(path: str | None) -> None:
    if path is None or "://" in path:
        return
    if not os.path.exists(path):
        raise ConfigError(f"ckpt_path: expected a checkpoint, got {path!r}, which does not exist. Change ckpt_path.")
    with contextlib.suppress(OSError):
        if cause := damage(path):
            raise ConfigError(refusal(path, cause))


def check_task(config: TrainConfig) -> None:
    """Raise ConfigError if the task would evaluate untrained weights, or is ``predict`` while a metric is optimized."""
    if config.task is not Task.fit and config.ckpt_path is None and config.zero.init_from is None:
        raise ConfigError(
            f"ckpt_path: expected a checkpoint for task={config.task.value}, got none. Set ckpt_path, or set model=hf "
            "and model.path to the folder of a trained model."
        )
    if config.task is Task.predict and config.optimized_metric is not None:
        raise ConfigError(
            "optimized_metric: expected none for task=predict, which logs no metrics, got "
            f"{config.optimized_metric!r}. Drop optimized_metric, or choose task=test."
        )


@contextlib.contextmanager
def batches_explained(model: LightningModule, data: LightningDataModule) -> Iterator[None]:
    """If the user's own model raises an error on the default data, add a description of a batch to the error."""
    from lightning_zero.data.text import TextData
    from lightning_zero.models.gpt import LitGPT

    try:
        yield
    except Exception as error:
        foreign = not type(error).__module__.startswith("lightning_zero")
        if foreign and type(data) is TextData and type(model) is not LitGPT and fails_in(model, error):
            error.add_note(
                f"A batch of data._target_={TEXT_DATA}, the default, is {data.batch}. If {type(model).__qualname__} "
                "expects other batches, set data._target_ to a LightningDataModule of your own."
            )
        raise


def fails_in(model: LightningModule, error: Exception) -> bool:
    """Return whether ``error`` was raised in a file of the model's own classes."""
    own = {cls.__module__ for cls in type(model).__mro__ if cls.__module__.split(".")[0] not in ("lightning", "torch")}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") in own - {"builtins"} for frame in frames)


def run(config: TrainConfig) -> float | None:
    """Check and build all parts of a run, perform its task, print results. Return the metric that a sweep optimizes."""
    explicit = explicit_keys()
    fit_trainer(config)
    check_inside(config.cluster)
    check_checkpoint(config.ckpt_path)
    check_task(config)
    check_saves(config, explicit)
    os.environ.pop(RUN_DIR_VARIABLE, None)  # set by submit -- python -m lightning_zero.train; a run has its own folder
    # Checks that need no torch, whose import takes seconds.
    agreed_precision(config)
    check_packages(config, "model", "data")
    if config.data.get("_target_") == TEXT_DATA and isinstance(path := config.data.get("path"), str):
        check_path(path)
    # When a rank fails, torch's C++ warns of each connection that ends, with its frames. Our errors name the rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from lightning.pytorch import seed_everything

    from lightning_zero.app.tasks import check_vocabulary, optimized, perform, reported

    _quieten(config.task)
    seed_everything(config.seed, workers=True, verbose=False)
    model = build_model(config, explicit)  # before the data, whose tokenizer may come from model.path
    data = build_data(config, explicit)
    trainer = build_trainer(config)
    check_launch(trainer)
    keep_work(config, trainer)
    check_data(config, data, trainer.world_size)
    check_vocabulary(model, data)
    check_model(config, trainer)
    if trainer.is_global_zero:
        make_folders(config)
    ckpt_path = checkpoint_to_resume(config, trainer) if config.task is Task.fit else config.ckpt_path
    plan_of_run(config, trainer)
    trainer.strategy.run_plan.settings = {**asdict(config), "ckpt_path": ckpt_path}  # type: ignore[attr-defined]
    arguments = list(HydraConfig.get().overrides.task)
    with batches_explained(model, data), reported(config, trainer, arguments) as metrics:
        metrics.update(perform(config, trainer, model, data, ckpt_path))
    return optimized(config, metrics)


def plan_of_run(config: TrainConfig, trainer: Trainer) -> None:
    """Set ``run_plan.optimizer_states``, a number for ``auto``, and ``activations``, a function for the last table."""
    from lightning_zero.app.plan_model import describe, optimizer_states

    strategy: Any = trainer.strategy
    explicit = explicit_keys()
    states, of_slices = optimizer_states(config)
    strategy.run_plan.optimizer_states = states if of_slices else None

    def activations() -> Any:
        try:
            found = describe(config, explicit, activations=True, both_ways=False).model.activations
        except Exception:  # building the user's model again failed; the run is already over
            return None
        return None if found is None else found.measured[0]

    if config.data.get("_target_") in OUR_DATA:  # other data would have to be read for a batch
        strategy.run_plan.activations = activations


def _quieten(task: Task) -> None:
    logging.getLogger("lightning").handlers.clear()  # Hydra's handlers exist already: every line would be printed twice
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "Tip:" not in r.getMessage())
    for message in (r".*Using `DistributedSampler` with the dataloaders", r"The `srun` command is available"):
        warnings.filterwarnings("ignore", message=message)
    if task is not Task.fit:  # nothing is saved in the other run folder
        warnings.filterwarnings("ignore", message=r"The dirpath has changed from")


@hydra.main(version_base="1.3", config_path="pkg://lightning_zero.conf.app", config_name="train")
def _task(cfg: DictConfig) -> float | None:
    with refusals():
        return run(train_config(cfg))
    return None


def train_config(cfg: DictConfig) -> TrainConfig:
    """Return Hydra's configuration as a :class:`TrainConfig`. Raise ConfigError for unknown keys and wrong values."""
    check_keys(cfg)
    drop_values_of_ours(cfg)
    config = OmegaConf.to_object(cfg)  # runs every __post_init__
    assert isinstance(config, TrainConfig)
    for key, bound in LEAST.items():
        value, sign = config.trainer.get(key), ">" if key == "val_check_interval" else ">="
        if isinstance(value, int | float) and (value < bound or (value == bound and sign == ">")):
            raise ConfigError(f"trainer.{key}: expected a number {sign} {bound}, got {value}. Change trainer.{key}.")
    return config


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn errors in the body that are about the configuration into a printed sentence and exit code 2.

    Errors about a full or read-only disk, about another rank, or about a save that failed on all ranks also become a
    sentence, with exit code 1.
    """
    global _entered
    _entered = True
    hydra_prints()
    try:
        yield
    except ConfigError as error:
        _refuse(str(error), final=type(error) is ConfigError)  # else ranks are missing; a requeued job may have them
    except MissingMandatoryValue as error:  # "???" in a user's file
        _refuse(f"{error.full_key}: expected a value, got none. Set {error.full_key}.")
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, ConfigError):
            _refuse(str(error.__cause__))
        _refuse(str(error))
    except Exception as error:
        if not said_in_a_sentence(error):
            from lightning_zero.trainer.interruptions import note_failure
            from lightning_zero.trainer.processes import Ended

            if not Ended.failed:  # else the strategy has seen the error
                note_failure(error)
            raise
        raise SystemExit(1) from None


def said_in_a_sentence(error: Exception) -> bool:
    """If ``error`` is about a disk, another rank or a failed save, print its message only. Return whether it is."""
    from lightning_zero.ranks.verdict import PeerError
    from lightning_zero.trainer.interruptions import failed_on_all_ranks

    on_disk = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    if not (failed_on_all_ranks(error) or on_disk or isinstance(error, PeerError)):
        return False
    _say(f"error: {error}")
    return True


def _say(text: str) -> None:
    if "torch" not in sys.modules:
        print(text, file=sys.stderr, flush=True)
        return
    from lightning_zero.ranks.mailbox import say_once

    say_once(text)


def _refuse(message: str, *, final: bool = True) -> None:
    if final:
        write_outcome(REFUSED)
    sweep.RunFolder.remove()
    _say(f"error: {message}")
    raise SystemExit(2)


def start(task: Callable[[], Any], config_name: str = "train") -> None:
    """Run the Hydra app ``task`` with the configuration ``config_name``. Errors in settings exit with code 2."""
    global _entered
    register_schema()  # in case the Hydra plugin is not found
    _entered = False
    try:
        sweep.check_packages(sys.argv[1:])
        with hydra_raises():
            task()
    except ConfigError as error:
        _refuse(str(error))
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # an unknown key or group, a wrong type
        if _entered or FULL_ERROR in os.environ:
            raise
        _refuse(explain(error, config_name, sys.argv[1:]))
    except OSError as error:
        if _entered:
            raise
        _refuse(f"hydra.run.dir: expected a folder that can be made, got {error.filename!r}: {error.strerror}.")
    except SystemExit as stop:
        if stop.code == 2 and not _entered and (said := explain_flag(sys.argv[1:], config_name)):
            _refuse(said)
        if stop.code == 1 and not _entered:  # Hydra exits like a failed training when it refuses
            write_outcome(REFUSED)
            raise SystemExit(2) from None
        raise SystemExit(stop.code) from None
    if sweep.failed:
        raise SystemExit(1)


def main() -> None:
    start(_task)
