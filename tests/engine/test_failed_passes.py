"""Passes that raise, are aborted, or whose engine is dropped: what follows is clean, and nothing is left behind."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.comm import communicator
from lightning_zero.comm.reduction import Pending
from lightning_zero.engine.passes import passes
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.unit import State
from lightning_zero.engine.whole import whole_params
from tests.engine.sides import Sharded, Side, beside_twin
from tests.engine.support import IN_STAGES, PLAIN, STAGES, assert_equal, assert_same, check
from tests.engine.works import floats, language_work, loss_at, mean_square, scope, train, train_both
from tests.harness import assert_gone, on_ranks
from tests.models import WIDTH, Block, Chain, Model, linear

pytestmark = pytest.mark.sample  # a case shows all stages


def fail(*_: Any) -> None:
    raise ZeroDivisionError


@contextlib.contextmanager
def failing(chain: nn.Module, where: str) -> Iterator[None]:
    """Inside, a forward raises before its second "block" or in it, or a "backward" behind that; the error is caught."""
    block, call = chain.blocks[1], chain.call
    handle = block.up.register_forward_pre_hook(fail) if where == "block" else contextlib.nullcontext()

    def fails(each: nn.Module, x: Tensor) -> Tensor:
        if each is block and where == "forward":
            fail()
        x = call(each, x)
        if each is block and where == "backward":
            x.register_hook(fail)
        return x

    chain.call = fails
    with handle, pytest.raises(ZeroDivisionError):
        yield
    chain.call = call


def raise_in_backward(side: Side, step: int) -> None:
    """A backward that raises in the middle, of batch ``step``."""
    with side.module.blocks[1].register_full_backward_hook(fail), pytest.raises(ZeroDivisionError):
        side.backward(loss_at(side.module, step))


def references(side: Sharded) -> list[weakref.ref[Any]]:
    engine = side.engine
    return [weakref.ref(o) for o in (engine, engine.passes, engine.comm, side.module, *engine.buckets)]


@contextlib.contextmanager
def abandoning_after(seconds: float) -> Iterator[None]:
    """One rank may have issued the second half of a sum, and the other not: it is waited for that long."""
    with mock.patch.object(communicator, "ABANDON_S", seconds), mock.patch.object(passes, "ABANDON_S", seconds):
        yield


# -- exceptions -------------------------------------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@IN_STAGES
@pytest.mark.parametrize("where", ["forward", "backward", "block"])
def test_an_exception_is_followed_by_a_clean_step(stages: tuple[int, ...], where: str) -> None:
    """Nothing stays gathered."""

    def work(side: Side, step: int) -> Tensor:
        if step in (0, 2):
            with failing(side.module, where):
                mean_square(side, step)
            if isinstance(side, Sharded) and not side._plain:
                units = [unit for unit in side.engine.units if unit.resharded]
                assert all(unit.state is State.SHARDED for unit in units)
                assert not any(b.full.allocated for unit in units for b in unit.resharded)
            side.zero_grad()
        return mean_square(side, step)

    check(Chain, work, steps=3, stage=stages, plain=(False, True))


@on_ranks(2)
def test_in_a_run_a_module_has_a_state_dict_after_a_backward_that_raised_unnoticed() -> None:
    with Sharded(Model(), stage=3, plain=True) as side:
        side.engine.passes.between.begin_run()
        expected = side.engine.state_dict(only_rank_0=False)
        raise_in_backward(side, 0)
        assert_equal(dict(side.module.state_dict()), dict(expected))


@on_ranks(2)
@IN_STAGES
def test_a_backward_takes_no_gradients_of_one_that_failed_unnoticed(stages: tuple[int, ...]) -> None:
    """Its graph was made before: no forward comes in between."""

    def work(side: Side, step: int) -> None:
        with scope(side):
            first = side.module[0](floats(0, 4, WIDTH))
            failed = side.module[2](side.module[1](first)).square().mean()
            other = side.module(floats(1, 4, WIDTH)).square().mean()
            with first.register_hook(fail), pytest.raises(ZeroDivisionError):
                failed.backward()
            side.module.zero_grad()
            side.zero_grad()
            side.backward(other)

    build = lambda: nn.Sequential(linear(), linear(), linear())  # noqa: E731
    with abandoning_after(0.5):
        check(build, work, steps=1, stage=stages, plain=(False, True), unit={"classes": ["Linear"]})


@on_ranks(2)
@IN_STAGES
def test_a_backward_that_raised_runs_again_in_the_same_step(stages: tuple[int, ...]) -> None:
    """In two halves, as after a lack of memory; weights of the root are read outside of its call."""

    def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x @ module.first.weight
        for block in module.blocks:
            x = block(x)
        return x.square().mean()

    def work(side: Side, step: int) -> None:
        x = floats(step, 4, WIDTH)
        with scope(side):
            with side.module.blocks[1].register_full_backward_hook(fail), pytest.raises(ZeroDivisionError):
                side.backward(loss_of(side.module, x))
            side.module.zero_grad()
            side.zero_grad()
            for half in x.chunk(2):
                side.backward(loss_of(side.module, half) / 2)

    with abandoning_after(0.5):
        check(Chain, work, steps=2, stage=stages, plain=(False, True))


@on_ranks(2)
@STAGES
@PLAIN
def test_gradients_that_lack_a_part_are_not_stepped(stage: int, plain: bool) -> None:
    """The first micro-batch is good, the second raises: what is left is neither the one nor the other."""
    refused = pytest.raises(RuntimeError, match=r"a backward has raised before its end.*zero_grad")
    side, twin = beside_twin(stage=stage, plain=plain)
    with abandoning_after(0.5), side:
        side.backward(loss_at(side.module, 0))
        raise_in_backward(side, 1)
        with refused:
            side.step()
        side.backward(loss_at(side.module, 2))  # does not make it whole
        for use in (lambda: side.clip(1.0), side.step):
            with refused:
                use()
        side.zero_grad()
        train_both((twin, side), [3])
        assert_same(side, twin)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("cleared_by", ["optimizer", "module"])
def test_gradients_that_were_cleared_lack_nothing_in_the_next_scope(stage: int, cleared_by: str) -> None:
    """The engine hears of the backward that raised when a scope begins, and by then they have been cleared."""

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded):
            side.backward(loss_at(side.module, 10))
            raise_in_backward(side, 11)
            getattr(side, cleared_by).zero_grad()
        with scope(side):
            loss = loss_at(side.module, step)
        side.backward(loss)
        return loss

    with abandoning_after(0.5):
        check(Model, work, stage=stage, plain=True, steps=1)


@on_ranks(2)
@pytest.mark.parametrize("where", ["_begin_backward", "_end_backward", "flush"])
def test_an_exception_at_an_end_of_a_backward_is_followed_by_a_clean_one(where: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded):
            owner = side.engine.passes.reducer if where == "flush" else side.engine.passes
            with mock.patch.object(owner, where, side_effect=MemoryError), pytest.raises(MemoryError):
                side.backward(loss_at(side.module, 10))
            side.zero_grad()
        return language_work(side, step)

    check(Model, work, steps=1)


@on_ranks(2, 4)
def test_ranks_that_raise_after_different_halves_of_reductions_go_on() -> None:
    """One rank has found its reductions complete and issued what follows them, the others have not."""
    done, two_nodes = Pending.done, dist.get_world_size() == 4

    def found_complete(self: Pending) -> bool:
        if dist.get_rank():
            return False
        for work in self._works:
            work.wait()
        return done(self)

    def build() -> nn.Module:
        module = Model(depth=4)
        if not two_nodes:
            module.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))  # all-reduced at every stage
            module.register_forward_hook(lambda m, _, out: out * m.scale)
        return module

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded) and step:
            hook = side.module.embed.register_forward_hook(lambda _, __, out: out.register_hook(fail) and None)
            with hook, mock.patch.object(Pending, "done", found_complete), pytest.raises(ZeroDivisionError):
                side.backward(loss_at(side.module, 10 + step))
            side.zero_grad()
        return language_work(side, step)

    settings: dict[str, Any] = {"stage": (0, 3)}
    if two_nodes:  # a sum within a node is followed by one between nodes
        flat = {"node": f"node {dist.get_rank() // 2}", "hybrid_shard": "flat"}
        settings = {"precision": "bf16", "tolerance": 2e-2, **flat}
    with abandoning_after(0.2):  # for messages that nobody answers
        check(build, work, steps=3, **settings)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gather_that_fails_on_its_way_in_leaves_nothing_behind(stage: int) -> None:
    read = mock.Mock(side_effect=[mock.DEFAULT, ZeroDivisionError])

    def second_fails(self: Bucket) -> Tensor:
        read()
        return full_master(self)

    full_master = Bucket.full_master

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded):
            with (
                mock.patch.object(Bucket, "full_master", second_fails),
                pytest.raises(ZeroDivisionError),
                lightning_zero.gather(side.module),
            ):
                raise AssertionError("it has not got here")
            assert read.call_count == 2 and not whole_params.gathered_buckets(side.engine)
        return language_work(side, step)

    check(Model, work, stage=stage, steps=1)


# -- engines that are dropped -----------------------------------------------------------------------------------------


@on_ranks(2, full=(1,))
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (2, "none"), (3, "none"), (3, "optimizer_cpu")])
def test_an_engine_goes_with_its_module_whatever_leads_back_to_it(stage: int, offload: str) -> None:
    """A hook of the optimizer that reaches the model, as those that keep averages by hand. Its threads end too."""
    kept: list[torch.optim.Optimizer] = []
    threads = set(threading.enumerate())

    def trained_with_hooks(keeps: bool) -> list[weakref.ref[Any]]:
        side = Sharded(Model(), stage=stage, offload=offload)
        module, engine = side.module, side.engine
        if not keeps:
            side.optimizer.register_step_post_hook(lambda *_: module.train() and None)
        module.register_forward_hook(lambda *_: engine.passes.sharded_grads.finish_pending())
        module.losses = [language_work(side, 0)]
        side.step()
        dist.barrier()
        if keeps:
            kept.append(side.optimizer)
        assert dist.get_world_size() == 1 or len(set(threading.enumerate()) - threads) >= 2
        return references(side)

    assert_gone(trained_with_hooks(keeps=False))
    assert_gone(trained_with_hooks(keeps=True))
    with pytest.raises(RuntimeError, match="is gone"):
        kept[0].step()
    deadline = time.monotonic() + 5
    while not threads.issuperset(threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads.issuperset(threading.enumerate())


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("raises", [False, True])
def test_a_graph_that_is_dropped_goes_with_all_that_it_leads_to(stage: int, raises: bool) -> None:
    """Blocks have a tanh, which saves its own result."""
    side = Sharded(Model(), stage=stage)
    loss = loss_at(side.module, 0)
    if raises:
        with side.module.blocks[1].up.weight.register_hook(fail), pytest.raises(ZeroDivisionError):
            side.backward(loss)
    left = references(side)
    del side, loss
    torch.ones(1, requires_grad=True).sum().backward()  # until then torch keeps what a backward that raised had to do
    assert_gone(left)


# -- aborts -----------------------------------------------------------------------------------------------------------


def blocks(number: int) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(number)))


@on_ranks(2)
def test_an_abort_waits_once_for_all_messages() -> None:
    side = Sharded(blocks(8), stage=2, reduce_bucket_bytes=1000)
    engine = side.engine
    engine.passes.reducer._max_in_flight_nbytes = 1 << 30  # else it would wait for the rank that does not come
    loss = side.module(floats(0, 4, WIDTH)).sum()
    if dist.get_rank() == 0:
        side.module[0].norm.bias.register_hook(fail)
        started = time.monotonic()
        with abandoning_after(0.5), pytest.raises(ZeroDivisionError):
            side.backward(loss)
        assert 0.4 < time.monotonic() - started < 2.0
        assert sum(n for (what, _), n in engine.comm.counts.items() if what == "reduce_scatter") >= 6
    dist.barrier()
    engine.comm.waits.close()  # the groups have lost messages: this engine is not released


@on_ranks(2)
@pytest.mark.parametrize("comes", [True, False], ids=["the other comes late", "the other never comes"])
def test_a_gather_that_was_given_up_writes_into_no_memory_of_others(comes: bool) -> None:
    side, twin = beside_twin()
    engine, is_late = side.engine, dist.get_rank() == 1
    unit = engine.units[1]
    train_both((side, twin), range(2))
    buffers = [bucket.full.data for bucket in unit.buckets]
    dist.barrier()
    if not is_late:
        unit.unshard_begin()
        with abandoning_after(0.2):
            engine.passes.abort()
        assert unit.state is State.SHARDED and not any(bucket.full.allocated for bucket in unit.buckets)
        assert all(buffer.untyped_storage().nbytes() for buffer in buffers)  # where a message may still write
    dist.barrier()
    if is_late and comes:
        unit.unshard_begin()
        unit.unshard_wait()
        buffers = [bucket.full.data.clone() for bucket in unit.buckets]
    dist.barrier()
    engine.passes.abort()
    if comes:
        time.sleep(0.2)  # nobody waits for the messages any more
        for buffer in buffers:
            arrived = buffer.clone()
            dist.broadcast(arrived, 1)
            assert torch.equal(arrived, buffer)
    train_both((side, twin), range(2, 5))  # the other memory is as good
    assert_same(side, twin)
    engine.release()
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("what", ["release", "state dict", "gather"])
def test_whole_values_are_right_after_ranks_have_gathered_different_units(what: str, noticed: bool) -> None:
    """Each has raised in another place. A gather of one rank must not be matched with a later one of the other."""
    module = blocks(6)
    nbytes = sum(4 * p.numel() for p in module[0].parameters())
    side = Sharded(module, stage=3, prefetch_bytes=nbytes, stall_timeout_s=20.0)
    engine = side.engine
    wanted = {name: value.clone() for name, value in engine.state_dict(only_rank_0=False).items()}
    with abandoning_after(0.2):
        if noticed:
            for unit in engine.units[1 : 3 + 2 * dist.get_rank()]:
                unit.unshard_begin()
            engine.passes.abort()
        else:  # one rank has asked for the next unit, and the other has not
            for hooks in ([], [], [fail]):
                for hook in hooks:
                    module[3 - dist.get_rank()].up.weight.register_hook(hook)
                with engine.step_scope(), pytest.raises(ZeroDivisionError) if hooks else contextlib.nullcontext():
                    module(floats(0, 4, WIDTH)).square().mean().backward()
                side.zero_grad()
        if what == "state dict":
            found = engine.state_dict(only_rank_0=False)
        elif what == "gather":
            with lightning_zero.gather(module):
                found = {name: value.detach().clone() for name, value in module.named_parameters()}
        engine.release()
        if what == "release":
            found = module.state_dict()
    assert_equal(dict(found), wanted)


@on_ranks(2)
def test_a_graph_of_before_a_gather_was_given_up_is_refused() -> None:
    """Its weights are views of memory that only the abandoned message writes to."""
    with Sharded(Model(), stage=3) as side:
        train(side, range(2))
        loss = loss_at(side.module, 2)
        side.engine.passes.abort()
        unit = side.engine.units[1]
        for bucket in unit.resharded:
            bucket.leave_memory()
        side.engine.passes.saved.plans_changed()
        with pytest.raises(RuntimeError, match="expected a graph whose weights can be gathered again"):
            side.backward(loss)
        side.zero_grad()
        train(side, range(3, 5))
