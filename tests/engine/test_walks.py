"""Through which files a parameter passes: ``docs/architecture.md`` draws the walk.

A file counts if one of its functions has the values in hand: as an argument, a local or a result that is a tensor over
the same memory. Files that only decide, wait or count do not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero.comm.transports import DirectTransport
from lightning_zero.engine.passes.gradients import BucketGrads, Reducer
from lightning_zero.engine.units.bucket import Bucket
from tests.engine.sides import Sharded
from tests.engine.works import language_work, train
from tests.harness import on_ranks
from tests.models import Model

ROOT = Path(lightning_zero.__file__).parent

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
    "engine/units/grad_store.py",
    "comm/communicator.py",
    "comm/transports.py",
    "comm/reduction.py",
}


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.layout is torch.strided:
            yield value
        elif type(value) in (list, tuple):
            yield from tensors_in(value)


def is_among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether ``tensor`` is over the same memory as one of others."""
    return tensor.untyped_storage()._cdata in {other.untyped_storage()._cdata for other in others}


@contextlib.contextmanager
def files_with(tensors: Sequence[Tensor]) -> Iterator[tuple[set[str], list[Tensor]]]:
    """Inside, the files of the package whose functions have memory of ``tensors`` in hand, at their ends. To the list
    that is given beside them others can be added."""
    found, followed = set[str](), [tensor.detach() for tensor in tensors]

    def profile(frame: FrameType, event: str, result: Any) -> None:
        if event != "return" or not frame.f_code.co_filename.startswith(str(ROOT) + os.sep):
            return
        with torch._C.DisableTorchFunctionSubclass():
            if any(is_among(tensor, followed) for tensor in tensors_in([*frame.f_locals.values(), result])):
                found.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    sys.setprofile(profile)
    try:
        yield found, followed
    finally:
        sys.setprofile(None)


@on_ranks(2)
def test_a_parameter_passes_few_files() -> None:
    """From its shard to its use, and back: forward and backward of one step."""
    with Sharded(Model(), stage=3) as side:
        train(side, range(2))
        bucket = side.engine.units[2].buckets[0]
        with files_with([bucket.full.data, bucket.master]) as (found, _):
            language_work(side, 2)
        assert found == WALK_OF_A_PARAMETER, "\n".join(sorted(found))


@on_ranks(2)
def test_a_gradient_passes_few_files() -> None:
    """From autograd to the shard that the optimizer steps."""
    accept_grad, complete, reduce = Reducer.accept_grad, BucketGrads.buffer_to_reduce, DirectTransport.reduce
    with Sharded(Model(depth=3), stage=3) as side:
        train(side, range(2))
        bucket = side.engine.units[2].buckets[0]
        with files_with([]) as (found, followed):

            def accepted(self: Reducer, into: Bucket, slot: int, grad: Tensor) -> None:
                if into is bucket:
                    followed.append(grad)
                accept_grad(self, into, slot, grad)
                if into is bucket and (local := self.grads[bucket].local) is not None:
                    followed.append(local)

            def completed(self: BucketGrads) -> Tensor:
                full = complete(self)
                if self.bucket is bucket:
                    followed.append(full)
                return full

            def reduced(self: DirectTransport, full: Tensor, *args: Any, **kwargs: Any) -> Any:
                works, total = reduce(self, full, *args, **kwargs)
                is_ours = is_among(full, followed)

                def noted() -> Tensor:
                    value = total()
                    followed.extend([value] * is_ours)
                    return value

                return works, noted

            with (
                mock.patch.object(Reducer, "accept_grad", accepted),
                mock.patch.object(BucketGrads, "buffer_to_reduce", completed),
                mock.patch.object(DirectTransport, "reduce", reduced),
            ):
                language_work(side, 2)
        assert found == WALK_OF_A_GRADIENT, "\n".join(sorted(found))
