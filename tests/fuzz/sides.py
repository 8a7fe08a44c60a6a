"""The two sides of a comparison: a plain twin, replicated, and the engine.

The twin is torch and nothing else: a module on every rank, whose gradients are averaged over the ranks after every
backward. It is the reference under fp32 and fp64. In lower precision, where orders of additions show, the reference is
the engine at stage 0, which replicates everything.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

import lightning_zero
from lightning_zero.engine import Engine, engines
from lightning_zero.engine.whole import state_dicts
from tests.engine.test_ranks import LateTransport
from tests.fuzz.models import Tree, build
from tests.fuzz.programs import Program, Settings

TRUE = {"bf16_true": torch.bfloat16, "fp16_true": torch.float16, "fp64": torch.float64}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 256.0  # under fp16


class NormBySize(Optimizer):
    """Couples matrices of 20 to 200 elements by a norm over them, which no made-up shape of the trial has."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        listed = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        coupled = {p: p.grad.abs().norm() for p, _ in listed if p.dim() == 2 and 20 <= p.numel() <= 200}
        for p, rate in listed:
            p.sub_(p.grad / (torch.stack([*coupled.values()]).norm() + 1) if p in coupled else p.grad, alpha=rate)
        return loss


# Where a gradient is zero but for rounding, Adam and its like would make a whole step of the rounding: a larger eps.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "plain sgd": partial(torch.optim.SGD, lr=0.05),
    "damped sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.5, dampening=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-2),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, eps=1e-2, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, eps=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-1, momentum=0.5, centered=True),
    "norm by size": NormBySize,
    "nadam": partial(torch.optim.NAdam, lr=0.01, eps=1e-2),
}


def dtype_of(precision: str) -> torch.dtype:
    """Of the input of a model."""
    return TRUE.get(precision, torch.float32)


class Side:
    """What the two have in common. Both have the methods below, with what they do under a program's actions:

    - ``scope``: around a step; ``shown``: inside, parameters (default: all) hold whole values, and their gradients if
      ``grads``.
    - ``backward``, ``step``, ``scale``, ``clip``, ``zero_grad``, ``save``, ``load``, ``sync_buffers`` and ``close``.
    - ``reshard`` and ``renew``, with the same optimizer or another one.

    Attributes:
        module: as it is used in forwards.
        reduces: gradients rest sharded, so ``no_sync`` reduces them all the same.
    """

    module: Tree
    optimizer: Optimizer

    def __init__(self, program: Program) -> None:
        self.program = program
        self._old: Optimizer | None = None
        self.reduces = program.settings.stage >= 2

    def make_optimizer(self) -> Optimizer:
        """Of the parameters but the last few, which are left for a group of their own."""
        params = self.trainable()
        return OPTIMIZERS[self.program.optimizer](params[: max(1, len(params) - self.program.left_out)])

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.is_floating_point() or p.is_complex()]

    def stepped(self) -> list[nn.Parameter]:
        """The parameters of the optimizer."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def left_out(self) -> list[nn.Parameter]:
        known = set(map(id, self.stepped()))
        return [param for param in self.trainable() if id(param) not in known]

    def local(self) -> contextlib.AbstractContextManager[None]:
        """Around what a rank computes for itself, and torch may refuse on that rank alone."""
        return contextlib.nullcontext()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def renew(self, how: str) -> None:
        if how == "new":
            self._old, self.optimizer = self.optimizer, _like(self.optimizer, self.optimizer.param_groups)
        elif how == "other":
            kind = "adamw" if isinstance(self.optimizer, torch.optim.SGD) else "sgd"
            self._old, self.optimizer = self.optimizer, OPTIMIZERS[kind](self.stepped())
        elif how == "old" and self._old is not None:
            self._old, self.optimizer = self.optimizer, self._old

    def forget_grads(self) -> None:
        """Of all parameters, those that no optimizer has too."""
        for param in self.module.parameters():
            param.grad = None


class Twin(Side):
    """Plain torch, with the averages of gradients that a replicated module gets."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.module = build(program.model, rank=dist.get_rank())
        if (true := TRUE.get(program.settings.precision)) is not None:
            self.module._apply(lambda t: t.to(true) if t.is_floating_point() else t)
        self.optimizer = self.make_optimizer()
        self._local: dict[nn.Parameter, Tensor] = {}  # not averaged yet

    def scope(self, *, evaluation: bool = False) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Ends on all ranks where it does on one, or the others would wait for it in the next average."""
        failed = True
        try:
            yield
            failed = False
        finally:
            if self.program.ranks_differ and max_over_ranks([failed])[0] and not failed:
                raise RuntimeError("torch has refused this on another rank")

    @contextlib.contextmanager
    def shown(
        self, params: list[nn.Parameter] | None = None, *, from_rank: int | None = None, grads: bool = False
    ) -> Iterator[None]:
        yield
        if from_rank is not None:
            for param in self.module.parameters():
                dist.broadcast(_flat(param.data), from_rank)

    def backward(self, loss: Tensor, *, no_sync: bool = False, **kwargs: Any) -> None:
        params = list(self.module.parameters())
        before = {param: param.grad for param in params}
        for param in params:
            param.grad = None
        with self.local():
            if loss.requires_grad:
                loss.backward(**kwargs)
        for param in params:
            if param.grad is not None:
                known = self._local.get(param)
                self._local[param] = param.grad if known is None else known + param.grad
            param.grad = before[param]
        noticed = loss.requires_grad or not self.program.settings.plain
        if noticed and (self.reduces or not no_sync):
            self._average(params)

    def _average(self, params: list[nn.Parameter]) -> None:
        """A parameter that no rank has used keeps what it has."""
        used = max_over_ranks([param in self._local for param in params])
        for param, is_used in zip(params, used, strict=True):
            if is_used:
                grad = self._local.get(param, torch.zeros_like(param)).detach().clone() / dist.get_world_size()
                dist.all_reduce(_flat(grad))
                param.grad = grad if param.grad is None else param.grad + grad
        self._local.clear()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            closure()
        if self._local:
            raise RuntimeError("gradients of backwards inside no_sync() have not been reduced")
        grads = [param.grad for param in self.stepped() if param.grad is not None]
        if not self.program.settings.skips or all(grad.isfinite().all() for grad in grads):
            self.optimizer.step()

    def scale(self, factor: float) -> None:
        for param in self.stepped():
            if param.grad is not None:
                param.grad.mul_(factor)

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for param in self.stepped():
            if self._local.pop(param, None) is not None and param.grad is None:
                param.grad = torch.zeros_like(param)
        super().zero_grad(set_to_none=set_to_none)

    def forget_grads(self) -> None:
        super().forget_grads()
        self._local.clear()

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        state = self.optimizer.state_dict()
        started = {key: entry for key, entry in state["state"].items() if not _is_fresh(entry)}
        return copy.deepcopy((self.module.state_dict(), {**state, "state": started}))

    def load(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        module, optimizer = copy.deepcopy(saved)
        self.module.load_state_dict(module)
        self.optimizer.load_state_dict(optimizer)

    def sync_buffers(self) -> None:
        if dist.get_world_size() == 1:  # nothing is written
            return
        for buffer in self.module.buffers():
            dist.broadcast(_flat(buffer), 0)
            increment_version(buffer)  # which gloo does not, and DDP does

    def reshard(self, settings: Settings, optimizer: str) -> None:
        self.forget_grads()
        self.sync_buffers()  # sharding does
        self.reduces = settings.stage >= 2
        if optimizer == "new":
            self.optimizer = _like(self.optimizer, self.optimizer.param_groups)

    def close(self) -> None:
        pass


class Ours(Side):
    """The engine."""

    def __init__(self, program: Program, folder: str, *, stall_timeout_s: float, reference: bool = False) -> None:
        """
        Args:
            folder: for files.
            reference: stage 0 and nothing else, whatever the settings are.
        """
        super().__init__(program)
        self._folder, self._stall_timeout_s, self._reference = folder, stall_timeout_s, reference
        self.module = build(program.model, seed=dist.get_rank(), rank=dist.get_rank())  # rank 0's values count
        self.engine = self._shard(program.settings)
        self.optimizer = self.make_optimizer()
        self.engine.add_optimizer(self.optimizer)

    def _shard(self, settings: Settings) -> Engine:
        wanted: dict[str, Any] = {"stage": 0, "precision": settings.precision}
        if not self._reference:
            wanted = arguments(self.program, settings, self._folder)
        if settings.skips:
            wanted["optimizer"] = {"skip_nonfinite": 100}
        engine = lightning_zero.shard(self.module, device="cpu", stall_timeout_s=self._stall_timeout_s, **wanted)
        engine.passes.between.begin_run()
        if settings.precision == "fp16":
            engine.passes.reducer.set_loss_scale(LOSS_SCALE)
        if settings.lag and not self._reference and engine.comm.world_size > 1:
            chance = random.Random(dist.get_rank())
            engine.comm._transport = LateTransport(engine.comm._transport, chance, settings.lag / 1000)
        return engine

    def scope(self, *, evaluation: bool = False) -> contextlib.AbstractContextManager[None]:
        return self.engine.step_scope("validation" if evaluation else "train", evaluation=evaluation)

    def shown(
        self, params: list[nn.Parameter] | None = None, *, from_rank: int | None = None, grads: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        return lightning_zero.gather(self.module if params is None else params, from_rank=from_rank, grads=grads)

    def backward(self, loss: Tensor, *, no_sync: bool = False, **kwargs: Any) -> None:
        if self.program.settings.precision == "fp16":
            loss = loss * LOSS_SCALE
        holds_back = no_sync and not (self._reference and self.reduces)
        with self.engine.passes.reducer.no_sync() if holds_back else contextlib.nullcontext():
            # Told of it, also where the loss of this rank leads nowhere.
            told = contextlib.nullcontext() if self.program.settings.plain else self.engine.passes.backward_scope()
            with told:
                if loss.requires_grad:
                    loss.backward(**kwargs)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.optimizer.step(*() if closure is None else (closure,))

    def scale(self, factor: float) -> None:
        places = [self.engine.units.place_of(param) for param in self.stepped()]
        self.engine.passes.sharded_grads.scale(places, torch.tensor(factor, dtype=torch.float64))

    def clip(self, max_norm: float) -> Tensor:
        if self.engine.passes.reducer.unreduced:  # torch's is refused then, where gradients are shards too
            return lightning_zero.clip_grad_norm_(self.module, max_norm)
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        state = self.engine.state_dict(only_rank_0=False)
        return state, state_dicts.optimizer_state(self.engine, self.optimizer, only_rank_0=False)

    def load(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        module, optimizer = copy.deepcopy(saved)
        self.engine.load_state_dict(module)
        state_dicts.load_optimizer_state(self.engine, self.optimizer, optimizer)

    def sync_buffers(self) -> None:
        self.engine.passes.buffers.sync()

    def renew(self, how: str) -> None:
        super().renew(how)
        self.engine.renew_optimizers(lambda: [self.optimizer])

    def reshard(self, settings: Settings, optimizer: str) -> None:
        state = state_dicts.optimizer_state(self.engine, self.optimizer, only_rank_0=False)
        groups = list(map(dict, self.optimizer.param_groups))
        self.engine.release()
        for module in self.module.modules():
            assert not {"forward", "_apply"} & vars(module).keys(), f"release() has left something on {module}"
        self.reduces = settings.stage >= 2
        self.engine = self._shard(settings)
        if optimizer != "same":
            self.optimizer = _like(self.optimizer, groups)
        self.engine.add_optimizer(self.optimizer)
        if optimizer == "loaded":
            state_dicts.load_optimizer_state(self.engine, self.optimizer, state)

    def close(self) -> None:
        self.engine.release()
        assert self.engine not in engines(), "the engine is still there after release()"


def arguments(program: Program, settings: Settings, folder: str) -> dict[str, Any]:
    """Of ``shard``."""
    found: dict[str, Any] = {
        "stage": settings.stage,
        "precision": settings.precision,
        "offload": {"name": settings.offload},
        "unit": {"classes": list(settings.classes)} | ({"max_bytes": settings.max_bytes} if settings.max_bytes else {}),
        "activation_checkpointing": settings.recompute,
        "reduce_bucket_bytes": settings.reduce_bucket_bytes,
    }
    if "nvme" in settings.offload or settings.offload == "auto":
        found["offload"]["nvme_path"] = folder
    if settings.offload == "auto":  # models of these sizes lie on all three tiers
        found["offload"] |= {"device_budget": 1500, "host_budget": 200_000}
    if settings.stage == 3:
        found["dynamic_graph"] = settings.dynamic_graph or program.ranks_differ
        found |= {name: getattr(settings, name) for name in ("keep_gathered_bytes", "prefetch_bytes")}
    if settings.ranks_per_node:
        found["hybrid_shard"] = "node"
        found["node"] = f"node {dist.get_rank() // settings.ranks_per_node}"
    return found


def _flat(tensor: Tensor) -> Tensor:
    """What collectives take: contiguous, and real."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def max_over_ranks(flags: list[bool]) -> list[bool]:
    found = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.bool().tolist()


def _like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new one of the same kind and defaults, and no state."""
    made = type(optimizer)(list(map(dict, groups)))
    made.defaults = dict(optimizer.defaults)
    return made


def _is_fresh(entry: dict[str, Any]) -> bool:
    """Whether a state is one that no step has used: Adagrad makes it when it is built."""
    return "step" in entry and float(entry["step"]) == 0.0
