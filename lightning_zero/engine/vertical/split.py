"""Divides the inputs of a call along the batch, and puts together what the chunks give.

A tensor is divided if its first dimension is the batch; all else is given to each chunk as it is (masks ``[1, ...]``,
rotary caches, numbers), and so are parameters and buffers, whatever their sizes are (``tables.py``). Of what a chunk
gives, tensors are put one behind the other, and a floating-point number (a 0-d tensor: an auxiliary loss) becomes the
mean, as ordinary accumulation has it. What all chunks give alike for all samples (a bias ``[1, ...]``) stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.passes.containers import copy_containers, map_leaves
from lightning_zero.engine.vertical.tables import Tables

_PLAIN = (type(None), Number, str, bytes, Enum, torch.dtype, torch.device, torch.Size, torch.layout, type, nn.Module)
_DEPTH = 4  # of objects in objects that are looked into


class CannotDivide(RuntimeError):
    """A call cannot be divided; its text says why, and what helps."""


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
        self._others = [leaf for leaf in leaves(self._form) if not isinstance(leaf, (_Place, *_PLAIN))]
        self._shapes = [tuple(tensor.shape) for tensor in self.tensors]
        self.divided = [self._is_of_batch(tensor) and tensor not in tables for tensor in self.tensors]

    def let_go(self) -> None:
        self.tensors = []

    def _is_of_batch(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and self.size > 0 and tensor.shape[0] == self.size

    @property
    def chunk_size(self) -> int:
        return self.size // self.count

    def why_not(self) -> str | None:
        """Why the call cannot be divided, if so."""
        if not any(self.divided):
            shapes = ", ".join(str(list(shape)) for shape in self._shapes) or "no tensor"
            return f"expected a tensor whose first dimension is the batch ({self.size or 'not known'}), got {shapes}"
        if self.size % self.count:
            return f"expected a batch that divides by zero.micro_batches={self.count}, got {self.size} samples"
        for other in self._others:
            if any(tensor.ndim and tensor.shape[0] == self.size for tensor in _tensors_in(other)):
                return (
                    f"expected tensors of the batch as arguments or inside tuples, lists, dicts and dataclasses, got "
                    f"them inside of an object of class {type(other).__name__}"
                )
        divided = [shape for shape, is_so in zip(self._shapes, self.divided, strict=True) if is_so]
        square = next((shape for shape in divided if len(shape) == 3 and shape[1] == self.size), None)
        if square is not None and len(divided) > 1:
            return (
                f"expected a batch of another size than what follows it, because a mask of [{self.size}, ...] may "
                f"belong to either, got {list(square)}"
            )
        return None

    @property
    def shapes_divided(self) -> str:
        return ", ".join(str(list(shape)) for shape, is_so in zip(self._shapes, self.divided, strict=True) if is_so)

    @property
    def holds_objects(self) -> bool:
        """Whether an argument is an object with tensors inside, such as a cache of keys and values."""
        return any(True for other in self._others for _ in _tensors_in(other))

    def state_of_objects(self) -> list[Any]:
        """What changes where a call changes an argument that is an object."""
        return [(id(t), t._version) for other in self._others for t in _tensors_in(other)]

    def chunk(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        """The tensors of one chunk: views."""
        low = index * self.chunk_size
        return [
            tensor.narrow(0, low, self.chunk_size) if divided else tensor
            for tensor, divided in zip(tensors, self.divided, strict=True)
        ]

    def two_chunks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the first two chunks, as if they were one."""
        pairs = zip(tensors, self.divided, strict=True)
        return [tensor.narrow(0, 0, 2 * self.chunk_size) if divided else tensor for tensor, divided in pairs]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Positional arguments and those by name, with ``tensors`` in their places, in containers of their own."""
        filled = map_leaves(self._form, lambda leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf)
        args, kwargs = copy_containers(filled)
        return args, kwargs

    def lengths(self) -> set[int]:
        """First dimensions that what belongs to a chunk's samples may have: flattened with dimensions behind them."""
        found = {self.chunk_size}
        for shape, divided in zip(self._shapes, self.divided, strict=True):
            if divided:
                found |= {self.chunk_size * math.prod(shape[1:end]) for end in range(1, len(shape) + 1)}
        return found - {0}


def _tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Tensors that an object holds in its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, _PLAIN) and not callable(value):
        if isinstance(value, dict):
            inside: list[Any] = list(value.values())
        elif isinstance(value, (list, tuple, set)):
            inside = list(value)
        else:
            inside = list(getattr(value, "__dict__", {}).values())
        for item in inside:
            yield from _tensors_in(item, depth - 1)


def same_leaves(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


class Outputs:
    """What the chunks give, put together.

    Attributes:
        tensors: the results, each once.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._lengths = inputs.lengths()
        self._form: Any = None
        self._kept: list[Any] = []  # leaves of the first chunk's result, with places in the place of tensors
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, list[Tensor]] = {}  # of the chunks, where a result is a number
        self._chunk_lengths: list[int] = []  # of each result, how much of it is of one chunk; 0: a mean

    def add(self, index: int, result: Any, given: Sequence[Tensor]) -> None:
        """Take what a chunk gave that was ``given`` these tensors."""
        form, found = self.places(result, given)
        if index == 0:
            self._form, self._kept = form, leaves(form)
            for tensor in found:
                self.tensors.append(self._make(tensor))
        elif not _equal(leaves(form), self._kept):
            raise CannotDivide(
                "expected results that are tensors, or alike for all chunks, got different numbers, strings or objects"
            )
        for number, tensor in enumerate(found):
            self._write(index, number, tensor)

    def places(self, result: Any, given: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
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

    def check_twice(self, result: Any, given: Sequence[Tensor]) -> None:
        """Check that ``result``, for two chunks as one, is twice as long where results are put one behind the other.

        Raises:
            CannotDivide: something has the length of a chunk by chance: a number for each of so many experts.
        """
        _, found = self.places(result, given)
        for tensor, whole, length in zip(found, self.tensors, self._chunk_lengths, strict=False):
            # Of chunks of one sample, a bias [1, ...] is put one behind the other too, which does no harm.
            expected = (2, 1) if length == 1 else (2 * length,)
            if length and (not tensor.ndim or tensor.shape[0] not in expected):
                raise CannotDivide(
                    "expected results whose first dimension is that of the samples, or 1, or 0-d tensors, got one that "
                    f"is {[length, *whole.shape[1:]]} for {self._inputs.chunk_size} samples and {list(tensor.shape)} "
                    f"for {2 * self._inputs.chunk_size}"
                )

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise CannotDivide(f"expected dense tensors as results, got one with layout {tensor.layout}")
        if not tensor.ndim or (tensor.shape[0] == 1 and 1 not in self._lengths):
            self._chunk_lengths.append(0)
            return torch.zeros_like(tensor)
        if tensor.shape[0] not in self._lengths:
            raise CannotDivide(
                f"expected results whose first dimension is that of the {self._inputs.chunk_size} samples of a chunk, "
                f"or 1, or 0-d tensors, got {list(tensor.shape)}"
            )
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
                "expected a result without a dimension for samples (a whole number, a bias [1, ...]) to be the same "
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


def _equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
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
