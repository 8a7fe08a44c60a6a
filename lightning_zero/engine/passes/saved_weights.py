"""Has weights that autograd has saved gathered when a backward reads them, whatever leads to that backward.

Autograd saves a weight as a view of its bucket's buffer, whose memory goes when the unit is dropped. So all tensors
that the forward of a unit saves pass through here. A view of a buffer is packed together with its unit. It is unpacked
just before the kernel that reads it runs, and unpacking gathers the unit. That holds for every way into a unit's graph:
its outputs, tensors that the unit keeps on itself or puts into a list, outputs that were changed in place, a second
backward, a checkpoint's recomputation.

torch checks, before a backward reads a saved tensor, that it was not changed in place. It does not check tensors that
hooks have packed, so this file does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _autograd
from torch.autograd.function import BackwardCFunction
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
    """What the hooks around ours (the user's, or those of a checkpoint) have made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class SavedWeights:
    """Packs what units' forwards save.

    Args:
        needed: is called with the unit whose weights are read next; returns whether they are there.
    """

    def __init__(self, units: Sequence[Unit], needed: Callable[[Unit], bool]) -> None:
        self._needed = needed
        self._units = units
        self.plans_changed()

    def plans_changed(self) -> None:
        """Find the memory of units that are dropped after use."""
        # By the storage object, which a buffer keeps when its memory goes. By address it would be wrong: freed memory
        # may be an activation's next.
        self._unit_of = {
            bucket.full.data.untyped_storage()._cdata: unit
            for unit in self._units
            for bucket in unit.buckets
            if bucket.reshards and unit.index  # the root stays gathered as long as a pass is open
        }

    def packed(self) -> contextlib.AbstractContextManager[None]:
        """Inside the ``with``, the tensors that autograd saves are packed."""
        context: contextlib.AbstractContextManager[None] = saved_tensors_hooks(*self._hooks())
        return context

    @property
    def possible(self) -> bool:
        """Whether torch allows hooks now. Inside torch.func's transforms it allows none, and saves bare tensors."""
        return bool(_autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]

    @property
    def alone(self) -> bool:
        """Whether no hooks of others are in force.

        Those of a checkpoint count the tensors that they see, and count again in the recomputation. If ours took out a
        tensor at one of the two times only, the numbers would differ.
        """
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
        if unit is not None:
            return _Weight(tensor, tensor._version, unit)
        # Without its history, which torch gives back: a kernel that saves its own result (tanh) would hold itself, and
        # a graph without a backward, with all that it leads to, would live for ever. The version is counted together.
        return _Other(tensor.detach(), tensor._version)

    def _pack_inside(self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        unit = self._owner_of(tensor)
        return _Outer(pack(tensor), unpack) if unit is None else _Weight(tensor, tensor._version, unit)

    def _unpack(self, packed: _Weight | _Other | _Outer) -> Tensor:
        self._pack_next_order()
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        # Somebody looks at the graph, and the weights are not here. The view has no memory, and reading it may crash:
        # NaN of its shape instead.
        if isinstance(packed, _Weight) and not self._needed(packed.unit):
            return packed.view.new_full((), float("nan")).expand(packed.view.shape)
        tensor, version = packed[:2]
        if isinstance(packed, _Weight) and self._owner_of(tensor) is None:
            raise RuntimeError(
                f"unit {packed.unit.title}: expected a graph whose weights can be gathered again, got one of before an "
                "exception that ended a gather of them. Run the forward again before the backward."
            )
        if tensor._version != version:
            _refuse_changed(tensor, version)
        return tensor

    def _pack_next_order(self) -> None:
        """Pack what is saved by the kernel that unpacks: one of a backward with ``create_graph``, or a function of
        Python's that makes a graph in its backward (a reentrant checkpoint inside of a unit, which calls no unit).

        The hooks are pushed and never popped here. torch takes them off again: each node of a graph begins with the
        hooks that were in force when the backward began.
        """
        if torch._C._current_graph_task_id() == -1 or not self.possible:
            return
        if torch.is_grad_enabled() or isinstance(torch._C._current_autograd_node(), BackwardCFunction):
            pack, unpack = self._hooks()
            if _autograd._top_saved_tensors_default_hooks(True) != (pack, unpack):
                _autograd._push_saved_tensors_default_hooks(pack, unpack)


def _refuse_changed(tensor: Tensor, version: int) -> None:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead. "
        "Change a copy of it, or change it after the backward."
    )
