"""Check the types of settings and convert other spellings."""

from __future__ import annotations

import functools
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from lightning_zero.settings.names import ROWS, ConfigError, choose

MIB = 1024 * 1024
CONF = Path(__file__).parents[1] / "conf"  # the Hydra groups

if TYPE_CHECKING:
    NBytes = int
else:
    NBytes = Annotated[Any, "bytes"]  # 256MB is allowed too, which Hydra would refuse for an int


def check_types(key: str, settings: Any) -> None:
    """Convert each field of ``settings`` to its type, or raise ConfigError. ``key``: its group, as ``zero.unit``."""
    group = key.partition(".")[2]
    own: Any = type(settings)
    for name, kind in kinds_of(own).items():
        value = getattr(settings, name)
        if name == "name" and group in ROWS and not (value is None and NoneType in get_args(kind)):
            setattr(settings, name, choose(group, value))
        else:
            setattr(settings, name, _taken(f"{key}.{name}", kind, value))


@functools.cache
def kinds_of(settings: type[object]) -> dict[str, Any]:
    hints = get_type_hints(settings, include_extras=True)
    return {f.name: hints[f.name] for f in fields(settings)}  # type: ignore[arg-type]


def _taken(key: str, kind: Any, value: Any) -> Any:
    """Return ``value`` converted to the type ``kind``. Raises ConfigError, with ``key``, if that is impossible."""
    optional = NoneType in get_args(kind)
    if optional:
        if value is None:
            return None
        kind = next(k for k in get_args(kind) if k is not NoneType)
    if kind == NBytes:
        return value if isinstance(value, Integral) and not isinstance(value, bool) else parse_bytes(key, value)
    found, expected = _fitted(kind, value)
    if expected:
        raise ConfigError(f"{key}: expected {expected}{' or null' * optional}, got {value!r}. Change {key}.")
    return found


def _fitted(kind: Any, value: Any) -> tuple[Any, str]:
    """Return ``value`` converted to ``kind``, and words for what was expected; no words if ``value`` is valid."""
    is_bool = isinstance(value, bool)
    if kind is Any:
        return value, ""  # the dataclass checks such a value itself
    if kind is bool:
        return value, "" if is_bool else "true or false"
    if kind is int:
        return value, "" if isinstance(value, Integral) and not is_bool else "a whole number"
    if kind is float:
        return value, "" if isinstance(value, Real) and not is_bool and math.isfinite(value) else "a number"
    if kind is str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        return text, "" if isinstance(text, str) else "text"
    if kind in (list[str], list[int]):
        of, what = (str, "names") if kind == list[str] else (int, "whole numbers")
        items = list(value) if isinstance(value, (list, tuple)) else None
        fine = items is not None and all(isinstance(item, of) and not isinstance(item, bool) for item in items)
        return items, "" if fine else f"a list of {what}"
    if get_origin(kind) is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            return value, "a mapping of names"
        fitted = {key: _fitted(get_args(kind)[1], item) for key, item in value.items()}
        wrong = next((f"a mapping of names to {words}" for _, words in fitted.values() if words), "")
        return {key: item for key, (item, _) in fitted.items()}, wrong
    if issubclass(kind, Enum):
        member = kind.__members__.get(value) if isinstance(value, str) else value
        return member, "" if isinstance(member, kind) else f"one of {', '.join(kind.__members__)}"
    return value, "" if isinstance(value, kind) else f"a mapping of settings, or {kind.__name__}"


def check_whole_number(key: str, value: object, least: int) -> None:
    """Raise ConfigError, with the setting ``key``, if ``value`` is not an ``int`` that is at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key}: expected a whole number >= {least}, got {value!r}. Change {key}.")


def positive(key: str, value: float, *, zero_ok: bool = False) -> None:
    """Raise ConfigError, with the setting ``key``, for a negative ``value`` or NaN, and for 0 unless ``zero_ok``."""
    if not (value > 0 or (zero_ok and value == 0)):
        bound = ">= 0" if zero_ok else "> 0"
        raise ConfigError(f"{key}: expected a number {bound}, got {value!r}. Change {key}.")


def make_folder(key: str, folder: str | None) -> None:
    """Create ``folder``, the value of the setting ``key``, unless it is None. Raise ConfigError if no file can be
    written in the folder."""
    if folder is None:
        return
    try:
        (path := Path(folder).expanduser()).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigError(
            f"{key}: expected a folder to write to, got {folder!r}: {error.strerror}. Change {key}."
        ) from None


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** power for power, letter in enumerate("KMGTP", 1) for i in ("", "i")
}


def parse_bytes(key: str, value: Any) -> int:
    """Return the bytes of ``80GB``, ``74.5GiB`` or a number. Raises ConfigError, with ``key``, for other values."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?) *([a-z]*)", str(value).strip(), re.IGNORECASE)
    unit = next((n for name, n in _UNITS.items() if match and name.lower() == match[2].lower()), None)
    nbytes = Decimal(match[1]) * unit if match and unit else None
    if nbytes is None or (unit == 1 and nbytes % 1) or isinstance(value, bool):
        raise ConfigError(
            f"{key}: expected a size such as 80GB, 80GiB or a number of bytes, got {value!r}. Change {key}."
        )
    return int(nbytes)
