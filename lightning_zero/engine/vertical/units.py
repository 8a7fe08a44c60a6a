"""Runs forwards of units on chunks of the batch, except units that are known to mix the samples of a batch.

A unit is gathered once for all chunks of its forward, and once for its backward. Gradients of all chunks are summed in
fp32 and reach the reducer as those of one backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_zero.engine.passes.containers import Args, Kwargs
from lightning_zero.engine.passes.passes import Passes
from lightning_zero.engine.passes.recompute import Context, UnitForward, without_empty_caches
from lightning_zero.engine.passes.saved_weights import hooks_allowed
from lightning_zero.engine.units.unit import Unit
from lightning_zero.engine.vertical.chunked import (
    CannotDivide,
    Changes,
    Chunked,
    Division,
    Inputs,
    explained,
    first_size,
)
from lightning_zero.engine.vertical.trial import Trial
from lightning_zero.settings import ConfigError, ZeroConfig

_HELP = (
    "Run such units on the whole batch with zero.unit.whole_batch=[Class], choose other units with zero.unit.classes, "
    "or set zero.vertical_chunks=1."
)


class Vertical:
    """Holds what the units of one engine share to run in chunks: number of chunks, batch size, known divisions."""

    def __init__(self, count: int, module: nn.Module, passes: Passes, keeping: Context) -> None:
        self.count = count
        self.batch: int | None = None  # number of samples in the step's batch, if known
        self.inside = 0  # depth of nested chunks; units inside of chunks are not divided again
        self.divisions: dict[Hashable, Division] = {}  # by unit class, because most blocks are alike
        self._step_has_told = False
        self._keeping = keeping
        if count > 1:
            passes.hooks.watch_arguments(module, self._root_called)

    @contextlib.contextmanager
    def step(self, batch: object, *, evaluation: bool) -> Iterator[None]:
        """Tell units the size of ``batch`` for calls inside the ``with``. Raises ConfigError if a training batch does
        not divide by the number of chunks."""
        size = first_size(batch) if self.count > 1 else None
        if size is not None and size % self.count and not evaluation:
            raise ConfigError(
                f"zero.vertical_chunks: expected a batch that divides by {self.count}, got {size} samples (the first "
                "dimension of the first tensor in it). Change the batch size (data.batch_size) or "
                "zero.vertical_chunks; if it is the last batch of an epoch, set drop_last=True in its DataLoader."
            )
        before = self.batch, self._step_has_told
        self.batch, self._step_has_told = size, size is not None
        try:
            yield
        finally:
            self.batch, self._step_has_told = before

    def _root_called(self, args: Args, kwargs: Kwargs) -> None:
        """Take the batch size from the root module's arguments if :meth:`step` could not find it in its batch."""
        if not self._step_has_told and not self.inside:
            self.batch = first_size((args, kwargs))

    @contextlib.contextmanager
    def in_chunk(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def run(self, call: Chunked, *, trains: bool) -> Any:
        """Return the result of ``call``, whose inputs ``activation_checkpointing=offload`` keeps on the host."""
        with self._keeping():
            return call(trains=trains)


class UnitInChunks:
    def __init__(self, unit: Unit, module: nn.Module, vertical: Vertical, passes: Passes) -> None:
        self._unit, self._vertical = unit, vertical
        self._module, self._passes = ref(module), ref(passes)
        self._divisions: dict[Hashable, Division | None] = {}  # by kind of inputs and modes; None: run undivided
        self._title = f"unit {unit.title}"

    def __call__(self, forward: UnitForward, args: Args, kwargs: Kwargs) -> object:
        vertical, module = self._vertical, self._module()
        if vertical.inside or module is None:
            return forward.inner(*args, **kwargs)
        size = vertical.batch if vertical.batch is not None else first_size((args, kwargs))
        if torch.is_grad_enabled():
            args, kwargs = without_empty_caches(type(module), args, kwargs)
        inputs = Inputs(args, kwargs, size, vertical.count)
        kind = inputs.kind, module.training, torch.is_grad_enabled()
        trains = [param.requires_grad for param in module.parameters()]
        needed = any(trains) or any(tensor.requires_grad for tensor in inputs.tensors)
        if torch.is_grad_enabled() and needed:
            return self._in_chunks(forward, module, inputs, kind, trains)
        # No backward follows, so calls that cannot be divided (another batch size, a key-value cache) run whole.
        if inputs.why_not() is None and not inputs.holds_objects and self._divisions.get(kind, 1) is not None:
            try:
                return self._in_chunks(forward, module, inputs, kind, [])
            except Changes:
                raise
            except Exception:
                self._divisions[kind] = None
        return forward.inner(*args, **kwargs)

    def _in_chunks(
        self, forward: UnitForward, module: nn.Module, inputs: Inputs, kind: Hashable, trains: list[bool]
    ) -> object:
        in_chunk = partial(self._in_chunk, module)
        joined = self._divide(forward.plain, module, inputs, kind, in_chunk)
        call = Chunked(
            forward.inner,
            inputs,
            title=self._title,
            in_chunk=in_chunk,
            in_backward=partial(self._in_backward, trains),
            joined=joined,
            help=_HELP,
        )
        return self._vertical.run(call, trains=any(trains))

    def _divide(
        self, plain: Callable[..., object], module: nn.Module, inputs: Inputs, kind: Hashable, in_chunk: Context
    ) -> tuple[bool, ...]:
        """Set which ``inputs`` are divided, as in an earlier call of this ``kind`` or by trial.

        Returns which results to join. ``plain`` is the uncompiled forward, as one trial is not worth a compilation.
        """
        division = self._divisions.get(kind)
        if division is None:
            of_class = type(module), kind
            with explained(inputs, self._title, _HELP):
                if (why := inputs.why_not()) is not None:
                    raise CannotDivide(why)
                division = Trial(plain, inputs, in_chunk).division(self._vertical.divisions.get(of_class))
            self._divisions[kind] = self._vertical.divisions[of_class] = division
        inputs.divided = division.divided
        return division.joined

    @contextlib.contextmanager
    def _in_chunk(self, module: nn.Module) -> Iterator[None]:
        passes = self._passes()
        packs = torch.is_grad_enabled() and passes is not None and self._unit.reshards and hooks_allowed()
        with (
            self._vertical.in_chunk(),
            keeping_buffers(module, self._title),
            passes.saved.packed() if passes is not None and packs else contextlib.nullcontext(),
        ):
            yield

    @contextlib.contextmanager
    def _in_backward(self, trained: list[bool]) -> Iterator[None]:
        passes, module = self._passes(), self._module()
        assert passes is not None and module is not None, "the engine is gone but its backward is not"
        if trained != [param.requires_grad for param in module.parameters()]:
            raise RuntimeError(
                f"{self._title} is computed again in backward (zero.vertical_chunks), and requires_grad of its "
                "parameters has changed since its forward. Change it (toggle_optimizer, unfreezing) before a forward "
                "or after its backward."
            )
        passes.recomputes(self._unit)
        with passes.adding_up():
            yield


def whole_batch_units(module: nn.Module, names: Sequence[str], config: ZeroConfig) -> set[str]:
    """Return the names of units that run on the whole batch.

    These are the root, units that hold other units, and units that hold a class of ``zero.unit.whole_batch``.
    """
    wanted = set(config.unit.whole_batch)
    classes = {name: {type(inner).__name__ for inner in module.get_submodule(name).modules()} for name in names if name}
    return {""} | units_around(names) | {name for name, found in classes.items() if found & wanted}


def units_around(names: Sequence[str]) -> set[str]:
    """Return the names of the units that hold other units. These run on the whole batch, as the root does."""
    return {name for name in names if any(name and other.startswith(f"{name}.") for other in names)}


def check_divided(module: nn.Module, names: Sequence[str], config: ZeroConfig) -> None:
    """Raise ConfigError if a unit that is to run in chunks mixes samples, or if no unit is to run in chunks.

    Also raise if ``zero.unit.whole_batch`` names a class that no unit is or holds.
    """
    if config.vertical_chunks == 1:
        return
    present = {type(m).__name__ for name in names if name for m in module.get_submodule(name).modules()}
    if missing := sorted(set(config.unit.whole_batch) - present):
        raise ConfigError(
            f"zero.unit.whole_batch: expected class names of units, or of modules inside of them, got {missing[0]!r}, "
            f"which does not occur. They have {', '.join(sorted(present))}. Change zero.unit.whole_batch."
        )
    whole = whole_batch_units(module, names, config)
    divided = [name for name in names if name not in whole]
    if not divided:
        raise ConfigError(
            f"zero.vertical_chunks: expected units that run in chunks, got {config.vertical_chunks} with a model none "
            "of whose units do. Name blocks in zero.unit.classes, change zero.unit.whole_batch, or set "
            "zero.vertical_chunks=1."
        )
    for name in divided:
        unit = module.get_submodule(name)
        for inner_name, why in coupling_parts(unit):
            inner = unit.get_submodule(inner_name)
            raise ConfigError(
                f"zero.vertical_chunks={config.vertical_chunks}: unit {name} ({type(unit).__name__}) holds "
                f"{inner_name or 'itself'} ({type(inner).__name__}), which {why}. Run such units on the whole batch "
                f"with zero.unit.whole_batch=[{type(inner).__name__}], or set zero.vertical_chunks=1."
            )


def coupling_parts(unit: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for modules in ``unit`` that are known to compute something else on chunks of a batch."""
    for name, inner in unit.named_modules():
        if isinstance(inner, _BatchNorm) and (inner.training or not inner.track_running_stats):
            yield name, "normalizes over the samples of a batch"
        elif isinstance(inner, _InstanceNorm) and inner.training and inner.track_running_stats:
            yield name, "averages statistics over the samples of a batch"
        elif isinstance(inner, (nn.RNNBase, nn.MultiheadAttention)) and not inner.batch_first:
            yield name, "takes the batch as its second dimension (batch_first=False)"
        elif isinstance(inner, _SpectralNorm) or any(
            isinstance(hook, SpectralNorm) for hook in inner._forward_pre_hooks.values()
        ):
            yield name, "changes its weight at every call (spectral_norm)"


@contextlib.contextmanager
def keeping_buffers(module: nn.Module, title: str) -> Iterator[None]:
    """Raise Changes if the forward in the body changes a buffer of ``module``, as every chunk would change it again."""
    before = [(name, buffer, buffer._version) for name, buffer in module.named_buffers() if not buffer.is_inference()]
    yield
    now = dict(module.named_buffers()) if before else {}
    for name, buffer, version in before:
        if now.get(name) is not buffer or buffer._version != version:
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise Changes(
                f"{title} is run in chunks (zero.vertical_chunks), and its forward changes the buffer {name} of "
                f"{owner}, which would be that of chunks, and change with each of them. Run such units on the whole "
                f"batch with zero.unit.whole_batch=[{owner}], or set zero.vertical_chunks=1."
            )
