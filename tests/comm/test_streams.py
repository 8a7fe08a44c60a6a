"""Device memory that a stream still reads is kept, and no longer than it must be."""

from __future__ import annotations

import torch

from lightning_zero.comm.streams import HELD, Streams
from lightning_zero.device.accelerator import Accelerator


class Event:
    over = waited = False


class Slow(Accelerator):
    """Its events come when the test says so, or when the host waits for them."""

    def is_over(self, event: Event) -> bool:
        return event.over

    def wait_on_host(self, event: Event) -> None:
        event.over = event.waited = True


def test_memory_goes_when_its_transfer_is_over_and_a_few_at_most_are_kept() -> None:
    streams = Streams(Slow(torch.device("cpu")))
    events = [Event() for _ in range(5)]
    for event in events[:HELD]:
        streams.hold("memory", event)
    assert len(streams._held) == HELD and not any(event.waited for event in events)
    streams.hold("memory", events[HELD])  # one too many: the host waits for the oldest, and for no other
    assert [event.waited for event in events] == [True, *[False] * 4]
    for event in events:
        event.over = True
    streams.hold("memory", events[-1])
    assert not streams._held


def test_off_cuda_nothing_is_marked_or_waited_for() -> None:
    streams = Streams(Accelerator(torch.device("cpu")))
    with streams.on("h2d") as stream:
        assert stream is None
    assert streams.mark() is None
    streams.wait(None)
