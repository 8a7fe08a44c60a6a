"""The settings of a strategy, of the Trainer's or of Fabric's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_zero.config import Precision, ZeroConfig, make_config
from lightning_zero.engine.passes.compiled import check_compiler
from lightning_zero.tiers.claims import check_folder
from lightning_zero.timeline.record import check_timeline


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
