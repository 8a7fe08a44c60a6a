"""Ranks that take different paths, differ in their models or are slower: right numbers, or an error that names them.

What one rank refuses all refuse, at once, and everything is as before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.comm.agreements import ApartError
from lightning_zero.comm.transports import Sent
from lightning_zero.engine import engine_of, engines
from lightning_zero.engine.passes import passes
from lightning_zero.ranks.verdict import StallError
from lightning_zero.settings import ConfigError
from tests.engine.sides import Sharded, Side, Twin, sgd, step_and_clear, with_twin
from tests.engine.support import assert_equal, assert_same, check, places_posted_often
from tests.engine.test_offload import late_steps
from tests.engine.works import accumulate, floats, language_work, loss_at, mean_square, tokens, train, train_both
from tests.harness import on_ranks
from tests.models import WIDTH, Chain, Does, Model, linear

pytestmark = [pytest.mark.sample, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]

FOUR = functools.partial(Chain, depth=4)


def work(side: Side, step: int, *, path_of: Any) -> Tensor:
    return mean_square(side, step, path_of(step, dist.get_rank()))


def all_blocks(*_: int) -> tuple[int, ...]:
    return 0, 1, 2, 3


def other_blocks(step: int, rank: int) -> tuple[int, ...]:
    return ((0, 1, 3), (0, 2, 3), (3,))[(step + rank) % 3]


def other_order(step: int, rank: int) -> tuple[int, ...]:
    return (0, 1, 2, 3) if (step + rank) % 2 else (3, 1, 0, 2)


def other_number(step: int, rank: int) -> tuple[int, ...]:
    return (1,) * (1 + rank) if step != 1 else (1, 2)


def nothing_on_one_rank(step: int, rank: int) -> tuple[int, ...]:
    return () if rank == step % 2 else (0, 1, 2, 3)


PATHS = {f.__name__: f for f in (other_blocks, other_order, other_number, nothing_on_one_rank)}
EACH_PATH = pytest.mark.parametrize("path", PATHS)


@on_ranks(2, full=(3,))
@EACH_PATH
def test_paths_that_differ_train_with_the_right_gradients(path: str) -> None:
    """In a dynamic graph; where parameters are replicated; and in the first pass, which is recorded: a unit that any
    rank needs in it is gathered by all."""
    paths = functools.partial(work, path_of=PATHS[path])
    for config in ({}, {"prefetch_bytes": 0}, {"reduce_bucket_bytes": 3000}):
        check(FOUR, paths, steps=4, dynamic_graph=True, stall_timeout_s=20, **config)
    check(FOUR, paths, steps=3, stage=(0, 1, 2), stall_timeout_s=20)
    check(FOUR, paths, steps=1, stall_timeout_s=20)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("row", ["none", "optimizer_cpu"])
def test_an_evaluation_after_a_step_needs_no_rank_that_uses_less(stage: int, row: str) -> None:
    """A rank issues the gathers that follow steps as it uses units, and those that are left at the end of its pass."""
    path = all_blocks() if dist.get_rank() else ()
    with Sharded(FOUR(), stage=stage, offload=row, stall_timeout_s=10) as side:
        side.module.register_buffer("seen", torch.zeros(1))
        for step in range(3):
            work(side, step, path_of=all_blocks)
            step_and_clear(side)
            with side.engine.step_scope("validation", evaluation=True), torch.no_grad():
                assert side.module(floats(step, 4, WIDTH), path).isfinite().all()
            side.module.seen += 1
            side.engine.passes.buffers.sync()


LEAVES = [all_blocks()] * 3 + [(3, 1), all_blocks()] + [(3, 2, 0)] * 4
BESIDE = {
    "one rank always skips a unit": lambda step, rank: (0, 3) if rank else all_blocks(),  # it is gathered in its place
    # It costs an agreement, and a new path that comes to stay becomes the plan.
    "all ranks leave together": lambda step, rank: LEAVES[step],
}


@on_ranks(2)
@pytest.mark.parametrize("path", BESIDE)
def test_paths_beside_the_recorded_one_train(path: str) -> None:
    check(FOUR, functools.partial(work, path_of=BESIDE[path]), steps=len(LEAVES), stall_timeout_s=20)


@on_ranks(2)
@pytest.mark.parametrize("path", [(3, 0, 1, 2, 3, 0), (0, 1, 1, 2, 0, 3)], ids=str)
def test_a_rank_that_leaves_the_plan_alone_stops_all_with_their_places(path: tuple[int, ...]) -> None:
    with places_posted_often(), mock.patch.object(passes, "ABANDON_S", 0.5):
        side = Sharded(FOUR(), stall_timeout_s=1.5, prefetch_bytes=0)
        for step in range(2):
            work(side, step, path_of=all_blocks)
            side.step()
        started = time.monotonic()
        with pytest.raises(StallError) as caught:
            work(side, 2, path_of=lambda _, rank: path if rank == 1 else all_blocks())
    assert time.monotonic() - started < 5
    places = ("rank 0:", "rank 1:", "unit blocks.", "which the recorded order does not have here")
    for words in ("zero.dynamic_graph=true", *places):
        assert words in str(caught.value)
    side.engine.comm.waits.close()  # messages were lost: there is no release


@on_ranks(2)
def test_buffers_sent_between_forward_and_backward_are_refused_on_all_ranks() -> None:
    module = Does(lambda m, x: x * m.scale * m.weight, weight=nn.Parameter(torch.ones(3)))
    module.register_buffer("scale", torch.ones(3))
    with Sharded(module, stage=1) as side:
        loss = side.module(torch.ones(2, 3, requires_grad=True)).sum()
        if dist.get_rank() == 1:
            side.module.scale.add_(1.0)
        side.engine.passes.buffers.sync()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            side.backward(loss)
        side.engine.passes.abort()


@on_ranks(2)
@EACH_PATH
@pytest.mark.parametrize("way", ["plain", "in a step", "in an evaluation"])
def test_a_rank_may_send_messages_of_its_own_when_its_dynamic_call_is_over(path: str, way: str) -> None:
    """Also where no backward follows: the ranks that are still in their call need its gathers."""
    # In a step the model is a part of what is sharded, as of a LightningModule whose ``training_step`` calls it.
    model = FOUR()
    module = Does(lambda m, *args: m.model(*args), model=model) if way == "in a step" else model
    evaluation = way == "in an evaluation"
    with Sharded(module, dynamic_graph=True, stall_timeout_s=5) as side:
        for step in range(4):
            x, blocks = floats(step, 4, WIDTH), PATHS[path](step, dist.get_rank())
            scope = side.engine.step_scope("step", evaluation=evaluation)
            with contextlib.nullcontext() if way == "plain" else scope, torch.set_grad_enabled(not evaluation):
                for _ in range(2):
                    loss = model(x, blocks).square().mean()
                    total = loss.detach().clone()
                    dist.all_reduce(total)
                    assert total.isfinite()
            if step % 2 and way == "plain":
                side.backward(loss)
                side.step()


@on_ranks(2)
def test_a_dynamic_evaluation_has_the_outputs_of_the_plain_module() -> None:
    with with_twin(FOUR, dynamic_graph=True, stall_timeout_s=20) as sides, torch.no_grad():
        for step in range(3):
            path = other_order(step, dist.get_rank())
            own, expected = (side.module(floats(step, 4, WIDTH), path) for side in sides)
            assert torch.equal(own, expected)


# -- models that differ -----------------------------------------------------------------------------------------------


def odd_model(what: str, rank: int) -> nn.Module:
    """Not the model of rank 0 where ``what`` differs."""
    width = WIDTH + (what == "shape" and rank == 1)
    depth = 2 + (what == "depth" and rank == 1)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, width)) for _ in range(depth)))
    module[0][0].weight.requires_grad_(what != "frozen" or rank != 1)
    return module.to(torch.float64 if what == "dtype" and rank == 1 else None)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("what", "place"), [
    ("shape", r"0\.0\.weight"),
    ("depth", r"no parameter.*2\.0\.weight"),
    ("frozen", r"0\.0\.weight"),
    ("dtype", "float64"),
])  # fmt: skip
def test_models_that_differ_are_refused_on_all_ranks(what: str, place: str, stage: int) -> None:
    with pytest.raises(ConfigError, match=rf"expected the same model on all ranks, got .*{place}"):
        lightning_zero.shard(odd_model(what, dist.get_rank()), stage=stage)
    check(linear, mean_square, stage=stage)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_that_is_ordered_otherwise_on_a_rank_is_as_on_rank_0(stage: int) -> None:
    def model(turned: bool) -> nn.Linear:
        module = nn.Linear(WIDTH, WIDTH, bias=False)
        values = torch.arange(float(WIDTH * WIDTH)).view(WIDTH, WIDTH) / 100
        module.weight = nn.Parameter(values.t().contiguous().t() if turned else values)
        return module

    module = model(turned=dist.get_rank() == 1)
    with Sharded(module, stage=stage), lightning_zero.gather(module):
        assert torch.equal(module.weight, model(False).weight) and module.weight.is_contiguous()


# -- what one rank refuses --------------------------------------------------------------------------------------------


class Fails(Does):
    def reset_parameters(self) -> None:
        raise ZeroDivisionError("in reset_parameters")


def on_meta(kind: type[nn.Module]) -> nn.Module:
    """A child without values on rank 1, which it cannot get there; on others a layer."""
    if dist.get_rank() != 1:
        return nn.Linear(3, 1, False, device="meta")
    return kind(lambda m, x: x, weight=nn.Parameter(torch.empty(1, 3, device="meta")))


def _add(module: nn.Module, child: nn.Module) -> dict[str, Any]:
    module.add_module("more", child)
    return {}


# What rank 1 does otherwise than the others, and what all hear.
REFUSED: dict[str, tuple[Callable[[nn.Module, Path], dict[str, Any]], str]] = {
    "unit": (lambda m, _: {"unit": {"classes": ["Block" if dist.get_rank() != 1 else "Bloc"]}}, r"unit\['classes'\]"),
    "lazy": (
        lambda m, _: _add(m, nn.LazyLinear(2)) if dist.get_rank() == 1 else {},
        r"parameter more\.weight has no shape yet.*lazy.*configure_model",
    ),
    "one memory": (
        lambda m, _: _add(
            m, nn.ParameterList(p.data.clone() if dist.get_rank() != 1 else p.data for p in m.parameters())
        ),
        r"and more\.0 are two objects over one memory",
    ),
    "a buffer over a weight": (
        lambda m, _: (
            m.head.register_buffer(
                "alias", m.head.weight.detach().clone() if dist.get_rank() != 1 else m.head.weight.detach()
            )
            or {}
        ),
        r"head\.alias shares the memory of parameter head\.weight.*clone\(\)",
    ),
    "a view of a weight": (
        lambda m, _: setattr(m.head, "turned", m.head.weight.data[1:].t() if dist.get_rank() == 1 else None) or {},
        r"head\.turned shares the memory of parameter head\.weight",
    ),
    "recompute": (
        lambda m, _: {"activation_checkpointing": "blocks", "unit": {"classes": ["Model"] * (dist.get_rank() == 1)}},
        "activation_checkpointing='blocks': the model has no blocks",
    ),
    "folder": (
        lambda m, folder: {"offload": {"name": "nvme", "nvme_path": f"{folder}/{'missing' * (dist.get_rank() == 1)}"}},
        r"offload\['nvme_path'\]",
    ),
    "variable": (
        lambda m, folder: {"offload": {"name": "nvme", "nvme_path": f"{folder}/${'NOWHERE' * (dist.get_rank() == 1)}"}},
        "NOWHERE",
    ),
    "reset": (lambda m, _: _add(m, on_meta(Fails)), "in reset_parameters"),
    "no reset": (lambda m, _: _add(m, on_meta(Does)), r"module more \(Does\).*reset_parameters"),
}


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_one_rank_cannot_shard(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    module = Model()
    before = len(engines())
    started = time.monotonic()
    with pytest.raises(Exception, match=message) as caught:
        lightning_zero.shard(module, device="cpu", stage=3, **change(module, tmp_path))
    assert time.monotonic() - started < 10
    if dist.get_rank() != 1:
        assert isinstance(caught.value, RuntimeError if name == "reset" else ConfigError)
        assert "rank 1" in str(caught.value)
    assert engine_of(module) is None and len(engines()) == before
    dist.barrier()  # other ranks remove their folders
    assert not list(tmp_path.rglob(f"*{dist.get_rank()}.bin"))
    if name not in ("reset", "no reset", "lazy", "one memory") and "weight" not in name:
        loss_at(module, 0).backward()  # plain, as it was
        assert all(type(p) is nn.Parameter and p.grad is not None for p in module.parameters())
        with Sharded(module, optimizer=sgd) as side:
            language_work(side, 0)
            side.step()


@on_ranks(2, full=(3,))
def test_an_optimizer_that_one_rank_cannot_take() -> None:
    module = Model()
    engine = lightning_zero.shard(module, device="cpu", stage=2)
    kind = torch.optim.SparseAdam if dist.get_rank() == 1 else torch.optim.SGD
    optimizer = kind(module.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="SparseAdam"):
        engine.add_optimizer(optimizer)
    assert not engine.optimizers and "step" not in optimizer.__dict__
    engine.add_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    engine.release()


# -- ranks of which one is slower, or owns less -----------------------------------------------------------------------


def slow_on_rank(rank: int, seconds: float = 0.02) -> Any:
    """The worker of one rank takes its time."""
    return late_steps(lambda _: time.sleep(seconds if dist.get_rank() == rank else 0.0))


OFFLOADED: dict[str, Any] = {"offload": "optimizer_cpu", "stall_timeout_s": 15}
SLOW = pytest.mark.parametrize("slow", [0, 1])


@on_ranks(2)
@SLOW
def test_a_forward_that_raises_while_the_worker_of_one_rank_is_behind(slow: int) -> None:
    """How many parameters a rank has brought up to date so far must not decide what it issues next."""

    def stumbles(side: Side, step: int) -> Tensor:
        if step and isinstance(side, Sharded):
            time.sleep(0.03)  # the worker of the other rank is done, that of this one is not
            with side.module.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
                side.module(tokens(step))
        return language_work(side, step)

    with slow_on_rank(slow):
        check(Model, stumbles, steps=3, stage=(1, 2, 3), plain=(False, True), **OFFLOADED)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
@SLOW
@pytest.mark.parametrize("waits_in", ["an agreement", "a call of another's"])
def test_a_parameter_that_one_rank_reads_while_the_other_waits_for_it(stage: int, slow: int, waits_in: str) -> None:
    """The gathers that bring it up to date need both ranks, of which one waits already."""
    with with_twin(stage=stage, **OFFLOADED) as sides:
        comm = sides[0].engine.comm
        for step in range(3):
            with slow_on_rank(slow, 0.1):
                train_both(sides, [step])
            if dist.get_rank() == 0:
                torch.testing.assert_close(*(list(side.module.parameters())[-1].detach().clone() for side in sides))
            with torch.inference_mode():  # as between the batches of a validation
                if waits_in == "an agreement":
                    comm.max_(torch.ones(1))
                else:
                    with comm.waits.elsewhere("a reduction"):
                        dist.all_reduce(torch.ones(1))
        assert_same(*sides)


@on_ranks(2)
def test_a_message_that_a_thread_drops_late_is_no_view_of_the_user() -> None:
    """One rank alone would wait for the other, which may be in a collective of the user's."""
    with Sharded(Model(), stage=2, **OFFLOADED) as side, slow_on_rank(1, 0.1):
        for step in range(2):
            language_work(side, step)
            if dist.get_rank() == 0:
                message = [side.module.head.weight.detach()]
                threading.Timer(0.05, message.clear).start()
            side.step()
            dist.all_reduce(torch.ones(1))
            side.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@SLOW
def test_values_assigned_while_the_worker_of_one_rank_is_behind(stage: int, slow: int) -> None:
    with with_twin(stage=stage, **OFFLOADED) as sides:
        sharded, twin = sides
        for step in range(3):
            with slow_on_rank(slow, 0.1):
                for side in sides:
                    language_work(side, step)
                    side.step()
            generator = torch.Generator().manual_seed(step)
            for own, (other, master) in zip(sharded.module.parameters(), twin.masters.items(), strict=True):
                own.data = value = torch.randn(own.shape, generator=generator)
                other.data.copy_(value)
                master.value.data.copy_(value)
            lightning_zero.grad_norm(sharded.module)
            for side in sides:
                side.zero_grad()
        assert_same(*sides)


@on_ranks(2)
def test_a_read_on_one_rank_says_that_it_takes_all() -> None:
    side = Sharded(Model(), stage=1, stall_timeout_s=1.5, offload="optimizer_cpu")
    language_work(side, 0)
    with slow_on_rank(1, 2.0):  # which would come to it by itself
        side.step()
    if dist.get_rank() == 0:
        with pytest.raises(StallError):
            side.module.head.weight.sum()
        assert side.engine.comm.waits.place == "a read of head.weight between steps, which takes all ranks"
    else:
        time.sleep(2.5)
    side.engine.comm.waits.close()  # messages were lost: there is no release


def _gathered(module: nn.Module) -> dict[str, Tensor]:
    with lightning_zero.gather(module):
        return {name: value.detach().clone() for name, value in module.named_parameters()}


WHOLE = {
    "gather": _gathered,
    "state_dict": lambda module: copy.deepcopy(module.state_dict()),
    "deepcopy": lambda module: dict(copy.deepcopy(module).named_parameters()),
}


@on_ranks(2)
@pytest.mark.parametrize("first", [0, 1], ids=["from the first step on", "from the second step on"])
@pytest.mark.parametrize("how", WHOLE)
def test_whole_values_inside_a_step_are_right_on_any_path_to_them(how: str, first: int) -> None:
    """Before, ranks have gathered different units, some of them ahead; afterwards they go on to the others."""

    def work(side: Side, step: int) -> Tensor:
        model, x = side.module.model, floats(step, 4, WIDTH)
        before = (0, 1, 2) if dist.get_rank() or not step else ((2,) if step % 2 else (0, 2))
        if isinstance(side, Twin):
            return model(model(x, before), (3, 4, 5)).square().mean()
        side.engine.passes.between.begin_run()
        expected = _gathered(model)
        with side.engine.step_scope():
            x = model(x, before)
            if step >= first:
                assert_equal(WHOLE[how](model), expected, f"step {step}")
            return model(x, (3, 4, 5)).square().mean()

    def trains(side: Side, step: int) -> Tensor:
        loss = work(side, step)
        side.backward(loss)
        return loss

    nbytes = sum(4 * p.numel() for p in Chain(depth=1).blocks[0].parameters())
    for prefetch_bytes in (0, nbytes, 3 * nbytes):
        build = lambda: Does(lambda m, *args: m.model(*args), model=Chain(depth=6))  # noqa: E731
        check(build, trains, steps=4, stall_timeout_s=20, prefetch_bytes=prefetch_bytes)


@on_ranks(2)
def test_ranks_that_leave_the_plan_after_other_numbers_of_gathers_go_on_together() -> None:
    def path(step: int, rank: int) -> tuple[int, ...]:
        return ((0, 1, 2) if rank else (2,)) + (5, 4) if step == 2 else (0, 1, 2, 3, 4)

    six = functools.partial(Chain, depth=6)
    nbytes = sum(4 * p.numel() for p in six().blocks[0].parameters())
    for prefetch_bytes in (nbytes, 2 * nbytes, 3 * nbytes):
        settings = {"stall_timeout_s": 20, "prefetch_bytes": prefetch_bytes}
        check(six, functools.partial(work, path_of=path), steps=4, **settings)


@on_ranks(2)
def test_a_state_dict_of_one_rank_is_refused_on_all() -> None:
    with Sharded(Model()) as side:
        with pytest.raises(ApartError, match=r"rank 0: the module's state_dict\(\), which all.*\n  rank 1: gather\(\)"):
            if dist.get_rank() == 0:
                side.engine.state_dict()
            else:
                lightning_zero.gather(side.module).__enter__()
        assert side.engine.state_dict(only_rank_0=False)


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("row", ["optimizer_cpu", "cpu"])
def test_a_rank_that_owns_nothing_of_a_unit_waits_for_its_step_as_the_others_do(row: str) -> None:
    """Blocks are smaller than a shard; the second is used from the third step on."""

    def act(m: Any, x: Tensor, step: int) -> Tensor:
        for i, block in enumerate(m.blocks):
            if i != 1 or step > 1:
                x = x + block(x).tanh()
        return x

    work = lambda side, step: mean_square(side, step, step, shape=(2, 3))  # noqa: E731
    build = lambda: Does(act, blocks=nn.ModuleList(linear(3) for _ in range(4)))  # noqa: E731
    settings = {"unit": {"classes": ["Linear"]}, "stall_timeout_s": 15, "offload": row}
    check(build, work, steps=5, optimizer=sgd, **settings)


MAX_DELAY_S = 0.004


class LateWork:
    """A message that is seen to be complete only some time after it is."""

    def __init__(self, work: Any, delay: float) -> None:
        self._work = work
        self._from = time.monotonic() + delay

    def is_completed(self) -> bool:
        return time.monotonic() >= self._from and self._work.is_completed()

    def wait(self, *limit: Any) -> Any:
        time.sleep(max(0.0, self._from - time.monotonic()))
        return self._work.wait(*limit)


class LateTransport:
    """Issues messages after a pause and shows their end late, each rank by other lengths."""

    def __init__(self, inner: Any, chance: random.Random, most: float = MAX_DELAY_S) -> None:
        self._inner, self._chance, self._most = inner, chance, most

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return functools.partial(self._late, value) if name in ("gather", "reduce") else value

    def _late(self, send: Any, *args: Any, **kwargs: Any) -> Sent:
        time.sleep(self._pause())
        sent = send(*args, **kwargs)
        return Sent([LateWork(work, self._pause()) for work in sent.works], sent.finish)

    def _pause(self) -> float:
        return self._chance.random() ** 4 * self._most  # mostly short


@on_ranks(3, full=(2,))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_random_delays_change_nothing(stage: int, precision: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded) and step == 0:
            chance, comm = random.Random(100 * stage + dist.get_rank()), side.engine.comm
            comm._transport = LateTransport(comm._transport, chance)
        return accumulate(side, step, micro_batches=2)

    config: dict[str, Any] = {"prefetch_bytes": 15_000, "reduce_bucket_bytes": 3000}
    check(lambda: Model(depth=4), work, stage=stage, precision=precision, plain=True, steps=4, **config)


@on_ranks(2)
@pytest.mark.parametrize("owner", [0, 1])
def test_buffers_that_some_ranks_alone_have_are_left_to_them(owner: int) -> None:
    """Ranks join the messages of buffers whatever they have themselves; others are rank 0's as before."""
    rank = dist.get_rank()
    module = Model()
    module.register_buffer("bank", torch.full((3 if rank == owner else 0, 2), float(rank)))
    with Sharded(module, stage=1, stall_timeout_s=10) as side:
        for step in range(2):
            side.engine.passes.buffers.sync()
            train(side, [step])
            module.bank += 1.0
        module.register_buffer("late", torch.full((2,), float(rank)))
        side.engine.passes.buffers.sync()
        assert module.late.tolist() == [0.0, 0.0]
        assert module.bank.flatten().tolist() == [rank + 2.0] * (6 if rank == owner else 0)


@on_ranks(2)
def test_a_buffer_that_is_written_unseen_from_some_step_on_is_rank_0s_in_the_next() -> None:
    module = Model()
    module.register_buffer("center", torch.zeros(3))
    with Sharded(module, stage=1) as side:
        for step in range(7):
            side.engine.passes.buffers.sync()
            assert module.center.tolist() == [float(max(0, step - 5))] * 3
            if step >= 5:
                module.center.data.add_(1.0 + dist.get_rank())


@on_ranks(2)
@pytest.mark.parametrize("key", ["lr", "betas"])
def test_param_groups_that_differ_between_ranks_are_refused(key: str) -> None:
    with Sharded(Model(), stage=3) as side:
        train(side, [0])
        group = side.optimizer.param_groups[0]
        group["initial_lr"], before = torch.tensor(0.1 * dist.get_rank()), group[key]
        if dist.get_rank() == 1:
            group[key] = 0.002 if key == "lr" else (0.5, 0.6)
        with pytest.raises(ConfigError, match=rf"param group 0 of optimizer 0: expected one {key}.* rank 1.*sync_dist"):
            language_work(side, 1)
        group[key] = before
        assert side.engine.passes.under_way() is None
        side.zero_grad()
        train(side, [2])


@on_ranks(2)
def test_buffers_that_were_written_through_data_before_the_first_step_are_sent() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module.register_buffer("mean", torch.zeros(4))
    with Sharded(module) as side:
        side.module.mean.data.fill_(float(1 + dist.get_rank()))
        side.engine.passes.buffers.sync()
        assert (side.module.mean == 1).all()
