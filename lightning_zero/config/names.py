"""The names that settings may have, as users type them: members of enums, which OmegaConf matches by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot work. The message says what was expected, what was got, and the key to change."""


class Stage(Enum):
    zero0 = "zero0"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"
    auto = "auto"


class Precision(Enum):
    """The values are what Trainer(precision=) calls them."""

    fp32 = "32-true"
    bf16 = "bf16-mixed"
    fp16 = "16-mixed"
    bf16_true = "bf16-true"
    fp16_true = "16-true"
    fp64 = "64-true"


class Offload(Enum):
    none = "none"
    optimizer_cpu = "optimizer_cpu"
    cpu = "cpu"
    optimizer_nvme = "optimizer_nvme"
    optimizer_cpu_param_nvme = "optimizer_cpu_param_nvme"
    nvme = "nvme"
    auto = "auto"


class Recompute(Enum):
    none = "none"
    blocks = "blocks"
    offload = "offload"


class DType(Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class StateDtype(Enum):
    """How wide optimizer state rests; ``fp32``: as the masters do."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"


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


class Transport(Enum):
    auto = "auto"
    plain = "plain"
    direct = "direct"


class GradCommDtype(Enum):
    auto = "auto"
    full = "full"
    bf16 = "bf16"


class Sharding(Enum):
    """What of a parameter an optimizer steps on a rank."""

    auto = "auto"
    slices = "slices"
    tensors = "tensors"


# The groups of zero/* that a row's name chooses from.
ROWS: dict[str, type[Enum]] = {
    "stage": Stage,
    "precision": Precision,
    "offload": Offload,
    "checkpoint": CheckpointFormat,
    "compile": Compile,
}


# What others call a name of ours.
OTHER_NAMES = {row.value: row.name for row in Precision} | {f"{n}": f"zero{n}" for n in range(4)}
OTHER_NAMES |= {"ddp": "zero0", "fsdp": "zero3", "strategy": "stage", "learning_rate": "lr", "null": "none"}
OTHER_NAMES |= {"micro_batches": "vertical_chunks", "grad_wire": "grad_comm_dtype", "hierarchy": "hybrid_shard"}
OTHER_NAMES |= {"gpu": "none", "cuda": "none", "16": "fp16", "32": "fp32", "64": "fp64"}


def nearest(given: str, known: Iterable[str], *, exact: bool = False) -> str | None:
    """The name among ``known`` that ``given`` is another word for, or a misspelling of unless ``exact``."""
    by_case = {name.lower(): name for name in sorted(known)}
    found = [name for name in (given.lower(), OTHER_NAMES.get(given.lower())) if name in by_case]
    if not found and not exact:
        found = difflib.get_close_matches(given.lower(), by_case, n=1)
    return by_case[found[0]] if found else None


def choose(group: str, name: Any) -> Any:
    """The member of ``zero/<group>`` that ``name`` stands for.

    Raises:
        ConfigError: no such row; the message lists those there are.
    """
    enum = ROWS[group]
    if isinstance(name, enum):
        return name
    text = str(name)
    if group == "stage" and text in {"0", "1", "2", "3"}:
        text = f"zero{text}"
    if text in enum.__members__:
        return enum[text]
    known, close = ", ".join(enum.__members__), nearest(text, enum.__members__)
    change = f"Write zero/{group}={close}" if close else f"Change zero/{group}"
    raise ConfigError(f"zero/{group}: expected one of {known}, got {text!r}. {change}.")
