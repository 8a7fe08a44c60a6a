"""Make a ZeroConfig from keywords and names such as ``zero3``, and replace its stage or offload setting."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lightning_zero.settings.groups import OffloadConfig, StageConfig, without_effect
from lightning_zero.settings.names import (
    ROWS,
    ConfigError,
    HybridShard,
    LossMean,
    Offload,
    Stage,
    Uneven,
    choose,
    nearest,
)
from lightning_zero.settings.values import kinds_of
from lightning_zero.settings.zero_config import ZeroConfig, check_hybrid_shard, check_prefetch, check_rows


def make_config(base: ZeroConfig | None = None, **settings: Any) -> ZeroConfig:
    """Make a :class:`ZeroConfig` from ``base`` and the keywords of :class:`~lightning_zero.ZeroStrategy`.

    ``stage``, ``precision``, ``offload``, ``checkpoint`` and ``compile`` may be names (or stage numbers), and every
    group a mapping, or None for no change. Raises ConfigError for an unknown setting or a bad value.
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
        if value is None and is_dataclass(known[key]):
            continue
        if (key, value) == ("precision", "float8"):
            value = {"name": "bf16", "float8": "tensorwise"}
        known[key] = _convert(key, value)
    made = ZeroConfig(**known)
    if base == ZeroConfig():  # restage keeps all other settings, even if they have no effect at the new stage
        check_prefetch(made)
    return made


def offload_row_path(name: Offload) -> str | None:
    """Return ``LIGHTNING_ZERO_NVME_PATH`` for a choice of ``zero/offload`` with files; None if unset or no files."""
    return os.environ.get("LIGHTNING_ZERO_NVME_PATH") if name.uses_files else None


def is_decided(config: ZeroConfig) -> bool:
    """Return whether the stage is given, and not ``auto``."""
    return config.stage.name is not Stage.auto


def check_decided(config: ZeroConfig) -> None:
    """Raise ConfigError for settings that need a Trainer: ``stage=auto``, and what is counted in its steps."""
    if not is_decided(config):
        raise ConfigError(
            "zero/stage: expected zero0, zero1, zero2 or zero3 with lightning_zero.shard and Fabric, got auto, which "
            "ZeroStrategy decides at the start of a run. Give the stage that python -m lightning_zero.plan names, or "
            "train with Trainer(strategy='zero_auto')."
        )
    of_trainer = {"sequence_parallel": 1, "loss": LossMean.batches, "uneven": Uneven.end, "fingerprint": None}
    for name, default in of_trainer.items():
        if (got := getattr(config, name)) != default:
            default, got = (getattr(value, "name", value) for value in (default, got))
            raise ConfigError(
                f"zero.{name}: expected {default} with lightning_zero.shard and Fabric, which do not see a Trainer's "
                f"steps, got {got}. Train with ZeroStrategy, or drop zero.{name}."
            )


def for_layout(config: ZeroConfig) -> ZeroConfig:
    """Return ``config``, with stage 1 in place of ``auto``: buckets are laid out the same way at every stage."""
    return config if is_decided(config) else make_config(config, stage=Stage.zero1, offload=OffloadConfig())


def allowed_rows(hybrid_shard: HybridShard = HybridShard.auto) -> list[tuple[Stage, Offload]]:
    """List each pair of a stage and a choice of ``zero/offload`` that ``hybrid_shard`` allows."""
    found: list[tuple[Stage, Offload]] = []
    for stage, offload in itertools.product(Stage, Offload):
        try:
            check_rows(stage, offload)
            check_hybrid_shard(hybrid_shard, stage, offload)
        except ConfigError:
            continue
        if stage is not Stage.auto:
            found.append((stage, offload))
    return found


def candidate_rows(config: ZeroConfig) -> list[tuple[Stage, OffloadConfig]]:
    """List the pairs (stage, offload settings) from which ``auto`` chooses; none uses files without a folder."""
    given = config.offload
    path = given.nvme_path or os.environ.get("LIGHTNING_ZERO_NVME_PATH")
    found = []
    for stage, offload in allowed_rows(config.hybrid_shard):
        is_wanted = config.stage.name in (stage, Stage.auto) and given.name in (offload, Offload.auto)
        if is_wanted and (path or not offload.uses_files):
            row = with_rows(make_config(for_layout(config), stage=stage), offload=offload, settings=given)
            found.append((stage, row.offload))
    return found


def with_rows(
    config: ZeroConfig, stage: Any = None, offload: Any = None, *, settings: OffloadConfig | None = None
) -> ZeroConfig:
    """Return ``config`` with another stage, another choice of ``zero/offload``, or both.

    Args:
        stage: a stage's name or number; ``None``: keep the stage.
        offload: a name, or all settings as a mapping or :class:`OffloadConfig`; ``None``: keep the offload setting.
        settings: if ``offload`` is a name, its other settings, such as budgets; default: those of ``config``.

    Raises ConfigError for an unknown name, a stage and offload that exclude each other, or a setting without effect.
    """
    if stage is None and offload is None:
        raise ConfigError(
            "restage: expected another stage, another offload, or both, got neither. Pass stage= or offload=."
        )
    changes = {} if stage is None else {"stage": stage}
    if stage is not None and not isinstance(stage, StageConfig) and choose("stage", stage) is Stage.auto:
        raise ConfigError(
            "restage: expected zero0, zero1, zero2 or zero3, got stage=auto, which is decided at the start of a run. "
            "Pass another stage=."
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
    """Convert a name such as ``zero3``, or a mapping, to the type of the field ``key`` of :class:`ZeroConfig`."""
    if key == "offload" and isinstance(value, (str, Offload)):
        row = choose(key, value)
        return OffloadConfig(name=row, nvme_path=offload_row_path(row))
    kind: Any = kinds_of(ZeroConfig)[key]
    is_group: bool = is_dataclass(kind)
    if not is_group or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        if key not in ROWS:
            change = _meant(kind, key, value)
            raise ConfigError(
                f"zero.{key}: expected a mapping of settings, or {kind.__name__}, got {value!r}. {change}."
            )
        return kind(name=choose(key, value))
    allowed = set(kinds_of(kind))
    unknown = sorted(set(value) - allowed)
    if unknown:
        close = nearest(unknown[0], allowed)
        raise ConfigError(
            f"zero.{key}.{unknown[0]}: no such setting; there are {', '.join(sorted(allowed))}."
            f"{f' Did you mean {close}?' if close else ''}"
        )
    return kind(**value)


def _meant(kind: Any, key: str, value: Any) -> str:
    """Return the setting of group ``key`` that takes ``value``, alone or in a list, for the end of a message."""
    for name, given in itertools.product(kinds_of(kind), (list(value) if isinstance(value, tuple) else value, [value])):
        with contextlib.suppress(ConfigError):
            kind(**{name: given})
            shown = str(given).replace("'", "")
            return f"Write zero.{key}.{name}={shown}"
    return f"Change zero.{key}"
