"""Memory of reductions that are over is used by the next ones, within a bound, and never while anybody has it."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.comm.reduction import SpareBuffers
from tests.engine.support import Model, Sharded, language_loss, tokens
from tests.harness import on_ranks

CPU = torch.device("cpu")


def test_the_largest_stay_within_the_bound() -> None:
    spare = SpareBuffers(48)
    small, large = spare.take(4, torch.float32, CPU), spare.take(8, torch.float32, CPU)
    spare.give_back(large)
    spare.give_back(small)
    assert spare.nbytes == 48
    spare.give_back(torch.empty(5))
    assert spare.nbytes == 32
    assert spare.take(8, torch.bfloat16, CPU).data_ptr() != large.data_ptr()
    assert spare.take(8, torch.float32, CPU).data_ptr() == large.data_ptr()
    assert spare.take(8, torch.float32, CPU).data_ptr() != large.data_ptr()
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
