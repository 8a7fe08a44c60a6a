"""Finds by trial which tensors of a call are divided into chunks. Sizes cannot tell: a table may be as long as a batch.

A set of tensors may be divided if calls on two consecutive parts of the batch give the results of one call on both. The
smallest such set is chosen, so a table that has no effect yet (all zeros) is not divided. A tensor that outlives the
call (a hook or attribute keeps it) is refused: it would hold the last chunk's values, and get no gradient.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from weakref import ref

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_zero.engine.passes.containers import Args, Kwargs, find_tensors, take_tensors
from lightning_zero.engine.passes.recompute import Context
from lightning_zero.engine.vertical.chunked import (
    CannotDivide,
    Changes,
    Division,
    Inputs,
    Modes,
    RandomState,
    device_type_of,
    same_form,
    trying,
)

_MOST = 8  # candidate tensors; there are too many subsets of more


class _Escapes(TorchFunctionMode):
    """Keeps weak references to all tensors that torch functions make in the body, to find those that outlive it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, ref[Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in find_tensors(result):
            self._made[id(tensor)] = ref(tensor)
        return result

    def kept(self, known: Iterable[Tensor]) -> Tensor | None:
        """Return a tensor made in the body that is still alive, has a ``grad_fn`` and is not in ``known``; or None."""
        expected = {id(tensor) for tensor in known}
        if not self._alive(expected):
            return None
        gc.collect()  # frees reference cycles
        return next(iter(self._alive(expected)), None)

    def _alive(self, expected: set[int]) -> list[Tensor]:
        alive = (reference() for reference in self._made.values())
        return [t for t in alive if t is not None and t.grad_fn is not None and id(t) not in expected]


_DRAWS_NOTHING = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}  # by argument name


class _NothingDrawn(TorchDispatchMode):
    """Makes random operations deterministic in the body: they draw 1/2 (0 for integers), and dropout drops nothing."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        off = {name: value for name, value in _DRAWS_NOTHING.items() if name in names}
        if off:
            return func(*(off.get(name, given[name]) for name in names[: len(args)]), **{**(kwargs or {}), **off})
        result = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, lambda tensor: tensor.fill_(0.5 if tensor.is_floating_point() else 0), result)


class _Unequal(Exception):
    """Raised if calls on two parts of a batch give other results than one call on both. The message says which."""


class Trial:
    """Calls ``function`` on parts of a batch, inside ``in_chunk()``, to find which tensors can be divided."""

    def __init__(self, function: Callable[..., object], inputs: Inputs, in_chunk: Context) -> None:
        self._function, self._inputs, self._in_chunk = function, inputs, in_chunk
        self._device_type = device_type_of(inputs.tensors)
        self._modes = Modes(self._device_type)
        self._alone = True  # the first part is being run; its error is not about the division
        self._around: Context = contextlib.nullcontext

    def division(self, first: Division | None) -> Division:
        """Find how to divide the call. ``first``: the division of a call of the same kind, which is tried first.

        Raises CannotDivide, or the call's own error if it fails on the first part.
        """
        inputs = self._inputs
        if len(inputs.candidates) > _MOST:
            raise CannotDivide(
                f"expected at most {_MOST} tensors whose first dimension is that of the batch ({inputs.size}), got "
                f"{len(inputs.candidates)}"
            )
        with torch.no_grad(), trying():
            state = RandomState(inputs.tensors)
            with state.put_back(self._device_type):
                tensors = [self._copy(number) for number in range(len(inputs.tensors))]
                failed: Exception | None = None  # the last set's error, which is that of all candidates
                for divided in self._sets(first):
                    inputs.divided = divided
                    try:
                        return self._compared(tensors, state)
                    except (CannotDivide, Changes):
                        raise
                    except Exception as error:  # given too few rows, a call may raise anything
                        failed = error
                    finally:
                        state.restore(self._device_type)
        assert failed is not None
        if self._alone and not isinstance(failed, _Unequal):
            raise failed
        text = f"{failed}" if isinstance(failed, _Unequal) else f"got {type(failed).__name__}: {failed}"
        raise CannotDivide(
            f"expected a forward that gives for {2 * inputs.chunk_size} samples what it gives for {inputs.chunk_size} "
            f"and the {inputs.chunk_size} that follow, {text}. {inputs.told}"
        ) from failed

    def _sets(self, first: Division | None) -> Iterator[tuple[bool, ...]]:
        """Yield sets of inputs to divide (a flag for each): ``first``, then sets by size. Large inputs go first."""
        if first is not None:
            yield first.divided
        found = sorted(self._inputs.candidates, key=lambda number: -self._inputs.tensors[number].numel())
        for count in range(1, len(found) + 1):
            for chosen in combinations(found, count):
                yield tuple(number in chosen for number in range(len(self._inputs.tensors)))

    def _copy(self, number: int) -> Tensor:
        """Return input ``number`` for the trial. If its rows are all equal, add random values, so that errors show."""
        tensor = self._inputs.tensors[number]
        if number not in self._inputs.candidates or not tensor.is_floating_point():
            return tensor
        return tensor + torch.rand_like(tensor) if bool((tensor == tensor[:1]).all()) else tensor

    def _compared(self, tensors: Sequence[Tensor], state: RandomState) -> Division:
        size = self._inputs.chunk_size
        self._alone = True
        one = self._result(tensors, 0, size)
        self._alone = False
        other, both = self._result(tensors, size, size), self._result(tensors, 0, 2 * size)
        if self._around is contextlib.nullcontext and not state.same(RandomState(tensors)):
            self._around = _NothingDrawn
            return self._compared(tensors, state)
        for part in (other, both):
            if len(part[1]) != len(one[1]) or not same_form(part[0], one[0]):
                raise _Unequal("got results with other numbers, strings or objects, or other tensors among them")
        joined = tuple(map(_is_joined, one[1], other[1], both[1]))
        if one[1] and not any(joined) and all(map(torch.equal, one[1], other[1])):
            raise _Unequal("got the same results for all samples")  # the call may not use these tensors at all
        return Division(tuple(self._inputs.divided), joined)

    def _result(self, tensors: Sequence[Tensor], low: int, rows: int) -> tuple[object, list[Tensor]]:
        inputs = self._inputs
        given = [tensor.clone() for tensor in inputs.rows(tensors, low, rows)]  # the call may change them
        with self._modes.again(), self._in_chunk(), self._around():
            if self._alone:
                return self._watched(given)
            return take_tensors(inputs.call(self._function, given), given)

    def _watched(self, given: Sequence[Tensor]) -> tuple[object, list[Tensor]]:
        """Run the call with a graph, drop the graph, and raise CannotDivide if a tensor of the call is still alive."""
        # Detached: other hooks would keep the tensors themselves alive.
        saves = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
        with torch.inference_mode(False), torch.enable_grad(), saves:  # also in an evaluation, which runs it whole then
            # Clones, because a leaf refuses in-place changes with a misleading message.
            copies = [t.detach().clone() for t in given]  # a graph refuses tensors of inference mode
            inside = [t.requires_grad_().clone() if t.is_floating_point() else t for t in copies]
            with _Escapes() as made:
                form, found = take_tensors(self._inputs.call(self._function, inside), inside)
        found = [tensor.detach() for tensor in found]
        if (kept := made.kept(inside)) is not None:
            raise CannotDivide(
                f"a tensor {list(kept.shape)} leaves it by another way than its results (a hook that collects it, an "
                "attribute), and would have no gradient. Detach what is only looked at: then it is the last chunk's"
            )
        return form, found


def _is_joined(one: Tensor, other: Tensor, both: Tensor) -> bool:
    """Return whether ``both``, a result for two parts, concatenates ``one`` and ``other``, the results for each part.

    Return False if ``both`` is one value for the batch (a loss) or equals each part's. Raises _Unequal otherwise.
    """
    if one.layout is not torch.strided or one.is_nested:
        raise _Unequal(f"got a result with layout {one.layout}, expected dense tensors")
    if not one.ndim and one.is_floating_point():
        return False
    joined = one.ndim > 0 and both.shape == (2 * one.shape[0], *one.shape[1:])
    if one.shape != other.shape or not (joined or one.shape == both.shape) or one.dtype != both.dtype:
        raise _Unequal(f"got results {list(one.shape)}, {list(other.shape)} and {list(both.shape)} for both")
    if not (_alike(torch.cat([one, other]), both) if joined else _alike(one, both) and _alike(other, both)):
        what = "other values" if joined else "one that is not of samples and has other values (expected: a 0-d tensor)"
        raise _Unequal(f"got a result {list(one.shape)} with {what}")
    return joined


def _computes_roughly(tensor: Tensor) -> bool:
    kinds = ("cpu", tensor.device.type)
    autocast = any(torch.is_autocast_enabled(kind) for kind in kinds if torch.amp.is_autocast_available(kind))
    fast = torch.get_float32_matmul_precision() != "highest"
    return autocast or fast or tensor.element_size() < 4


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal up to rounding. A few elements may differ (a token sent to another expert)."""
    near, few = (0.03, 0.02) if _computes_roughly(other) else (1e-4, 1e-3)
    far = one != other
    if one.is_floating_point() or one.is_complex():
        size = other.abs()
        usual = size[size.isfinite()].float().square().mean().sqrt()
        far &= ~((one - other).abs() <= near * (size + usual.nan_to_num())) & ~(one.isnan() & other.isnan())
    return far.numel() == 0 or far.float().mean().item() <= few
