"""Import from Lightning everything that the strategies use.

Lightning is published as ``lightning``, and as ``pytorch_lightning`` with ``lightning_fabric``; their classes differ. A
process uses the variant whose Trainer or Fabric was the first to request a preset. If this module is imported before
any request, it uses the variant that is already imported. If both or neither are imported, it prefers ``lightning``.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from fsspec.utils import get_protocol  # type: ignore[import-untyped]

from lightning_zero.presets import ASKED
from lightning_zero.settings import ConfigError

_NAMES = ("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")
_first, _second = (any(name in sys.modules for name in names) for names in _NAMES)
_takes_second = importlib.util.find_spec("lightning") is None or (_second and not _first)
if ASKED:
    _takes_second = ASKED[0] in _NAMES[1]

if TYPE_CHECKING or not _takes_second:
    import lightning.fabric as fabric
    import lightning.pytorch as pl
else:
    import lightning_fabric as fabric
    import pytorch_lightning as pl


if not hasattr(pl.callbacks, "WeightAveraging"):
    raise ImportError(
        f"lightning_zero: expected {pl.__name__} 2.6 or later, got {pl.__version__}. Install a later version."
    )


def check_package(name: str) -> None:
    """Raise ConfigError unless ``name``, the package of the user's Trainer or Fabric, is one that this module uses."""
    if name not in (pl.__name__, fabric.__name__):
        raise ConfigError(
            f"strategy: expected a Trainer or Fabric of {pl.__name__} and {fabric.__name__}, which lightning_zero uses "
            f"in this process, got one of {name}. Import only one of the two packages in a process. If another library "
            "imports the other one, create Trainer(strategy='zero3') before you import names from lightning_zero."
        )


Accelerator = fabric.accelerators.Accelerator
CheckpointIO = fabric.plugins.CheckpointIO
TorchCheckpointIO = fabric.plugins.TorchCheckpointIO
AsyncCheckpointIO = pl.plugins.AsyncCheckpointIO

ClusterEnvironment = fabric.plugins.ClusterEnvironment
LightningEnvironment = fabric.plugins.environments.LightningEnvironment
LSFEnvironment = fabric.plugins.environments.LSFEnvironment
MPIEnvironment = fabric.plugins.environments.MPIEnvironment
SLURMEnvironment = fabric.plugins.environments.SLURMEnvironment
TorchElasticEnvironment = fabric.plugins.environments.TorchElasticEnvironment

BaseFinetuning = pl.callbacks.BaseFinetuning
Callback = pl.callbacks.Callback
ModelCheckpoint = pl.callbacks.ModelCheckpoint
ModelPruning = pl.callbacks.ModelPruning
StochasticWeightAveraging = pl.callbacks.StochasticWeightAveraging
WeightAveraging = pl.callbacks.WeightAveraging

# Callbacks of Lightning that send messages, so that all ranks must have them.
COLLECTIVE = (
    *(pl.callbacks.Checkpoint, pl.callbacks.EarlyStopping, pl.callbacks.Timer),
    *(BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging),
)

CombinedLoader = pl.utilities.combined_loader.CombinedLoader
LightningOptimizer = pl.core.optimizer.LightningOptimizer
MisconfigurationException = pl.utilities.exceptions.MisconfigurationException
SIGTERMException = pl.utilities.exceptions.SIGTERMException
TrainerFn = pl.trainer.states.TrainerFn
TrainerStatus = pl.trainer.states.TrainerStatus

extract_batch_size = pl.utilities.data.extract_batch_size
get_filesystem = fabric.utilities.cloud_io.get_filesystem
is_overridden = pl.utilities.model_helpers.is_overridden
isolate_rng = pl.utilities.seed.isolate_rng
sized_len = fabric.utilities.data.sized_len
rank_zero_info = pl.utilities.rank_zero.rank_zero_info
rank_zero_only = pl.utilities.rank_zero.rank_zero_only
reset_seed = fabric.utilities.seed.reset_seed

# Private names, checked against Lightning 2.6.6. No other file uses private names.
ScriptLauncher = pl.strategies.launchers._SubprocessScriptLauncher
ForkingLauncher = pl.strategies.launchers._MultiProcessingLauncher
ForkedResult = pl.strategies.launchers.multiprocessing._WorkerOutput
FabricScriptLauncher = fabric.strategies.launchers._SubprocessScriptLauncher
FabricForkingLauncher = fabric.strategies.launchers._MultiProcessingLauncher
FitLoop = pl.loops.fit_loop._FitLoop
PrefetchDataFetcher = pl.loops.fetchers._PrefetchDataFetcher
TrainingEpochLoop = pl.loops.training_epoch_loop._TrainingEpochLoop
NoOptimizer = pl.core.optimizer._MockOptimizer
init_process_group = fabric.utilities.distributed._init_dist_connection
checkpoint_folder: Any = ModelCheckpoint._ModelCheckpoint__resolve_ckpt_dir  # type: ignore[attr-defined]
reduce_tensor = fabric.utilities.distributed._sync_ddp_if_available


def is_local(path: Any) -> bool:
    """Return whether ``path`` is on a mounted file system, and not at a remote address such as ``s3://bucket``."""
    return bool(get_protocol(str(path)) == "file")
