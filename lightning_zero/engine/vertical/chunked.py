"""Runs a function on chunks of its batch, one by one without a graph, and on each chunk once more in the backward.

::

    forward    for each chunk:   save the random state; run; at the end join the results
    backward   for each chunk:   restore that state; run on detached inputs; run its backward

As in torch's reentrant checkpoint, each chunk has a backward inside the outer one. Unlike there, chunks go in the order
of the forward, gradients of undivided inputs are added in fp32, and autocast casts weights again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_zero.engine.passes.containers import (
    PLAIN,
    Args,
    Kwargs,
    TensorPlace,
    copy_containers,
    find_tensors,
    leaves,
    put_tensors,
    take_tensors,
    tensors_inside,
)
from lightning_zero.engine.passes.recompute import Context
from lightning_zero.engine.torch_modes import caller_modes, under_modes


class CannotDivide(RuntimeError):
    """Raised if a call cannot be divided into chunks of its batch. The message says why, and what helps."""


class Changes(RuntimeError):
    """Raised if a call changes a module's buffer: each chunk would change it again. The message says what helps."""


class Division(NamedTuple):
    """States which input tensors are divided into chunks, and which results are concatenated."""

    divided: tuple[bool, ...]
    joined: tuple[bool, ...]


def first_size(value: object) -> int | None:
    """Return the size of the first dimension of the first tensor in ``value`` that is not 0-d. None: there is none."""
    return next((tensor.shape[0] for tensor in find_tensors(value) if tensor.ndim), None)


class Inputs:
    """Divides the arguments of one call into ``count`` chunks of a batch of ``size`` samples (None: not known)."""

    def __init__(self, args: Args, kwargs: Kwargs, size: int | None, count: int) -> None:
        self.size, self.count = size or 0, count
        form, self.tensors = take_tensors((args, kwargs))  # each tensor once; none after :meth:`take`
        self._form = copy_containers(form)  # copied, because a block may append to a list argument
        self._others = [leaf for leaf in leaves(form) if not isinstance(leaf, (TensorPlace, *PLAIN))]
        self.holds_objects = not all(map(callable, self._others))  # a call might change them: a key-value cache
        self._shapes = [tuple(tensor.shape) for tensor in self.tensors]
        # Numbers of tensors whose first dimension is the batch size. At first all of them are divided.
        self.candidates = [n for n, shape in enumerate(self._shapes) if shape and shape[0] == self.size > 0]
        self.divided: Sequence[bool] = [number in self.candidates for number in range(len(self.tensors))]

    def take(self) -> list[Tensor]:
        tensors, self.tensors = self.tensors, []
        return tensors

    @property
    def kind(self) -> Hashable:
        """Return a key that is equal for calls that are divided alike."""
        flags = [leaf for leaf in leaves(self._form) if isinstance(leaf, (type(None), bool, str, Enum))]
        kinds = [(len(shape), tensor.dtype) for shape, tensor in zip(self._shapes, self.tensors, strict=True)]
        return self.size, tuple(self.candidates), tuple(kinds), tuple(flags)

    @property
    def chunk_size(self) -> int:
        return self.size // self.count

    def why_not(self) -> str | None:
        """Return the reason, for an error message, why the call cannot be divided. None: it can."""
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
        found = ", ".join(str(list(shape)) for shape, is_so in zip(self._shapes, self.divided, strict=True) if is_so)
        return f"Of its inputs, {found} are divided along their first dimension"

    def chunk(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        return self.rows(tensors, index * self.chunk_size, self.chunk_size)

    def rows(self, tensors: Sequence[Tensor], low: int, count: int) -> list[Tensor]:
        pairs = zip(tensors, self.divided, strict=True)
        return [tensor.narrow(0, low, count) if divided else tensor for tensor, divided in pairs]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Args, Kwargs]:
        """Rebuild the positional and keyword arguments from ``tensors``, in new containers."""
        args, kwargs = copy_containers(put_tensors(self._form, tensors))
        return args, kwargs

    def call(self, function: Callable[..., object], given: Sequence[Tensor]) -> object:
        """Return ``function``'s result for these arguments with the tensors ``given``. Raises CannotDivide if the call
        changes an argument."""
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

    def _state_of_objects(self) -> list[tuple[int, int]]:
        """Return ids and versions of the tensors inside objects among the arguments, to detect changes of them."""
        return [(id(t), t._version) for other in self._others for t in tensors_inside(other)]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def same_form(one: object, other: object) -> bool:
    """Return whether two results of :func:`take_tensors` have equal non-tensors, and tensors in the same places."""
    first, second = leaves(one), leaves(other)
    if len(first) != len(second):
        return False
    try:
        return all(a is b or (type(a) is type(b) and bool(a == b)) for a, b in zip(first, second, strict=True))
    except (RuntimeError, ValueError, TypeError):
        return False


@contextlib.contextmanager
def explained(inputs: Inputs, title: str, help: str) -> Iterator[None]:
    """Add to exceptions of the body that ``title`` was run in chunks. A CannotDivide also gets the advice ``help``."""
    try:
        yield
    except CannotDivide as error:
        raise CannotDivide(f"{title} is run in {inputs.count} chunks: {error}. {help}") from error
    except Exception as error:
        error.add_note(f"{title} was being run in {inputs.count} chunks: {inputs.told}.")
        raise


_TRYING: ContextVar[bool] = ContextVar("a call is tried", default=False)


def is_trying() -> bool:
    """Return whether a :class:`~lightning_zero.engine.vertical.trial.Trial` is running. FLOP counters skip trials."""
    return _TRYING.get()


@contextlib.contextmanager
def trying() -> Iterator[None]:
    token = _TRYING.set(True)
    try:
        yield
    finally:
        _TRYING.reset(token)


class RandomState:
    """Saves the state of the random generators of the CPU and of the devices of ``tensors``."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)

    def restore(self, device_type: str) -> None:
        torch.set_rng_state(self._cpu)
        if self._devices:
            set_device_states(self._devices, self._states, device_type=device_type)

    def same(self, other: RandomState) -> bool:
        """Return whether ``other`` is the same state: between the two no random numbers were drawn."""
        pairs = zip((self._cpu, *self._states), (other._cpu, *other._states), strict=True)
        return all(torch.equal(one, another) for one, another in pairs)

    @contextlib.contextmanager
    def put_back(self, device_type: str) -> Iterator[None]:
        """Restore the random generators after the body, as if the body had drawn no random numbers."""
        with torch.random.fork_rng(devices=self._devices, device_type=device_type):
            yield


class Modes:
    """Saves autocast's settings of the CPU and of ``device_type``, the default dtype and active function modes."""

    def __init__(self, device_type: str) -> None:
        kinds = [kind for kind in dict.fromkeys(("cpu", device_type)) if torch.amp.is_autocast_available(kind)]
        self._kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._of_caller = caller_modes()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Apply the saved modes. Autocast's cache is off, as a weight cast without a graph would get no gradient."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._kinds:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            stack.enter_context(under_modes(self._of_caller))
            yield


def device_type_of(tensors: Sequence[Tensor]) -> str:
    return next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), "cpu")


@dataclass(eq=False)
class Chunked:
    """Runs one call of ``function`` as several calls, each with a chunk of the batch, and joins their outputs."""

    function: Callable[..., object]
    inputs: Inputs
    _: KW_ONLY
    title: str
    in_chunk: Context = contextlib.nullcontext  # around each call of ``function``; in a backward gradients are enabled
    in_backward: Context = contextlib.nullcontext  # around the backward of all chunks
    joined: Sequence[bool] | None = None  # results to concatenate; None: if dimension 0 is a multiple of the chunk size
    help: str = ""  # what a user can do if the call cannot be divided

    def __post_init__(self) -> None:
        self._device_type = device_type_of(self.inputs.tensors)
        self._modes = Modes(self._device_type)
        self._has_graph = torch.is_grad_enabled()
        self._states: list[RandomState] = []
        self._form: object = None  # the first chunk's result, without tensors

    def __call__(self, *, trains: bool) -> Any:
        """Run the call and return its result. ``trains``: parameters require gradients, so a backward may follow."""
        trigger = torch.zeros((), requires_grad=True) if trains else None
        tensors = self.inputs.take()  # autograd keeps the tensors, or their copies on the host
        found = _Function.apply(self, trigger, *tensors)  # type: ignore[no-untyped-call]
        form, self._form = self._form, None
        return put_tensors(form, found, tensors)

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        inputs, parts = self.inputs, list[list[Tensor]]()
        with explained(inputs, self.title, self.help):
            for index in range(inputs.count):
                given = inputs.chunk(tensors, index)
                if self._has_graph:
                    self._states.append(RandomState(tensors))
                with self._modes.again(), self.in_chunk():
                    form, found = take_tensors(inputs.call(self.function, given), given)
                if index == 0:
                    self._form = form
                    self._decide(found)
                elif not same_form(form, self._form):
                    raise CannotDivide(
                        "expected results that are tensors, or alike for all chunks, got different numbers, strings "
                        "or objects"
                    )
                parts.append(found)
            return tuple(map(_together, zip(*parts, strict=True), self.joined or ()))

    def _decide(self, found: Sequence[Tensor]) -> None:
        if self.joined is None:
            self.joined = [tensor.ndim > 0 and tensor.shape[0] % self.inputs.chunk_size == 0 for tensor in found]
        if len(self.joined) != len(found):
            raise CannotDivide(f"expected {len(self.joined)} tensors as results, as at first, got {len(found)}")

    def backward(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Run each chunk again, then its backward from the results' ``grads``. Return gradients of ``tensors``."""
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{self.title} is run in chunks (zero.vertical_chunks), whose gradients come by backward() only. "
                "Expected a backward of the loss, got torch.autograd.grad() or backward(inputs=...). Use "
                "loss.backward(), or set zero.vertical_chunks=1."
            )
        sums: list[Tensor | None] = [None] * len(tensors)
        with self.in_backward(), self._states[0].put_back(self._device_type):
            for index, state in enumerate(self._states):
                chunk = zip(self.inputs.chunk(tensors, index), needed, strict=True)
                given = [tensor.detach().requires_grad_(need) for tensor, need in chunk]
                state.restore(self._device_type)
                self._backward_of(index, given, grads)
                for number, tensor in enumerate(given):
                    if tensor.grad is not None:
                        sums[number] = self._added(sums[number], number, index, tensor.grad, tensors[number])
                        tensor.grad = None
        return [total if total is None else total.to(t.dtype) for total, t in zip(sums, tensors, strict=True)]

    def _backward_of(self, index: int, given: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        args, kwargs = self.inputs.arguments(given)
        with torch.enable_grad(), self._modes.again(), self.in_chunk():
            _, found = take_tensors(self.function(*args, **kwargs), given)
        del args, kwargs
        roots: list[Tensor] = []
        of_roots: list[Tensor] = []
        for tensor, grad, joined in zip(found, grads, self.joined or (), strict=True):
            if grad is not None and tensor.requires_grad:
                of_chunk = grad.chunk(self.inputs.count)[index] if joined else grad / self.inputs.count
                roots.append(tensor)
                of_roots.append(of_chunk.to(tensor.dtype))
        if roots:
            torch.autograd.backward(roots, of_roots)

    def _added(self, total: Tensor | None, number: int, index: int, grad: Tensor, whole: Tensor) -> Tensor:
        """Add the gradient that chunk ``index`` has for the input ``whole`` to ``total``, and return the new total.

        The gradient of a divided input goes to the chunk's rows. Gradients of an undivided input are summed in fp32.
        """
        if not self.inputs.divided[number]:
            return (
                grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
                if total is None
                else total.add_(grad)
            )
        total = torch.zeros_like(whole) if total is None else total
        size = self.inputs.chunk_size
        total.narrow(0, index * size, size).copy_(grad)
        return total


def _together(parts: Sequence[Tensor], joined: bool) -> Tensor:
    """Combine the chunks' parts of one result: concatenate ``joined`` results, and average 0-d floats (a loss).

    Other results (a bias ``[1, ...]``) must be equal in all chunks. Raises CannotDivide otherwise.
    """
    first = parts[0]
    if differing := [part for part in parts if part.shape != first.shape or part.dtype != first.dtype]:
        raise CannotDivide(
            f"expected results of one shape and dtype from all chunks, got {list(differing[0].shape)} "
            f"{differing[0].dtype} after {list(first.shape)} {first.dtype}"
        )
    if joined:
        return torch.cat(list(parts))
    if first.is_floating_point() and not first.ndim:
        return torch.stack([part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]).mean().to(first)
    if not all(torch.equal(part, first) for part in parts):
        raise CannotDivide(
            "expected a result that is not of samples (a whole number, a bias [1, ...], a table) to be the same for "
            "all chunks, got several"
        )
    return first.clone()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Chunked, trigger: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        found = call.run(tensors)
        ctx.mark_non_differentiable(*(t for t in found if not (t.is_floating_point() or t.is_complex())))
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.call.backward(ctx.saved_tensors, grads, ctx.needs_input_grad[2:])
