"""The dataclasses of the setting groups ``zero/*``. Each checks its own values, before any process starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_zero.settings.names import (
    MIB,
    CheckpointFormat,
    Compile,
    ConfigError,
    DType,
    Float8,
    NBytes,
    Offload,
    Precision,
    Sharding,
    Stage,
    StateDtype,
    change,
    check_types,
    positive,
)


@dataclass(kw_only=True, slots=True)
class StageConfig:
    """Group ``zero/stage``: what is sharded over the ranks.

    Attributes:
        name: ``zero0`` replicates everything (like DDP); ``zero1`` shards optimizer state and master weights; ``zero2``
            gradients too; ``zero3`` parameters too. ``auto`` selects the fastest stage that fits into memory and, with
            ``zero/offload=auto``, the offload too.
    """

    name: Stage = Stage.zero3

    def __post_init__(self) -> None:
        check_types("zero.stage", self)


def check_rounding(stochastic: bool, precision: Precision) -> None:
    """Raise ConfigError for stochastic rounding without bf16 masters, because steps round bf16 masters only."""
    if stochastic and precision is not Precision.bf16_true:
        raise ConfigError(
            "zero.precision.stochastic_rounding: expected false (masters are fp32 and not rounded), got true with "
            f"zero/precision={precision.name}. Choose zero/precision=bf16_true or drop "
            "zero.precision.stochastic_rounding."
        )


def check_state_dtype(state: StateDtype, precision: Precision) -> None:
    """Raise ConfigError for bf16 optimizer state with two-byte masters, whose state has two bytes in any case."""
    if state is StateDtype.bf16 and precision in (Precision.bf16_true, Precision.fp16_true):
        raise ConfigError(
            "zero.optimizer.state_dtype: expected fp32 (the dtype of the masters) with "
            f"zero/precision={precision.name}, where state has two bytes per element already, got bf16. Drop "
            "zero.optimizer.state_dtype, or choose zero/precision=bf16."
        )


PLAIN_LAYERS = ["*head", "*output"]


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    """Group ``zero/precision``: the dtypes of parameters, gradients and optimizer state.

    Attributes:
        name: ``fp32`` (Lightning's ``32-true``), ``bf16`` (``bf16-mixed``: fp32 masters, parameters gathered and used
            in bf16 under autocast), ``fp16`` (``16-mixed``: the same in fp16, with loss scaling) or ``bf16_true``,
            ``fp16_true``, ``fp64`` (one dtype everywhere, buffers too). ``None`` follows ``Trainer(precision=)``; a
            name here replaces ``32-true``, the Trainer's default.
        reduce_dtype: dtype in which ranks sum gradients. ``None``: fp32, or the only dtype of ``*_true``, ``fp64``.
        grad_dtype: dtype of stored and accumulated gradients. ``None``: as for ``reduce_dtype``.
        fp32_modules: module classes (``*`` matches anything) whose parameters stay in fp32 under ``bf16`` and ``fp16``;
            ``teacher.*``: all parameters in the module ``teacher``. Parameters from which parametrizations compute
            weights stay in fp32 too. Every rank holds all of a chosen module that has only vectors, as norms do.
        stochastic_rounding: under ``bf16_true``, step in fp32 and round weights and state to bf16 up or down at random,
            so that they are right on average; rounding to nearest would lose changes below 1/512 of a weight.
        float8: whether layers of ``nn.Linear`` cast inputs, weights and gradients to float8, by torchao, with a scale
            for each tensor (``tensorwise``) or row (``rowwise``). CPUs emulate it.
        float8_exclude: names of layers that are not converted (``*`` matches anything). With float8, layers whose sizes
            are not divisible by 16, and on a GPU those that torchao finds too small to gain, are not converted either.
    """

    name: Precision | None = None
    reduce_dtype: DType | None = None
    grad_dtype: DType | None = None
    fp32_modules: list[str] = field(
        default_factory=lambda: ["LayerNorm", "GroupNorm", "BatchNorm?d", "*Norm", "Bilinear"]
    )
    stochastic_rounding: bool = False
    float8: Float8 = Float8.none
    float8_exclude: list[str] = field(default_factory=PLAIN_LAYERS.copy)

    def __post_init__(self) -> None:
        check_types("zero.precision", self)
        if self.float8 is not Float8.none and self.name in (Precision.fp16, Precision.fp16_true, Precision.fp64):
            raise ConfigError(
                f"zero.precision.float8: expected none under zero/precision={self.name.name}, got {self.float8.name}. "
                "Choose zero/precision=float8, which combines bf16 and float8."
            )
        if self.float8 is Float8.none and self.float8_exclude != PLAIN_LAYERS:
            raise ConfigError(
                f"zero.precision.float8_exclude: expected its default with zero.precision.float8=none, got "
                f"{self.float8_exclude}. Choose zero/precision=float8, or drop zero.precision.float8_exclude."
            )
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
        if self.name is Precision.bf16_true and self.grad_dtype is DType.fp32:
            raise ConfigError(
                "zero.precision.grad_dtype: expected bf16 under zero/precision=bf16_true (the optimizer steps bf16 "
                "weights with bf16 gradients), got fp32. Choose zero/precision=bf16 for fp32 masters."
            )


@dataclass(kw_only=True, slots=True)
class OffloadConfig:
    """Group ``zero/offload``: what is kept on the device, in host memory and in files.

    Attributes:
        name: ``optimizer_cpu`` keeps optimizer state and master weights in host memory, ``optimizer_nvme`` in files.
            ``cpu`` and ``nvme`` (stage 3) keep parameters there too; ``optimizer_cpu_param_nvme`` (stage 3) keeps them
            in files, the rest in host memory. ``none`` offloads nothing. ``auto`` splits all but parameters by budget.
        nvme_path: folder for the files; can contain ``$LOCAL_RANK``, ``$RANK`` and other variables of each node.
            Presets take it from ``LIGHTNING_ZERO_NVME_PATH``.
        device_budget: bytes of optimizer state, master weights and gradients on a rank's device under ``auto``.
            ``None``: 0 on a CPU, half of the free memory on a GPU.
        host_budget: bytes that one rank may keep in host memory between steps. ``None``: the available memory; under
            ``auto``, this rank's share of 90 % of it.
        nvme_budget: bytes of files that one rank may write. ``None``: the disk's free bytes.
    """

    name: Offload = Offload.none
    nvme_path: str | None = None
    device_budget: NBytes | None = None
    host_budget: NBytes | None = None
    nvme_budget: NBytes | None = None

    def __post_init__(self) -> None:
        check_types("zero.offload", self)
        for key in ("device_budget", "host_budget", "nvme_budget"):
            value = getattr(self, key)
            if value is not None:
                positive(f"zero.offload.{key}", value, zero_ok=key == "device_budget")
        if self.name.uses_files and not self.nvme_path:
            raise ConfigError(
                f"zero.offload.nvme_path: expected a folder on a local disk for zero/offload={self.name.name}, got "
                "none. Set zero.offload.nvme_path=/path, or LIGHTNING_ZERO_NVME_PATH=/path for a preset string."
            )
        ignored = [k for k in without_effect(self.name) if getattr(self, k) is not None]
        if ignored:
            raise ConfigError(
                f"zero.offload.{ignored[0]} has no effect with zero/offload={self.name.name}. Drop this setting, or "
                "choose a zero/offload that uses it."
            )


def without_effect(offload: Offload) -> list[str]:
    """List the settings of :class:`OffloadConfig` that have no effect with ``offload``."""
    if offload is Offload.auto:
        return []
    found = ["device_budget"] if offload.uses_files else ["device_budget", "nvme_path", "nvme_budget"]
    # With ``optimizer_nvme`` and ``nvme`` only gradients are on the host.
    return found + ["host_budget"] * (offload in (Offload.none, Offload.optimizer_nvme, Offload.nvme))


@dataclass(kw_only=True, slots=True)
class UnitConfig:
    """Which modules are units. The parameters of a unit are gathered and freed together.

    Attributes:
        classes: class names of modules that become units. Empty: ``_no_split_modules`` of Hugging Face models, or
            repeated blocks in ModuleList and Sequential; if these hold less than half of a model above 1 MiB, the rest
            is divided into modules of at most an eighth of the model. The model's own class makes it a single unit.
        max_bytes: larger units that ``classes`` does not name are divided into their children if possible.
    """

    classes: list[str] = field(default_factory=list)
    max_bytes: NBytes = 4096 * MIB

    def __post_init__(self) -> None:
        check_types("zero.unit", self)
        positive("zero.unit.max_bytes", self.max_bytes)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Group ``zero/checkpoint``: the form of saved checkpoints. Both forms load at any setting.

    Attributes:
        name: ``full``: one ordinary file, written by all ranks. ``sharded``: a folder in the format of PyTorch's
            distributed checkpoints, one file per rank; all ranks must see it.
        exclude_frozen: leave out frozen parameters (the base of adapters); a resumed run keeps those it has.
        verify: compare a checkpoint with its checksums before it is loaded. ``None``: only if a restarted job resumes.
        background: continue training while a folder is written. Values that training changes are copied to host memory.
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
        name: ``blocks`` compiles the forward of every block, one graph per class. Modules that the user has compiled
            stay compiled, under ``none`` too.
        arguments: arguments of ``torch.compile``: ``backend``, ``mode``, ``dynamic``, ``options``. The default backend
            ``inductor`` needs a C++ compiler on every node. Stage 3 refuses modes that record CUDA graphs.
    """

    name: Compile = Compile.none
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types("zero.compile", self)
        for key in self.arguments:
            if key not in COMPILE_ARGUMENTS:
                raise ConfigError(
                    f"zero.compile.arguments.{key}: expected one of {', '.join(COMPILE_ARGUMENTS)}, got {key}. "
                    f"{change('zero.compile.arguments.', key, COMPILE_ARGUMENTS)}"
                )
        if self.name is Compile.none and self.arguments:
            raise ConfigError(
                "zero.compile.arguments has no effect with zero/compile=none. Drop the arguments, or choose "
                "zero/compile=blocks."
            )

    @property
    def records_cuda_graphs(self) -> bool:
        options = self.arguments.get("options") or {}
        return self.arguments.get("mode") in WITH_CUDA_GRAPHS or bool(options.get("triton.cudagraphs"))


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Settings of the sharded optimizer step.

    Attributes:
        sharding: whether ranks update ``slices`` of each parameter, or whole ``tensors``, each on one rank. ``auto``:
            slices for optimizers known to be element-wise, tensors for others. With ``slices`` any other optimizer is
            assumed to be element-wise: each element needs only its own value, gradient and state.
        state_dtype: dtype of the stored moments of torch's optimizers: ``fp32`` (the dtype of the masters), or
            ``bf16``. Steps are computed in fp32.
        skip_nonfinite: skip a step on all ranks if a gradient is inf or NaN, as fp16 always does, and raise an error
            after this number of skipped steps in a row. ``null``: step with such gradients.
    """

    sharding: Sharding = Sharding.auto
    state_dtype: StateDtype = StateDtype.fp32
    skip_nonfinite: int | None = None

    def __post_init__(self) -> None:
        check_types("zero.optimizer", self)
        if self.skip_nonfinite is not None:
            positive("zero.optimizer.skip_nonfinite", self.skip_nonfinite)
