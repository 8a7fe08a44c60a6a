"""The engine orders its streams, and the host beside them: every stage, tier row and precision, and more ways to train.

In each case of the matrix steps with one and with two micro-batches, clipped and not, follow each other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lightning_zero
from lightning_zero.engine.whole import state_dicts
from lightning_zero.engine.whole.values import FakeTensors
from tests.device.simulate import FLAT, MIXED, Case, Found, Step, loss_of, train_step
from tests.engine.snapshots import KeptRanges
from tests.rows import IN_FILES, PLACES

Trained = Callable[..., Found]

HOST_ROWS = [(stage, row) for row, stage in PLACES if row not in IN_FILES]
FILE_ROWS = [(stage, row) for row, stage in PLACES if row in IN_FILES]


def matrix() -> Iterator[Case]:
    for precision in ("fp32", "bf16"):
        for ranks in (1, 4):
            for stage in range(4):
                yield Case(stage, "none", precision, ranks=ranks, steps=MIXED)
            for stage, row in HOST_ROWS:
                for worker in ("eager", "lazy"):
                    yield Case(stage, row, precision, ranks=ranks, steps=MIXED, worker=worker)
            for stage, row in FILE_ROWS:
                yield Case(stage, row, precision, ranks=ranks, steps=MIXED, worker="eager" if ranks == 1 else "lazy")


def assert_none(races: dict[str, int]) -> None:
    assert not races, "\n" + "\n".join(f"{times} times: {race}" for race, times in sorted(races.items()))


def of_the_default_run(case: Case) -> bool:
    """Each row in two ways: what differs between precisions, numbers of ranks and workers is met in others."""
    worker = "eager" if case.stage % 2 == (case.ranks == 1) else "lazy"
    return (case.precision, case.ranks) in (("fp32", 4), ("bf16", 1)) and (
        (case.stage, case.row) not in HOST_ROWS or case.worker == worker
    )


@pytest.mark.mainly(lambda case: of_the_default_run(case))
@pytest.mark.parametrize("case", list(matrix()), ids=str)
def test_training_has_no_race(case: Case, trained: Trained) -> None:
    assert_none(trained(case).races)


SMALL = {"reduce_bucket_bytes": 1200}  # less than any two buckets: a reduction is waited for before the next
INPUTS = {"activation_checkpointing": "offload"}
TENSORS: dict[str, Any] = SMALL | {"optimizer": {"sharding": "tensors"}}
OTHERS = [
    *(Case(stage, steps=MIXED, settings=SMALL) for stage in range(4)),
    *(
        Case(settings=settings)
        for settings in (
            {"prefetch_bytes": 0},
            {"keep_gathered_bytes": 1200},
            {"dynamic_graph": True},
            {"activation_checkpointing": "blocks"},
        )
    ),
    *(Case(stage, ranks=1, steps=MIXED, even_alone=True) for stage in (0, 1, 3)),
    *(Case(3, row, blocks=6, steps=MIXED, settings=INPUTS) for row in ("none", "optimizer_cpu")),
    Case(precision="bf16_true"),
    *(
        Case(stage, row, "bf16", ranks=ranks, steps=MIXED, settings=TENSORS)
        for stage, row, ranks in ((1, "none", 4), (3, "none", 4), (3, "optimizer_cpu", 1), (3, "nvme", 4))
    ),
    Case(precision="bf16", grad_dtype="bf16"),
    *(
        Case(3, row, "bf16", "bf16", ranks, settings=SMALL)  # gradients are cast on their way to the host
        for row in ("optimizer_cpu", "optimizer_nvme")
        for ranks in (1, 4)
    ),
    Case(precision="bf16", settings={"unit": {"classes": ["Linear"]}}),
    Case(1, "optimizer_cpu", steps=(Step(evaluates=True),) * 3, worker="eager"),
    Case(3, "optimizer_cpu", settings={"prefetch_bytes": 0}),
    Case(3, "nvme", "bf16", settings=SMALL),
    Case(3, "auto", steps=MIXED),
    *(Case(stage, nodes=nodes, steps=MIXED) for stage in (0, 1, 3) for nodes in (2, 4)),
    *(Case(stage, precision="bf16", nodes=2, steps=MIXED, settings=SMALL) for stage in (0, 3)),
    *(Case(stage, precision="bf16", nodes=2, steps=MIXED, settings=SMALL | FLAT) for stage in (0, 3)),
    Case(3, "optimizer_cpu", nodes=2, settings=SMALL),
    *(
        Case(3, row, "bf16", nodes=2, steps=MIXED, settings={"hybrid_shard": "node_backward"} | settings)
        for row in ("none", "optimizer_cpu")
        for settings in ({}, {"prefetch_bytes": 0}, {"dynamic_graph": True}, {"activation_checkpointing": "blocks"})
    ),
]


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_settings_have_no_race(case: Case, trained: Trained) -> None:
    assert_none(trained(case).races)


# -- what is asked of an engine between steps -------------------------------------------------------------------------


def gathers(engine: Any, model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad(), lightning_zero.gather(model):
        for param in model.parameters():
            param.mul_(2)
    train_step(Step(), engine, model, optimizer)


def gathers_gradients(engine: Any, model: nn.Module, optimizer: Any) -> None:
    engine.passes.backward(loss_of(model))
    with lightning_zero.gather(model, grads=True):
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(2)
    optimizer.step()
    optimizer.zero_grad()


def saves_and_loads(engine: Any, model: nn.Module, optimizer: Any) -> None:
    values, states = engine.state_dict(), state_dicts.optimizer_state(engine, optimizer)
    engine.load_state_dict(values)
    state_dicts.load_optimizer_state(engine, optimizer, states)
    train_step(Step(), engine, model, optimizer)


def trains_without_scopes(engine: Any, model: nn.Module, optimizer: Any) -> None:
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluates(engine: Any, model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        with torch.no_grad(), engine.step_scope("validation", evaluation=True):
            loss_of(model)
    train_step(Step(), engine, model, optimizer)
    with torch.no_grad():
        loss_of(model)
    train_step(Step(), engine, model, optimizer)


def reads_weights(engine: Any, model: Any, optimizer: Any) -> None:
    with engine.step_scope():
        (model.blocks[0].linear.weight + 1).sum()
        engine.passes.backward(loss_of(model))
    optimizer.step()
    optimizer.zero_grad()


def looks_at_gradients(engine: Any, model: nn.Module, optimizer: Any) -> None:
    engine.passes.backward(loss_of(model))
    lightning_zero.grad_norm(model)
    engine.passes.sharded_grads.clip_by_value(map(engine.units.place_of, model.parameters()), 1.0)
    engine.passes.sharded_grads.overflowed(map(engine.units.place_of, model.parameters()))
    for param in model.parameters():
        param.grad.mul_(0.5)
        param.grad.clone()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    train_step(Step(), engine, model, optimizer)


def freezes(engine: Any, model: Any, optimizer: Any) -> None:
    for requires_grad in (False, True):
        for param in model.blocks[0].parameters():
            param.requires_grad_(requires_grad)
        for _ in range(2):
            train_step(Step(), engine, model, optimizer)


def raises(engine: Any, model: Any, optimizer: Any) -> None:
    """In a forward, and in a backward."""
    block = model.blocks[1]
    for register in (block.register_forward_hook, block.linear.weight.register_hook):
        hook = register(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError), engine.step_scope():
            engine.passes.backward(loss_of(model))
        hook.remove()
        for param in model.parameters():
            param.grad = None  # what a backward that raised has left is not stepped
        train_step(Step(), engine, model, optimizer)


def steps_twice(engine: Any, model: nn.Module, optimizer: Any) -> None:
    engine.passes.backward(loss_of(model))
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    train_step(Step(), engine, model, optimizer)


def is_saved_before_a_step(
    engine: Any, model: nn.Module, optimizer: Any, order: Sequence[str] = ("copy", "read", "step")
) -> None:
    fakes = FakeTensors()
    engine.state_dict(fakes=fakes)
    state_dicts.optimizer_state(engine, optimizer, fakes=fakes)
    kept = KeptRanges(engine, {value for value, _ in fakes.made})

    def read() -> None:
        for part in kept:
            assert part.values.device.type == "cpu"
            part.values + 1

    for act in order:
        if act == "step":
            train_step(Step(), engine, model, optimizer)
        else:
            thread = threading.Thread(target=kept.snapshot.stage if act == "copy" else read)
            thread.start()
            while thread.is_alive():  # a worker that is lazy steps as soon as this thread joins another
                time.sleep(0.001)
            thread.join()
    kept.close()
    train_step(Step(), engine, model, optimizer)


def is_copied_before_a_step(*trained: Any) -> None:
    is_saved_before_a_step(*trained, order=("copy", "step", "read"))


def serves_others(engine: Any, model: nn.Module, optimizer: Any) -> None:
    """Another rank needs a unit whose gather is under way here."""
    for unit in engine.units[1:]:
        unit.unshard_begin()
        unit.serve()
        unit.unshard_wait()
        unit.reshard()


ACTS = (gathers, gathers_gradients, saves_and_loads, trains_without_scopes, evaluates, reads_weights)
ACTS += (looks_at_gradients, freezes, raises, steps_twice)
ACTS += (is_saved_before_a_step, serves_others, is_copied_before_a_step)
HOST = "optimizer_cpu"
BETWEEN = [Case(stage, row, steps=(Step(),) * 2) for stage, row in ((3, "none"), (1, "none"), (3, HOST), (1, HOST))]


@pytest.mark.parametrize(("act", "case"), [
    pytest.param(act, case, id=f"{act.__name__}-{case}", marks=[pytest.mark.full] * (place != number % 4))
    for number, act in enumerate(ACTS)
    for place, case in enumerate(BETWEEN)
    if case.stage == 3 or act is not serves_others
])  # fmt: skip
def test_what_is_asked_between_steps_has_no_race(act: Callable[..., None], case: Case, trained: Trained) -> None:
    found = trained(case, then=act)
    assert_none(found.races)
    assert not found.unbound


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [
    *(Case(stage) for stage in range(4)),
    *(Case(stage, row, precision) for stage, row in HOST_ROWS for precision in ("fp32", "bf16")),
], ids=str)  # fmt: skip
def test_an_engine_ends_without_a_race(case: Case, trained: Trained) -> None:
    assert_none(trained(case).at_release)


# -- a restage --------------------------------------------------------------------------------------------------------

# Every kind of a bucket's rest comes after another kind.
RESTS = ["zero3 none", "zero1 optimizer_cpu", "zero0 none", "zero2 none", "zero3 cpu", "zero2 optimizer_nvme"]
RESTS += ["zero3 nvme"]


def walk(engine: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """From row to row and back to the first, with steps in between; once while a step is under way."""
    first = engine.config
    path = first.offload.nvme_path
    for row in RESTS:
        stage, name = row.split()
        if ("nvme" in name and path is None) or (stage == "zero0" and engine.comm.world_size > 1):
            continue  # ranks that are not there cannot tell what state they have, which would have to be gathered
        engine.restage(stage, {"name": name, "nvme_path": path} if "nvme" in name else name)
        assert not engine.comm.streams._held, "gradients that nobody would let go of"
        for step in (Step(), Step(2, clips=True)):
            train_step(step, engine, model, optimizer)
    engine.restage(first.stage.name, first.offload)
    for step in MIXED[-2:]:
        train_step(step, engine, model, optimizer)
    at_rest(engine)


def at_rest(engine: Any, *_: Any) -> None:
    """Nothing is kept for what the device has not done yet."""
    engine.passes.end_run()
    engine.comm.streams.accelerator.synchronize()
    engine.comm.streams.drop_held()
    if engine.tiers.landing is not None:
        engine.tiers.landing._under_way.clear()


RESTAGED = [
    Case(3, "nvme", steps=MIXED),
    Case(3, precision="bf16", steps=MIXED),
    Case(0, ranks=1, steps=MIXED),
    Case(2, "optimizer_cpu", "bf16", worker="eager", steps=MIXED),
]
PLACEHOLDERS = 100  # bytes, where the first row needs none


@pytest.mark.sample
@pytest.mark.parametrize("case", RESTAGED, ids=str)
def test_a_restage_has_no_race_and_gives_memory_back(case: Case, trained: Trained) -> None:
    found, plain = trained(case, then=walk), trained(case, then=at_rest)
    assert not found.races and not found.at_release and not found.unbound
    assert plain.at_rest <= found.at_rest <= plain.at_rest + PLACEHOLDERS
