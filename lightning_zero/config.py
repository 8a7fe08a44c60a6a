"""Every setting of lightning_zero, once: Hydra schema, Python API and documentation.

The dataclasses below are the schema of the Hydra groups ``zero/*``, the arguments of
:class:`lightning_zero.ZeroStrategy` and the reference a user reads. Each checks its own values in
``__post_init__``, so that a bad value is refused before any process starts, with the key to change.

Enums have members named as users type them (``zero/stage=zero3``): OmegaConf matches by member name.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

MIB = 1024 * 1024


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


class Hierarchy(Enum):
    auto = "auto"
    flat = "flat"
    node = "node"


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


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The name among ``known`` that ``given`` is a misspelling of, if one is near."""
    by_case = {name.lower(): name for name in sorted(known)}
    found = difflib.get_close_matches(given.lower(), by_case, n=1)
    return by_case[found[0]] if found else None


def _positive(key: str, value: float, *, zero_ok: bool = False) -> None:
    if value < 0 or (value == 0 and not zero_ok):
        bound = ">= 0" if zero_ok else "> 0"
        raise ConfigError(f"{key}: expected a number {bound}, got {value!r}. Change {key}.")


@dataclass(kw_only=True, slots=True)
class StageConfig:
    """Group ``zero/stage``: which roles are sharded over the ranks.

    Attributes:
        name: ``zero0`` replicates everything (as DDP does); ``zero1`` shards optimizer state and master
            weights; ``zero2`` gradients too; ``zero3`` parameters too. ``auto`` is for the strategy: it takes the
            fastest row that fits, of this group and, under ``zero/offload=auto``, of that one too.
    """

    name: Stage = Stage.zero3


def check_rounding(stochastic: bool, precision: Precision) -> None:
    """Only weights that rest in bf16 are rounded at a step."""
    if stochastic and precision is not Precision.bf16_true:
        raise ConfigError(
            "zero.precision.stochastic_rounding: expected false (masters are fp32 and not rounded), got true with "
            f"zero/precision={precision.name}. Choose zero/precision=bf16_true or drop "
            "zero.precision.stochastic_rounding."
        )


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    """Group ``zero/precision``: the dtype of each role.

    Attributes:
        name: ``fp32`` (Lightning's ``32-true``), ``bf16`` (``bf16-mixed``: fp32 master, parameters gathered and
            used in bf16 under autocast), ``fp16`` (``16-mixed``: the same in fp16, with dynamic loss scaling) or
            ``bf16_true``, ``fp16_true``, ``fp64`` (one dtype everywhere, buffers too). ``None`` follows
            ``Trainer(precision=)``.
        reduce_dtype: what gradients travel in. ``None``: fp32; under the rows of one dtype, that.
        grad_dtype: what gradients rest and accumulate in. ``None``: fp32; under the rows of one dtype, that.
        fp32_modules: class names (``*`` matches anything) whose parameters keep fp32 under ``bf16`` and ``fp16``.
            What parametrizations compute weights from keeps it too.
        stochastic_rounding: under ``bf16_true``, compute steps in fp32 and round weights and optimizer state to bf16 up
            or down at random, right on average; to nearest, changes below 1/512 of a weight are lost.
    """

    name: Precision | None = None
    reduce_dtype: DType | None = None
    grad_dtype: DType | None = None
    fp32_modules: list[str] = field(
        default_factory=lambda: ["LayerNorm", "GroupNorm", "BatchNorm?d", "*Norm", "Bilinear"]
    )
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.name is not None:
            check_rounding(self.stochastic_rounding, self.name)
        lower = [k for k in ("reduce_dtype", "grad_dtype") if getattr(self, k) is DType.bf16]
        if self.name is Precision.fp32 and lower:
            raise ConfigError(
                f"zero.precision.{lower[0]}: expected fp32 under zero/precision=fp32, got bf16. "
                f"Choose zero/precision=bf16 or drop zero.precision.{lower[0]}."
            )
        given = [k for k in ("reduce_dtype", "grad_dtype") if getattr(self, k) is not None]
        if self.name in (Precision.fp16_true, Precision.fp64) and given:
            raise ConfigError(
                f"zero.precision.{given[0]}: expected none under zero/precision={self.name.name}, where gradients "
                f"have the dtype of the weights, got {getattr(self, given[0]).name}. Drop zero.precision.{given[0]}."
            )
        if self.name is Precision.bf16_true:
            upper = [k for k in ("reduce_dtype", "grad_dtype") if getattr(self, k) is DType.fp32]
            if "grad_dtype" in upper:
                raise ConfigError(
                    "zero.precision.grad_dtype: expected bf16 under zero/precision=bf16_true (the optimizer steps bf16 "
                    "weights with bf16 gradients), got fp32. Choose zero/precision=bf16 for fp32 masters."
                )


@dataclass(kw_only=True, slots=True)
class OffloadConfig:
    """Group ``zero/offload``: the tier on which each role rests.

    Attributes:
        name: ``none`` keeps everything on the device; ``optimizer_cpu`` and ``optimizer_nvme`` hold optimizer state and
            master weights in host memory or in files; ``cpu``, ``nvme`` and ``optimizer_cpu_param_nvme`` the
            parameters too (stage 3 only). ``auto`` splits the optimizer by units over device, host and files, under
            the budgets.
        nvme_path: the folder for the files. By preset string it is taken from ``LIGHTNING_ZERO_NVME_PATH``. It may hold
            ``$LOCAL_RANK``, ``$RANK`` and variables of each node's environment.
        device_budget: bytes of optimizer state, master weights and gradients that one rank may hold on the device
            under ``auto``. ``None``: none on a CPU, half of the free memory on a GPU.
        host_budget: bytes of host memory that one rank may hold at rest. ``None``: what the machine has available.
        nvme_budget: bytes of files that one rank may hold. ``None``: what the disk has free.
        threads: CPU threads of a rank's offloaded step. ``None``: the cores that it may use over the ranks that share
            them, less one for transfers where there are more than two.
        io_threads: reads and writes in flight at a time. ``None``: 4.
        step_in_backward: step a bucket as soon as its gradient has been reduced, while the backward goes on. For
            automatic optimization with one optimizer, where nothing looks at gradients before the step; what stands in
            the way is refused at the start.
    """

    name: Offload = Offload.none
    nvme_path: str | None = None
    device_budget: int | None = None
    host_budget: int | None = None
    nvme_budget: int | None = None
    threads: int | None = None
    io_threads: int | None = None
    step_in_backward: bool = False

    def __post_init__(self) -> None:
        for key in ("device_budget", "host_budget", "nvme_budget", "threads", "io_threads"):
            value = getattr(self, key)
            if value is not None:
                _positive(f"zero.offload.{key}", value, zero_ok=key == "device_budget")
        uses_nvme = "nvme" in self.name.name or self.name is Offload.auto
        if uses_nvme and not self.nvme_path and self.name is not Offload.auto:
            raise ConfigError(
                f"zero.offload.nvme_path: expected a folder on a local disk for zero/offload={self.name.name}, got "
                "none. Set zero.offload.nvme_path=/path, or LIGHTNING_ZERO_NVME_PATH=/path for a preset string."
            )
        ignored = [
            k for k in without_effect(self.name) if getattr(self, k) is not None and getattr(self, k) is not False
        ]
        if ignored:
            raise ConfigError(
                f"zero.offload.{ignored[0]} has no effect with zero/offload={self.name.name}. Drop it, or choose a row "
                "of zero/offload that uses it."
            )


def without_effect(row: Offload) -> list[str]:
    """The settings of :class:`OffloadConfig` that have no effect with a row of ``zero/offload``."""
    found = []
    if "nvme" not in row.name and row is not Offload.auto:
        found += ["nvme_path", "nvme_budget", "io_threads"]
    if row is not Offload.auto:
        found.append("device_budget")
    if row is Offload.none:
        found += ["host_budget", "threads", "step_in_backward"]
    if row in (Offload.optimizer_nvme, Offload.nvme):
        found.append("host_budget")  # nothing but gradients rests on the host there
    return found


@dataclass(kw_only=True, slots=True)
class UnitConfig:
    """Which modules are units: what is gathered and dropped together. (It is reduced bucket by bucket.)

    Attributes:
        classes: class names of the modules that become units. Empty: found from the model (``_no_split_modules``
            of Hugging Face models, else repeated blocks in ModuleList and Sequential; where these hold less than half
            of a model of more than 1 MiB, the rest by size: modules of an eighth of it, or less).
        min_bytes: a module with fewer bytes of its own (in the parameters' original dtype) stays with its parent.
        max_bytes: units found by themselves that hold more bytes are divided into their children, where they can be.
    """

    classes: list[str] = field(default_factory=list)
    min_bytes: int = 0
    max_bytes: int = 4096 * MIB

    def __post_init__(self) -> None:
        _positive("zero.unit.min_bytes", self.min_bytes, zero_ok=True)
        _positive("zero.unit.max_bytes", self.max_bytes)
        if self.min_bytes > self.max_bytes:
            raise ConfigError(
                f"zero.unit.min_bytes: expected at most zero.unit.max_bytes ({self.max_bytes}), got {self.min_bytes}. "
                "Lower zero.unit.min_bytes or raise zero.unit.max_bytes."
            )


@dataclass(kw_only=True, slots=True)
class CommConfig:
    """Group ``zero/comm``: how the bytes travel.

    Attributes:
        transport: ``plain`` uses the library's gather and reduce-scatter; ``direct`` gathers by broadcasts and
            reduces by an all-to-all and a local sum, which on gloo is several times faster at few ranks;
            ``auto`` chooses by backend and number of ranks.
        hierarchy: ``flat`` shards over all ranks; ``node`` over those of each node, with a replica on every node
            (hybrid sharding): gathers stay within nodes, which hold more. ``auto`` takes ``node`` where there are
            several nodes with as many ranks each, and what rests fits into half of the memory; else ``flat``.
        even_alone: gather and reduce over a group of one rank as over many, so that a transport can be tried on one
            GPU. It is slower, and trains the same.
    """

    transport: Transport = Transport.auto
    hierarchy: Hierarchy = Hierarchy.auto
    even_alone: bool = False


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Group ``zero/checkpoint``: the form in which checkpoints are saved. Both are loaded at any setting.

    Attributes:
        name: ``full``: one ordinary file, which all ranks write, each its own ranges. ``sharded``: a folder in the
            format of PyTorch's distributed checkpoints, which all ranks must see: each writes a file of its shards.
        exclude_frozen: leave frozen parameters out (adapters); a run that goes on keeps those it has.
        verify: compare a checkpoint with its checksums before it is loaded. ``None``: where a job that was started
            again goes on from it.
        background: training goes on while a checkpoint is written. What changes meanwhile is copied to host memory
            first.
    """

    name: CheckpointFormat = CheckpointFormat.full
    exclude_frozen: bool = False
    verify: bool | None = None
    background: bool = False


# Modes of torch.compile, and whether they record CUDA graphs.
_MODES = {
    "default": False,
    "max-autotune-no-cudagraphs": False,
    "reduce-overhead": True,
    "max-autotune": True,
}


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """Group ``zero/compile``: what ``torch.compile`` is applied to.

    Attributes:
        name: ``blocks`` compiles the forward of every unit but the root, one graph for all blocks of a class. Modules
            that the user has compiled stay as they are, under ``none`` too.
        backend: of ``torch.compile``; ``inductor`` needs a C++ compiler on every node.
        mode: of ``inductor``. ``reduce-overhead`` and ``max-autotune`` record CUDA graphs, which stage 3 refuses.
        dynamic: whether graphs are for any sizes of inputs. ``None``: from when sizes are found to change.
    """

    name: Compile = Compile.none
    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in _MODES:
            raise ConfigError(
                f"zero.compile.mode: expected one of {', '.join(_MODES)}, got {self.mode!r}. Change zero.compile.mode."
            )
        if self.name is Compile.none:
            given = [k for k in ("mode", "dynamic") if getattr(self, k) is not None]
            given += ["backend"] * (self.backend != "inductor")
            if given:
                raise ConfigError(
                    f"zero.compile.{given[0]} has no effect with zero/compile=none. Drop it, or choose "
                    "zero/compile=blocks."
                )
        if self.mode is not None and self.backend != "inductor":
            raise ConfigError(
                f"zero.compile.mode: expected none with zero.compile.backend={self.backend} (modes are those of "
                f"inductor), got {self.mode!r}. Drop zero.compile.mode."
            )

    @property
    def records_cuda_graphs(self) -> bool:
        return _MODES[self.mode or "default"]


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Settings of the sharded optimizer step.

    Attributes:
        elementwise: declares that an optimizer unknown to us computes each element of a parameter from that
            element's own value, gradient and state alone, so that it may step slices of parameters.
    """

    elementwise: bool = False


class AfterFit(Enum):
    """What a module is between runs."""

    auto = "auto"
    whole = "whole"
    sharded = "sharded"


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    """What a run tells of itself.

    Attributes:
        timeline: a folder for a timeline of some steps: a trace for Perfetto, a page, and a PNG where matplotlib is
            installed.
        timeline_after: steps of the optimizer before the first that is recorded. ``None``: 5.
        timeline_steps: how many are recorded. ``None``: 2.
    """

    timeline: str | None = None
    timeline_after: int | None = None
    timeline_steps: int | None = None

    def __post_init__(self) -> None:
        for key in ("timeline_after", "timeline_steps"):
            value = getattr(self, key)
            if value is not None:
                _positive(f"zero.debug.{key}", value)
                if self.timeline is None:
                    raise ConfigError(
                        f"zero.debug.{key} has no effect without zero.debug.timeline. Drop it, or give "
                        "zero.debug.timeline=FOLDER."
                    )


@dataclass(kw_only=True, slots=True)
class ZeroConfig:
    """All settings of the strategy: the group ``zero``.

    Attributes:
        prefetch_bytes: bytes of gathered parameters that may be in flight or waiting ahead of compute. One unit is
            always gathered ahead, whatever its size, unless this is 0, which turns prefetching off.
        keep_gathered_bytes: bytes of units that stay gathered between forward and backward (the last units
            first), which saves their second gather. The last unit of the forward always stays.
        reduce_bucket_bytes: a bucket holds at most this many bytes of gradient (one parameter that is larger
            travels alone): it bounds the buffers that a reduction needs.
        activation_checkpointing: ``blocks``: every unit but the root keeps its inputs only and computes the rest again
            in backward; ``offload``: and these inputs wait in host memory.
        dynamic: ranks may take different paths through the model; they agree on every gather by a small exchange.
        init_from: a folder with safetensors files of Hugging Face, from which parameters get their first values; those
            of a module on the meta device need no others. A checkpoint that is loaded counts more.
        stall_timeout_s: seconds that a rank waits for others before it raises, naming unit, ranks and places; at the
            start of a run, the ranks that have not come.
        after_fit: after fit, test or predict the module is ``whole`` again, one copy per host, or stays ``sharded``;
            ``auto``: whole where all hosts have room.
        summary: print the table of units at the start and, at the end of training, that of bytes planned and measured.
        sequence_parallel: ranks that share one sequence, each with a part of its positions (Ulysses): so many adjacent
            ranks have one batch. What rests is sharded over all ranks as always.
    """

    stage: StageConfig = field(default_factory=StageConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    unit: UnitConfig = field(default_factory=UnitConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    prefetch_bytes: int = 256 * MIB
    keep_gathered_bytes: int = 0
    reduce_bucket_bytes: int = 256 * MIB
    activation_checkpointing: Recompute = Recompute.none
    dynamic: bool = False
    init_from: str | None = None
    stall_timeout_s: float = 300.0
    after_fit: AfterFit = AfterFit.auto
    summary: bool = True
    sequence_parallel: int = 1

    def __post_init__(self) -> None:
        self._check_sequence_parallel()
        check_rows(self.stage.name, self.offload.name)
        _positive("zero.prefetch_bytes", self.prefetch_bytes, zero_ok=True)
        _positive("zero.keep_gathered_bytes", self.keep_gathered_bytes, zero_ok=True)
        _positive("zero.reduce_bucket_bytes", self.reduce_bucket_bytes)
        _positive("zero.stall_timeout_s", self.stall_timeout_s)
        if self.keep_gathered_bytes and self.stage.name is not Stage.zero3:
            raise ConfigError(
                "zero.keep_gathered_bytes: expected 0 (parameters are never dropped below stage 3), got "
                f"{self.keep_gathered_bytes} with zero/stage={self.stage.name.name}. Choose zero/stage=zero3 or drop "
                "zero.keep_gathered_bytes."
            )
        if self.dynamic and self.stage.name is not Stage.zero3:
            raise ConfigError(
                "zero.dynamic: expected false (only stage 3 gathers along the path of the model), got true with "
                f"zero/stage={self.stage.name.name}. Choose zero/stage=zero3 or drop zero.dynamic."
            )
        if self.compile.records_cuda_graphs and self.stage.name is Stage.zero3:
            raise ConfigError(
                "zero.compile.mode: expected default or max-autotune-no-cudagraphs at stage 3 (a CUDA graph replays "
                "kernels on fixed addresses, and gathered parameters are somewhere else each time), got "
                f"{self.compile.mode!r}. Change zero.compile.mode, or choose zero/stage=zero2."
            )
        if self.offload.step_in_backward:
            self._check_step_in_backward()

    def _check_sequence_parallel(self) -> None:
        n = self.sequence_parallel
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(
                f"zero.sequence_parallel: expected a whole number > 0, got {n!r}. Change zero.sequence_parallel."
            )
        if n > 1 and self.compile.name is not Compile.none:
            raise ConfigError(
                "zero.sequence_parallel: expected 1 with zero/compile=blocks (attention is found while modules run, "
                f"which graphs hide), got {n}. Choose zero/compile=none, or drop zero.sequence_parallel."
            )

    def _check_step_in_backward(self) -> None:
        if self.dynamic:
            why = "under zero.dynamic no rank knows, before the backward is over, what the others will reduce"
            change = "Drop zero.dynamic"
        elif self.offload.name is Offload.optimizer_nvme and self.stage.name is not Stage.zero3:
            why = (
                f"at zero/stage={self.stage.name.name} the backward reads parameters that would have to be read from "
                "the files once more after it"
            )
            change = "Choose zero/offload=optimizer_cpu or zero/stage=zero3"
        else:
            return
        raise ConfigError(
            f"zero.offload.step_in_backward: expected false ({why}), got true. {change}, or drop "
            "zero.offload.step_in_backward."
        )


def check_rows(stage: Stage, offload: Offload) -> None:
    """Which rows of ``zero/offload`` go with which stages."""
    if offload is not Offload.none and stage is Stage.zero0:
        raise ConfigError(
            f"zero/offload={offload.name}: stage 0 replicates the optimizer, so every rank would step all of it on the "
            "host. Choose zero/stage=zero1, zero2 or zero3, or zero/offload=none."
        )
    moves_params = offload in {Offload.cpu, Offload.nvme, Offload.optimizer_cpu_param_nvme}
    if moves_params and stage is not Stage.zero3:
        raise ConfigError(
            f"zero/offload={offload.name}: parameters can be offloaded at stage 3 only (below it every rank uses all "
            f"of them), got zero/stage={stage.name}. Choose zero/stage=zero3, or zero/offload="
            f"{'optimizer_nvme' if offload is Offload.nvme else 'optimizer_cpu'}."
        )


_GROUPS = {
    "stage": (StageConfig, Stage),
    "precision": (PrecisionConfig, Precision),
    "offload": (OffloadConfig, Offload),
    "checkpoint": (CheckpointConfig, CheckpointFormat),
    "compile": (CompileConfig, Compile),
}


def choose(group: str, name: Any) -> Any:
    """The member of ``zero/<group>`` that ``name`` stands for.

    Raises:
        ConfigError: no such row; the message lists those there are.
    """
    enum = _GROUPS[group][1]
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
    if key == "offload" and isinstance(value, (str, Offload)):
        return offload_row(choose(key, value))
    if key in _GROUPS and not isinstance(value, (dict, _GROUPS[key][0])):
        return _GROUPS[key][0](name=choose(key, value))
    if key == "activation_checkpointing" and isinstance(value, str):
        return _member(Recompute, "zero.activation_checkpointing", value)
    if key == "after_fit" and isinstance(value, str):
        return _member(AfterFit, "zero.after_fit", value)
    classes = {k: c for k, (c, _) in _GROUPS.items()} | {
        "unit": UnitConfig,
        "comm": CommConfig,
        "optimizer": OptimizerConfig,
        "debug": DebugConfig,
    }
    if key in classes and isinstance(value, dict):
        allowed = {f.name for f in fields(classes[key])}
        unknown = sorted(set(value) - allowed)
        if unknown:
            raise ConfigError(f"zero.{key}.{unknown[0]}: no such setting; there are {', '.join(sorted(allowed))}.")
        value = dict(value)
        if key in _GROUPS and "name" in value and value["name"] is not None:
            value["name"] = choose(key, value["name"])
        if key == "comm" and isinstance(value.get("transport"), str):
            value["transport"] = _member(Transport, "zero.comm.transport", value["transport"])
        if key == "comm" and isinstance(value.get("hierarchy"), str):
            value["hierarchy"] = _member(Hierarchy, "zero.comm.hierarchy", value["hierarchy"])
        for name in ("reduce_dtype", "grad_dtype"):
            if isinstance(value.get(name), str):
                value[name] = _member(DType, f"zero.{key}.{name}", value[name])
        return classes[key](**value)
    return value


def _member(enum: type[Enum], key: str, text: str) -> Enum:
    if text not in enum.__members__:
        raise ConfigError(f"{key}: expected one of {', '.join(enum.__members__)}, got {text!r}. Change {key}.")
    return enum[text]


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** power for power, letter in enumerate("KMGTP", 1) for i in ("", "i")
}


def parse_bytes(key: str, value: Any) -> int:
    """``80GB``, ``74.5GiB`` or a plain number of bytes.

    Raises:
        ConfigError: it is nothing of that.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?) *([a-z]*)", str(value).strip(), re.IGNORECASE)
    unit = next((n for name, n in _UNITS.items() if match and name.lower() == match[2].lower()), None)
    if match is None or unit is None or isinstance(value, bool):
        raise ConfigError(
            f"{key}: expected a size such as 80GB, 80GiB or a number of bytes, got {value!r}. Change {key}."
        )
    return int(float(match[1]) * unit)
