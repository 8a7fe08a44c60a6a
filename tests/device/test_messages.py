"""What NCCL is sent: first when the engine is made, where all ranks are, and then on streams of ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.device.simulate import FLAT, MIXED, Case, Found

Trained = Callable[..., Found]

CASES = [
    *(Case(stage, precision=precision, steps=MIXED) for stage in range(4) for precision in ("fp32", "bf16")),
    Case(1, ranks=1, even_alone=True),
    Case(3, "optimizer_cpu", "bf16", steps=MIXED),
    Case(3, "cpu", "bf16", "bf16"),
    Case(0, nodes=2, steps=MIXED),
    Case(3, precision="bf16", nodes=2, steps=MIXED),
    Case(3, precision="bf16", nodes=2, settings={"comm": {"hybrid_shard": "node_backward"}}),
    *(Case(stage, precision="bf16", nodes=2, steps=MIXED, settings=FLAT) for stage in (0, 3)),
    Case(3, precision="bf16", settings={"optimizer": {"sharding": "tensors"}}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_message_of_a_step_is_the_first_of_its_kind(case: Case, trained: Trained) -> None:
    """NCCL connects ranks at the first message of each algorithm, which it chooses by kind, dtype and size."""
    found = trained(case)
    sent = {message for step in found.steps for message in step.messages}
    assert sent and sent <= set(found.construction.messages)
