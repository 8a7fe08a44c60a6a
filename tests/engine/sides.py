"""A plain replicated twin, and the engine behind its interface. The modules are in ``tests/models.py``.

The twin is what sharded training must equal: a copy of the module on every rank whose gradients are averaged over the
ranks as ``docs/architecture.md`` (Gradients) says. It uses no part of ``lightning_zero``.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_zero
from lightning_zero.engine.whole import state_dicts
from tests.models import Model

DEVICE = os.environ.get("LIGHTNING_ZERO_TEST_DEVICE", "cpu")
NORMS = (nn.LayerNorm, nn.BatchNorm1d)
TRUE = {"bf16_true": torch.bfloat16, "fp16_true": torch.float16, "fp64": torch.float64}
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def sgd(params: Any) -> Optimizer:
    params = list(params)
    # In bf16 the fused kernel of torch 2.13 is wrong on a CPU, which computes for emulated GPUs too.
    kernel = "fused" if all(p.dtype is torch.float32 for p in params) else "foreach"
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, **{kernel: True})


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True)


class Master:
    """What the twin's optimizer steps for one parameter: flat, and padded as the layout pads it; or ``shaped`` as it.

    torch's fused kernels compute the last elements of a tensor, those that fill no vector, with other roundings.
    """

    def __init__(self, param: nn.Parameter, *, shaped: bool = False) -> None:
        values = param.detach().clone(memory_format=torch.contiguous_format)
        if not shaped:
            values = F.pad(values.reshape(-1), (0, -param.numel() % 32))
        self.flat = nn.Parameter(values, requires_grad=param.requires_grad)
        self._shape = param.shape

    def _of_param(self, flat: Tensor) -> Tensor:
        return flat.view(-1)[: self._shape.numel()].view(self._shape)

    @property
    def value(self) -> Tensor:
        return self._of_param(self.flat.detach())

    @property
    def grad(self) -> Tensor | None:
        return None if self.flat.grad is None else self._of_param(self.flat.grad)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        self.flat.grad = None
        if grad is not None:
            self.flat.grad = torch.zeros_like(self.flat)
            self._of_param(self.flat.grad).copy_(grad)


class Twin:
    """A replicated copy of a module; its gradients are averaged over ranks, in rank order.

    Attributes:
        module: with compute parameters (rounded to bf16 where the engine would).
        grads: averaged gradients by parameter of ``module``; a parameter that no rank used has none.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: MakeOptimizer = adamw,
        precision: str = "fp32",
        each: bool = True,
        shaped: bool = False,
    ) -> None:
        """
        Args:
            each: gradients are averaged at every backward (stages 2 and 3), else in the last of a step.
            shaped: the optimizer steps tensors of the parameters' own shapes, as one process does.
        """
        self.module = copy.deepcopy(module).to(DEVICE)
        for param in self.module.parameters():
            dist.broadcast(param.data, 0)
        self.grads: dict[nn.Parameter, Tensor] = {}
        self.precision, self.synchronize, self.accumulates = precision, True, False
        self._each = each
        self._local: dict[nn.Parameter, Tensor] = {}
        self._reduce_dtype = {"bf16": torch.float32, "fp16": torch.float32, **TRUE}.get(precision)
        self._divides_sums = precision == "bf16"  # of gradients that are made in bf16, and added in fp32
        self.masters = _lower(self.module, precision, shaped=shaped)
        self.optimizer = optimizer([master.flat for master in self.masters.values()])

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        for param in self.masters:
            param.grad = None
        loss.backward(**kwargs)
        self._take()
        if self._each or self.synchronize:
            self._average()

    def _take(self) -> None:
        for param in self.masters:
            if param.grad is None:
                continue
            scale = 1.0 if self._is_divided_later(param) else 1 / dist.get_world_size()
            if param in self._local:
                self._local[param].add_(param.grad, alpha=scale)
            else:
                self._local[param] = param.grad.to(self._reduce_dtype or param.dtype) * scale
            param.grad = None

    def _is_divided_later(self, param: nn.Parameter) -> bool:
        return self._divides_sums and param.dtype is torch.bfloat16

    def _average(self) -> None:
        """A gradient that no rank has stays none."""
        params = list(self.masters)
        used = torch.tensor([param in self._local for param in params], dtype=torch.uint8, device=DEVICE)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        local = {
            param: self._local.pop(param, torch.zeros_like(param, dtype=self._reduce_dtype))
            for param, flag in zip(params, used.tolist(), strict=True)
            if flag
        }
        for param, total in _sum_over_ranks(local).items():
            if self._is_divided_later(param):
                total.mul_(1 / dist.get_world_size())
            self.grads[param] = self.grads[param] + total if param in self.grads else total

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronize, self.accumulates = False, True
        yield
        self.synchronize = True

    def show_grads(self) -> None:
        """Put the gradients where a plain optimizer and plain clipping look for them."""
        for param, master in self.masters.items():
            master.grad = self.grads.get(param)

    def step(self) -> None:
        self.show_grads()
        self._start_momentum()
        self.optimizer.step()
        with torch.no_grad():
            for param, master in self.masters.items():
                param.copy_(master.value)

    def _start_momentum(self) -> None:
        """torch's fused SGD steps all parameters with momentum or all without; DDP's users have the slower one."""
        if isinstance(self.optimizer, torch.optim.SGD):
            for master in self.masters.values():
                settings = self.optimizer.defaults
                if master.flat.grad is not None and settings["momentum"] and not settings["dampening"]:
                    self.optimizer.state[master.flat].setdefault("momentum_buffer", torch.zeros_like(master.flat))

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip, and keep what is clipped: the next ``step`` uses it."""
        self.show_grads()
        norm = torch.nn.utils.clip_grad_norm_([m.flat for m in self.masters.values()], max_norm, norm_type)
        self.grads = {p: m.grad for p, m in self.masters.items() if m.grad is not None}
        return norm

    def zero_grad(self) -> None:
        self.grads.clear()
        self._local.clear()


class Sharded:
    """The engine behind the interface of :class:`Twin`. Use it as a context: it gives the plain module back."""

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: MakeOptimizer = adamw,
        optimizer_settings: dict[str, Any] | None = None,
        plain: bool = False,
        **config: Any,
    ):
        """
        Args:
            optimizer_settings: of the group ``optimizer``.
            plain: call ``loss.backward()`` and let the engine notice, instead of telling it.
        """
        self.module = module
        config |= {} if optimizer_settings is None else {"optimizer": optimizer_settings}
        if str(config.get("stage", 3)) in ("0", "1", "2", "zero0", "zero1", "zero2"):
            config.pop("prefetch_bytes", None)  # of stage 3
        self.engine = lightning_zero.shard(module, device=DEVICE, **config)
        self.optimizer = optimizer(module.parameters())
        self.engine.add_optimizer(self.optimizer)
        self._plain = plain

    @property
    def precision(self) -> str:
        name = self.engine.config.precision.name
        return "fp32" if name is None else name.name

    def __enter__(self) -> Sharded:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:  # otherwise ranks may be at different places, and the pool is remade
            self.engine.release()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self._plain:
            loss.backward(**kwargs)
        else:
            self.engine.passes.backward(loss, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.passes.reducer.no_sync()

    def step(self) -> None:
        self.optimizer.step()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return lightning_zero.clip_grad_norm_(self.module, max_norm, norm_type)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


Side = Twin | Sharded
Work = Callable[[Any, int], Any]


def step_and_clear(*sides: Side) -> None:
    for side in sides:
        side.step()
        side.zero_grad()


def beside_twin(
    module: nn.Module | None = None,
    *,
    stage: int = 3,
    precision: str = "fp32",
    optimizer: MakeOptimizer = adamw,
    shaped: bool = False,
    **config: Any,
) -> tuple[Sharded, Twin]:
    """``module`` (or a :class:`Model`) sharded, and its twin."""
    if module is None:
        torch.manual_seed(3)
        module = Model()
    twin = Twin(module, optimizer=optimizer, precision=precision, each=stage >= 2, shaped=shaped)
    return Sharded(module, stage=stage, precision=precision, optimizer=optimizer, **config), twin


def _lower(module: nn.Module, precision: str, *, shaped: bool) -> dict[nn.Parameter, Master]:
    """Round the parameters of ``module`` as ``precision`` says; each with the master that the optimizer steps."""
    if precision in TRUE:
        module.to(TRUE[precision])
    if precision == "bf16":  # frozen parameters have no master: they rest as they are used
        for param in (p for p in module.parameters() if not p.requires_grad and p.is_floating_point()):
            param.data = param.data.to(torch.bfloat16).to(param.dtype)
    masters = {param: Master(param, shaped=shaped) for param in module.parameters()}
    if precision == "bf16":
        norms = [m for m in module.modules() if isinstance(m, NORMS)]
        kept = {id(p) for m in norms for p in m.parameters()}
        for norm in norms:
            norm.register_forward_hook(lambda _, args, output: output.to(args[0].dtype))
        for param in masters:
            if id(param) not in kept:
                param.data = param.data.to(torch.bfloat16)
    return masters


def _sum_over_ranks(local: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Sums of tensors that all ranks have, added in rank order. One message for each dtype."""
    sums: dict[nn.Parameter, Tensor] = {}
    for dtype in sorted({grad.dtype for grad in local.values()}, key=str):
        own = {param: grad for param, grad in local.items() if grad.dtype == dtype}
        flat = torch.cat([grad.reshape(-1) for grad in own.values()])
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        pieces = total.split([grad.numel() for grad in own.values()])
        sums.update({param: piece.view(param.shape) for param, piece in zip(own, pieces, strict=True)})
    return sums


@contextlib.contextmanager
def with_twin(build: Callable[[], nn.Module] = Model, **config: Any) -> Iterator[tuple[Sharded, Twin]]:
    """A module that is sharded inside, and a twin: both start with the values of rank 0."""
    torch.default_generator.manual_seed(3 + dist.get_rank())
    sharded, twin = beside_twin(build(), **config)
    with sharded:
        yield sharded, twin


def whole(side: Sharded) -> list[Any]:
    """Parameters and optimizer state, on every rank."""
    state = state_of(side)["state"]
    found: list[Any] = [(n, k, v) for n, entry in sorted(state.items()) for k, v in sorted(entry.items())]
    with lightning_zero.gather(side.module):
        return found + [(name, p.detach().clone()) for name, p in side.module.named_parameters()]


def state_of(side: Sharded) -> dict[str, Any]:
    """The whole state of the optimizer, on every rank."""
    return state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)


def load_state(side: Sharded, state: dict[str, Any]) -> None:
    state_dicts.load_optimizer_state(side.engine, side.optimizer, state)
