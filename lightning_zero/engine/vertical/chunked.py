"""Runs a function chunk by chunk without a graph, and each chunk once more in the backward.

::

    forward    for each chunk:   keep the random numbers' state; run; put the result in its place of the whole
    backward   for each chunk:   put that state back; run on detached inputs; its backward; gradients of the inputs
                                 into their place

Nothing but the inputs is kept from one to the other. A chunk's backward is one of its own, inside of the outer one: so
gradients of parameters come once for each chunk, by whatever way the function has reached them.

A tensor that leaves the call by another way than its results (a hook keeps it, an attribute, a list) is refused: a loss
that is computed from it (router logits that a hook collects) would have no gradient, and nothing would tell.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_zero.engine.passes.containers import find_tensors, map_tensors
from lightning_zero.engine.torch_modes import function_modes, under_function_modes
from lightning_zero.engine.vertical.split import CannotDivide, Inputs, Outputs, called, places


class Escapes(TorchFunctionMode):
    """Inside of it, tensors that functions make are remembered, weakly."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, ref[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in find_tensors(result):
            self._made[id(tensor)] = ref(tensor)
        return result

    def kept(self, known: Iterable[Tensor]) -> Tensor | None:
        """A tensor that is not ``known``, has a history, and lives on although its call is over."""
        expected = {id(tensor) for tensor in known}
        if not self._alive(expected):
            return None
        gc.collect()  # some may be in circles
        return next(iter(self._alive(expected)), None)

    def _alive(self, expected: set[int]) -> list[Tensor]:
        alive = (reference() for reference in self._made.values())
        return [t for t in alive if t is not None and t.grad_fn is not None and id(t) not in expected]


_TRYING: ContextVar[bool] = ContextVar("a call is tried", default=False)


def is_trying() -> bool:
    """Whether what is computed now is of no use but to see what comes of it: who counts work leaves it out."""
    return _TRYING.get()


@contextlib.contextmanager
def trying() -> Iterator[None]:
    token = _TRYING.set(True)
    try:
        yield
    finally:
        _TRYING.reset(token)


class RandomState:
    """The state of the generators of the CPU and of the devices of ``tensors``, as it is now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)

    def restore(self, device_type: str) -> None:
        torch.set_rng_state(self._cpu)
        if self._devices:
            set_device_states(self._devices, self._states, device_type=device_type)

    def same(self, other: RandomState) -> bool:
        """Whether no numbers have been drawn between both."""
        pairs = zip((self._cpu, *self._states), (other._cpu, *other._states), strict=True)
        return all(torch.equal(one, another) for one, another in pairs)

    @contextlib.contextmanager
    def put_back(self, device_type: str) -> Iterator[None]:
        """Behind the ``with`` the generators go on as if nothing had been drawn inside."""
        with torch.random.fork_rng(devices=self._devices, device_type=device_type):
            yield


_DRAWS_NOTHING = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}  # by arguments' names


class NothingDrawn(TorchDispatchMode):
    """Inside, calls of any size draw the same numbers: 1/2, or 0 where they are whole; dropout drops nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        off = {name: value for name, value in _DRAWS_NOTHING.items() if name in names}
        if off:
            return func(*(off.get(name, given[name]) for name in names[: len(args)]), **{**(kwargs or {}), **off})
        result = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, lambda tensor: tensor.fill_(0.5 if tensor.is_floating_point() else 0), result)


class Modes:
    """Autocast as it is now, of the CPU and of ``device_type``, and the function modes."""

    def __init__(self, device_type: str) -> None:
        kinds = [kind for kind in dict.fromkeys(("cpu", device_type)) if torch.amp.is_autocast_available(kind)]
        self._kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._function_modes = function_modes()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Without a cache of casts: a weight that was cast while no graph was made would have no gradient in one."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._kinds:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            stack.enter_context(under_function_modes(self._function_modes))
            yield


def device_type_of(tensors: Sequence[Tensor]) -> str:
    """The device that is not the host, where ``tensors`` lie on one."""
    return next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), "cpu")


Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Chunked:
    """One call of ``function`` in chunks.

    Args:
        title: of what is called, in messages.
        in_chunk: entered around each call of ``function``.
        in_backward: entered around all of the backward; ``again`` inside of it, around each second call.
        joined: which results are put one behind the other (:class:`Outputs`).
        first: what is called has not been called before: see, where a backward follows, whether tensors leave it by
            other ways than its results.
        help: what a user can do where the call cannot be divided.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        *,
        title: str,
        in_chunk: Context = contextlib.nullcontext,
        in_backward: Context = contextlib.nullcontext,
        again: Context = contextlib.nullcontext,
        joined: Sequence[bool] | None = None,
        first: bool = False,
        help: str = "",
    ) -> None:
        self._function, self._inputs, self._title, self._help = function, inputs, title, help
        self._in_chunk, self._in_backward, self._again = in_chunk, in_backward, again
        self._first = first
        self._outputs = Outputs(inputs, joined)
        self._device_type = device_type_of(inputs.tensors)
        self._modes = Modes(self._device_type)
        self._states: list[RandomState] = []

    def without_graph(self) -> Any:
        """The result, where no backward follows."""
        tensors = self._inputs.tensors
        with torch.no_grad():
            self.run(tensors, keep_states=False)
        return self._outputs.filled(self._outputs.tensors, tensors)

    def with_graph(self, trigger: Tensor | None) -> Any:
        """The result, with a backward that computes all chunks again.

        Args:
            trigger: requires a gradient: so that there is a backward, where no input requires one.
        """
        tensors = self._inputs.tensors
        self._inputs.let_go()  # autograd keeps them, or copies on the host
        found = _Function.apply(self, trigger, *tensors)  # type: ignore[no-untyped-call]
        result = self._outputs.filled(found, tensors)
        self._outputs.let_go()
        return result

    def run(self, tensors: Sequence[Tensor], *, keep_states: bool) -> list[Tensor]:
        """The first forward of all chunks."""
        inputs = self._inputs
        for index in range(inputs.count):
            given = inputs.chunk(tensors, index)
            if keep_states:
                self._states.append(RandomState(tensors))
            try:
                with self._modes.again(), self._in_chunk():
                    if keep_states and self._first and index == 0:
                        given, result = self._watched(given)
                    else:
                        result = called(self._function, inputs, given)
                self._outputs.add(index, result, given)
            except CannotDivide as error:
                raise CannotDivide(f"{self._title} is run in {inputs.count} chunks: {error}. {self._help}") from error
            except Exception as error:
                error.add_note(f"{self._title} was being run in {inputs.count} chunks: {inputs.told}.")
                raise
        return self._outputs.tensors

    def _watched(self, given: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The result for one chunk, made with a graph that is dropped: what lives on then has left by another way."""
        with torch.enable_grad():
            # Copies: a leaf would refuse to be changed in place, in words that do not help.
            inside = [t.detach().requires_grad_().clone() if t.is_floating_point() else t for t in given]
        # Other hooks would keep the very tensors, and these would live on.
        saves = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
        with torch.enable_grad(), saves, Escapes() as made:
            result = called(self._function, self._inputs, inside)
        own = {id(tensor) for tensor in inside}
        plain = map_tensors(result, lambda tensor: tensor if id(tensor) in own else tensor.detach())
        del result
        if (kept := made.kept(inside)) is not None:
            raise CannotDivide(
                f"a tensor {list(kept.shape)} leaves it by another way than its results (a hook that collects it, an "
                "attribute), and would have no gradient. Detach what is only looked at"
            )
        return inside, plain

    def backward(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Compute all chunks again, with their backwards; returns the gradients of the inputs.

        Args:
            grads: of the results.
            needed: which inputs require a gradient.
        """
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{self._title} is run in chunks (zero.vertical_chunks), whose gradients come by backward() only. "
                "Expected a backward of the loss, got torch.autograd.grad() or backward(inputs=...). Use "
                "loss.backward(), or set zero.vertical_chunks=1."
            )
        sums = _InputGrads(self._inputs, tensors, needed)
        with self._in_backward(), self._states[0].put_back(self._device_type):
            for index in range(self._inputs.count):
                self._backward_of(index, tensors, grads, needed, sums)
        return sums.whole()

    def _backward_of(
        self,
        index: int,
        tensors: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
        sums: _InputGrads,
    ) -> None:
        inputs = self._inputs
        given = [t.detach().requires_grad_(n) for t, n in zip(inputs.chunk(tensors, index), needed, strict=True)]
        args, kwargs = inputs.arguments(given)
        self._states[index].restore(self._device_type)
        with torch.enable_grad(), self._modes.again(), self._in_chunk(), self._again():
            result = self._function(*args, **kwargs)
        _, found = places(result, given)
        del result, args, kwargs
        roots: list[Tensor] = []
        of_roots: list[Tensor] = []
        for number, (tensor, grad) in enumerate(zip(found, grads, strict=True)):
            if grad is not None and tensor.requires_grad:
                roots.append(tensor)
                of_roots.append(self._outputs.gradient_of(number, index, grad).to(tensor.dtype))
        if roots:
            torch.autograd.backward(roots, of_roots)
        sums.add(index, given)


class _InputGrads:
    """Gradients of the inputs: of chunks in their place of the whole, of what all chunks are given added in fp32."""

    def __init__(self, inputs: Inputs, tensors: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self._inputs, self._tensors, self._needed = inputs, tensors, needed
        self._found: list[Tensor | None] = [None] * len(tensors)

    def add(self, index: int, given: Sequence[Tensor]) -> None:
        size = self._inputs.chunk_size
        for number, (tensor, needed) in enumerate(zip(given, self._needed, strict=True)):
            grad, tensor.grad = tensor.grad if needed else None, None
            if grad is None:
                continue
            whole, found = self._tensors[number], self._found[number]
            if self._inputs.divided[number]:
                if found is None:
                    found = self._found[number] = torch.zeros_like(whole)
                found.narrow(0, index * size, size).copy_(grad)
            elif found is None:
                self._found[number] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            else:
                found.add_(grad)

    def whole(self) -> list[Tensor | None]:
        pairs = zip(self._found, self._tensors, strict=True)
        return [grad if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Chunked, trigger: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        found = call.run(tensors, keep_states=True)
        ctx.mark_non_differentiable(*(t for t in found if not (t.is_floating_point() or t.is_complex())))
        return tuple(found)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.call.backward(ctx.saved_tensors, grads, ctx.needs_input_grad[2:])
