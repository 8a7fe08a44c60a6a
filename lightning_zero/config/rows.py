"""Makes settings: from keywords, from the names of rows, and with other rows in the place of some."""

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
    """A :class:`ZeroConfig` from keyword settings, as :class:`~lightning_zero.ZeroStrategy` takes them.

    ``stage``, ``precision``, ``offload``, ``checkpoint`` and ``compile`` may be row names (or stage numbers); ``unit``,
    ``comm``, ``optimizer`` and ``debug`` may be mappings; everything else is a field of :class:`ZeroConfig`.

    Raises:
        ConfigError: an unknown setting or a bad value.
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
    """A row of ``zero/offload`` given by name alone: its folder comes from the environment."""
    return OffloadConfig(name=name, nvme_path=offload_row_path(name))


def offload_row_path(name: Offload) -> str | None:
    """The folder for a row of ``zero/offload`` where no setting gives one."""
    return os.environ.get("LIGHTNING_ZERO_NVME_PATH") if "nvme" in name.name else None


def is_decided(config: ZeroConfig) -> bool:
    """Whether ``config`` says which stage; ``auto`` is to be decided first."""
    return config.stage.name is not Stage.auto


def check_decided(config: ZeroConfig) -> None:
    """
    Raises:
        ConfigError: the stage is ``auto``, which only the strategy decides.
    """
    if not is_decided(config):
        raise ConfigError(
            "zero/stage: expected zero0, zero1, zero2 or zero3 here, got auto, which ZeroStrategy decides at the start "
            "of a run. Give the stage, or train with Trainer(strategy='zero_auto')."
        )


def for_layout(config: ZeroConfig) -> ZeroConfig:
    """``config`` with some stage where it is to be decided: buckets are the same at every stage, on every tier."""
    return config if is_decided(config) else make_config(config, stage=Stage.zero1, offload=OffloadConfig())


def candidate_rows(config: ZeroConfig) -> list[tuple[Stage, OffloadConfig]]:
    """The rows that ``auto`` has to choose from, with their settings: those that ``config`` names, or all of a group.

    Rows that rest in files are left out where no folder is given.
    """
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
    """``config`` with another row of ``zero/stage``, of ``zero/offload``, or both.

    Args:
        stage: a row's name, or a stage's number; ``None``: as it is.
        offload: a row's name; or a mapping or :class:`OffloadConfig`, whose settings are all that count.
        settings: where ``offload`` is a name: those that go with its row are kept; default: of ``config``.

    Raises:
        ConfigError: an unknown row, rows that do not go together, or a setting that has no effect with them.
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
    """A setting of :class:`ZeroConfig` as it is given: a row by its name, a group as a mapping."""
    if key == "offload" and isinstance(value, (str, Offload)):
        return offload_row(choose(key, value))
    kind: Any = kinds_of(ZeroConfig)[key]
    is_group: bool = is_dataclass(kind)
    if not is_group or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        return kind(name=choose(key, value)) if key in ROWS else value  # which ZeroConfig refuses
    allowed = set(kinds_of(kind))
    unknown = sorted(set(value) - allowed)
    if unknown:
        close = nearest(unknown[0], allowed)
        raise ConfigError(
            f"zero.{key}.{unknown[0]}: no such setting; there are {', '.join(sorted(allowed))}."
            f"{f' Did you mean {close}?' if close else ''}"
        )
    return kind(**value)
