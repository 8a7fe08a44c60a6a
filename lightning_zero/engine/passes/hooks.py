"""Registers all hooks of the engine, and turns module calls and gradients into calls of :class:`Passes`.

::

    forward   pre_forward(unit) .................................. post_forward(unit), or forward_raised()
                 saved_weights.py handles tensors that autograd saves in the forward
    backward  backward_begins(), when a gradient reaches an output of the root
                 recomputes(unit), of checkpointed units: recompute.py calls it
                 grad_arrived(param), for every trainable parameter
                 input_grads_arrived(unit), of units with frozen parameters
                 weights_needed(unit), at a read of a saved weight: saved_weights.py calls it

See [Note: weak references and graphs]: hooks on modules, parameters and tensors refer to the passes weakly.
See [Note: freed storage and autograd's views]: a unit stays gathered where autograd saves weights unseen.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.passes.containers import Args, Kwargs, dtype_hooks, find_tensors
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.saved_weights import hooks_allowed, weakly
from lightning_zero.engine.passes.sharded_grad import ShardedGrad
from lightning_zero.engine.torch_modes import outside_graphs
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.packed import is_packed, load_beside
from lightning_zero.engine.units.param import find_owner
from lightning_zero.engine.units.unit import Unit

ENGINE = "_lightning_zero_engine"  # attribute of a sharded module that holds its engine
# methods replaced on the instance of guarded modules
_PATCHES = ("_apply", "__deepcopy__", "__reduce_ex__", "state_dict", "load_state_dict")
_LIFTED = (ENGINE, "compile")  # further attributes that a copy of the module must not have


class _Running(NamedTuple):
    """A call of a unit's module that has not returned yet."""

    unit: Unit
    saving: contextlib.AbstractContextManager[None] | None  # context in which autograd calls our saved-tensor hooks
    handled: BaseException | None  # the exception that the caller handled when it made the call
    saved: tuple[int, int]  # numbers of tensors, and of the unit's weights, that had been saved before the call


class Hooks:
    def __init__(self, passes: Passes) -> None:
        # Weakly: modules hold these hooks, and passes hold parameters. The garbage collector does not see the part of
        # that cycle inside of autograd, so the engine would live for ever.
        self._passes, self._backward_begins = ref(passes), weakly(passes.backward_begins, None)
        self._handles: list[RemovableHandle] = []
        self._watched: dict[int, tuple[nn.Parameter, RemovableHandle]] = {}
        self._call = 0
        self._depth = 0  # of nested calls of modules that hold units
        self.idle = False  # parameters are whole, and gradients belong to the user
        self.saves_to_host = False  # devices lack room for the state dict that is being made
        self._leaf_handles: list[RemovableHandle] = []  # this pass's hooks on leaves, which outlive their graph
        self._running: list[_Running] = []
        self._touched: WeakSet[nn.Module] = WeakSet()
        # Per module: our forward, and the instance's own ``forward`` before, if any.
        self._forwards: WeakKeyDictionary[nn.Module, tuple[Callable[..., object], dict[str, object]]] = (
            WeakKeyDictionary()
        )

    @property
    def passes(self) -> Passes:
        passes = self._passes()
        assert passes is not None, "the engine is gone but its hooks are not"
        return passes

    @property
    def running(self) -> list[Unit]:
        """Return the units whose modules' calls have not returned."""
        return [running.unit for running in self._running]

    def remove(self) -> None:
        for handle in (*self._handles, *(handle for _, handle in self._watched.values())):
            handle.remove()
        self._handles, self._watched = [], {}
        self.forget_inputs()
        for module in self._touched:
            for name in _patched(module):
                del module.__dict__[name]
        for module, (_, before) in self._forwards.items():
            module.__dict__.pop("forward", None)
            module.__dict__.update(before)
        self._touched.clear()
        self._forwards.clear()

    # -- registration -----------------------------------------------------------------------------------------------

    def watch_unit(self, unit: Unit, target: nn.Module) -> None:
        """Register forward hooks on ``target``, the unit's module. The pre-hook runs before users' pre-hooks."""

        def before(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            self._pre_forward(unit, args, kwargs)

        def after(module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
            self._post_forward(unit, args, kwargs, output)

        # outside_graphs: traced into a graph, our hooks would run once and never again.
        self._handles.append(target.register_forward_pre_hook(outside_graphs(before), prepend=True, with_kwargs=True))
        # always_call: after a forward that raised, too, our saved-tensor hooks must be popped.
        self._handles.append(target.register_forward_hook(outside_graphs(after), with_kwargs=True, always_call=True))

    def watch_calls(self, module: nn.Module) -> None:
        """Register hooks that call :meth:`Passes.call_ends` after each call of ``module``, unless the call is nested in
        a call of another module with these hooks."""

        def before(*_: object) -> None:
            self._depth += 1

        def after(module: nn.Module, args: Args, output: object) -> None:
            self._depth = max(0, self._depth - 1)
            if not self._depth and output is not None:  # None: the call may have raised
                self.passes.call_ends()

        self._handles.append(module.register_forward_pre_hook(outside_graphs(before), prepend=True))
        self._handles.append(module.register_forward_hook(outside_graphs(after), always_call=True))

    def watch_trainable(self) -> None:
        """Register gradient hooks on parameters that require a gradient and have no hook yet. Called at each pass,
        because users may unfreeze parameters."""
        for unit in self.passes.units:
            for bucket in unit.buckets:
                for info in bucket.params:
                    if info.param.requires_grad and id(info.param) not in self._watched:
                        if not bucket.plan.trainable:
                            bucket.make_trainable()
                        self._watch_grad(unit, bucket, info.slot)

    def _watch_grad(self, unit: Unit, bucket: Bucket, slot: int) -> None:
        """Register a hook on the parameter at ``slot``. When autograd has accumulated a gradient, the hook passes it to
        :meth:`Passes.grad_arrived` and sets ``param.grad`` to None."""
        param = bucket.params[slot].param
        # Weakly: the garbage collector does not see through this hook; the bucket's masters would live for ever.
        passes_ref, place = self._passes, (unit.index, unit.buckets.index(bucket))
        hooks_ref = ref(self)

        def arrived(p: Tensor) -> None:
            if (hooks := hooks_ref()) is None or hooks.idle:
                return
            # Set to None, or autograd would add a second gradient to the counted one, and gradients would pile up.
            grad, p.grad = p.grad, None
            if isinstance(grad, ShardedGrad):
                incoming, grad.incoming = grad.incoming, None
                grad = incoming
            passes = passes_ref()
            if grad is not None and passes is not None:
                unit = passes.units[place[0]]
                shown = len(p._post_accumulate_grad_hooks) > 1  # type: ignore[arg-type]
                passes.grad_arrived(unit, unit.buckets[place[1]], slot, grad, shown=shown)

        self._watched[id(param)] = param, param.register_post_accumulate_grad_hook(arrived)

    def come_last(self) -> None:
        """Make the engine's gradient hooks, which set ``param.grad`` to None, run after all gradient hooks of users."""
        for param, handle in self._watched.values():
            hooks: dict[int, object] = param._post_accumulate_grad_hooks  # type: ignore[assignment]
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # torch goes by the order of insertion

    def keep_output_dtype(self, module: nn.Module) -> None:
        """Make ``module``, which computes in fp32 (``fp32_modules``), return results in the dtype of its inputs."""
        before, after = dtype_hooks(module)
        if before is not None:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        self._touched.add(module)

    def guard_module(self, module: nn.Module, refuse: Callable[..., None]) -> None:
        """Make ``module`` call ``refuse(operation)``, which may raise, before a state dict, a conversion, a copy or
        pickling reads parameters that may be placeholders."""

        def before_load(_: nn.Module, state: object, prefix: str, metadata: dict[str, Any], *__: object) -> None:
            if metadata.get("assign_to_params_buffers"):
                refuse("load_state_dict(assign=True)", converts=True)
            refuse("load_state_dict()")

        def before_save(module: nn.Module, prefix: str, _: bool) -> None:
            refuse("state_dict()")
            if not prefix:
                hooks.saves_to_host = hooks.passes.check_room(module, "state_dict()", or_on_host=True)

        def after_save(_: nn.Module, state: dict[str, object], prefix: str, __: object) -> None:
            for key in [key for key in state if hooks.saves_to_host and key.startswith(prefix)]:
                if type(value := state[key]) is Tensor and value.device == hooks.passes.comm.device:
                    state[key] = value.to("cpu", copy=True)  # children come first: no more than one unit is held
            hooks.saves_to_host &= bool(prefix)  # the outermost module comes last

        self._handles.append(module.register_state_dict_pre_hook(before_save))
        self._handles.append(module.register_state_dict_post_hook(after_save))
        self._handles.append(module.register_load_state_dict_pre_hook(before_load))
        if any(map(is_packed, module.parameters(recurse=False))):
            self._handles.append(module.register_load_state_dict_pre_hook(load_beside))

        def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
            own = {id(param): param for param in self.parameters() if find_owner(param) is not None}
            if any(_changes(fn, *kind) for kind in {(p.dim(), p.dtype, p.device) for p in own.values()}):
                refuse("converting (.to(), .cuda(), .half(), ...)", converts=True)

            @functools.wraps(fn)  # torchmetrics looks at its name
            def convert(tensor: Tensor) -> Tensor:
                return tensor if id(tensor) in own or isinstance(tensor, ShardedGrad) else fn(tensor)

            with hooks.passes.fence.lowered():
                return type(self)._apply(self, convert, *args, **kwargs)

        def deepcopy(self: nn.Module, memo: dict[int, object]) -> nn.Module:
            with hooks.passes.copying(self, "copy.deepcopy()"):
                refuse("copy.deepcopy()")
                hooks.passes.check_room(self, "copy.deepcopy()")
                put_back = hooks.lift_off()
                try:
                    return copy.deepcopy(self, memo)
                finally:
                    put_back()

        def reduce(self: nn.Module, protocol: int) -> object:
            if hooks.passes.fence.is_plain:
                return type(self).__reduce_ex__(self, protocol)
            with hooks.passes.copying(self, "pickling"):
                refuse("pickling (torch.save(module), sending it to a process)")
                return copy.deepcopy(self).__reduce_ex__(protocol)

        def with_masters(name: str) -> Callable[..., object]:
            def method(self: nn.Module, *args: Any, **kwargs: Any) -> object:
                with hooks.passes.copying(self, f"{name}()"):
                    return getattr(type(self), name)(self, *args, **kwargs)

            return method

        hooks = self
        methods: list[Callable[..., object]] = [apply, deepcopy, reduce, *map(with_masters, _PATCHES[3:])]
        for name, method in zip(_PATCHES, methods, strict=True):
            if name not in module.__dict__:  # else the user's own, which calls that of the class
                module.__dict__[name] = types.MethodType(method, module)
        self._touched.add(module)

    def guards(self, module: nn.Module) -> bool:
        return module in self._touched

    def replace_forward(self, module: nn.Module, forward: Callable[..., object]) -> None:
        before = {name: value for name, value in module.__dict__.items() if name == "forward"}
        self._forwards[module] = forward, self._forwards.get(module, (None, before))[1]
        module.__dict__["forward"] = forward
        self._touched.add(module)

    def lift_off(self, *, keep_engine: bool = False) -> Callable[[], None]:
        """Remove the engine's hooks and attributes from modules (not from parameters). With ``keep_engine`` the module
        keeps the attribute that holds the engine. Return a function that puts hooks and attributes back."""
        ours = {handle.id for handle in self._handles}
        attributes: list[tuple[nn.Module, dict[str, object]]] = []
        tables: list[tuple[dict[int, object], list[tuple[int, object]]]] = []
        for module in list(self._touched):
            names = [name for name in _LIFTED if name in module.__dict__ and not (keep_engine and name == ENGINE)]
            names += _patched(module)
            values = {name: module.__dict__.pop(name) for name in names}
            if module in self._forwards and module.__dict__.get("forward") is self._forwards[module][0]:
                values["forward"] = module.__dict__.pop("forward")
            attributes.append((module, values))
            for name, table in vars(module).items():
                is_table = isinstance(table, dict) and (name.endswith("_hooks") or "_hooks_" in name)
                if is_table and ours & set(table):
                    tables.append((table, list(table.items())))
                    for number in ours & set(table):
                        del table[number]

        def put_back() -> None:
            for module, values in attributes:
                module.__dict__.update(values)
            for table, before in tables:
                now = dict(table)
                table.clear()
                table.update((number, hook) for number, hook in before if number in ours or number in now)
                table.update(now)

        return put_back

    # -- module calls -----------------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit, args: Args, kwargs: Kwargs) -> None:
        passes = self.passes
        try:
            passes.pre_forward(unit)
        except Exception:
            self._raised()
            raise
        may_be_dropped = unit.index > 0 and unit.reshards and torch.is_grad_enabled()
        unit.in_graph |= may_be_dropped
        saving = passes.saved.hooked() if may_be_dropped and hooks_allowed() else None
        # torch keeps saved-tensor hooks on a stack, so :meth:`_post_forward` pops only the last entry of this list.
        self._running.append(_Running(unit, saving, sys.exc_info()[1], (passes.saved.count, unit.saved)))
        if saving is not None:
            saving.__enter__()
        elif may_be_dropped:
            # Autograd saves bare views of the buffer here, and reads them unnoticed. So the unit has to stay gathered.
            unit.is_held = True
        if may_be_dropped and [info for info in unit.infos if not info.param.requires_grad]:
            self._watch_inputs(unit, args, kwargs)

    def _watch_inputs(self, unit: Unit, args: Args, kwargs: Kwargs) -> None:
        """Register gradient hooks on the inputs of a call of ``unit``. With frozen weights the unit must stay gathered
        in the backward until the gradients of all inputs have arrived."""
        inputs = {id(t): t for t in find_tensors((args, kwargs)) if t.requires_grad}
        if torch._C._current_graph_task_id() != -1:
            # In a recomputation only leaves are new. Other inputs were hooked in the forward, or lead to no backward.
            inputs = {key: t for key, t in inputs.items() if t.is_leaf}
        if not inputs:
            return
        self._call += 1
        call, missing = self._call, len(inputs)
        unit.calls.add(call)
        passes_ref, index = self._passes, unit.index

        def arrived(_: Tensor) -> None:
            nonlocal missing
            missing -= 1
            passes = passes_ref()
            if not missing and passes is not None:
                passes.input_grads_arrived(passes.units[index], call)

        for tensor in inputs.values():
            # torch crashes in ``register_hook`` for a view that was changed in place, until ``grad_fn`` was read.
            _ = tensor.grad_fn
            handle = tensor.register_hook(arrived)
            # A leaf may live for many steps and collect hooks.
            if tensor.is_leaf:
                self._leaf_handles.append(handle)

    def forget_inputs(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    def _post_forward(self, unit: Unit, args: Args, kwargs: Kwargs, output: object) -> None:
        # If a pre-hook has raised, ours or the user's, no call was recorded.
        if not self._running or self._running[-1].unit is not unit:
            return
        _, saving, handled, (count, saved) = self._running[-1]
        self._end_call()
        passes, outermost, error = self.passes, not self._running, sys.exc_info()[1]
        # A module may return None, or be called while another exception is handled.
        if output is None and error is not None and error is not handled:
            self._raised()
            return
        outputs = [t for t in find_tensors(output) if t.grad_fn is not None] if torch.is_grad_enabled() else []
        if unit.index == 0:
            begins = self._backward_begins
            for tensor in outputs:
                tensor.register_hook(lambda _: begins())
        elif unit.reshards and (unit.has_packed or saving is not None):
            # Bare views of the buffer may have been kept for the backward, of which our saved-tensor hooks know
            # nothing: by bitsandbytes, by saved-tensor hooks of the user's inside of the forward, or in attributes of
            # ctx.
            if unit.has_packed or unit.saved == saved:
                unit.is_held |= not outputs and self._hides_outputs(unit, args, kwargs)
            # A unit that is a single layer needs no hooks if autograd has saved tensors and none of its weights: the
            # backward of an Embedding reads the saved indices alone.
            if not unit.is_leaf or unit.has_packed or unit.saved > saved or passes.saved.count == count:
                given = {*map(id, args), *map(id, kwargs.values())}  # inputs, which the forward may return
                needed = partial(_weights_needed, self._passes, unit.index)
                for tensor in outputs:
                    if id(tensor) not in given:
                        tensor.register_hook(needed)
        passes.post_forward(
            unit, outermost=outermost, awaits_backward=lambda: bool(outputs) or self._hides_outputs(unit, args, kwargs)
        )

    def _end_call(self) -> None:
        saving = self._running.pop().saving
        if saving is not None:
            saving.__exit__(None, None, None)

    def forget_calls(self) -> None:
        """Drop the records of calls that an exception ended before the engine's forward hook ran."""
        while self._running:
            self._end_call()
        self._depth = 0

    def _raised(self) -> None:
        # Not in a backward: a checkpoint ends its recomputation by an exception of its own.
        if not self._running and torch._C._current_graph_task_id() == -1:
            self.passes.forward_raised()

    def _hides_outputs(self, unit: Unit, args: Args, kwargs: Kwargs) -> bool:
        """Return whether a backward may follow a call of ``unit`` although no tensor with a ``grad_fn`` was found in
        the call's result. This is possible if inputs or weights require gradients, because tensors may be inside
        objects that are not searched."""
        inside = self.passes.units if unit.index == 0 else [unit]  # a root may have no parameters of its own
        return torch.is_grad_enabled() and (
            any(t.requires_grad for t in find_tensors((args, kwargs)))
            or any(info.param.requires_grad for member in inside for info in member.infos)
        )


def _patched(module: nn.Module) -> list[str]:
    return [name for name in _PATCHES if getattr(module.__dict__.get(name), "__module__", "") == __name__]


def _changes(fn: Callable[[Tensor], Tensor], dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ``fn``, an argument of ``Module._apply``, would convert or change a tensor that has ``dim``
    dimensions, dtype ``dtype`` and device ``device``."""
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.zeros((2,) * dim, dtype=dtype, device=device)
        before = tensor._version, tensor.is_shared()
        return fn(tensor) is not tensor or (tensor._version, tensor.is_shared()) != before


def _weights_needed(passes_ref: ReferenceType[Passes], index: int, _: Tensor) -> None:
    if (passes := passes_ref()) is not None:
        passes.weights_needed(passes.units[index])
