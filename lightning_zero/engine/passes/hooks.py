"""Registers all hooks, and turns module calls and gradients into events of :class:`Passes`. No other file does.

::

    forward   pre_forward(unit) .................................. post_forward(unit), or forward_raised()
                 what autograd saves in between is packed: saved_weights.py
    backward  backward_begins(), when a gradient comes to an output of the root
                 recomputes(unit), of checkpointed units: recompute.py calls it
                 grad_arrived(param), for every trainable parameter
                 input_grads_arrived(unit), of units with frozen parameters

One more event is no hook's: when a packed weight is read, saved_weights.py calls ``weights_needed``.

Hooks on outputs would not do: a tensor may leave a unit by other ways than its outputs, and an output that is changed
in place has another history afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn

from lightning_zero.config import Precision
from lightning_zero.engine.passes.containers import dtype_hooks, find_tensors
from lightning_zero.engine.passes.sharded_grad import ShardedGrad
from lightning_zero.engine.torch_modes import outside_graphs
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.describe import AUTOCAST_DTYPES
from lightning_zero.engine.units.unit import Unit

if TYPE_CHECKING:
    from lightning_zero.engine.passes.passes import Passes

ENGINE = "_lightning_zero_engine"  # where a sharded module keeps its engine
_PATCHES = ("_apply", "__deepcopy__", "__reduce_ex__")  # methods of guarded modules that are replaced on the instance
_LIFTED = (*_PATCHES, ENGINE, "compile")  # what a copy is not to have
_DTYPES_DIFFER = re.compile(
    r"same dtype|same data ?type|expected .*(scalar type|dtype)|mixed dtype|dtype mismatch"
    r"|not implemented for '(BFloat16|Half)'",
    re.IGNORECASE,
)


class _Running(NamedTuple):
    """A call of a unit's module that has not returned."""

    unit: Unit
    packing: contextlib.AbstractContextManager[None] | None
    handled: BaseException | None  # what the caller was handling when it made the call


class Hooks:
    """All hooks of one engine. ``remove`` takes them off again."""

    def __init__(self, passes: Passes, precision: Precision) -> None:
        # Weakly: modules and parameters hold these hooks, and the passes hold the parameters. Python's garbage
        # collector does not see the part of that cycle which is inside of autograd, so the engine would live for ever.
        self._passes = ref(passes)
        self._precision = precision
        self._handles: list[Any] = []
        self._grad_handles: dict[int, tuple[nn.Parameter, Any]] = {}
        self._call = 0
        self._depth = 0  # calls of modules that hold units, inside of each other
        self.idle = False  # the module is whole: gradients are the user's
        self._leaf_handles: list[Any] = []  # of hooks in this pass on leaves, which outlive their graph
        self._running: list[_Running] = []
        self._touched: WeakSet[nn.Module] = WeakSet()  # modules with something of ours
        # Of modules: our forward, and what their own dicts held in its place before.
        self._forwards: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, Any]]] = WeakKeyDictionary()

    @property
    def passes(self) -> Passes:
        passes = self._passes()
        assert passes is not None, "the engine is gone but its hooks are not"
        return passes

    def remove(self) -> None:
        for handle in (*self._handles, *(handle for _, handle in self._grad_handles.values())):
            handle.remove()
        self._handles, self._grad_handles = [], {}
        self.forget_inputs()
        for module in self._touched:
            for name in _PATCHES:
                module.__dict__.pop(name, None)
        for module, (_, before) in self._forwards.items():
            module.__dict__.pop("forward", None)
            module.__dict__.update(before)
        self._touched.clear()
        self._forwards.clear()

    # -- registration -----------------------------------------------------------------------------------------------

    def watch_unit(self, unit: Unit, target: nn.Module) -> None:
        """Follow the calls of a unit's module. Ours run before the user's pre-hooks, so that these see weights."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._pre_forward(unit, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._post_forward(unit, args, kwargs, output)

        # torch.compile is not to look into our hooks: traced into a graph, they would run once and never again.
        self._handles.append(target.register_forward_pre_hook(outside_graphs(before), prepend=True, with_kwargs=True))
        # Always called: a forward that raises must take its packing hooks off too, or all that follows in this thread
        # would go on to pack what it saves.
        self._handles.append(target.register_forward_hook(outside_graphs(after), with_kwargs=True, always_call=True))

    def watch_calls(self, module: nn.Module) -> None:
        """Tell when the outermost call of a module that holds units has returned."""

        def before(*_: Any) -> None:
            self._depth += 1

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._depth = max(0, self._depth - 1)
            if not self._depth and output is not None:  # None: it may have raised
                self.passes.call_ends()

        self._handles.append(module.register_forward_pre_hook(outside_graphs(before), prepend=True))
        self._handles.append(module.register_forward_hook(outside_graphs(after), always_call=True))

    def watch_grad(self, unit: Unit, bucket: Bucket, slot: int) -> None:
        """Take a parameter's gradient as soon as autograd has accumulated it. The parameter must require grad."""
        param = bucket.params[slot].param
        if id(param) in self._grad_handles:
            return
        # Python's garbage collector does not see through this hook: what it held strongly would live for ever, the
        # bucket with its master weights among it, because the bucket holds the parameter and so the hook.
        passes_ref, place = self._passes, (unit.index, unit.buckets.index(bucket))
        hooks_ref = ref(self)

        def arrived(p: Tensor) -> None:
            if (hooks := hooks_ref()) is None or hooks.idle:
                return
            # Taken away: autograd would add a second gradient of this backward (of a reentrant checkpoint) to one that
            # was counted already, and the full gradients of all parameters would stay in memory up to its end.
            grad, p.grad = p.grad, None
            if isinstance(grad, ShardedGrad):
                grad = grad.pop_incoming()
            passes = passes_ref()
            if grad is not None and passes is not None:
                unit = passes.units[place[0]]
                shown = len(p._post_accumulate_grad_hooks) > 1  # type: ignore[arg-type]
                passes.grad_arrived(unit, unit.buckets[place[1]], slot, grad, shown=shown)

        self._grad_handles[id(param)] = param, param.register_post_accumulate_grad_hook(arrived)

    def come_last(self) -> None:
        """Move our gradient hooks behind those that users have registered since: ours take the gradients away."""
        for param, handle in self._grad_handles.values():
            hooks: dict[int, Any] = param._post_accumulate_grad_hooks  # type: ignore[assignment]
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # torch goes by the order of insertion

    def keep_output_dtype(self, module: nn.Module) -> None:
        """A module that computes in fp32 among lower precision gives back the dtype that it was given."""
        before, after = dtype_hooks(module)
        if before is not None:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        self._touched.add(module)

    def guard_module(self, module: nn.Module, refuse: Callable[[str], None]) -> None:
        """Make calls that would see placeholders ask ``refuse`` first: state dicts, conversions, copies, pickles."""
        self._handles.append(module.register_state_dict_pre_hook(lambda *_: refuse("state_dict()")))
        self._handles.append(module.register_load_state_dict_pre_hook(lambda *_: refuse("load_state_dict()")))

        def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
            refuse("converting (.to(), .cuda(), .half(), ...)")
            return type(self)._apply(self, fn, recurse)

        def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
            refuse("copy.deepcopy()")
            put_back = hooks.lift_off()
            try:
                return copy.deepcopy(self, memo)
            finally:
                put_back()

        def reduce(self: nn.Module, protocol: int) -> Any:
            refuse("pickling (torch.save(module), sending it to a process)")
            return type(self).__reduce_ex__(self, protocol)

        hooks = self
        methods: tuple[Callable[..., Any], ...] = (apply, deepcopy, reduce)
        for name, method in zip(_PATCHES, methods, strict=True):
            module.__dict__[name] = types.MethodType(method, module)
        self._touched.add(module)

    def replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Put ``forward`` in the place of the module's own, until :meth:`remove`."""
        before = {name: value for name, value in module.__dict__.items() if name == "forward"}
        self._forwards[module] = forward, self._forwards.get(module, (None, before))[1]
        module.__dict__["forward"] = forward
        self._touched.add(module)

    def watch_arguments(self, module: nn.Module, called: Callable[[Any, Any], None]) -> None:
        """Call ``called`` with the arguments of each call of ``module``, before all else."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            called(args, kwargs)

        self._handles.append(module.register_forward_pre_hook(outside_graphs(before), prepend=True, with_kwargs=True))

    def lift_off(self, *, keep_engine: bool = False) -> Callable[[], None]:
        """Take everything of ours off the modules, so that they are plain; returns what puts it back in its place.

        Hooks on parameters stay: neither a copy nor a pickle of a parameter has them.
        """
        ours = {handle.id for handle in self._handles}
        attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        tables: list[tuple[dict[int, Any], list[tuple[int, Any]]]] = []
        for module in list(self._touched):
            names = [name for name in _LIFTED if name in module.__dict__ and not (keep_engine and name == ENGINE)]
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

    def _pre_forward(self, unit: Unit, args: Any, kwargs: Any) -> None:
        passes = self.passes
        try:
            passes.pre_forward(unit)
        except Exception:
            self._raised()
            raise
        may_be_dropped = unit.index > 0 and unit.reshards and torch.is_grad_enabled()
        packing = passes.saved.packed() if may_be_dropped and passes.saved.possible else None
        # torch keeps saved-tensor hooks on a stack, so calls end in the reverse order: :meth:`_post_forward` looks at
        # the last entry only, and takes off nothing that a caller of this module has put on.
        self._running.append(_Running(unit, packing, sys.exc_info()[1]))
        if packing is not None:
            packing.__enter__()
        elif may_be_dropped:
            # Autograd saves bare views of the buffer here. Nobody is asked when it reads them, so the unit has to stay.
            passes.progress.hold(unit)
        if may_be_dropped and not all(info.param.requires_grad for info in unit.infos()):
            self._watch_inputs(unit, args, kwargs)

    def _watch_inputs(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """Frozen weights are needed until the gradients of the inputs are complete, trainable ones until their own."""
        inputs = {id(t): t for t in find_tensors((args, kwargs)) if t.requires_grad}
        if torch._C._current_graph_task_id() != -1:
            # A checkpoint computes again. Its leaves are copies that only this backward knows. The other inputs were
            # watched in the forward, or lead to no backward: the unit would wait for gradients that never come.
            inputs = {key: t for key, t in inputs.items() if t.is_leaf}
        if not inputs:
            return
        self._call += 1
        call, missing = self._call, len(inputs)
        self.passes.progress.await_inputs(unit, call)
        passes_ref, index = self._passes, unit.index

        def arrived(_: Tensor) -> None:
            nonlocal missing
            missing -= 1
            passes = passes_ref()
            if not missing and passes is not None:
                passes.input_grads_arrived(passes.units[index], call)

        for tensor in inputs.values():
            # A view that was changed in place gets its history when ``grad_fn`` is read. torch crashes in
            # ``register_hook`` where that has not happened yet.
            _ = tensor.grad_fn
            handle = tensor.register_hook(arrived)
            # Hooks of other tensors go with the graph. A leaf may be used for many steps, and would collect hooks.
            if tensor.is_leaf:
                self._leaf_handles.append(handle)

    def forget_inputs(self) -> None:
        """Remove the hooks on leaves, because the pass is over."""
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    def _post_forward(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> None:
        # The pre-hook did not come to its end: it has raised itself, or a hook of the user's before it has. Then there
        # is nothing to end here.
        if not self._running or self._running[-1].unit is not unit:
            return
        handled = self._running[-1].handled
        self._end_call()
        passes, outermost, error = self.passes, not self._running, sys.exc_info()[1]
        # A module may return None, and be called where another exception is handled.
        if output is None and error is not None and error is not handled:
            _explain_dtypes(error, self._precision)
            self._raised()
            return
        outputs = [t for t in find_tensors(output) if t.grad_fn is not None] if torch.is_grad_enabled() else []
        if unit.index == 0:
            passes_ref = self._passes
            for tensor in outputs:
                tensor.register_hook(lambda _: _backward_begins(passes_ref))
        passes.post_forward(
            unit, outermost=outermost, awaits_backward=lambda: bool(outputs) or self._hides_outputs(unit, args, kwargs)
        )

    def _end_call(self) -> None:
        packing = self._running.pop().packing
        if packing is not None:
            packing.__exit__(None, None, None)

    def forget_calls(self) -> None:
        """End the calls that have never returned, after an exception that torch does not tell hooks of."""
        while self._running:
            self._end_call()
        self._depth = 0

    def _raised(self) -> None:
        # Not in a backward: a checkpoint ends its recomputation early by an exception of its own, which is no failure.
        if not self._running and torch._C._current_graph_task_id() == -1:
            self.passes.forward_raised()

    def _hides_outputs(self, unit: Unit, args: Any, kwargs: Any) -> bool:
        """Whether a call in whose result no outputs were found must have some all the same."""
        inside = self.passes.units if unit.index == 0 else [unit]  # a root without parameters of its own has its units'
        return torch.is_grad_enabled() and (
            any(t.requires_grad for t in find_tensors((args, kwargs)))
            or any(info.param.requires_grad for member in inside for info in member.infos())
        )


def _backward_begins(passes_ref: ReferenceType[Passes]) -> None:
    passes = passes_ref()
    if passes is not None:
        passes.backward_begins()


def _explain_dtypes(error: BaseException, precision: Precision) -> None:
    """Add to an error about dtypes, which a forward has raised, how a module keeps fp32."""
    told = any("zero/precision" in note for note in getattr(error, "__notes__", ()))
    if precision not in AUTOCAST_DTYPES or told or not _DTYPES_DIFFER.search(str(error)):
        return
    module = _innermost_module(error)
    if module is not None:
        name = type(module).__name__
        error.add_note(
            f"Under zero/precision={precision.name} parameters are used in {precision.name}, autocast alone leaves "
            f"them in fp32. If {name} needs fp32, add its class to those that keep it: "
            f"zero.precision.fp32_modules=[..., {name}]."
        )


def _innermost_module(error: BaseException) -> nn.Module | None:
    """The module whose code has raised."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        found = owner if isinstance(owner, nn.Module) else found
        traceback = traceback.tb_next
    return found
