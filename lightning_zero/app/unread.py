"""Refuse settings of the group ``zero`` that a Hydra app has composed but no strategy of the process has read.

Hydra composes a group without knowing who reads it, and turns errors of its callbacks into warnings. So the check runs
when a Trainer or a Fabric is made: its strategy exists by then, and training has not begun.
"""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_zero.settings import ConfigError, ZeroConfig
from lightning_zero.settings.names import ROWS, Float8
from lightning_zero.trainer.settings import strategies


def check_read(job: Any) -> None:
    """Raise ConfigError if no strategy of this process has the settings of ``zero`` that the app has composed.

    Args:
        job: Hydra's configuration of the job, ``HydraConfig.get()``.
    """
    if any(source.path.startswith("lightning_zero.conf.app") for source in job.runtime.config_sources):
        return  # our own commands, which make further Trainers for plans and checks
    asked = {f"zero/{row}": choice for row in ROWS if (choice := job.runtime.choices.get(f"zero/{row}")) is not None}
    for text in job.overrides.task:
        override = OverridesParser.create().parse_override(text)
        if override.key_or_group.startswith("zero.") and not override.is_delete():
            asked[override.key_or_group] = override.value()
    made = [strategy.config for strategy in strategies]
    if not asked or any(all(_has(config, *each) for each in asked.items()) for config in made):
        return
    unread = next((each for each in asked.items() if not any(_has(config, *each) for config in made)), None)
    key, value = unread or next(iter(asked.items()))
    raise ConfigError(
        f"{key}={value}: expected a strategy that reads the group zero, which this Hydra app has composed, got "
        f"{'one with other settings' if made else 'none'} when a Trainer or Fabric was created. Create the strategy "
        "from the group (+zero/into=trainer sets trainer.strategy, +zero/into=strategy sets strategy; in Python, "
        f"create ZeroStrategy(config=OmegaConf.to_object(cfg.zero)) before other Trainers), or drop {key}, or pass "
        "~zero."
    )


def _has(config: ZeroConfig, key: str, value: Any) -> bool:
    """Return whether ``config`` has ``value`` for ``key``, a choice ``zero/group`` or a setting ``zero.name``."""
    row = key.partition("/")[2]
    if value == "float8" and row == "precision":
        return config.precision.float8 is not Float8.none
    if row:
        name = getattr(config, row).name
        return value not in ROWS[row].__members__ or (name is not None and name.name == value)
    node: Any = config
    *groups, name = key.split(".")[1:]
    for group in groups:
        node = getattr(node, group, None)
    if not is_dataclass(node) or isinstance(node, type) or not hasattr(node, name) or "${" in str(value):
        return True  # a key inside of a mapping, or a value from elsewhere
    try:
        return bool(replace(node, **{name: value}) == node)
    except ConfigError:
        return False
