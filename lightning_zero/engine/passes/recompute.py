"""Replaces units' forwards by compiled forwards, or by forwards under activation checkpointing.

Replaces ``module.forward`` and not the module's call, so that hooks run once. Under activation checkpointing a block
keeps only its inputs. The backward gathers the block's unit and computes the forward again, with the values that
buffers and frozen parameters had before the first forward, and without a lasting change of either.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_zero.device import recording
from lightning_zero.device.accelerator import Event
from lightning_zero.device.streams import HELD, Streams
from lightning_zero.engine.passes.containers import (
    Args,
    Kwargs,
    copy_containers,
    map_leaves,
    put_tensors,
    take_tensors,
    tensors_inside,
)
from lightning_zero.engine.passes.hooks import Hooks
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.torch_modes import caller_modes, outside_graphs, under_modes
from lightning_zero.engine.units.packed import is_packed
from lightning_zero.engine.units.param import is_absent
from lightning_zero.engine.units.unit import Unit
from lightning_zero.settings import Compile, ConfigError, Recompute, ZeroConfig

Given = tuple[Args, Kwargs]
Around = Callable[["UnitForward", Args, Kwargs], object]  # runs a forward, with its positional and keyword arguments
Context = Callable[[], contextlib.AbstractContextManager[object]]


class UnitForward:
    """Replaces the forward of one unit's module. ``plain``: the original forward. ``inner``: the forward to call, which
    is ``plain`` or a compiled version."""

    def __init__(self, unit: Unit, module: nn.Module, hooks: Hooks) -> None:
        self.unit = unit
        self.plain: Callable[..., object] = module.forward
        self.inner = self.plain
        self._module, self._hooks = ref(module), hooks
        self._tables = [inner._parameters for inner in module.modules()]
        self._known = {id(param) for table in self._tables for param in (*table.values(), None)}
        self._around: Around | None = None

    @property
    def is_compiled(self) -> bool:
        return self.inner is not self.plain

    def compile(self, compile: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
        """Use ``compile(plain)`` as the forward from now on. Replaces an earlier compiled forward."""
        self.inner = compile(self.plain)
        self._put()

    def put_around(self, around: Around) -> None:
        """Use ``around(self, args, kwargs)`` as the forward from now on. ``around`` must call :attr:`inner`."""
        self._around = around
        self._put()

    def _put(self) -> None:
        # updated=(): torch.compile would use attributes of a compiled forward to bypass this function.
        @functools.wraps(self.plain, updated=())
        def forward(*args: object, **kwargs: object) -> object:
            if self._around is None:
                return self.inner(*args, **kwargs)
            if torch.is_grad_enabled() and not self._known.issuperset(id(p) for t in self._tables for p in t.values()):
                raise RuntimeError(
                    f"unit {self.unit.title}: expected its own parameters, with which it is computed again in a "
                    "backward, got other tensors (torch.func.functional_call), whose gradients would be wrong. Set "
                    "zero.activation_checkpointing=none."
                )
            return self._around(self, args, kwargs)

        if (module := self._module()) is not None:
            # A graph must not lead through the unit, or a backward would not find the unit's weights.
            self._hooks.replace_forward(module, outside_graphs(forward))


StateValues = dict[tuple[nn.Module, str], Tensor]
KEPT = 1 << 20  # bytes of a buffer of which a call always keeps the value of before


class StateReplay:
    """Prevents recomputed forwards from changing a module's buffers and frozen parameters (codebooks, averages) a
    second time: a recomputation uses copies of the values from before the first forward. To find changed tensors, calls
    1, 2, 4, 8, ... compare values (see [Note: checksums of writes]). Values of small buffers are saved in each call."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [inner for inner in module.modules() if inner._buffers or inner._parameters]
        self._calls = 0
        self._written: set[tuple[nn.Module, str]] = set()  # what calls have written to

    def _state(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for owner in self._owners:
            for name, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    yield owner, name, buffer
            for name, param in owner._parameters.items():
                if param is not None and not (param.requires_grad or is_packed(param) or is_absent(param)):
                    yield owner, name, param

    @contextlib.contextmanager
    def record(self, values: StateValues) -> Iterator[None]:
        """Context manager for a first forward. On exit, ``values`` has the earlier value of each buffer and frozen
        parameter that the body may have changed. Buffers of torch's norm modules in training always count as changed:
        see [Note: version counters]."""
        self._calls += 1
        compares = not self._calls & (self._calls - 1)
        before = [
            # Every forward may change every buffer.
            (owner, name, t, t._version, t.detach().clone() if compares or name in owner._buffers or known else None)
            for owner, name, t in self._state()
            for known in [(owner, name) in self._written]
        ]
        yield
        for owner, name, tensor, version, value in before:
            is_buffer = name in owner._buffers
            same = getattr(owner, name, None) is tensor and tensor._version == version
            if value is None:
                if not same:
                    raise RuntimeError(
                        f"{type(owner).__name__}.{name}: a frozen parameter of a block that is computed again in "
                        "backward (zero.activation_checkpointing) was written to in a forward, but not in the first "
                        "ones. Make it a buffer, write to it outside of the block, or set "
                        "zero.activation_checkpointing=none."
                    )
                continue
            if not same or (compares and not torch.equal(tensor, value)):
                self._written.add((owner, name))
            always = is_buffer and (value.nbytes <= KEPT or (isinstance(owner, _NormBase) and owner.training))
            if always or (owner, name) in self._written:
                values[owner, name] = value

    @contextlib.contextmanager
    def replay(self, values: StateValues) -> Iterator[None]:
        """Context manager for a recomputation, in which the module's buffers and frozen parameters are copies of
        ``values``, a result of :meth:`record`. On exit restore the module's tensors; the graph keeps the copies."""
        now = []
        for (owner, name), value in values.items():
            is_buffer = name in owner._buffers
            table = vars(owner)["_buffers" if is_buffer else "_parameters"]
            now.append((table, name, table[name]))
            table[name] = value.clone() if is_buffer else nn.Parameter(value.clone(), requires_grad=False)
        try:
            yield
        finally:
            for table, name, tensor in now:
                table[name] = tensor


def check_blocks(blocks: Sequence[object], config: ZeroConfig) -> None:
    """Raise a ConfigError if ``config`` recomputes or compiles units, and ``blocks`` (units but the root) is empty."""
    asked = []
    if config.activation_checkpointing is not Recompute.none:
        setting = "zero.activation_checkpointing"
        asked.append((f"{setting}={config.activation_checkpointing.name}", f"set {setting}=none"))
    if config.compile.name is not Compile.none:
        way_out = "set zero/compile=none and compile the model (torch.compile)"
        asked.append((f"zero/compile={config.compile.name.name}", way_out))
    for setting, way_out in asked:
        if not blocks:
            raise ConfigError(
                f"{setting}: the model has no blocks that were found to be units. Name them in zero.unit.classes, or "
                f"{way_out}."
            )


class Recomputation:
    """Runs a unit's forward under activation checkpointing. ``keeping()``: returns the context in which autograd saves
    the forward's inputs."""

    def __init__(self, module: nn.Module, passes: Passes, keeping: Context) -> None:
        self.passes, self.state, self._kind = ref(passes), StateReplay(module), type(module)
        self._keeping = keeping

    def __call__(self, forward: UnitForward, args: Args, kwargs: Kwargs) -> object:
        if self.passes() is None or not torch.is_grad_enabled():
            return forward.inner(*args, **kwargs)
        args, kwargs = without_empty_caches(self._kind, args, kwargs)
        form, tensors = take_tensors((args, kwargs))
        call = _Call(forward, self, (args, kwargs), copy_containers(form), tensors)
        with self._keeping():
            return checkpoint(call, *tensors, use_reentrant=False)


class InputsOnHost:
    """Keeps inputs of blocks in pinned host memory from their forward to their backward. The host waits for nothing.

    ::

        compute : forward 1 | forward 2 | forward 3 | ...        | backward 3 | backward 2 | backward 1
        d2h     :             inputs 1  | inputs 2  | ...
        h2d     :                                       inputs 3 | inputs 2   | inputs 1

    Inputs of the last :data:`HELD` blocks stay on the device. When a backward needs the inputs of a block, the copy of
    the previous block's inputs to the device starts too.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._leaving = deque[_InputsOfBlock]()  # blocks whose inputs are still on the device too

    def __call__(self) -> saved_tensors_hooks:
        """Return a context in which autograd saves the inputs of one call of a block in host memory."""
        block = _InputsOfBlock(self._streams, self._leaving[-1] if self._leaving else None)
        self._leaving.append(block)
        if len(self._leaving) > HELD:
            self._leaving.popleft().free_copied()
        return saved_tensors_hooks(block.pack, block.unpack)


@dataclass(eq=False)
class _Input:
    host: Tensor
    version: int
    came: Event  # the end of the copy to the host
    device: Tensor | None  # the input itself; later its copy, from the start of the way back until the backward has it
    returns: Event = None  # the end of the way back


class _InputsOfBlock:
    """The saved inputs of one call of a block, held by autograd's graph and freed with the graph."""

    def __init__(self, streams: Streams, before: _InputsOfBlock | None) -> None:
        self._streams, self._before = streams, ref(before) if before is not None else lambda: None
        self._inputs: list[_Input] = []  # without those that a backward has taken

    def pack(self, tensor: Tensor) -> Tensor | _Input:
        if (
            tensor.device != self._streams.accelerator.device
            or tensor.layout is not torch.strided
            or type(tensor) is not Tensor
        ):
            return tensor
        host = self._streams.accelerator.host_memory(tensor.shape, tensor.dtype)
        with self._streams.on("d2h"), recording.span("d2h", "activations"):
            host.copy_(tensor.detach(), non_blocking=True)
            came = self._streams.mark()
        self._inputs.append(_Input(host, tensor._version, came, tensor.detach()))
        return self._inputs[-1]

    def free_copied(self) -> None:
        """Free the inputs on the device after their copies to the host. Keep inputs that were changed in place since,
        so that :meth:`unpack` raises."""
        for kept in self._inputs:
            self._streams.wait(kept.came)
            if kept.device is not None and kept.device._version == kept.version:
                kept.device = None

    def unpack(self, kept: Tensor | _Input) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept not in self._inputs:  # a second backward
            self._inputs.append(kept)
        self.start_return()
        if (before := self._before()) is not None:
            before.start_return()
        self._inputs.remove(kept)
        tensor, kept.device = kept.device, None
        assert tensor is not None
        if kept.returns is None and tensor._version != kept.version:
            raise RuntimeError(
                f"an input of a block ({tuple(tensor.shape)}, {tensor.dtype}) was changed in place behind the block, "
                "while it was copied to the host (zero.activation_checkpointing=offload), so gradients would be wrong. "
                "Work on a copy of the input, or set zero.activation_checkpointing=blocks."
            )
        self._streams.wait(kept.returns or kept.came)  # whoever gets the memory next must not write over what is copied
        return tensor

    def start_return(self) -> None:
        """Start to copy to the device all inputs that are only on the host."""
        away = [kept for kept in self._inputs if kept.device is None]
        if not away:
            return
        tensors = [torch.empty_like(kept.host, device=self._streams.accelerator.device) for kept in away]
        with self._streams.on("h2d"), recording.span("h2d", "activations"):
            for kept, tensor in zip(away, tensors, strict=True):
                kept.device = tensor.copy_(kept.host, non_blocking=True)
                kept.returns = self._streams.mark()
        self._streams.hold(self, away[-1].returns)  # a graph that is dropped would free what is still written to


def without_empty_caches(block: type, args: Args, kwargs: Kwargs) -> Given:
    """Return the arguments of a call of ``block`` with None in place of empty key-value caches of transformers. Unless
    called with ``use_cache=False``, models create a cache in each call, and a recomputation would extend it a second
    time. transformers' own checkpointing replaces caches too, except for blocks that only read a cache."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    if getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs

    def keep(leaf: object) -> object:
        # Some caches hold a 0-d or 1-d tensor from the beginning.
        return None if isinstance(leaf, cache) and not any(t.ndim > 1 for t in tensors_inside(leaf)) else leaf

    changed: Given = map_leaves((args, kwargs), keep)
    return changed


class _Call:
    """Runs one call of a block: its forward and, in the backward, the same forward again. A tensor that occurs several
    times is passed to the checkpoint once, because a module may test whether two arguments are the same tensor
    (``MultiheadAttention``). Containers are copied before the first forward, because a block may append to a list."""

    def __init__(
        self, forward: UnitForward, of: Recomputation, given: Given, form: object, tensors: Sequence[Tensor]
    ) -> None:
        self._unit, self._inner = forward.unit, forward.inner
        self._passes, self._state = of.passes, of.state
        self._values: StateValues = {}
        self._given: Given | None = given  # None after the first forward
        self._form = form
        # Weakly: the checkpoint decides which inputs stay alive; offloaded ones die on the device.
        self._inputs = [(ref(t), t._version) for t in tensors if not t.is_inference()]
        self._modes = caller_modes()
        self._random = random.getstate(), np.random.get_state(legacy=False)  # the checkpoint keeps torch's generators

    def __call__(self, *tensors: Tensor) -> object:
        passes = self._passes()
        assert passes is not None, "the engine is gone but its backward is not"
        again = self._given is None
        if again:
            self._check_inputs("were changed in place after it")
            passes.recomputes(self._unit)
        args, kwargs = self._given or copy_containers(put_tensors(self._form, tensors))
        self._given = None
        # Inside of the checkpoint's hooks, which would save bare views of weights whose memory is dropped.
        with contextlib.ExitStack() as around:
            if self._unit.reshards:
                around.enter_context(passes.saved.hooked())
            around.enter_context(under_modes(self._modes))
            if again:
                around.callback(random.setstate, random.getstate())
                around.callback(np.random.set_state, np.random.get_state(legacy=False))
                random.setstate(self._random[0])
                np.random.set_state(self._random[1])
            around.enter_context((self._state.replay if again else self._state.record)(self._values))
            result = self._inner(*args, **kwargs)
        if not again:
            self._check_inputs("are changed in place by it")
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
