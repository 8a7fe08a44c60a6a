"""A unit keeps a shard of its node from its forward to the end of the backward: the bits of flat sharding, and half of
the bytes that gathers bring from other nodes.

Nodes are virtual, as in ``test_hierarchy.py``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine.units.unit import State, Unit
from lightning_zero.planning.buckets import BucketShape, Itemsizes
from lightning_zero.planning.fit import Machine, plan_row
from lightning_zero.planning.fit import Model as PlannedModel
from lightning_zero.planning.memory import Limits
from lightning_zero.planning.placement import Tier
from lightning_zero.planning.speed import sent_by
from lightning_zero.planning.topology import over_nodes
from lightning_zero.ranks.verdict import StallError
from lightning_zero.settings import ConfigError, HybridShard, Offload, OffloadConfig, Stage, allowed_rows, make_config
from lightning_zero.trainer.memory.held_bytes import limits_of, plan_of
from tests.engine.sides import Sharded, Work, step_and_clear
from tests.engine.support import assert_equal, in_pairs, places_posted_often
from tests.engine.test_hierarchy import accumulated, bytes_from_other_nodes, history, sharded
from tests.engine.test_offload import offload
from tests.engine.test_on_streams import through_host, together
from tests.engine.works import accumulate, floats, loss_at, mean_square_of, train
from tests.harness import on_ranks, run
from tests.models import Model, paths

BOTH = ("flat", "node_backward")
PER_NODE, KEPT = 2, HybridShard.node_backward


def kept(side: Sharded) -> list[Tensor]:
    return [b.node_shard.values for b in side.engine.buckets if b.node_shard.values is not None]


# -- parity -----------------------------------------------------------------------------------------------------------

BOOLS = (False, True)
SETTINGS = {
    "precision": ("fp32", "bf16"),
    "prefetch_bytes": (0, 10_000, 1 << 28),
    "keep_gathered_bytes": (0, 10_000),
    "activation_checkpointing": ("none", "blocks"),
    "dynamic_graph": BOOLS,
}
VALUES = {"micro_batches": (1, 3), "clips": BOOLS, "row": ("none", "optimizer_cpu"), "together": BOOLS, **SETTINGS}
Case = namedtuple("Case", VALUES)
CASES = list(map(Case._make, itertools.product(*VALUES.values())))


@pytest.mark.sample
@on_ranks(4)
@in_pairs(CASES)
def test_it_equals_flat_to_the_bit(case: Case, tmp_path: Path) -> None:
    def work(side: Sharded, step: int) -> Any:
        loss = accumulate(side, step, case.micro_batches)
        return loss, side.clip(0.3) if case.clips else None

    config = {name: getattr(case, name) for name in SETTINGS} | offload(case.row, tmp_path)
    alone = contextlib.nullcontext()
    host = through_host() if case.row != "none" or case.dynamic_graph else alone
    with together() if case.together else alone, host:
        on_both(work, **config)


def on_both(work: Work, *, build: Callable[[], nn.Module] = Model, **config: Any) -> None:
    """``work`` finds the same in each of three steps; so are all masters and states."""

    def works(side: Sharded, step: int) -> Any:
        assert not kept(side)
        return work(side, step)

    found = []
    for hybrid_shard in BOTH:
        torch.manual_seed(3)
        with sharded(build(), PER_NODE, hybrid_shard, **config) as side:
            assert side.engine.comm.shard.size == dist.get_world_size()
            found.append(history(side, works))
            assert not kept(side)
    assert_equal(*found)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample
@on_ranks(4)
@pytest.mark.parametrize(("micro_batches", "recompute"), [(1, "none"), (2, "blocks")])
def test_gathers_of_the_backward_stay_within_the_node(micro_batches: int, recompute: str) -> None:
    across = {}
    for hybrid_shard in BOTH:
        with sharded(Model(), PER_NODE, hybrid_shard, activation_checkpointing=recompute) as side:
            train(side, [0], accumulated(micro_batches))  # the order is known from here on
            with bytes_from_other_nodes(side.engine.comm, PER_NODE) as found:
                accumulate(side, 1, micro_batches)
            across[hybrid_shard] = found["gather"], found["reduce"]
            sent = sent_by(plan_of(side.engine), limits_of(side.engine, micro_batches))
            units = [sum(b.full.nbytes for b in unit.buckets) for unit in side.engine.units]
    # The root and the last unit stay between forward and backward. Half of each gather comes from the other node.
    once, twice = units[0] + units[-1], sum(units[1:-1])
    assert across["flat"][0] == micro_batches * (once + 2 * twice) // 2
    assert across["node_backward"][0] == micro_batches * (once + twice) // 2
    assert across["flat"][1] == across["node_backward"][1]
    assert sent.gathers == micro_batches * (once + twice) * 3 / 4
    assert sent.in_node == micro_batches * twice / 2


# -- nothing that is kept is ever old ---------------------------------------------------------------------------------


def evaluates(side: Sharded, step: int) -> Any:
    """Between backwards of a step, between steps, and between forward and backward."""
    found = []
    for micro in range(2):
        with side.no_sync() if not micro else contextlib.nullcontext():
            side.backward(loss_at(side.module, step, micro))
        with side.engine.step_scope(evaluation=True), torch.no_grad():
            found.append(loss_at(side.module, step, 7))
            assert not kept(side)
    return found


def loads(side: Sharded, step: int) -> Any:
    """Between two forwards of one pass."""
    draw = torch.Generator().manual_seed(step)
    state = {name: torch.randn(p.shape, generator=draw) * 0.1 for name, p in side.module.named_parameters()}
    with side.engine.step_scope():
        with torch.no_grad():
            first = loss_at(side.module, step)
        assert step or bool(kept(side)) == (side.engine.comm.ranks.node.size > 0)
        side.engine.load_state_dict(state)
        assert not kept(side)
        loss = loss_at(side.module, step)
        assert loss != first
        side.backward(loss)
    return first, loss.detach()


def writes(side: Sharded, step: int) -> Any:
    """To values that are here, to those that have gone, and by ``gather``."""
    weight = side.module.blocks[0].down.weight  # in the slices of both ranks of a node
    values = torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight)
    with side.engine.step_scope():
        losses = [loss_at(side.module, step).detach()]
        with torch.no_grad():
            weight.mul_(1.5)
        losses.append(loss_at(side.module, step).detach())
        weight.data = values * (step + 1)
        losses.append(loss_at(side.module, step).detach())
        with lightning_zero.gather(side.module), torch.no_grad():
            for param in side.module.parameters():
                param.mul_(0.9)
        loss = loss_at(side.module, step)
        side.backward(loss)
    assert len({float(value) for value in losses}) == 3
    return losses, loss.detach()


def steps_in_a_scope(side: Sharded, step: int) -> Any:
    """Several backwards and steps in a scope, as in manual optimization; and a step between two forwards of a pass."""
    found = []
    with side.engine.step_scope():
        for micro in range(2):
            loss = loss_at(side.module, step, micro)
            side.backward(loss)
            step_and_clear(side)
            with torch.no_grad():
                found += [loss.detach(), loss_at(side.module, step, 5)]
        side.optimizer.step(lambda: None)
        loss = loss_at(side.module, step, 3)
        side.backward(loss)
    return [*found, loss.detach()]


def restages(side: Sharded, step: int) -> Any:
    """To rows below stage 3, where nothing is gathered, it is refused; another row of offload is followed."""
    if step == 1:
        if side.engine.comm.ranks.node.size:
            with pytest.raises(ConfigError, match=r"node_backward with stage='zero1'"):
                side.engine.restage(stage=1)
        side.engine.restage(offload="optimizer_cpu")
    return accumulate(side, step, 2)


def raises(side: Sharded, step: int) -> Any:
    """A backward that raised, and one that goes well, with other values in between."""
    loss = loss_at(side.module, step)
    with side.module.blocks[1].up.weight.register_hook(lambda _: 1 / 0), pytest.raises(ZeroDivisionError):
        side.backward(loss)
    assert not kept(side)
    side.zero_grad()
    return accumulate(side, step, 2)


def other_paths(side: Sharded, step: int) -> Any:
    rank = dist.get_rank()
    path = [(0, 1, 2, 3), (1, 0, 1), (3, 3, 2), (0,)][(rank + step) % 4]
    return mean_square_of(side, floats(step, 2, 6), path)


PATHS: dict[str, Any] = {"build": paths, "dynamic_graph": True, "unit": {"classes": ["Linear"]}}
WORKS: dict[Work, list[dict[str, Any]]] = {
    **{work: [{}] for work in (evaluates, loads, steps_in_a_scope, restages, raises)},
    writes: [{}, {"precision": "bf16"}],
    other_paths: [PATHS, {**PATHS, "prefetch_bytes": 0}],
}


@pytest.mark.sample
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_what_is_kept_is_never_old(work: Work) -> None:
    for config in WORKS[work]:
        run(4, on_both, work, **config)


# -- plans ------------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_machine_knows_it() -> None:
    shapes = tuple(BucketShape(unit, (8192,), Itemsizes(2, 4, 4, 4)) for unit in range(9))
    model = PlannedModel(tuple(map(str, range(9))), shapes, Limits(0, 0, 1))

    def row(hybrid_shard: HybridShard, nodes: int = 2) -> Any:
        machine = Machine(4, 10**9, 10**10, 10**10, nodes, hybrid_shard=hybrid_shard)
        return plan_row(model, Stage.zero3, Offload.none, machine, OffloadConfig())

    flat, kept_rows = row(HybridShard.flat), row(KEPT)
    assert kept_rows.per_rank[Tier.device] - flat.per_rank[Tier.device] == 8 * 8192 * 2 // 4
    assert kept_rows.sent.gathers < flat.sent.gathers and kept_rows.sent.in_node > 0 == flat.sent.in_node
    with pytest.raises(ConfigError, match="node_backward: expected several nodes"):
        row(KEPT, nodes=1)
    rows = {offload for stage, offload in allowed_rows(KEPT) if stage is Stage.zero3}
    assert rows == {Offload.none, Offload.optimizer_cpu, Offload.optimizer_nvme, Offload.auto}
    assert {stage for stage, _ in allowed_rows(KEPT)} == {Stage.zero3}


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("refuses", "words"), [
    (lambda: settings_of(stage=2), r".* got node_backward with zero/stage=zero2\. Choose zero/stage=zero3"),
    (lambda: settings_of(offload="cpu"), r".* got node_backward with zero/offload=cpu\. Choose"),
    (lambda: over_nodes("aaaa", KEPT), r"several nodes of several ranks each, got one node .*hybrid_shard=flat"),
    (lambda: over_nodes("abcd", KEPT), r"several nodes of several ranks each, got one rank on each"),
    (lambda: over_nodes("aaab", KEPT), r"the same number of ranks on every node, got 3 on a, 1 on b"),
])  # fmt: skip
def test_rows_and_nodes_that_it_cannot_work_with_are_refused(refuses: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(hybrid_shard|node_backward): expected {words}"):
        refuses()


def settings_of(**settings: Any) -> Any:
    return make_config(hybrid_shard="node_backward", **settings)


@on_ranks(4)
def test_a_rank_that_fails_is_named() -> None:
    """In the middle of a gather of its node: the ranks of the other one come to wait for it later."""
    begin = Unit.unshard_begin

    def failing(self: Unit) -> None:
        if self.gathers_in_node and self.name == "blocks.1" and dist.get_rank() == 3:
            raise OSError("no buffer")
        begin(self)

    with places_posted_often(), mock.patch("lightning_zero.engine.passes.passes.ABANDON_S", 0.2):
        side = sharded(Model(), PER_NODE, "node_backward", stall_timeout_s=1.0)
        with mock.patch.object(Unit, "unshard_begin", failing):
            loss = loss_at(side.module, 0)
            with pytest.raises(OSError if dist.get_rank() == 3 else StallError) as caught:
                side.backward(loss)
        if dist.get_rank() == 2:
            assert "rank 3" in str(caught.value)
        assert not kept(side) and all(unit.state is State.SHARDED for unit in side.engine.units)
        side.engine.comm.waits.close()  # messages were lost: there is no release
