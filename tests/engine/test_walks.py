"""Through which files a parameter passes: ``docs/architecture.md`` draws the walk.

A file counts if one of its functions has the values in hand: as an argument, a local or a result that is a tensor over
the same memory. Files that only decide, wait or count do not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero.comm.transports import DirectTransport
from lightning_zero.engine.passes.bucket_grads import BucketGrads
from lightning_zero.engine.passes.gradients import Reducer
from lightning_zero.engine.units.bucket import Bucket
from tests.engine.support import Model, Sharded, language_loss, language_work, tokens, train
from tests.harness import on_ranks

ROOT = Path(lightning_zero.__file__).parent


MOST = 9  # files


WALK_OF_A_PARAMETER = {
    "engine/units/param_store.py",
    "engine/units/master_storage.py",
    "comm/communicator.py",
    "comm/transports.py",
    "comm/reduction.py",
    "engine/units/param.py",
    "engine/passes/saved_weights.py",
}


WALK_OF_A_GRADIENT = {
    "engine/passes/hooks.py",
    "engine/torch_modes.py",
    "engine/passes/passes.py",
    "engine/passes/gradients.py",
    "engine/passes/bucket_grads.py",
    "engine/units/grad_store.py",
    "comm/communicator.py",
    "comm/transports.py",
    "comm/reduction.py",
}


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.layout is torch.strided:
            yield value
        elif type(value) in (list, tuple):
            yield from tensors_in(value)


@contextlib.contextmanager
def files_with(storages: set[int]) -> Iterator[set[str]]:
    """Inside, the files of the package whose functions have memory of ``storages`` in hand, at their ends."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, result: Any) -> None:
        if event != "return" or not frame.f_code.co_filename.startswith(str(ROOT) + os.sep):
            return
        with torch._C.DisableTorchFunctionSubclass():
            tensors = tensors_in([*frame.f_locals.values(), result])
            if any(tensor.untyped_storage()._cdata in storages for tensor in tensors):
                found.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def trained(side: Sharded, steps: int) -> None:
    for step in range(steps):
        side.backward(language_loss(side.module, tokens(step)))
        side.step()
        side.zero_grad()


def of_block(side: Sharded) -> Bucket:
    return side.engine.units[2].buckets[0]


@on_ranks(2)
def test_a_parameter_passes_few_files() -> None:
    """From its shard to its use, and back: forward and backward of one step."""
    with Sharded(Model(), stage=3) as side:
        train(side, range(2))
        bucket = side.engine.units[2].buckets[0]
        storages = {tensor.untyped_storage()._cdata for tensor in (bucket.full.data, bucket.master)}
        with files_with(storages) as found:
            language_work(side, 2)
        assert found == WALK_OF_A_PARAMETER, "\n".join(sorted(found))


@on_ranks(2)
def test_a_gradient_passes_few_files() -> None:
    """From autograd to the shard that the optimizer steps."""
    with Sharded(Model(depth=3), stage=3) as side:
        trained(side, 2)
        bucket = of_block(side)
        storages: set[int] = set()
        kept: list[Any] = []  # so that none of them is freed, and its address given to another
        take, complete, reduce = Reducer.take, BucketGrads.complete, DirectTransport.reduce

        def follow(tensor: Tensor) -> None:
            kept.append(tensor.untyped_storage())
            storages.add(storage_of(tensor))

        def taken(self: Reducer, into: Bucket, slot: int, grad: Tensor) -> None:
            if into is bucket:
                follow(grad)
            take(self, into, slot, grad)
            if into is bucket and (local := self.grads[bucket].local) is not None:
                follow(local)

        def completed(self: BucketGrads) -> Tensor:
            full = complete(self)
            if self.bucket is bucket:
                follow(full)
            return full

        def reduced(self: DirectTransport, full: Tensor, *args: Any, **kwargs: Any) -> Any:
            works, total = reduce(self, full, *args, **kwargs)
            is_ours = storage_of(full) in storages

            def noted() -> Tensor:
                value = total()
                if is_ours:
                    follow(value)
                return value

            return works, noted

        with (
            mock.patch.object(Reducer, "take", taken),
            mock.patch.object(BucketGrads, "complete", completed),
            mock.patch.object(DirectTransport, "reduce", reduced),
            files_with(storages) as found,
        ):
            side.backward(language_loss(side.module, tokens(2)))
        assert found == WALK_OF_A_GRADIENT, "\n".join(sorted(found))
        assert len(found) <= MOST
