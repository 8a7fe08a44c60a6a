"""Count the FLOPs of a training batch while it is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_zero.sequence.check import is_trying

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FlopCount(TorchDispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention in the body, by torch's formulas.
    ``backward`` counts what autograd runs in backwards, including recomputation; ``forward`` counts all else.

    torch's own ``FlopCounterMode`` is not used, because it leaves hooks on modules and tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = self.backward = 0

    @property
    def of_model(self) -> int:
        """Return the model's FLOPs without recomputation, assuming that backwards need at most twice ``forward``."""
        return self.forward + min(self.backward, 2 * self.forward)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come here next
        result = func(*args, **(kwargs or {}))
        if is_trying() or any(issubclass(kind, FakeTensor) for kind in types):  # DTensor asks for shapes only
            return result
        flops = flops_of(func, args, kwargs or {}, result)
        if torch._C._current_graph_task_id() == -1:
            self.forward += flops
        else:
            self.backward += flops
        return result


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of one call of the operation ``func``, which returned ``result``; 0 if torch has no formula."""
    packet = getattr(func, "_overloadpacket", None)
    if packet is _CPU_ATTENTION:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if packet is _CPU_ATTENTION_BACKWARD:
        # args: grad_out, query, key, value. Four products for two; the kernel's fifth product is recomputation.
        return 2 * int(sdpa_flop_count(args[1].shape, args[2].shape, args[3].shape))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
