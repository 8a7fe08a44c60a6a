"""The user's optimizer, stepping shards.

The optimizer object is kept: schedulers and callbacks hold on to it. Outside ``step`` its param groups list the user's
own Parameters. Inside the patched ``step`` *runs* stand in their place: flat slices of master_param, each of adjacent
fragments of one param group with one step count, with the matching slice of the gradient.

A parameter that no rank gave a gradient is left alone, as DDP leaves it: no decay, no state, no step count. Its
fragments then differ in step count from their neighbours, and the run is cut there (and stays cut).
"""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import ConfigError
from lightning_zero.engine.chunks import PER_TENSOR, is_elementwise, salt_of, step_in_chunks
from lightning_zero.engine.homes import opened
from lightning_zero.engine.offload import StepJob
from lightning_zero.engine.unit import Bucket, ParamInfo
from lightning_zero.planning.layout import Fragment, Run, cut_runs

# Optimizers of torch that compute every element from that element's value, gradient and state alone.
ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class Place(NamedTuple):
    """Where a parameter lives."""

    bucket: Bucket
    info: ParamInfo


class Sliced(NamedTuple):
    """A state value of one fragment, whose tensor may rest in a file."""

    whole: Tensor  # of the run
    start: int
    numel: int

    @property
    def tensor(self) -> Tensor:
        """The values [fragment.numel]; the bucket's home is open."""
        return self.whole[self.start : self.start + self.numel]


class FlatRun(NamedTuple):
    """A run and the tensor that stands for it in the optimizer."""

    bucket: Bucket
    run: Run
    tensor: Tensor  # [run.stop - run.start], a slice of bucket.master
    base: Tensor  # bucket.master as it was when the run was cut


def is_known(optimizer: Optimizer) -> bool:
    """Whether its step is one of torch's element-wise ones, not overridden."""
    kind = type(optimizer)
    return any(issubclass(kind, base) and kind.step is base.step for base in ELEMENTWISE)


def check_supported(optimizer: Optimizer, *, declared_elementwise: bool) -> None:
    """Refuse optimizers that need more than slices of parameters.

    Raises:
        ConfigError: the optimizer is not known to be element-wise.
    """
    kind = type(optimizer)
    if not is_known(optimizer) and not declared_elementwise:
        raise ConfigError(
            f"zero.optimizer.elementwise: {kind.__module__}.{kind.__qualname__} is not known to compute each element "
            "from its own value, gradient and state alone, and ranks hold only slices of parameters. If it is "
            "element-wise, set zero.optimizer.elementwise=true; optimizers that need whole matrices (Muon, Shampoo, "
            "Adafactor, LAMB, LBFGS) are not supported: use torch.optim.AdamW, Adam, SGD or another element-wise one."
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ConfigError("the optimizer's differentiable=True cannot work on shards. Drop it.")


class ShardedOptimizer:
    """Makes ``optimizer.step`` work on the shards of an engine.

    Attributes:
        optimizer: the user's object, patched.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        place_of: Callable[[nn.Parameter], Place],
        *,
        used: Callable[[], set[int]],
        landing: Callable[[Callable[[Bucket], None]], contextlib.AbstractContextManager[None]],
        before: Callable[[Sequence[nn.Parameter], set[Bucket]], None],
        after: Callable[[set[Bucket]], None],
        submit: Callable[[list[StepJob]], None],
        device_type: str = "cpu",
        declared_elementwise: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        """
        Args:
            place_of: finds a parameter's bucket; raises for parameters that the engine does not own.
            used: ids of the parameters that any rank gave a gradient since it was cleared.
            submit: takes the steps of buckets whose masters rest off the device, in the order of the forward.
            landing: around a step's closure; calls its argument with buckets that may be stepped in the backward.
            before, after: called around the arithmetic; ``before`` gets the buckets that are stepped already, ``after``
                those that changed.
        """
        check_supported(optimizer, declared_elementwise=declared_elementwise)
        if stochastic_rounding and not is_known(optimizer):
            raise ConfigError(
                f"zero.precision.stochastic_rounding: expected one of torch's element-wise optimizers, got "
                f"{type(optimizer).__qualname__}. Use torch.optim.AdamW, or drop zero.precision.stochastic_rounding."
            )
        self.optimizer = optimizer
        self._stochastic = stochastic_rounding
        self._place_of = place_of
        self._used, self._landing, self._before, self._after = used, landing, before, after
        self._submit = submit
        self._per_fragment = not any(isinstance(optimizer, kind) for kind in ELEMENTWISE)
        self._steps: dict[tuple[Bucket, int], int] = {}  # step count of a parameter
        self._runs: dict[Bucket, list[tuple[int, FlatRun]]] = {}  # bucket -> (param group, run), in order
        self._device_type = device_type
        self._patch()
        self.places()

    # -- the user's object ----------------------------------------------------------------------------------------

    def _patch(self) -> None:
        optimizer = self.optimizer
        self._inner_step = optimizer.step
        self._step_of_scheduler = optimizer.__dict__.get("step")
        engine_side = self

        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return engine_side.step(closure)

        def state_dict(self: Optimizer) -> dict[str, Any]:
            raise RuntimeError(
                "optimizer.state_dict() would give this rank's slices only. Call trainer.strategy.optimizer_state("
                "optimizer) or engine.optimizer_state(optimizer) on all ranks, or save with trainer.save_checkpoint()."
            )

        def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
            raise RuntimeError(
                "optimizer.load_state_dict() cannot load into slices. Call engine.load_optimizer_state(optimizer, "
                "state) on all ranks, or resume with trainer.fit(ckpt_path=)."
            )

        bound = types.MethodType(step, optimizer)
        # A scheduler made before has marked the method that it wrapped; one made later looks for the mark.
        if hasattr(self._inner_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = bound  # type: ignore[method-assign]
        optimizer.state_dict = types.MethodType(state_dict, optimizer)  # type: ignore[method-assign]
        optimizer.load_state_dict = types.MethodType(load_state_dict, optimizer)  # type: ignore[method-assign]

    def release(self) -> None:
        """Undo the patches. The state of runs is dropped."""
        for name in ("step", "state_dict", "load_state_dict"):
            self.optimizer.__dict__.pop(name, None)
        if self._step_of_scheduler is not None:
            self.optimizer.__dict__["step"] = self._step_of_scheduler
        self.optimizer.state.clear()

    def places(self) -> list[list[Place]]:
        """Where the parameters of each param group live.

        Raises:
            ConfigError: a parameter is not part of the sharded module.
        """
        return [[self._place_of(p) for p in group["params"]] for group in self.optimizer.param_groups]

    def params(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def buckets(self) -> list[Bucket]:
        """Whose masters it steps, in order."""
        return list(dict.fromkeys(place.bucket for group in self.places() for place in group))

    def state_tensors(self) -> int:
        """Element-wise tensors of state for each parameter, found by one step of a small one; 0 for unknown kinds."""
        if not is_known(self.optimizer):
            return 0
        counts = [0]
        for group in self.optimizer.param_groups:
            shadow = self._shadow()
            probe = nn.Parameter(torch.zeros(2))
            probe.grad = torch.zeros(2)
            on_host = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in group.items()}
            on_host |= {"capturable": False} if "capturable" in group else {}
            shadow.param_groups = [on_host | {"params": [probe]}]
            shadow.state = defaultdict(dict)
            type(shadow).step(shadow)
            counts.append(sum(is_elementwise(name, value, probe) for name, value in shadow.state[probe].items()))
        return max(counts)

    # -- step -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The user's ``optimizer.step``: the closure first (it needs the user's own groups), then the runs."""
        loss, early = None, set[Bucket]()
        if closure is not None:
            loss, early = self._run_closure(closure)
        self._before(self.params(), early)
        used = self._used()
        changed = self._arrange(used, early)
        lazy = [b for b in self._runs if b in changed and self._is_lazy(b)]
        eager = [b for b in self._runs if b in changed and b not in lazy]
        jobs = [self._job(bucket, used) for bucket in lazy]
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(self._device_type),
            self._open(eager),
            self._runs_in_groups(self.optimizer, eager, used),
        ):
            self._inner_step()
        if jobs:
            self._submit(jobs)
        self._after(changed | early)
        return loss

    def _run_closure(self, closure: Callable[[], Any]) -> tuple[Any, set[Bucket]]:
        """What the closure returns, and the buckets that were stepped inside its backward."""
        groups = self._group_of()
        early: set[Bucket] = set()

        def landed(bucket: Bucket) -> None:
            if bucket not in groups or bucket in early or not self._is_lazy(bucket):
                return
            if any(info.param.requires_grad and info.slot not in groups[bucket] for info in bucket.params):
                return  # some of it belongs to no optimizer: not a case to be fast in
            early.add(bucket)
            active = set(groups[bucket])
            self._advance(bucket, groups[bucket], active)
            if bucket in self._runs:  # otherwise all of it belongs to other ranks
                self._submit([self._job(bucket, {id(bucket.params[slot].param) for slot in active})])

        try:
            with torch.enable_grad(), self._landing(landed):
                return closure(), early
        except BaseException as error:
            if early:
                error.add_note(
                    f"The step was partial: {len(early)} of {len(groups)} buckets had been stepped when this was "
                    "raised. Before training goes on, load the last checkpoint."
                )
            raise

    def _is_lazy(self, bucket: Bucket) -> bool:
        """Whether a bucket is stepped in the worker, on its own. Unknown optimizers may count steps for a whole group,
        so they step whole and at once."""
        return bucket.tiers.row.steps_on_host and is_known(self.optimizer)

    @contextlib.contextmanager
    def _open(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Have masters and state in memory for an eager step; then bring the compute parameters up to date."""
        with contextlib.ExitStack() as stack:
            for bucket in buckets:
                stack.enter_context(opened(bucket.home, changed=True))
            yield
            for bucket in buckets:
                self._adopt(bucket)
                bucket.push()

    def _job(self, bucket: Bucket, used: set[int]) -> StepJob:
        """The step of one bucket, with hyperparameters and gradient as they are now: schedulers run next."""
        shadow = self._shadow()
        claimed = bucket.claim_grad()
        step = type(shadow).step

        def run() -> None:
            with torch.inference_mode(False), torch.no_grad():
                with self._runs_in_groups(shadow, [bucket], used, claimed()):
                    step(shadow)
                self._adopt(bucket)

        return StepJob(bucket, run)

    def _shadow(self) -> Optimizer:
        """An optimizer with the same state and a copy of the hyperparameters, without params, hooks and patches."""
        optimizer = self.optimizer
        shadow: Optimizer = object.__new__(type(optimizer))
        shadow.__dict__.update(optimizer.__dict__)
        for name in ("step", "state_dict", "load_state_dict"):
            shadow.__dict__.pop(name, None)
        shadow.param_groups = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"} | {"params": []}
            for group in optimizer.param_groups
        ]
        shadow._optimizer_step_pre_hooks = OrderedDict()  # the user's hooks run once, around the eager part
        shadow._optimizer_step_post_hooks = OrderedDict()
        return shadow

    def _adopt(self, bucket: Bucket) -> None:
        """Tell the bucket's home which state tensors rest beside the master."""
        states = [
            value
            for run in self.runs_of(bucket)
            for name, value in self.optimizer.state.get(run.tensor, {}).items()
            if is_elementwise(name, value, run.tensor)
        ]
        bucket.home.adopt(states)

    def _arrange(self, used: set[int], early: set[Bucket]) -> set[Bucket]:
        """Bring the runs up to date with param groups and step counts; the buckets that this step changes.

        Args:
            early: buckets that have been stepped already.
        """
        group_of = self._group_of()
        changed: set[Bucket] = set()
        for bucket, groups in group_of.items():
            if not bucket.trainable or bucket in early:
                continue
            active = {slot for slot in groups if id(bucket.params[slot].param) in used}
            self._advance(bucket, groups, active)
            if active:
                changed.add(bucket)
        for bucket in [b for b in self._runs if b not in group_of]:
            for _, run in self._runs.pop(bucket):
                self.optimizer.state.pop(run.tensor, None)
        return changed

    def _advance(self, bucket: Bucket, groups: dict[int, int], active: set[int]) -> None:
        """Cut the runs for a step of the slots in ``active``, and count it."""
        self._cut(bucket, groups, active)
        for slot in active:
            self._steps[bucket, slot] = self._steps.get((bucket, slot), 0) + 1

    def _cut(self, bucket: Bucket, groups: dict[int, int], active: set[int] | None = None) -> None:
        """Cut a bucket's fragments into runs by param group, step count and whether they are used now."""
        fragments = bucket.owned_fragments()
        keys: list[object] = []
        for fragment in fragments:
            slot = fragment.index
            if slot not in groups:
                keys.append(None)
                continue
            own = slot if self._per_fragment else -1
            used_now = active is None or slot in active
            keys.append((groups[slot], self._steps.get((bucket, slot), 0), used_now, own))
        wanted = cut_runs(fragments, keys)
        present = self._runs.get(bucket, [])
        # ``runs`` are plain tuples of integers, so this comparison is the whole check of whether anything changed.
        same_cuts = [(g, r.run) for g, r in present] == [(key[0], run) for key, run in wanted]  # type: ignore[index]
        if same_cuts and all(r.base is bucket.master for _, r in present):
            return
        with opened(bucket.home):
            runs: list[tuple[int, FlatRun]] = []
            for key, run in wanted:
                stop = run.fragments[-1].start + run.fragments[-1].numel if self._per_fragment else run.stop
                tensor = bucket.master[run.start : stop].detach()
                runs.append((key[0], FlatRun(bucket, run, tensor, bucket.master)))  # type: ignore[index]
            self._hand_over(present, runs)
            self._runs[bucket] = runs
            self._adopt(bucket)

    def _hand_over(self, old: Sequence[tuple[int, FlatRun]], new: Sequence[tuple[int, FlatRun]]) -> None:
        """Give the new runs their parts of the old runs' state."""
        states = {id(r): self.optimizer.state.pop(r.tensor, {}) for _, r in old}
        for _, target in new:
            pieces = []
            for _, source in old:
                low, high = max(source.run.start, target.run.start), min(source.run.stop, target.run.stop)
                if low < high and states[id(source)]:
                    pieces.append((low, high, source))
            if pieces:
                self.optimizer.state[target.tensor] = self._assemble(pieces, target, states)

    @staticmethod
    def _assemble(
        pieces: Sequence[tuple[int, int, FlatRun]], target: FlatRun, states: dict[int, dict[str, Any]]
    ) -> dict[str, Any]:
        low, high, first = pieces[0]
        result: dict[str, Any] = {}
        for name, value in states[id(first)].items():
            if not is_elementwise(name, value, first.tensor):
                result[name] = value.clone() if isinstance(value, Tensor) else value
                continue
            result[name] = torch.zeros_like(target.tensor, dtype=value.dtype)
            for low, high, source in pieces:
                part = states[id(source)][name][low - source.run.start : high - source.run.start]
                start = low - target.run.start
                result[name][start : start + part.numel()].copy_(part)
        return result

    @contextlib.contextmanager
    def _runs_in_groups(
        self, optimizer: Optimizer, buckets: Sequence[Bucket], used: set[int], grad: Tensor | None = None
    ) -> Iterator[None]:
        """Inside, the param groups of ``optimizer`` list the runs of ``buckets`` that got a gradient."""
        kept = [(group["params"], group.get("fused")) for group in optimizer.param_groups]
        lists: list[list[Tensor]] = [[] for _ in kept]
        stepped: list[FlatRun] = []
        converted: list[tuple[int, FlatRun, Tensor]] = []
        for bucket in buckets:
            full = bucket.grad if grad is None else grad
            for index, run in self._runs[bucket]:
                if full is None or not self._is_used(run, used):
                    continue
                part = full[run.run.start : run.run.start + run.tensor.numel()]
                if is_known(self.optimizer) and (self._rounds(run) or part.dtype != run.tensor.dtype):
                    converted.append((index, run, part))
                    continue
                run.tensor.grad = part.to(run.tensor.device, run.tensor.dtype)
                lists[index].append(run.tensor)
                stepped.append(run)
        try:
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = params
                self._start_momentum(group, params)
                if self._prefers_fused(group, params):
                    group["fused"] = True
            self._step_converted(optimizer, converted)
            yield
        finally:
            for group, (params, fused) in zip(optimizer.param_groups, kept, strict=True):
                group["params"] = params
                if "fused" in group:
                    group["fused"] = fused
            for run in stepped:
                run.tensor.grad = None

    def _rounds(self, run: FlatRun) -> bool:
        return self._stochastic and run.tensor.dtype is torch.bfloat16

    def _step_converted(self, optimizer: Optimizer, runs: Sequence[tuple[int, FlatRun, Tensor]]) -> None:
        """Step the runs whose arithmetic needs another dtype than they have, or than their gradient has."""
        if not runs:
            return
        shadow = self._shadow()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for index, run, grad in runs:
            group = groups[index]
            shadow.param_groups = [group]
            self._start_momentum(group, [run.tensor])
            wide = torch.empty(0, dtype=torch.promote_types(run.tensor.dtype, torch.float32), device=run.tensor.device)
            if self._prefers_fused(group, [wide]):
                group["fused"] = True
            rounding = None
            if self._rounds(run):
                step = self._steps[run.bucket, run.run.fragments[0].index]
                rounding = run.bucket.owned_range[0] + run.run.start, salt_of(run.bucket.label, step)
            step_in_chunks(shadow, group, run.tensor, grad, rounding=rounding)

    def _start_momentum(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """torch's fused SGD cannot step runs that have momentum beside new ones. Zeros are what these start from."""
        if isinstance(self.optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
            for param in params:
                state = self.optimizer.state[param]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(param)

    def _is_used(self, run: FlatRun, used: set[int]) -> bool:
        slot = run.run.fragments[0].index  # runs are cut where this differs
        return id(run.bucket.params[slot].param) in used

    def _prefers_fused(self, group: dict[str, Any], params: Sequence[Tensor]) -> bool:
        """Where the user has chosen no implementation, torch's fused kernel: the only one that is fast on a CPU."""
        free = group.get("fused", False) is None and not group.get("foreach") and not group.get("capturable")
        if isinstance(self.optimizer, torch.optim.SGD):
            if group["momentum"] and group["dampening"]:
                return False  # momentum does not start at zero then, and the fused kernel starts all runs or none
            if any(p.device.type == "cpu" and p.itemsize < 4 for p in params):
                return False  # torch's fused kernel gives wrong numbers for bf16 on the CPU (2.13)
        if any(p.is_meta for p in params):
            return False  # torch refuses it there
        return free and isinstance(self.optimizer, FUSED) and all(p.is_floating_point() for p in params)

    # -- state, keyed by parameter ----------------------------------------------------------------------------------

    def runs_of(self, bucket: Bucket) -> list[FlatRun]:
        return [run for _, run in self._runs.get(bucket, [])]

    def fragment_states(self, bucket: Bucket) -> Iterator[tuple[Fragment, dict[str, Any]]]:
        """This rank's state of a bucket's fragments: values with an element per element come as :class:`Sliced`."""
        for run in self.runs_of(bucket):
            state = self.optimizer.state.get(run.tensor, {})
            for fragment in run.run.fragments if state else ():
                start = fragment.start - run.run.start
                yield (
                    fragment,
                    {
                        name: Sliced(value, start, fragment.numel) if is_elementwise(name, value, run.tensor) else value
                        for name, value in state.items()
                    },
                )

    def load_param_states(self, states: dict[tuple[Bucket, int], dict[str, Any]]) -> None:
        """Replace all state. ``states``: for a parameter, its full tensors (any shape of its numel) or plain values."""
        self.optimizer.state.clear()
        self._runs.clear()
        self._steps = {key: _step_count(state) for key, state in states.items()}
        for bucket, groups in self._group_of().items():
            if not bucket.trainable and any((bucket, slot) in states for slot in groups):
                bucket.make_trainable()  # a fine-tuning callback had thawed it, and will again
            if bucket.trainable:
                self._cut(bucket, groups)
                with opened(bucket.home, changed=True):
                    for run in self.runs_of(bucket):
                        self._fill_state(run, states)
                    self._adopt(bucket)

    def _group_of(self) -> dict[Bucket, dict[int, int]]:
        """For each bucket: slot -> param group."""
        result: dict[Bucket, dict[int, int]] = {}
        for index, group in enumerate(self.places()):
            for place in group:
                result.setdefault(place.bucket, {})[place.info.slot] = index
        return result

    def _fill_state(self, run: FlatRun, states: dict[tuple[Bucket, int], dict[str, Any]]) -> None:
        first = states.get((run.bucket, run.run.fragments[0].index))
        if not first:
            return
        state: dict[str, Any] = {}
        shape = run.bucket.params[run.run.fragments[0].index].shape
        for name, value in first.items():
            if name in PER_TENSOR or not isinstance(value, Tensor) or value.shape != shape:
                # Fused kernels want the step count on the device; on the host it is there already.
                state[name] = value.to(run.tensor.device, copy=True) if isinstance(value, Tensor) else value
                continue
            flat = torch.zeros(run.tensor.numel(), dtype=_state_dtype(value, run.tensor), device=run.tensor.device)
            for fragment in run.run.fragments:
                source = states[run.bucket, fragment.index][name].reshape(-1)
                start = fragment.start - run.run.start
                flat[start : start + fragment.numel].copy_(source[fragment.offset : fragment.offset + fragment.numel])
            state[name] = flat
        self.optimizer.state[run.tensor] = state


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off, on devices that know it (the meta device does not)."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else contextlib.nullcontext()


def _state_dtype(value: Tensor, tensor: Tensor) -> torch.dtype:
    return tensor.dtype if value.is_floating_point() else value.dtype


def _step_count(state: dict[str, Any]) -> int:
    """Only equality matters: parameters with equal counts share a run. SGD keeps no count, but state or none."""
    step = state.get("step", 1 if state else 0)
    return int(step.item()) if isinstance(step, Tensor) else int(step or 0)
