"""Every setting of lightning_zero: Hydra schema, Python API and documentation.

::

    groups      the dataclasses of zero/*: schema and reference
    settings    ZeroConfig: all groups, the arguments of ZeroStrategy
    names       enums of allowed values, and ConfigError
    values      types of settings, and sizes such as 80GB
    rows        makes settings from keywords, row names and other settings
"""

from lightning_zero.config.groups import (
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    UnitConfig,
    check_grad_comm_dtype,
    check_rounding,
    check_state_dtype,
)
from lightning_zero.config.names import (
    CheckpointFormat,
    Compile,
    ConfigError,
    DType,
    GradCommDtype,
    HybridShard,
    Offload,
    Precision,
    Recompute,
    Sharding,
    Stage,
    StateDtype,
    Transport,
    choose,
    nearest,
)
from lightning_zero.config.rows import (
    allowed_rows,
    candidate_rows,
    check_decided,
    for_layout,
    is_decided,
    make_config,
    with_rows,
)
from lightning_zero.config.settings import (
    ZeroConfig,
    check_accumulation,
    check_hybrid_shard,
    check_prefetch,
    check_rows,
)
from lightning_zero.config.values import MIB, parse_bytes

__all__ = [
    "CheckpointConfig",
    "CheckpointFormat",
    "CommConfig",
    "Compile",
    "CompileConfig",
    "ConfigError",
    "DType",
    "GradCommDtype",
    "HybridShard",
    "MIB",
    "Offload",
    "OffloadConfig",
    "OptimizerConfig",
    "Precision",
    "PrecisionConfig",
    "Recompute",
    "Sharding",
    "Stage",
    "StateDtype",
    "Transport",
    "UnitConfig",
    "ZeroConfig",
    "allowed_rows",
    "candidate_rows",
    "check_accumulation",
    "check_decided",
    "check_grad_comm_dtype",
    "check_hybrid_shard",
    "check_prefetch",
    "check_rounding",
    "check_state_dtype",
    "check_rows",
    "choose",
    "for_layout",
    "is_decided",
    "make_config",
    "nearest",
    "parse_bytes",
    "with_rows",
]
