"""Tries an optimizer on small tensors, before training: may its tensors be stepped apart, and what does it keep?

A class of the user's says nothing of that. Its copies, with the user's settings, step the same small tensors in one
call and in several, and everything must come out equal to the bit.
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
from lightning_zero.engine.steps.in_parts import HOOKS, PLAIN, StepInParts, keep
from lightning_zero.engine.steps.torch_optimizers import without_hooks
from lightning_zero.engine.units.param_info import same_bits

# Of small tensors: all unequal, so that a state's sides tell where they come from, and large enough that a product of
# matrices and the same one inside of a batch differ in their roundings.
SIDES = (11, 19, 3, 5, 2)
# Of the gradients, step by step: some classes do nothing but look at the first, some act at limits (a largest norm) or
# from the tenth step on.
SCALES = (1.0, 1.0, 1e3, 1e-2, 1.0, 1.0, 1.0, 10.0, 1.0, 1.0, 1.0, 1.0)
FEWEST, MOST_SMALL = 4, 400  # steps at least; steps of small tensors in a trial
MOST_DEEP = 4  # of objects that hold objects, in attributes of an optimizer


class StateShape(NamedTuple):
    """A tensor of state, as it depends on its parameter.

    Attributes:
        name: its way in the state, such as ``exp_avg`` or ``Q/0``.
        sides: for each dimension, that of the parameter which it is as long as, or a negative constant length.
    """

    name: str
    sides: tuple[int, ...]
    dtype: torch.dtype

    def nbytes(self, shape: Sequence[int]) -> int:
        """For a parameter of ``shape``."""
        numel = 1
        for side in self.sides:
            numel *= -side if side < 0 else shape[side]
        return numel * self.dtype.itemsize


class Probed(NamedTuple):
    """What was found.

    Attributes:
        couples: what a step does to a tensor depends on the others that it steps.
        steps_all: it changes a tensor that has no gradient, or its state, too; or that is not known.
        asks_again: it calls a closure that it is given more than once, or after it has changed tensors.
        hides_empty: it cannot stand a param group without tensors.
        states: by param group, number of dimensions and dtype, the tensors of state of a parameter.
        failed: why it could not be tried.
    """

    couples: bool = False
    steps_all: bool = True
    asks_again: bool = False
    hides_empty: bool = False
    states: Mapping[tuple[int, int, torch.dtype], Sequence[StateShape]] = {}
    failed: Exception | None = None


def step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """The step of its class, without the hooks of torch around it."""
    step: Callable[..., Any] = without_hooks(type(optimizer).step)
    return step


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether its step cannot do without a closure, which it calls itself."""
    parameters = list(inspect.signature(step_of(optimizer)).parameters.values())[1:2]
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def probe(optimizer: Optimizer, dtype_of: Callable[[nn.Parameter], torch.dtype], device: torch.device) -> Probed:
    """Step small copies. Neither the optimizer nor random numbers of others are changed; sends no message.

    Args:
        dtype_of: that of a parameter's master.

    Raises:
        ConfigError: its step sends messages itself.
    """
    if device.type == "meta":  # nothing could be compared there
        device = torch.device("cpu")
    with (
        _random_numbers_kept(device),
        torch.inference_mode(False),
        torch.no_grad(),
        _NoMessages(type(optimizer).__qualname__),
    ):
        asks_again = False
        try:
            asks_again = _Trial(optimizer, dtype_of, device).asks_again()
            together = _Trial(optimizer, dtype_of, device)
            together.run()
        except ConfigError:
            raise
        except Exception as error:
            return Probed(asks_again=asks_again, failed=error)
        for hides_empty in (False, True):
            apart = _Trial(optimizer, dtype_of, device)
            try:
                apart.run(in_parts=True, hides_empty=hides_empty)
            except ConfigError:
                raise
            except Exception:  # then all tensors are needed in each call
                continue
            couples, states = not _same(together.result(), apart.result()), together.states()
            # Of a group that is hidden at each call nothing would be counted.
            return Probed(couples, together.steps_all() or hides_empty, asks_again, hides_empty, states)
    return Probed(couples=True, asks_again=asks_again, states=together.states())


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


class _Trial:
    """A copy of an optimizer, for small tensors."""

    def __init__(
        self, optimizer: Optimizer, dtype_of: Callable[[nn.Parameter], torch.dtype], device: torch.device
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
        self._optimizer = self._copy(optimizer)

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
            own = [s.tensor for s in self._small if s.group == number]
            memo |= {id(param): next(s for s in own if s.dim() == param.dim()) for param in listed["params"]}
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
        step = step_of(self._optimizer)
        for number, scale in enumerate(SCALES[: max(FEWEST, MOST_SMALL // max(1, len(self._small)))]):
            for small in self._small:
                most = 10.0 if small.tensor.dtype is torch.float16 else scale  # squares have to be numbers there
                grad = min(scale, most) * torch.randn(small.tensor.shape, generator=self._random)
                small.tensor.grad = grad.to(small.tensor.device, small.tensor.dtype)
            arguments = [_closure] if needs_closure(self._optimizer) else []
            if not in_parts:
                torch.default_generator.manual_seed(number)
                step(self._optimizer, *arguments)
                continue
            with StepInParts(self._optimizer, step, hides_empty=hides_empty) as parts:
                for part in filter(None, self._parts()):
                    # What draws numbers draws others for a tensor that comes later.
                    torch.default_generator.manual_seed(number)
                    lists: list[list[tuple[int, Tensor]]] = [[] for _ in self._optimizer.param_groups]
                    for small in part:
                        lists[small.group].append((small.place, small.tensor))
                    parts.call(lists, *arguments)
            keep(self._optimizer, [parts.outcome])

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
            step_of(self._optimizer)(self._optimizer, *([_closure] if needs_closure(self._optimizer) else []))
        except Exception:  # it wants gradients
            return False
        return not _same(before, self._of_tensors())

    def asks_again(self) -> bool:
        """Whether a step does more with a closure than to call it before all else."""
        calls: list[bool] = []
        before = [small.tensor.detach().clone() for small in self._small]

        def closure() -> Tensor:
            calls.append(_same(before, [small.tensor.detach() for small in self._small]))
            for small in self._small:
                small.tensor.grad = torch.ones_like(small.tensor)
            return _closure()

        try:
            step_of(self._optimizer)(self._optimizer, closure)
        except Exception:  # it has no closure
            return False
        return len(calls) > 1 or not all(calls)

    def result(self) -> list[Any]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        return [groups, _noted(self._optimizer, set()), self._of_tensors()]

    def _of_tensors(self) -> list[Any]:
        state = self._optimizer.state
        return [(s.tensor.detach(), dict(state.get(s.tensor, {}))) for s in self._small]

    def states(self) -> dict[tuple[int, int, torch.dtype], list[StateShape]]:
        found: dict[tuple[int, int, torch.dtype], dict[str, StateShape]] = {}
        for small in self._small:
            shapes = found.setdefault((small.group, small.tensor.dim(), small.tensor.dtype), {})
            for name, leaf in leaves_of(self._optimizer.state.get(small.tensor, {})):
                shapes.setdefault(name, _shape_of(name, leaf, small.tensor))
        return {key: list(shapes.values()) for key, shapes in found.items()}


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


def _shape_of(name: str, leaf: Tensor, small: Tensor) -> StateShape:
    sides = tuple(next((d for d, side in enumerate(small.shape) if side == n), -n) for n in leaf.shape)
    return StateShape(name, sides, leaf.dtype)


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of more than one element inside of a parameter's state, each with its way there."""
    if isinstance(value, Tensor):
        if value.numel() > 1:
            yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from leaves_of(item, f"{name}/{key}" if name else str(key))


def map_leaves(value: Any, change: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """A copy of a state's mappings and lists, with others in the place of the tensors of :func:`leaves_of`."""
    if isinstance(value, Tensor):
        return change(name, value) if value.numel() > 1 else value
    if isinstance(value, Mapping):
        new = {k: map_leaves(v, change, f"{name}/{k}" if name else str(k)) for k, v in value.items()}
        if type(value) is dict:
            return new
        rebuilt: Any = copy.copy(value)
        rebuilt.update(new)
        return rebuilt
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(v, change, f"{name}/{n}") for n, v in enumerate(value)))
    if type(value) in (list, tuple):
        return type(value)(map_leaves(v, change, f"{name}/{n}" if name else str(n)) for n, v in enumerate(value))
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether nested values are equal, tensors to the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return alike and same_bits(one.flatten(), other.flatten())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return bool(one == other) or getattr(type(one), "__eq__", None) is object.__eq__
    except Exception:  # it cannot be compared
        return True
