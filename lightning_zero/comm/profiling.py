"""Ranges for ``torch.profiler``, and for NVTX under CUDA (``torch.autograd.profiler.emit_nvtx``)."""

from __future__ import annotations

import contextlib

import torch

_NOBODY: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def profiled(kind: str, what: str) -> contextlib.AbstractContextManager[None]:
    """Open a range ``zero: <kind> <what>`` if this thread is being profiled. ``kind``: ``gather``, ``wait for``,
    ``reduce``, ``transfer`` or ``step``; ``what``: a unit or bucket."""
    if not torch.autograd._profiler_enabled():
        return _NOBODY
    return torch.profiler.record_function(f"zero: {kind} {what}")
