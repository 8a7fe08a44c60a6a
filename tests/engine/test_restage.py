"""Another stage or offload row between two steps: the numbers of a run that has never changed it."""

from __future__ import annotations

import itertools
import threading
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.engine.passes import passes
from lightning_zero.engine.units.after_step import StepWorker
from lightning_zero.planning.memory import Moment, planned_bytes
from lightning_zero.planning.placement import OFFLOADS, Tier
from lightning_zero.settings import ConfigError, Offload, allowed_rows
from lightning_zero.trainer.memory.held_bytes import held_bytes, plan_of, state_tensors
from tests.engine.optimizers import SignDescent
from tests.engine.sides import Sharded
from tests.engine.support import assert_equal, cases, pairwise_selection
from tests.engine.test_offload import OPTIMIZERS, offload, whole
from tests.engine.works import autocast, language_work, loss_at
from tests.harness import on_ranks, run
from tests.models import Model, Odd

ROWS = [f"{stage.name} {row.name}" for stage, row in allowed_rows() if row is not Offload.auto]


def place_of(row: str, folder: Path) -> dict[str, Any]:
    stage, name = row.split()[:2]
    return {"stage": stage, **offload(name, folder)}


def train(side: Sharded, step: int, precision: str = "fp32", restage: Callable[[], None] = lambda: None) -> Tensor:
    """A step, in which ``restage`` is called at one of four places."""
    place = step % 4
    if place == 0:
        restage()
    with autocast(precision):
        loss = loss_at(side.module, step)
        side.backward(loss)
    if place == 1:
        restage()  # the gradient waits for the step
    side.clip(0.5)
    if place == 2:
        restage()
    side.step()
    side.optimizer.param_groups[0]["lr"] *= 0.9
    if place == 3:
        restage()  # while an offloaded step is under way
    side.optimizer.zero_grad(set_to_none=step % 3 == 0)
    return loss.detach().clone()


# Rows one after the other, so that every way from one to another occurs once.
WALK = [row for pair in itertools.combinations(ROWS, 2) for row in pair] + ROWS[:1]
VALUES: dict[str, Sequence[Any]] = {
    "world": (1, 2, 3),
    "precision": ("fp32", "bf16", "bf16_true"),
    "optimizer": ("sgd", "adamw"),
}
Case = namedtuple("Case", [*VALUES, "part"], defaults=[-1])  # part of all ways from row to row; -1: all of them
MATRIX = [Case(*values) for values in itertools.product(*VALUES.values())]
# All ways once, each with some of the other settings.
SELECTED = [case._replace(part=part) for part, case in enumerate(pairwise_selection(MATRIX))]
PARTS = len(SELECTED)


def check_held(engine: Engine, what: str = "") -> None:
    engine.passes.wait_for_all()
    engine.passes.sharded_grads.finish_pending()
    states = state_tensors(engine)
    gone = not any(bucket.grad_store.is_there for bucket in engine.buckets)
    moment = Moment.cleared if gone else Moment.reduced
    planned = planned_bytes(plan_of(engine), engine.comm.rank, state_tensors=states, moment=moment)
    assert held_bytes(engine) == planned, what


def _check(case: Case, folder: Path) -> None:
    size = -(-(len(WALK) - 1) // PARTS)
    rows = WALK if case.part < 0 else WALK[case.part * size : (case.part + 1) * size + 1]
    settings = {"precision": case.precision, "optimizer": OPTIMIZERS[case.optimizer]}
    torch.manual_seed(3)
    with Sharded(Odd(depth=2), stage="zero3", **settings) as plain:
        losses = [train(plain, step, case.precision) for step in range(len(rows))]
        expected = whole(plain)
    torch.manual_seed(3)
    with Sharded(Odd(depth=2), **place_of(rows[0], folder), **settings) as side:
        optimizer, groups = side.optimizer, side.engine.comm._groups
        train(side, 0, case.precision)
        for step, row in enumerate(rows[1:], 1):

            def restage(row: str = row) -> None:
                side.engine.restage(**place_of(row, folder))
                check_held(side.engine, row)

            loss = train(side, step, case.precision, restage)
            check_held(side.engine, row)
            assert_equal(loss, losses[step], f"loss {step}, after {rows[step - 1]} -> {row}")
        assert side.optimizer is optimizer and side.engine.comm._groups is groups
        assert_equal(whole(side), expected)
    assert not list(folder.rglob("*"))


def test_the_walk_has_every_way_once() -> None:
    ways = list(itertools.pairwise(WALK))
    assert sorted(ways) == sorted(itertools.permutations(ROWS, 2))


@pytest.mark.sample
@cases(SELECTED, MATRIX)
def test_every_way_from_row_to_row_keeps_the_numbers(case: Case, tmp_path: Path) -> None:
    run(case.world, _check, case, tmp_path, timeout=300)


# -- the move itself --------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [("zero3 none", "zero1 none"), ("zero1 none", "zero3 cpu"), ("zero0 none", "zero2 optimizer_cpu")],
)
def test_one_bucket_is_in_two_places_at_a_time(before: str, after: str, tmp_path: Path) -> None:
    """What is held between two buckets is never more than the larger plan and one bucket's worth."""
    with Sharded(Model(depth=6), **place_of(before, tmp_path)) as side:
        train(side, 0)
        engine = side.engine
        held: list[int] = []
        follow = lambda number, move: held.append(sum(held_bytes(engine).values()))  # noqa: E731
        engine.restage(*after.split(), follow=[follow])
        whole = max(4 * b.layout.numel * 4 for b in engine.buckets)
        assert len(held) == len(engine.buckets)
        assert max(held) <= max(held[0], sum(held_bytes(engine).values())) + whole


def hooks_of(module: nn.Module) -> list[int]:
    tables = (table for inner in module.modules() for name, table in vars(inner).items() if "_hooks" in name)
    return [len(table) for table in tables if isinstance(table, dict)]


@on_ranks(2)
def test_nothing_is_left_of_the_rows_before(tmp_path: Path) -> None:
    """No hook is there twice; files, locks and threads of rows that are over are gone."""
    with Sharded(Odd(depth=2), stage=3, activation_checkpointing="blocks") as side:
        train(side, 0)
        hooks, threads = hooks_of(side.module), threading.active_count()
        rows = ["zero3 nvme", "zero3 nvme elsewhere", "zero1 optimizer_nvme", "zero3 cpu", "zero0 none", "zero3 none"]
        for step, row in enumerate(rows, 1):
            folder = tmp_path / f"{row.split()[-1]}"
            folder.mkdir(exist_ok=True)
            side.engine.restage(**place_of(row, folder))
            train(side, step)
            assert hooks_of(side.module) == hooks, row
            files = list(tmp_path.rglob(f"rank{dist.get_rank():05d}*"))
            assert bool(files) == ("nvme" in row) and all(file.is_relative_to(folder) for file in files), row
        side.engine.passes.wait_for_all()
        # Nothing but the thread of offloaded steps is left, which waits for more.
        assert threading.active_count() <= threads + 1


@on_ranks(2)
def test_a_rank_that_owns_nothing_of_a_unit_any_more_has_no_step_of_it(tmp_path: Path) -> None:
    """At stage 0 it stepped all; a job in the worker that nobody waits for would move what the next gather reads."""
    may_run = threading.Event()
    next_job = StepWorker._next_job

    def late(self: StepWorker, **options: Any) -> Any:
        may_run.wait(60)
        return next_job(self, **options)

    with Sharded(Model(width=4), stage=0) as side:  # a unit is smaller than a shard
        train(side, 0)
        side.engine.restage(**place_of("zero3 nvme", tmp_path))
        with mock.patch.object(StepWorker, "_next_job", late):
            language_work(side, 1)
            side.step()
            owned = [bool(bucket.owned_fragments()) for bucket in side.engine.buckets]
            assert all(owned) == (dist.get_rank() == 0)
            assert [bucket.awaited_step.is_done for bucket in side.engine.buckets] == [not own for own in owned]
            worker = side.engine.passes.after_step._worker
            assert (worker is not None and worker._running) == any(owned)
            may_run.set()
            train(side, 2)
            side.engine.passes.wait_for_all()


def history(act: Callable[[Sharded, bool], list[Any]], build: Callable[[], Any] = Model, **settings: Any) -> None:
    """``act`` finds the same whether it restages or not."""
    found = []
    for restages in (True, False):
        torch.manual_seed(3)
        with Sharded(build(), **settings) as side:
            found.append(act(side, restages) + whole(side))
    assert_equal(*found)


@on_ranks(2)
def test_rows_by_budgets() -> None:
    """``auto`` counts what the module itself holds as room."""

    def act(side: Sharded, restages: bool) -> list[Tensor]:
        first = train(side, 0)
        if restages:
            side.engine.restage(3, {"name": "auto", "device_budget": 20_000, "host_budget": 10**6})
            on_host = OFFLOADS[Offload.optimizer_cpu]._replace(compute_param=Tier.device)
            assert {bucket.plan.tiers for bucket in side.engine.buckets} == {OFFLOADS[Offload.none], on_host}
            check_held(side.engine, "auto")
        return [first, *(train(side, step) for step in range(1, 4))]

    history(act, stage=2)


@on_ranks(2)
def test_state_of_a_class_of_users_stays_as_wide_as_it_was() -> None:
    def act(side: Sharded, restages: bool) -> list[Tensor]:
        first = train(side, 0)
        if restages:
            side.engine.restage(1)
        return [first, train(side, 1)]

    history(act, precision="bf16_true", optimizer=SignDescent, optimizer_settings={"sharding": "slices"})


@on_ranks(2)
def test_writes_of_users_and_graphs_of_before() -> None:
    """What was written since the last step counts. A graph of before has lost its weights, and says so."""
    with Sharded(Model(), stage=2, offload="optimizer_cpu") as side:
        train(side, 0)
        with torch.no_grad():
            side.module.head.bias.fill_(3.0)
        loss = loss_at(side.module, 1)
        side.engine.passes.leave()
        side.engine.restage("zero3")
        with pytest.raises(RuntimeError, match="modified by an inplace operation|storage of size 0"):
            loss.backward()
        assert bool((side.engine.state_dict(only_rank_0=False)["head.bias"] == 3.0).all())


@on_ranks(2)
@pytest.mark.parametrize("in_backward", [False, True])
def test_after_an_exception_it_works(in_backward: bool) -> None:
    """Also where ranks have come to different places, so that messages of some are missing; and in a backward that the
    engine has to notice."""

    def act(side: Sharded, restages: bool) -> list[Tensor]:
        first = train(side, 0)
        block = side.module.blocks[1 + dist.get_rank()]
        if in_backward:
            with block.register_full_backward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
                loss_at(side.module, 1).backward()
            side.zero_grad()
        else:
            with block.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
                train(side, 1)
        if restages:
            side.engine.restage(1)
        return [first, train(side, 2)]

    with mock.patch.object(passes, "ABANDON_S", 0.2):
        history(act)


@on_ranks(2)
@pytest.mark.parametrize("settings", [{"keep_gathered_bytes": 100}, {"dynamic_graph": True}], ids=str)
def test_settings_that_belong_to_a_row_refuse_others(settings: dict[str, Any]) -> None:
    with Sharded(Model(), stage=3, **settings) as side:
        with pytest.raises(ConfigError, match=f"^{next(iter(settings))}: expected"):
            side.engine.restage(2)
        train(side, 0)
        side.engine.restage(offload="cpu")
        train(side, 1)


@on_ranks(2)
def test_gradients_on_some_ranks_only_are_refused() -> None:
    with Sharded(Model(), stage=3) as side:
        language_work(side, 0)
        if dist.get_rank() == 1:
            side.zero_grad()
        with pytest.raises(ConfigError, match="expected gradients of the same parameters on all ranks"):
            side.engine.restage(0)
        side.zero_grad()
        side.engine.restage(0)
