"""Offload moves things in time and place, and that is all: every row of ``zero/offload`` equals ``none`` to the bit.

Both runs are of the same stage, so losses, gradients, parameters and optimizer state are compared without tolerance.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine.units import after_step
from lightning_zero.engine.units.after_step import StepJob, StepWorker
from lightning_zero.engine.whole import state_dicts
from lightning_zero.settings import ConfigError
from tests.engine.sides import MakeOptimizer, Sharded, Side, adamw, sgd, step_and_clear, whole
from tests.engine.support import assert_equal, in_pairs
from tests.engine.works import accumulate, autocast, floats, loss_at, tokens
from tests.engine.works import train as train_in
from tests.harness import on_ranks, run
from tests.models import Adapted, Does, Model, frozen, linear
from tests.rows import PLACES

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")

AUTO = [("auto", stage) for stage in (1, 2, 3)]
SOME = [("optimizer_nvme", 2), ("cpu", 3)]
MORE = [("optimizer_cpu", 1), ("nvme", 3)]
SOMEWHERE = pytest.mark.parametrize(
    ("row", "stage"), [*SOME, *(pytest.param(*place, marks=pytest.mark.full) for place in MORE)], ids=str
)

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": sgd,
    "adamw": adamw,
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


def offload(row: str, folder: Path) -> dict[str, Any]:
    if row == "auto":  # a model of this size lies on all three tiers
        budgets = {"device_budget": 9_000, "host_budget": 45_000}
        return {"offload": {"name": row, "nvme_path": str(folder), **budgets}}
    return {"offload": {"name": row, "nvme_path": str(folder)} if "nvme" in row else row}


Body = Callable[[Sharded], Sequence[Any]]


def compare(
    row: str,
    stage: int,
    folder: Path,
    body: Body,
    build: Callable[[], nn.Module] = Model,
    *,
    under: Callable[[], Any] = contextlib.nullcontext,
    **config: Any,
) -> None:
    """``body`` finds the same with offload, ``under`` this context, and without."""
    found = []
    for context, place in ((under, offload(row, folder)), (contextlib.nullcontext, {"offload": "none"})):
        torch.manual_seed(3)
        with context(), Sharded(build(), stage=stage, **place, **config) as side:
            found.append([*body(side), *whole(side)])
    assert_equal(*found, f"{row} at stage {stage}")


def train(side: Sharded, steps: int, *, first: int = 0, micro_batches: int = 1) -> list[Tensor]:
    work = functools.partial(accumulate, micro_batches=micro_batches)
    return train_in(side, range(first, first + steps), work)


def observed(
    side: Sharded, micro_batches: int, look: Callable[[Sharded], Sequence[Any]], *, steps: int = 3
) -> list[Any]:
    """Losses, what ``look`` finds before each step, and gradients of the last: whoever looks waits for those before."""
    found: list[Any] = []
    for step in range(steps):
        with autocast(side.precision):
            found.append(accumulate(side, step, micro_batches))
        found += look(side)
        if step == steps - 1:
            with lightning_zero.gather(side.module, grads=True):
                found += [p.grad.clone() for p in side.module.parameters() if p.grad is not None]
        step_and_clear(side)
    assert len(found) > 20
    return found


# -- the matrix -------------------------------------------------------------------------------------------------------


VALUES = {
    "world": (1, 2),
    "place": [*PLACES, *AUTO],
    "precision": ("fp32", "bf16", "fp16", "bf16_true"),
    "clip": (False, True),
    "micro_batches": (1, 2),
    "optimizer": tuple(OPTIMIZERS),
}
Case = namedtuple("Case", VALUES)
MATRIX = list(map(Case._make, itertools.product(*VALUES.values())))


def _check_case(case: Case, folder: Path) -> None:
    def body(side: Sharded) -> list[Any]:
        return observed(side, case.micro_batches, lambda side: [side.clip(0.3)] if case.clip else [])

    compare(*case.place, folder, body, precision=case.precision, optimizer=OPTIMIZERS[case.optimizer])


@in_pairs(MATRIX)
def test_training_equals_none(case: Case, tmp_path: Path) -> None:
    run(case.world, _check_case, case, tmp_path)


@on_ranks(2)
@SOMEWHERE
def test_gradients_that_rest_and_travel_in_two_dtypes_equal_none(row: str, stage: int, tmp_path: Path) -> None:
    precision = {"name": "bf16", "grad_dtype": "bf16", "reduce_dtype": "fp32"}
    compare(row, stage, tmp_path, lambda side: train(side, 3, micro_batches=3), precision=precision, optimizer=sgd)


@on_ranks(1)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_of_the_step_do_not_matter(optimizer: str, threads: int, tmp_path: Path) -> None:
    """Of buckets that torch's kernels divide among threads."""
    build = lambda: Model(width=301, depth=1)  # noqa: E731
    with mock.patch.object(after_step, "threads_of_steps", lambda *_, **__: threads):
        compare("cpu", 3, tmp_path, lambda side: train(side, 2), build, optimizer=OPTIMIZERS[optimizer])


# -- programs ---------------------------------------------------------------------------------------------------------


def late_steps(before: Callable[[StepJob], object]) -> Any:
    """``before`` is called in the worker before each of its jobs."""

    def late(job: StepJob) -> StepJob:
        def run() -> None:
            before(job)
            job.run()

        return job._replace(run=run)

    submit = StepWorker.submit
    return mock.patch.object(
        StepWorker, "submit", lambda self, jobs, *event: submit(self, list(map(late, jobs)), *event)
    )


def slow_steps(seconds: float = 0.01) -> Any:
    """The worker takes its time: whatever does not wait for it, but should, sees old values."""
    return late_steps(lambda _: time.sleep(seconds))


def trainable(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.01)


def adapted() -> nn.Module:
    """Frozen units, and adapters."""
    module = Model()
    module.embed.requires_grad_(False)
    module.blocks = nn.ModuleList([Adapted(), module.blocks[1].requires_grad_(False), Adapted(), module.blocks[2]])
    module.scale = nn.Parameter(torch.tensor(2.0))  # 0-d: stays on the device in every row
    module.register_forward_hook(lambda m, _, out: out * m.scale)
    return module


def thaws_and_freezes(side: Sharded) -> list[Any]:
    found = train(side, 2)
    thawed = side.module.blocks[0].requires_grad_(True)
    side.optimizer.add_param_group({"params": list(thawed.parameters()), "lr": 0.003})
    found += train(side, 2, first=2)
    side.module.blocks[1].requires_grad_(False)
    found += train(side, 1, first=4)
    side.module.blocks[1].requires_grad_(True)
    return found + train(side, 2, first=5)


def spares() -> nn.Module:
    """A layer of blocks is used in every second step only, a block of the model in every third."""

    def spare(m: Any, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(m.always(x))
        return x if step % 2 else torch.tanh(m.sometimes(x))

    def act(m: Any, x: Tensor, step: int) -> Tensor:
        for i, block in enumerate(m.blocks):
            if i != step % 3:
                x = block(x, step)
        return x

    blocks = (Does(spare, always=linear(), sometimes=linear(), never=linear(out=2)) for _ in range(3))
    return Does(act, blocks=nn.ModuleList(blocks))


def uses_other_parts(side: Sharded) -> list[Any]:
    """Runs are cut anew, and with them the tensors that rest in files."""

    def work(side: Side, step: int) -> Tensor:
        loss = side.module(floats(step, 4, 19), step).float().square().mean()
        side.backward(loss)
        return loss

    return train_in(side, range(7), work)


def grouped(params: Any, lr: Any) -> torch.optim.Optimizer:
    params = list(params)
    some = [p for i, p in enumerate(params) if i % 3]
    return torch.optim.AdamW([{"params": some, "weight_decay": 0.1}, {"params": params[::3], "lr": 0.003}], lr=lr)


def schedules(side: Sharded) -> list[Any]:
    """A step has the hyperparameters of its call."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.5)
    found = []
    side.optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    for step in range(4):
        found.append(accumulate(side, step, 1))
        side.step()
        scheduler.step()
        side.optimizer.param_groups[0]["weight_decay"] *= 0.1
        side.optimizer.param_groups[0]["betas"][0] = 0.5 + step / 10
        side.zero_grad()
    return found


def half(params: Any) -> torch.optim.Optimizer:
    return adamw(list(params)[::2])


def shares_buckets(side: Sharded, set_to_none: bool) -> list[Any]:
    """Clearing, clipping and clamping the gradients of one optimizer leaves the step of the other alone."""
    second = sgd(list(side.module.parameters())[1::2])
    side.engine.add_optimizer(second)
    found = []
    for step in range(4):
        if step < 3:
            found.append(accumulate(side, step, 1))
        else:  # without blocks, whose steps no gather waits for
            with side.engine.step_scope():
                side.backward(side.module.head(side.module.embed(tokens(step))).square().mean())
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none)
        if step == 2:  # of the step the next backward comes first
            continue
        if step:  # what waits for the first step comes before the second
            found.append(lightning_zero.clip_grad_norm_(second.param_groups[0]["params"], 0.1))
        second.step()
        second.zero_grad(set_to_none)
        found.append(lightning_zero.clip_grad_norm_(side.module, 1e-3))  # too late for either step
    return found


def raises(side: Sharded) -> list[Any]:
    """In a forward, and in a backward."""
    found = train(side, 2)
    with side.module.blocks[1].register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        side.module(tokens(2))
    side.engine.passes.abort()
    found += train(side, 1, first=2)
    with side.module.blocks[1].register_full_backward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        side.backward(loss_at(side.module, 3))
    side.zero_grad()
    return found + train(side, 2, first=3)


def follower() -> nn.Module:
    student = Model()
    return Does(
        lambda m, batch: m.teacher(batch).detach() - m.student(batch),
        student=student,
        teacher=copy.deepcopy(student).requires_grad_(False),
    )


def uses_weights_in_every_second_step(side: Sharded, what: str) -> list[Any]:
    """Of two units at once, outside of their calls, where the recorded order of gathers lacks these uses."""
    module, found = side.module, []
    for step in range(4):
        with side.engine.step_scope():
            pairs = list(zip(module.teacher.parameters(), module.student.parameters(), strict=True)) * (step % 2)
            if what == "compared":
                found += [torch.cosine_similarity(own.flatten(), other.flatten(), 0).detach() for own, other in pairs]
            with torch.no_grad():
                for own, other in pairs if what != "compared" else ():
                    own.copy_(other) if what == "copied" else own.lerp_(other, 0.1)
            found.append(loss_at(module, step))
            side.backward(found[-1])
            step_and_clear(side)
    return found


ADAPTERS = {"optimizer": trainable, "unit": {"classes": ["Block", "Adapted"]}}
PROGRAMS: dict[str, tuple[Body, Callable[[], nn.Module], dict[str, Any]]] = {
    "adapters": (lambda side: train(side, 3), adapted, ADAPTERS),
    "thaws": (thaws_and_freezes, lambda: frozen("blocks.0"), {"optimizer": trainable}),
    **{f"spares, {name}": (uses_other_parts, spares, {"optimizer": OPTIMIZERS[name]}) for name in ("sgd", "adamw")},
    "schedules": (schedules, Model, {"optimizer": lambda params: grouped(params, 0.02)}),
    "schedules a tensor": (schedules, Model, {"optimizer": lambda params: grouped(params, torch.tensor(0.02))}),
    "shares, clears": (lambda side: shares_buckets(side, True), Model, {"optimizer": half}),
    "shares, zeroes": (lambda side: shares_buckets(side, False), Model, {"optimizer": half}),
    "raises": (raises, Model, {}),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("program", list(PROGRAMS))
@SOMEWHERE
def test_programs_equal_none(row: str, stage: int, program: str, precision: str, tmp_path: Path) -> None:
    body, build, settings = PROGRAMS[program]
    with slow_steps():
        compare(row, stage, tmp_path, body, build, precision=precision, **settings)


@on_ranks(2)
@pytest.mark.parametrize("what", ["averaged", "copied", "compared"])
@pytest.mark.parametrize("row", ["cpu", pytest.param("nvme", marks=pytest.mark.full)])
def test_weights_that_are_used_in_every_second_step_are_those_of_none(row: str, what: str, tmp_path: Path) -> None:
    body = functools.partial(uses_weights_in_every_second_step, what=what)
    compare(row, 3, tmp_path, body, follower, optimizer=trainable)


@pytest.mark.smoke
@on_ranks(1, 2)
@SOMEWHERE
def test_values_are_those_of_none_right_after_the_step(row: str, stage: int, tmp_path: Path) -> None:
    def body(side: Sharded) -> list[Any]:
        found: list[Any] = []
        for step in range(4):
            train(side, 1, first=step)
            if step == 0:
                with lightning_zero.gather(side.module.blocks[2]), torch.no_grad():
                    side.module.blocks[2].down.weight[0] = 0.25
                    found.append(side.module.blocks[2].up.weight.detach().clone())
            elif step == 1:
                with torch.no_grad(), side.engine.step_scope("evaluate", evaluation=True):
                    found.append(side.module(tokens(9)).clone())
                with torch.no_grad():
                    found.append(side.module(tokens(8)).clone())
            elif step == 2:
                state = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)["state"]
                found += [v for entry in state.values() for v in entry.values()]
            else:
                found += list(side.engine.state_dict(only_rank_0=False).values())
        return found + train(side, 1, first=7)

    with slow_steps():
        compare(row, stage, tmp_path, body)


@on_ranks(2, full=(1,))
@SOMEWHERE
def test_release_gives_a_plain_module_back(row: str, stage: int, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    torch.manual_seed(3)
    side = Sharded(Model(), stage=stage, **offload(row, tmp_path))
    for _ in range(2):  # in the same folder again
        with slow_steps():
            train(side, 2)
            expected = side.engine.state_dict(only_rank_0=False)
            train(side, 1)
            tiers, changed = side.engine.tiers, side.engine.state_dict(only_rank_0=False)
            side.engine.release()
        assert not torch.equal(changed["head.weight"], expected["head.weight"])
        for name, value in side.module.state_dict().items():
            assert torch.equal(value, changed[name])
            assert value.untyped_storage().nbytes() == value.nbytes
        for tier in (tiers.host, tiers.nvme):
            assert tier is None or tier.nbytes == 0
        dist.barrier()
        assert not any(tmp_path.rglob("*.*")), "files are left behind"
        plain = torch.optim.AdamW(side.module.parameters())
        loss_at(side.module, 0).backward()
        plain.step()
        side = Sharded(side.module, stage=stage, **offload(row, tmp_path))
    side.engine.release()
    deadline = time.monotonic() + 5
    ours = {"lightning_zero-step", "lightning_zero-disk", "lightning_zero-stager"}
    while left := [t for t in threading.enumerate() if t not in threads and t.name.rsplit("_", 1)[0] in ours]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@on_ranks(1)
def test_a_module_that_cannot_be_sharded_leaves_its_folder_free(tmp_path: Path) -> None:
    plain = Does(lambda m, x: x, weight=nn.Parameter(torch.empty(3, 3, device="meta")))
    for _ in range(2):
        with pytest.raises(ConfigError, match="reset_parameters"):
            lightning_zero.shard(nn.Sequential(nn.Linear(3, 3), plain), device="cpu", **offload("nvme", tmp_path))
    assert not list(tmp_path.rglob("*.bin"))
