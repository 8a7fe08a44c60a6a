"""Divides the inputs of a call along the batch.

A tensor whose first dimension is the batch may be divided; all else is given to each chunk as it is (masks
``[1, ...]``, rotary caches, numbers). Which of them are divided, and which results are put one behind the other, a
trial finds (``trial.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from lightning_zero.engine.passes.containers import (
    PLAIN,
    TensorPlace,
    copy_containers,
    find_tensors,
    leaves,
    put_tensors,
    take_tensors,
    tensors_inside,
)


class CannotDivide(RuntimeError):
    """A call cannot be divided; its text says why, and what helps."""


class Changes(RuntimeError):
    """A call changes what is not to change with each chunk; its text says what helps."""


class Division(NamedTuple):
    """How calls are divided: which of the tensors that are given, and which results are put one behind the other."""

    divided: tuple[bool, ...]
    joined: tuple[bool, ...]


def first_size(value: Any) -> int | None:
    """Find the first dimension of the first tensor in ``value`` that has one."""
    return next((tensor.shape[0] for tensor in find_tensors(value) if tensor.ndim), None)


class Inputs:
    """The arguments of one call in chunks.

    Attributes:
        tensors: those of the call, each once; until :meth:`let_go`.
        candidates: numbers of those that have the batch as their first dimension.
        divided: which tensors are divided: the candidates, until somebody knows better.
        size: of the batch.
        count: of chunks.
    """

    def __init__(self, args: Any, kwargs: Any, size: int | None, count: int) -> None:
        self.size, self.count = size or 0, count
        form, self.tensors = take_tensors((args, kwargs))
        self._form = copy_containers(form)  # a block may append to a list that it is given
        self._others = [leaf for leaf in leaves(form) if not isinstance(leaf, (TensorPlace, *PLAIN))]
        self._shapes = [tuple(tensor.shape) for tensor in self.tensors]
        self.candidates = [n for n, shape in enumerate(self._shapes) if shape and shape[0] == self.size > 0]
        self.divided: Sequence[bool] = [number in self.candidates for number in range(len(self.tensors))]

    def let_go(self) -> list[Tensor]:
        """Hold the tensors no longer, and give them away."""
        tensors, self.tensors = self.tensors, []
        return tensors

    @property
    def kind(self) -> Any:
        """What is equal for calls that are divided alike."""
        flags = [leaf for leaf in leaves(self._form) if isinstance(leaf, (type(None), bool, str, Enum))]
        kinds = [(len(shape), tensor.dtype) for shape, tensor in zip(self._shapes, self.tensors, strict=True)]
        return self.size, tuple(self.candidates), tuple(kinds), tuple(flags)

    @property
    def chunk_size(self) -> int:
        return self.size // self.count

    def why_not(self) -> str | None:
        """Say why the call cannot be divided, if so."""
        if not any(self.divided):
            shapes = ", ".join(str(list(shape)) for shape in self._shapes) or "no tensor"
            return f"expected a tensor whose first dimension is the batch ({self.size or 'not known'}), got {shapes}"
        if self.size % self.count:
            return f"expected a batch that divides by zero.micro_batches={self.count}, got {self.size} samples"
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

    def chunk(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        """Give the tensors of one chunk: views."""
        return self.rows(tensors, index * self.chunk_size, self.chunk_size)

    def rows(self, tensors: Sequence[Tensor], low: int, count: int) -> list[Tensor]:
        pairs = zip(tensors, self.divided, strict=True)
        return [tensor.narrow(0, low, count) if divided else tensor for tensor, divided in pairs]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Put ``tensors`` into arguments and those by name, in containers of their own."""
        args, kwargs = copy_containers(put_tensors(self._form, tensors))
        return args, kwargs

    def call(self, function: Callable[..., Any], given: Sequence[Tensor]) -> Any:
        """Call ``function`` with a part of the tensors.

        Raises:
            CannotDivide: it changes what it is given.
        """
        args, kwargs = self.arguments(given)
        handed_over, objects, versions = leaves((args, kwargs)), self._state_of_objects(), _versions(given)
        result = function(*args, **kwargs)
        if versions != _versions(given):
            raise CannotDivide("it changes an input in place, from which it is computed again. Work on a copy of it")
        after = leaves((args, kwargs))
        same = len(after) == len(handed_over) and all(a is b for a, b in zip(after, handed_over, strict=True))
        if not same or objects != self._state_of_objects():
            raise CannotDivide(
                "it changes a list, a dict or an object that it is given (a cache of keys and values?), and would do "
                "so for each chunk. Return what it collects, or call the model without (use_cache=False)"
            )
        return result

    def _state_of_objects(self) -> list[Any]:
        """What changes where a call changes an argument that is an object."""
        return [(id(t), t._version) for other in self._others for t in tensors_inside(other)]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def same_form(one: Any, other: Any) -> bool:
    """Whether two results have the same numbers, strings and objects, and tensors in the same places."""
    first, second = leaves(one), leaves(other)
    if len(first) != len(second):
        return False
    try:
        return all(a is b or (type(a) is type(b) and bool(a == b)) for a, b in zip(first, second, strict=True))
    except (RuntimeError, ValueError, TypeError):
        return False
