"""The one seam to an accelerator: streams, events, pinned memory and the device of a thread. CUDA is named here only.

::

    accelerator   the interface; its base class is the host, where everything happens at once
    cuda          the same on a GPU, and which GPUs there are
    host_threads  how many threads kernels on the host take in a thread of ours
    recording     what compute stands still for, what moves, and when: on clocks and by events
"""

from __future__ import annotations

import torch

from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.cuda import Cuda

_KINDS: dict[str, type[Accelerator]] = {"cuda": Cuda}


def accelerator_of(device: torch.device) -> Accelerator:
    """What streams, events and pinned memory mean on ``device``."""
    return _KINDS.get(device.type, Accelerator)(device)
