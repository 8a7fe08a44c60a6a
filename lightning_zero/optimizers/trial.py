"""Step a copy of an optimizer, with the user's settings, on small tensors or on tensors of the model's shapes."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_zero.optimizers.inner import JoinedState
from lightning_zero.optimizers.known import changes_outside_step, hooks_set_aside, without_hooks
from lightning_zero.optimizers.side_effects import HOOKS, PLAIN, Watch, take_over
from lightning_zero.optimizers.state_trees import StateShape, leaves_of, same, shape_of
from lightning_zero.settings import ConfigError

# Sides of small tensors. All differ, so that each side of a state shows which side of the parameter it equals. They are
# large enough that a matrix product and a batched one round differently.
SIDES = (11, 19, 3, 5, 2)
# Gradient scales by step: some classes only look at the first gradient, some act at limits (a largest norm) or from the
# tenth step on.
SCALES = (1.0, 1.0, 1e3, 1e-2, 1.0, 1.0, 1.0, 10.0, 1.0, 1.0, 1.0, 1.0)
FEWEST, MOST_SMALL = 4, 400  # least steps of a trial; most steps summed over its small tensors
MOST_TRUE = 1 << 27  # elements of tensors of true shapes; two copies with Adam's state take 4 GB
MOST_DEEP = 4  # objects in an optimizer's attributes are compared down to this depth

DtypeOf = Callable[[nn.Parameter], torch.dtype]  # returns the dtype of a parameter's master
Cut = Callable[[nn.Parameter], Sequence[int]]  # returns lengths of the slices of a parameter over all ranks


def step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the function ``step`` of the optimizer's class, without the hooks that torch runs around it."""
    step: Callable[..., Any] = without_hooks(type(optimizer).step)
    return step


def refuse_wrapped_state(optimizer: Optimizer, tensors: Iterable[Tensor]) -> None:
    """Raise ConfigError if the state of ``tensors`` has tensor subclasses that wrap other tensors (as torchao's do),
    which tiers and checkpoints cannot store."""
    states = JoinedState(optimizer)
    for tensor in tensors:
        for name, leaf in leaves_of(states.get(tensor)):
            if is_traceable_wrapper_subclass(leaf):
                kind = type(optimizer)
                raise ConfigError(
                    f"optimizer: expected state in plain tensors, got a {type(leaf).__name__}, {name!r} of "
                    f"{kind.__module__}.{kind.__qualname__}. Use bitsandbytes.optim.AdamW8bit, or "
                    "torch.optim.AdamW with zero.optimizer.state_dtype=bf16."
                )


@contextlib.contextmanager
def trying(name: str, device: torch.device) -> Iterator[None]:
    """While the body runs, a call of a collective raises a ConfigError that names the optimizer class ``name``. When
    the body ends, the states of random generators are restored."""
    accelerators = [] if device.type == "cpu" else [device.index or 0]
    before = random.getstate()
    of_numpy = numpy.random.get_state() if (numpy := sys.modules.get("numpy")) is not None else None
    try:
        with (
            torch.random.fork_rng(devices=accelerators, device_type=device.type if accelerators else "cuda"),
            torch.inference_mode(False),
            torch.no_grad(),
            _NoMessages(name),
        ):
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


class _NoMessages(TorchDispatchMode):
    """Raises ConfigError when a collective is called: ranks step different tensors, so collectives would not match."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch refuses to compile, as torchao's steps do

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ConfigError(
                f"zero.optimizer.sharding: the step of {self._name} sends messages between ranks itself ({func}). "
                "Ranks step different tensors here, and their messages would not meet. Use its version for "
                "one process: dividing the work is done here."
            )
        return func(*args, **(kwargs or {}))


class _Small(NamedTuple):
    """A random tensor that a trial steps in place of one or more of the model's parameters."""

    group: int
    place: int  # index in its param group
    tensor: nn.Parameter
    alike: Sequence[nn.Parameter]  # the parameters that it replaces


class _Kind(NamedTuple):
    """The properties of a parameter that matter in a trial. Parameters with equal properties share trial tensors."""

    group: int
    shape: tuple[int, ...]  # made up unless true shapes are tried
    dtype: torch.dtype
    noted: str


class Trial:
    """A copy of an optimizer, which steps random tensors instead of the model's parameters.

    Args:
        dtype_of: returns the dtype of a parameter's master.
        cut: returns the lengths of the flat slices into which a parameter's tensor is cut. None: do not cut.
        most_true: try tensors of the parameters' own shapes, with at most this many elements in all. Small tensors
            replace shapes that are too large (``untried``). A shape that occurs twice in a param group is tried twice.
            With 0 only small tensors are tried."""

    def __init__(
        self,
        optimizer: Optimizer,
        dtype_of: DtypeOf,
        device: torch.device,
        *,
        cut: Cut | None = None,
        most_true: int = 0,
    ) -> None:
        self._generator = torch.Generator().manual_seed(20)
        self._random = torch.Generator().manual_seed(21)
        self._true = most_true > 0
        kinds: dict[_Kind, list[nn.Parameter]] = {}
        states = JoinedState(optimizer)
        for group, listed in enumerate(optimizer.param_groups):
            for param in listed["params"]:
                shape = tuple(param.shape) if most_true else _made_up(param.dim())
                # State without tensors, and attributes: steps may depend on them.
                plain = {n: v for n, v in states.get(param).items() if not isinstance(v, Tensor)}
                noted = repr((sorted(plain.items(), key=str), sorted(param.__dict__.items(), key=str)))
                kind = _Kind(group, shape, dtype_of(param), noted)
                kinds.setdefault(kind, []).append(param)
        shapes = _true(kinds, most_true)
        self.untried = {kind.shape for kind in kinds if self._true} - {s for found in shapes.values() for s in found}
        self._small: list[_Small] = []
        for kind, alike in kinds.items():
            self._small += self._make(kind, alike, shapes.get(kind) or _small(len(kind.shape)), device)
        self.tensors = [small.tensor for small in self._small]
        self._slices = [_cut(s.tensor, cut(s.alike[0]) if cut else None) for s in self._small]
        self._original = optimizer
        self.optimizer = self._copy(optimizer)

    def _make(
        self, kind: _Kind, alike: Sequence[nn.Parameter], shapes: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[_Small]:
        for shape in shapes:
            values = torch.randn(shape, generator=self._generator).to(device, kind.dtype)
            small = nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())
            small.__dict__.update(alike[0].__dict__)
            place = sum(other.group == kind.group for other in self._small)
            yield _Small(kind.group, place, small, alike)

    def _copy(self, optimizer: Optimizer) -> Optimizer:
        groups: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        # The memo keeps identities: a wrapper and its inner optimizer share groups and state in the copy too.
        states = JoinedState(optimizer)
        memo: dict[int, Any] = {id(held): defaultdict(dict) for held in states.dicts()}
        memo[id(optimizer.param_groups)] = groups
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
        if changes_outside_step(made):
            made.train()  # type: ignore[attr-defined]
        for small in self._small:  # copy state that the class made in its constructor
            param = next((param for param in small.alike if states.get(param)), None)
            if param is not None:
                JoinedState(made).set(small.tensor, _shrunk(dict(states.get(param)), param, small.tensor))
        return made

    @property
    def scales(self) -> Sequence[float]:
        return SCALES[: FEWEST if self._true else max(FEWEST, MOST_SMALL // max(1, len(self._small)))]

    def run(self) -> None:
        for number, scale in enumerate(self.scales):
            self.give_gradients(scale)
            torch.default_generator.manual_seed(number)
            with hooks_set_aside(self.optimizer):
                step_of(self.optimizer)(self.optimizer)

    def run_apart(self) -> None:
        """Step as ranks do: a separate copy of the optimizer steps each part of the tensors, and one more copy has no
        tensors. Afterwards ``self.optimizer`` is a copy with the state of all tensors."""
        parts = [*filter(None, self._parts()), []]
        copies = [self._only(part) for part in parts]
        stepped = [[any(s.group == n for s in part) for n in range(len(copies[0].param_groups))] for part in parts]
        for number, scale in enumerate(self.scales):
            self.give_gradients(scale)
            effects = []
            for rank, (made, listed) in enumerate(zip(copies, stepped, strict=True)):
                # Random numbers differ from those in one call: ranks have their own, and earlier tensors use some up.
                torch.default_generator.manual_seed(len(SCALES) * (1 + rank) + number)
                before = Watch(made)
                with hooks_set_aside(made):
                    step_of(made)(made)
                effects.append(before.effects(listed))
            for made in copies:
                take_over(made, effects)
        self.optimizer = copies[0]
        for made in copies[1:]:
            for held, other in zip(JoinedState(copies[0]).dicts(), JoinedState(made).dicts(), strict=True):
                held.update(other)

    def _only(self, part: Sequence[_Small]) -> Optimizer:
        """Return a copy of the optimizer whose param groups have only the tensors of ``part``."""
        made, own = self._copy(self._original), {id(small.tensor) for small in part}
        for group in made.param_groups:
            kept = [place for place, tensor in enumerate(group["params"]) if id(tensor) in own]
            for name in ("params", "param_names"):
                if name in group:
                    group[name][:] = [group[name][place] for place in kept]
        for small in self._small:
            if id(small.tensor) not in own:
                JoinedState(made).pop(small.tensor)
        return made

    def give_gradients(self, scale: float) -> None:
        for small, slices in zip(self._small, self._slices, strict=True):
            most = 10.0 if small.tensor.dtype is torch.float16 else scale  # fp16 squares must be finite
            grad = min(scale, most) * torch.randn(small.tensor.shape, generator=self._random)
            grad = grad.to(small.tensor.device, small.tensor.dtype)
            parts = grad.flatten().split([part.numel() for part in slices])
            for tensor, part in zip(slices, parts, strict=True):
                tensor.grad = part.clone().view(tensor.shape)

    def values(self) -> list[Tensor]:
        return [torch.cat([tensor.detach().flatten() for tensor in slices]) for slices in self._slices]

    def _parts(self) -> Sequence[Sequence[_Small]]:
        """Divide the trial's tensors into parts, one part for each copy of the optimizer. If the parameters' own shapes
        are tried, each tensor is a part. Otherwise there are three parts, in which some param groups are empty."""
        if self._true:
            return [[small] for small in self._small]
        even = self._small[::2]
        last = self._small[-1].group if self._small else 0
        return self._small[1::2], [s for s in even if s.group != last], [s for s in even if s.group == last]

    def steps_all(self) -> bool:
        """Return whether a step without any gradients changes a tensor or its state. Return False if the step fails."""
        before = copy.deepcopy(self._of_tensors())
        for small in self._small:
            small.tensor.grad = None
        try:
            step_of(self.optimizer)(self.optimizer)
        except Exception:  # the class requires gradients
            return False
        return not same(before, self._of_tensors())

    def calls_its_closure(self) -> bool:
        """Return whether a step requires a closure, or calls it more than once or after it has changed a tensor."""
        calls: list[bool] = []
        before = [small.tensor.detach().clone() for small in self._small]

        def closure() -> Tensor:
            calls.append(same(before, [small.tensor.detach() for small in self._small]))
            for small in self._small:
                small.tensor.grad = torch.ones_like(small.tensor)
            return torch.zeros(())

        step = step_of(self.optimizer)
        first = list(inspect.signature(step).parameters.values())[1:2]
        if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in first):
            return True
        self.give_gradients(1.0)
        with contextlib.suppress(Exception):  # the class takes no closure
            step(self.optimizer, closure)
        return len(calls) > 1 or not all(calls)

    def result(self) -> list[Any]:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return [groups, _noted(self.optimizer, set()), self._of_tensors()]

    def _of_tensors(self) -> list[Any]:
        states = JoinedState(self.optimizer)
        return [(s.tensor.detach(), dict(states.get(s.tensor))) for s in self._small]

    def states(self) -> dict[tuple[int, int, torch.dtype], list[StateShape]]:
        found: dict[tuple[int, int, torch.dtype], dict[str, StateShape]] = {}
        for small in self._small:
            shapes = found.setdefault((small.group, small.tensor.dim(), small.tensor.dtype), {})
            for name, leaf in leaves_of(JoinedState(self.optimizer).get(small.tensor)):
                shapes.setdefault(name, shape_of(name, leaf, small.tensor))
        return {key: list(shapes.values()) for key, shapes in found.items()}


def _made_up(dims: int) -> tuple[int, ...]:
    return tuple(SIDES[n % len(SIDES)] for n in range(dims))


def _small(dims: int) -> list[tuple[int, ...]]:
    """Return three shapes of ``dims`` dimensions, two of them equal: some optimizers step equal shapes as a batch."""
    sides = _made_up(dims)
    return [sides, sides, sides[::-1] if dims > 1 else tuple(2 * n for n in sides)]


def _true(kinds: Mapping[_Kind, Sequence[nn.Parameter]], left: int) -> dict[_Kind, list[tuple[int, ...]]]:
    """Choose the shapes to try: up to two for each kind, with at most ``left`` elements in all. New shapes are chosen
    before repeated ones, and small shapes before large ones."""
    seen: Counter[tuple[int, ...]] = Counter()
    wanted: list[tuple[int, int, _Kind]] = []
    for kind in (kind for kind, alike in kinds.items() for _ in alike[:2]):
        wanted.append((seen[kind.shape], math.prod(kind.shape), kind))
        seen[kind.shape] += 1
    found: dict[_Kind, list[tuple[int, ...]]] = {}
    for _, numel, kind in sorted(wanted, key=lambda item: item[:2]):
        if numel <= left:
            left -= numel
            found.setdefault(kind, []).append(kind.shape)
    return found


def _cut(tensor: nn.Parameter, lengths: Sequence[int] | None) -> list[nn.Parameter]:
    if lengths is None:
        return [tensor]
    flat = tensor.detach().flatten()
    # A small tensor is cut into as many slices as its parameter.
    parts = flat.split(list(lengths)) if sum(lengths) == len(flat) else flat.chunk(len(lengths))
    made = [nn.Parameter(part.clone(), requires_grad=tensor.requires_grad) for part in parts]
    for part in made:
        part.__dict__.update(tensor.__dict__)
    return made


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Optimizer) and id(value) not in memo:  # torch's own copy lacks attributes of the class
        made = memo[id(value)] = object.__new__(type(value))
        for name, held in value.__dict__.items():
            # Skip modules, whose parameters nothing replaces, and a scheduler's ``step``, which counts.
            if name != "step" and not isinstance(held, nn.Module):
                made.__dict__[name] = type(held)() if name in HOOKS else _copied(held, memo)
        return made
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # share what cannot be copied
        return value


def _noted(holder: Any, seen: set[int], depth: int = 0) -> dict[str, Any]:
    """Return the plain values and tensors in the attributes of ``holder``, nested in the same way, so that two trials
    can be compared. ``seen``: ids of objects that are not visited again. ``depth``: the nesting level of ``holder``."""
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
    """Return a state for ``small`` that has the structure of ``value``, which is a state of ``param``. Each tensor is
    filled with the first element of the corresponding tensor in ``value``."""
    if isinstance(value, Tensor) and value.numel() > 1:
        side_of = dict(zip(reversed(param.shape), reversed(small.shape), strict=True))
        shape = small.shape if value.shape == param.shape else [side_of.get(n, n) for n in value.shape]
        return torch.full(shape, value.flatten()[0].item(), dtype=value.dtype, device=small.device)
    if type(value) is dict:
        return {name: _shrunk(item, param, small) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_shrunk(item, param, small) for item in value)
    return copy.deepcopy(value)
