"""The settings of a strategy, of the Trainer's or of Fabric's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_zero.config import Precision, ZeroConfig, make_config
from lightning_zero.engine.passes.compiled import check_compiler
from lightning_zero.planning.activations import Activations
from lightning_zero.tiers.claims import check_folder
from lightning_zero.timeline.record import check_timeline


def call_to_go_on(path: str) -> str:
    """How a run of a script of the user's own goes on from the checkpoint ``path``."""
    return f"trainer.fit(..., ckpt_path={path!r})"


@dataclass
class RunPlan:
    """What the program around a run tells its strategy; the main job does.

    Attributes:
        settings: those of the run, besides the strategy's own. All ranks must have the same, and compare them at the
            start.
        resumes_job: the checkpoint to go on from was written by an earlier start of this job. It is compared with its
            checksums, unless ``zero.checkpoint.verify`` is false.
        command_to_go_on: given a checkpoint, says how a run goes on from it that was interrupted.
        optimizer_states: tensors of optimizer state for each parameter, for the decision on ``stage="auto"``; ``None``:
            those of ``configure_optimizers``.
        activations: gives the activations of a micro-batch, for the table at the end of training.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    resumes_job: bool = False
    command_to_go_on: Callable[[str], str] = call_to_go_on
    optimizer_states: int | None = None
    activations: Callable[[], Activations | None] | None = None


def settings_of(
    config: ZeroConfig | None,
    stage: int | str | None,
    offload: str | None,
    checkpoint: str | Mapping[str, Any] | None,
    compile: str | Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> ZeroConfig:
    """``config``, with the rows that are not None and ``settings`` on top of it: the arguments of both strategies.

    Raises:
        ConfigError: a setting that cannot work; the message names the key to change.
    """
    rows = {"stage": stage, "offload": offload, "checkpoint": checkpoint, "compile": compile}
    config = make_config(config, **{key: row for key, row in rows.items() if row is not None}, **settings)
    check_compiler(config.compile)
    check_timeline(config.debug)
    path = config.offload.nvme_path
    if path is not None and "$" not in path:  # variables are those of the ranks
        check_folder(os.path.expanduser(path))
    return config


def with_precision(config: ZeroConfig, row: Precision) -> ZeroConfig:
    """``config`` for an engine that computes in ``row``. It knows nothing of sequences: they are the strategy's."""
    return make_config(config, precision=replace(config.precision, name=row), sequence_parallel=1)
