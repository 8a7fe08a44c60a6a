"""Make settings from keywords and row names, and replace rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lightning_zero.config.groups import OffloadConfig, StageConfig, without_effect
from lightning_zero.config.names import ROWS, ConfigError, Offload, Stage, choose, nearest
from lightning_zero.config.settings import ZeroConfig
from lightning_zero.config.values import kinds_of


def make_config(base: ZeroConfig | None = None, **settings: Any) -> ZeroConfig:
    """Make a :class:`ZeroConfig` from the keywords of :class:`~lightning_zero.ZeroStrategy`.

    ``stage``, ``precision``, ``offload``, ``checkpoint`` and ``compile`` may be row names (or stage numbers); ``unit``,
    ``comm``, ``optimizer`` and ``debug`` may be mappings. Raises ConfigError for an unknown setting or a bad value.
    """
    base = base if base is not None else ZeroConfig()
    known = {f.name: getattr(base, f.name) for f in fields(ZeroConfig)}
    for key, value in settings.items():
        if key not in known:
            close = nearest(key, known)
            raise ConfigError(
                f"zero.{key}: no such setting; there are {', '.join(sorted(known))}."
                f"{f' Did you mean {close}?' if close else ''}"
            )
        known[key] = _convert(key, value)
    return ZeroConfig(**known)


def offload_row(name: Offload) -> OffloadConfig:
    """Make the row of ``zero/offload`` called ``name``, with its folder from the environment."""
    return OffloadConfig(name=name, nvme_path=offload_row_path(name))


def offload_row_path(name: Offload) -> str | None:
    """Return the folder from the environment for a row of ``zero/offload`` that uses files."""
    return os.environ.get("LIGHTNING_ZERO_NVME_PATH") if "nvme" in name.name else None


def is_decided(config: ZeroConfig) -> bool:
    """Whether the stage is given, not ``auto``."""
    return config.stage.name is not Stage.auto


def check_decided(config: ZeroConfig) -> None:
    """Raise ConfigError if the stage is ``auto``, which only the strategy resolves."""
    if not is_decided(config):
        raise ConfigError(
            "zero/stage: expected zero0, zero1, zero2 or zero3 here, got auto, which ZeroStrategy decides at the start "
            "of a run. Give the stage, or train with Trainer(strategy='zero_auto')."
        )


def for_layout(config: ZeroConfig) -> ZeroConfig:
    """Replace stage ``auto`` by any stage, because the buckets are the same at every stage."""
    return config if is_decided(config) else make_config(config, stage=Stage.zero1, offload=OffloadConfig())


def candidate_rows(config: ZeroConfig) -> list[tuple[Stage, OffloadConfig]]:
    """List the rows that ``auto`` may choose, with their settings. Rows with files need a given folder."""
    stages = [s for s in Stage if s is not Stage.auto] if not is_decided(config) else [config.stage.name]
    given = config.offload
    path = given.nvme_path or os.environ.get("LIGHTNING_ZERO_NVME_PATH")
    found = []
    for stage in stages:
        for offload in Offload if given.name is Offload.auto else [given.name]:
            if "nvme" in offload.name and not path:
                continue
            try:
                row = with_rows(make_config(for_layout(config), stage=stage), offload=offload, settings=given)
            except ConfigError:
                continue
            found.append((stage, row.offload))
    return found


def with_rows(
    config: ZeroConfig, stage: Any = None, offload: Any = None, *, settings: OffloadConfig | None = None
) -> ZeroConfig:
    """Replace the row of ``zero/stage``, of ``zero/offload``, or both.

    Args:
        stage: a row's name or a stage's number; ``None``: keep.
        offload: a row's name; or a mapping or :class:`OffloadConfig` with all settings; ``None``: keep.
        settings: for an ``offload`` name, where its other settings come from; default: ``config``.

    Raises ConfigError for an unknown row, rows that exclude each other, or a setting without effect.
    """
    if stage is None and offload is None:
        raise ConfigError(
            "restage: expected another stage, another offload, or both, got neither. Pass stage= or offload=."
        )
    changes = {} if stage is None else {"stage": stage}
    if stage is not None and not isinstance(stage, StageConfig) and choose("stage", stage) is Stage.auto:
        raise ConfigError(
            "restage: expected zero0, zero1, zero2 or zero3, got stage=auto, which is decided at the start of a run. "
            "Pass stage= one of these."
        )
    if isinstance(offload, (str, Offload)):
        row, given = choose("offload", offload), settings if settings is not None else config.offload
        kept = {f.name: getattr(given, f.name) for f in fields(given) if f.name not in {"name", *without_effect(row)}}
        if "nvme_path" in kept and kept["nvme_path"] is None:
            kept["nvme_path"] = offload_row_path(row)
        offload = OffloadConfig(name=row, **kept)
    if offload is not None:
        changes["offload"] = offload
    return make_config(config, **changes)


def _convert(key: str, value: Any) -> Any:
    """Convert a row's name or a group's mapping to a value of :class:`ZeroConfig`."""
    if key == "offload" and isinstance(value, (str, Offload)):
        return offload_row(choose(key, value))
    kind: Any = kinds_of(ZeroConfig)[key]
    is_group: bool = is_dataclass(kind)
    if not is_group or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        return kind(name=choose(key, value)) if key in ROWS else value  # ZeroConfig refuses a wrong one
    allowed = set(kinds_of(kind))
    unknown = sorted(set(value) - allowed)
    if unknown:
        close = nearest(unknown[0], allowed)
        raise ConfigError(
            f"zero.{key}.{unknown[0]}: no such setting; there are {', '.join(sorted(allowed))}."
            f"{f' Did you mean {close}?' if close else ''}"
        )
    return kind(**value)
