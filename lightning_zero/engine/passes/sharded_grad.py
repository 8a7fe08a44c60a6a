"""Defines ``param.grad`` after a backward: a tensor whose values are divided into fragments, one on each rank.

::

    zero_, nan_to_num_, and
    mul_, div_, clamp_ by numbers   change this rank's fragment at once
    norm, linalg.vector_norm        partial norms, one message for all gradients: grad_norms.py
    any other operation             runs on gathered values; each rank keeps its fragment of changed values; collective
    param.grad = value              each rank takes its fragment of ``value`` when gradients are used next; collective,
                                    and ``value`` must be equal on all ranks
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard
from weakref import ref

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.engine.passes.containers import Args, Kwargs
from lightning_zero.engine.passes.grad_norms import GradNorms
from lightning_zero.engine.units.param import ParamInfo

_aten = torch.ops.aten
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_NORM, _NORMS = _aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar
_METHODS: dict[str, tuple[OpOverload, ...]] = {  # name of the tensor method: operations
    "zero_": (_aten.zero_.default, _aten._foreach_zero_.default),
    "mul_": (_aten.mul_.Tensor, _aten.mul_.Scalar, _aten._foreach_mul_.Tensor, _aten._foreach_mul_.Scalar),
    "div_": (_aten.div_.Tensor, _aten.div_.Scalar, _aten._foreach_div_.Tensor, _aten._foreach_div_.Scalar),
    "clamp_": (_aten.clamp_.default,),
    "clamp_min_": (_aten.clamp_min_.default, _aten._foreach_clamp_min_.Scalar),
    "clamp_max_": (_aten.clamp_max_.default, _aten._foreach_clamp_max_.Scalar),
    "nan_to_num_": (_aten.nan_to_num_.default,),
}
_IN_PLACE = {operation: name for name, operations in _METHODS.items() for operation in operations}
_TOTAL_NORM = inspect.unwrap(get_total_norm).__code__
_CODE_OF_TOTAL_NORM = {_TOTAL_NORM, *(const for const in _TOTAL_NORM.co_consts if inspect.iscode(const))}

Number = Tensor | float | None


class Owner(Protocol):
    """The interface of the object that manages the gradients of one engine; implemented in ``sharded_grads.py``."""

    norms: GradNorms

    def shows(self, grad: ShardedGrad) -> bool: ...
    def gather(self, info: ParamInfo) -> Tensor: ...
    def write(self, info: ParamInfo, values: Tensor) -> None: ...
    def change(self, grad: ShardedGrad, method: str, numbers: Sequence[Number]) -> None: ...


class _View(NamedTuple):
    """The data of a :class:`ShardedGrad` that is a view of another :class:`ShardedGrad`."""

    of: ShardedGrad
    whole: Tensor  # the gathered gradient
    values: Tensor  # what the view shows of it


class ShardedGrad(Tensor):
    """``param.grad`` of a sharded parameter, or a view of such a gradient: a tensor subclass without values, whose
    operations use the shards of the gradient."""

    info: ParamInfo
    shown: _View | None  # None: the whole gradient
    added: bool  # autograd added a gradient before the engine noticed the backward
    incoming: Tensor | None  # the gradient that autograd added
    _owner: ref[Owner]  # see [Note: weak references and graphs]

    # Results of operations are plain tensors, except views.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, info: ParamInfo, owner: ref[Owner], view: _View | None = None) -> ShardedGrad:
        like, strides = (info.param, info.strides) if view is None else (view.values, view.values.stride())
        wrapper: ShardedGrad = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=strides, dtype=like.dtype, device=like.device, requires_grad=False
        )
        wrapper.info, wrapper._owner, wrapper.shown = info, owner, view
        wrapper.added, wrapper.incoming = False, None
        return wrapper

    @property
    def owner(self) -> Owner:
        owner = self._owner()
        if owner is None:
            raise RuntimeError(f"the gradient of {self.info.fqn} is gone, with the engine of its module.")
        if not owner.shows(self):
            raise stale(self.info.fqn)
        return owner

    @property
    def _root(self) -> ShardedGrad:
        return self if self.shown is None else self.shown.of

    def read(self) -> Tensor:
        """Return the current values: the gathered gradient, or a view's part of the gathered gradient. Collective."""
        if self.shown is None:
            return self.owner.gather(self.info)
        owner = self._owner()
        if owner is not None and owner.shows(self.shown.of):  # else it was cleared, and the view keeps the last values
            now = owner.gather(self.info)
            if now is not self.shown.whole:
                self.shown.whole.copy_(now)
        return self.shown.values

    def take_over(self, values: Tensor) -> None:
        """Store ``values``, a result of :meth:`read` that an operation has written to, in the gradient's shards."""
        owner = self._owner()
        if owner is not None and owner.shows(self._root):
            owner.write(self.info, values if self.shown is None else self.shown.whole)

    def viewed(self, whole: Tensor, values: Tensor) -> ShardedGrad:
        """Return a :class:`ShardedGrad` that is a view of this gradient. ``whole``: a result of :meth:`read`.
        ``values``: a view of ``whole``."""
        whole = whole if self.shown is None else self.shown.whole
        return ShardedGrad(self.info, self._owner, _View(self._root, whole, values))

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # ``Module.to`` assigns the same object
            if self.shown is not None or value.shape != self.shape:
                raise RuntimeError(
                    f"grad.data of {self.info.fqn}: expected a tensor of shape {tuple(self.info.shape)} for the whole "
                    f"gradient, got one of {tuple(value.shape)} for {tuple(self.shape)}."
                )
            self.copy_(value)

    def detach(self) -> Tensor:
        return self

    # torch refuses these methods on any subclass.
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.read().clone().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.read().tolist()

    def __array__(self, *args: object, **kwargs: object) -> object:
        return self.read().clone().__array__(*args, **kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self.shown is not None:
            return repr(self.shown.values)
        return f"<the gradient of {self.info.fqn} is sharded; .clone() of it, on all ranks, has its values>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is _aten.nan_to_num.out and kwargs["out"] is args[0]:
            func = _aten.nan_to_num_.default
        is_number = (not isinstance(arg, Tensor) or (type(arg) is Tensor and not arg.dim()) for arg in args[1:])
        many = bool(args) and isinstance(args[0], (list, tuple))
        targets = args[0] if many else args[:1]
        if func in _IN_PLACE and all(is_number) and not any(isinstance(t, ShardedGrad) and t.shown for t in targets):
            for tensor in targets:
                if _is_grad(tensor):
                    tensor.owner.change(tensor, _IN_PLACE[func], args[1:])
                else:
                    getattr(tensor, _IN_PLACE[func])(*args[1:])
            return None if many else args[0]
        if func is _aten.add_.Tensor and _is_grad(args[0]) and torch._C._current_graph_task_id() != -1:
            # Autograd accumulates in a backward that is not noticed yet. Our hook, which runs next, takes the gradient.
            args[0].added, args[0].incoming = True, args[1]
            return args[0]
        if func is _NORMS or func is _NORM:
            tensors = args[0] if func is _NORMS else args[:1]
            # Lazy only if the direct caller is ``get_total_norm``.
            lazy = sys._getframe(1).f_code in _CODE_OF_TOTAL_NORM
            norms = [_norm(tensor, *args[1:], lazy=lazy, **kwargs) for tensor in tensors]
            return norms if func is _NORMS else norms[0]
        return _run(func, args, kwargs)


def _is_grad(value: object) -> TypeGuard[ShardedGrad]:
    return isinstance(value, ShardedGrad) and value.shown is None


def _norm(
    tensor: Tensor,
    norm_type: float = 2.0,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    lazy: bool,
) -> Tensor:
    """Return ``torch.linalg.vector_norm`` of ``tensor``: computed from partial norms on the ranks if ``tensor`` is a
    whole gradient, otherwise from gathered values. ``lazy``: return a :class:`LazyNorm` if possible. Collective."""
    is_whole = not dim or {d % tensor.dim() for d in dim} == set(range(tensor.dim()))
    if not _is_grad(tensor) or not is_whole or keepdim or not norm_type >= 0.0:
        values = tensor.read() if isinstance(tensor, ShardedGrad) else tensor
        return torch.linalg.vector_norm(values, norm_type, dim, keepdim, dtype=dtype)
    if lazy and norm_type:
        return LazyNorm([tensor], float(norm_type))
    return tensor.owner.norms.norm(tensor.info, float(norm_type), dtype)


def _run(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run ``func`` with gathered values in place of gradients in its arguments, store gradients that it has changed,
    and return its result. Collective."""
    arguments = func._schema.arguments
    named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    outputs = [named.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    written = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, ShardedGrad)]
    if written and func is _UNSCALE:
        raise RuntimeError(
            "torch.amp.GradScaler: expected whole gradients to unscale, got gradients that are sharded over the ranks. "
            "Train in bf16 (zero.precision='bf16'), which needs no loss scale; or use the Trainer or Fabric with "
            "precision='16-mixed', which scale the loss themselves."
        )
    values: dict[ShardedGrad, Tensor] = {}
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, ShardedGrad) and leaf not in values:
            values[leaf] = leaf.read()
    args, kwargs = tree_map_only(ShardedGrad, values.__getitem__, (args, kwargs))
    result = func(*args, **kwargs)
    for grad in written:
        grad.take_over(values[grad])
    of_storage = {tensor.untyped_storage()._cdata: grad for grad, tensor in values.items()}

    def stand_in(tensor: Tensor) -> Tensor:
        for grad in written:
            if values[grad] is tensor:  # an operation in place returns its argument
                return grad
        of = of_storage.get(tensor.untyped_storage()._cdata)
        return tensor if of is None else of.viewed(values[of], tensor)

    return tree_map_only(Tensor, stand_in, result)


def unreduced(fqn: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {fqn} cannot be changed or clipped after a backward inside no_sync(), except by numbers "
        "that multiply it and by zeros: it is not the average over all ranks and micro-batches yet. Change gradients "
        "after the last backward before the step, outside of no_sync() (on_before_optimizer_step; sync_grad=True)."
    )


def stale(fqn: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {fqn} that is used or assigned here has been cleared (zero_grad(), param.grad = None): its "
        "values are gone. Take values that you need later with param.grad.clone(), on all ranks, before you clear it."
    )


# -- torch.nn.utils.get_total_norm ------------------------------------------------------------------------------------


class LazyNorm(Tensor):
    """The norm of a gradient (0-d), or stacked norms of several gradients, computed only when an operation uses them.

    ``get_total_norm`` stacks the norms of all gradients and takes the norm of the stack. Single norms cost an exchange
    for which the host waits. So inside ``get_total_norm`` each norm is a LazyNorm, and the norm of the stack comes from
    :meth:`GradNorms.total`: one message, no host wait, and the same bits as ``lightning_zero.clip_grad_norm_``."""

    grads: Sequence[ShardedGrad]
    norm_type: float

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, grads: Sequence[ShardedGrad], norm_type: float, *shape: int) -> LazyNorm:
        info = grads[0].info
        wrapper: LazyNorm = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=grads[0].owner.norms.dtype_of(info), device=info.param.device, requires_grad=False
        )
        wrapper.grads, wrapper.norm_type = grads, norm_type
        return wrapper

    def each(self) -> Tensor:
        """Compute and return the norms: 0-d for a norm of one gradient, [n] for stacked norms of n. Collective."""
        norms = [grad.owner.norms.norm(grad.info, self.norm_type, self.dtype) for grad in self.grads]
        return torch.stack(norms) if self.dim() else norms[0]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is _aten.stack.default and len(args) == 1:
            lazy = [norm for norm in args[0] if isinstance(norm, LazyNorm) and not norm.dim()]
            if len(lazy) == len(args[0]) and len({(norm.norm_type, norm.grads[0]._owner) for norm in lazy}) == 1:
                return LazyNorm([norm.grads[0] for norm in lazy], lazy[0].norm_type, len(lazy))
        elif func is _NORM and len(args) <= 2 and not kwargs:
            (norms, norm_type) = args if len(args) == 2 else (args[0], 2.0)
            if float(norm_type) == norms.norm_type:
                total = norms.grads[0].owner.norms.total_shown([grad.info for grad in norms.grads], norms.norm_type)
                if total is not None:
                    return total
        args, kwargs = tree_map_only(LazyNorm, LazyNorm.each, (args, kwargs or {}))
        return func(*args, **kwargs)
