"""Divides the inputs of a call along the batch, and puts together what the chunks give.

A tensor whose first dimension is the batch may be divided; all else is given to each chunk as it is (masks
``[1, ...]``, rotary caches, numbers), and so are parameters and buffers, whatever their sizes are (``tables.py``).
Which of them are divided, and which results are put one behind the other, a trial finds (``trial.py``). Of the other
results a floating-point number (a 0-d tensor: an auxiliary loss) becomes the mean, as ordinary accumulation has it.
What all chunks give alike for all samples (a bias ``[1, ...]``) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.passes.containers import PLAIN, copy_containers, map_leaves, tensors_inside
from lightning_zero.engine.vertical.tables import Tables


class CannotDivide(RuntimeError):
    """A call cannot be divided; its text says why, and what helps."""


class Changes(RuntimeError):
    """A call changes what is not to change with each chunk; its text says what helps."""


class Division(NamedTuple):
    """How calls are divided: which of the tensors that are given, and which results are put one behind the other."""

    divided: tuple[bool, ...]
    joined: tuple[bool, ...]


class _Place:
    """Stands for the tensor of this number. No dataclass: those are looked into."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def first_size(value: Any) -> int | None:
    """The first dimension of the first tensor in ``value`` that has one."""
    sizes = (leaf.shape[0] for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.ndim)
    return next(sizes, None)


def leaves(value: Any) -> list[Any]:
    """All that is no container inside of nested containers, in one order."""
    found: list[Any] = []
    map_leaves(value, lambda leaf: found.append(leaf) or leaf)  # type: ignore[func-returns-value]
    return found


class Inputs:
    """The arguments of one call, without the tensors, which autograd keeps.

    Args:
        tables: tensors that are of no batch.

    Attributes:
        tensors: those of the call, each once; until :meth:`let_go`.
        tables: which of them are of no batch.
        candidates: numbers of those that have the batch as their first dimension.
        divided: which tensors are divided: the candidates, until :meth:`divide`.
        size: of the batch.
        count: of chunks.
    """

    def __init__(
        self, args: Any, kwargs: Any, size: int | None, count: int, *, tables: Tables | Collection[Tensor] = ()
    ) -> None:
        self.size, self.count = size or 0, count
        self.tensors: list[Tensor] = []
        numbers: dict[int, int] = {}

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            return _Place(numbers[id(leaf)])

        # Containers of our own: a block may append to a list that it is given.
        self._form = copy_containers(map_leaves((args, kwargs), place))
        self._others = [leaf for leaf in leaves(self._form) if not isinstance(leaf, (_Place, *PLAIN))]
        self._shapes = [tuple(tensor.shape) for tensor in self.tensors]
        self.tables = [tensor in tables for tensor in self.tensors]
        self.candidates = [
            number
            for number, (shape, is_table) in enumerate(zip(self._shapes, self.tables, strict=True))
            if shape and shape[0] == self.size > 0 and not is_table
        ]
        self.divided: Sequence[bool] = [number in self.candidates for number in range(len(self.tensors))]

    def let_go(self) -> None:
        self.tensors = []

    def divide(self, divided: Sequence[bool]) -> None:
        self.divided = divided

    @property
    def kind(self) -> Any:
        """Calls of the same kind are divided alike."""
        flags = [leaf for leaf in leaves(self._form) if isinstance(leaf, (type(None), bool, str, Enum))]
        kinds = [(len(shape), tensor.dtype) for shape, tensor in zip(self._shapes, self.tensors, strict=True)]
        return self.size, tuple(self.candidates), tuple(kinds), tuple(flags)

    @property
    def chunk_size(self) -> int:
        return self.size // self.count

    def why_not(self) -> str | None:
        """Why the call cannot be divided, if so."""
        if not any(self.divided):
            shapes = ", ".join(str(list(shape)) for shape in self._shapes) or "no tensor"
            return f"expected a tensor whose first dimension is the batch ({self.size or 'not known'}), got {shapes}"
        if self.size % self.count:
            return f"expected a batch that divides by zero.vertical_chunks={self.count}, got {self.size} samples"
        for other in self._others:
            if any(tensor.ndim and tensor.shape[0] == self.size for tensor in tensors_inside(other)):
                return (
                    f"expected tensors of the batch as arguments or inside tuples, lists, dicts and dataclasses, got "
                    f"them inside of an object of class {type(other).__name__}"
                )
        return None

    @property
    def told(self) -> str:
        """Which are divided, for a message."""
        found = ", ".join(str(list(shape)) for shape, is_so in zip(self._shapes, self.divided, strict=True) if is_so)
        return f"Of its inputs, {found} are divided along their first dimension"

    @property
    def holds_objects(self) -> bool:
        """Whether an argument is an object that a call might change, such as a cache of keys and values."""
        return not all(callable(other) for other in self._others)

    def state_of_objects(self) -> list[Any]:
        """What changes where a call changes an argument that is an object."""
        return [(id(t), t._version) for other in self._others for t in tensors_inside(other)]

    def chunk(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        """The tensors of one chunk: views."""
        return self.rows(tensors, index * self.chunk_size, self.chunk_size)

    def rows(self, tensors: Sequence[Tensor], low: int, count: int) -> list[Tensor]:
        pairs = zip(tensors, self.divided, strict=True)
        return [tensor.narrow(0, low, count) if divided else tensor for tensor, divided in pairs]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Positional arguments and those by name, with ``tensors`` in their places, in containers of their own."""
        filled = map_leaves(self._form, lambda leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf)
        args, kwargs = copy_containers(filled)
        return args, kwargs


def called(function: Callable[..., Any], inputs: Inputs, given: Sequence[Tensor]) -> Any:
    """The result of ``function`` for a part of ``inputs``.

    Raises:
        CannotDivide: it changes what it is given.
    """
    args, kwargs = inputs.arguments(given)
    handed_over, objects, versions = leaves((args, kwargs)), inputs.state_of_objects(), _versions(given)
    result = function(*args, **kwargs)
    if versions != _versions(given):
        raise CannotDivide("it changes an input in place, from which it is computed again. Work on a copy of it")
    after = leaves((args, kwargs))
    same = len(after) == len(handed_over) and all(a is b for a, b in zip(after, handed_over, strict=True))
    if not same or objects != inputs.state_of_objects():
        raise CannotDivide(
            "it changes a list, a dict or an object that it is given (a cache of keys and values?), and would do so "
            "for each chunk. Return what it collects, or call the model without (use_cache=False)"
        )
    return result


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def places(result: Any, given: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """``result`` with places for its tensors, and these; those that were ``given`` have negative places."""
    inputs = {id(tensor): number for number, tensor in enumerate(given)}
    numbers: dict[int, int] = {}
    found: list[Tensor] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in inputs:
            return _Place(-1 - inputs[id(leaf)])
        if id(leaf) not in numbers:
            numbers[id(leaf)] = len(found)
            found.append(leaf)
        return _Place(numbers[id(leaf)])

    return map_leaves(result, place), found


class Outputs:
    """What the chunks give, put together.

    Args:
        joined: which results are put one behind the other. Default: those whose first dimension a chunk's samples
            divide.

    Attributes:
        tensors: the results, each once.
    """

    def __init__(self, inputs: Inputs, joined: Sequence[bool] | None = None) -> None:
        self._inputs, self._joined = inputs, joined
        self._form: Any = None
        self._kept: list[Any] = []  # leaves of the first chunk's result, with places in the place of tensors
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, list[Tensor]] = {}  # of the chunks, where a result is a number
        self._chunk_lengths: list[int] = []  # of each result, how much of it is of one chunk; 0: a mean

    def add(self, index: int, result: Any, given: Sequence[Tensor]) -> None:
        """Take what a chunk gave that was ``given`` these tensors."""
        form, found = places(result, given)
        if index == 0:
            self._form, self._kept = form, leaves(form)
            joined = self._joined
            if joined is None:
                joined = [tensor.ndim > 0 and tensor.shape[0] % self._inputs.chunk_size == 0 for tensor in found]
            if len(joined) != len(found):
                raise CannotDivide(f"expected {len(joined)} tensors as results, as at first, got {len(found)}")
            self.tensors = [self._make(tensor, whether) for tensor, whether in zip(found, joined, strict=True)]
        elif not equal(leaves(form), self._kept):
            raise CannotDivide(
                "expected results that are tensors, or alike for all chunks, got different numbers, strings or objects"
            )
        for number, tensor in enumerate(found):
            self._write(index, number, tensor)

    def _make(self, tensor: Tensor, joined: bool) -> Tensor:
        if not (joined and tensor.ndim):
            self._chunk_lengths.append(0)
            return torch.zeros_like(tensor)
        self._chunk_lengths.append(tensor.shape[0])
        shape = (tensor.shape[0] * self._inputs.count, *tensor.shape[1:])
        last = tensor.ndim == 4 and not tensor.is_contiguous()
        last = last and tensor.is_contiguous(memory_format=torch.channels_last)
        kept = torch.channels_last if last else torch.contiguous_format
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=kept)

    def _write(self, index: int, number: int, tensor: Tensor) -> None:
        whole, length = self.tensors[number], self._chunk_lengths[number]
        if not length:
            self._write_number(index, number, tensor)
            return
        place = whole.narrow(0, index * length, length)
        if place.shape != tensor.shape or whole.dtype != tensor.dtype:
            raise CannotDivide(
                f"expected results of one shape and dtype from all chunks, got {list(tensor.shape)} {tensor.dtype} "
                f"after {list(place.shape)} {whole.dtype}"
            )
        place.copy_(tensor)

    def _write_number(self, index: int, number: int, tensor: Tensor) -> None:
        whole = self.tensors[number]
        if tensor.is_floating_point() and not tensor.ndim:
            self._numbers.setdefault(number, []).append(tensor)
            if index == self._inputs.count - 1:
                wide = [value.to(torch.promote_types(value.dtype, torch.float32)) for value in self._numbers[number]]
                whole.copy_(torch.stack(wide).mean())
        elif index == 0:
            whole.copy_(tensor)
        elif whole.shape != tensor.shape or not torch.equal(whole, tensor):
            raise CannotDivide(
                "expected a result that is not of samples (a whole number, a bias [1, ...], a table) to be the same "
                "for all chunks, got several"
            )

    def filled(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """The result of the whole call: with ``tensors`` for the results, and ``inputs`` for what was only passed."""

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, _Place):
                return leaf
            return tensors[leaf.number] if leaf.number >= 0 else inputs[-1 - leaf.number]

        return map_leaves(self._form, fill)

    def gradient_of(self, number: int, index: int, grad: Tensor) -> Tensor:
        """What of a result's gradient is a chunk's."""
        length = self._chunk_lengths[number]
        return grad.narrow(0, index * length, length) if length else grad / self._inputs.count

    def let_go(self) -> None:
        self.tensors, self._form, self._kept, self._numbers = [], None, [], {}


def equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if a is b:
            continue
        try:
            if type(a) is not type(b) or not bool(a == b):
                return False
        except (RuntimeError, ValueError, TypeError):
            return False
    return True
