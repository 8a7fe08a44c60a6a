"""Makes the user's optimizer step shards.

Inside the patched ``step`` the param groups list *runs*: flat slices of master_param, each of adjacent
fragments of one param group with one step count, with the matching slice of the gradient.

A parameter that no rank gave a gradient is left alone, as DDP leaves it: no decay, no state, no step count. Its
fragments then differ in step count from their neighbours, and the run is cut there (and stays cut).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.profiling import profiled
from lightning_zero.config import ConfigError, StateDtype
from lightning_zero.device import recording
from lightning_zero.engine.steps.interception import AroundStep, Stepping
from lightning_zero.engine.steps.runs import FlatRun, ParamStates, Runs, steps_in
from lightning_zero.engine.torch_modes import without_autocast
from lightning_zero.engine.units.after_step import StepJob
from lightning_zero.engine.units.bucket import Bucket, Place
from lightning_zero.engine.units.grad_store import Arrived
from lightning_zero.engine.units.home import opened
from lightning_zero.engine.units.kept import Sliced
from lightning_zero.optimizers.chunks import dtype_of_step, salt_of, step_in_chunks
from lightning_zero.optimizers.known import (
    ELEMENTWISE,
    count_states,
    is_elementwise,
    is_known,
    prefers_fused,
    shadow_of,
    start_state,
)
from lightning_zero.optimizers.low_bits import NarrowStep, PieceMemory, formats_of
from lightning_zero.optimizers.slices import check_declared
from lightning_zero.optimizers.state_trees import Leaf
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.placement import StageRow, Tier
from lightning_zero.ranks.progress import SILENT, LongWork


class Stepper(ABC):
    """Makes ``optimizer.step`` step the shards of an engine.

    Attributes:
        optimizer: the user's object, patched.
    """

    def __init__(self, optimizer: Optimizer, around: AroundStep) -> None:
        self.optimizer = optimizer
        self._around = around

    def _patch(self) -> None:
        """Lead the optimizer's ``step`` to this object, once it is known that it can be stepped."""
        self._stepping = Stepping(self.optimizer, self.step)

    # -- the user's object ----------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give the optimizer its own step back. State is dropped."""
        self._stepping.undo()
        self.optimizer.state.clear()
        self._around.pieces.clear()

    def places(self) -> list[list[Place]]:
        """Where the parameters of each param group live.

        Raises:
            ConfigError: a parameter is not part of the sharded module.
        """
        return [[self._around.place_of(p) for p in group["params"]] for group in self.optimizer.param_groups]

    def params(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def buckets(self) -> list[Bucket]:
        """The buckets whose masters this optimizer steps, in order."""
        return list(self.groups())

    def groups(self) -> dict[Bucket, dict[int, int]]:
        """For each bucket: slot -> param group."""
        result: dict[Bucket, dict[int, int]] = {}
        for index, group in enumerate(self.places()):
            for place in group:
                result.setdefault(place.bucket, {})[place.info.slot] = index
        return result

    def _pop_states(self) -> dict[tuple[Bucket, int], dict[str, Any]]:
        """Take the state that the optimizer holds for whole parameters: of earlier steps, or of its making."""
        states = {
            (place.bucket, place.info.slot): self.optimizer.state.pop(place.info.param, {})
            for places in self.places()
            for place in places
        }
        return {key: state for key, state in states.items() if state}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do the user's ``optimizer.step``: the closure first, which needs the user's own groups, then the shards."""
        loss = None
        if closure is not None:
            with torch.enable_grad():  # callers may step under ``no_grad``, and the closure runs a forward
                loss = closure()
        if self._around.looks_at_gradients:
            return loss
        self._around.begins(self.params())
        used = self._around.used()
        changed = self._step(used)
        self._around.ends(changed, [p for p in self.params() if id(p) in used])
        return loss

    @abstractmethod
    def _step(self, used: set[int]) -> set[Bucket]:
        """Step what got a gradient.

        Args:
            used: ids of the parameters that did.

        Returns:
            The buckets that this changes, on any rank.
        """

    # -- other rows -----------------------------------------------------------------------------------------------

    def check_row(self, row: StageRow) -> None:
        """Refuse a row of ``zero/stage`` that the optimizer cannot be stepped under.

        Raises:
            ConfigError: why not.
        """
        return

    def replanned(self) -> None:
        """Follow other plans of buckets."""
        self._around.pieces.clear()

    @abstractmethod
    def reload(self, bucket: Bucket, states: ParamStates) -> None:
        """Make the state of a bucket anew, in its new home."""

    # -- state ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def state_tensors(self, bucket: Bucket) -> Iterator[Tensor]:
        """Tensors of state, such that are not one for a whole parameter, that this rank holds for a bucket."""

    @abstractmethod
    def entries(self, bucket: Bucket, *, once: bool = False) -> dict[int, dict[str, Any]]:
        """By slot, the state of a bucket that this rank saves, with a :class:`Leaf` for each tensor.

        What there is once for a parameter (a step count) is that of the rank of its first element.

        Args:
            once: state of empty parameters is that of the first rank; else of all ranks that know of it.
        """

    @abstractmethod
    def parts(self, bucket: Bucket) -> Iterator[tuple[int, str, int, Sliced]]:
        """Slot, name, first element and values of a bucket's state that this rank saves. Its home may be closed."""

    @abstractmethod
    def gathered(self, bucket: Bucket, slots: Mapping[int, Sequence[Leaf]]) -> Iterator[tuple[int, Leaf, Tensor]]:
        """Slot, leaf and whole values of a bucket's state, on the device, one after the other. Collective.

        Args:
            slots: the leaves of each slot that are wanted; the same on all ranks.
        """

    def check_state(self, place: Place, state: Mapping[str, Any], what: str) -> None:
        """Refuse the state of a parameter that has other shapes than this optimizer keeps.

        Args:
            what: has it, in words.

        Raises:
            ConfigError: it has.
        """
        return

    @abstractmethod
    def has_stepped(self, bucket: Bucket) -> bool:
        """Whether the optimizer has stepped any of the bucket's parameters: the same on all ranks."""

    @abstractmethod
    def load_param_states(self, states: ParamStates, long_work: LongWork = SILENT) -> None:
        """Replace all state. ``states``: for a parameter, its full tensors or plain values."""

    # -- bytes ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def planned_state(self, bucket: Bucket) -> Iterator[int]:
        """Bytes of each tensor of state of a bucket that this rank has, where steps have been made."""

    @abstractmethod
    def state_to_come(self, tier: Tier) -> int:
        """Bytes that its state will take on ``tier`` on this rank, as far as that is known before the first step."""

    def states_per_element(self) -> int:
        """Tensors of state as large as the masters that its class keeps, where that is known; else 0."""
        return 0

    def whole_state(self, bucket: Bucket, plan: BucketPlan | None = None) -> int:
        """Bytes of state of a bucket's tensors that are stepped whole: that there are, or will be under ``plan``."""
        return 0

    def step_peak(self) -> int:
        """The most bytes that this rank holds beside its shards while they are stepped on the device."""
        return 0


class ShardedOptimizer(Stepper):
    """Steps slices.

    Attributes:
        runs: what stands in the param groups inside ``step``.
    """

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
        self._stochastic = stochastic_rounding
        formats = formats_of(optimizer, state_dtype)
        self.runs = Runs(optimizer, per_fragment=not isinstance(optimizer, ELEMENTWISE), formats=formats)
        self._device_type = device_type
        self._known = is_known(optimizer)
        self._patch()
        # State of earlier steps goes on. Other state is dropped: Adagrad makes its sums, which are as large as the
        # parameters, when it is built.
        if stepped := {key: state for key, state in self._pop_states().items() if steps_in(state)}:
            self.load_param_states(stepped)

    def release(self) -> None:
        for bucket in self.runs.buckets():
            self.runs.drop(bucket)
        super().release()

    # -- state ----------------------------------------------------------------------------------------------------

    def state_tensors(self, bucket: Bucket) -> Iterator[Tensor]:
        for run in self.runs.of(bucket):
            # A list at once: a step may be under way in the worker, which adds entries.
            state = list(self.optimizer.state.get(run.tensor, {}).items())
            yield from (value for name, value in state if is_elementwise(name, value, run.tensor))

    def entries(self, bucket: Bucket, *, once: bool = False) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for fragment, state in self.runs.fragment_states(bucket):
            info, part = bucket.params[fragment.index], fragment.within(bucket.own_shard_of_owned)
            if part is None and (info.numel or (once and bucket.comm.shard_rank)):
                continue
            entry = found.setdefault(fragment.index, {})
            for name, value in state.items():
                if isinstance(value, Sliced):
                    entry[name] = Leaf(name, tuple(info.shape), info.strides, value.dtype)
                elif part is None or not part[0]:
                    entry[name] = value.cpu() if isinstance(value, Tensor) else value
        return found

    def parts(self, bucket: Bucket) -> Iterator[tuple[int, str, int, Sliced]]:
        for fragment, state in self.runs.fragment_states(bucket):
            if (part := fragment.within(bucket.own_shard_of_owned)) is not None:
                start, low, high = part
                for name, value in state.items():
                    if isinstance(value, Sliced) and value.numel:
                        yield fragment.index, name, start, value.part(low, high - low)

    def gathered(self, bucket: Bucket, slots: Mapping[int, Sequence[Leaf]]) -> Iterator[tuple[int, Leaf, Tensor]]:
        own: dict[str, list[tuple[int, Sliced]]] = {}
        with opened(bucket.home):
            for fragment, state in self.runs.fragment_states(bucket):
                for name, value in state.items():
                    if isinstance(value, Sliced) and value.numel:
                        own.setdefault(name, []).append((fragment.start, value))
            dtypes = {leaf.name: leaf.dtype for leaves in slots.values() for leaf in leaves}
            for name in sorted(dtypes):  # also where this rank has nothing of it
                parts = ((start, value.tensor) for start, value in own.get(name, ()))
                full = bucket.gathered(parts, dtypes[name], "optimizer state")
                for slot, leaves in slots.items():
                    for leaf in leaves:
                        if leaf.name == name:
                            yield slot, leaf, bucket.part_of(full, bucket.params[slot])

    def planned_state(self, bucket: Bucket) -> Iterator[int]:
        for run in self.runs.of(bucket):
            states = count_states(self.optimizer) if self.optimizer.state.get(run.tensor) else 0
            yield from [run.tensor.nbytes] * states

    def states_per_element(self) -> int:
        return count_states(self.optimizer)

    def state_to_come(self, tier: Tier) -> int:
        states = count_states(self.optimizer)
        return sum(
            states * bucket.plan.state_nbytes(bucket.owned_numel)
            for bucket in self.buckets()
            if bucket.trainable and bucket.plan.tiers.master is tier
        )

    def check_state(self, place: Place, state: Mapping[str, Any], what: str) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != place.info.shape and value.numel() != 1:
                raise ConfigError(
                    f"{what}: its optimizer state {name!r} of {place.info.fqn} has shape {tuple(value.shape)}, "
                    f"expected {tuple(place.info.shape)}. Load a checkpoint of the same model."
                )

    def has_stepped(self, bucket: Bucket) -> bool:
        return self.runs.has_stepped(bucket)

    def load_param_states(self, states: ParamStates, long_work: LongWork = SILENT) -> None:
        self.runs.load(states, self.groups(), long_work)

    def reload(self, bucket: Bucket, states: ParamStates) -> None:
        groups = self.groups().get(bucket, {})
        if self.runs.has_stepped(bucket) and groups and bucket.trainable:
            self.runs.reload(bucket, groups, states)
        else:
            self.runs.forget(bucket)

    # -- step -----------------------------------------------------------------------------------------------------

    def _step(self, used: set[int]) -> set[Bucket]:
        changed = self._arrange(used)
        lazy = [b for b in self.runs.buckets() if b in changed and self._is_lazy(b)]
        eager = [b for b in self.runs.buckets() if b in changed and b not in lazy]
        jobs: list[StepJob] = []
        fused = [group.get("fused") for group in self.optimizer.param_groups]  # which the eager step sets for itself

        def make_jobs() -> None:
            jobs.extend(self._job(bucket, used, fused) for bucket in lazy)

        # ``no_grad`` after ``inference_mode(False)``, which switches grad mode on. State that is made in inference mode
        # could not be changed outside of it later. Autocast would give some results of the step another dtype.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(self._device_type),
            self._open(eager),
            self._runs_in_groups(self.optimizer, eager, used),
            profiled("step", f"{len(eager)} buckets"),
            recording.span("step", f"{len(eager)} buckets") if eager else contextlib.nullcontext(),
        ):
            self._stepping.inner(make_jobs)
        # Submitted after the eager step: the worker starts at once, and both write to ``optimizer.state``.
        if jobs:
            self._around.submit(jobs)
        # Buckets of which this rank owns nothing have no job here. They are marked all the same, as on the other ranks.
        for bucket in changed:
            if not self.runs.of(bucket) and self._is_lazy(bucket):
                bucket.awaited_step.nothing_to_do()
        return changed

    def _is_lazy(self, bucket: Bucket) -> bool:
        """Whether a bucket is stepped in the worker, on its own.

        Unknown optimizers may count steps for a whole group, so they step whole groups, at once.
        """
        return bucket.plan.steps_on_host and self._known

    @contextlib.contextmanager
    def _open(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Have masters and state in memory for an eager step; then bring the compute parameters up to date."""
        with contextlib.ExitStack() as stack:
            for bucket in buckets:
                stack.enter_context(opened(bucket.home, changed=True))
            yield
            # Inside of the ``with``: new state has to move to its tier, and masters have to be readable, before the
            # homes are closed.
            for bucket in buckets:
                self.runs.adopt(bucket)
                bucket.push()

    def _job(self, bucket: Bucket, used: set[int], fused: Sequence[bool | None] = ()) -> StepJob:
        """Make the step of one bucket, with hyperparameters and gradient as they are now.

        Args:
            fused: of each param group, where these are set for another step now.
        """
        # Now, because the caller goes on: a scheduler changes the learning rate, and ``zero_grad`` clears the gradient,
        # before the worker comes to this bucket. And a shadow, as the worker sets param groups of its own.
        shadow = shadow_of(self.optimizer)
        for group, chosen in zip(shadow.param_groups, fused, strict=False):
            if "fused" in group:
                group["fused"] = chosen
        claimed = bucket.grad_store.claim()
        step = type(shadow).step

        def run() -> None:
            # Modes belong to a thread: those of the caller of ``step`` do not hold in the worker.
            in_worker = recording.span("step", bucket.label, on_host=True)
            with profiled("step", bucket.label), in_worker, torch.inference_mode(False), torch.no_grad():
                with self._runs_in_groups(shadow, [bucket], used, claimed.arrived()):
                    step(shadow)
                self.runs.adopt(bucket)

        return StepJob(bucket, run)

    def _arrange(self, used: set[int]) -> set[Bucket]:
        """Bring the runs up to date with param groups and step counts.

        Returns:
            The buckets that this step changes, on any rank.
        """
        group_of = self.groups()
        changed: set[Bucket] = set()
        for bucket, groups in group_of.items():
            if not bucket.trainable:
                continue
            active = {slot for slot in groups if id(bucket.params[slot].param) in used}
            self.runs.advance(bucket, groups, active)
            if active:
                changed.add(bucket)
        for bucket in [b for b in self.runs.buckets() if b not in group_of]:
            self.runs.drop(bucket)
        return changed

    @contextlib.contextmanager
    def _runs_in_groups(
        self, optimizer: Optimizer, buckets: Sequence[Bucket], used: set[int], claimed: Arrived | None = None
    ) -> Iterator[None]:
        """List, inside, the runs of ``buckets`` that got a gradient in the param groups of ``optimizer``.

        Args:
            claimed: the gradient of the one bucket, where it was claimed for a step of its own.
        """
        kept = [(group["params"], group.get("fused")) for group in optimizer.param_groups]
        lists: list[list[Tensor]] = [[] for _ in kept]
        stepped: list[FlatRun] = []
        in_pieces: list[tuple[int, FlatRun, Tensor, Tensor | None]] = []
        for bucket in buckets:
            full, factor = claimed if claimed is not None else Arrived(bucket.grad, None)
            for index, run in self.runs.grouped(bucket):
                if full is None or not self._is_used(run, used):
                    continue
                part = full[run.run.start : run.run.start + run.tensor.numel()]
                apart = self._rounds(run) or part.dtype != run.tensor.dtype or factor is not None
                if self._known and (apart or self.runs.formats):
                    in_pieces.append((index, run, part, factor))
                    continue
                run.tensor.grad = part.to(run.tensor.device, run.tensor.dtype)
                lists[index].append(run.tensor)
                stepped.append(run)
        try:
            # First: the groups are as the user has set them.
            self._step_in_pieces(optimizer, in_pieces, self._around.pieces if claimed is not None else PieceMemory())
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = params
                start_state(optimizer, group, params)
                if prefers_fused(self.optimizer, group, params):
                    group["fused"] = True
            yield
        finally:
            # Also after an exception: schedulers and the next ``zero_grad`` look for the user's own parameters here.
            for group, (params, fused) in zip(optimizer.param_groups, kept, strict=True):
                group["params"] = params
                if "fused" in group:
                    group["fused"] = fused
            for run in stepped:
                run.tensor.grad = None  # a view: it would keep the bucket's gradient after it was cleared

    def _rounds(self, run: FlatRun) -> bool:
        return self._stochastic and run.tensor.dtype is torch.bfloat16

    def _step_in_pieces(
        self,
        optimizer: Optimizer,
        runs: Sequence[tuple[int, FlatRun, Tensor, Tensor | None]],
        memory: PieceMemory,
    ) -> None:
        """Step the runs whose arithmetic needs another dtype than they or their gradients have, or another factor."""
        if not runs:
            return
        shadow = shadow_of(self.optimizer)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for index, run, grad, factor in runs:
            group = groups[index]
            shadow.param_groups = [group]
            narrow = bool(self.runs.formats)
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
                self._step_narrow(shadow, run, grad, factor, rounding, memory)
            else:
                step_in_chunks(shadow, group, run.tensor, grad, factor=factor, rounding=rounding)

    def _step_narrow(
        self,
        shadow: Optimizer,
        run: FlatRun,
        grad: Tensor,
        factor: Tensor | None,
        rounding: tuple[int, int] | None,
        memory: PieceMemory,
    ) -> None:
        start, names = run.run.start, run.bucket.params
        places = [(replace(f, start=f.start - start), names[f.index].fqn) for f in run.run.fragments]
        state, formats, step = shadow.state[run.tensor], self.runs.formats, self.runs.step_count(run)
        NarrowStep(run.tensor, grad, state, formats, places, step, factor, rounding).by(shadow, memory)

    def _is_used(self, run: FlatRun, used: set[int]) -> bool:
        slot = run.run.fragments[0].index  # runs are cut where this differs
        return id(run.bucket.params[slot].param) in used
