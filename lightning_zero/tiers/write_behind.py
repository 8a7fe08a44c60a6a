"""Write to files while the caller goes on."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import Any

from torch import Tensor

from lightning_zero.device import recording
from lightning_zero.tiers.extents import Extent
from lightning_zero.tiers.nvme import NvmeTier


class WriteBehind:
    """Runs one write at a time in the background. Thread-safe. Its future and the extent's next read raise its
    error."""

    def __init__(self, tier: NvmeTier) -> None:
        self._tier = tier
        self._last: Future[Any] | None = None
        self._lock = threading.Lock()

    def put(self, extent: Extent, value: Tensor) -> Future[Any]:
        """Start to write ``value`` [numel] to ``extent`` after the write before it. See :meth:`NvmeTier.stage_out`."""
        with self._lock:
            if self._last is not None and not self._last.done():
                with recording.stands("disk", extent.label, on_host=True):
                    wait([self._last])
            self._last = self._tier.stage_out(extent, value)
            return self._last
