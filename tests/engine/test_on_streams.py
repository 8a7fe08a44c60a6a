"""The ways that gradients and offload take where a device has streams, on the host and with values: the bits are the
same. ``tests/device`` proves their order, on a device without values.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
import lightning_zero.device
from lightning_zero.comm.transports import DirectTransport, HostTransport
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.streams import Streams
from lightning_zero.engine.passes.gradients import BucketGrads
from lightning_zero.engine.units import grad_store
from lightning_zero.tiers import pinned
from lightning_zero.tiers.host import HostTier
from lightning_zero.tiers.pinned import Landing
from tests.engine.sides import MakeOptimizer, Sharded, Work, adamw, sgd
from tests.engine.support import PRECISIONS, assert_equal, check
from tests.engine.test_hierarchy import accumulated, histories, history
from tests.engine.test_offload import compare, observed, offload
from tests.engine.works import accumulate, floats, loss_at, mean_square_of, tokens
from tests.harness import on_ranks
from tests.models import Does, Model, linear, paths

pytestmark = [pytest.mark.sample, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]


class AtOnce(Accelerator):
    """Streams whose work is over when it has been queued."""

    has_streams = True

    def new_stream(self) -> Any:
        return "stream"

    def record(self) -> Any:
        return "event"


STREAMS = mock.patch.dict(lightning_zero.device._KINDS, {"cpu": AtOnce})

# -- gradients that are copied into the buffer of their bucket in one call --------------------------------------------


def through_host() -> contextlib.AbstractContextManager[Any]:
    """Messages of engines made inside go as those of a device do where there is only gloo."""

    def choose(*_: Any) -> HostTransport:
        return HostTransport(DirectTransport())

    return mock.patch("lightning_zero.comm.communicator.choose_transport", choose)


@contextlib.contextmanager
def together() -> Iterator[list[int]]:
    """Engines made inside have streams, whose work is over at once. Gives how many gradients were copied at a time.

    So a message is over before the host goes on, unlike on a device. Ranks that issue messages at different moments
    (after offloaded steps, and where they take other paths) would wait for each other: they go :func:`through_host`.
    """
    counts: list[int] = []
    copy_in = BucketGrads.copy_in

    def counted(self: BucketGrads) -> None:
        if self.waiting:
            counts.append(len(self.waiting))
        copy_in(self)

    with STREAMS, mock.patch.object(BucketGrads, "copy_in", counted):
        yield counts


@on_ranks(1, 2, 3)
@PRECISIONS
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_training_equals_the_twin(stage: int, micro_batches: int, precision: str) -> None:
    with together() as counts:
        check(Model, accumulated(micro_batches), stage=stage, precision=precision)
    assert max(counts) >= 4  # of a block


def odd() -> nn.Module:
    """Gradients that are sparse, not contiguous, or come twice; and ranks that use other parts."""

    def act(m: Any, batch: Tensor) -> Tensor:
        x = m.table(batch)
        for _ in range(2):
            x = checkpoint(m.twice, x, use_reentrant=True)
        return m.parts[dist.get_rank()](x @ m.turned.t()).square().mean()

    return Does(
        act,
        table=nn.Embedding(11, 8, sparse=True),
        twice=linear(8),
        turned=nn.Parameter(torch.randn(8, 6).t()),
        parts=nn.ModuleList(linear(6) for _ in range(3)),
    )


def on_both(build: Callable[[], nn.Module], work: Work, *, host: bool = False, **config: Any) -> None:
    """Gradients that are copied in together train as those that go alone, to the bit.

    Args:
        host: messages of those that are copied together go through host memory.
    """
    found = []
    for ways in (together, contextlib.nullcontext):
        torch.manual_seed(3)
        through = through_host() if host and ways is together else contextlib.nullcontext()
        with ways(), through, Sharded(build(), **config) as side:
            found.append(history(side, work))
    assert_equal(*found)


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_all_kinds_are_those_that_go_alone(stage: int) -> None:
    on_both(odd, lambda side, step: side.backward(side.module(tokens(step))), stage=stage)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_scale_of_the_loss_may_change_between_micro_batches(stage: int) -> None:
    """What has been accumulated under another scale counts as much as before."""

    def work(side: Sharded, step: int) -> None:
        for micro, scale in enumerate((2.0**12, 2.0**13, 1.0)):
            side.engine.passes.reducer.set_loss_scale(scale)
            with side.no_sync() if micro < 2 else contextlib.nullcontext():
                side.backward(loss_at(side.module, step, micro) * scale)

    on_both(Model, work, stage=stage)


@on_ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_sums_over_nodes_follow_in_the_stream(stage: int) -> None:
    """Nodes of one rank: the messages that follow a reduction, and the factor on what they sum."""
    found = []
    for ways in (together, contextlib.nullcontext):
        with ways():
            found += histories([(1, "node", {"stage": stage})])
    assert_equal(*found)


# -- messages through host memory -------------------------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.parametrize(("stage", "row"), [(1, "optimizer_cpu"), (2, "optimizer_nvme")])
def test_ranks_whose_offloaded_steps_end_at_different_moments(stage: int, row: str, tmp_path: Path) -> None:
    """Each issues the gathers after steps as far as its own have got, and then waits for the others elsewhere."""
    on_both(Model, accumulated(), host=True, stage=stage, **offload(row, tmp_path))


@on_ranks(2, 3)
def test_ranks_that_take_other_paths() -> None:
    """One reduces what another still gathers for."""

    def work(side: Sharded, step: int) -> Tensor:
        path = [(0, 1, 2, 3), (1, 0, 1), (3, 3, 2)][(dist.get_rank() + step) % 3]
        return mean_square_of(side, floats(step, 2, 6), path)

    on_both(paths, work, host=True, stage=3, dynamic_graph=True, unit={"classes": ["Linear"]})


# -- offload ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Engines made inside have streams, and small buffers, so that what is large passes them in pieces."""
    with STREAMS, mock.patch.object(pinned, "PAIR_NBYTES", 1024):
        yield


compare_on_streams = functools.partial(compare, stage=3, build=lambda: Model(width=64), under=streams)

CASES = [  # by which norm gradients are clipped, or twice
    ("optimizer_cpu", "fp32", "2", 1),
    ("cpu", "bf16", "inf", 2),
    ("optimizer_nvme", "fp16", "twice", 1),
    ("optimizer_cpu_param_nvme", "bf16_true", "", 2),
    ("nvme", "fp16", "2", 2),
    ("cpu", "fp32", "twice", 1),
    ("nvme", "bf16_true", "inf", 1),
]


@on_ranks(2, full=(1,))
@pytest.mark.parametrize(("row", "precision", "clips", "micro_batches"), CASES)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_training_equals_no_offload(
    row: str, precision: str, clips: str, micro_batches: int, optimizer: MakeOptimizer, tmp_path: Path
) -> None:
    def look(side: Sharded) -> list[Any]:
        places = map(side.engine.units.place_of, side.module.parameters())
        found: list[Any] = [side.engine.passes.sharded_grads.overflowed(places)]
        if clips == "twice":
            return [*found, side.clip(0.4), side.clip(0.2)]
        return [*found, side.clip(0.3, float(clips))] if clips else found

    def body(side: Sharded) -> list[Any]:
        return observed(side, micro_batches, look, steps=4)  # from the second on, norms are taken on the way

    compare_on_streams(row, folder=tmp_path, body=body, precision=precision, optimizer=optimizer)


@on_ranks(2)
def test_a_norm_is_that_of_the_gradient_as_it_is_now(tmp_path: Path) -> None:
    """What was found out on its way counts only as long as nobody has changed it."""

    def changes(side: Sharded) -> Iterator[Any]:
        for step in range(3):
            yield accumulate(side, step, 1)
            yield side.clip(0.1)
            with lightning_zero.gather(side.module, grads=True):
                for p in side.module.parameters():
                    p.grad.mul_(3)
            yield
            yield accumulate(side, step, 1)
            next(side.module.parameters()).grad = None
            yield
            yield side.step()
            side.zero_grad()

    def norms(side: Sharded) -> list[Tensor]:
        return [lightning_zero.grad_norm(side.module) for _ in changes(side)]

    compare_on_streams("cpu", folder=tmp_path, body=norms)


def test_a_gradient_that_is_cleared_while_it_is_added_up_is_not_in_the_next_one() -> None:
    land = Landing._land

    def late(self: Landing, piece: Any) -> None:
        time.sleep(0.1)
        land(self, piece)

    landing = Landing(Streams(AtOnce(torch.device("cpu"))), threads=1)
    with contextlib.closing(HostTier()) as tier, mock.patch.object(Landing, "_land", late):
        store = grad_store.OnHost(tier, "unit", 100, torch.float32, landing)
        for _ in range(2):
            store.add(torch.ones(100))
        store.clear()
        store.add(torch.full((100,), 3.0))
        landing.close()  # the thread has ended
        assert store.value is not None and store.value.eq(3).all()
