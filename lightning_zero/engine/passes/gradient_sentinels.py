"""Sentinels that stand in ``param.grad`` for gradients that are sharded, from a backward until the user clears them.

A sentinel in its place says that the parameter has a gradient. If it is gone (None) or zeroed at the next backward or
step, the user has zeroed the gradient, with or without ``set_to_none``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.passes.bucket_grads import BucketGrads
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.param_info import ParamInfo

_ZEROING = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}


class GradSentinel(Tensor):
    """Stands for the gradient of a sharded parameter in ``param.grad``, from a backward until it is cleared.

    It has the shape of the gradient and no values. Zeroing it is noticed by the engine; any other use raises.
    """

    fqn: str
    zeroed: bool  # by the user, since the last backward
    added: bool  # autograd added a new gradient to it before the engine took notice of the backward
    incoming: Tensor | None  # that gradient

    @staticmethod
    def __new__(cls, info: ParamInfo) -> GradSentinel:
        param = info.param
        wrapper: GradSentinel = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, info.shape, dtype=param.dtype, device=param.device, requires_grad=False
        )
        wrapper.fqn = info.fqn
        wrapper.zeroed = wrapper.added = False
        wrapper.incoming = None
        return wrapper

    def pop_incoming(self) -> Tensor | None:
        """The gradient that autograd added."""
        incoming, self.incoming = self.incoming, None
        return incoming

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the gradient of {self.fqn} is sharded; lightning_zero.grad_norm and lightning_zero.gather read it>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ZEROING:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for tensor in tensors:
                tensor.zeroed = True
            return args[0] if func is torch.ops.aten.zero_.default else None
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], GradSentinel):
            # Autograd accumulates, in a backward that the engine has not heard of yet. The reduced gradient is a shard
            # elsewhere, so nothing is added here: the gradient is kept for our hook, which runs right after.
            args[0].added = True
            args[0].incoming = args[1]
            return args[0]
        flat = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
        name = next((a.fqn for a in flat if isinstance(a, GradSentinel)), "a parameter")
        raise RuntimeError(
            f"the gradient of {name} is sharded over the ranks and cannot be read from .grad ({func}). Use "
            "lightning_zero.grad_norm(module) for norms, lightning_zero.clip_grad_norm_(module, max_norm) or "
            "Trainer(gradient_clip_val=) for clipping, lightning_zero.gather(module, grads=True) for values."
        )


class Sentinels:
    """The sentinels of one engine's parameters: each is made once and used again.

    Args:
        grads: the gradients that each bucket has received and reduced.
    """

    def __init__(self, grads: Mapping[Bucket, BucketGrads]) -> None:
        self._grads = grads
        self._of: dict[int, GradSentinel] = {}

    def place_used(self) -> None:
        """Place sentinels after a backward, for parameters that were used in it or before it."""
        for bucket, grads in self._grads.items():
            self.place(bucket.params[slot] for slot in grads.used)

    def place(self, infos: Iterable[ParamInfo]) -> None:
        """Place sentinels for these parameters: they have gradients."""
        for info in infos:
            sentinel = self._of.get(id(info.param))
            if sentinel is None or sentinel.dtype != info.param.dtype:
                sentinel = self._of[id(info.param)] = GradSentinel(info)
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
