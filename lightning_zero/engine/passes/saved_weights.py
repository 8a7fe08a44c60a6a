"""Weights that autograd has saved for a backward: they are gathered when they are needed, whoever needs them.

Autograd saves a weight as a view of its bucket's buffer, whose memory goes when the unit is dropped. So what the
forward of a unit saves passes here: a view of a buffer is packed with its unit, and unpacking it, just before the
kernel that reads it runs, has the unit gathered. That holds for every way that leads into a unit's graph: its outputs,
tensors that it keeps on itself or puts into a list, outputs that were changed in place, a second backward, a
checkpoint's recomputation.

torch checks that a saved tensor was not changed in place before backward reads it, but not where hooks pack it; so it
is checked here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks

from lightning_zero.engine.units.unit import Unit


class _Weight(NamedTuple):
    view: Tensor
    version: int
    unit: Unit


class _Other(NamedTuple):
    tensor: Tensor
    version: int


class _Outer(NamedTuple):
    """What the hooks around ours (the user's, or those of a checkpoint) made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class SavedWeights:
    """Packs what units' forwards save.

    Args:
        needed: called with the unit whose weights are read next; whether they are there then.
    """

    def __init__(self, units: Sequence[Unit], needed: Callable[[Unit], bool]) -> None:
        self._needed = needed
        self._unit_of = {
            bucket.full.data.untyped_storage()._cdata: unit
            for unit in units
            for bucket in unit.buckets
            if bucket.reshards and unit.index  # the root stays gathered as long as a pass is open
        }

    def packed(self) -> contextlib.AbstractContextManager[None]:
        """Inside, what autograd saves is packed."""
        context: contextlib.AbstractContextManager[None] = saved_tensors_hooks(*self._hooks())
        return context

    @property
    def possible(self) -> bool:
        """torch.func's transforms allow no hooks: what they save stays as it is."""
        return bool(_autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]

    @property
    def alone(self) -> bool:
        """No hooks of others are in force. A checkpoint counts what it saves, and counts again when it recomputes."""
        outer = _autograd._top_saved_tensors_default_hooks(True)
        return outer is None or outer[0] == self._pack

    def _hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        outer = _autograd._top_saved_tensors_default_hooks(True)
        if outer is None or outer[0] == self._pack:
            return self._pack, self._unpack
        pack, unpack = outer
        if isinstance(getattr(pack, "__self__", None), SavedWeights):
            return self._pack, self._unpack  # of another engine, whose weights this one's units do not save
        return lambda tensor: self._pack_inside(tensor, pack, unpack), self._unpack

    def _owner_of(self, tensor: Tensor) -> Unit | None:
        """The unit of a tensor that is a view of a buffer."""
        try:
            return self._unit_of.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage
            return None

    def _pack(self, tensor: Tensor) -> _Weight | _Other:
        unit = self._owner_of(tensor)
        return _Other(tensor, tensor._version) if unit is None else _Weight(tensor, tensor._version, unit)

    def _pack_inside(self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        unit = self._owner_of(tensor)
        return _Outer(pack(tensor), unpack) if unit is None else _Weight(tensor, tensor._version, unit)

    def _unpack(self, packed: _Weight | _Other | _Outer) -> Tensor:
        self._pack_next_order()
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        if isinstance(packed, _Weight) and not self._needed(packed.unit):
            return packed.view.new_full((), float("nan")).expand(packed.view.shape)
        tensor, version = packed[:2]
        if tensor._version != version:
            _refuse_changed(tensor, version)
        return tensor

    def _pack_next_order(self) -> None:
        """A backward with ``create_graph``: what its kernel saves of the weights that it unpacks is packed too.

        torch takes these hooks off again: each node of a graph begins with the state of the whole backward.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and torch.is_grad_enabled() and self.possible:
            pack, unpack = self._hooks()
            if _autograd._top_saved_tensors_default_hooks(True) != (pack, unpack):
                _autograd._push_saved_tensors_default_hooks(pack, unpack)


def _refuse_changed(tensor: Tensor, version: int) -> None:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead. "
        "Change a copy of it, or change it after the backward."
    )
