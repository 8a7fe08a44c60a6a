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

import torch
from torch import Tensor, nn

import lightning_zero
from tests.engine.support import Model, Sharded, language_work, train
from tests.harness import on_ranks

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
