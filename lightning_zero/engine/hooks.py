"""The only file that registers hooks: module calls and gradients become events of :class:`Passes`.

::

    forward   pre_forward(unit) ............ post_forward(unit)
                 | identity node over inputs     | hook on every output that requires grad
    backward  input_grads(unit) <----------- pre_backward(unit)
                 grad_arrived(param) comes anywhere in between

The identity node over all inputs of one call fires when the gradients of these inputs are complete. Hooks on the input
tensors themselves would fire after every consumer of the tensor, other units included.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.containers import find_tensors, map_tensors
from lightning_zero.engine.recompute import WRAPPED
from lightning_zero.engine.sentinels import GradSentinel
from lightning_zero.engine.unit import Unit

if TYPE_CHECKING:
    from lightning_zero.engine.passes import Passes


_PATCHES = ("_apply", "__deepcopy__")  # methods of guarded modules that are replaced on the instance
NEVER_ENDS = 0  # number of a call whose input gradients are not watched


class _InputGrads(torch.autograd.Function):
    """Identity over the inputs of one unit call; its backward says that their gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, arrived: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)  # an input that the unit did not use has no gradient, which is not zero
        # detach() and not the inputs themselves: views made by a Function may not be changed in place by the module.
        return tuple(t.detach() for t in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.arrived()
        return (None, *grads)


class Hooks:
    """All hooks of one engine. ``remove`` takes them off again."""

    def __init__(self, passes: Passes) -> None:
        # Modules and parameters hold these hooks; a strong reference back would be a cycle through autograd.
        self._passes = ref(passes)
        self._handles: list[Any] = []
        self._grad_handles: dict[int, Any] = {}
        self._call = 0
        self._guarded: WeakSet[nn.Module] = WeakSet()

    @property
    def passes(self) -> Passes:
        passes = self._passes()
        assert passes is not None, "the engine is gone but its hooks are not"
        return passes

    def remove(self) -> None:
        for handle in (*self._handles, *self._grad_handles.values()):
            handle.remove()
        self._handles, self._grad_handles = [], {}
        for module in self._guarded:
            for name in _PATCHES:
                module.__dict__.pop(name, None)
        self._guarded.clear()

    # -- registration -----------------------------------------------------------------------------------------------

    def watch_unit(self, unit: Unit, target: nn.Module) -> None:
        """Follow the calls of a unit's module. Ours run before the user's pre-hooks, so that these see weights."""
        inplace = any(getattr(m, "inplace", False) is True for m in target.modules())

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._pre_forward(unit, args, kwargs, wrap_inputs=not inplace)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return self._post_forward(unit, args, kwargs, output)

        self._handles.append(target.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(target.register_forward_hook(after, with_kwargs=True, always_call=unit.index == 0))

    def watch_grad(self, unit: Unit, bucket: Bucket, slot: int) -> None:
        """Take a parameter's gradient as soon as autograd has accumulated it. The parameter must require grad."""
        param = bucket.params[slot].param
        if id(param) in self._grad_handles:
            return
        # Python's garbage collector does not see through this hook: what it held strongly would live for ever, the
        # bucket with its master weights among it, because the bucket holds the parameter and so the hook.
        passes_ref, place = self._passes, (unit.index, unit.buckets.index(bucket))

        def arrived(p: Tensor) -> None:
            grad, p.grad = p.grad, None
            if isinstance(grad, GradSentinel):
                grad = grad.pop_incoming()
            passes = passes_ref()
            if grad is not None and passes is not None:
                unit = passes.units[place[0]]
                passes.grad_arrived(unit, unit.buckets[place[1]], slot, grad)

        self._grad_handles[id(param)] = param.register_post_accumulate_grad_hook(arrived)

    def keep_output_dtype(self, module: nn.Module) -> None:
        """A module that computes in fp32 among lower precision gives back the dtype that it was given."""

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            given = next((t.dtype for t in find_tensors((args, kwargs)) if t.is_floating_point()), None)
            if given is None:
                return None
            return map_tensors(output, lambda t: t.to(given) if t.is_floating_point() and t.dtype != given else t)

        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def guard_module(self, module: nn.Module, refuse: Callable[[str], None]) -> None:
        """Let operations that would see placeholders ask ``refuse`` first: state dicts, conversions, copies."""
        self._handles.append(module.register_state_dict_pre_hook(lambda *_: refuse("state_dict()")))
        self._handles.append(module.register_load_state_dict_pre_hook(lambda *_: refuse("load_state_dict()")))

        def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
            refuse("converting (.to(), .cuda(), .half(), ...)")
            return type(self)._apply(self, fn, recurse)

        def deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
            refuse("copy.deepcopy()")
            return self._plain_copy(module, memo)

        module.__dict__["_apply"] = types.MethodType(apply, module)
        module.__dict__["__deepcopy__"] = types.MethodType(deepcopy, module)
        self._guarded.add(module)

    def _plain_copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """A copy without our hooks."""
        wrapped = hasattr(module.__dict__.get("forward"), WRAPPED)
        patches = {name: module.__dict__.pop(name) for name in (*_PATCHES, *(["forward"] if wrapped else []))}
        try:
            copied = copy.deepcopy(module, memo)
        finally:
            module.__dict__.update(patches)
        ours = {handle.id for handle in self._handles}
        for inner in copied.modules():
            for name, hooks in vars(inner).items():
                if name.endswith("_hooks") or "_hooks_" in name:
                    for hook_id in ours & set(hooks):
                        del hooks[hook_id]
        return copied

    # -- module calls -----------------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit, args: Any, kwargs: Any, *, wrap_inputs: bool) -> Any:
        passes = self.passes
        passes.pre_forward(unit)
        unit.open_call, unit.open_inputs = None, []
        if not (torch.is_grad_enabled() and unit.resharding and unit.index):
            return None
        every = [t for t in find_tensors((args, kwargs)) if t.requires_grad]
        if not every:
            return None
        # A list or dict may be changed by the module for its caller to see, so it cannot be rebuilt around wrapped
        # tensors. Such a call is never seen to end: the unit stays until the end of backward.
        inputs = [t for t in find_tensors((args, tuple(kwargs.values())), only=(tuple,)) if t.requires_grad]
        unit.open_call = NEVER_ENDS
        if not wrap_inputs or len(inputs) < len(every):
            return None
        self._call += 1
        call = unit.open_call = self._call
        wrapped = _InputGrads.apply(  # type: ignore[no-untyped-call]
            lambda: passes.input_grads_arrived(unit, call), *inputs
        )
        unit.open_inputs = [(t, t._version) for t in inputs]
        new = {id(t): w for t, w in zip(inputs, wrapped, strict=True)}

        def change(tensor: Tensor) -> Tensor:
            return new.get(id(tensor), tensor)

        return map_tensors(args, change), {k: map_tensors(v, change) for k, v in kwargs.items()}

    def _post_forward(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> Any:
        passes = self.passes
        call, inputs = unit.open_call, unit.open_inputs
        unit.open_call, unit.open_inputs = None, []
        raised = output is None and sys.exc_info()[0] is not None
        if raised and unit.index == 0 and torch._C._current_graph_task_id() == -1:  # a recompute stops by an exception
            passes.abort()  # the root's own forward raised
            return None
        for tensor, version in inputs:
            if tensor._version != version:
                raise RuntimeError(
                    f"unit {unit.title} changes its input in place ({tuple(tensor.shape)}, {tensor.dtype}), outside "
                    "of modules with inplace=True, so gradients of the input could be wrong. Work on a copy of the "
                    "input, or choose other units with zero.unit.classes."
                )
        outputs = [t for t in find_tensors(output) if t.grad_fn is not None] if torch.is_grad_enabled() else []
        for tensor in outputs:
            tensor.register_hook(lambda _: passes.pre_backward(unit, call))
        inside = passes.units if unit.index == 0 else [unit]  # a root without parameters of its own has its units'
        wants_grad = bool(outputs) or (
            torch.is_grad_enabled()
            and (
                any(t.requires_grad for t in find_tensors((args, kwargs)))
                or any(info.param.requires_grad for member in inside for info in member.infos())
            )
        )
        passes.post_forward(unit, awaits_backward=wants_grad, hidden_outputs=wants_grad and not outputs)
        return None
