"""Memory that comes and goes is bounded where passes are not known, and models have no repeated blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.reduction import Reduction
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.units import build
from lightning_zero.engine.units.bucket import Bucket, Shown
from lightning_zero.engine.units.param_store import FlatBuffer, references
from lightning_zero.trainer.summary import large_unit
from tests.engine.sides import Sharded, beside_twin
from tests.engine.support import assert_same, check
from tests.engine.works import floats, mean_square_of, train, train_both
from tests.harness import on_ranks
from tests.models import Does, Model, Recurrent, UNet

pytestmark = pytest.mark.sample  # the full tier has all cases


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharding_a_module_needs_one_unit_beside_what_rests(precision: str) -> None:
    made: list[Bucket] = []
    fill = build._fill

    def filled(bucket: Bucket, sources: Any) -> None:
        unit = bucket.label.partition("#")[0]
        assert not any(b.full.allocated for b in made if not b.label.startswith(f"{unit}#")), "another is gathered"
        made.append(bucket)
        fill(bucket, sources)

    with mock.patch.object(build, "_fill", filled), Sharded(Model(depth=5), precision=precision) as side:
        assert len(made) == len(side.engine.buckets) >= 6
        assert not any(b.full.allocated for b in made if b.plan.reshards)


NEVER_DONE = mock.patch.object(Reduction, "done", lambda self: False)


class OnDevice:
    """A communicator whose messages a stream of a device would wait for."""

    queues = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def as_on_a_device(side: Sharded) -> None:
    side.engine.passes.reducer.comm = OnDevice(side.engine.comm)  # type: ignore[assignment]


@on_ranks(2, full=(3,))
@pytest.mark.parametrize(("stage", "dynamic_graph"), [(1, False), (3, False), (3, True)])
def test_a_backward_that_is_not_known_keeps_few_reductions_in_flight(stage: int, dynamic_graph: bool) -> None:
    """As on a GPU, where the host never sees that a reduction is over: it must wait, and may not in any case."""
    most = 0
    issue = Reducer._issue

    def issued(self: Reducer, bucket: Bucket) -> None:
        nonlocal most
        issue(self, bucket)
        most = max(most, self._flying_nbytes)

    module = Model(width=64, depth=12)
    limit = max(b.numel() for b in module.parameters()) * 4
    side, twin = beside_twin(module, stage=stage, dynamic_graph=dynamic_graph, reduce_bucket_bytes=limit)
    as_on_a_device(side)
    with NEVER_DONE, mock.patch.object(Reducer, "_issue", issued), side:
        sizes = [b.layout.numel * 4 for b in side.engine.buckets]
        of_unit = sum(b.layout.numel * 4 for b in side.engine.units[3].buckets)
        for step in range(2):
            train_both((twin, side), [step])
            # What ranks know of each other is as old as the gather before: a unit, and one ahead.
            assert most <= max(limit, *sizes) + (2 * of_unit if stage == 3 else 0)
            assert most < sum(sizes) / 2
            assert_same(side, twin)


def forks(takes: Callable[[Any, int], bool]) -> nn.Module:
    """A model that takes the blocks for which ``takes(module, number)``; ``turn`` is for the test to set."""

    def act(m: Any, batch: torch.Tensor) -> torch.Tensor:
        x = m.embed(batch)
        for number, block in enumerate(m.blocks):
            if takes(m, number):
                x = block(x)
        return m.head(x)

    torch.manual_seed(3)
    model = Model(width=32, depth=9)
    return Does(act, embed=model.embed, blocks=model.blocks, head=model.head, turn=0)


SMALL = {"stage": 3, "reduce_bucket_bytes": 1 << 12, "stall_timeout_s": 30.0}


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("dynamic_graph", [False, True])
def test_ranks_that_take_other_paths_do_not_wait_for_each_other_in_a_circle(dynamic_graph: bool) -> None:
    # One may wait for gathers of another in its backward.
    module = forks(lambda m, number: (number + m.turn) % 3 != torch.distributed.get_rank())
    with NEVER_DONE, Sharded(module, dynamic_graph=dynamic_graph, **SMALL) as side:
        as_on_a_device(side)
        train(side, range(3))


# -- models without repeated blocks, divided by size ------------------------------------------------------------------

SIZES = {UNet: (2, 3, 16, 16), Recurrent: (2, 5, 64)}


@on_ranks(2)
@pytest.mark.parametrize(("kind", "precision"), [(UNet, "fp32"), (Recurrent, "fp32"), (Recurrent, "bf16")])
def test_it_trains_as_its_twin(kind: type[nn.Module], precision: str) -> None:
    check(kind, lambda side, step: mean_square_of(side, floats(step, *SIZES[kind])), stage=(2, 3), precision=precision)


@on_ranks(2)
@pytest.mark.parametrize("kind", [UNet, Recurrent])
def test_few_units_are_gathered_at_a_time(kind: type[nn.Module]) -> None:
    most, allocate = [0], FlatBuffer.allocate

    def allocating(buffer: FlatBuffer) -> None:
        allocate(buffer)
        most.append(sum(b.full.nbytes for b in side.engine.buckets if b.full.allocated))

    with Sharded(kind(), stage=3, prefetch_bytes=0) as side, mock.patch.object(FlatBuffer, "allocate", allocating):
        sizes = [sum(b.full.nbytes for b in unit.buckets) for unit in side.engine.units]
        assert len(sizes) > 4 and sizes[0] < sum(sizes) / 8  # the root keeps little
        train(side, range(3), lambda side, step: mean_square_of(side, floats(step, *SIZES[kind])))
        # The root, a unit, and the last one of the forward, which stays; the next one, when they change over.
        assert max(most) <= min(sizes[0] + sum(sorted(sizes[1:])[-3:]), 0.75 * sum(sizes)), sizes


@on_ranks(2)
def test_the_table_says_where_most_of_a_model_is_one_unit() -> None:
    def said(module: nn.Module, **config: Any) -> str | None:
        with Sharded(module, **config) as side:
            return large_unit(side.engine)

    large = nn.Sequential(nn.GRU(64, 400), nn.Linear(400, 10))
    only = "99 % of the parameters are gathered at once, as 0; it has no modules that could be units"
    assert said(large, stage=3) == only
    assert said(large, stage=2) is said(UNet(), stage=3) is None
    whole = said(UNet(), stage=3, unit={"classes": ["UNet"]})
    assert whole is not None and whole.startswith("100 % of the parameters are gathered at once, as (root)")
    assert "set zero.unit.classes to classes inside it: Conv2d, ConvTranspose2d, Down, " in whole


@on_ranks(2)
@pytest.mark.parametrize("room", [0, 20_000])
def test_reading_all_weights_between_steps_takes_one_unit_or_what_may_be_fetched_ahead(room: int) -> None:
    made: list[tuple[StorageWeakRef, int]] = []
    live: list[int] = []
    full_master = Bucket.full_master

    def noted(bucket: Bucket) -> Tensor:
        full = full_master(bucket)
        made.append((StorageWeakRef(full.untyped_storage()), full.nbytes))
        live.append(sum(nbytes for storage, nbytes in made if not storage.expired()))
        return full

    with Sharded(Model(depth=6), prefetch_bytes=room) as side:
        units = [sum(b.layout.numel * 4 for b in unit.buckets) for unit in side.engine.units]
        assert sum(units) > 2 * max(*units, room), units
        between = side.engine.passes.between
        between.begin_run()
        before = [b.full.allocated for b in side.engine.buckets]
        with mock.patch.object(Bucket, "full_master", noted), torch.no_grad():
            averages = [torch.zeros(p.shape) for p in side.module.parameters()]
            for average, param in zip(averages, side.module.parameters(), strict=True):
                average.lerp_(param.detach(), 0.1)
                for bucket in side.engine.passes.between.memory:
                    own = 1 + len(bucket.params) * (bucket.shown is Shown.MASTERS)
                    while references(side.engine.passes.between.memory[bucket].full) > own:
                        time.sleep(0.001)  # a thread of gloo lets go of what it has gathered
        assert max(units) <= max(live) <= max(*units, room), (live, units)
        assert before == [b.full.allocated for b in side.engine.buckets]
