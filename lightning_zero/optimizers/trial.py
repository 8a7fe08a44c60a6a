"""A copy of an optimizer, with the user's settings, that steps small tensors.

Neither the optimizer nor random numbers of others are changed, and no message is sent.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.config import ConfigError
from lightning_zero.optimizers.known import without_hooks
from lightning_zero.optimizers.state_trees import StateShape, leaves_of, same, shape_of
from lightning_zero.optimizers.windowed import HOOKS, PLAIN, StepInParts, keep

# Of small tensors: all unequal, so that a state's sides tell where they come from, and large enough that a product of
# matrices and the same one inside of a batch differ in their roundings.
SIDES = (11, 19, 3, 5, 2)
# Of the gradients, step by step: some classes do nothing but look at the first, some act at limits (a largest norm) or
# from the tenth step on.
SCALES = (1.0, 1.0, 1e3, 1e-2, 1.0, 1.0, 1.0, 10.0, 1.0, 1.0, 1.0, 1.0)
FEWEST, MOST_SMALL = 4, 400  # steps at least; steps of small tensors in a trial
MOST_DEEP = 4  # of objects that hold objects, in attributes of an optimizer


def step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """The step of its class, without the hooks of torch around it."""
    step: Callable[..., Any] = without_hooks(type(optimizer).step)
    return step


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether its step cannot do without a closure, which it calls itself."""
    parameters = list(inspect.signature(step_of(optimizer)).parameters.values())[1:2]
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


@contextlib.contextmanager
def trying(name: str, device: torch.device) -> Iterator[None]:
    """Around steps of small tensors of the class ``name``."""
    with _random_numbers_kept(device), torch.inference_mode(False), torch.no_grad(), _NoMessages(name):
        yield


@contextlib.contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Put the generators of all libraries back, which a step may draw from."""
    accelerators = [] if device.type == "cpu" else [device.index or 0]
    before = random.getstate()
    of_numpy = numpy.random.get_state() if (numpy := sys.modules.get("numpy")) is not None else None
    try:
        with torch.random.fork_rng(devices=accelerators, device_type=device.type if accelerators else "cuda"):
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


class _NoMessages(TorchDispatchMode):
    """Refuses collectives of torch.distributed: ranks will step other tensors, and so send other messages."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ConfigError(
                f"zero.optimizer.whole: the step of {self._name} sends messages between ranks itself ({func}). Ranks "
                "step different tensors here, and their messages would not meet. Use the version of it that is for "
                "one process: dividing the work is done here."
            )
        return func(*args, **(kwargs or {}))


class _Small(NamedTuple):
    """A small tensor in the place of parameters."""

    group: int
    place: int  # in its param group
    tensor: nn.Parameter


class Trial:
    """A copy of an optimizer, for small tensors.

    Args:
        slices: that each is cut into, flat; 0: none is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        device: torch.device,
        *,
        slices: int = 0,
    ) -> None:
        self._generator = torch.Generator().manual_seed(20)
        self._random = torch.Generator().manual_seed(21)
        self._small: list[_Small] = []
        for group, listed in enumerate(optimizer.param_groups):
            kinds: dict[tuple[int, torch.dtype, str], nn.Parameter] = {}
            for param in listed["params"]:
                kinds.setdefault((param.dim(), dtype_of(param), _plain_part(optimizer, param)), param)
            for (_, dtype, _), param in kinds.items():
                self._small += self._make(group, param, dtype, device)
        self._slices = [_cut(s.tensor, slices) if slices else [s.tensor] for s in self._small]
        self.optimizer = self._copy(optimizer)

    def _make(self, group: int, param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> Iterator[_Small]:
        sides = tuple(SIDES[n % len(SIDES)] for n in range(param.dim()))
        # Two of one shape, which some step as one batch, and another.
        for shape in (sides, sides, sides[::-1] if len(sides) > 1 else tuple(2 * n for n in sides)):
            values = torch.randn(shape, generator=self._generator).to(device, dtype)
            small = nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())
            small.__dict__.update(param.__dict__)
            place = sum(other.group == group for other in self._small)
            yield _Small(group, place, small)

    def _copy(self, optimizer: Optimizer) -> Optimizer:
        groups: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        # What is held twice is one in the copy too: a wrapper has the groups and the state of what it wraps.
        memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict), id(optimizer.param_groups): groups}
        for number, (listed, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            own = [
                tensor
                for s, slices in zip(self._small, self._slices, strict=True)
                if s.group == number
                for tensor in slices
            ]
            alike = {s.tensor.dim(): s.tensor for s in reversed(self._small) if s.group == number}
            memo |= {id(param): alike[param.dim()] for param in listed["params"]}
            memo |= {id(listed): group, id(listed["params"]): own}
        for listed, group in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: _copied(value, memo) for name, value in listed.items()})
            if "param_names" in group:
                group["param_names"] = [f"tensor{n}" for n in range(len(group["params"]))]
        made: Optimizer = _copied(optimizer, memo)
        self._take_state(optimizer, made)
        return made

    def _take_state(self, optimizer: Optimizer, made: Optimizer) -> None:
        """State that the class has made when it was built."""
        for group, listed in enumerate(optimizer.param_groups):
            for param in listed["params"]:
                if not (state := optimizer.state.get(param)):
                    continue
                for small in self._small:
                    same = small.group == group and small.tensor.dim() == param.dim()
                    if same and not made.state[small.tensor]:
                        made.state[small.tensor] = {n: _shrunk(v, param, small.tensor) for n, v in state.items()}

    def run(self, *, in_parts: bool = False, hides_empty: bool = False) -> None:
        step = step_of(self.optimizer)
        for number, scale in enumerate(SCALES[: max(FEWEST, MOST_SMALL // max(1, len(self._small)))]):
            self.give_gradients(scale)
            arguments = [_closure] if needs_closure(self.optimizer) else []
            if not in_parts:
                torch.default_generator.manual_seed(number)
                step(self.optimizer, *arguments)
                continue
            with StepInParts(self.optimizer, step, hides_empty=hides_empty) as parts:
                for part in filter(None, self._parts()):
                    # What draws numbers draws others for a tensor that comes later.
                    torch.default_generator.manual_seed(number)
                    lists: list[list[tuple[int, Tensor]]] = [[] for _ in self.optimizer.param_groups]
                    for small in part:
                        lists[small.group].append((small.place, small.tensor))
                    parts.call(lists, *arguments)
            keep(self.optimizer, [parts.outcome])

    def give_gradients(self, scale: float) -> None:
        for small, slices in zip(self._small, self._slices, strict=True):
            most = 10.0 if small.tensor.dtype is torch.float16 else scale  # squares have to be numbers there
            grad = min(scale, most) * torch.randn(small.tensor.shape, generator=self._random)
            grad = grad.to(small.tensor.device, small.tensor.dtype)
            cut = [grad] if len(slices) == 1 else grad.flatten().split([s.numel() for s in slices])
            for tensor, part in zip(slices, cut, strict=True):
                tensor.grad = part.clone()

    def values(self) -> list[Tensor]:
        """Of each small tensor, flat."""
        return [torch.cat([tensor.detach().flatten() for tensor in slices]) for slices in self._slices]

    def _parts(self) -> Sequence[Sequence[_Small]]:
        """Tensors of all groups, and then those of some, so that other groups are empty, as they are in windows."""
        even = self._small[::2]
        last = self._small[-1].group if self._small else 0
        return self._small[1::2], [s for s in even if s.group != last], [s for s in even if s.group == last]

    def steps_all(self) -> bool:
        """Whether a step without gradients changes anything of tensors."""
        before = copy.deepcopy(self._of_tensors())
        for small in self._small:
            small.tensor.grad = None
        try:
            step_of(self.optimizer)(self.optimizer, *([_closure] if needs_closure(self.optimizer) else []))
        except Exception:  # it wants gradients
            return False
        return not same(before, self._of_tensors())

    def asks_again(self) -> bool:
        """Whether a step does more with a closure than to call it before all else."""
        calls: list[bool] = []
        before = [small.tensor.detach().clone() for small in self._small]

        def closure() -> Tensor:
            calls.append(same(before, [small.tensor.detach() for small in self._small]))
            for small in self._small:
                small.tensor.grad = torch.ones_like(small.tensor)
            return _closure()

        try:
            step_of(self.optimizer)(self.optimizer, closure)
        except Exception:  # it has no closure
            return False
        return len(calls) > 1 or not all(calls)

    def result(self) -> list[Any]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return [groups, _noted(self.optimizer, set()), self._of_tensors()]

    def _of_tensors(self) -> list[Any]:
        state = self.optimizer.state
        return [(s.tensor.detach(), dict(state.get(s.tensor, {}))) for s in self._small]

    def states(self) -> dict[tuple[int, int, torch.dtype], list[StateShape]]:
        found: dict[tuple[int, int, torch.dtype], dict[str, StateShape]] = {}
        for small in self._small:
            shapes = found.setdefault((small.group, small.tensor.dim(), small.tensor.dtype), {})
            for name, leaf in leaves_of(self.optimizer.state.get(small.tensor, {})):
                shapes.setdefault(name, shape_of(name, leaf, small.tensor))
        return {key: list(shapes.values()) for key, shapes in found.items()}


def _cut(tensor: nn.Parameter, slices: int) -> list[nn.Parameter]:
    flat = tensor.detach().flatten()
    made = [nn.Parameter(part.clone(), requires_grad=tensor.requires_grad) for part in flat.chunk(slices)]
    for part in made:
        part.__dict__.update(tensor.__dict__)
    return made


def _closure() -> Tensor:
    return torch.zeros(())


def _plain_part(optimizer: Optimizer, param: nn.Parameter) -> str:
    """What the class has noted of a parameter, by which it may step it otherwise."""
    state = optimizer.state.get(param, {})
    plain = {n: v for n, v in state.items() if not isinstance(v, Tensor)}
    return repr((sorted(plain.items(), key=str), sorted(param.__dict__.items(), key=str)))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Optimizer) and id(value) not in memo:  # a copy by torch lacks the attributes of its class
        made = memo[id(value)] = object.__new__(type(value))
        for name, held in value.__dict__.items():
            # A module holds parameters that nothing takes the place of; a ``step`` is of a scheduler, which counts.
            if name != "step" and not isinstance(held, nn.Module):
                made.__dict__[name] = type(held)() if name in HOOKS else _copied(held, memo)
        return made
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # it is shared then
        return value


def _noted(holder: Any, seen: set[int], depth: int = 0) -> dict[str, Any]:
    """What an object notes in attributes, and its own objects in theirs: plain values and tensors, to compare."""
    seen.add(id(holder))
    skipped = ("state", "param_groups", "defaults") if isinstance(holder, Optimizer) else ()
    return {name: _plain_of(v, seen, depth) for name, v in vars(holder).items() if name not in skipped}


def _plain_of(value: Any, seen: set[int], depth: int) -> Any:
    if isinstance(value, (*PLAIN, Tensor)):
        return value
    if id(value) in seen or callable(value) or isinstance(value, ModuleType) or depth > MOST_DEEP:
        return None
    seen.add(id(value))
    if isinstance(value, (list, tuple, deque)):
        return [_plain_of(item, seen, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return {item for item in value if isinstance(item, PLAIN)}
    if isinstance(value, Mapping):
        return {key: _plain_of(item, seen, depth + 1) for key, item in value.items() if isinstance(key, PLAIN)}
    return _noted(value, seen, depth + 1) if hasattr(value, "__dict__") else None


def _shrunk(value: Any, param: nn.Parameter, small: nn.Parameter) -> Any:
    """State that was made for ``param``, for ``small``: of corresponding sides, and with its first element in all."""
    if isinstance(value, Tensor) and value.numel() > 1:
        side_of = dict(zip(reversed(param.shape), reversed(small.shape), strict=True))
        shape = small.shape if value.shape == param.shape else [side_of.get(n, n) for n in value.shape]
        return torch.full(shape, value.flatten()[0].item(), dtype=value.dtype, device=small.device)
    if type(value) is dict:
        return {name: _shrunk(item, param, small) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_shrunk(item, param, small) for item in value)
    return copy.deepcopy(value)
