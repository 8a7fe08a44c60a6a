"""The only interface to an accelerator: streams, events, pinned memory and the device of a thread.

::

    accelerator   the interface; its base class is the host, where everything happens at once
    cuda          a GPU, and which GPUs a host has
    streams       CUDA streams of one engine, one for each kind of transfer
    host_threads  on which cores threads run, and how many torch's kernels on the host use
    recording     what compute waits for, how many bytes move, and when
"""

from __future__ import annotations

import torch

from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.cuda import Cuda

_KINDS: dict[str, type[Accelerator]] = {"cuda": Cuda}


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the :class:`Accelerator` of ``device``: a :class:`Cuda` for a GPU, else the base class, for the host."""
    return _KINDS.get(device.type, Accelerator)(device)
