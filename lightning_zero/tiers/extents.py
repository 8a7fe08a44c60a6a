"""Where masters, optimizer state and parameters rest off the device: host memory, or a file. One interface for both.

Gradients do not come here: they go to plain host memory (``Bucket.bring_grad``).

A caller reserves extents once (a batch of them is one slab, or one region of the file), then moves values with
``stage_in`` and ``stage_out``. Futures let it overlap: read k+1, step k, write k-1. What an extent holds before the
first ``stage_out`` is undefined.

A future is done when the bytes are in place, except for host memory and a CUDA device: there it is done at once and
its result is an event. :func:`arrived` covers all cases. Until then ``out`` and ``value`` belong to the tier: the
caller keeps them alive and untouched (so no ``record_stream`` is needed)::

    compute : --e0------------------w1-- use          e0: recorded by stage_in / stage_out
    h2d     :     \\w0--- stage_in --e1                e1: the result
    d2h     :     \\w0--- stage_out -e1                w : waits

Operations on one extent happen in the order they were asked for; others overlap freely.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero.planning.layout import round_up


class Wanted(NamedTuple):
    """An extent to reserve."""

    label: str  # unit and role, for error messages
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """A place for ``numel`` elements on one tier. Extents are told apart by identity."""

    label: str
    numel: int
    dtype: torch.dtype
    offset: int  # bytes, in its slab or file

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without the padding behind them."""
        return self.numel * self.dtype.itemsize

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError where ``tensor`` cannot be staged to or from here."""
        if tensor.dtype is not self.dtype or tensor.numel() != self.numel or not tensor.is_contiguous():
            raise ValueError(
                f"{self.label!r}: expected a contiguous tensor of {self.numel} elements of {self.dtype}, got "
                f"{tuple(tensor.shape)} of {tensor.dtype}"
            )


class Tier(Protocol):
    """A place where roles rest. Safe for a main thread and workers."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes held at rest now, padding included, staging buffers not."""
        ...

    def reserve(self, wanted: Sequence[Wanted]) -> list[Extent]:
        """One slab or file region for all of ``wanted``. Raises ConfigError where it does not fit."""
        ...

    def stage_in(self, extent: Extent, out: Tensor) -> Future[Any]:
        """Fill ``out`` [numel] with what the extent holds."""
        ...

    def stage_out(self, extent: Extent, value: Tensor) -> Future[Any]:
        """Put ``value`` [numel] into the extent."""
        ...

    def resident(self, extent: Extent) -> Tensor | None:
        """The extent's own memory [numel], to compute on in place; None where it has none (nvme)."""
        ...

    def free(self, extents: Iterable[Extent]) -> None:
        """Give extents back, after what is in flight for them. A slab goes when its last extent does."""
        ...

    def flush(self) -> None:
        """Wait until everything asked for has happened. Raises the error of a write that was lost."""
        ...

    def close(self) -> None:
        """Wait, and free everything. May be called twice."""
        ...


def arrived(future: Future[Any], *, host: bool = False) -> None:
    """Wait for a staging future: afterwards the current stream (``host``: this thread) may use the bytes."""
    event = future.result()
    if event is not None and host:
        event.synchronize()
    elif event is not None:
        torch.cuda.current_stream().wait_event(event)


def lay_out(wanted: Sequence[Wanted], base: int, align: int) -> tuple[list[Extent], int]:
    """Extents one behind the other from byte ``base`` on, each at a multiple of ``align``; and the bytes they take."""
    extents, total = [], 0
    for label, numel, dtype in wanted:
        extents.append(Extent(label, numel, dtype, base + total))
        total += round_up(numel * dtype.itemsize, align)
    return extents, total
