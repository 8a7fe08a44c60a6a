"""The enums of allowed values, as users type them (OmegaConf matches members by name), and functions that check the
types of settings and convert other spellings."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields
from decimal import Decimal
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """Raised for a setting that cannot work. The message names the expected and given values and the key to change."""


class Stage(Enum):
    zero0 = "zero0"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"
    auto = "auto"


class Precision(Enum):
    """The choices of ``zero/precision``. Their values are the names that ``Trainer(precision=)`` uses."""

    fp32 = "32-true"
    bf16 = "bf16-mixed"
    fp16 = "16-mixed"
    bf16_true = "bf16-true"
    fp16_true = "16-true"
    fp64 = "64-true"


class Offload(Enum):
    """The choices of ``zero/offload``. ``OFFLOADS`` in ``planning/placement.py`` says which tier each role has."""

    none = "none"
    optimizer_cpu = "optimizer_cpu"
    cpu = "cpu"
    optimizer_nvme = "optimizer_nvme"
    optimizer_cpu_param_nvme = "optimizer_cpu_param_nvme"
    nvme = "nvme"
    auto = "auto"

    @property
    def uses_files(self) -> bool:
        """Return whether parameters or optimizer state are always in files. False for ``auto``, which may use files."""
        return "nvme" in self.name

    @property
    def moves_params(self) -> bool:
        """Return whether parameters are kept off the device, which is possible at stage 3 only."""
        return self in (Offload.cpu, Offload.optimizer_cpu_param_nvme, Offload.nvme)


class Recompute(Enum):
    none = "none"
    blocks = "blocks"
    offload = "offload"


class Float8(Enum):
    """How linear layers scale what they cast to float8: the recipes of torchao."""

    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"


class LossMean(Enum):
    """Whether a step's loss and gradients are the mean over micro-batches or over all tokens."""

    batches = "batches"
    tokens = "tokens"


class Uneven(Enum):
    """When an epoch of training ends if ranks have different numbers of batches."""

    end = "end"  # with the last batch that all ranks have
    join = "join"  # when no rank has a batch left; until then ranks without batches continue with weight 0


class TensorStyle(Enum):
    """How tensor parallelism splits a module, in transformers' words."""

    colwise = "colwise"  # a linear layer by its outputs, which stay split
    rowwise = "rowwise"  # a linear layer by its inputs, which are split already
    colwise_gather_output = "colwise_gather_output"  # by its outputs, which every rank gets whole: a head
    embedding_rowwise = "embedding_rowwise"  # an embedding by its rows
    replicated_with_grad_allreduce = "replicated_with_grad_allreduce"  # whole, used for a rank's own heads: a q norm


class DType(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class StateDtype(Enum):
    """The dtype of stored optimizer state. ``fp32``: the dtype of the masters."""

    fp32 = "fp32"
    bf16 = "bf16"


class HybridShard(Enum):
    auto = "auto"
    flat = "flat"
    node = "node"
    node_backward = "node_backward"


class CheckpointFormat(Enum):
    full = "full"
    sharded = "sharded"


class Compile(Enum):
    none = "none"
    blocks = "blocks"


class Sharding(Enum):
    """Whether a rank steps slices of parameters or whole tensors."""

    auto = "auto"
    slices = "slices"
    tensors = "tensors"


# The names to choose from in each group of zero/*.
ROWS: dict[str, type[Enum]] = {
    "stage": Stage,
    "precision": Precision,
    "offload": Offload,
    "checkpoint": CheckpointFormat,
    "compile": Compile,
}


# Other names that are accepted: numbers of stages, and what Trainer(precision=) takes.
ALSO: dict[str, dict[str, str]] = {
    "stage": {f"{n}": f"zero{n}" for n in range(4)},
    "precision": {row.value: row.name for row in Precision} | {"16": "fp16", "32": "fp32", "64": "fp64"},
}

# Names that users of other tools may write, and the name that this package uses.
OTHER_NAMES = ALSO["precision"] | ALSO["stage"]
OTHER_NAMES |= {"ddp": "zero0", "fsdp": "zero3", "strategy": "stage", "learning_rate": "lr", "null": "none"}
OTHER_NAMES |= {"debug": "timeline", "summary": "enable_model_summary", "gpu": "none", "cuda": "none"}


def nearest(given: str, known: Iterable[str], *, exact: bool = False) -> str | None:
    """Return the name in ``known`` for which ``given`` is a synonym or, unless ``exact``, a misspelling; else None."""
    by_case = {name.lower(): name for name in sorted(known)}
    found = [name for name in (given.lower(), OTHER_NAMES.get(given.lower())) if name in by_case]
    if not found and not exact:
        found = difflib.get_close_matches(given.lower(), by_case, n=1)
    return by_case[found[0]] if found else None


def change(prefix: str, given: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the last sentence of a message about the unknown name ``given``: "Write <prefix><nearest name in known>."
    or, if no name is near, "Change <otherwise>." (default: ``prefix`` and ``given``)."""
    close = nearest(given, known)
    return f"Write {prefix}{close}." if close else f"Change {otherwise or prefix + given}."


def check_installed(key: str, packages: Iterable[str]) -> None:
    """Raise ConfigError if one of ``packages`` is not installed. Nothing is imported."""
    found = {name: importlib.util.find_spec(name) for name in packages}
    missing = [name for name, spec in found.items() if spec is None or spec.origin is None]  # origin: a folder has none
    if missing:
        raise ConfigError(
            f"{key}: expected {' and '.join(missing)} to be installed. Run pip install {' '.join(missing)}."
        )


def choose(group: str, name: Any) -> Any:
    """Return the choice ``name`` of ``zero/<group>`` as an enum member. Raise ConfigError if there is none."""
    enum = ROWS[group]
    if isinstance(name, enum):
        return name
    text = ALSO.get(group, {}).get(str(name), str(name))
    if text in enum.__members__:
        return enum[text]
    known, way = enum.__members__, change(f"zero/{group}=", text, enum.__members__, f"zero/{group}")
    raise ConfigError(f"zero/{group}: expected one of {', '.join(known)}, got {text!r}. {way}")


# -- types and sizes --------------------------------------------------------------------------------------------------

MIB = 1024 * 1024
CONF = Path(__file__).parents[1] / "conf"  # the Hydra groups

if TYPE_CHECKING:
    NBytes = int
else:
    NBytes = Annotated[Any, "bytes"]  # 256MB is allowed too, which Hydra would refuse for an int


def check_types(key: str, settings: Any) -> None:
    """Convert each field of ``settings`` to its type, or raise ConfigError. ``key``: the group (like ``zero.unit``)."""
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
    """Return ``value`` converted to ``kind``, and text that says what is expected, or "" if ``value`` is valid."""
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
    """Create ``folder``, unless it is None. Raise ConfigError about ``key`` if no file can be written there."""
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
    """Return the size ``value`` (a number, or text such as ``74.5GiB``) in bytes. Raises ConfigError, with ``key``."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?) *([a-z]*)", str(value).strip(), re.IGNORECASE)
    unit = next((n for name, n in _UNITS.items() if match and name.lower() == match[2].lower()), None)
    nbytes = Decimal(match[1]) * unit if match and unit else None
    if nbytes is None or (unit == 1 and nbytes % 1) or isinstance(value, bool):
        raise ConfigError(
            f"{key}: expected a size such as 80GB, 80GiB or a number of bytes, got {value!r}. Change {key}."
        )
    return int(nbytes)
