"""Has the forwards of units run in chunks, and the gradients of the chunks added up before they are reduced.

A unit is gathered for all chunks of its forward, and again for all of its backward. The gradients that the chunks'
backwards bring are added in fp32, and go to the reducer once they are whole, as those of one backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from lightning_zero.config import ConfigError
from lightning_zero.engine.passes.events import PassEvents
from lightning_zero.engine.passes.recompute import put_around, without_empty_caches
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.unit import Unit
from lightning_zero.engine.vertical.chunked import Chunked, Context
from lightning_zero.engine.vertical.coupled import changes_with_batch
from lightning_zero.engine.vertical.split import CannotDivide, Changes, Division, Inputs, first_size
from lightning_zero.engine.vertical.tables import Tables
from lightning_zero.engine.vertical.trial import Trial

_HELP = (
    "Run such units on the whole batch with zero.unit.whole_batch=[Class], choose other units with zero.unit.classes, "
    "or set zero.vertical_chunks=1."
)


class Sums:
    """Gradients of parameters while the chunks of one call bring them: fp32, or the dtype of wider ones."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Bucket, int], tuple[Unit, Tensor]] = {}

    def __contains__(self, key: tuple[Bucket, int]) -> bool:
        return key in self._sums

    def add(self, unit: Unit, bucket: Bucket, slot: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if (bucket, slot) in self._sums:
            self._sums[bucket, slot][1].add_(grad)
        else:
            self._sums[bucket, slot] = unit, grad.to(torch.promote_types(grad.dtype, torch.float32))

    def hand_over(self, take: Callable[[Unit, Bucket, int, Tensor], None]) -> None:
        while self._sums:
            (bucket, slot) = next(iter(self._sums))
            unit, total = self._sums.pop((bucket, slot))
            take(unit, bucket, slot, total)


class Vertical:
    """Runs units in chunks, for one engine.

    Attributes:
        count: ``zero.vertical_chunks``.
        sums: while the chunks of a call are computed again: takes gradients that arrive.
        batch: samples of the batch that the step was given, as far as known.
    """

    def __init__(
        self,
        count: int,
        passes: PassEvents,
        *,
        module: nn.Module | None = None,
        offload_inputs: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.count = count
        self._tables = Tables(module)
        self.sums: Sums | None = None
        self.batch: int | None = None
        self._told = False
        self._inside = 0
        self._passes = ref(passes)
        self._offload_inputs, self._pin_memory = offload_inputs, pin_memory
        self._trigger: Tensor | None = None
        self._divisions: dict[Any, Division | None] = {}  # of calls of a unit; None: an evaluation runs them whole
        self._of_classes: dict[Any, Division] = {}  # of calls of units of a class: most blocks are alike
        self._watched: set[int] = set()  # numbers of units of which is known that no tensors leave them elsewhere

    # -- the size of the batch ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, batch: Any, *, evaluation: bool) -> Iterator[None]:
        """A step that is given ``batch``: units divide along its samples.

        Raises:
            ConfigError: a batch to train on that does not divide.
        """
        size = first_size(batch) if self.count > 1 else None
        if size is not None and size % self.count and not evaluation:
            raise ConfigError(
                f"zero.vertical_chunks: expected a batch that divides by {self.count}, got {size} samples (the first "
                "dimension of the first tensor in it). Change the batch size (data.batch_size) or "
                "zero.vertical_chunks; if it is the last batch of an epoch, set drop_last=True in its DataLoader."
            )
        before = self.batch, self._told
        self.batch, self._told = size, size is not None
        if self.count > 1:
            self._tables.look()
        try:
            yield
        finally:
            self.batch, self._told = before

    def root_called(self, args: Any, kwargs: Any) -> None:
        """The whole module is called: with the batch, where no step has told of it."""
        if self.count > 1 and not self._told and not self._inside:
            self.batch = first_size((args, kwargs))
            self._tables.look()

    # -- units --------------------------------------------------------------------------------------------------------

    def wrap(self, unit: Unit, module: nn.Module) -> Callable[[], None]:
        """Have ``module.forward`` run in chunks; returns what undoes it."""
        inner = plain = module.forward
        vertical_ref, params = ref(self), list(module.parameters())
        module_ref = ref(module)

        @functools.wraps(inner, updated=())
        def forward(*args: Any, **kwargs: Any) -> Any:
            vertical = vertical_ref()
            if vertical is None or vertical._inside:
                return inner(*args, **kwargs)
            return vertical._call(unit, module_ref(), params, inner, plain, args, kwargs)

        def replace(change: Callable[[Any], Any]) -> None:
            nonlocal inner
            inner = change(inner)
            if (vertical := vertical_ref()) is not None:
                vertical._watched.add(unit.index)  # what is compiled keeps what the compiler says

        return put_around(module, forward, replace)

    def _call(
        self,
        unit: Unit,
        module: nn.Module | None,
        params: list[nn.Parameter],
        inner: Callable[..., Any],
        plain: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """
        Args:
            plain: ``inner``, not compiled: what is tried once is not worth a graph.
        """
        size = self.batch if self.batch is not None else first_size((args, kwargs))
        if torch.is_grad_enabled():
            args, kwargs = without_empty_caches(type(module), args, kwargs)
        inputs = Inputs(args, kwargs, size, self.count, tables=self._tables)
        title = f"unit {unit.title}"
        trains = [param.requires_grad for param in params]
        needed = any(trains) or any(tensor.requires_grad for tensor in inputs.tensors)
        if not (torch.is_grad_enabled() and needed):
            return self._without_graph(unit, module, inner, plain, inputs, args, kwargs)
        joined = self._divide(unit, module, plain, inputs)

        @contextlib.contextmanager
        def in_backward() -> Iterator[None]:
            passes = self._passes()
            assert passes is not None, "the engine is gone but its backward is not"
            if trains != [param.requires_grad for param in params]:
                raise RuntimeError(
                    f"{title} is computed again in backward (zero.vertical_chunks), and requires_grad of its "
                    "parameters "
                    "has changed since its forward. Change it (toggle_optimizer, unfreezing) before a forward or after "
                    "its backward."
                )
            passes.recomputes(unit)
            with self.adding_up():
                yield

        def again() -> contextlib.AbstractContextManager[None]:
            passes = self._passes()
            packs = passes is not None and unit.reshards and passes.saved.possible
            return passes.saved.packed() if passes is not None and packs else contextlib.nullcontext()

        call = Chunked(
            changes_with_batch(inner, module, title),
            inputs,
            title=title,
            in_chunk=self._in_chunk,
            in_backward=in_backward,
            again=again,
            joined=joined,
            first=unit.index not in self._watched,
            help=_HELP,
        )
        result = self.with_graph(call, any(trains))
        self._watched.add(unit.index)
        return result

    def _divide(
        self, unit: Unit, module: nn.Module | None, plain: Callable[..., Any], inputs: Inputs
    ) -> tuple[bool, ...]:
        """Have ``inputs`` divided as calls of their kind are, which a trial finds; which results are joined.

        Raises:
            CannotDivide: they cannot be.
        """
        kind = inputs.kind, module is not None and module.training
        found = self._divisions.get((unit.index, kind))
        if found is None:
            title = f"unit {unit.title}"
            trial = Trial(changes_with_batch(plain, module, title), inputs, self._in_chunk)
            try:
                if (why := inputs.why_not()) is not None:
                    raise CannotDivide(why)
                found = trial.division(self._of_classes.get((type(module), kind)))
            except CannotDivide as error:
                raise CannotDivide(f"{title} is run in {self.count} chunks: {error}. {_HELP}") from error
            except Exception as error:
                error.add_note(f"{title} was being run in {self.count} chunks: {inputs.told}.")
                raise
            self._divisions[unit.index, kind] = self._of_classes[type(module), kind] = found
        inputs.divide(found.divided)
        return found.joined

    def _without_graph(
        self,
        unit: Unit,
        module: nn.Module | None,
        inner: Callable[..., Any],
        plain: Callable[..., Any],
        inputs: Inputs,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The result of a call that no backward follows: in chunks, or else whole.

        Whatever comes in an evaluation is welcome: a batch of another size, a cache of keys and values.
        """
        key = unit.index, (inputs.kind, module is not None and module.training)
        if inputs.why_not() is not None or inputs.holds_objects or self._divisions.get(key, 1) is None:
            return inner(*args, **kwargs)
        title = f"unit {unit.title}"
        try:
            joined = self._divide(unit, module, plain, inputs)
            function = changes_with_batch(inner, module, title)
            call = Chunked(function, inputs, title=title, in_chunk=self._in_chunk, joined=joined, help=_HELP)
            return call.without_graph()
        except Changes:
            raise
        except Exception:
            self._divisions[key] = None
            return inner(*args, **kwargs)

    def with_graph(self, call: Chunked, trains: bool) -> Any:
        """The result of ``call``, whose inputs wait for the backward where they are to wait."""
        if trains and self._trigger is None:
            self._trigger = torch.zeros((), requires_grad=True)
        trigger = self._trigger if trains else None
        if not self._offload_inputs:
            return call.with_graph(trigger)
        with save_on_cpu(pin_memory=self._pin_memory):
            return call.with_graph(trigger)

    @property
    def in_chunk(self) -> Context:
        return self._in_chunk

    @contextlib.contextmanager
    def _in_chunk(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @contextlib.contextmanager
    def adding_up(self) -> Iterator[None]:
        """Gradients that arrive inside are added up, and handed over at the end."""
        passes = self._passes()
        assert passes is not None
        passes.backward_begins()
        before, self.sums = self.sums, Sums()
        try:
            yield
            found = self.sums
        finally:
            self.sums = before
        # Inside of the chunks of another call, gradients go on to its sums.
        found.hand_over(passes.grad_arrived)
