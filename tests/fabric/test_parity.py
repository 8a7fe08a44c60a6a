"""A loop of Fabric's gives under a ZeRO strategy what it gives under DDP."""

from __future__ import annotations

import pytest

from tests.fabric.toys import assert_equal, train
from tests.harness import on_ranks


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3", "zero3_offload", "zero1_offload"])
def test_training_is_that_of_ddp(preset: str) -> None:
    assert_equal(train(preset, epochs=2), train("ddp", epochs=2))
