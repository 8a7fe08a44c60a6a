"""Activation checkpointing of units: a block keeps its inputs only, and computes the rest again in the backward.

The module's ``forward`` is wrapped and not the module, so that the user's hooks run once. A recomputation gathers the
unit first, because the gradient of any tensor that the block has computed may start it, not only that of an output. It
does not change buffers again: running statistics would move on twice in a step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_zero.config import ConfigError, Recompute
from lightning_zero.engine.passes.containers import copy_containers, find_tensors, map_leaves, tensors_inside
from lightning_zero.engine.passes.events import PassEvents
from lightning_zero.engine.torch_modes import function_modes, outside_graphs, under_function_modes
from lightning_zero.engine.units.unit import Unit


class BuffersAgain:
    """Of one unit's module, for forwards that are computed again in a backward.

    A buffer that a forward has changed is replaced by a copy while it is computed again. torch's norms are known: they
    change their statistics without telling autograd.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [inner for inner in module.modules() if inner._buffers]
        self._changing: set[tuple[int, str]] = set()  # number of the owner, name

    def _found(self) -> Iterator[tuple[int, nn.Module, str, Tensor]]:
        for number, owner in enumerate(self._owners):
            for name, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    yield number, owner, name, buffer

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Around a first forward: see what it changes."""
        before = [(*found, found[3]._version) for found in self._found()]
        yield
        for number, owner, name, buffer, version in before:
            if owner._buffers.get(name) is not buffer or buffer._version != version:
                self._changing.add((number, name))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around a second forward: it changes copies. Not undone afterwards, as its backward may read what it has
        changed."""
        replaced = [
            (owner, name, buffer)
            for number, owner, name, buffer in self._found()
            if (number, name) in self._changing or (isinstance(owner, _NormBase) and owner.training)
        ]
        for owner, name, buffer in replaced:
            owner._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for owner, name, buffer in replaced:
                owner._buffers[name] = buffer


WRAPPED = "_lightning_zero_recompute"  # marks a forward that was wrapped here, and changes the one inside of it


def check_blocks(blocks: Sequence[object], how: Recompute) -> None:
    """Check that there are blocks to compute again.

    Raises:
        ConfigError: there are none.
    """
    if how is not Recompute.none and not blocks:
        raise ConfigError(
            f"zero.activation_checkpointing={how.name}: the model has no blocks that were found to be units. Name "
            "them in zero.unit.classes, or set zero.activation_checkpointing=none."
        )


def recompute_blocks(
    blocks: Sequence[tuple[Unit, nn.Module]], how: Recompute, passes: PassEvents, *, pin_memory: bool
) -> list[Callable[[], None]]:
    """Wrap the forwards of ``blocks``, units with their modules; returns what undoes it."""
    if how is Recompute.none:
        return []
    offload = how is Recompute.offload
    return [_wrap(unit, block, passes, offload_inputs=offload, pin_memory=pin_memory) for unit, block in blocks]


def _wrap(
    unit: Unit, module: nn.Module, passes: PassEvents, *, offload_inputs: bool, pin_memory: bool
) -> Callable[[], None]:
    """Wrap ``module.forward``; returns what undoes it.

    Args:
        offload_inputs: the inputs that are kept wait in host memory.
        pin_memory: ... which is pinned (there is an accelerator).
    """
    inner = module.forward
    passes_ref, buffers, kind = ref(passes), BuffersAgain(module), type(module)

    # Without the attributes of a compiled forward, by which torch.compile would find a way past this one.
    @functools.wraps(inner, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        passes = passes_ref()
        if passes is None or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        args, kwargs = without_empty_caches(kind, args, kwargs)
        call = _Call(inner, unit, passes, buffers, args, kwargs)
        given, named = call.once(args, kwargs)
        if not offload_inputs:
            return checkpoint(call, *given, use_reentrant=False, **named)
        with save_on_cpu(pin_memory=pin_memory):
            return checkpoint(call, *given, use_reentrant=False, **named)

    def replace(change: Callable[[Any], Any]) -> None:
        nonlocal inner
        inner = change(inner)

    return put_around(module, forward, replace)


def without_empty_caches(block: type, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of a ``block``, with None for caches of keys and values of transformers that hold nothing yet.

    Models make one for each call that is not told ``use_cache=False``. An empty one gives back what is put in, but a
    second forward would add to it. transformers' own checkpoints leave it out too, but where a block says that it only
    reads it.
    """
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    if getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs

    def keep(leaf: Any) -> Any:
        # Some hold a number from the beginning on.
        return None if isinstance(leaf, cache) and not any(t.ndim > 1 for t in tensors_inside(leaf)) else leaf

    changed: tuple[Any, Any] = map_leaves((args, kwargs), keep)
    return changed


def put_around(
    module: nn.Module, forward: Callable[..., Any], replace: Callable[[Callable[[Any], Any]], None]
) -> Callable[[], None]:
    """Put ``forward`` in the place of ``module.forward``, which it calls; returns what undoes it.

    Args:
        replace: changes the forward inside of it, as compiling a unit does.
    """
    own = module.__dict__.get("forward")

    def undo() -> None:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own

    # A graph around the unit may not lead through here: a backward would not find the unit's weights.
    outer = outside_graphs(forward)
    setattr(outer, WRAPPED, replace)
    module.__dict__["forward"] = outer
    return undo


class _Call:
    """One call of a block: its forward, and the forwards that compute it again.

    A checkpoint calls the block again with other tensors than it was given, one for each argument. A module may look
    whether two arguments are one tensor (``MultiheadAttention`` does, and computes otherwise if they are not), so each
    tensor is handed over once. Containers come back as the same objects, which may hold other tensors by then, as a
    block may append to a list. So their contents are copied at first.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        unit: Unit,
        passes: PassEvents,
        buffers: BuffersAgain,
        args: Any,
        kwargs: Any,
    ) -> None:
        self._inner, self._unit, self._buffers = inner, unit, buffers
        self._passes = ref(passes)
        inputs = (t for t in find_tensors((args, kwargs)) if not t.is_inference())
        # Weakly: the checkpoint decides which inputs live on (offloaded ones do not, on the device).
        self._inputs: list[tuple[ref[Tensor], int]] = [(ref(t), t._version) for t in inputs]
        self._again = False
        self._modes = function_modes()
        self._order: list[int] = []  # of positional arguments among those that are handed over
        self._repeated: dict[str, int] = {}  # arguments by name that are handed over as positional ones
        self._containers: dict[int | str, Any] = {}  # of what is handed over, as they are at first

    def once(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with which the checkpoint is to call this object, for a call with ``args`` and ``kwargs``."""
        given: list[Any] = []
        places: dict[int, int] = {}
        for arg in args:
            if places.setdefault(id(arg), len(given)) == len(given):
                given.append(arg)
        self._order = [places[id(arg)] for arg in args]
        self._repeated = {name: places[id(value)] for name, value in kwargs.items() if id(value) in places}
        named = {name: value for name, value in kwargs.items() if name not in self._repeated}
        handed_over: list[tuple[int | str, Any]] = [*enumerate(given), *named.items()]
        for place, value in handed_over:
            if not isinstance(value, Tensor) and (own := copy_containers(value)) is not value:
                self._containers[place] = own
        return given, named

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self._again:
            as_at_first = {place: copy_containers(value) for place, value in self._containers.items()}
            given = tuple(as_at_first.get(place, value) for place, value in enumerate(given))
            named = {name: as_at_first.get(name, value) for name, value in named.items()}
        args = [given[place] for place in self._order]
        kwargs = named | {name: given[place] for name, place in self._repeated.items()}
        passes = self._passes()
        assert passes is not None, "the engine is gone but its backward is not"
        if self._again:
            self._check_inputs("were changed in place after it")
            passes.recomputes(self._unit)
        # Ours go inside of the hooks of the checkpoint, which would save bare views of weights: dropped with their
        # unit, these would have no memory when the backward reads them.
        with contextlib.ExitStack() as around:
            if self._unit.reshards:
                around.enter_context(passes.saved.packed())
            around.enter_context(under_function_modes(self._modes))
            around.enter_context(self._buffers.again() if self._again else self._buffers.first())
            result = self._inner(*args, **kwargs)
        if not self._again:
            self._check_inputs("are changed in place by it")
        self._again = True
        return result

    def _check_inputs(self, what: str) -> None:
        for reference, version in self._inputs:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    f"unit {self._unit.title} is computed again from its inputs in backward "
                    f"(zero.activation_checkpointing), and its inputs {what} ({tuple(tensor.shape)}, {tensor.dtype}), "
                    "so gradients would be wrong. Work on a copy of the input, choose other units with "
                    "zero.unit.classes, or set zero.activation_checkpointing=none."
                )
