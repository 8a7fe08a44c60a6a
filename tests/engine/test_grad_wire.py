"""Gradients that autograd makes in bf16 travel in bf16, and their sums are those of fp32, to the bit."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.comm import communicator, transports
from lightning_zero.comm.communicator import Communicator
from lightning_zero.device import accelerator_of, recording
from lightning_zero.engine.passes.gradients import BucketGrads
from lightning_zero.engine.units import describe
from lightning_zero.planning.speed import sent_by
from lightning_zero.trainer.memory.held_bytes import limits_of, plan_of
from tests.engine.sides import Sharded, Work, sgd
from tests.engine.support import assert_equal, in_pairs
from tests.engine.test_hierarchy import accumulated, history
from tests.engine.test_offload import offload
from tests.engine.test_on_streams import through_host, together
from tests.engine.works import accumulate, floats, loss_at, mean_square_of, train
from tests.harness import on_ranks, run
from tests.models import Does, Model, linear

WIRES = ("full", "auto")
BOTH = (False, True)
WHOLE_BF16 = {"name": "bf16", "fp32_modules": []}


@contextlib.contextmanager
def sent_dtypes() -> Iterator[list[tuple[torch.dtype, torch.dtype | None]]]:
    """Of the gradients that are reduced, and of their sums where an all-to-all makes them."""
    found: list[tuple[torch.dtype, torch.dtype | None]] = []
    reduce = Communicator.reduce

    def seen(self: Communicator, full: Tensor, label: str, **options: Any) -> Any:
        if label != communicator._FIRST:
            found.append((full.dtype, options["total_dtype"]))
        return reduce(self, full, label, **options)

    with mock.patch.object(Communicator, "reduce", seen):
        yield found


@contextlib.contextmanager
def in_wire(wire: str) -> Iterator[None]:
    """In the body, modules that are sharded send gradients in fp32 under ``full``."""
    dtypes_of = describe._dtypes

    def full(*args: Any) -> describe.Dtypes:
        dtypes = dtypes_of(*args)
        return dtypes._replace(wire=dtypes.reduce)

    with mock.patch.object(describe, "_dtypes", full) if wire == "full" else contextlib.nullcontext():
        yield


def trained(
    build: Callable[[], nn.Module], work: Work, wire: str, *, steps: int = 3, clip: bool = False, **config: Any
) -> list[Any]:
    """What is found in a training in bf16."""
    torch.manual_seed(3)
    with in_wire(wire), Sharded(build(), **{"precision": "bf16", **config}) as side:
        return history(side, work, steps=steps, clip=clip)


VALUES = {
    "world": (1, 2, 3, 4),
    "stage": range(4),
    "micro_batches": (1, 3),
    "clips": BOTH,
    "row": ("none", "optimizer_cpu", "nvme"),
    "together": BOTH,
    "precision": ("bf16", "bf16_true"),
}
Case = namedtuple("Case", VALUES)
CASES = [
    case
    for case in map(Case._make, itertools.product(*VALUES.values()))
    if (case.row == "none" or case.stage > 0) and (case.row != "nvme" or case.stage == 3)
]


def _check(case: Case, folder: Path) -> None:
    config: dict[str, Any] = {"stage": case.stage, **offload(case.row, folder)}
    if case.precision == "bf16_true":
        config["precision"] = {"name": "bf16_true", "reduce_dtype": "fp32"}
    found, sent = [], []
    for wire in WIRES:
        host = through_host() if case.together and case.row != "none" else contextlib.nullcontext()
        with together() if case.together else contextlib.nullcontext(), host, sent_dtypes() as kinds:
            work = accumulated(case.micro_batches)
            found.append(trained(Model, work, wire, clip=case.clips, optimizer=sgd, **config))
        sent.append(kinds)
    assert_equal(*found)
    # The same sums are made by an all-to-all; what is sent by it is narrower under ``auto``.
    assert [total for _, total in sent[0]] == [total for _, total in sent[1]]
    exchanged = [dtype for dtype, total in sent[1] if total is not None]
    assert set(exchanged) == ({torch.bfloat16} if exchanged else set())
    adds_up = case.stage < 2 and case.micro_batches > 1 and case.precision == "bf16"
    assert bool(exchanged) == (case.world > 1 and not adds_up)
    assert torch.bfloat16 not in [dtype for dtype, _ in sent[0]]


@in_pairs(CASES)
def test_both_wires_have_the_same_bits(case: Case, tmp_path: Path) -> None:
    run(case.world, _check, case, tmp_path)


# -- bytes ------------------------------------------------------------------------------------------------------------


def _moved(stage: int, wire: str, micro_batches: int, **config: Any) -> tuple[int, Any]:
    """Bytes of reductions that a rank receives in a step, and what the plan says of them."""
    with in_wire(wire), Sharded(Model(), stage=stage, **{"precision": WHOLE_BF16, **config}) as side:
        recorder = recording.listen(accelerator_of(torch.device("cpu")))
        before = recorder.moved["reduce"]
        train(side, [0], accumulated(micro_batches))
        moved = recorder.moved["reduce"] - before
        recording.stop()
        limits = limits_of(side.engine, micro_batches)
        return moved, sent_by(plan_of(side.engine), limits, replicas=side.engine.comm.replicate.size).reductions


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "micro_batches", "part"),
    [(0, 1, 3 / 4), (1, 1, 1 / 2), (2, 2, 1 / 2), (3, 1, 1 / 2), (3, 3, 1 / 2), (0, 2, 1), (1, 3, 1)],
)
def test_half_of_the_bytes_are_sent(stage: int, micro_batches: int, part: float) -> None:
    """The second half of an all-reduce gathers sums, which are fp32; and what was added up on a rank is fp32."""
    full, planned_full = _moved(stage, "full", micro_batches)
    auto, planned = _moved(stage, "auto", micro_batches)
    assert auto == full * part
    assert (planned_full, planned) == (full, auto)


@on_ranks(2)
def test_only_gradients_that_are_made_in_bf16_are_sent_so() -> None:
    """Norms keep fp32 by default; under other rows nothing changes."""
    with sent_dtypes() as kinds:
        trained(Model, accumulated(), "auto")
    assert set(kinds) == {(torch.bfloat16, torch.float32), (torch.float32, None)}
    for config in (
        {"precision": "fp32"},
        {"precision": "bf16_true"},
        {"precision": {"name": "bf16", "reduce_dtype": "bf16"}},
    ):
        with sent_dtypes() as kinds:
            trained(Model, accumulated(), "auto", steps=1, **config)
        assert kinds and {total for _, total in kinds} == {None}


# -- gradients that are not as autograd makes them --------------------------------------------------------------------

PARTS = {"classes": ["Sequential"]}


def repeats() -> nn.Module:
    """Gradients that come in parts: before their bucket is complete (that of the root), and after."""

    def act(m: Any, x: Tensor) -> Tensor:
        x = m.start(x)
        for module in (m.first, *m.parts):
            for _ in range(3):
                x = checkpoint(module, x, use_reentrant=True)
        return x

    return Does(act, start=linear(8), first=linear(8), parts=nn.ModuleList(nn.Sequential(linear(8)) for _ in range(2)))


def again(side: Sharded, step: int) -> Tensor:
    return mean_square_of(side, floats(step, 4, 8).requires_grad_())


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_come_again_are_added_in_fp32(stage: int, alone: bool) -> None:
    counts: set[tuple[str, int]] = set()
    apart: list[torch.dtype] = []
    complete = BucketGrads.buffer_to_reduce

    def completed(self: BucketGrads) -> Tensor:
        apart.extend(grad.dtype for grad in self.second_arrivals.values())
        return complete(self)

    def counted(side: Sharded, step: int) -> Tensor:
        side.engine.comm.counts.clear()
        loss = again(side, step)
        counts.update((label, n) for (kind, label), n in side.engine.comm.counts.items() if "reduce" in kind)
        return loss

    found = []
    watched = mock.patch.object(BucketGrads, "buffer_to_reduce", completed)
    for wire in WIRES:
        with watched, contextlib.nullcontext() if alone else together():
            found.append(trained(repeats, counted, wire, stage=stage, unit=PARTS))
    assert_equal(*found)
    assert set(apart) == {torch.float32}
    assert {n for _, n in counts} == {2}


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_of_another_dtype_keeps_its_digits(stage: int) -> None:
    """``grad_dtype`` allows a hook to leave one in fp32."""

    def widen(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad = param.grad.float() * (1 + 2**-12)

    def work(side: Sharded, step: int) -> Tensor:
        weight = side.module.head.weight
        if not step:
            weight.grad_dtype = None
            weight.register_post_accumulate_grad_hook(widen)
        loss = accumulate(side, step, 1)
        with lightning_zero.gather(side.module, grads=True):
            assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
        return loss

    assert_equal(*(trained(Model, work, wire, stage=stage, optimizer=sgd) for wire in WIRES))


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_any_scale_are_divided_in_fp32(stage: int) -> None:
    """Also by what is no power of two."""

    def work(side: Sharded, step: int) -> Tensor:
        side.engine.passes.reducer.set_loss_scale(3.0)
        loss = loss_at(side.module, step)
        side.backward(loss * 3.0)
        return loss

    assert_equal(*(trained(Model, work, wire, stage=stage) for wire in WIRES))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_that_raised_leaves_nothing_behind(stage: int) -> None:
    def work(side: Sharded, step: int) -> Tensor:
        if step == 1:
            with side.module.first.weight.register_hook(lambda _: 1 / 0), pytest.raises(ZeroDivisionError):
                again(side, 9)
            grads = side.engine.passes.reducer.grads.values()
            assert not any(each.second_arrivals or each.waiting or each.local is not None for each in grads)
            side.zero_grad()
        return again(side, step)

    expected = trained(repeats, again, "auto", stage=stage, unit=PARTS)
    assert_equal(trained(repeats, work, "full", stage=stage, unit=PARTS), expected)
    with together():
        assert_equal(trained(repeats, work, "auto", stage=stage, unit=PARTS), expected)


# -- transports and nodes ---------------------------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("stage", [0, 3])
def test_transports_have_the_same_bits(stage: int) -> None:
    """``auto`` beyond a few ranks, and over NCCL: gathers by the library, gradients by an all-to-all."""
    found = functools.partial(trained, Model, accumulated(), stage=stage, precision=WHOLE_BF16)
    expected = found("full")
    for wire in WIRES:
        for way in (mock.patch.object(transports, "DIRECT_MAX_RANKS", 1), through_host()):
            with way:
                assert_equal(expected, found(wire))


@on_ranks(4)
def test_sums_over_two_nodes_have_the_same_bits_at_all_stages_and_in_all_ways_to_shard() -> None:
    """Ranks of a node add what autograd makes, in rank order; nodes add sums in fp32."""
    found = []
    for way, stage in (("flat", 0), ("flat", 3), ("node", 0), ("node", 3), ("node_backward", 3)):
        node = {"node": f"node {dist.get_rank() // 2}", "hybrid_shard": way}
        sent = []
        for wire in WIRES:
            with sent_dtypes() as kinds:
                found.append(trained(Model, accumulated(), wire, stage=stage, precision=WHOLE_BF16, **node))
            sent.append({dtype for dtype, total in kinds if total is not None})
        assert sent == [{torch.float32}, {torch.bfloat16}]
        moved, planned = _moved(stage, "auto", 1, **node)
        assert moved == planned > 0
    for other in found[1:]:
        assert_equal(found[0], other)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_sums_of_backwards_in_bf16_are_sent_so(stage: int) -> None:
    narrow = {"name": "bf16", "grad_dtype": "bf16"}  # they are added in bf16, as was asked for
    with sent_dtypes() as kinds:
        found = [trained(Model, accumulated(2), wire, stage=stage, precision=narrow) for wire in WIRES]
    assert_equal(*found)
    assert (torch.bfloat16, torch.float32) in kinds
