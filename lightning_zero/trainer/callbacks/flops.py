"""Counts the floating-point operations of a training batch as it is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_zero.engine.vertical.chunked import is_trying

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FlopCount(TorchDispatchMode):
    """Inside, products of matrices, convolutions and attention are counted, by torch's formulas.

    torch's own ``FlopCounterMode`` puts hooks on modules and tensors beside this, which stay with a graph.

    Attributes:
        forward: of what no backward computes.
        backward: of the rest, recomputation among it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = self.backward = 0

    @property
    def of_model(self) -> int:
        """What the model needs: what is computed a second time in a backward (activation checkpointing) is left out.
        A backward takes twice its forward at most, and less where parameters are frozen."""
        return self.forward + min(self.backward, 2 * self.forward)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_trying():
            return result
        flops = _flops(func, args, kwargs or {}, result)
        if torch._C._current_graph_task_id() == -1:
            self.forward += flops
        else:
            self.backward += flops
        return result


def _flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    packet = getattr(func, "_overloadpacket", None)
    if packet is _CPU_ATTENTION:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if packet is _CPU_ATTENTION_BACKWARD:
        # grad_out, query, key, value; four products for two. The kernel's own product again is recomputation.
        return 2 * int(sdpa_flop_count(args[1].shape, args[2].shape, args[3].shape))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
