"""A gather begins as soon as its memory is free: it waits for nothing that compute has queued since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import nn

from lightning_zero.comm.streams import Streams
from lightning_zero.comm.transports import PlainTransport
from tests.device.order import COMPUTE
from tests.device.simulate import Case, Step, train_step

Trained = Callable[..., Any]


class Issued(NamedTuple):
    """Numbers of what compute had queued when a gather was issued.

    Attributes:
        waited: what the gather comes after.
        released: the last use of memory of gathered parameters, or the last change of the masters.
        queued: all.
    """

    waited: int
    released: int
    queued: int


def gathers_are_early(engine: Any, model: nn.Module, optimizer: Any) -> None:
    """In one more step."""
    clocks = engine.comm.streams.accelerator._machine.order._clocks.current_sync_states
    issued: list[Issued] = []
    released = 0

    def queued(stream: int = COMPUTE) -> int:
        """The last that compute has queued, as far as ``stream`` knows."""
        return int(clocks[stream].get(COMPUTE, 0))

    def gather_all(self: PlainTransport, *args: Any) -> list[Any]:
        issued.append(Issued(queued(engine.comm.streams.accelerator.current_stream()), released, queued()))
        return real_gather(self, *args)

    def noted(method: Callable[[Streams], Any]) -> Callable[[Streams], Any]:
        def call(self: Streams) -> Any:
            nonlocal released
            released = queued()
            return method(self)

        return call

    real_gather = PlainTransport.gather_all
    with (
        mock.patch.object(PlainTransport, "gather_all", gather_all),
        mock.patch.object(Streams, "give_back", noted(Streams.give_back)),
        mock.patch.object(Streams, "change", noted(Streams.change)),
    ):
        train_step(Step(), engine, model, optimizer)
    assert len(issued) >= 2 * len(engine.units) - 2
    assert all(gather.waited <= gather.released for gather in issued), issued
    # The last unit of the forward stays for the backward: before that, gathers are issued behind the loss.
    assert any(gather.released < gather.queued for gather in issued), issued


@pytest.mark.parametrize(
    "case",
    [
        Case(precision=precision, settings={"prefetch_bytes": size})
        for precision in ("fp32", "bf16")
        for size in (0, 1 << 28)
    ],
    ids=str,
)
def test_a_gather_does_not_wait_for_what_was_queued_after_its_memory_was_free(case: Case, trained: Trained) -> None:
    trained(case, then=gathers_are_early)
