"""The ways that offload takes where a device has streams, on the CPU and with values: equal to no offload to the bit.

``tests/device`` proves their order, on a device without values.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lightning_zero.device
from lightning_zero.comm.streams import Streams
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.engine.units import grad_store
from lightning_zero.engine.units.grad_store import Landing
from lightning_zero.tiers import pinned
from lightning_zero.tiers.host import HostTier
from tests.engine.support import MakeOptimizer, Model, Sharded, accumulate, adamw, assert_equal, sgd, whole
from tests.engine.test_offload import history, offload
from tests.harness import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")


class AtOnce(Accelerator):
    """Streams whose work is over when it has been queued."""

    has_streams = True

    def new_stream(self) -> Any:
        return "stream"

    def record(self) -> Any:
        return "event"


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Engines made inside have streams, and small buffers, so that what is large passes them in pieces."""
    with (
        mock.patch.dict(lightning_zero.device._KINDS, {"cpu": AtOnce}),
        mock.patch.object(grad_store, "PAIR_NBYTES", 1024),
        mock.patch.object(pinned, "PAIR_NBYTES", 1024),
    ):
        yield


def compare_on_streams(row: str, folder: Path, body: Callable[[Sharded], list[Any]], **settings: Any) -> None:
    """``body`` finds the same with offload on a device with streams, and without."""
    found = []
    for ways, place in ((streams, offload(row, folder)), (contextlib.nullcontext, {})):
        torch.manual_seed(3)
        with ways(), Sharded(Model(width=64), **settings, **place) as side:
            found.append([*body(side), *whole(side)])
    assert_equal(*found)


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
@pytest.mark.sample
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
        return history(side, micro_batches, look, steps=4)  # from the second on, norms are taken on the way

    compare_on_streams(row, tmp_path, body, precision=precision, optimizer=optimizer)


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

    compare_on_streams("cpu", tmp_path, norms)


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
