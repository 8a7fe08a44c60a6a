"""What NCCL is sent: first when the engine is made, where all ranks are, and then on streams of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.device.simulate import MIXED, Case, Found

Trained = Callable[..., Found]

CASES = [
    *(Case(stage, precision=precision, steps=MIXED) for stage in range(4) for precision in ("fp32", "bf16")),
    Case(1, ranks=1, even_alone=True),
    Case(3, "optimizer_cpu", "bf16", steps=MIXED),
    Case(3, "cpu", "bf16", "bf16"),
    Case(0, nodes=2, steps=MIXED),
    Case(3, precision="bf16", nodes=2, steps=MIXED),
    Case(3, precision="bf16", nodes=2, settings={"comm": {"hybrid_shard": "node_backward"}}),
    Case(3, precision="bf16", settings={"optimizer": {"sharding": "tensors"}}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_message_of_a_step_is_the_first_of_its_kind(case: Case, trained: Trained) -> None:
    """NCCL connects ranks at the first message of each algorithm, which it chooses by kind, dtype and size."""
    found = trained(case)
    sent = {message for step in found.steps for message in step.messages}
    assert sent and sent <= set(found.construction.messages)


@contextlib.contextmanager
def as_in_2_11(group: Any, async_ops: bool = False, manage: Any = dist._coalescing_manager) -> Iterator[None]:
    """torch before 2.13 does not pass ``async_ops`` on to the group, and waits afterwards."""
    with manage(group, async_ops=True) as sent:
        yield
    sent.wait()


def test_joined_gathers_are_queued_on_the_stream_of_gathers(trained: Trained) -> None:
    case = Case(3, precision="bf16", fp32_modules=("LayerNorm",))
    found = trained(case, [("torch.distributed._coalescing_manager", as_in_2_11)])
    assert any("coalesced" in name for step in found.steps for _, name in step.collectives)
    assert [step.recorded for step in found.steps] == [step.recorded for step in trained(case).steps]
    assert not any("_queue" in function for step in found.steps for function in step.recorded)
