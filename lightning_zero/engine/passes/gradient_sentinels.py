"""Sentinels that stand in ``param.grad`` for gradients that are sharded, from a backward until the user clears them.

A sentinel in its place says that the parameter has a gradient. If it is gone (None) or zeroed at the next backward or
step, the user has zeroed the gradient, with or without ``set_to_none``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_zero.engine.passes.bucket_grads import BucketGrads
from lightning_zero.engine.passes.grad_norms import GradNorms
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.param_info import ParamInfo

_aten = torch.ops.aten
_ZEROING = {_aten.zero_.default, _aten._foreach_zero_.default}
_NORM, _NORMS = _aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar


class GradSentinel(Tensor):
    """Stands for the gradient of a sharded parameter in ``param.grad``, from a backward until it is cleared.

    It has the shape of the gradient and no values. Zeroing it is noticed by the engine, and norms of all of it are true
    ones (``norm``, ``torch.linalg.vector_norm``); any other use raises.
    """

    info: ParamInfo
    zeroed: bool  # by the user, since the last backward
    added: bool  # autograd added a new gradient to it before the engine took notice of the backward
    incoming: Tensor | None  # that gradient
    # Weakly: Python's garbage collector does not see through ``param.grad``, and the module would live for ever.
    norms: ref[GradNorms]

    # What is made of it is no sentinel.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, info: ParamInfo, norms: GradNorms) -> GradSentinel:
        param = info.param
        wrapper: GradSentinel = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, info.shape, dtype=param.dtype, device=param.device, requires_grad=False
        )
        wrapper.info = info
        wrapper.norms = ref(norms)
        wrapper.zeroed = wrapper.added = False
        wrapper.incoming = None
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
        self.zeroed = True
        if (norms := self.norms()) is not None:
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
        if func is _aten.add_.Tensor and isinstance(args[0], GradSentinel):
            # Autograd accumulates, in a backward that the engine has not heard of yet. The reduced gradient is a shard
            # elsewhere, so nothing is added here: the gradient is kept for our hook, which runs right after.
            args[0].added = True
            args[0].incoming = args[1]
            return args[0]
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


def _refusal(fqn: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {fqn} is sharded over the ranks, and .grad gives its norm only (param.grad.norm()). Use "
        "lightning_zero.grad_norm(module) for the norm of all, lightning_zero.clip_grad_norm_(module, max_norm) or "
        "Trainer(gradient_clip_val=) for clipping, lightning_zero.gather(module, grads=True) for values."
    )


class Sentinels:
    """The sentinels of one engine's parameters: each is made once and used again.

    Args:
        grads: the gradients that each bucket has received and reduced.
        norms: what sentinels ask for norms.
    """

    def __init__(self, grads: Mapping[Bucket, BucketGrads], norms: GradNorms) -> None:
        self._grads = grads
        self._norms = norms
        self._of: dict[int, GradSentinel] = {}

    def place_used(self) -> None:
        """Place sentinels after a backward, for parameters that were used in it or before it."""
        for bucket, grads in self._grads.items():
            self.place(bucket.params[slot] for slot in grads.used)

    def place(self, infos: Iterable[ParamInfo]) -> None:
        """Place sentinels for these parameters: they have gradients, which may have changed."""
        self._norms.changed()
        for info in infos:
            sentinel = self._of.get(id(info.param))
            if sentinel is None or sentinel.dtype != info.param.dtype:
                sentinel = self._of[id(info.param)] = GradSentinel(info, self._norms)
            sentinel.zeroed = sentinel.added = False
            info.param.grad = sentinel

    def forget_zeroed(self) -> None:
        """Drop the gradients that the user has cleared, and zero those zeroed, since they were placed."""
        for bucket, grads in self._grads.items():
            if grads.used or grads.written or bucket.grad_store.is_there:
                cleared, zeroed = self._changes(bucket)
                grads.forget(cleared)
                grads.zero(zeroed)

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
        for info in bucket.params:
            sentinel = self._of.get(id(info.param))
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
