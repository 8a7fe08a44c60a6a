"""Gathers weights that autograd has saved, when a backward reads the saved weights.

Saved-tensor hooks pack a saved view of a weight together with its unit: see [Note: freed storage and autograd's views].
Autograd unpacks the view just before a kernel reads the view, and unpacking gathers the unit. torch does not look for
in-place changes of tensors that hooks have packed; this file does.

[Note: weak references and graphs]
The garbage collector does not see objects that autograd holds: packed tensors, hooks, `param.grad`, callbacks of a
backward. A reference cycle through such an object is never freed, and keeps the engine and its shards. So these objects
refer to the engine weakly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from lightning_zero.engine.units.unit import Unit

P = ParamSpec("P")
R = TypeVar("R")

# Inside torch.func's transforms torch allows no hooks.
hooks_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_DROPPED = ("for storage of size 0", "its data is not allocated yet")  # torch's words of a saved view without memory
_CHANGED = "modified by an inplace operation"
_READ_OUTSIDE = (
    "If nothing was changed in place: a sharded weight was read outside of its module's call, and an earlier backward "
    "has dropped it since. Add the losses up and run one backward, or read the weight again after it."
)


def weakly(method: Callable[P, R], gone: R) -> Callable[P, R]:
    """Wrap a bound ``method`` without keeping its object alive. When the object is gone, calls return ``gone``."""
    reference = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        alive = reference()
        return gone if alive is None else alive(*args, **kwargs)

    return call


class _Saved(NamedTuple):
    tensor: Tensor
    version: int
    unit: Unit | None  # of a weight; None: another tensor


class _Outer(NamedTuple):
    """A value packed by outer saved-tensor hooks (the user's or a checkpoint's), and the function that unpacks it."""

    value: object
    unpack: Callable[..., Tensor]


class SavedWeights:
    """Packs the tensors that autograd saves in units' forwards. Calls ``needed(unit)`` when autograd unpacks a weight.
    In a backward ``needed`` gathers the unit; it returns whether the unit's weights are present."""

    def __init__(self, units: Sequence[Unit], needed: Callable[[Unit], bool]) -> None:
        self._needed = needed
        self._units = units
        self.count = 0  # of the tensors saved so far
        self.plans_changed()

    def plans_changed(self) -> None:
        # By storage object, which a buffer keeps. Addresses of freed memory may belong to activations later.
        self._unit_of = {
            bucket.full.data.untyped_storage()._cdata: unit
            for unit in self._units
            for bucket in unit.buckets
            if bucket.plan.reshards and unit.index  # the root stays gathered as long as a pass is open
        }

    def hooked(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which saved-tensor hooks pack weights together with their units."""
        context: contextlib.AbstractContextManager[None] = saved_tensors_hooks(*self._hooks())
        return context

    @property
    def alone(self) -> bool:
        """Return whether no other saved-tensor hooks are active. A checkpoint counts the tensors that its hooks see, in
        the forward and in the recomputation. Our hooks could make the two counts differ."""
        outer = _autograd._top_saved_tensors_default_hooks(True)
        return outer is None or outer[0] == self._pack

    def _hooks(self) -> tuple[Callable[[Tensor], object], Callable[..., Tensor]]:
        outer = _autograd._top_saved_tensors_default_hooks(True)
        if outer is None or outer[0] == self._pack:
            return self._pack, self._unpack
        pack, unpack = outer
        if isinstance(getattr(pack, "__self__", None), SavedWeights):
            return self._pack, self._unpack  # another engine's hooks; units of this engine do not save its weights
        return lambda tensor: self._pack_inside(tensor, pack, unpack), self._unpack

    def owner_of(self, tensor: Tensor) -> Unit | None:
        """Return the unit, dropped after use, whose buffer has the memory of ``tensor``; None if there is none."""
        try:
            # Of a DTensor over a split parameter, the tensor inside.
            return self._unit_of.get(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage
            return None

    def _pack(self, tensor: Tensor) -> _Saved:
        self.count += 1
        unit = self.owner_of(tensor)
        if unit is not None:
            unit.saved += 1
            return _Saved(tensor, tensor._version, unit)
        # Detached, because a node that saves its own result (tanh) would keep itself alive. torch restores the history.
        # See [Note: weak references and graphs]. Detached tensors share their version.
        return _Saved(tensor.detach(), tensor._version, None)

    def _pack_inside(self, tensor: Tensor, pack: Callable[[Tensor], object], unpack: Callable[..., Tensor]) -> object:
        if self.owner_of(tensor) is not None:
            return self._pack(tensor)
        self.count += 1
        return _Outer(pack(tensor), unpack)

    def _unpack(self, saved: _Saved | _Outer) -> Tensor:
        # Pack what the current kernel saves, if its backward makes a graph (``create_graph``, or a Python function).
        # Hooks are pushed and never popped: torch resets them for each node to those of the backward's start.
        makes_graph = torch.is_grad_enabled() or isinstance(torch._C._current_autograd_node(), BackwardCFunction)
        if makes_graph and torch._C._current_graph_task_id() != -1 and hooks_allowed():
            pack, unpack = self._hooks()
            if _autograd._top_saved_tensors_default_hooks(True) != (pack, unpack):
                _autograd._push_saved_tensors_default_hooks(pack, unpack)
        if isinstance(saved, _Outer):
            return saved.unpack(saved.value)
        tensor, version, unit = saved
        # Someone looks at the graph, and the weights are dropped. Reading the view could crash, so return NaN.
        if unit is not None and not self._needed(unit):
            return tensor.new_full((), float("nan")).expand(tensor.shape)
        if unit is not None and self.owner_of(tensor) is None and not isinstance(tensor, nn.Parameter):
            raise RuntimeError(
                f"unit {unit.title}: expected a graph whose weights can be gathered again, got a graph that is older "
                "than an exception that ended a gather of its weights. Run the forward again before the backward."
            )
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {version} "
                "instead. Change a copy of it, or change it after the backward."
            )
        return tensor


def explain_weights(error: BaseException, units: Sequence[Unit]) -> None:
    """Explain ``error``, raised in a backward. Raise a RuntimeError from ``error`` if it says that weights were freed.
    If weights were changed, add a note to ``error``."""
    if not isinstance(error, RuntimeError):
        return
    if any(words in str(error) for words in _DROPPED):
        waiting = [unit.title for unit in units if unit.reshards and unit.expected > unit.arrived]
        raise RuntimeError(
            f"backward needed parameters of a unit that had been dropped (one of {', '.join(waiting)}): a tensor left "
            "the unit by another way than its outputs, the graph was walked a second time (retain_graph), or a view of "
            "a weight was kept in an attribute of ctx or by hooks of saved tensors. Return the tensor from the unit's "
            "forward; save the weight itself by ctx.save_for_backward; or choose other units with zero.unit.classes."
        ) from error
    if _CHANGED in str(error) and any(unit.reshards for unit in units):
        error.add_note(_READ_OUTSIDE)
