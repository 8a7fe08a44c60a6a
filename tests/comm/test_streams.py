"""Memory of messages: kept while a stream still reads it, used again by the next reductions, within bounds."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lightning_zero.comm.reduction import SpareBuffers
from lightning_zero.device import accelerator_of
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.device.cuda import with_index
from lightning_zero.device.streams import HELD, Streams
from tests.engine.support import Model, Sharded, language_loss, tokens
from tests.harness import on_ranks


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


CPU = torch.device("cpu")


def test_the_largest_stay_within_the_bound() -> None:
    spare = SpareBuffers(48)
    small, large = spare.take_buffer(4, torch.float32, CPU), spare.take_buffer(8, torch.float32, CPU)
    spare.give_back(large)
    spare.give_back(small)
    assert spare.nbytes == 48
    spare.give_back(torch.empty(5))
    assert spare.nbytes == 32
    assert spare.take_buffer(8, torch.bfloat16, CPU).data_ptr() != large.data_ptr()
    assert spare.take_buffer(8, torch.float32, CPU).data_ptr() == large.data_ptr()
    assert spare.take_buffer(8, torch.float32, CPU).data_ptr() != large.data_ptr()
    spare.give_back(torch.empty(13))  # larger than all that is kept
    spare.give_back(torch.empty(4, device="meta"))
    assert spare.nbytes == 0


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_kept_between_steps_is_memory_of_no_gradient(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        reducer = side.engine.passes.reducer
        largest = max(b.layout.numel * b.dtypes.reduce.itemsize for b in side.engine.buckets)
        for step in range(3):
            side.backward(language_loss(side.module, tokens(step)))
            kept = {buffer.untyped_storage().data_ptr() for buffer in reducer.spare._kept}
            assert bool(kept) == (stage > 0 and side.engine.comm.world_size > 1)
            assert reducer.spare.nbytes <= 2 * largest
            grads = [bucket.grad for bucket in side.engine.buckets]
            assert not kept & {grad.untyped_storage().data_ptr() for grad in grads if grad is not None}
            side.step()
            side.zero_grad()
