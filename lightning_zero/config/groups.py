"""The groups of settings: the schema of ``zero/*``. Each checks its own values, so that a bad one is refused before any
process starts, with the key to change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_zero.config.names import (
    CheckpointFormat,
    Compile,
    ConfigError,
    DType,
    GradCommDtype,
    HybridShard,
    Offload,
    Precision,
    Sharding,
    Stage,
    StateDtype,
    Transport,
    nearest,
)
from lightning_zero.config.values import MIB, NBytes, check_types, positive


@dataclass(kw_only=True, slots=True)
class StageConfig:
    """Group ``zero/stage``: which roles are sharded over the ranks.

    Attributes:
        name: ``zero0`` replicates everything (as DDP does); ``zero1`` shards optimizer state and master
            weights; ``zero2`` gradients too; ``zero3`` parameters too. ``auto`` is for the strategy: it takes the
            fastest row that fits, of this group and, under ``zero/offload=auto``, of that one too.
    """

    name: Stage = Stage.zero3

    def __post_init__(self) -> None:
        check_types("zero.stage", self)


def check_rounding(stochastic: bool, precision: Precision) -> None:
    """Only weights that rest in bf16 are rounded at a step."""
    if stochastic and precision is not Precision.bf16_true:
        raise ConfigError(
            "zero.precision.stochastic_rounding: expected false (masters are fp32 and not rounded), got true with "
            f"zero/precision={precision.name}. Choose zero/precision=bf16_true or drop "
            "zero.precision.stochastic_rounding."
        )


def check_state_dtype(state: StateDtype, precision: Precision) -> None:
    """State in bf16 is narrower than that beside masters of four bytes."""
    if state is StateDtype.bf16 and precision in (Precision.bf16_true, Precision.fp16_true):
        raise ConfigError(
            f"zero.optimizer.state_dtype: expected fp32 (the dtype of the masters) or int8 with zero/precision="
            f"{precision.name}, where state is of two bytes already, got bf16. Drop zero.optimizer.state_dtype, or "
            "choose zero/precision=bf16."
        )


def check_grad_comm_dtype(wire: GradCommDtype, precision: Precision, reduce_dtype: DType | None) -> None:
    """Gradients travel in bf16, and are summed in fp32, where they are made in bf16 to be summed in fp32."""
    if wire is not GradCommDtype.bf16:
        return
    mixed = precision is Precision.bf16 or (precision is Precision.bf16_true and reduce_dtype is DType.fp32)
    if mixed and reduce_dtype is not DType.bf16:
        return
    if precision in (Precision.bf16, Precision.bf16_true):
        given = reduce_dtype.name if reduce_dtype is not None else "bf16, that of the weights"
        raise ConfigError(
            f"zero.comm.grad_comm_dtype: expected auto or full with zero.precision.reduce_dtype={given} (gradients "
            "travel in "
            "bf16 then, and are summed in it), got bf16. Choose zero.precision.reduce_dtype=fp32, or drop "
            "zero.comm.grad_comm_dtype."
        )
    raise ConfigError(
        f"zero.comm.grad_comm_dtype: expected auto or full with zero/precision={precision.name} (gradients are not "
        "made in "
        "bf16, and would lose digits), got bf16. Choose zero/precision=bf16, or drop zero.comm.grad_comm_dtype."
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
        check_types("zero.precision", self)
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
        host_budget: bytes of host memory that one rank may hold at rest; what the machine has available is then not
            looked at. ``None``: that is the bound.
        nvme_budget: bytes of files that one rank may hold. ``None``: what the disk has free.
        threads: CPU threads of a rank's offloaded step. ``None``: the cores that it may use over the ranks that share
            them, less one for transfers where there are more than two.
    """

    name: Offload = Offload.none
    nvme_path: str | None = None
    device_budget: NBytes | None = None
    host_budget: NBytes | None = None
    nvme_budget: NBytes | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_types("zero.offload", self)
        for key in ("device_budget", "host_budget", "nvme_budget", "threads"):
            value = getattr(self, key)
            if value is not None:
                positive(f"zero.offload.{key}", value, zero_ok=key == "device_budget")
        uses_nvme = "nvme" in self.name.name or self.name is Offload.auto
        if uses_nvme and not self.nvme_path and self.name is not Offload.auto:
            raise ConfigError(
                f"zero.offload.nvme_path: expected a folder on a local disk for zero/offload={self.name.name}, got "
                "none. Set zero.offload.nvme_path=/path, or LIGHTNING_ZERO_NVME_PATH=/path for a preset string."
            )
        ignored = [k for k in without_effect(self.name) if getattr(self, k) is not None]
        if ignored:
            raise ConfigError(
                f"zero.offload.{ignored[0]} has no effect with zero/offload={self.name.name}. Drop it, or choose a row "
                "of zero/offload that uses it."
            )


def without_effect(row: Offload) -> list[str]:
    """The settings of :class:`OffloadConfig` that have no effect with a row of ``zero/offload``."""
    found = []
    if "nvme" not in row.name and row is not Offload.auto:
        found += ["nvme_path", "nvme_budget"]
    if row is not Offload.auto:
        found.append("device_budget")
    if row is Offload.none:
        found += ["host_budget", "threads"]
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
        whole_batch: class names; under ``zero.vertical_chunks`` units of these classes, or with such a module inside,
            run on the whole batch.
    """

    classes: list[str] = field(default_factory=list)
    min_bytes: NBytes = 0
    max_bytes: NBytes = 4096 * MIB
    whole_batch: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_types("zero.unit", self)
        positive("zero.unit.min_bytes", self.min_bytes, zero_ok=True)
        positive("zero.unit.max_bytes", self.max_bytes)
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
        hybrid_shard: ``flat`` shards over all ranks; ``node`` over those of each node, with a replica on every node
            (hybrid sharding): gathers stay within nodes, which hold more. ``node_backward`` shards over all ranks, and
            a unit keeps a shard of its node from its forward to the end of the backward, whose gathers stay within
            nodes. ``auto`` takes ``node`` where there are several nodes with as many ranks each, and what rests fits
            into half of the memory; else ``flat``.
        grad_comm_dtype: what gradients travel in where autograd makes them in bf16 and they are summed in fp32.
            ``auto``: in bf16 wherever that loses no bit, which gives the sums of ``full``; ``full``: in fp32; ``bf16``:
            as ``auto``, and an error where they would have to travel in fp32. See ``docs/communication.md``.
        even_alone: gather and reduce over a group of one rank as over many, so that a transport can be tried on one
            GPU. It is slower, and trains the same.
    """

    transport: Transport = Transport.auto
    hybrid_shard: HybridShard = HybridShard.auto
    grad_comm_dtype: GradCommDtype = GradCommDtype.auto
    even_alone: bool = False

    def __post_init__(self) -> None:
        check_types("zero.comm", self)
        if self.grad_comm_dtype is GradCommDtype.bf16 and self.transport is Transport.plain:
            raise ConfigError(
                "zero.comm.grad_comm_dtype: expected auto or full with zero.comm.transport=plain (the library adds in "
                "the "
                "dtype in which it sends), got bf16. Choose zero.comm.transport=auto or direct, or drop "
                "zero.comm.grad_comm_dtype."
            )


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Group ``zero/checkpoint``: the form in which checkpoints are saved. Both are loaded at any setting.

    Attributes:
        name: ``full``: one ordinary file, which all ranks write, each its own ranges. ``sharded``: a folder in the
            format of PyTorch's distributed checkpoints, which all ranks must see: each writes a file of its shards.
        exclude_frozen: leave frozen parameters out (adapters); a run that goes on keeps those it has.
        verify: compare a checkpoint with its checksums before it is loaded. ``None``: where a job that was started
            again goes on from it.
        background: training goes on while a folder is written. What changes meanwhile is copied to host memory first.
    """

    name: CheckpointFormat = CheckpointFormat.full
    exclude_frozen: bool = False
    verify: bool | None = None
    background: bool = False

    def __post_init__(self) -> None:
        check_types("zero.checkpoint", self)
        if self.background and self.name is CheckpointFormat.full:
            raise ConfigError(
                "zero.checkpoint.background: expected false with zero/checkpoint=full (one file is written while "
                "training waits), got true. Choose zero/checkpoint=sharded, or drop zero.checkpoint.background."
            )


COMPILE_ARGUMENTS = ("backend", "mode", "dynamic", "options")
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """Group ``zero/compile``: what ``torch.compile`` is applied to.

    Attributes:
        name: ``blocks`` compiles the forward of every unit but the root, one graph for all blocks of a class. Modules
            that the user has compiled stay as they are, under ``none`` too.
        arguments: of ``torch.compile``: ``backend``, ``mode``, ``dynamic``, ``options``. Without a backend it is
            ``inductor``, which needs a C++ compiler on every node. Stage 3 refuses modes that record CUDA graphs.
    """

    name: Compile = Compile.none
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types("zero.compile", self)
        for key in self.arguments:
            if key not in COMPILE_ARGUMENTS:
                close = nearest(key, COMPILE_ARGUMENTS)
                raise ConfigError(
                    f"zero.compile.arguments.{key}: torch.compile takes {', '.join(COMPILE_ARGUMENTS)} here."
                    f"{f' Did you mean {close}?' if close else ''}"
                )
        if self.name is Compile.none and self.arguments:
            raise ConfigError(
                "zero.compile.arguments has no effect with zero/compile=none. Drop it, or choose zero/compile=blocks."
            )

    @property
    def records_cuda_graphs(self) -> bool:
        options = self.arguments.get("options") or {}
        return self.arguments.get("mode") in WITH_CUDA_GRAPHS or bool(options.get("triton.cudagraphs"))


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Settings of the sharded optimizer step.

    Attributes:
        sharding: what a rank steps: ``slices`` of parameters, or whole ``tensors``, each on one rank. ``auto``: slices
            by optimizers that are known to be element-wise, tensors by all others. ``slices`` declares the others
            element-wise too: each element is computed from its own value, gradient and state alone.
        state_dtype: what the moments of torch's optimizers rest in: ``fp32`` (the dtype of the masters), ``bf16``, or
            ``int8`` (8-bit codes, and an exponent for each 256 elements). Steps are computed in fp32.
    """

    sharding: Sharding = Sharding.auto
    state_dtype: StateDtype = StateDtype.fp32

    def __post_init__(self) -> None:
        check_types("zero.optimizer", self)


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    """What a run tells of itself.

    Attributes:
        timeline: a folder for a timeline of some steps: a trace for Perfetto, a page, and a PNG where matplotlib is
            installed.
        timeline_steps: two numbers: steps of the optimizer before those that are recorded, and how many these are.
    """

    timeline: str | None = None
    timeline_steps: list[int] = field(default_factory=lambda: [5, 2])

    def __post_init__(self) -> None:
        check_types("zero.debug", self)
        if len(self.timeline_steps) != 2 or min(self.timeline_steps) < 1:
            raise ConfigError(
                "zero.debug.timeline_steps: expected two numbers > 0 (steps before, steps recorded), got "
                f"{self.timeline_steps}. Change zero.debug.timeline_steps."
            )
