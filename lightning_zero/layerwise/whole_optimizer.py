"""Step whole tensors with the user's optimizer, each on the rank that owns it.

This is for optimizers that need all of a tensor (Muon, Adafactor, Shampoo, SOAP, LAMB), and for unknown classes. Every
rank calls the class's own ``step`` once, on the tensors that the rank owns, in the parameters' shapes. Each message
sends the masters and gradients of adjacent units to the owners before the step, and new masters back after the step.
Replicated tensors are stepped in place::

    open 0, 1 | bring 0 | open 2 | bring 1 | bring 2 | step all | give back 0 | give back 1 | give back 2

One rank of each shard group owns all tensors if the step of a tensor depends on others (Prodigy), or if the step calls
its closure in the middle (LBFGS). Other ranks then call the closure as often as the owner's step does::

    owner     bring | step: compute | give back | closure | bring | compute ... | give back
    others    send  |       wait    | receive   | closure | send  | wait    ... | receive
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm.agreements import FailedElsewhereError
from lightning_zero.comm.communicator import Communicator
from lightning_zero.device import recording
from lightning_zero.engine.steps.interception import AroundStep, run_methods_by
from lightning_zero.engine.steps.optimizer import Stepper
from lightning_zero.engine.steps.runs import ParamStates
from lightning_zero.engine.torch_modes import callers_autocast, without_autocast
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.master_storage import FlatSlice, opened
from lightning_zero.layerwise.messages import Message, broadcast_from_owner, transfer_of
from lightning_zero.layerwise.owned import Owned, WholeTensor
from lightning_zero.optimizers.known import changes_outside_step, hooks_set_aside
from lightning_zero.optimizers.probe import probe
from lightning_zero.optimizers.side_effects import Effects, Watch, listed, take_over
from lightning_zero.optimizers.state_trees import Leaf, StateShape
from lightning_zero.optimizers.trial import refuse_wrapped_state, step_of
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.owners import (
    MessageBytes,
    Route,
    Transfer,
    choose_owners,
    find_route,
    matrix_work,
    message_bytes,
    split_messages,
    step_peak,
)
from lightning_zero.planning.placement import Placement, StageRow, Tier
from lightning_zero.ranks.progress import SILENT, LongWork
from lightning_zero.settings import ConfigError, Precision

_log = logging.getLogger(__name__)

MOST_ROUTES = 1000  # limit of the cache of routes
_PARTIAL = (
    "The step was partial: some tensors had been stepped when this error was raised. Load the last checkpoint before "
    "you continue training."
)


class WholeOptimizer(Stepper):
    def __init__(
        self,
        optimizer: Optimizer,
        around: AroundStep,
        comm: Communicator,
        numbers: Mapping[Bucket, int],
        *,
        message_nbytes: int,
        unprobed: bool = False,
    ) -> None:
        super().__init__(optimizer, around)
        self._comm, self._numbers = comm, numbers  # the index of each bucket, in the order of units
        self._message_nbytes = message_nbytes  # of gradients that are sent at a time
        self._known_states = 0  # number of tensors whose state has been looked at
        self._unprobed = unprobed  # accept an optimizer that could not be tried
        self._try()
        self.owned = Owned(optimizer)
        self._messages: list[list[WholeTensor]] = []
        self._arranged: list[tuple[int, int, int]] = []

        @lru_cache(MOST_ROUTES)  # the set of parameters with gradients may change from step to step
        def find(buckets: tuple[Bucket, ...], transfers: tuple[Transfer, ...]) -> Route:
            return find_route(transfers, [bucket.layout for bucket in buckets], comm.shard.index)

        self._find_route = find
        self._patch()
        if changes_outside_step(optimizer):
            run_methods_by(self._run_method, optimizer)
        self.load_param_states(self._pop_states())

    def _follow(self, optimizer: Optimizer) -> None:
        self.owned.follow(optimizer)

    def _drop_state(self) -> None:
        self.owned.clear()

    def load_param_states(self, states: ParamStates, long_work: LongWork = SILENT) -> None:
        for bucket, groups in self.groups().items():
            if not bucket.plan.trainable and any((bucket, slot) in states for slot in groups):
                bucket.make_trainable()
        self.owned.clear()
        self._arranged = []
        self._follow_groups()
        for bucket in long_work.items(self.owned.buckets(), "loading optimizer state, in buckets"):
            self.owned.fill(bucket, states, self.state_dtype)

    def reload(self, bucket: Bucket, states: ParamStates) -> None:
        self.owned.forget(bucket)
        self.owned.fill(bucket, states, lambda tensor, name: None)

    def state_dtype(self, tensor: WholeTensor, name: str) -> torch.dtype | None:
        """Return the dtype in which the optimizer makes the state ``name``; None if a trial step made no such state."""
        return next((shape.dtype for shape in self._shapes(tensor) if shape.name == name), None)

    def _shapes(self, tensor: WholeTensor) -> Sequence[StateShape]:
        return self.probed.states.get((tensor.group, len(tensor.info.shape), tensor.bucket.dtypes.master), ())

    def _shape_of_state(self, place: Place, name: str) -> Sequence[int] | None:
        tensor = self.owned.tensors.get((place.bucket, place.info.slot))
        if tensor is None or not self._is_of_torch:  # other classes may treat the trial's small tensors differently
            return None
        return next((shape.sizes(tensor.info.shape) for shape in self._shapes(tensor) if shape.name == name), None)

    def _try(self) -> None:
        """Run trial steps. Raise ConfigError as :meth:`_check_probed` does if masters are sharded or tensors are
        stepped together, and for a class that calls its closure itself if steps may be skipped."""
        place_of = self._around.place_of
        self._is_of_torch = step_of(self.optimizer).__module__.startswith("torch.optim.")
        self.probed = probe(
            self.optimizer,
            lambda p: place_of(p).bucket.dtypes.master,
            self._comm.device,
            true_shapes=not self._is_of_torch,  # torch's (Muon, Adafactor) treat tensors of all sizes the same way
        )
        self._probed_groups = len(self.optimizer.param_groups)
        if self.probed.untried and self._comm.rank == 0:
            shapes = ", ".join(map(str, sorted(self.probed.untried)))
            _log.warning(
                "zero.optimizer.sharding: %s was not tried on tensors of these shapes, which are too large: %s. It is "
                "assumed to step each of these tensors by itself, as it does with smaller ones.",
                type(self.optimizer).__qualname__,
                shapes,
            )
        if self._is_together or any(p.bucket.plan.shards_master for group in self.places() for p in group):
            self._check_probed()
        passes = self._around.passes
        if self.probed.calls_closure and (
            passes.precision is Precision.fp16 or passes.config.optimizer.skip_nonfinite is not None
        ):
            raise ConfigError(
                f"optimizer: expected a class that can skip a step, got {type(self.optimizer).__qualname__}, whose "
                "step() calls its closure itself. Use zero/precision=bf16 or fp32, and drop "
                "zero.optimizer.skip_nonfinite."
            )

    def check_stage(self, row: StageRow) -> None:
        if row.master is Placement.sharded:
            self._check_probed()

    def replanned(self) -> None:
        self._arranged = []

    @property
    def _is_together(self) -> bool:
        """Return whether one rank of a shard group must own all tensors, because they cannot be stepped separately."""
        return self.probed.couples or self.probed.apart

    def _check_probed(self) -> None:
        """Raise ConfigError if a trial failed (unless ``unprobed``), or if no rank has all tensors to step together."""
        kind, failed = type(self.optimizer).__qualname__, self.probed.failed
        if self._is_together:
            if any(place.info.split is not None for group in self.places() for place in group):
                raise ConfigError(
                    f"optimizer: expected a class that steps each tensor by itself, got {kind}, whose step depends on "
                    "several tensors, and no rank has all of them under tensor or expert parallelism. Use another "
                    "optimizer, or drop zero.tensor_parallel and zero.expert_parallel."
                )
            if self._comm.rank == 0 and self._comm.shard.size > 1:
                _log.warning(
                    "zero.optimizer.sharding: %s steps tensors together, so one rank of each group that shards "
                    "parameters has the master weights, gradients and optimizer state of all tensors in a step.",
                    kind,
                )
            return
        if failed is not None and not self._unprobed:
            raise ConfigError(
                f"zero.optimizer.sharding: {kind} failed in the trial step that shows whether it steps each tensor by "
                f"itself: {type(failed).__name__}: {failed}. If it does, set zero.optimizer.sharding=tensors; "
                "otherwise choose zero/stage=zero0."
            ) from failed

    def state_tensors(self, bucket: Bucket) -> Iterator[Tensor]:
        return (leaf for _, _, leaf in self.owned.leaves(bucket))

    def entries(self, bucket: Bucket, *, once: bool = False) -> dict[int, dict[str, Any]]:
        return self.owned.entries(bucket)

    def parts(self, bucket: Bucket) -> Iterator[tuple[int, str, int, FlatSlice]]:
        return ((tensor.info.slot, name, 0, values) for tensor, name, _, values in self.owned.parts(bucket))

    def gathered(self, bucket: Bucket, slots: Mapping[int, Sequence[Leaf]]) -> Iterator[tuple[int, Leaf, Tensor]]:
        with opened(bucket.storage):
            own = {(tensor.info.slot, name): value for tensor, name, value in self.owned.leaves(bucket)}
            for slot, leaves in sorted(slots.items()):
                if (tensor := self.owned.tensors.get((bucket, slot))) is None:
                    continue
                for leaf in leaves:
                    values = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=bucket.comm.device)
                    if tensor.is_here:
                        values.copy_(own[slot, leaf.name])
                    if tensor.travels or tensor.is_broadcast:
                        broadcast_from_owner(tensor, values)
                    yield slot, leaf, values

    def has_stepped(self, bucket: Bucket) -> bool:
        return self.owned.has_stepped(bucket)

    def planned_state(self, bucket: Bucket) -> Iterator[int]:
        if self.owned.has_stepped(bucket):
            for tensor in self.owned.here(bucket):
                yield from self._state_nbytes(tensor)

    def whole_state(self, bucket: Bucket, plan: BucketPlan | None = None) -> int:
        if plan is None:
            return sum(leaf.nbytes for leaf in self.state_tensors(bucket))
        return sum(
            sum(self._state_nbytes(tensor))
            for tensor in self.owned.tensors.values()
            if tensor.bucket is bucket and (tensor.is_owner or not (tensor.together or plan.shards_master))
        )

    def _state_nbytes(self, tensor: WholeTensor) -> list[int]:
        """Return the sizes in bytes of the state tensors that ``tensor`` gets at its first step, as found by trial."""
        return [shape.nbytes(tensor.info.shape) for shape in self._shapes(tensor)]

    def state_to_come(self, tier: Tier) -> int:
        return sum(
            sum(self._state_nbytes(tensor))
            for tensor in self.owned.tensors.values()
            if tensor.is_here and tensor.bucket.plan.tiers.master is tier
        )

    def step_peak(self) -> int:
        self._follow_groups()
        every = {id(tensor.info.param) for tensor in self.owned.tensors.values()}
        messages = []
        for message in self._messages:
            travel = [tensor for tensor in message if tensor.travels]
            buckets = tuple(dict.fromkeys(tensor.bucket for tensor in travel))
            transfers = tuple(transfer_of(t, buckets, every) for t in travel)
            sent = message_bytes(self._find_route(buckets, transfers)) if transfers else MessageBytes()
            copied = [t for t in message if t.is_here and (t.travels or self._is_copied(t))]
            values = sum(t.info.numel * t.bucket.dtypes.master.itemsize for t in copied)
            state = sum(sum(self._state_nbytes(t)) for t in copied if self._is_copied(t))
            messages.append(sent._replace(values=values + state, grads=values))
        return step_peak(messages)

    def _is_copied(self, tensor: WholeTensor) -> bool:
        """Return whether masters and state of ``tensor`` are stored off the device and copied to it for a step."""
        return self._comm.device.type != "cpu" and tensor.bucket.plan.storage_tier is not Tier.device

    # -- owners and messages ----------------------------------------------------------------------------------------

    def _follow_groups(self) -> None:
        """If param groups have changed, choose owners of newly added or trainable parameters, and form new messages."""
        wanted = [
            WholeTensor(place.bucket, place.info, -1, group, number, self._is_together)
            for group, places in enumerate(self.places())
            for number, place in enumerate(places)
            if place.bucket.plan.trainable
        ]
        wanted.sort(key=lambda t: (self._numbers[t.bucket], t.info.slot))
        arranged = [(self._numbers[t.bucket], t.info.slot, t.group) for t in wanted]
        if arranged == self._arranged:
            for tensor in wanted:
                self.owned.tensors[tensor.bucket, tensor.info.slot].place = tensor.place
            return
        if len(self.optimizer.param_groups) != self._probed_groups:
            was_together = self._is_together
            self._try()
            if self._is_together and not was_together:
                raise ConfigError(
                    "optimizer: expected param groups that are stepped as the first ones, got one with which tensors "
                    "must be stepped together. Give the optimizer all param groups before training."
                )
        known = [self.owned.tensors.get((t.bucket, t.info.slot)) for t in wanted]
        nbytes = [t.info.numel * t.bucket.dtypes.grad.itemsize for t in wanted]
        messages = split_messages(nbytes, [t.bucket.plan.unit for t in wanted], self._message_nbytes)
        costs = [matrix_work(t.info.shape) for t in wanted]
        owners = choose_owners(costs, self._comm.shard.size, [t.owner if t is not None else None for t in known])
        if self._is_together:
            owners = [0] * len(owners)
        for tensor, owner in zip(wanted, owners, strict=True):
            tensor.owner = owner
        self.owned.replace_tensors(wanted)
        tensors = [self.owned.tensors[t.bucket, t.info.slot] for t in wanted]
        self._messages = [[tensors[place] for place in message] for message in messages]
        self._arranged = arranged
        self._find_route.cache_clear()

    # -- step ---------------------------------------------------------------------------------------------------------

    def _step(self, used: set[int]) -> set[Bucket]:
        self._follow_groups()
        tensors = [tensor for message in self._messages for tensor in message]
        # If no tensor has a gradient, ``step`` still gets all tensors: the class may count its steps.
        every = self.probed.steps_all or self.probed.couples or not any(id(t.info.param) in used for t in tensors)
        changed = {t.bucket for t in tensors if every or id(t.info.param) in used}
        messages = self.messages(used, changed)
        self._step_once(messages, step_of(self.optimizer))
        self.stepped(messages)
        return changed

    def _run_method(self, name: str, method: Callable[[Optimizer], object]) -> None:
        """Run ``method``, a method of the class that changes parameters outside of steps. Collective."""
        places = [place for group in self.places() for place in group if place.bucket.plan.trainable]
        self._around.begins(places, name)
        self._follow_groups()
        changed = {place.bucket for place in places}
        self._step_once(self.messages(set(), changed), method)
        self._around.ends(changed, [place.info for place in places])

    def messages(self, used: set[int], changed: set[Bucket]) -> list[Message]:
        """Return messages for the tensors of the buckets in ``changed``. ``used``: ids of parameters with gradients."""
        sent = [[tensor for tensor in message if tensor.bucket in changed] for message in self._messages]
        return [Message(ts, used, self.owned, self._comm, self._find_route) for ts in sent if ts]

    def stepped(self, messages: Sequence[Message]) -> None:
        self.optimizer.__dict__["_opt_called"] = True  # torch's schedulers check this attribute
        self.owned.stepped(tensor for message in messages for tensor in message.tensors)

    def _step_once(self, messages: Sequence[Message], run: Callable[[Optimizer], object]) -> None:
        """Call ``run``, the class's ``step`` or another method, with the tensors of ``messages``. Collective."""
        what = f"{len({bucket for message in messages for bucket in message.buckets})} buckets"
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(self._comm.device.type),
            recording.profiled("step", what),
            recording.span("step", what),
            hooks_set_aside(self.optimizer),  # also where a class calls the step of its base
        ):
            self._bring_and_run(messages, run)

    def _bring_and_run(self, messages: Sequence[Message], run: Callable[[Optimizer], object]) -> None:
        for message, following in zip(messages, [*messages[1:], None], strict=True):
            if following is not None:
                following.begin_open()
            message.bring()
        here, lists = self.tensors_here(messages)
        before, error = Watch(self.optimizer), None
        try:
            if here or not self._is_together:
                with listed(self.optimizer, lists):
                    run(self.optimizer)
            self.look_at_state(here)
        except Exception as raised:
            error = raised  # go on with the messages, for which other ranks wait; all raise after the last one
        effects = before.effects([bool(tensors) for tensors in lists])
        for tensor in here:
            tensor.key.grad = None
        for message in messages:
            error = message.give_back() or error
        for message in messages:
            message.wait_for_rest()
        self.agree(effects, error)

    def look_at_state(self, here: Sequence[WholeTensor]) -> None:
        """Raise ConfigError if a step has made state that cannot be stored, which the trial did not make."""
        if (known := len(self.owned.states)) != self._known_states:
            refuse_wrapped_state(self.optimizer, [tensor.key for tensor in here])
            self._known_states = known

    def tensors_here(self, messages: Sequence[Message]) -> tuple[list[WholeTensor], list[list[tuple[int, Tensor]]]]:
        """Return the tensors that this rank steps, and for each param group pairs (index in it, full parameter)."""
        here = [tensor for message in messages for tensor in message.here]
        lists: list[list[tuple[int, Tensor]]] = [[] for _ in self.optimizer.param_groups]
        for tensor in sorted(here, key=lambda tensor: tensor.place):
            lists[tensor.group].append((tensor.place, tensor.key))
        return here, lists

    def _step_all(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> object:
        if closure is None or not self.probed.calls_closure or self._around.passes.look is not None:
            return super()._step_all(optimizer, closure)
        self._follow_groups()
        return StepWithClosure(self, self._around, self._comm, closure).run()

    def agree(self, effects: Effects, error: Exception | None) -> None:
        """Raise an error on all ranks if the step failed on one rank. Else give all ranks the same settings and
        attributes of the optimizer. ``error``: the error of this rank's step, or None. Collective."""
        if any(tensor.travels or tensor.is_broadcast for tensor in self.owned.tensors.values()):
            what, digest = "the step of an optimizer", effects.digest
            own = torch.tensor([error is not None, digest, -digest], dtype=torch.int64)
            has_failed, highest, lowest = self._comm.max_(own).tolist()
            if has_failed:
                told = None if error is None else f"{type(error).__name__}: {error}"
                found = self._comm.all_gather_objects(told, what)
                if error is None:
                    rank, text = next((rank, text) for rank, text in enumerate(found) if text is not None)
                    error = FailedElsewhereError(f"rank {rank} failed with {text}")
            elif highest != -lowest:
                take_over(self.optimizer, self._comm.all_gather_objects(effects, what))
        if error is not None:
            error.add_note(_PARTIAL)
            raise error


class StepWithClosure:
    """One step. Owners call the class's ``step``; other ranks run the closure when the owners' steps do. In the closure
    parameters have the values that the step has written, and param groups list the model's parameters.

    Each replica of the shards has an owner. All owners see the loss of rank 0, so that their steps branch alike."""

    def __init__(
        self, whole: WholeOptimizer, around: AroundStep, comm: Communicator, closure: Callable[[], object]
    ) -> None:
        self._whole, self._around, self._comm, self._closure = whole, around, comm, closure
        self._places = [place for group in whole.places() for place in group]
        self._messages: list[Message] = []  # empty while the closure runs
        self._here: list[WholeTensor] = []
        self._grads: list[tuple[Tensor | None, int]] = []  # of tensors here when they came, with versions
        self._versions: list[int] = []
        self._listed = contextlib.ExitStack()
        self._loss: object = None  # of this rank's first closure
        self._done: list[object] = []  # the loss of a closure that was run before the class's step
        self._autocast = callers_autocast(comm.device.type)

    def run(self) -> object:
        """Run the step. Return its result or, on ranks that own nothing, the first closure's result. Collective."""
        whole, optimizer, result = self._whole, self._whole.optimizer, None
        error: Exception | None = None
        # ``_listed`` too: an interrupt in the class's step must not leave full parameters in the param groups.
        with self._listed, torch.inference_mode(False), torch.no_grad(), without_autocast(self._comm.device.type):
            if self._around.passes.reducer.unreduced:  # of an accumulation, which the closure's backward ends
                self._done.append(self._run_closure())
            self._bring(state=True)
            before, is_owner = Watch(optimizer), self._comm.shard.index == 0
            try:
                if is_owner:
                    with hooks_set_aside(optimizer):
                        result = step_of(optimizer)(optimizer, self._evaluate)
                    whole.look_at_state(self._here)
                else:
                    while self._agree_to_call(None):
                        self._call()
                    result = self._loss
            except Exception as raised:
                if not self._messages:  # the closure has raised
                    raise
                error = raised
            if is_owner:
                self._agree_to_call(False)
            effects = before.effects([is_owner] * len(optimizer.param_groups))
            messages = self._messages
            error = self._give_back(state=True) or error
            whole.agree(effects, error)
        whole.stepped(messages)
        self._finish()
        return result

    def _evaluate(self) -> object:
        """Run the closure on all ranks, for the step of an owner. Return rank 0's loss."""
        if self._done:
            if [tensor.key._version for tensor in self._here] != self._versions:
                raise RuntimeError(
                    f"{type(self._whole.optimizer).__qualname__}: expected a step that calls its closure first, as "
                    "gradients of an accumulation are not reduced yet, got one that changes parameters before."
                )
            return self._done.pop()
        self._agree_to_call(True)
        return self._call()

    def _agree_to_call(self, calls: bool | None) -> bool:
        """Return whether the owners' steps now call the closure. If the steps have cleared gradients before, clear them
        on all ranks. ``calls``: whether this rank's step calls it; None: this rank owns nothing. Collective."""
        cleared = calls is True and self._has_cleared()
        called, ended, cleared = self._comm.max_(torch.tensor([calls is True, calls is False, cleared]).byte()).tolist()
        if called and ended:
            self._messages = []  # all ranks raise, and none goes on with the step
            raise RuntimeError("the step of an optimizer called its closure more often on some ranks than on others.")
        if cleared:
            for place in self._places:
                place.info.param.grad = None
        return bool(called)

    def _has_cleared(self) -> bool:
        """Return whether the step has cleared all gradients. Raise RuntimeError if it has changed them otherwise."""
        now = [tensor.key.grad for tensor in self._here]
        pairs = zip(now, self._grads, strict=True)
        if all(grad is known and (grad is None or grad._version == version) for grad, (known, version) in pairs):
            return False
        if any(grad is not None and bool(grad.any()) for grad in now):
            raise RuntimeError(
                f"{type(self._whole.optimizer).__qualname__}: expected a step that clears all gradients, or none, "
                "before it calls its closure, got one that changes them. Change gradients in the closure."
            )
        return True

    def _call(self) -> object:
        """Give written values back, run the closure, and bring new values. Return rank 0's loss. Collective."""
        error = self._give_back()
        if error is not None:
            raise error
        self._finish()
        loss = self._run_closure()
        self._bring()
        return loss

    def _run_closure(self) -> object:
        """Run the closure on this rank. Return the loss of rank 0."""
        with torch.enable_grad(), self._autocast:
            loss = self._closure()
        if self._loss is None:
            self._loss = loss
        if isinstance(loss, (Tensor, float)):
            shared = torch.as_tensor(loss, dtype=None if isinstance(loss, Tensor) else torch.float64).detach().clone()
            self._comm.broadcast(shared)
            loss = shared if isinstance(loss, Tensor) else float(shared)
        return loss

    def _bring(self, *, state: bool = False) -> None:
        grads = self._around.passes.sharded_grads
        self._around.begins(self._places)
        grads.refuse_undivided()
        buckets = {place.bucket for place in self._places if place.bucket.plan.trainable}
        self._messages = self._whole.messages(grads.used_params(), buckets)
        for message in self._messages:
            message.bring(state=state)
        self._here, lists = self._whole.tensors_here(self._messages)
        grads_here = [tensor.key.grad for tensor in self._here]
        self._grads = [(grad, 0 if grad is None else grad._version) for grad in grads_here]
        self._versions = [tensor.key._version for tensor in self._here]
        if self._here:
            self._listed.enter_context(listed(self._whole.optimizer, lists))

    def _give_back(self, *, state: bool = False) -> Exception | None:
        """Send stepped values back and return the error if a write to a tier fails, else None. ``state``: whether to
        store the optimizer state too, which the step refers to until it ends."""
        self._listed.close()
        messages, self._messages, error = self._messages, [], None
        for message in messages:
            error = message.give_back(state=state) or error
        for message in messages:
            message.wait_for_rest()
        return error

    def _finish(self) -> None:
        changed = {place.bucket for place in self._places if place.bucket.plan.trainable}
        self._around.ends(changed, [place.info for place in self._places if place.bucket.plan.trainable])
