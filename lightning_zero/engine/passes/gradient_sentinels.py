"""Sentinels that stand in ``param.grad`` for gradients that are sharded, from a backward until the user clears them.

A sentinel in its place says that the parameter has a gradient. If it is gone (None) or zeroed at the next backward or
step, the user has zeroed the gradient, with or without ``set_to_none``. What else users' code may do to gradients in
place is noted too, and made to them when somebody needs them, together for all parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_zero.engine.passes.bucket_grads import BucketGrads
from lightning_zero.engine.passes.grad_changes import Change, GradChanges
from lightning_zero.engine.passes.grad_norms import GradNorms, shows_whole
from lightning_zero.engine.passes.total_norm import DeferredNorm, in_total_norm
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.param import ParamInfo

_aten = torch.ops.aten
_ZEROING = {_aten.zero_.default, _aten._foreach_zero_.default}
_NORM, _NORMS = _aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar
_CHANGES = {  # the operation: the method that does it to a tensor
    _aten.mul_.Tensor: "mul_",
    _aten.mul_.Scalar: "mul_",
    _aten.div_.Tensor: "div_",
    _aten.div_.Scalar: "div_",
    _aten.clamp_.default: "clamp_",
    _aten.clamp_min_.default: "clamp_min_",
    _aten.clamp_max_.default: "clamp_max_",
}
_CHANGES_OF_MANY = {
    _aten._foreach_mul_.Tensor: "mul_",
    _aten._foreach_mul_.Scalar: "mul_",
    _aten._foreach_div_.Tensor: "div_",
    _aten._foreach_div_.Scalar: "div_",
    _aten._foreach_clamp_min_.Scalar: "clamp_min_",
    _aten._foreach_clamp_max_.Scalar: "clamp_max_",
}


class GradSentinel(Tensor):
    """Stands for the gradient of a sharded parameter in ``param.grad``, from a backward until it is cleared.

    It has the shape of the gradient and no values. Zeroing it is noticed by the engine, norms of all of it are true
    (``norm``, ``torch.linalg.vector_norm``), and it can be multiplied, divided and clamped by numbers, in place; any
    other use raises.
    """

    info: ParamInfo
    zeroed: bool  # by the user, since the last backward
    changes: list[Change]  # by the user, after that, and not made yet
    added: bool  # autograd added a new gradient to it before the engine took notice of the backward
    incoming: Tensor | None  # that gradient
    # Weakly: Python's garbage collector does not see through ``param.grad``, and the module would live for ever.
    norms: ref[GradNorms]
    noted: ref[GradChanges]

    # What is made of it is no sentinel.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, info: ParamInfo, norms: GradNorms, noted: GradChanges) -> GradSentinel:
        param = info.param
        wrapper: GradSentinel = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, info.shape, dtype=param.dtype, device=param.device, requires_grad=False
        )
        wrapper.info = info
        wrapper.norms, wrapper.noted = ref(norms), ref(noted)
        wrapper.zeroed = wrapper.added = False
        wrapper.incoming, wrapper.changes = None, []
        return wrapper

    def pop_incoming(self) -> Tensor | None:
        """The gradient that autograd added."""
        incoming, self.incoming = self.incoming, None
        return incoming

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # else Module.to, for the device where it is
            raise _refusal(self.info.fqn)

    def detach(self) -> Tensor:
        return self

    # torch refuses these of any subclass, in words that say nothing of gradients.
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(self.info.fqn)

    def tolist(self) -> Any:
        raise _refusal(self.info.fqn)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(self.info.fqn)

    def zeroed_by_user(self) -> None:
        self.zeroed, self.changes = True, []
        if (norms := self.norms()) is not None:
            norms.changed()

    def change(self, method: str, numbers: Sequence[Any]) -> None:
        """Note what users' code does to the gradient.

        Raises:
            RuntimeError: see :meth:`GradChanges.change_of`.
        """
        norms, noted = self.norms(), self.noted()
        if norms is None or noted is None:
            raise _refusal(self.info.fqn)
        self.changes.append(noted.change_of(self.info, method, numbers))
        norms.changed()

    def true_norm(self, norm_type: float, dtype: torch.dtype | None) -> Tensor:
        norms = self.norms()
        if norms is None:
            raise _refusal(self.info.fqn)
        return norms.norm(self.info, float(norm_type), dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the gradient of {self.info.fqn} is sharded; lightning_zero.gather(module, grads=True) shows it>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ZEROING:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for tensor in tensors:
                tensor.zeroed_by_user() if isinstance(tensor, GradSentinel) else tensor.zero_()
            return args[0] if func is _aten.zero_.default else None
        if func is _aten.add_.Tensor and isinstance(args[0], GradSentinel) and torch._C._current_graph_task_id() != -1:
            # Autograd accumulates, in a backward that the engine has not heard of yet. The reduced gradient is a shard
            # elsewhere, so nothing is added here: the gradient is kept for our hook, which runs right after.
            args[0].added = True
            args[0].incoming = args[1]
            return args[0]
        if func in _CHANGES and _are_numbers(args[1:]) and isinstance(args[0], GradSentinel):
            args[0].change(_CHANGES[func], args[1:])
            return args[0]
        if func in _CHANGES_OF_MANY and _are_numbers(args[1:]):
            for tensor in args[0]:
                name = _CHANGES_OF_MANY[func]
                tensor.change(name, args[1:]) if isinstance(tensor, GradSentinel) else getattr(tensor, name)(args[1])
            return None
        if func in (_NORM, _NORMS) and in_total_norm():
            norms = _deferred(func, *args, **(kwargs or {}))
            if norms is not None:
                return norms
        if func is _NORM and (found := _whole_norm(*args, **(kwargs or {}))) is not None:
            return found
        if func is _NORMS:
            return [torch.linalg.vector_norm(tensor, *args[1:], **(kwargs or {})) for tensor in args[0]]
        flat = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
        raise _refusal(next((a.info.fqn for a in flat if isinstance(a, GradSentinel)), "a parameter"))


def _whole_norm(
    sentinel: GradSentinel,
    norm_type: float = 2.0,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """The norm of all of a gradient; None where one of its rows or columns is asked for."""
    count = sentinel.dim()
    is_whole = not dim or {d % count for d in dim} == set(range(count))
    return sentinel.true_norm(norm_type, dtype) if is_whole and not keepdim else None


def _deferred(func: Any, tensors: Any, norm_type: float = 2.0, *more: Any, **kwargs: Any) -> Any:
    """The norms of gradients for ``get_total_norm``; None where they are not deferred."""
    if more or kwargs or not norm_type > 0.0:
        return None
    norms = [
        DeferredNorm([t.info], float(norm_type), t.norms) if isinstance(t, GradSentinel) else t.norm(norm_type)
        for t in (tensors if func is _NORMS else [tensors])
    ]
    return norms if func is _NORMS else norms[0]


def _are_numbers(args: Sequence[Any]) -> bool:
    return not any(isinstance(arg, Tensor) and (arg.dim() or type(arg) is not Tensor) for arg in args)


def _refusal(fqn: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {fqn} is sharded over the ranks: .grad gives its norm (param.grad.norm()), and can be "
        "multiplied, divided or clamped by a number in place, as by torch.nn.utils.clip_grad_norm_. Use "
        "lightning_zero.gather(module, grads=True) for its values and for anything else."
    )


class Sentinels:
    """The sentinels of one engine's parameters: each is made once and used again.

    Args:
        grads: the gradients that each bucket has received and reduced.
        norms: what sentinels ask for norms.
        noted: what makes changes out of what is done to sentinels.
    """

    def __init__(self, grads: Mapping[Bucket, BucketGrads], norms: GradNorms, noted: GradChanges) -> None:
        self._grads = grads
        self._norms, self._noted = norms, noted
        self._of: dict[int, GradSentinel] = {}
        self._aside = False

    @contextlib.contextmanager
    def set_aside(self, infos: Iterable[ParamInfo]) -> Iterator[None]:
        """Inside, ``param.grad`` is the caller's own, and says nothing of the gradients that there are."""
        kept = [(info.param, info.param.grad) for info in infos]
        self._aside = True
        try:
            for param, _ in kept:
                param.grad = None
            yield
        finally:
            self._aside = False
            for param, grad in kept:
                param.grad = grad

    def place_used(self) -> None:
        """Place sentinels after a backward, for parameters that were used in it or before it."""
        for bucket, grads in () if self._aside else self._grads.items():
            self.place(bucket.params[slot] for slot in grads.used)

    def place(self, infos: Iterable[ParamInfo]) -> None:
        """Place sentinels for these parameters: they have gradients, which may have changed."""
        self._norms.changed()
        for info in infos:
            sentinel = self._of.get(id(info.param))
            if sentinel is None or sentinel.dtype != info.param.dtype:
                sentinel = self._of[id(info.param)] = GradSentinel(info, self._norms, self._noted)
            sentinel.zeroed = sentinel.added = False
            sentinel.changes = []
            info.param.grad = sentinel

    def forget_zeroed(self) -> None:
        """Drop the gradients that the user has cleared since they were placed, and zero or change others as asked."""
        if self._aside:
            return
        for bucket, grads in self._grads.items():
            if grads.used or grads.written or bucket.grad_store.is_there:
                cleared, zeroed = self._changes(bucket)
                grads.forget(cleared)
                grads.zero(zeroed)
        self._make_changes()

    def _make_changes(self) -> None:
        while self._noted.any:
            rounds: dict[int, tuple[Change, dict[Bucket, set[int]]]] = {}
            for bucket in self._grads:
                for info in bucket.params:
                    sentinel = self._of.get(id(info.param))
                    if sentinel is not None and sentinel.changes:
                        change = sentinel.changes.pop(0)
                        rounds.setdefault(id(change), (change, {}))[1].setdefault(bucket, set()).add(info.slot)
            for change, wanted in rounds.values():
                self._noted.make(change, wanted)
            self._noted.any = bool(rounds)

    def used_params(self) -> set[int]:
        """Ids of the parameters that any rank gave a gradient since it was last cleared.

        Raises:
            RuntimeError: ``param.grad`` was assigned by hand.
        """
        return {
            id(info.param)
            for bucket, grads in self._grads.items()
            for info in bucket.params
            if _has_grad(info) and info.slot in grads.agreed
        }

    def _changes(self, bucket: Bucket) -> tuple[list[int], list[int]]:
        """Slots whose gradients the user has cleared, and slots whose gradients the user has zeroed, since placed."""
        cleared, zeroed = [], []
        is_plain = bucket.is_plain
        for info in bucket.params:
            sentinel = self._of.get(id(info.param))
            if is_plain and shows_whole(Place(bucket, info)):
                continue
            if sentinel is None or not (info.param.grad is sentinel or sentinel.added):
                cleared.append(info.slot)
            elif sentinel.zeroed:
                zeroed.append(info.slot)
                sentinel.zeroed = False
        return cleared, zeroed

    def remove(self, infos: Iterable[ParamInfo]) -> None:
        """Take the sentinels away, because a backward starts: autograd must find no gradient to add to."""
        for info in infos:
            if isinstance(info.param.grad, GradSentinel):
                info.param.grad = None
            if (sentinel := self._of.get(id(info.param))) is not None:
                sentinel.added = False


def _has_grad(info: ParamInfo) -> bool:
    """Whether a parameter has a gradient on this rank.

    Raises:
        RuntimeError: ``param.grad`` was assigned by hand.
    """
    grad = info.param.grad
    if grad is not None and not isinstance(grad, GradSentinel):
        raise RuntimeError(
            f"{info.fqn}.grad was assigned by hand. Gradients are sharded: change them inside "
            "`with lightning_zero.gather(module, grads=True):`."
        )
    return grad is not None
