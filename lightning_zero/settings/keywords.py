"""The types of the keywords of ZeroStrategy, made from the dataclasses by ``python docs/made.py``."""

# fmt: off
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from lightning_zero.settings import groups, zero_config


class StageSettings(TypedDict, total=False):
    name: Literal["zero0", "zero1", "zero2", "zero3", "auto", 0, 1, 2, 3]


StageSettings.__doc__ = groups.StageConfig.__doc__


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


PrecisionSettings.__doc__ = groups.PrecisionConfig.__doc__


class OffloadSettings(TypedDict, total=False):
    name: Literal["none", "optimizer_cpu", "cpu", "optimizer_nvme", "optimizer_cpu_param_nvme", "nvme", "auto"]
    nvme_path: str | Path | None
    device_budget: int | str | None
    host_budget: int | str | None
    nvme_budget: int | str | None


OffloadSettings.__doc__ = groups.OffloadConfig.__doc__


class UnitSettings(TypedDict, total=False):
    classes: Sequence[str]
    max_bytes: int | str


UnitSettings.__doc__ = groups.UnitConfig.__doc__


class OptimizerSettings(TypedDict, total=False):
    sharding: Literal["auto", "slices", "tensors"]
    state_dtype: Literal["fp32", "bf16"]
    skip_nonfinite: int | None


OptimizerSettings.__doc__ = groups.OptimizerConfig.__doc__


class CheckpointSettings(TypedDict, total=False):
    name: Literal["full", "sharded"]
    exclude_frozen: bool
    verify: bool | None
    background: bool


CheckpointSettings.__doc__ = groups.CheckpointConfig.__doc__


class CompileSettings(TypedDict, total=False):
    name: Literal["none", "blocks"]
    arguments: Mapping[str, Any]


CompileSettings.__doc__ = groups.CompileConfig.__doc__


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


FabricKeywords.__doc__ = zero_config.ZeroConfig.__doc__


class Keywords(FabricKeywords, total=False):
    precision: Precision



Keywords.__doc__ = zero_config.ZeroConfig.__doc__
