"""What the engine knows of a parameter: its names and shape, and its place in a bucket."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_zero.engine.units.classes import Classes
from lightning_zero.planning.boxes import memory_order
from lightning_zero.pretrained.stored import StoredTensor

READ_CHUNK = 1 << 20  # elements of a file in memory at a time


@dataclass(slots=True, eq=False)
class ParamInfo:
    """A parameter that the engine owns. Nothing is stored on the ``nn.Parameter`` itself."""

    param: nn.Parameter
    fqns: tuple[str, ...]  # every name; tied weights have several
    shape: torch.Size
    strides: tuple[int, ...]  # the flat buffer keeps the order of memory: kernels round differently for another
    dtype: torch.dtype  # before sharding: what checkpoints hold
    classes: Classes  # that the parameter goes through
    slot: int = 0  # position in the bucket
    gathered: Tensor | None = None  # [shape] compute_dtype, a view of the bucket's full buffer
    version: int = 0  # writes of the user's up to this version of the parameter are in the masters

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def check_shape(self, shape: torch.Size) -> None:
        """Refuse ``param.data`` of another shape.

        Raises:
            RuntimeError: names the parameter and the right way.
        """
        if shape != self.shape:
            raise RuntimeError(
                f"{self.fqn}.data = ...: expected a tensor of shape {tuple(self.shape)}, got {tuple(shape)}. A sharded "
                "parameter keeps its shape: change the module before it is sharded (in __init__ or configure_model)."
            )

    def flattened(self, value: Tensor) -> Tensor:
        """``value`` [shape], of any strides, as it lies in a flat buffer: [numel]."""
        return value.permute(self.order).reshape(-1)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions as they are flattened, the slowest first."""
        return memory_order(self.strides)

    def copy_part(self, value: Tensor, start: int, target: Tensor) -> None:
        """Copy elements of :meth:`flattened`, from ``start`` on, to ``target`` [n]. Of a file no others are read."""
        if not isinstance(value, StoredTensor):
            target.copy_(self.flattened(value)[start : start + len(target)])
            return
        for low in range(0, len(target), READ_CHUNK):
            piece = target[low : low + READ_CHUNK]
            piece.copy_(value.read(start + low, start + low + len(piece), self.order))


def values_changed(infos: Iterable[ParamInfo]) -> None:
    """Raise the versions of parameters that have got other values by another way than an operation on them.

    As after an operation in place, torch then refuses a backward that has saved the values of before. The versions that
    are noted in ``infos`` rise too, so that :class:`~lightning_zero.engine.parameters.writes.Writes` sees no write.
    """
    infos = list(infos)
    increment_version([info.param for info in infos])
    for info in infos:
        info.version += 1


def strides_of(param: Tensor) -> tuple[int, ...]:
    """Strides of ``param`` where its memory has neither gaps nor overlaps, else those of a contiguous tensor."""
    expected = 1
    for step, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if step != expected:
                return torch.empty(param.shape, device="meta").stride()
            expected *= size
    return param.stride()
