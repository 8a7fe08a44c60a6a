"""Device memory that a stream still reads is kept, and no longer than it must be."""

from __future__ import annotations

from unittest import mock

import torch

from lightning_zero.comm.streams import HELD, Streams
from lightning_zero.device import accelerator_of
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.cuda import with_index


class Event:
    over = waited = False


class Slow(Accelerator):
    """Its events come when the test says so. Streams wait for them, and never the host."""

    def is_over(self, event: Event) -> bool:
        return event.over

    def wait(self, event: Event) -> None:
        event.waited = True

    def wait_on_host(self, event: Event) -> None:
        raise AssertionError("the host waits")


def test_memory_goes_when_its_transfer_is_over_and_a_few_at_most_are_kept() -> None:
    streams = Streams(Slow(torch.device("cpu")))
    events = [Event() for _ in range(5)]
    for event in events[:HELD]:
        streams.hold("memory", event)
    assert len(streams._held) == HELD and not any(event.waited for event in events)
    streams.hold("memory", events[HELD])  # one too many: streams wait for the oldest, and for no other
    assert [event.waited for event in events] == [True, *[False] * 4]
    for event in events:
        event.over = True
    streams.hold("memory", events[-1])
    assert not streams._held


def test_a_gpu_without_a_number_is_the_current_one() -> None:
    """A thread is bound to a number, and tensors name one."""
    with mock.patch("torch.cuda.current_device", lambda: 3):
        assert accelerator_of(torch.device("cuda")).device == with_index(torch.device("cuda")) == torch.device("cuda:3")
    assert accelerator_of(torch.device("cuda:1")).device == torch.device("cuda:1")
    assert with_index(torch.device("cpu")) == torch.device("cpu")
