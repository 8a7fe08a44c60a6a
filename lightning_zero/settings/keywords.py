"""The types of the keywords of ZeroStrategy, made from the dataclasses by ``python docs/made.py``."""

# fmt: off
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from lightning_zero.settings import groups, zero_config


class StageSettings(TypedDict, total=False):
    name: Literal["zero0", "zero1", "zero2", "zero3", "auto", 0, 1, 2, 3]


class PrecisionSettings(TypedDict, total=False):
    name: (
        Literal["fp32", "bf16", "fp16", "bf16_true", "fp16_true", "fp64", "32-true", "bf16-mixed", "16-mixed",
        "bf16-true", "16-true", "64-true", 16, 32, 64]
    )
    reduce_dtype: Literal["fp32", "bf16"] | None
    grad_dtype: Literal["fp32", "bf16"] | None
    fp32_modules: Sequence[str]
    stochastic_rounding: bool
    float8: Literal["none", "tensorwise", "rowwise"]
    float8_exclude: Sequence[str]


class OffloadSettings(TypedDict, total=False):
    name: Literal["none", "optimizer_cpu", "cpu", "optimizer_nvme", "optimizer_cpu_param_nvme", "nvme", "auto"]
    nvme_path: str | Path | None
    device_budget: int | str | None
    host_budget: int | str | None
    nvme_budget: int | str | None


class UnitSettings(TypedDict, total=False):
    classes: Sequence[str]
    max_bytes: int | str


class OptimizerSettings(TypedDict, total=False):
    sharding: Literal["auto", "slices", "tensors"]
    state_dtype: Literal["fp32", "bf16"]
    skip_nonfinite: int | None


class CheckpointSettings(TypedDict, total=False):
    name: Literal["full", "sharded"]
    exclude_frozen: bool
    verify: bool | None
    background: bool


class CompileSettings(TypedDict, total=False):
    name: Literal["none", "blocks"]
    arguments: Mapping[str, Any]


Stage = Literal["zero0", "zero1", "zero2", "zero3", "auto", 0, 1, 2, 3] | StageSettings | groups.StageConfig | None


Precision = (
        Literal["fp32", "bf16", "fp16", "bf16_true", "fp16_true", "fp64", "float8", "32-true", "bf16-mixed",
        "16-mixed", "bf16-true", "16-true", "64-true", 16, 32, 64] | PrecisionSettings | groups.PrecisionConfig
        | None
    )


class FabricKeywords(TypedDict, total=False):
    offload: (
        Literal["none", "optimizer_cpu", "cpu", "optimizer_nvme", "optimizer_cpu_param_nvme", "nvme", "auto"] |
        OffloadSettings | groups.OffloadConfig | None
    )
    unit: UnitSettings | groups.UnitConfig | None
    optimizer: OptimizerSettings | groups.OptimizerConfig | None
    checkpoint: Literal["full", "sharded"] | CheckpointSettings | groups.CheckpointConfig | None
    compile: Literal["none", "blocks"] | CompileSettings | groups.CompileConfig | None
    prefetch_bytes: int | str
    keep_gathered_bytes: int | str
    reduce_bucket_bytes: int | str
    activation_checkpointing: Literal["none", "blocks", "offload"]
    hybrid_shard: Literal["auto", "flat", "node", "node_backward"]
    dynamic_graph: bool
    init_from: str | Path | None
    stall_timeout_s: float
    gather_after_fit: bool | None
    timeline: str | Path | None
    sequence_parallel: int
    tensor_parallel: int
    expert_parallel: int
    tensor_plan: (
        Mapping[str, Literal["colwise", "rowwise", "colwise_gather_output", "embedding_rowwise",
        "replicated_with_grad_allreduce"]]
    )
    loss: Literal["batches", "tokens"]
    uneven: Literal["end", "join"]
    fingerprint: int | None


class Keywords(FabricKeywords, total=False):
    precision: Precision


_DOCUMENTED: list[tuple[Any, Any]] = [
    (StageSettings, groups.StageConfig),
    (PrecisionSettings, groups.PrecisionConfig),
    (OffloadSettings, groups.OffloadConfig),
    (UnitSettings, groups.UnitConfig),
    (OptimizerSettings, groups.OptimizerConfig),
    (CheckpointSettings, groups.CheckpointConfig),
    (CompileSettings, groups.CompileConfig),
    (FabricKeywords, zero_config.ZeroConfig),
    (Keywords, zero_config.ZeroConfig),
]
for _made, _config in _DOCUMENTED:
    _made.__doc__ = _config.__doc__
