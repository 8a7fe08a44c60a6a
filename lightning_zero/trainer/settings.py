"""Make the settings of a strategy from its arguments, for the Trainer and Fabric."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

from lightning_zero.engine.passes.compiled import check_compiler
from lightning_zero.layerwise.float8 import check_torchao
from lightning_zero.planning.activations import Activations
from lightning_zero.settings import LossMean, Precision, Uneven, ZeroConfig, check_prefetch, make_config, make_folder
from lightning_zero.tiers.claims import check_folder

# The strategies of this process, so that a program can tell whether one of them has read its settings.
strategies: WeakSet[Any] = WeakSet()


@dataclass
class RunPlan:
    """Facts about a run, given to the strategy by the program that starts the run, such as ``lightning_zero.train``.

    Attributes:
        settings: the run's settings besides those of the strategy. At the start they must be equal on all ranks.
        resumes_job: whether an earlier start of this job wrote the checkpoint to load. Such a checkpoint is verified
            unless ``zero.checkpoint.verify`` is false.
        folder: the folder for saves on signals and periodic saves; None: the Trainer's ``default_root_dir``.
        command_to_go_on: given a checkpoint's path, returns the command that resumes an interrupted run.
        optimizer_states: number of state tensors per parameter, for ``stage="auto"``; None: find out from the module.
        activations: memory of one micro-batch, or a function that returns it, for the table at the end of training.
        held: (role, tier, bytes planned, bytes measured) of rank 0. The strategy sets this after training.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    resumes_job: bool = False
    folder: str | None = None
    command_to_go_on: Callable[[str], str] = "trainer.fit(..., ckpt_path={!r})".format
    optimizer_states: int | None = None
    activations: Activations | Callable[[], Activations | None] | None = None
    held: Sequence[tuple[str, str, int, int | None]] = ()


def settings_of(config: ZeroConfig | None, **settings: Any) -> ZeroConfig:
    """Return ``config`` with the fields in ``settings`` replaced. Raise ConfigError if a value is wrong."""
    # torch 2.13 warns on every rank about Lightning's own code, which users cannot change.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    config = make_config(config, **settings)
    check_prefetch(config)
    check_compiler(config.compile)
    check_torchao(config.precision)
    make_folder("zero.timeline", config.timeline)
    path = config.offload.nvme_path
    if path is not None and "$" not in path:  # each rank expands its own variables
        check_folder(os.path.expanduser(path))
    return config


def with_precision(config: ZeroConfig, row: Precision) -> ZeroConfig:
    """Return ``config`` for an engine, with precision ``row``, and without settings that the strategy itself applies:
    dividing sequences among ranks, counting tokens, joining uneven epochs, writing fingerprints."""
    precision = replace(config.precision, name=row)
    others: dict[str, Any] = {"loss": LossMean.batches, "uneven": Uneven.end, "fingerprint": None}
    return make_config(config, precision=precision, sequence_parallel=1, **others)
