"""Called by Lightning, through an entry point, as each Trainer and Fabric is made. Adds no callback.

Outside of a Hydra app nothing of lightning_zero is imported.
"""

import sys
from typing import Any


def check() -> list[Any]:
    """Raise ConfigError if this Hydra app has composed settings of ``zero`` that no strategy has read."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is not None and hydra.HydraConfig.initialized():
        from lightning_zero.app.unread import check_read

        check_read(hydra.HydraConfig.get())
    return []
