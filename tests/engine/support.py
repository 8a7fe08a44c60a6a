"""A plain replicated twin, and training a sharded module beside it. The modules are in ``tests/models.py``.

The twin is what sharded training must equal: a copy of the module on every rank whose gradients are averaged over the
ranks as ``docs/architecture.md`` (Gradients) says. It uses no part of ``lightning_zero``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_zero
from lightning_zero.engine.whole import state_dicts
from lightning_zero.ranks import watchdog
from tests.models import TOKENS as TOKENS
from tests.models import VOCABULARY as VOCABULARY
from tests.models import WIDTH as WIDTH
from tests.models import Block as Block
from tests.models import Model as Model
from tests.selection import pairwise_places

DEVICE = os.environ.get("LIGHTNING_ZERO_TEST_DEVICE", "cpu")
NORMS = (nn.LayerNorm, nn.BatchNorm1d)
TRUE = {"bf16_true": torch.bfloat16, "fp16_true": torch.float16, "fp64": torch.float64}


def tokens(step: int, micro: int = 0, *, rank: int | None = None, rows: int = 2) -> Tensor:
    """Another batch for every rank, step and micro-batch."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator).to(DEVICE)


def floats(step: int, *shape: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7 + 1000 * step + rank)).to(DEVICE)


def language_loss(module: nn.Module, batch: Tensor) -> Tensor:
    logits = module(batch)
    return F.cross_entropy(logits.reshape(-1, VOCABULARY).float(), batch.roll(1, 1).reshape(-1))


def loss_at(module: nn.Module, step: int, micro: int = 0, **of: Any) -> Tensor:
    """Of the batch of a step."""
    return language_loss(module, tokens(step, micro, **of))


def autocast(precision: str) -> Any:
    """What the precision plugin opens around forward and loss."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(DEVICE, dtype, enabled=dtype is not None, cache_enabled=False)


def sgd(params: Any) -> Optimizer:
    params = list(params)
    # The engine takes the fused kernel for fp32 masters by itself; in bf16 that of torch 2.13 is wrong on the CPU.
    fused = True if all(p.dtype is torch.float32 for p in params) else None
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, fused=fused)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True)


def places_posted_often() -> contextlib.AbstractContextManager[Any]:
    """Engines made inside tell the others at once where they are."""
    return mock.patch.object(watchdog, "EVERY_S", 0.05)


# -- two sides of a comparison ----------------------------------------------------------------------------------------

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


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
        return self.engine.passes.no_sync()

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


# -- comparing --------------------------------------------------------------------------------------------------------


class Seen:
    """What a twin holds now, by parameter: values of masters, and gradients."""

    def __init__(self, twin: Twin) -> None:
        self.values = [master.value.clone() for master in twin.masters.values()]
        self.grads = [None if param not in twin.grads else twin.grads[param].clone() for param in twin.masters]


def assert_same(
    sharded: Sharded, twin: Twin | Seen, *, grads: bool = False, tolerance: float = 0.0, what: str = ""
) -> None:
    """Master parameters (and gradients) are equal: to the bit, or within ``tolerance``."""
    seen = Seen(twin) if isinstance(twin, Twin) else twin
    with lightning_zero.gather(sharded.module, grads=grads):
        own_params = sharded.module.named_parameters()
        for (name, own), value, grad in zip(own_params, seen.values, seen.grads, strict=True):
            assert own.dtype == value.dtype or not own.requires_grad
            _assert_equal(own.detach().to(value.dtype), value, tolerance, f"{what}{name}")
            if grads:
                assert (own.grad is None) == (grad is None), f"{what}{name}: {own.grad} but twin {grad}"
                if own.grad is not None:
                    _assert_equal(own.grad, grad, tolerance, f"{what}gradient of {name}")


def _assert_equal(own: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    if tolerance:
        torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")
    elif not torch.equal(own, expected):
        gap = (own.double() - expected.double()).abs().max().item() if own.numel() else 0.0
        raise AssertionError(f"{what}: differs by {gap:.3g}\n{own}\n{expected}")


def assert_equal(found: Any, expected: Any, what: str = "", *, tolerance: float = 0.0) -> None:
    """Tensors in dicts and sequences are equal: dtypes, and values to the bit or within ``tolerance``."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, f"{what}: {found.dtype}, {expected.dtype}"
        _assert_equal(found, expected, tolerance, what)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{what}: {found.keys()}, {expected.keys()}"
        for key in expected:
            assert_equal(found[key], expected[key], f"{what}/{key}", tolerance=tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{what}/{place}", tolerance=tolerance)
    else:
        assert found == expected, f"{what}: {found}, {expected}"


def assert_absent(param: nn.Parameter) -> None:
    """The values of a sharded parameter are not here, and a read says so."""
    with pytest.raises(RuntimeError, match="is sharded.*gather"):
        param.sum()


ALL_STAGES = (0, 1, 2, 3)
OUTER_STAGES = (0, 3)
IN_STAGES = pytest.mark.parametrize("stages", [OUTER_STAGES, pytest.param((1, 2), marks=pytest.mark.full)], ids=str)


def check(
    build: Callable[[], nn.Module],
    work: Work,
    *,
    stage: int | Sequence[int] = 3,
    plain: bool | Sequence[bool] = False,
    steps: int = 2,
    precision: str = "fp32",
    optimizer: MakeOptimizer = adamw,
    tolerance: float = 0.0,
    **config: Any,
) -> None:
    """Train a twin, and beside it the module at each stage: results, gradients and parameters agree at each step.

    Args:
        work: forwards and backwards of one step, with ``side.module`` and ``side.backward``; what it returns is
            compared too.
        stage: one, or several.
        plain: whether the engine has to notice backwards; of several values each stage has one, and the last has all.
    """
    history = functools.partial(_twin_history, build, work, steps, optimizer=optimizer, precision=precision)
    expected: dict[bool, list[tuple[Any, Seen, Seen]]] = {}
    *stages, last = (stage,) if isinstance(stage, int) else stage
    noticed = (plain,) if isinstance(plain, bool) else plain
    for at, notices in [(at, noticed[at % len(noticed)]) for at in stages] + [(last, notices) for notices in noticed]:
        each = at >= 2
        if each not in expected:
            found, accumulates = history(each=each)
            expected.update({each: found} if accumulates else {False: found, True: found})
        try:
            torch.default_generator.manual_seed(3)
            sharded = Sharded(
                build(), stage=at, plain=notices, precision=precision, optimizer=optimizer, **copy.deepcopy(config)
            )
            with sharded:
                _assert_history(sharded, work, expected[each], tolerance)
        except BaseException as error:
            error.add_note(f"at stage {at}, where backwards are {'noticed' if notices else 'told'}")
            raise


def _twin_history(
    build: Callable[[], nn.Module], work: Work, steps: int, **settings: Any
) -> tuple[list[tuple[Any, Seen, Seen]], bool]:
    """Of each step of a twin the result, what there is after its work, and after the optimizer's step.

    Beside it: whether there was a backward in ``no_sync``, whose gradients stages average in different ways.
    """
    torch.default_generator.manual_seed(3)
    twin = Twin(build(), **settings)
    found = []
    for step in range(steps):
        with autocast(twin.precision):
            result = work(twin, step)
        result = result.detach().clone() if isinstance(result, Tensor) else result
        worked = Seen(twin)
        step_and_clear(twin)
        found.append((result, worked, Seen(twin)))
    return found, twin.accumulates


def _assert_history(sharded: Sharded, work: Work, expected: Sequence[tuple[Any, Seen, Seen]], tolerance: float) -> None:
    for step, (result, worked, stepped) in enumerate(expected):
        with autocast(sharded.precision):
            own = work(sharded, step)
        if isinstance(own, Tensor):
            _assert_equal(own.detach(), result, tolerance, f"step {step}: result")
        assert_same(sharded, worked, grads=True, tolerance=tolerance, what=f"step {step}, after backward: ")
        step_and_clear(sharded)
        if step == len(expected) - 1:  # before, a gather would bring parameters that a step has left behind up to date
            assert_same(sharded, stepped, tolerance=tolerance, what=f"step {step}, after the optimizer: ")


def scope(side: Side, key: str = "train") -> Any:
    return side.engine.step_scope(key) if isinstance(side, Sharded) else contextlib.nullcontext()


def mean_square_of(side: Side, *args: Any) -> Tensor:
    """One forward and backward."""
    loss = side.module(*args).float().square().mean()
    side.backward(loss)
    return loss


def mean_square(side: Side, step: int, *args: Any, shape: Sequence[int] = (4, WIDTH)) -> Tensor:
    """Of a module that maps numbers of ``shape``, and ``args``, to anything."""
    dtypes = {p.dtype for p in side.module.parameters() if p.is_floating_point()}
    x = floats(step, *shape).to(torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32)
    return mean_square_of(side, x, *args)


def language_work(side: Side, step: int) -> Tensor:
    loss = loss_at(side.module, step)
    side.backward(loss)
    return loss


def trained(steps: int = 1, **config: Any) -> tuple[Sharded, Twin]:
    """A sharded model and its twin after a few steps, and a backward whose gradients are still there."""
    sides = beside_twin(**config)
    for step in range(steps + 1):
        if step:
            step_and_clear(*sides)
        for side in sides:
            with autocast(side.precision):
                language_work(side, step)
    return sides


@contextlib.contextmanager
def with_twin(build: Callable[[], nn.Module] = Model, **config: Any) -> Iterator[tuple[Sharded, Twin]]:
    """A module that is sharded inside, and a twin: both start with the values of rank 0."""
    torch.default_generator.manual_seed(3 + dist.get_rank())
    sharded, twin = beside_twin(build(), **config)
    with sharded:
        yield sharded, twin


def train(side: Side, steps: Iterable[int], work: Work = language_work, *, clip: bool = False) -> list[Any]:
    """What ``work`` gives in each step, and norms."""
    found = []
    for step in steps:
        with autocast(side.precision):
            result = work(side, step)
        found.append(result.detach() if isinstance(result, Tensor) else result)
        if clip:
            found.append(side.clip(0.3))
        step_and_clear(side)
    return found


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


def accumulate(side: Side, step: int, micro_batches: int) -> Tensor:
    """Backwards of one step; all but the last inside ``no_sync``."""
    total = torch.zeros((), device=DEVICE)
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        with contextlib.nullcontext() if last else side.no_sync():
            loss = loss_at(side.module, step, micro) / micro_batches
            side.backward(loss)
        total = total + loss.detach()
    return total


# -- matrices of settings ---------------------------------------------------------------------------------------------


def pairwise_selection(cases: Sequence[Any]) -> list[Any]:
    """A few of ``cases`` (named tuples) in which every pair of settings occurs."""
    return [cases[place] for place in pairwise_places([case._asdict() for case in cases])]


def in_pairs(cases_of_all: Sequence[Any]) -> Any:
    """Parametrizes a test by its ``case``: pairs of settings always run, the full matrix where it is asked for."""
    selected = pairwise_selection(cases_of_all)
    return cases(selected, [case for case in cases_of_all if case not in selected])


def cases(selected: Sequence[Any], more: Sequence[Any]) -> Any:
    """Parametrizes a test by its ``case``; ``more`` are of the full tier."""
    given = [*selected, *(pytest.param(case, marks=pytest.mark.full) for case in more)]
    return pytest.mark.parametrize("case", given, ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
