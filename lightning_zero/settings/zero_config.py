"""All settings together, the checks of their combinations, and functions that make them from keywords, names such as
``zero3``, and other settings."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_type_hints

from lightning_zero.settings import names
from lightning_zero.settings.groups import (
    CheckpointConfig,
    CompileConfig,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    StageConfig,
    UnitConfig,
    check_state_dtype,
    without_effect,
)
from lightning_zero.settings.names import (
    MIB,
    ROWS,
    Compile,
    ConfigError,
    Float8,
    HybridShard,
    LossMean,
    NBytes,
    Offload,
    Recompute,
    Stage,
    StateDtype,
    TensorStyle,
    Uneven,
    change,
    check_types,
    choose,
    kinds_of,
    positive,
)

PREFETCH_BYTES = 256 * MIB


@dataclass(kw_only=True, slots=True)
class ZeroConfig:
    """All settings of the strategy: the group ``zero``.

    Attributes:
        stage: what is sharded: a name, a number, or a mapping of settings.
        precision: the dtypes: a name, or a mapping of settings.
        offload: what is kept in host memory or files: a name, or a mapping of settings.
        unit: which modules are units: a mapping of settings.
        optimizer: how steps are sharded: a mapping of settings.
        checkpoint: the form of checkpoints: a name, or a mapping of settings.
        compile: what is compiled: a name, or a mapping of settings.
        prefetch_bytes: bytes of parameters that may be gathered ahead of computation. One unit of any size is always
            gathered ahead, unless this is 0.
        keep_gathered_bytes: bytes of units that may stay gathered between forward and backward, which saves their
            second gather. Units at the end of the model are kept first; the last one always stays gathered.
        reduce_bucket_bytes: bytes of gradients that are reduced together; a larger parameter is reduced by itself. This
            bounds the buffers of all reductions in flight; at stage 3 on a CPU, those of each reduction.
        activation_checkpointing: ``blocks``: every block keeps only its inputs and recomputes its activations in the
            backward; ``offload``: these inputs are also kept in host memory.
        hybrid_shard: ``flat`` shards over all ranks; ``node`` within each node, with replicas across nodes, so that
            gathers stay within nodes but shards are larger; ``node_backward`` shards over all ranks, but each node
            keeps a copy of every unit after its forward, for the gathers of the backward. ``auto`` selects ``node`` on
            several nodes of equal size if at most half of the memory is used, otherwise ``flat``.
        dynamic_graph: allow ranks to take different paths through the model. They agree on every gather by a message.
        init_from: a folder, or its address in an object store, with Hugging Face safetensors files for the initial
            parameters, also of a module on the meta device. A loaded checkpoint takes precedence.
        stall_timeout_s: seconds that a rank waits for others before it raises an error that says where each rank is.
        gather_after_fit: gather the whole module after fit, test or predict, one copy per host. ``None``: only if all
            hosts have enough memory.
        timeline: a folder for a timeline of two steps after the fifth: a trace for Perfetto and an HTML page.
        sequence_parallel: number of adjacent ranks that get the same batch and divide each sequence by positions
            (Ulysses). Parameters are still sharded over all ranks.
        tensor_parallel: number of adjacent ranks that get the same batch and have parts of large matrices (Megatron).
        expert_parallel: number of adjacent ranks that divide the experts of a mixture; tokens are sent to them.
        tensor_plan: how ``tensor_parallel`` splits each module, by name (``layers.*.q_proj: colwise``), for models
            without a plan.
        loss: the loss of a step. ``batches``: the mean of the micro-batches' losses, as in Lightning; ``tokens``: the
            mean over all tokens of the step, on all ranks and in all micro-batches.
        uneven: when an epoch of training ends if ranks have different numbers of batches. ``end``: with the last batch
            that all ranks have; ``join``: when no rank has a batch left. Until then ranks without batches repeat their
            last one with weight 0, so that gradients are means over the ranks that have batches.
        fingerprint: number of steps after which checksums of weights and optimizer state are written into
            ``fingerprints.csv``. ``None``: never.
    """

    stage: StageConfig = field(default_factory=StageConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    unit: UnitConfig = field(default_factory=UnitConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    prefetch_bytes: NBytes = PREFETCH_BYTES
    keep_gathered_bytes: NBytes = 0
    reduce_bucket_bytes: NBytes = 256 * MIB
    activation_checkpointing: Recompute = Recompute.none
    hybrid_shard: HybridShard = HybridShard.auto
    dynamic_graph: bool = False
    init_from: str | None = None
    stall_timeout_s: float = 300.0
    gather_after_fit: bool | None = None
    timeline: str | None = None
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    tensor_plan: dict[str, TensorStyle] = field(default_factory=dict)
    loss: LossMean = LossMean.batches
    uneven: Uneven = Uneven.end
    fingerprint: int | None = None

    def __post_init__(self) -> None:
        check_types("zero", self)
        check_rows(self.stage.name, self.offload.name)
        if self.precision.name is not None:
            check_state_dtype(self.optimizer.state_dtype, self.precision.name)
        check_hybrid_shard(self.hybrid_shard, self.stage.name, self.offload.name)
        for key in ("prefetch_bytes", "keep_gathered_bytes"):
            positive(f"zero.{key}", getattr(self, key), zero_ok=True)
        sizes = ("reduce_bucket_bytes", "sequence_parallel", "tensor_parallel", "expert_parallel")
        for key in (*sizes, "stall_timeout_s"):
            positive(f"zero.{key}", getattr(self, key))
        if self.fingerprint is not None:
            positive("zero.fingerprint", self.fingerprint)
        self._check_splits()
        if self.sequence_parallel > 1 and self.compile.name is not Compile.none:
            raise ConfigError(
                "zero.sequence_parallel: expected 1 with zero/compile=blocks (a compiled graph would not call the "
                f"attention that exchanges heads), got {self.sequence_parallel}. Choose zero/compile=none, or drop "
                "zero.sequence_parallel."
            )
        if self.keep_gathered_bytes and self.stage.name is not Stage.zero3:
            raise ConfigError(
                "zero.keep_gathered_bytes: expected 0 (parameters are always gathered below stage 3), got "
                f"{self.keep_gathered_bytes} with zero/stage={self.stage.name.name}. Choose zero/stage=zero3 or drop "
                "zero.keep_gathered_bytes."
            )
        if self.dynamic_graph and self.stage.name is not Stage.zero3:
            raise ConfigError(
                "zero.dynamic_graph: expected false (only stage 3 gathers inside the model), got true with "
                f"zero/stage={self.stage.name.name}. Choose zero/stage=zero3 or drop zero.dynamic_graph."
            )
        if self.compile.records_cuda_graphs and self.stage.name in (Stage.zero3, Stage.auto):
            raise ConfigError(
                "zero.compile.arguments: expected mode default or max-autotune-no-cudagraphs at stage 3 (a CUDA graph "
                "replays kernels on fixed addresses, and those of gathered parameters change), got "
                f"{self.compile.arguments}. Change zero.compile.arguments, or choose zero/stage=zero2."
            )

    @property
    def splits(self) -> str:
        """Return the settings that split parameters among ranks, as ``key=value``; "" if there are none."""
        found = {key: getattr(self, key) for key in ("tensor_parallel", "expert_parallel")}
        return ", ".join(f"zero.{key}={size}" for key, size in found.items() if size > 1)

    def _check_splits(self) -> None:
        if self.tensor_plan and self.tensor_parallel == 1:
            raise ConfigError(
                f"zero.tensor_plan: expected none with zero.tensor_parallel=1, got {self.tensor_plan}. Set "
                "zero.tensor_parallel, or drop zero.tensor_plan."
            )
        if not self.splits:
            return
        for key, got, only, why in (
            ("zero.sequence_parallel", self.sequence_parallel, 1, "both make ranks share a batch"),
            ("zero/compile", self.compile.name, Compile.none, "a compiled graph would not see the split parameters"),
            (
                "zero.optimizer.state_dtype",
                self.optimizer.state_dtype,
                StateDtype.fp32,
                "its rounding counts elements of whole parameters",
            ),
            ("zero.gather_after_fit", self.gather_after_fit, None, "each rank keeps its part of the module"),
            ("zero.precision.float8", self.precision.float8, Float8.none, "torchao's layers are not split"),
        ):
            if got != only:
                raise ConfigError(
                    f"{self.splits}: expected 1 with {key}={getattr(got, 'name', got)} ({why}). Drop one of the two."
                )
        if self.hybrid_shard not in (HybridShard.auto, HybridShard.flat):
            raise ConfigError(
                f"{self.splits}: expected 1 with zero.hybrid_shard={self.hybrid_shard.name} (split "
                "parameters are divided over the ranks that have the same part). Drop one of the two."
            )


def check_prefetch(config: ZeroConfig) -> None:
    """Raise ConfigError if ``prefetch_bytes`` was set below stage 3, where nothing is gathered ahead."""
    if config.prefetch_bytes != PREFETCH_BYTES and config.stage.name not in (Stage.zero3, Stage.auto):
        raise ConfigError(
            "zero.prefetch_bytes: expected its default (parameters are gathered ahead at stage 3 only), got "
            f"{config.prefetch_bytes} with zero/stage={config.stage.name.name}. Choose zero/stage=zero3, or drop "
            "zero.prefetch_bytes."
        )


def check_hybrid_shard(hybrid_shard: HybridShard, stage: Stage, offload: Offload) -> None:
    """Raise ConfigError for ``node_backward`` unless parameters are sharded and on the device."""
    if hybrid_shard is not HybridShard.node_backward:
        return
    if stage is not Stage.zero3:
        raise ConfigError(
            "zero.hybrid_shard: expected auto, flat or node below stage 3 (nothing is gathered in a backward), "
            f"got node_backward with zero/stage={stage.name}. Choose zero/stage=zero3, or drop zero.hybrid_shard."
        )
    if offload.moves_params:
        raise ConfigError(
            "zero.hybrid_shard: expected auto, flat or node with offloaded parameters (node_backward would keep a copy "
            f"of the parameters on the device), got node_backward with zero/offload={offload.name}. Choose "
            "zero/offload=optimizer_cpu or none, or drop zero.hybrid_shard."
        )


def check_rows(stage: Stage, offload: Offload) -> None:
    """Raise ConfigError if the choice of ``zero/offload`` is not possible at ``stage``."""
    if offload is not Offload.none and stage is Stage.zero0:
        raise ConfigError(
            f"zero/offload={offload.name}: stage 0 replicates the optimizer, so every rank would run the whole step on "
            "the host. Choose zero/stage=zero1, zero2 or zero3, or zero/offload=none."
        )
    if offload.moves_params and stage is not Stage.zero3:
        raise ConfigError(
            f"zero/offload={offload.name}: parameters can be offloaded at stage 3 only (at lower stages every rank "
            f"holds all parameters), got zero/stage={stage.name}. Choose zero/stage=zero3, or zero/offload="
            f"{'optimizer_nvme' if offload is Offload.nvme else 'optimizer_cpu'}."
        )


# -- making settings --------------------------------------------------------------------------------------------------


def make_config(base: ZeroConfig | None = None, **settings: Any) -> ZeroConfig:
    """Make a :class:`ZeroConfig` from ``base`` and the keywords of :class:`~lightning_zero.ZeroStrategy`.

    Each group can be given as a mapping, or None to keep the group of ``base``; ``stage`` also as a number or name, and
    ``precision``, ``offload``, ``checkpoint`` and ``compile`` as a name. Raises ConfigError for an unknown
    setting or a bad value.
    """
    base = base if base is not None else ZeroConfig()
    known = {f.name: getattr(base, f.name) for f in fields(ZeroConfig)}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(
                f"zero.{key}: no such setting; there are {', '.join(sorted(known))}. {change('zero.', key, known)}"
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
    """Return ``LIGHTNING_ZERO_NVME_PATH`` (None if it is unset) if the choice ``name`` always uses files, else None."""
    return os.environ.get("LIGHTNING_ZERO_NVME_PATH") if name.uses_files else None


def is_decided(config: ZeroConfig) -> bool:
    """Return whether the stage is not ``auto``."""
    return config.stage.name is not Stage.auto


def check_decided(config: ZeroConfig) -> None:
    """Raise ConfigError for settings that need a Trainer: ``stage=auto``, and settings that act on whole steps."""
    if not is_decided(config):
        raise ConfigError(
            "zero/stage: expected zero0, zero1, zero2 or zero3 with lightning_zero.shard and Fabric, got auto, which "
            "only ZeroStrategy resolves, at the start of a run. Give the stage that python -m lightning_zero.plan "
            "names, or train with Trainer(strategy='zero_auto')."
        )
    of_trainer = {"sequence_parallel": 1, "loss": LossMean.batches, "uneven": Uneven.end, "fingerprint": None}
    for name, default in of_trainer.items():
        if (got := getattr(config, name)) != default:
            default, got = (getattr(value, "name", value) for value in (default, got))
            raise ConfigError(
                f"zero.{name}: expected {default} with lightning_zero.shard and Fabric, because only a Trainer's "
                f"strategy sees whole steps, got {got}. Train with ZeroStrategy, or drop zero.{name}."
            )


def for_layout(config: ZeroConfig) -> ZeroConfig:
    """Return ``config``, with stage 1 and no offload if its stage is ``auto``. Layouts are the same at every stage."""
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
    """List the pairs (stage, offload settings) from which ``auto`` chooses; without a folder, none that uses files."""
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
            "restage: expected zero0, zero1, zero2 or zero3, got stage=auto, which is resolved only when a run starts. "
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
            raise ConfigError(
                f"zero.{key}: expected a mapping of settings, or {kind.__name__}, got {value!r}. "
                f"{_meant(kind, key, value)}."
            )
        return kind(name=choose(key, value))
    allowed = set(kinds_of(kind))
    unknown = sorted(set(value) - allowed)
    if unknown:
        way = change(f"zero.{key}.", unknown[0], allowed)
        raise ConfigError(f"zero.{key}.{unknown[0]}: no such setting; there are {', '.join(sorted(allowed))}. {way}")
    return kind(**value)


def _meant(kind: Any, key: str, value: Any) -> str:
    """Return the end of an error message: how to write ``value``, or a list of it, as a setting of group ``key``."""
    for name, given in itertools.product(kinds_of(kind), (list(value) if isinstance(value, tuple) else value, [value])):
        with contextlib.suppress(ConfigError):
            kind(**{name: given})
            shown = str(given).replace("'", "")
            return f"Write zero.{key}.{name}={shown}"
    return f"Change zero.{key}"


# -- what callers from Python see: each setting as an argument, in signatures and in messages --------------------------

_ENUMS = [kind for kind in vars(names).values() if isinstance(kind, type) and issubclass(kind, Enum)]
_CHOICES = "|".join({name for kind in _ENUMS for name in kind.__members__})
_SETTING = re.compile(
    r"(?<![\w./])(?P<shell>'\+)?zero[./](?P<key>\w+)(?P<inner>(?:\.\w+)*)"
    r"(?:=(?P<value>\[[^\]']*\]|\{[^}']*\}|[\w/~$-]+(?:\.[\w/~$-]+)*)"
    rf"(?P<more>(?:(?:, or|,| or) (?:{_CHOICES})\b)*))?(?(shell)')"
)
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}


def as_arguments(text: str) -> str:
    """Return ``text`` with settings written as Python arguments: ``stage='zero2'`` for ``zero/stage=zero2``,
    ``unit['classes']`` for ``zero.unit.classes``."""
    known = {f.name for f in fields(ZeroConfig)}

    def argument(found: re.Match[str]) -> str:
        key, inner = found["key"], found["inner"].removesuffix(".name").split(".")[1:]
        if found.start() and key not in known:  # a path, or the like
            return found[0]
        if found["value"] is None:
            return key + "".join(f"[{name!r}]" for name in inner)
        value = _literal(found["value"]) + re.sub(rf"\b({_CHOICES})\b", r"'\1'", found["more"])
        if key in ROWS or not inner:
            return key + "".join(f"[{name!r}]" for name in inner) + f"={value}"
        return f"{key}={{{inner[0]!r}: {value}}}"

    text = _SETTING.sub(argument, text)
    return re.sub(r"\b(expected|got|or) (true|false|null)\b", lambda m: f"{m[1]} {_CONSTANTS[m[2]]}", text)


def _literal(value: str) -> str:
    if value[0] in "[{":  # a list or a mapping, as Hydra writes them
        return value[0] + re.sub(r"[^,: ][^,:]*", lambda item: _literal(item[0]), value[1:-1]) + value[-1]
    return _CONSTANTS.get(value) or (value if re.fullmatch(r"[\d.]+", value) else repr(value))


@contextlib.contextmanager
def names_arguments(config: ZeroConfig | None = None) -> Iterator[None]:
    """If the body raises ConfigError, write settings in its message as Python arguments, except if the caller gave all
    settings as ``config`` (as an app with Hydra does)."""
    try:
        yield
    except ConfigError as error:
        if config is None:
            error.args = (as_arguments(str(error.args[0])), *error.args[1:])
        raise


class Signature:
    """The ``__signature__``, with each setting, of a class whose ``__init__`` takes ``**settings: Unpack[...]``."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature | None:
        definer = next(of for of in owner.__mro__ if "__init__" in vars(of))
        if vars(definer).get("__signature__") is not self:
            return None  # a subclass has an __init__ of its own
        made = inspect.signature(definer.__init__, eval_str=True)  # type: ignore[misc]
        _, *own, settings = made.parameters.values()
        (keywords,) = get_args(settings.annotation)
        for name, kind in get_type_hints(keywords).items():
            value = getattr(ZeroConfig(), name)
            default = None if is_dataclass(value) else value.name if isinstance(value, Enum) else value
            own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        return made.replace(parameters=own)
