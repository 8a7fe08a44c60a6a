"""Another stage or offload row between two steps: the numbers of a run that has never changed it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import Offload
from lightning_zero.engine.whole.held_bytes import held_bytes, plan_of, state_tensors
from lightning_zero.planning.fit import allowed_rows
from lightning_zero.planning.memory import Moment, planned_bytes
from tests.engine.support import Model, Sharded, adamw, autocast, language_loss, pairwise_selection, sgd, tokens
from tests.harness import run

ROWS = [f"{stage.name} {row.name}" for stage, row in allowed_rows() if row is not Offload.auto]
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


class Odd(Model):
    """With a frozen unit, a parameter that stays whole, tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks[1].requires_grad_(False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(batch) * self.scale


def offload_of(row: str, folder: Path) -> dict[str, Any]:
    name = row.split()[1]
    return {"name": name, "nvme_path": str(folder)} if "nvme" in name else {"name": name}


def train(side: Sharded, steps: Sequence[int], precision: str) -> list[Any]:
    losses = []
    for step in steps:
        with autocast(precision):
            loss = language_loss(side.module, tokens(step))
            side.backward(loss)
        side.clip(0.5)
        side.step()
        side.optimizer.param_groups[0]["lr"] *= 0.9
        losses.append(loss.detach().clone())
        if step % 2:
            side.zero_grad()  # else the gradient of the step is still there
        else:
            side.optimizer.zero_grad(set_to_none=False)
    return losses


def values(side: Sharded) -> dict[str, Any]:
    engine = side.engine
    state = engine.optimizer_state(side.optimizer, only_rank_0=False)
    return {"weights": engine.state_dict(only_rank_0=False), "state": state}


def assert_equal(found: Any, expected: Any, what: str = "") -> None:
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), what
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key in expected:
            assert_equal(found[key], expected[key], f"{what} {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{what} {i}")
    else:
        assert found == expected, what


class Case(NamedTuple):
    world: int
    precision: str
    optimizer: str
    part: int  # of all ways from row to row; -1: all of them

    def __str__(self) -> str:
        return "-".join(map(str, self))


def all_ways(rows: Sequence[str]) -> list[str]:
    """Rows one after the other, so that every way from one to another occurs once (Hierholzer's circuit)."""
    left = {row: [other for other in reversed(rows) if other != row] for row in rows}
    walk: list[str] = []
    stack = [rows[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


WALK = all_ways(ROWS)
VALUES: dict[str, Sequence[Any]] = {
    "world": (1, 2, 3),
    "precision": ("fp32", "bf16", "bf16_true"),
    "optimizer": ("sgd", "adamw"),
}
MATRIX = [Case(*values, -1) for values in itertools.product(*VALUES.values())]
# All ways once, each with some of the other settings.
SELECTED = [case._replace(part=part) for part, case in enumerate(pairwise_selection(MATRIX))]
PARTS = len(SELECTED)


def check_held(side: Sharded, what: str) -> None:
    engine = side.engine
    engine.settle()
    engine.forget_zeroed()
    states = state_tensors(engine)
    gone = not any(bucket.grad_store.is_there for bucket in engine.buckets)
    moment = Moment.cleared if gone else Moment.reduced
    planned = planned_bytes(plan_of(engine), engine.rank, state_tensors=states, moment=moment)
    assert held_bytes(engine) == planned, what


def _check(case: Case, folder: Path) -> None:
    size = -(-(len(WALK) - 1) // PARTS)
    rows = WALK if case.part < 0 else WALK[case.part * size : (case.part + 1) * size + 1]
    settings = {"precision": case.precision, "optimizer": OPTIMIZERS[case.optimizer]}
    torch.manual_seed(3)
    with Sharded(Odd(), stage="zero3", **settings) as plain:
        losses = train(plain, range(len(rows)), case.precision)
        expected = values(plain)
    torch.manual_seed(3)
    with Sharded(Odd(), stage=rows[0].split()[0], offload=offload_of(rows[0], folder), **settings) as side:
        optimizer, groups = side.optimizer, side.engine.comm._groups
        found = train(side, [0], case.precision)
        for step, row in enumerate(rows[1:], 1):
            side.engine.restage(row.split()[0], offload_of(row, folder))
            check_held(side, row)
            found += train(side, [step], case.precision)
            check_held(side, row)
            assert_equal(found[-1], losses[step], f"loss {step}, after {rows[step - 1]} -> {row}")
        assert side.optimizer is optimizer and side.engine.comm._groups is groups
        assert_equal(values(side), expected)
    assert not list(folder.rglob("*"))


def test_the_walk_has_every_way_once() -> None:
    ways = list(itertools.pairwise(WALK))
    assert sorted(ways) == sorted(itertools.permutations(ROWS, 2))


@pytest.mark.parametrize("case", SELECTED, ids=str)
def test_every_way_from_row_to_row(case: Case, tmp_path: Path) -> None:
    run(case.world, _check, case, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_way_with_every_precision_and_optimizer(case: Case, tmp_path: Path) -> None:
    run(case.world, _check, case, tmp_path, timeout=300)
