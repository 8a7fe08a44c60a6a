"""Runs a program on every rank, on both sides, and compares them.

Each side runs the whole program before the other and writes down what it sees: so neither waits for the other's
messages, and the ranks of the engine are as far apart as they come to be.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import pickle
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import harness
from tests.fuzz import programs as p
from tests.fuzz.models import batch, has_history, out_of
from tests.fuzz.programs import Program
from tests.fuzz.refusals import Refusal, refusal_of
from tests.fuzz.sides import AUTOCAST, Ours, Twin, dtype_of, max_over_ranks

STALL_S = 20.0
ALONE_S = 2.0  # where it is certain that somebody waits in vain
HANG_S = 60.0

# How far values may be apart, as a part of the largest of their kind. Under fp32 and fp64 it is rounding: the ranks'
# gradients are added in another order. In lower precision gradients that accumulate are rounded at other times at
# stage 0 than at stage 3; what is wrong is wrong by more than this: a gradient is missing, doubled, or another's.
TOLERANCE = {"fp32": 1e-4, "fp64": 1e-9, "bf16": 0.04, "fp16": 0.02, "bf16_true": 0.1, "fp16_true": 0.04}
AMPLIFIED = 10  # times as much may be rounding, where an optimizer divides by small numbers
NEVER_TORCH = ("StallError", "ApartError", "PeerError")


class Deliberate(Exception):
    """What a program raises in the middle."""


class Entry(NamedTuple):
    """Something that a side has seen; ``scale``: the size of the largest value that was seen with it."""

    where: str
    what: str
    value: Tensor | None
    scale: float


@dataclass
class Trace:
    """What one side has seen on one rank, up to the action ``where``, and the error that ended it early."""

    entries: list[Entry] = field(default_factory=list)
    error: str = ""
    traceback: str = ""
    where: str = "shard"
    refused_by_torch: bool = True


class Outcome(NamedTuple):
    """Of one rank: "equal", "refused", "torch refuses" (so both sides do), "alone", "rounding" (it first differs by so
    little that it may be that) or "differs"."""

    kind: str
    where: str = ""
    text: str = ""
    traceback: str = ""


@dataclass
class Verdict:
    """Of all ranks together: "equal", "refused", "torch refuses" or "alone"; or "differs", "unknown refusal", "ranks
    disagree", "hangs", "dies", which are failures. ``earlier``: programs that must run before it for it to fail."""

    kind: str
    text: str = ""
    refusal: Refusal | None = None
    earlier: tuple[Program, ...] = ()

    @property
    def failed(self) -> bool:
        return self.kind not in ("equal", "refused", "torch refuses", "alone")

    @property
    def signature(self) -> str:
        """What failures of one cause have in common, as far as a text can tell."""
        first = self.text.split("\n")[0].partition(": ")[2]
        first = re.sub(r"[\w.]+\.(weight|bias)[\w.]*|(body|head|embed)\.[\w.]+", "NAME", first)
        return f"{self.kind}: {re.sub(r'[0-9][0-9.e+-]*', '#', first)[:160]}"


# -- in the workers ---------------------------------------------------------------------------------------------------


class Interpreter:
    """Runs the actions of a program on one side."""

    def __init__(self, program: Program, make: Callable[[], Twin | Ours]) -> None:
        self.program = program
        self.trace = Trace()
        self._make = make
        self._losses: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._saved: Any = None
        self._kept: list[Tensor] = []  # views of parameters that were made between steps
        self._number = self._steps = 0  # of forwards and steps so far
        self._waits = False  # gradients of backwards inside no_sync have not been reduced
        self._settings = program.settings
        self._scopes = 0  # that are open

    def run(self) -> Trace:
        try:
            self.side = self._make()
            for i, action in enumerate(self.program.actions):
                self._do(f"action {i}", action)
            self.trace.where = "the end"
            self._look("the end")
            self.side.close()
            self._note("released", dict(self.side.module.named_parameters()))
        except BaseException as error:
            self.trace.error = f"{type(error).__name__}: {error}"
            self.trace.traceback = traceback.format_exc()
        return self.trace

    def _do(self, place: str, action: p.Action) -> None:
        self.trace.where = f"{place}, {p.source(p.Scope() if isinstance(action, p.Scope) else action)}"
        getattr(self, f"_{type(action).__name__}")(action)
        # An assignment to ``.data`` leaves its parameter's views alone, and so do moves of values to other memory.
        if getattr(action, "how", "") in ("assign", "outside") or isinstance(action, p.Gather | p.Load | p.Reshard):
            self._kept = []

    # -- writing down -------------------------------------------------------------------------------------------------

    def _note(self, what: str, values: dict[str, Any]) -> None:
        """Copies, because the sides write to theirs."""

        def copied(value: Any) -> Tensor | None:
            if isinstance(value, Tensor):
                return value.detach().to(torch.complex128 if value.is_complex() else torch.float64, copy=True)
            return None if value is None else torch.tensor(float(value), dtype=torch.float64)

        kept = {name: copied(value) for name, value in values.items()}
        scale = max((_size(value) for value in kept.values() if value is not None), default=0.0)
        self.trace.entries += [Entry(self.trace.where, f"{what} {name}", v, scale) for name, v in kept.items()]

    def _look(self, what: str) -> None:
        side = self.side
        with side.shown(grads=not self._waits):
            params = dict(side.module.named_parameters())
            self._note(f"{what}: parameter", params)
            if not self._waits:
                self._note(f"{what}: gradient of", {name: param.grad for name, param in params.items()})
        self._note(f"{what}: buffer", dict(side.module.named_buffers()))
        self._note_state(what, side.save()[1])

    def _note_state(self, what: str, state: dict[str, Any]) -> None:
        for name in sorted({name for entry in state["state"].values() for name in entry}):
            values = {str(i): entry[name] for i, entry in sorted(state["state"].items()) if name in entry}
            self._note(f"{what}: optimizer's {name} of", values)

    # -- computing ----------------------------------------------------------------------------------------------------

    def _body(self, index: int) -> nn.Module:
        body = self.side.module.body
        return body[index % len(body)]

    def _floating(self, module: nn.Module | None = None) -> list[nn.Parameter]:
        return [param for param in (module or self.side.module).parameters() if param.is_floating_point()]

    def _compute(self, part: int | None, *, slope: bool = False, penalty: bool = False) -> Tensor:
        spec, rank, module = self.program.model, dist.get_rank(), self.side.module
        self._number += 1
        torch.manual_seed(10 * self._number + rank)
        x = batch(spec, self._number, rank, dtype_of(self._settings.precision), vectors=part is not None)
        if slope and x.is_floating_point():
            x = x.detach().requires_grad_()
        if x.requires_grad and torch.is_grad_enabled():
            self._inputs.append(x)
        low = AUTOCAST.get(self._settings.precision)
        module.take_losses()
        with self.side.local(), torch.autocast("cpu", low, enabled=low is not None, cache_enabled=False):
            output = out_of((module if part is None else self._body(part))(x, self._number))
            loss = _wide(output).square().mean()
            for kept in module.take_losses():
                loss = loss + 0.1 * _wide(kept)
            if penalty:
                loss = loss + 0.01 * sum(_wide(param).square().sum() for param in self._floating())
        if slope and x.requires_grad and loss.requires_grad:
            (found,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
            if found is not None:
                loss = loss + _wide(found).square().sum()
        return loss

    # -- actions ------------------------------------------------------------------------------------------------------

    def _Forward(self, action: p.Forward) -> None:
        if self.program.syncs and not self._losses:
            self.side.sync_buffers()
        with self.side.scope() if action.scoped or action.penalty else contextlib.nullcontext():
            loss = self._compute(action.part, slope=action.slope, penalty=action.penalty)
        self._note("loss", {"": loss})
        if not action.dropped:
            self._losses.append(loss)

    def _Backward(self, action: p.Backward) -> None:
        if not self._losses:
            return
        losses = self._losses if action.separately else [torch.stack(self._losses).sum()]
        self._losses = []
        for loss in losses:
            for again in range(1 + action.twice):
                last = again == action.twice and loss is losses[-1]
                self.side.backward(loss, no_sync=action.no_sync, **({} if last else {"retain_graph": True}))
            if loss.requires_grad or not self.program.settings.plain:
                self._waits = action.no_sync
        self._note("gradient of input", {str(i): x.grad for i, x in enumerate(self._inputs)})
        self._inputs.clear()

    def _reduce(self) -> None:
        """Gradients that wait cannot be looked at, nor stepped: tests of the engine see to that."""
        if self._waits:
            self._Forward(p.Forward())
            self._Backward(p.Backward())

    def _Step(self, action: p.Step) -> None:
        self._reduce()
        if self.program.looks:
            self._look("before")
        bad = action.bad and self._settings.skips
        if bad:
            loss = self._compute(None)
            self.side.backward(loss * float("nan") if dist.get_rank() == dist.get_world_size() - 1 else loss)
            self._inputs.clear()
        if action.factor:
            self.side.scale(action.factor)
        if action.clip and not bad:
            self._note("norm", {"": self.side.clip(action.clip)})
        self.side.step()
        self._follow()
        if not (action.late and self.program.torch_tells_of_changes):
            self._losses.clear()
        if bad:
            self.side.zero_grad()
        elif action.zero != "keep":
            self.side.zero_grad(set_to_none=action.zero == "none")
        if self.program.looks:
            self._look("after")

    @torch.no_grad()
    def _follow(self) -> None:
        """The teacher follows its student."""
        teacher, student, how = self.side.module.teacher, self.side.module.body[0], self.program.follows
        self._steps += 1
        if teacher is None or self._steps % self.program.every:
            return
        own, others = self._floating(teacher), self._floating(student)
        is_loaded = how == "load" and not self._scopes
        if is_loaded:
            teacher.load_state_dict(student.state_dict())
        elif how == "foreach" and own:
            torch._foreach_lerp_(own, others, 0.5)
        for param, other in zip(own, others, strict=True):
            if how == "data":
                param.data.lerp_(other.data, 0.5)
            elif how == "ema":
                param.mul_(0.5).add_(other, alpha=0.5)
            elif how == "lerp":
                param.lerp_(other, 0.5)
            elif how == "copy" or (how == "load" and not is_loaded):
                param.copy_(other)

    def _StepWithClosure(self, action: p.StepWithClosure) -> None:
        def closure() -> None:
            self.side.zero_grad()
            with self.side.scope() if action.writes else contextlib.nullcontext():
                if action.writes:
                    self._write(self._floating(), "in place")
                loss = self._compute(None)
            self._note("loss", {"": loss})
            self.side.backward(loss)

        self._losses.clear()
        self._reduce()
        self.side.step(closure)
        self._follow()
        self.side.zero_grad()
        if self.program.looks:
            self._look("after")

    def _Evaluate(self, action: p.Evaluate) -> None:
        mode = {"no_grad": torch.no_grad, "inference": torch.inference_mode}[action.mode]
        if action.eval_mode:
            self.side.module.eval()
        with self.side.scope(evaluation=True) if action.scoped else contextlib.nullcontext(), mode():
            self._note("evaluated", {"": self._compute(action.part)})
        self.side.module.train()

    def _Gather(self, action: p.Gather) -> None:
        params = None if action.part is None else self._floating(self._body(action.part))
        if params == [] or (action.write == "gradients" and self._waits):
            return
        from_rank = dist.get_world_size() - 1 if action.write == "one rank" else None
        shown = self.side.shown(params, from_rank=from_rank, grads=action.write == "gradients")
        with contextlib.suppress(Deliberate), shown:
            params = params or self._floating()
            self._note("shown", {str(i): param for i, param in enumerate(params)})
            if isinstance(self.side, Ours) or not action.raises:  # what is written before an exception is lost
                self._write(params, action.write)
            if action.raises:
                raise Deliberate

    @torch.no_grad()
    def _write(self, params: list[nn.Parameter], how: str) -> None:
        for param in params:
            if how in ("copy", "in place"):
                param.mul_(0.9)
            elif how == "write data":
                param.data.mul_(0.9)
            elif how in ("data", "assign"):
                param.data = param.detach() * 0.9
            elif how == "one rank":
                param.add_(0.1 * (dist.get_rank() + 1))
            elif how == "gradients" and param.grad is not None:
                param.grad.mul_(0.5)

    def _Write(self, action: p.Write) -> None:
        if action.how == "outside":
            generator = torch.Generator().manual_seed(self._number)
            for param in self._floating():
                param.data = torch.randn(param.shape, generator=generator).mul(0.3).to(param.dtype)
            return
        with self.side.scope():
            self._write(self._floating(), {"data": "write data"}.get(action.how, action.how))

    @torch.no_grad()
    def _Use(self, action: p.Use) -> None:
        if self._losses:
            return
        if action.how == "load":
            state = copy.deepcopy(self.side.module.state_dict())
            self.side.module.load_state_dict(state)
        elif action.how == "keep":
            self._kept = self._kept or [param.detach() for param in self._floating()]
            self._note("kept", dict(enumerate(self._kept)))
        elif action.how == "copy":
            self._note("copied", dict(copy.deepcopy(self.side.module).named_parameters()))
        else:
            self._write(self._floating(), {"data": "write data"}.get(action.how, action.how))
            self._note("used", {str(i): param.sum() for i, param in enumerate(self._floating())})

    def _Save(self, action: p.Save) -> None:
        self._saved = self.side.save()
        self._note("saved", {k: v for k, v in self._saved[0].items() if isinstance(v, Tensor)})
        self._note_state("saved", self._saved[1])

    def _Load(self, action: p.Load) -> None:
        if self._saved is not None:
            self._losses.clear()
            self.side.load(self._saved)

    def _Freeze(self, action: p.Freeze) -> None:
        self._losses.clear()
        for param in self._floating(self._body(action.part)):
            param.requires_grad_(action.thaw)

    def _AddGroup(self, action: p.AddGroup) -> None:
        if left := self.side.left_out():
            self.side.optimizer.add_param_group({"params": left, "lr": action.rate})

    def _ChangeRate(self, action: p.ChangeRate) -> None:
        for group in self.side.optimizer.param_groups:
            group["lr"] *= 1.0 if action.by_rank and dist.get_rank() else action.factor
        if action.by_rank:
            self._Forward(p.Forward(scoped=True))
            self._Backward(p.Backward())

    def _SyncBuffers(self, action: p.SyncBuffers) -> None:
        self.side.sync_buffers()

    def _Raise(self, action: p.Raise) -> None:
        def fail(*_: Any) -> None:
            raise Deliberate

        def fail_later(module: nn.Module, args: Any, output: Tensor) -> None:
            if has_history(output):
                output.register_hook(fail)

        if action.alone and isinstance(self.side, Twin):
            raise Deliberate
        chosen = not action.alone or dist.get_rank() == dist.get_world_size() - 1
        hook = fail if action.where == "forward" else fail_later
        handle = self._body(action.part).register_forward_hook(hook) if chosen else None
        self._losses.clear()
        self._inputs.clear()
        try:
            loss = self._compute(None)
            if handle is not None:
                handle.remove()
            self.side.backward(loss)
        except Deliberate:
            if action.alone:
                raise
        finally:
            if handle is not None:
                handle.remove()
        self.side.module.take_losses()
        self.side.forget_grads()
        self._waits = False
        if action.alone:
            raise Deliberate

    def _Reshard(self, action: p.Reshard) -> None:
        self._losses.clear()
        self._waits = False
        self._settings = dataclasses.replace(self._settings, stage=action.stage, offload=action.offload)
        self.side.reshard(self._settings, action.optimizer)

    def _Renew(self, action: p.Renew) -> None:
        self.side.renew(action.how)
        if action.how in ("other", "old"):  # of another class, perhaps
            self._saved = None

    def _Scope(self, action: p.Scope) -> None:
        place = self.trace.where
        self._scopes += 1
        with self.side.scope():
            for i, inner in enumerate(action.actions):
                self._do(f"{place}, {i}", inner)
        self._scopes -= 1


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _size(value: Tensor) -> float:
    """Of the largest finite element."""
    found = value.abs()
    found = found[found.isfinite()]
    return found.max().item() if found.numel() else 0.0


def run_here(program: Program, folder: str, stall_timeout_s: float) -> Outcome:
    """On every rank."""
    warnings.simplefilter("ignore")
    settings = program.settings
    alone, lower = program.raises_alone, settings.precision not in ("fp32", "fp64")

    def twin() -> Twin | Ours:
        if lower and not alone:
            return Ours(program, folder, stall_timeout_s=stall_timeout_s, reference=True)
        return Twin(program)

    expected = Interpreter(program, twin).run()
    if program.ranks_differ and expected.error:  # perhaps on one rank alone, which the others would wait for
        return Outcome("torch refuses", expected.where, expected.error, expected.traceback)
    if lower and not alone and max_over_ranks([bool(expected.error)])[0]:
        expected.refused_by_torch = _torch_raises_at(expected.where, program)
    limit = ALONE_S if alone else stall_timeout_s
    found = Interpreter(program, lambda: Ours(program, folder, stall_timeout_s=limit)).run()
    # In lower precision the plain twin may come to an error of torch's first, that the engine has a way around.
    if alone and (expected.error.startswith("Deliberate") or (lower and expected.error)):
        return Outcome("alone", found.where, found.error, found.traceback)
    tolerance = max(TOLERANCE[settings.precision], TOLERANCE["fp32"] * program.has("Odd"))  # complex64 in any precision
    single, recomputes = settings.precision == "fp32", settings.recompute != "none"
    return compare(found, expected, tolerance, single=single, recomputes=recomputes)


def _torch_raises_at(where: str, program: Program) -> bool:
    """Under autocast some of the engine's tensors are in lower precision that are not in plain torch's, so what plain
    torch does in that precision throughout counts too."""
    programs = [program]
    if (precision := program.settings.precision) in AUTOCAST:
        lower = dataclasses.replace(program.settings, precision=f"{precision}_true")
        programs.append(dataclasses.replace(program, settings=lower))
    found = [Interpreter(one, functools.partial(Twin, one)).run().where for one in programs]
    return where in found


def compare(found: Trace, expected: Trace, tolerance: float, *, single: bool, recomputes: bool) -> Outcome:
    """What has come of a program on this rank. ``recomputes``: graphs save less than those of the twin."""
    for own, other in zip(found.entries, expected.entries, strict=False):
        if (own.where, own.what) != (other.where, other.what):
            gone = f"{own.where}: {own.what}: the twin has {other.what} ({other.where}) here"
            return Outcome("differs", own.where, gone)
        if text := _difference(own.value, other.value, other.scale, tolerance):
            small = not _difference(own.value, other.value, other.scale, AMPLIFIED * tolerance)
            return Outcome("rounding" if single and small else "differs", own.where, f"{own.where}: {own.what}: {text}")
    both = found.error and expected.error and found.where == expected.where
    if both and expected.refused_by_torch and not found.error.startswith(NEVER_TORCH):
        return Outcome("torch refuses", found.where, f"{found.error}\n(the twin: {expected.error})", found.traceback)
    if found.error:
        also = f"\n(the twin, at {expected.where}: {expected.error})" if expected.error else ""
        return Outcome("refused", found.where, found.error + also, found.traceback)
    if recomputes and "modified by an inplace operation" in expected.error:
        return Outcome("torch refuses", expected.where, expected.error)  # what is computed again is as new
    if expected.error:
        text = f"{expected.where}: no error, where the twin raises {expected.error}"
        return Outcome("differs", expected.where, text, expected.traceback)
    if len(found.entries) != len(expected.entries):
        return Outcome("differs", found.where, f"{len(found.entries)} values, but the twin has {len(expected.entries)}")
    return Outcome("equal")


def _difference(own: Tensor | None, expected: Tensor | None, scale: float, tolerance: float) -> str:
    if own is None or expected is None:
        return "" if own is expected else f"{'none' if own is None else 'some'}, unlike that of the twin"
    if own.shape != expected.shape:
        return f"shape {tuple(own.shape)}, but {tuple(expected.shape)} of the twin"
    limit = tolerance * (_size(expected) + 0.05 * scale) + 1e-12
    same = (own == expected) | (own.isnan() & expected.isnan()) | ((own - expected).abs() <= limit)
    if bool(same.all()):
        return ""
    worst = (own - expected).abs()[~same].max().item()
    return f"differs by {worst:.3g} of {_size(expected):.3g} in {int((~same).sum())} of {own.numel()} elements"


# -- in the parent ----------------------------------------------------------------------------------------------------


def _leaves_order(outcome: Outcome) -> bool:
    """So does a refusal to shard: the module is as it was, on all ranks."""
    refused = outcome.kind == "refused" and outcome.where == "shard" and outcome.text.startswith("ConfigError")
    return refused or outcome.kind in ("equal", "rounding")


class Runner(contextlib.AbstractContextManager["Runner"]):
    """Runs programs on pools of workers. A pool that a program has left in disorder is not used again.

    Args:
        stall_timeout_s: how long ranks wait for one another.
        before: called on every rank before each program: a test of the fuzzer breaks the engine here.
    """

    def __init__(self, *, stall_timeout_s: float = STALL_S, before: Callable[[], None] | None = None) -> None:
        self._pools: dict[int, harness.Pool] = {}
        self.stall_timeout_s = stall_timeout_s
        self._before = before
        self._earlier: dict[int, list[Program]] = {}  # what the workers have run, by number of ranks

    def run(self, program: Program) -> Verdict:
        """The verdict, the same as if it ran alone; where it is not, the program fails by what ran before it."""
        earlier = self._earlier.setdefault(program.world, [])
        verdict = self._run(program)
        if verdict.kind == "rounding":  # if it is that, it goes with another precision; if not, it does not
            settings = dataclasses.replace(program.settings, precision="fp64")
            verdict = self._run(dataclasses.replace(program, settings=settings))
        if not verdict.failed or not earlier:
            earlier.append(program)
        else:
            alone = self._run(program)
            if alone.failed:
                verdict = alone
            else:
                verdict.text += "\n(It does not fail alone, but in processes that have run other programs before.)"
                verdict.earlier = tuple(earlier)
        if program.world not in self._pools:
            earlier.clear()
        return verdict

    def _run(self, program: Program) -> Verdict:
        pool = self._pools.get(program.world)
        if pool is None:
            pool = self._pools[program.world] = harness.Pool(program.world)
        with tempfile.TemporaryDirectory(prefix="lightning_zero_fuzz_") as folder:
            case = (_run_case, (program, folder, self.stall_timeout_s, self._before), {})
            try:
                outcomes = pool.run(pickle.dumps(case), HANG_S + 3 * self.stall_timeout_s)
            except harness.CaseTimeout as error:
                self._drop(program.world)
                return Verdict("hangs", f"hangs: {error}")
            except Exception as error:
                self._drop(program.world)
                return Verdict("dies", f"dies: {error}\n" + "\n".join(getattr(error, "__notes__", [])))
        if not all(map(_leaves_order, outcomes)):
            self._drop(program.world)
        return judge(program, outcomes)

    def _drop(self, world: int) -> None:
        self._pools.pop(world).kill()

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _run_case(program: Program, folder: str, stall_timeout_s: float, before: Callable[[], None] | None) -> Outcome:
    if before is not None:
        before()
    return run_here(program, folder, stall_timeout_s)


def judge(program: Program, outcomes: list[Outcome]) -> Verdict:
    """Whether what has come of a program on all ranks is as it should be."""
    first = outcomes[0]
    report = "\n".join(
        f"--- rank {rank}: {outcome.kind} at {outcome.where or 'the end'}"
        + f"\n{outcome.text}\n{outcome.traceback}" * (outcome.kind != "equal")
        for rank, outcome in enumerate(outcomes)
    )
    kinds = {outcome.kind for outcome in outcomes}
    if "differs" in kinds:
        worst = next(outcome for outcome in outcomes if outcome.kind == "differs")
        return Verdict("differs", f"{worst.text}\n{report}")
    if kinds == {"alone"}:
        return _judge_alone(program, outcomes, report)
    if "refused" in kinds:
        refusals = [refusal_of(program, o.text) if o.kind == "refused" else None for o in outcomes]
        unknown = next((o for o, r in zip(outcomes, refusals, strict=True) if o.kind == "refused" and r is None), None)
        if unknown is not None:
            return Verdict("unknown refusal", f"{unknown.where}: {unknown.text}\n{report}")
        if any(refusal != refusals[0] for refusal in refusals):
            return Verdict("ranks disagree", f"{first.where}: {first.text}\n{report}")
        return Verdict("refused", first.text, refusals[0])
    if kinds == {"equal", "rounding"}:
        return Verdict("rounding", report)
    if len(kinds) > 1:
        return Verdict("ranks disagree", f"{first.where}: {first.text}\n{report}")
    return Verdict(first.kind, first.text)


def _judge_alone(program: Program, outcomes: list[Outcome], report: str) -> Verdict:
    """The last rank has raised; the others have come to the end, or were told that it does not come."""
    *others, last = (outcome.text for outcome in outcomes)
    told = re.compile(r"Deliberate|(StallError|ApartError|PeerError): ")
    if last.startswith("Deliberate") and all(told.match(text) for text in others):
        return Verdict("alone", last)
    known = refusal_of(program, last)
    if known is not None and all(refusal_of(program, text) == known for text in others):
        return Verdict("refused", last, known)
    return Verdict("ranks disagree", f"{outcomes[0].where}: {outcomes[0].text}\n{report}")


def main(*programs: Program) -> None:
    """Of a script that was printed: all of them in the same processes; the last is what it is about."""
    with Runner() as runner:
        verdict = [runner.run(program) for program in programs][-1]
    print(f"{verdict.kind}\n{verdict.text}")
    raise SystemExit(verdict.failed)
