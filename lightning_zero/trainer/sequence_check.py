"""Before the first real step, compare a short step on whole sequences with a step on parts; see sequence/check.py."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_zero.checkpoint.rng import Generators
from lightning_zero.comm.sequence import OnPaper, SequenceGroup
from lightning_zero.device import recording
from lightning_zero.engine import Engine
from lightning_zero.engine.passes.writes import Writes
from lightning_zero.sequence.check import (
    Agreeing,
    Found,
    Sums,
    difference,
    difference_of_evaluations,
    kind_of,
    refusal,
    trying,
    unit,
)
from lightning_zero.sequence.part import Window
from lightning_zero.sequence.step import SequenceSteps
from lightning_zero.settings import ConfigError

_TRIES = (0.0, 0.5, 1.0)  # where in a sequence (0: start) the short piece is taken; a start may have no labels
_LOSS_SCALE = 1024.0  # largest loss scale of fp16 in a trial step: a run's first scale may overflow
_SEED = 1


class SequenceCheck:
    """Checks that a run's steps give the same results on parts of sequences as on whole sequences. Trial steps change
    nothing in modules, optimizers, random numbers and logs. ``found``: results of the trial step under way, or None."""

    def __init__(self, module: Any, engine: Engine, steps: SequenceSteps, group: SequenceGroup) -> None:
        self._module, self._engine, self._steps, self._group = module, engine, steps, group
        self._known: set[str] = set()  # kinds of steps that need no trial any more
        self._counts: dict[str, int] = {}  # steps by kind
        self._due: dict[str, int] = {}  # the step of that kind before which the next trial is
        self.found: Found | None = None

    def before(self, name: str, step: Callable[..., Any], args: Any, *, together: bool) -> None:
        """Before the step ``name``, run two trial steps on short sequences cut from its batch: one on whole sequences,
        one on parts. Raise ConfigError on all ranks if their results differ. Collective.

        Trials run once for each structure of batches, and again before steps 2, 4, 8, ... while some gradient is zero,
        because a zero gradient (behind weights that are initialized to zero) cannot show a difference.

        ``together``: whether all ranks call this method now. If not, trials run only if all ranks share one sequence.
        """
        kind = f"{name} {kind_of(args[0])}"
        self._counts[kind] = count = self._counts.get(kind, 0) + 1
        new = kind not in self._known and count >= self._due.get(kind, 1)
        alone = self._group.size == self._engine.comm.world_size
        if not (self._any(new) if together and not alone else new and alone):
            return
        self._steps.cut(args[0])  # refuses a batch that cannot be cut
        for number, at in enumerate(_TRIES):
            window = Window(self._group.size, at)
            whole = self._try(name, step, args, window, number, OnPaper(1))
            before = self._sums_of_parameters()
            parts = self._try(name, step, args, window, number, self._group)
            # A write that the second step does not repeat (a clamp, say) leaves the real step as it is.
            written = [key for key, total in self._sums_of_parameters().items() if before[key] != total]
            if name != "training_step" or not self._any(not whole.says_something):
                what = "the check of zero.sequence_parallel"
                table = self._group.gather_objects({**vars(parts), "output": None}, what)
                self._engine.comm.together(what, partial(self._compare, name, written, whole, parts, table))
                if name == "training_step" and self._any(whole.has_zeros):
                    self._due[kind] = 2 * count
                else:
                    self._known.add(kind)
                return
        rank_zero_warn(
            f"zero.sequence_parallel: this batch cannot show whether {name} gives the same results on parts of "
            "sequences as on whole sequences, because its loss is not finite or has no gradients. The next batch is "
            "tried."
        )

    def _any(self, flag: bool) -> bool:
        return bool(self._engine.comm.max_(torch.tensor([flag], dtype=torch.uint8)).item())

    def _sums_of_parameters(self) -> dict[str, int]:
        """Return a checksum of this rank's elements of each parameter, by name. Users' writes are included."""
        engine, found = self._engine, dict[str, int]()
        engine.passes.wait_for_all()
        engine.passes.writes.take_all_over()
        for bucket in engine.buckets:
            own = bucket.own_compute_params()
            found |= {info.fqn: Writes.own_checksum(bucket, info.slot, own) for info in bucket.params}
        return found

    def _compare(self, name: str, written: list[str], whole: Found, parts: Found, table: list[Any]) -> None:
        """Raise ConfigError if the results ``whole`` and ``parts`` differ, or if the step has changed parameters, whose
        names are in ``written``. ``table``: each rank's results on parts."""
        if written:
            raise ConfigError(
                f"zero.sequence_parallel: expected {name} not to change parameters, got a write to {written[0]}. "
                f"({name} was tried on a short piece of the first batch, and the write would remain.) Write to "
                "parameters in on_train_batch_end, inside lightning_zero.gather(self), or set zero.sequence_parallel=1."
            )
        rank, ranks = self._group.rank, [Found(**found) for found in table]
        rounding, ranks[rank] = unit([whole, *ranks]), parts
        if name == "training_step":
            what = difference(whole, ranks, rounding)
        else:
            what = difference_of_evaluations(whole, ranks, rank, rounding)
        if what is not None:
            raise ConfigError(refusal(name, what))

    # -- one step -------------------------------------------------------------------------------------------------

    def _try(self, name: str, step: Callable[..., Any], args: Any, window: Window, number: int, sharers: Any) -> Found:
        part, own = self._steps.cut(args[0], window, sharers)
        own = apply_to_collection(own, Tensor, torch.clone)  # a step may change its batch
        in_parts, agreeing = sharers is self._group, Agreeing(_SEED + number)
        computing = part if in_parts else None
        if part is not None and part.length is not None:
            agreeing.length = part.length * sharers.size // self._group.size
        engine, sums, evaluates = self._engine, Sums(), name != "training_step"
        self.found = found = Found()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(recording.unheard())
                stack.enter_context(trying())
                stack.enter_context(_left_as_it_is(self._module, engine.comm.device, self._log))
                if not evaluates:
                    stack.enter_context(engine.passes.looking(lambda info, grad: sums.add(info.fqn, grad)))
                stack.enter_context(agreeing)
                stack.enter_context(engine.step_scope(f"the check of {name}", evaluation=evaluates))
                if evaluates:
                    found.output = self._steps.evaluate(computing, step, own, *args[1:])
                else:
                    output = self._steps.train(computing, step, own, *args[1:])
                    loss = output.get("loss") if isinstance(output, dict) else output
                    if isinstance(loss, Tensor) and self._module.automatic_optimization:
                        self.backward(loss)
        except Exception as error:
            by_hand = not (evaluates or self._module.automatic_optimization)
            error.add_note(
                f"(Raised while {name} was tried on short pieces of the first batch, "
                f"{'in parts' if in_parts else 'whole'}, because of zero.sequence_parallel."
                f"{' There each param.grad is None: use gradients in on_before_optimizer_step.' * by_hand})"
            )
            raise
        finally:
            self.found = None
        found.sums = sums.values()
        found.rounding = max(sums.rounding, part.rounding if part is not None else 0.0)
        return found

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward of the trial step. ``loss`` is always the loss over whole sequences. Collective."""
        assert self.found is not None
        self.found.losses.append(float(loss.detach()))
        scaler = self._module.trainer.precision_plugin.scaler
        if scaler is not None:
            loss = loss * min(scaler.scale, _LOSS_SCALE)
        with self._steps.backward(), self._engine.passes.backward_scope():
            self._module.backward(loss, *args, **kwargs)

    def _log(self, name: str, value: Any, *args: Any, reduce_fx: Any = "mean", **more: Any) -> None:
        """Record a number that the trial step logs. During that step, this method replaces the module's ``log``."""
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            assert self.found is not None
            self.found.logged[name] = float(value), str(getattr(reduce_fx, "__name__", reduce_fx))


@contextlib.contextmanager
def _left_as_it_is(module: Any, device: torch.device, log: Callable[..., None]) -> Iterator[None]:
    """Let ``module`` run a step in the body, then undo the step's effects on ``module`` and Lightning's objects."""
    numbers = Generators.now(device)
    strategy, scaler = module.trainer.strategy, module.trainer.precision_plugin.scaler
    told = [vars(inner) for inner in module.modules()]
    told += [vars(scaler)] if scaler is not None else []
    told += [vars(optimizer) for optimizer in strategy._lightning_optimizers]
    told += [vars(config.scheduler) for config in strategy.lr_scheduler_configs]
    told += [group for optimizer in strategy.optimizers for group in optimizer.param_groups]
    undo = [_keep(values) for values in told]
    for config in strategy.lr_scheduler_configs:  # a step would reach schedulers inside
        config.scheduler.step = lambda *_, **__: None
    for optimizer in strategy._lightning_optimizers:  # these hooks count steps of manual optimization
        optimizer._on_before_step = optimizer._on_after_step = lambda: None
    with warnings.catch_warnings():  # the real step will warn again
        warnings.simplefilter("ignore")
        module.__dict__["log"] = log
        try:
            yield
        finally:
            for put_back in undo:
                put_back()
            numbers.restore(device)


def _keep(values: dict[str, Any]) -> Callable[[], None]:
    """Copy ``values``, and the tensors and containers nested in it. Return a function that restores all of them."""
    attributes = dict(values)
    todo: list[Any] = [attributes]
    tensors: dict[int, tuple[Tensor, Tensor, int]] = {}
    containers: dict[int, tuple[Any, Any]] = {}
    while todo:
        for value in _flat(todo.pop()):
            if isinstance(value, Tensor):
                has_values = not (isinstance(value, nn.Parameter) or value.is_inference() or value.is_meta)
                if has_values and id(value) not in tensors:
                    tensors[id(value)] = value, value.detach().clone(), value._version
            elif isinstance(value, (dict, list, tuple, set, deque)) and id(value) not in containers:
                containers[id(value)] = value, value if isinstance(value, tuple) else copy.copy(value)
                todo.append(value)

    def put_back() -> None:
        values.clear()
        values.update(attributes)
        for value, before in containers.values():
            if list(map(id, _flat(value))) != list(map(id, _flat(before))):
                value.clear()
                value.extend(before) if isinstance(value, (list, deque)) else value.update(before)
        with torch.no_grad():
            for tensor, before, version in tensors.values():
                # Running statistics of norms change without a new version.
                if tensor._version != version or (tensor.layout is torch.strided and not tensor.equal(before)):
                    tensor.copy_(before)

    return put_back


def _flat(container: Any) -> list[Any]:
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)
