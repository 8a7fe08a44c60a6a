"""Every setting of lightning_zero: Hydra schema, Python API and documentation.

::

    groups      the dataclasses of the groups zero/*, with what each setting means
    settings    ZeroConfig: all groups together, the arguments of ZeroStrategy
    names       enums of allowed values, and ConfigError
    values      types of settings, and sizes such as 80GB
    rows        makes settings from keywords, names such as zero3, and other settings
"""

from lightning_zero.config.groups import CheckpointConfig as CheckpointConfig
from lightning_zero.config.groups import CompileConfig as CompileConfig
from lightning_zero.config.groups import OffloadConfig as OffloadConfig
from lightning_zero.config.groups import OptimizerConfig as OptimizerConfig
from lightning_zero.config.groups import PrecisionConfig as PrecisionConfig
from lightning_zero.config.groups import UnitConfig as UnitConfig
from lightning_zero.config.groups import check_rounding as check_rounding
from lightning_zero.config.groups import check_state_dtype as check_state_dtype
from lightning_zero.config.names import CheckpointFormat as CheckpointFormat
from lightning_zero.config.names import Compile as Compile
from lightning_zero.config.names import ConfigError as ConfigError
from lightning_zero.config.names import DType as DType
from lightning_zero.config.names import Float8 as Float8
from lightning_zero.config.names import HybridShard as HybridShard
from lightning_zero.config.names import LossMean as LossMean
from lightning_zero.config.names import Offload as Offload
from lightning_zero.config.names import Precision as Precision
from lightning_zero.config.names import Recompute as Recompute
from lightning_zero.config.names import Sharding as Sharding
from lightning_zero.config.names import Stage as Stage
from lightning_zero.config.names import StateDtype as StateDtype
from lightning_zero.config.names import TensorStyle as TensorStyle
from lightning_zero.config.names import choose as choose
from lightning_zero.config.names import nearest as nearest
from lightning_zero.config.rows import allowed_rows as allowed_rows
from lightning_zero.config.rows import candidate_rows as candidate_rows
from lightning_zero.config.rows import check_decided as check_decided
from lightning_zero.config.rows import for_layout as for_layout
from lightning_zero.config.rows import is_decided as is_decided
from lightning_zero.config.rows import make_config as make_config
from lightning_zero.config.rows import with_rows as with_rows
from lightning_zero.config.settings import ZeroConfig as ZeroConfig
from lightning_zero.config.settings import check_hybrid_shard as check_hybrid_shard
from lightning_zero.config.settings import check_prefetch as check_prefetch
from lightning_zero.config.settings import check_rows as check_rows
from lightning_zero.config.values import MIB as MIB
from lightning_zero.config.values import make_folder as make_folder
from lightning_zero.config.values import parse_bytes as parse_bytes
