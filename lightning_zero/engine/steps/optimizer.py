"""Make the user's optimizer step shards.

Inside the patched `step` the param groups list *runs* in place of parameters: flat slices of the masters, made of
adjacent fragments that share param group and step count. A parameter that got no gradient on any rank is not stepped,
as under DDP: no decay, no state, no step count. Afterwards its step count differs from that of its neighbours, so runs
are cut at its ends.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.device import recording
from lightning_zero.engine.steps.interception import AroundStep, StateBySlice, Stepping
from lightning_zero.engine.steps.runs import LEFT, FlatRun, ParamStates, Runs, steps_in
from lightning_zero.engine.torch_modes import without_autocast
from lightning_zero.engine.units.after_step import StepJob
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.master_storage import FlatSlice, opened
from lightning_zero.optimizers.chunks import dtype_of_step, salt_of, step_in_chunks
from lightning_zero.optimizers.inner import JoinedState
from lightning_zero.optimizers.known import (
    ELEMENTWISE,
    count_states,
    hooks_set_aside,
    is_elementwise,
    is_known,
    prefers_fused,
    shadow_of,
    start_state,
    without_hooks,
)
from lightning_zero.optimizers.low_bits import NarrowStep, PieceMemory, narrow_states
from lightning_zero.optimizers.probe import check_declared
from lightning_zero.optimizers.refused import check_narrow_groups
from lightning_zero.optimizers.side_effects import HOOKS
from lightning_zero.optimizers.state_trees import Leaf, Saved, State, leaves_of
from lightning_zero.optimizers.trial import step_of
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.placement import StageRow, Tier
from lightning_zero.ranks.progress import SILENT, LongWork
from lightning_zero.settings import ConfigError, StateDtype


class Stepper(ABC):
    """Makes a user's `optimizer.step` step the shards of an engine. Subclasses step slices or whole tensors."""

    def __init__(self, optimizer: Optimizer, around: AroundStep) -> None:
        for name in HOOKS:  # a wrapper may not have called Optimizer.__init__
            vars(optimizer).setdefault(name, OrderedDict())
        self.optimizer = optimizer
        self._around = around

    def _patch(self) -> None:
        """Replace the optimizer's `step`. A subclass calls this when it has checked that it can step the optimizer."""
        self._stepping = Stepping(self.optimizer, self.step, self._around)

    # -- the user's object ----------------------------------------------------------------------------------------

    def pause(self) -> Optimizer:
        """Wait for offloaded steps, and restore the optimizer's original `step`. The stepper keeps the state until
        :meth:`resume` or :meth:`release`. Return the optimizer, to which the stepper no longer refers."""
        self._around.after_step.wait_for_steps()
        user = self.optimizer
        self._stepping.undo()
        del self._stepping
        state, self.optimizer = user.state, shadow_of(user)
        self.optimizer.param_groups = user.param_groups
        if isinstance(state, StateBySlice):
            user.state = defaultdict(dict)
        else:  # maybe the object is that of an optimizer inside
            self.optimizer.state = defaultdict(dict, state)
            state.clear()
        self._follow(self.optimizer)
        return user

    def resume(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, which :meth:`pause` has returned, step the shards again, with its state from before."""
        if isinstance(state := self.optimizer.state, StateBySlice):
            optimizer.state = state
        else:
            optimizer.state.update(state)
        self.optimizer = optimizer
        self._follow(optimizer)
        self._patch()

    def release(self) -> None:
        """Wait for offloaded steps, restore the optimizer's original `step`, and drop its state."""
        if "_stepping" in vars(self):
            self.pause()
        self._drop_state()
        self._around.pieces.clear()

    @abstractmethod
    def _follow(self, optimizer: Optimizer) -> None:
        """Keep the optimizer state in `optimizer.state` from now on."""

    @abstractmethod
    def _drop_state(self) -> None:
        """Free the memory or file space of all optimizer state."""

    def places(self) -> list[list[Place]]:
        """Return the place (bucket and `ParamInfo`) of each parameter, one list per param group. Raises ConfigError if
        a parameter is not sharded by this engine."""
        known, place_of = self._around.places, self._around.place_of
        return [[known.get(id(p)) or place_of(p) for p in group["params"]] for group in self.optimizer.param_groups]

    def settings(self) -> list[dict[str, object]]:
        """Return the numeric settings of each param group. They must be equal on all ranks."""
        return [
            {
                key: value
                for key, value in group.items()
                if all(isinstance(v, int | float) for v in (value if isinstance(value, tuple) else [value]))
            }
            for group in self.optimizer.param_groups
        ]

    def buckets(self) -> list[Bucket]:
        return list(self.groups())

    def groups(self) -> dict[Bucket, dict[int, int]]:
        """Return {bucket: {slot: index of its param group}} for all parameters of the optimizer."""
        result: dict[Bucket, dict[int, int]] = {}
        for index, group in enumerate(self.places()):
            for place in group:
                result.setdefault(place.bucket, {})[place.info.slot] = index
        return result

    def _pop_states(self) -> dict[tuple[Bucket, int], State]:
        """Remove from the optimizer the state of whole parameters, made in earlier steps or its constructor. Return
        {(bucket, slot): state} for parameters that have any."""
        joined = JoinedState(self.optimizer)
        states = {
            (place.bucket, place.info.slot): joined.pop(place.info.param)
            for places in self.places()
            for place in places
        }
        self._own_state()
        return {key: state for key, state in states.items() if state}

    def _own_state(self, *, anew: bool = False) -> None:
        """Replace the `state` of an optimizer of torch by a :class:`StateBySlice`, which notices when users clear it.
        `anew`: start without state if users have cleared or replaced the state since the last call."""
        state = self.optimizer.state
        owned = isinstance(state, StateBySlice) and not state.cleared
        # Not for optimizers of users' own classes, which may share the state object with an optimizer inside.
        if not owned and step_of(self.optimizer).__module__.startswith("torch.optim."):
            self.optimizer.state = own = StateBySlice(dict, state)
            own.around = ref(self._around)
            if anew and not state:
                self.load_param_states({})

    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Run the closure with the user's param groups, then step the shards. The user's step hooks run around both.
        Return the closure's result. Collective."""
        # Around the whole step, as in torch: hooks find the user's parameters, gradients and, after it, new values.
        run: Callable[..., object] = self._step_all
        if self._around.passes.look is None:
            run = Optimizer.profile_hook_step(run)
        return run(self.optimizer, *[closure] * (closure is not None))

    def _step_all(self, _: Optimizer, closure: Callable[[], object] | None = None) -> object:
        loss = None
        if closure is not None:
            with torch.enable_grad():  # callers may step under ``no_grad``, and the closure runs a forward
                loss = closure()
        if self._around.passes.look is not None:  # gradients are only inspected
            return loss
        places = [place for group in self.places() for place in group]
        self._around.begins(places)
        self._own_state(anew=True)
        grads = self._around.passes.sharded_grads
        grads.refuse_undivided()
        if grads.must_skip(places):
            self._around.ends(set(), [])
            return loss
        used = grads.used_params()
        changed = self._step(used)
        self._around.ends(changed, [place.info for place in places if id(place.info.param) in used])
        return loss

    @abstractmethod
    def _step(self, used: set[int]) -> set[Bucket]:
        """Step the parameters whose ids are in `used`. Return the buckets that any rank steps."""

    # -- restage --------------------------------------------------------------------------------------------------

    def check_stage(self, row: StageRow) -> None:
        """Raise ConfigError if the optimizer cannot be stepped at the stage whose placements are `row`."""
        return

    def replanned(self) -> None:
        """Drop cached buffers and schedules, after a restage has changed the plans of the buckets."""
        self._around.pieces.clear()

    @abstractmethod
    def reload(self, bucket: Bucket, states: ParamStates) -> None:
        """After a restage has given `bucket` a new storage, load this rank's part of the whole tensors in `states`."""

    # -- state ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def state_tensors(self, bucket: Bucket) -> Iterator[Tensor]:
        """Yield this rank's element-wise state tensors of a bucket, without values such as step counts."""

    @abstractmethod
    def entries(self, bucket: Bucket, *, once: bool = False) -> dict[int, State]:
        """Return the optimizer state that this rank saves, by slot, with a `Leaf` in place of each tensor of
        :meth:`parts`. A value that a parameter has once (a step count) is saved by the rank with the parameter's first
        element. The state of an empty parameter is saved by each rank that has it or, with `once`, by the first rank
        only."""

    @abstractmethod
    def parts(self, bucket: Bucket) -> Iterator[tuple[int, str, int, FlatSlice]]:
        """Yield (slot, state name, index of the first element in the parameter, slice) for each part of state tensors
        that this rank saves. Does not open storages."""

    @abstractmethod
    def gathered(self, bucket: Bucket, slots: Mapping[int, Sequence[Leaf]]) -> Iterator[tuple[int, Leaf, Tensor]]:
        """Gather the state tensors of the leaves in `slots`. Yield (slot, leaf, whole tensor). Collective."""

    def check_state(self, place: Place, state: Saved, what: str) -> None:
        """Raise ConfigError if a shape in `state` does not fit the parameter at `place`. `what`: the source of
        `state`."""
        for name, value in leaves_of(state):
            expected = self._shape_of_state(place, name)
            if expected is not None and value.shape != expected:
                raise ConfigError(
                    f"{what}: its optimizer state {name!r} of {place.info.fqn} has shape {tuple(value.shape)}, "
                    f"expected {tuple(expected)}. Load a checkpoint of the same model."
                )

    def check_groups(self, groups: Sequence[Saved]) -> None:
        """Raise ConfigError if the optimizer cannot be stepped with the settings in the param groups ``groups``."""
        return

    @abstractmethod
    def _shape_of_state(self, place: Place, name: str) -> Sequence[int] | None:
        """Return the shape that the state tensor `name` of a parameter must have; None if the shape is not known."""

    @abstractmethod
    def has_stepped(self, bucket: Bucket) -> bool:
        """Return whether the optimizer has stepped any of the bucket's parameters. The result is equal on all ranks."""

    @abstractmethod
    def load_param_states(self, states: ParamStates, long_work: LongWork = SILENT) -> None:
        """Replace all optimizer state by this rank's part of `states`, which has whole tensors and plain values."""

    # -- bytes ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def planned_state(self, bucket: Bucket) -> Iterator[int]:
        """Yield the bytes of each state tensor that this rank has for `bucket` (before the first step it has none)."""

    @abstractmethod
    def state_to_come(self, tier: Tier) -> int:
        """Return how many bytes this rank's optimizer state will take on `tier`, as known before the first step."""

    def states_per_element(self) -> int:
        """Return the number of state tensors as large as the masters; 0 if the optimizer's class is unknown."""
        return 0

    def whole_state(self, bucket: Bucket, plan: BucketPlan | None = None) -> int:
        """Return the bytes of this rank's state of parameters stepped whole, under `plan` (None: the present plan)."""
        return 0

    def step_peak(self) -> int:
        """Return the peak bytes of temporary device memory that a step needs in addition to the shards."""
        return 0


class ShardedOptimizer(Stepper):
    """Steps this rank's slices of parameters. During a step, param groups list flat slices (runs) of masters."""

    def __init__(
        self,
        optimizer: Optimizer,
        around: AroundStep,
        *,
        device_type: str = "cpu",
        declared_elementwise: bool = False,
        stochastic_rounding: bool = False,
        state_dtype: StateDtype = StateDtype.fp32,
    ) -> None:
        super().__init__(optimizer, around)
        if declared_elementwise and not is_known(optimizer):
            places = around.place_of
            dtype_of, cut = (lambda p: places(p).bucket.dtypes.master), (lambda p: places(p).slices)
            check_declared(optimizer, dtype_of, cut, torch.device(device_type))
        self._stochastic, self._state_dtype = stochastic_rounding, state_dtype
        narrow = narrow_states(optimizer, state_dtype)
        self.runs = Runs(optimizer, per_fragment=not isinstance(optimizer, ELEMENTWISE), narrow=narrow)
        self._device_type = device_type
        self._known = is_known(optimizer)
        self._patch()
        # Keep the state of earlier steps only. Adagrad makes its sums, as large as the parameters, in its constructor.
        if stepped := {key: state for key, state in self._pop_states().items() if steps_in(state)}:
            self.load_param_states(stepped)

    def _follow(self, optimizer: Optimizer) -> None:
        self.runs.optimizer = optimizer

    def _drop_state(self) -> None:
        for bucket in self.runs.buckets():
            self.runs.drop(bucket)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_tensors(self, bucket: Bucket) -> Iterator[Tensor]:
        for run in self.runs.runs_of(bucket):
            # A list at once, because a step in the worker may add entries meanwhile.
            state = list(self.optimizer.state.get(run.tensor, {}).items())
            yield from (value for name, value in state if is_elementwise(self.optimizer, name, value, run.tensor))

    def entries(self, bucket: Bucket, *, once: bool = False) -> dict[int, State]:
        found: dict[int, State] = {}
        for fragment, state in self.runs.fragment_states(bucket):
            info, part = bucket.params[fragment.index], fragment.within(bucket.own_shard_of_owned)
            if part is None and (info.numel or (once and bucket.comm.shard.index)):
                continue
            entry = found.setdefault(fragment.index, {})
            for name, value in state.items():
                if isinstance(value, FlatSlice):
                    entry[name] = Leaf(name, info.saved_shape, info.saved_strides, value.dtype)
                elif (part is None or not part[0]) and not bucket.comm.ranks.parts.index:
                    entry[name] = value.cpu() if isinstance(value, Tensor) else value
        return found

    def parts(self, bucket: Bucket) -> Iterator[tuple[int, str, int, FlatSlice]]:
        for fragment, state in self.runs.fragment_states(bucket):
            if (part := fragment.within(bucket.own_shard_of_owned)) is not None:
                start, low, high = part
                for name, value in state.items():
                    if isinstance(value, FlatSlice) and value.numel:
                        yield fragment.index, name, start, value.part(low, high - low)

    def gathered(self, bucket: Bucket, slots: Mapping[int, Sequence[Leaf]]) -> Iterator[tuple[int, Leaf, Tensor]]:
        own: dict[str, list[tuple[int, FlatSlice]]] = {}
        with opened(bucket.storage):
            for fragment, state in self.runs.fragment_states(bucket):
                for name, value in state.items():
                    if isinstance(value, FlatSlice) and value.numel:
                        own.setdefault(name, []).append((fragment.start, value))
            dtypes = {leaf.name: leaf.dtype for leaves in slots.values() for leaf in leaves}
            for name in sorted(dtypes):  # also names of which this rank has nothing: all ranks must gather
                parts = ((start, value.tensor) for start, value in own.get(name, ()))
                full = bucket.gathered(parts, dtypes[name], "optimizer state")
                for slot, leaves in slots.items():
                    for leaf in leaves:
                        if leaf.name == name:
                            yield slot, leaf, bucket.part_of(full, bucket.params[slot])

    def planned_state(self, bucket: Bucket) -> Iterator[int]:
        for run in self.runs.runs_of(bucket):
            states = count_states(self.optimizer) if self.optimizer.state.get(run.tensor) else 0
            yield from [run.tensor.nbytes] * states

    def states_per_element(self) -> int:
        return count_states(self.optimizer)

    def state_to_come(self, tier: Tier) -> int:
        states = count_states(self.optimizer)
        return sum(
            states * bucket.plan.state_nbytes(bucket.plan.owned_numel)
            for bucket in self.buckets()
            if bucket.plan.trainable and bucket.plan.tiers.master is tier
        )

    def check_groups(self, groups: Sequence[Saved]) -> None:
        if self.runs.narrow:
            check_narrow_groups(self.optimizer, self._state_dtype, groups)

    def _shape_of_state(self, place: Place, name: str) -> Sequence[int] | None:
        return place.info.shape

    def has_stepped(self, bucket: Bucket) -> bool:
        return self.runs.has_stepped(bucket)

    def load_param_states(self, states: ParamStates, long_work: LongWork = SILENT) -> None:
        self.runs.load(states, self.groups(), long_work)
        self._own_state()

    def reload(self, bucket: Bucket, states: ParamStates) -> None:
        if self.runs.has_stepped(bucket) and bucket.plan.trainable:
            self.runs.reload(bucket, self.groups().get(bucket, {}), states)
        else:
            self.runs.forget(bucket)

    # -- step -----------------------------------------------------------------------------------------------------

    def _step(self, used: set[int]) -> set[Bucket]:
        if self.runs.narrow:  # users may have added groups, or changed them
            self.check_groups(self.optimizer.param_groups)
        # Cut masters into runs by present param groups and step counts.
        group_of: dict[Bucket, dict[int, int]] = {bucket: {} for bucket in self.runs.buckets()} | self.groups()
        changed: set[Bucket] = set()  # the buckets that any rank steps
        for bucket, groups in group_of.items():
            if bucket.plan.trainable:
                active = {slot for slot in groups if id(bucket.params[slot].param) in used}
                self.runs.advance(bucket, groups, active)
                if active:
                    changed.add(bucket)
        # The worker steps buckets on the host. Unknown optimizers may count steps per group, so step them at once.
        for_worker = {bucket for bucket in changed if self._known and bucket.plan.steps_on_host}
        buckets = [bucket for bucket in self.runs.buckets() if bucket in changed]
        eager = [bucket for bucket in buckets if bucket not in for_worker]
        # `no_grad` follows `inference_mode(False)`, which switches grad mode on. State made in inference mode could not
        # be changed outside of it, and autocast would change the dtype of some results.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(self._device_type),
            self._open(eager),
            recording.profiled("step", f"{len(eager)} buckets"),
            recording.span("step", f"{len(eager)} buckets") if eager else contextlib.nullcontext(),
        ):
            jobs = [self._job(bucket, used) for bucket in buckets if bucket in for_worker]
            with self._runs_in_groups(self.optimizer, eager, used), hooks_set_aside(self.optimizer):
                self._stepping.inner()
        # After the eager step: the worker starts at once, and both write to `optimizer.state`.
        if jobs:
            self._around.after_step.submit(jobs)
        # A bucket of which this rank owns nothing has no job, but notes a step all the same, which decides what is
        # gathered ahead. See [Note: one order of collectives].
        for bucket in for_worker.difference(buckets):
            bucket.awaited_step.announce(None).set_result(None)
        return changed

    @contextlib.contextmanager
    def _open(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Context manager that opens the storages of `buckets` for a step in this thread. On exit move new optimizer
        state to its tier and update the compute parameters."""
        with contextlib.ExitStack() as stack:
            for bucket in buckets:
                stack.enter_context(opened(bucket.storage, changed=True))
            yield
            # Before the storages close: new state must move to its tier, and masters must be readable.
            for bucket in buckets:
                self.runs.attach_state(bucket)
                bucket.copy_master_to_params()

    def _job(self, bucket: Bucket, used: set[int]) -> StepJob:
        """Return a job that steps one bucket with its present gradient and the present hyperparameters."""
        # Take the gradient and a shadow of the optimizer now. Before the worker steps this bucket, a scheduler may
        # change the learning rate and `zero_grad` may clear the gradient; and the worker changes param groups.
        shadow = shadow_of(self.optimizer)
        claimed = bucket.grad_store.claim()
        step = without_hooks(type(shadow).step)

        def run() -> None:
            # Grad and inference modes belong to a thread, so the worker sets its own.
            in_worker = recording.span("step", bucket.label, on_host=True)
            with recording.profiled("step", bucket.label), in_worker, torch.inference_mode(False), torch.no_grad():
                with self._runs_in_groups(shadow, [bucket], used, claimed.arrived()):
                    step(shadow)
                self.runs.attach_state(bucket)

        return StepJob(bucket, run)

    @contextlib.contextmanager
    def _runs_in_groups(
        self,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        used: set[int],
        claimed: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> Iterator[None]:
        """Context manager in which param groups list the runs of `buckets` whose parameters got a gradient (ids in
        `used`). Runs that need :meth:`_step_in_pieces` are instead stepped before the body. `claimed`: the result of
        `Claimed.arrived` for the single bucket of an offloaded step; None: use the gradient of each bucket."""
        kept = [(group["params"], group.get("fused")) for group in optimizer.param_groups]
        lists: list[list[Tensor]] = [[] for _ in kept]
        stepped: list[FlatRun] = []
        in_pieces: list[tuple[int, FlatRun, Tensor, Tensor | None]] = []
        for bucket in buckets:
            full, factor = claimed or (bucket.grad, None)
            for index, run in self.runs.grouped(bucket):
                slot = run.run.fragments[0].index  # runs are cut where gradients begin or end
                if index == LEFT or full is None or id(bucket.params[slot].param) not in used:
                    continue
                part = full[run.run.start : run.run.start + run.tensor.numel()]
                apart = self._rounds(run) or part.dtype != run.tensor.dtype or factor is not None
                if self._known and (apart or self.runs.narrow):
                    in_pieces.append((index, run, part, factor))
                    continue
                run.tensor.grad = part.to(run.tensor.device, run.tensor.dtype)
                lists[index].append(run.tensor)
                stepped.append(run)
        try:
            # Before the groups change, because these steps read the user's settings.
            if in_pieces:
                memory = self._around.pieces if claimed is not None else PieceMemory()
                self._step_in_pieces(optimizer, in_pieces, memory)
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = params
                start_state(optimizer, group, params)
                if prefers_fused(self.optimizer, group, params):
                    group["fused"] = True
            yield
        finally:
            # Also after an exception: schedulers and `zero_grad` need the user's own parameters in the groups.
            for group, (params, fused) in zip(optimizer.param_groups, kept, strict=True):
                group["params"] = params
                if "fused" in group:
                    group["fused"] = fused
            for run in stepped:
                run.tensor.grad = None  # this view would keep the memory of the bucket's gradient

    def _rounds(self, run: FlatRun) -> bool:
        return self._stochastic and run.tensor.dtype is torch.bfloat16

    def _step_in_pieces(
        self, optimizer: Optimizer, runs: Sequence[tuple[int, FlatRun, Tensor, Tensor | None]], memory: PieceMemory
    ) -> None:
        """Step `runs` piece by piece. Used for steps with casts, stochastic rounding, bf16 state or scaled gradients.
        `runs`: tuples (index of the param group, run, gradient, factor by which to multiply the gradient or None)."""
        shadow = shadow_of(self.optimizer)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for index, run, grad, factor in runs:
            group = groups[index]
            shadow.param_groups = [group]
            narrow = bool(self.runs.narrow)
            if not narrow:
                start_state(shadow, group, [run.tensor])
            dtype = dtype_of_step(run.tensor, grad, rounds=self._rounds(run) or narrow)
            if prefers_fused(self.optimizer, group, [torch.empty(0, dtype=dtype, device=run.tensor.device)]):
                group["fused"] = True
            rounding = None
            if self._rounds(run):
                salt = salt_of(run.bucket.label, self.runs.step_count(run))
                rounding = run.bucket.owned_range[0] + run.run.start, salt
            if narrow:
                start, names = run.run.start, run.bucket.params
                places = [(replace(f, start=f.start - start), names[f.index].fqn) for f in run.run.fragments]
                state, step = shadow.state[run.tensor], self.runs.step_count(run)
                one = NarrowStep(run.tensor, grad, state, self.runs.narrow, places, step, factor, rounding)
                one.step_pieces(shadow, memory)
            else:
                step_in_chunks(shadow, group, run.tensor, grad, factor=factor, rounding=rounding)
            if isinstance(shadow, torch.optim.SGD) and (narrow or rounding is not None):
                # SGD counts no steps; the count seeds the random bits, also after a checkpoint.
                shadow.state[run.tensor]["step"] = torch.tensor(float(self.runs.step_count(run)))
