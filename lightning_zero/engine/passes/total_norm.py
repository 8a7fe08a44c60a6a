"""``torch.nn.utils.get_total_norm`` of sharded gradients, which ``clip_grad_norm_`` calls: one message, no host wait.

torch takes the norm of each gradient, stacks them, and takes the norm of that. Norms of single gradients cost an
exchange of the parts of all, for which the host waits, and nobody wants them there. So inside of that function each is
a :class:`DeferredNorm`; the norm of their stack is found on the shards, as by ``lightning_zero.clip_grad_norm_``, whose
bits it has. Whatever else is asked of one gets the true norms of single gradients, and so does all other code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_map_only

from lightning_zero.engine.passes.grad_norms import GradNorms
from lightning_zero.engine.units.param import ParamInfo

_aten = torch.ops.aten
_TOTAL_NORM = inspect.unwrap(get_total_norm).__code__
_ITS_OWN = {_TOTAL_NORM, *(const for const in _TOTAL_NORM.co_consts if inspect.iscode(const))}  # with comprehensions


def in_total_norm() -> bool:
    """Whether the caller of this function's caller is ``get_total_norm``: by itself, not by what it is called from."""
    return sys._getframe(2).f_code in _ITS_OWN


class DeferredNorm(Tensor):
    """The norms of some gradients, 0-d or stacked, that nobody has looked at yet."""

    infos: Sequence[ParamInfo]
    norm_type: float
    norms: ref[GradNorms]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, infos: Sequence[ParamInfo], norm_type: float, norms: ref[GradNorms], *shape: int) -> DeferredNorm:
        found = norms()
        assert found is not None, "its module is gone"
        wrapper: DeferredNorm = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=found.dtype_of(infos[0]), device=infos[0].param.device, requires_grad=False
        )
        wrapper.infos, wrapper.norm_type, wrapper.norms = infos, norm_type, norms
        return wrapper

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.each())

    def each(self) -> Tensor:
        """The norm of each gradient: of the shape of this tensor."""
        norms = self.norms()
        assert norms is not None, "its module is gone"
        found = [norms.norm(info, self.norm_type, self.dtype) for info in self.infos]
        return torch.stack(found) if self.dim() else found[0]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten.stack.default and len(args) == 1:
            if (stacked := _stacked(args[0])) is not None:
                return stacked
        elif func is _aten.linalg_vector_norm.default and len(args) <= 2 and not kwargs:
            own, norm_type = args[0], args[1] if len(args) > 1 else 2.0
            norms = own.norms()
            if float(norm_type) == own.norm_type and norms is not None:
                total = norms.total_shown(own.infos, own.norm_type)
                if total is not None:
                    return total
        args, kwargs = tree_map_only(DeferredNorm, DeferredNorm.each, (args, kwargs or {}))
        return func(*args, **kwargs)


def _stacked(norms: Sequence[Tensor]) -> DeferredNorm | None:
    """The stack of 0-d norms, deferred too; None where they do not belong together."""
    deferred = [norm for norm in norms if isinstance(norm, DeferredNorm)]
    kinds = {(id(norm.norms()), norm.norm_type, norm.dim()) for norm in deferred}
    if len(deferred) < len(norms) or len(kinds) > 1 or deferred[0].dim():
        return None
    infos = [norm.infos[0] for norm in deferred]
    return DeferredNorm(infos, deferred[0].norm_type, deferred[0].norms, len(infos))
