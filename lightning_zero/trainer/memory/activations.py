"""Measure the memory that a micro-batch needs besides parameters, by one forward and backward on fake tensors.

A copy of the module runs its own ``training_step``, and every storage counts until it is freed. Fake tensors are on a
fake CPU, so scratch memory of GPU kernels does not count.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from lightning_zero.comm.sequence import OnPaper
from lightning_zero.engine.passes.containers import dtype_hooks
from lightning_zero.engine.passes.recompute import without_empty_caches
from lightning_zero.engine.units.describe import AUTOCAST_DTYPES, TRUE_DTYPES, describe_units, fp32_modules, recomputes
from lightning_zero.lightning_api import extract_batch_size, isolate_rng, pl
from lightning_zero.planning.activations import Activations, ByBatchSize, Stretch
from lightning_zero.sequence.step import SequenceSteps
from lightning_zero.settings import ConfigError, Precision, ZeroConfig
from lightning_zero.trainer.callbacks.flops import flops_of
from lightning_zero.trainer.memory.fake_module import (
    CPU,
    detach_from_lightning,
    fake_copy,
    give_fake_optimizers,
    watch_gradients,
)


class NotMeasured(ConfigError):
    """Raised if the module does not run on fake tensors."""


# -- counting ---------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations in the body create: ``now`` is their current sum, ``most`` the
    largest sum since :meth:`restart`.

    ``flops``: the body's FLOPs by torch's formulas. torch's own counter would keep tensors of checkpointed calls alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.flops = 0
        self._known: dict[int, int] = {}

    def restart(self) -> None:
        self.most = self.now

    def ignore(self, tensors: Any) -> None:
        """Do not count the storages of ``tensors``, a nested structure."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._add(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come here next
        reads = func is torch.ops.aten._local_scalar_dense.default
        if reads and isinstance(args[0], FakeTensor) and args[0].is_floating_point():
            return 1.0  # replaces a loss that is logged; reading a length or a condition raises
        result = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor, tensor.untyped_storage().nbytes())
        return result

    def _add(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = nbytes
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


class _Begins(torch.autograd.Function):
    """Returns its input unchanged, and calls ``begins`` when the backward reaches this point."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, begins: Callable[[], None]) -> Tensor:
        ctx.begins = begins
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.begins()
        return grads[0], None


class _Recorder:
    """Divides a step into intervals (:class:`Stretch`), in each of which one unit runs. ``slots``: number of gradients
    of each bucket."""

    def __init__(self, live: LiveBytes, slots: Sequence[int]) -> None:
        self._live, self._slots = live, slots
        self._unit, self.in_backward = 0, False
        self.stretches: list[Stretch] = []
        self._came: dict[int, set[int]] = {}
        self._begun: set[int] = set()
        self._done: set[int] = set()

    def enter(self, unit: int, *, backward: bool) -> None:
        """End the current stretch, record its peak bytes, and begin a stretch in which ``unit`` runs."""
        self.stretches.append(
            Stretch(self._unit, self.in_backward, self._live.most, frozenset(self._begun), frozenset(self._done))
        )
        self._begun, self._done = set(), set()
        self._unit, self.in_backward = unit, backward
        self._live.restart()

    def arrived(self, bucket: int, slot: int) -> None:
        if bucket not in self._came:
            self._begun.add(bucket)
        came = self._came.setdefault(bucket, set())
        came.add(slot)
        if len(came) == self._slots[bucket]:
            self._done.add(bucket)


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(
    module: pl.LightningModule, batch: Any, config: ZeroConfig, precision: Precision, *, trainer: Any = None
) -> Activations:
    """Run one forward and backward of ``module`` on fake tensors, and return its measured :class:`Activations`.
    ``module`` must not be sharded yet, can be on meta, and stays unchanged.

    Hooks around batches are not called. ``trainer``: the value of ``self.trainer`` in ``training_step``; default: a new
    Trainer. Raises NotMeasured if ``training_step`` fails on tensors without values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        # Lightning logs a new Trainer, and torch errors, which exceptions report too.
        with isolate_rng(include_cuda=False), quiet(logging.CRITICAL):
            return _Measurement(module, config, precision, mode, trainer).run(batch)
    except ConfigError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        raise NotMeasured(
            f"activations cannot be measured: training_step of {type(module).__qualname__} fails on tensors without "
            f"values: {type(error).__name__}: {text[0] if text else ''}"
        ) from error


@contextlib.contextmanager
def quiet(level: int) -> Iterator[None]:
    """In the body, silence log messages up to ``level``."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


class _Measurement:
    def __init__(
        self, module: pl.LightningModule, config: ZeroConfig, precision: Precision, mode: FakeTensorMode, trainer: Any
    ) -> None:
        self._config, self._precision, self._mode = config, precision, mode
        groups = describe_units(module, config, precision)
        dtypes: dict[int, torch.dtype] = {}
        places: dict[str, tuple[int, int]] = {}  # bucket and slot of each parameter, by name
        buckets = [bucket for group in groups for bucket in group.buckets]
        for number, bucket in enumerate(buckets):
            for slot, info in enumerate(bucket.params):
                dtypes[id(info.param)] = bucket.dtypes.compute
                places.update(dict.fromkeys(info.fqns, (number, slot)))
        if (true := TRUE_DTYPES.get(precision)) is not None:
            dtypes.update({id(b): true for b in module.buffers() if b.is_floating_point()})
        slots = [sum(info.param.requires_grad for info in bucket.params) for bucket in buckets]
        self._module = fake_copy(module, dtypes, mode)
        self._module.train()
        self._live = LiveBytes()
        self._recorder = _Recorder(self._live, slots)
        self._gradients = [
            (param, partial(self._recorder.arrived, *places[name]))
            for name, param in self._module.named_parameters()
            if param.requires_grad
        ]
        detach_from_lightning(self._module, trainer, self._backward)
        if not self._module.automatic_optimization:
            give_fake_optimizers(self._module)
        names = [group.name for group in groups]
        self._own: set[int] = set()  # storages of parameters and buffers
        for number, name in list(enumerate(names))[1:]:
            again = self._again if recomputes(module.get_submodule(name), config) else None
            self._watch(self._module.get_submodule(name), number, again)
        if precision in AUTOCAST_DTYPES:
            for inner in fp32_modules(self._module, config.precision.fp32_modules):
                _keep_output_dtype(inner)
        self._saved: dict[int, int] = {}
        self._sharers = OnPaper(config.sequence_parallel)

    def _again(self, module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a unit's forward ``inner`` with activation checkpointing, and return its output."""
        args, kwargs = without_empty_caches(type(module), args, kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    def _watch(self, module: nn.Module, unit: int, how: Callable[..., Any] | None) -> None:
        """Replace ``module.forward`` by a function that tells the recorder when ``unit`` begins and ends. ``how`` runs
        the unit's forward; None: run it unchanged."""
        inner, recorder = module.forward, self._recorder
        begins = partial(recorder.enter, unit, backward=True)

        def forward(*args: Any, **kwargs: Any) -> Any:
            recorder.enter(unit, backward=recorder.in_backward)
            output = inner(*args, **kwargs) if how is None else how(module, inner, args, kwargs)
            recorder.enter(0, backward=recorder.in_backward)
            return tree_map(mark, output)

        def mark(value: Any) -> Any:
            if isinstance(value, Tensor) and value.requires_grad:
                return _Begins.apply(value, begins)  # type: ignore[no-untyped-call]
            return value

        module.forward = forward

    def run(self, batch: Any) -> Activations:
        self._own = {t.untyped_storage()._cdata for t in (*self._module.parameters(), *self._module.buffers())}
        with self._mode:
            made: dict[int, Any] = {}  # a tensor given twice stays one tensor
            fake = tree_map(lambda value: made.setdefault(id(value), self._fake(value)), batch)
            self._live.ignore((list(self._module.parameters()), list(self._module.buffers()), fake))

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._own and not self._recorder.in_backward:  # else recomputed
                    self._saved[storage._cdata] = storage.nbytes()
                return tensor

            handles = watch_gradients(self._gradients)
            try:
                dtype = AUTOCAST_DTYPES.get(self._precision)
                with (
                    self._live,
                    saved_tensors_hooks(pack, lambda tensor: tensor),
                    torch.autocast("cpu", dtype=dtype, enabled=dtype is not None, cache_enabled=False),
                ):
                    self._train(fake)
                    self._recorder.enter(0, backward=True)
            finally:
                for handle in handles:
                    handle.remove()
            storages = (leaf.untyped_storage() for leaf in tree_leaves(fake) if isinstance(leaf, Tensor))
            nbytes = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        total, saved = float(self._live.flops), sum(self._saved.values())
        return Activations(tuple(self._recorder.stretches), saved, nbytes, total, self._sharers.sent)

    def _train(self, batch: Any) -> None:
        """Run one training step on fake tensors. If ranks share sequences, run it on one rank's part of the batch."""
        steps = SequenceSteps(self._module, self._sharers if self._config.sequence_parallel > 1 else None)
        given = inspect.signature(self._module.training_step).parameters.values()
        wanted = sum(p.kind is not inspect.Parameter.VAR_KEYWORD for p in given)
        first, *more = [batch, 0, 0][: max(1, wanted)]
        part, own = steps.cut(first)
        loss = steps.train(part, self._module.training_step, own, *more)
        if isinstance(loss, Mapping):  # the other outputs are freed before the backward
            loss = loss.get("loss")
        with steps.backward():
            if loss is not None and self._module.automatic_optimization:
                self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        self._recorder.enter(0, backward=True)
        with torch.autocast("cpu", enabled=False):
            loss.backward()

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = TRUE_DTYPES.get(self._precision) if value.is_floating_point() else None
        if isinstance(value, FakeTensor):
            return value if dtype is None else value.to(dtype)
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device=CPU)


def _keep_output_dtype(module: nn.Module) -> None:
    """Let ``module.forward`` convert inputs and outputs as the engine does for a module that computes in fp32."""
    before, after = dtype_hooks(module)
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        if before is not None:
            args, kwargs = before(module, args, kwargs) or given
        output = inner(*args, **kwargs)
        changed = after(module, *given, output)
        return output if changed is None else changed

    module.forward = forward


def measure_sizes(
    module: pl.LightningModule, batch: Any, config: ZeroConfig, precision: Precision, *, trainer: Any = None
) -> ByBatchSize:
    """Measure activations for ``batch`` and for a batch of twice its size. Other sizes are interpolated from the two;
    if the larger batch fails, only ``batch``'s size is known. Raise NotMeasured if ``batch`` cannot be measured."""
    first = measure(module, batch, config, precision, trainer=trainer)
    try:
        size = extract_batch_size(batch)
        second = measure(module, of_size(batch, size, 2 * size), config, precision, trainer=trainer)
    except (NotMeasured, pl.utilities.exceptions.MisconfigurationException):
        return ByBatchSize((1, 1), (first, first))
    if [s.unit for s in first.stretches] != [s.unit for s in second.stretches]:
        return ByBatchSize((size, size), (first, first))

    def of_another(wanted: int) -> Activations | None:
        try:
            return measure(module, of_size(batch, size, wanted), config, precision, trainer=trainer)
        except NotMeasured:
            return None

    return ByBatchSize((size, 2 * size), (first, second), of_another)


def of_size(batch: Any, size: int, wanted: int) -> Any:
    """Return a batch like ``batch``, but with ``wanted`` samples instead of ``size``. The new tensors are on meta."""
    made: dict[int, Any] = {}  # a tensor given twice stays one tensor

    def resized(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == size:
            return torch.empty((wanted, *value.shape[1:]), dtype=value.dtype, device="meta")
        return value

    return tree_map(lambda value: made.setdefault(id(value), resized(value)), batch)
