"""The enums of allowed values, as users type them. OmegaConf matches members by name."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from enum import Enum
from typing import Any


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
    """The choices of ``zero/offload``. ``OFFLOADS`` in ``planning/placement.py`` has the tier of each role."""

    none = "none"
    optimizer_cpu = "optimizer_cpu"
    cpu = "cpu"
    optimizer_nvme = "optimizer_nvme"
    optimizer_cpu_param_nvme = "optimizer_cpu_param_nvme"
    nvme = "nvme"
    auto = "auto"

    @property
    def uses_files(self) -> bool:
        """Return whether parameters or optimizer state are always in files: False for ``auto``, which may use files."""
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
    """Return the name in ``known`` that ``given`` is a synonym or, unless ``exact``, a misspelling of; None if none
    is."""
    by_case = {name.lower(): name for name in sorted(known)}
    found = [name for name in (given.lower(), OTHER_NAMES.get(given.lower())) if name in by_case]
    if not found and not exact:
        found = difflib.get_close_matches(given.lower(), by_case, n=1)
    return by_case[found[0]] if found else None


def change(prefix: str, given: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the last sentence of a message about the unknown name ``given``: to write ``prefix`` and the nearest name
    in ``known``; if none is near, to change ``otherwise`` (default: ``prefix`` and ``given``)."""
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
    """Return the choice ``name`` of ``zero/<group>`` as an enum member. Raises ConfigError if there is no such
    choice."""
    enum = ROWS[group]
    if isinstance(name, enum):
        return name
    text = ALSO.get(group, {}).get(str(name), str(name))
    if text in enum.__members__:
        return enum[text]
    known, way = enum.__members__, change(f"zero/{group}=", text, enum.__members__, f"zero/{group}")
    raise ConfigError(f"zero/{group}: expected one of {', '.join(known)}, got {text!r}. {way}")
