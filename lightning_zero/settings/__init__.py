"""Every setting of lightning_zero: Hydra schema, Python API and documentation.

::

    groups       the dataclasses of the groups zero/*, with the meaning of each setting
    zero_config  ZeroConfig: all groups together; made from keywords and names; settings written as Python arguments
    names        ConfigError, enums of allowed values, and functions for types of settings and sizes such as 80GB
    keywords     types of the keywords that Python callers pass; made by docs/made.py
"""

from lightning_zero.settings import keywords as keywords
from lightning_zero.settings.groups import CheckpointConfig as CheckpointConfig
from lightning_zero.settings.groups import CompileConfig as CompileConfig
from lightning_zero.settings.groups import OffloadConfig as OffloadConfig
from lightning_zero.settings.groups import OptimizerConfig as OptimizerConfig
from lightning_zero.settings.groups import PrecisionConfig as PrecisionConfig
from lightning_zero.settings.groups import UnitConfig as UnitConfig
from lightning_zero.settings.groups import check_rounding as check_rounding
from lightning_zero.settings.groups import check_state_dtype as check_state_dtype
from lightning_zero.settings.names import MIB as MIB
from lightning_zero.settings.names import CheckpointFormat as CheckpointFormat
from lightning_zero.settings.names import Compile as Compile
from lightning_zero.settings.names import ConfigError as ConfigError
from lightning_zero.settings.names import DType as DType
from lightning_zero.settings.names import Float8 as Float8
from lightning_zero.settings.names import HybridShard as HybridShard
from lightning_zero.settings.names import LossMean as LossMean
from lightning_zero.settings.names import Offload as Offload
from lightning_zero.settings.names import Precision as Precision
from lightning_zero.settings.names import Recompute as Recompute
from lightning_zero.settings.names import Sharding as Sharding
from lightning_zero.settings.names import Stage as Stage
from lightning_zero.settings.names import StateDtype as StateDtype
from lightning_zero.settings.names import TensorStyle as TensorStyle
from lightning_zero.settings.names import Uneven as Uneven
from lightning_zero.settings.names import change as change
from lightning_zero.settings.names import check_installed as check_installed
from lightning_zero.settings.names import check_whole_number as check_whole_number
from lightning_zero.settings.names import choose as choose
from lightning_zero.settings.names import make_folder as make_folder
from lightning_zero.settings.names import nearest as nearest
from lightning_zero.settings.names import parse_bytes as parse_bytes
from lightning_zero.settings.zero_config import Signature as Signature
from lightning_zero.settings.zero_config import ZeroConfig as ZeroConfig
from lightning_zero.settings.zero_config import allowed_rows as allowed_rows
from lightning_zero.settings.zero_config import candidate_rows as candidate_rows
from lightning_zero.settings.zero_config import check_decided as check_decided
from lightning_zero.settings.zero_config import check_hybrid_shard as check_hybrid_shard
from lightning_zero.settings.zero_config import check_prefetch as check_prefetch
from lightning_zero.settings.zero_config import check_rows as check_rows
from lightning_zero.settings.zero_config import for_layout as for_layout
from lightning_zero.settings.zero_config import is_decided as is_decided
from lightning_zero.settings.zero_config import make_config as make_config
from lightning_zero.settings.zero_config import names_arguments as names_arguments
from lightning_zero.settings.zero_config import with_rows as with_rows
