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
from tests.engine.support import (
    ALL_STAGES,
    IN_STAGES,
    Model,
    Sharded,
    Side,
    Twin,
    assert_same,
    check,
    floats,
    language_loss,
    language_work,
    mean_square,
    scope,
    tokens,
    train,
)
from tests.harness import assert_gone, on_ranks
from tests.models import WIDTH, Block, Chain, linear

pytestmark = pytest.mark.sample  # a case shows all stages

STAGES = pytest.mark.parametrize("stage", ALL_STAGES)
PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])


def fail(*_: Any) -> None:
    raise ZeroDivisionError


@contextlib.contextmanager
def failing(chain: nn.Module, where: str) -> Iterator[None]:
    """Inside, a forward raises before its second "block" or in it, or a "backward" behind that; the error is caught."""
    call, handle = chain.call, None
    if where == "block":
        handle = chain.blocks[1].up.register_forward_pre_hook(fail)

    def fails(block: nn.Module, x: Tensor) -> Tensor:
        if block is chain.blocks[1] and where == "forward":
            fail()
        x = call(block, x)
        if block is chain.blocks[1] and where == "backward":
            x.register_hook(fail)
        return x

    chain.call = fails
    try:
        with pytest.raises(ZeroDivisionError):
            yield
    finally:
        chain.call = call
        if handle is not None:
            handle.remove()


@contextlib.contextmanager
def abandoning_after(seconds: float) -> Iterator[None]:
    """One rank may have issued the second half of a sum, and the other not: it is waited for that long."""
    before = communicator.ABANDON_S, passes.ABANDON_S
    communicator.ABANDON_S = passes.ABANDON_S = seconds
    try:
        yield
    finally:
        communicator.ABANDON_S, passes.ABANDON_S = before


# -- exceptions -------------------------------------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@IN_STAGES
@pytest.mark.parametrize("where", ["forward", "backward", "block"])
def test_an_exception_is_followed_by_a_clean_step(stages: tuple[int, ...], where: str) -> None:
    def work(side: Side, step: int) -> Tensor:
        if step in (0, 2):
            with failing(side.module, where):
                mean_square(side, step)
            side.zero_grad()
        return mean_square(side, step)

    check(Chain, work, steps=3, stage=stages, plain=(False, True))


@on_ranks(2)
def test_a_backward_that_failed_unnoticed_takes_no_gradients_of_the_next_one() -> None:
    """The next forward is that of a module which is no unit, so it is the next backward that finds out."""

    def work(side: Side, step: int) -> Tensor:
        with failing(side.module, "backward"):
            mean_square(side, step)
        for param in side.module.parameters():
            param.grad = None
        side.zero_grad()
        loss = side.module.first(floats(step, 4, WIDTH)).square().mean()
        side.backward(loss)
        return loss

    check(Chain, work, stage=(0, 1, 2), plain=True)


@on_ranks(2)
@IN_STAGES
def test_a_backward_that_is_told_of_takes_no_gradients_of_one_that_failed_unnoticed(stages: tuple[int, ...]) -> None:
    """Its graph was made before: no forward comes in between."""

    def work(side: Side, step: int) -> None:
        with scope(side):
            first = side.module[0](floats(0, 4, WIDTH))
            failed = side.module[2](side.module[1](first)).square().mean()
            other = side.module(floats(1, 4, WIDTH)).square().mean()
            handle = first.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                failed.backward()
            handle.remove()
            for param in side.module.parameters():
                param.grad = None
            side.zero_grad()
            side.backward(other)

    build = lambda: nn.Sequential(linear(), linear(), linear())  # noqa: E731
    with abandoning_after(0.5):
        check(build, work, steps=1, stage=stages, unit={"classes": ["Linear"]})


@on_ranks(2)
def test_an_exception_leaves_nothing_gathered() -> None:
    with Sharded(Chain()) as side:
        for where in ("forward", "backward"):
            with failing(side.module, where):
                mean_square(side, 0)
            assert all(unit.state is State.SHARDED for unit in side.engine.units)
            assert not any(b.full.allocated for b in side.engine.buckets)
            side.zero_grad()


@on_ranks(2)
@STAGES
@PLAIN
def test_gradients_that_lack_a_part_are_not_stepped(stage: int, plain: bool) -> None:
    """The first micro-batch is good, the second raises: what is left is neither the one nor the other."""
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=stage >= 2)
    with abandoning_after(0.5), Sharded(module, stage=stage, plain=plain) as side:
        side.backward(language_loss(side.module, tokens(0)))
        hook = side.module.blocks[1].register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            side.backward(language_loss(side.module, tokens(1)))
        hook.remove()
        refused = pytest.raises(RuntimeError, match=r"a backward has raised before its end.*zero_grad")
        with refused:
            side.step()
        side.backward(language_loss(side.module, tokens(2)))  # does not make it whole
        with refused:
            side.clip(1.0)
        with refused:
            side.step()
        side.zero_grad()
        for both in (twin, side):
            both.backward(language_loss(both.module, tokens(3)))
            both.step()
        assert_same(side, twin)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("cleared_by", ["the optimizer", "hand"])
def test_gradients_that_were_cleared_lack_nothing_in_the_next_scope(stage: int, cleared_by: str) -> None:
    """The engine hears of the backward that raised when a scope begins, and by then they have been cleared."""

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded):
            side.backward(language_loss(side.module, tokens(10)))
            hook = side.module.blocks[1].register_full_backward_hook(fail)
            with pytest.raises(ZeroDivisionError):
                side.backward(language_loss(side.module, tokens(11)))
            hook.remove()
            if cleared_by == "the optimizer":
                side.zero_grad()
            else:
                for param in side.module.parameters():
                    param.grad = None
        with scope(side):
            loss = language_loss(side.module, tokens(step))
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
                side.backward(language_loss(side.module, tokens(10)))
            side.zero_grad()
        return language_work(side, step)

    check(Model, work, steps=1)


@on_ranks(2)
def test_ranks_that_raise_after_different_halves_of_reductions_go_on() -> None:
    """One rank has found its reductions complete and issued what follows them, the other has not."""
    done = Pending.done

    def found_complete(self: Pending) -> bool:
        if dist.get_rank():
            return False
        for work in self._works:
            work.wait()
        return done(self)

    def build() -> nn.Module:
        module = Model(depth=4)
        module.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))  # all-reduced at every stage
        module.register_forward_hook(lambda m, _, out: out * m.scale)
        return module

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded) and step:
            hook = side.module.embed.register_forward_hook(lambda _, __, out: out.register_hook(fail) and None)
            with mock.patch.object(Pending, "done", found_complete), pytest.raises(ZeroDivisionError):
                side.backward(language_loss(side.module, tokens(10 + step)))
            hook.remove()
            side.zero_grad()
        return language_work(side, step)

    with abandoning_after(0.2):  # for messages that nobody answers
        check(build, work, steps=3, stage=(0, 3))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gather_that_fails_on_its_way_in_leaves_nothing_behind(stage: int) -> None:
    full_master, calls = Bucket.full_master, 0

    def second_fails(self: Bucket) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError
        return full_master(self)

    def work(side: Side, step: int) -> Tensor:
        if isinstance(side, Sharded):
            with (
                mock.patch.object(Bucket, "full_master", second_fails),
                pytest.raises(ZeroDivisionError),
                lightning_zero.gather(side.module),
            ):
                raise AssertionError("it has not got here")
            assert calls == 2 and not whole_params.gathered_buckets(side.engine)
        return language_work(side, step)

    check(Model, work, stage=stage, steps=1)


# -- engines that are dropped -----------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_dropped_engine_is_collected(stage: int) -> None:
    before = set(threading.enumerate())
    side = Sharded(Model(), stage=stage)
    references = [weakref.ref(o) for o in (side.engine, side.engine.comm, side.module, side.engine.buckets[0])]
    train(side, range(2))
    with torch.no_grad():
        side.module(tokens(0))
    names = {t.name for t in set(threading.enumerate()) - before}
    assert names == {"lightning_zero-places", "lightning_zero-judges"}
    del side
    assert_gone(references)
    deadline = time.monotonic() + 5
    while (threads := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not threads
    dist.barrier()
    with Sharded(Model(), stage=stage) as again:
        train(again, range(1))


@on_ranks(2, full=(1,))
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (3, "none"), (3, "optimizer_cpu")])
def test_an_engine_goes_with_its_module_whatever_leads_back_to_it(stage: int, offload: str) -> None:
    """A hook of the optimizer that reaches the model, as those that keep averages by hand."""
    kept: list[torch.optim.Optimizer] = []

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
        return [weakref.ref(o) for o in (engine, engine.passes, module, *engine.buckets)]

    assert_gone(trained_with_hooks(keeps=False))
    assert_gone(trained_with_hooks(keeps=True))
    with pytest.raises(RuntimeError, match="is gone"):
        kept[0].step()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("leaves", ["no backward", "a backward that raises"])
def test_a_graph_that_is_dropped_goes_with_all_that_it_leads_to(stage: int, leaves: str) -> None:
    """Blocks have a tanh, which saves its own result."""
    side = Sharded(Model(), stage=stage)
    loss = language_loss(side.module, tokens(0))
    if leaves != "no backward":
        handle = side.module.blocks[1].up.weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            side.backward(loss)
        handle.remove()
    references = [weakref.ref(o) for o in (side.engine, side.engine.passes, side.module, *side.engine.buckets)]
    del side, loss
    torch.ones(1, requires_grad=True).sum().backward()  # until then torch keeps what a backward that raised had to do
    assert_gone(references)


# -- aborts -----------------------------------------------------------------------------------------------------------


def blocks(number: int) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(number)))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["gathers", "reductions"])
def test_an_abort_waits_once_for_all_messages(kind: str) -> None:
    side = Sharded(blocks(8), stage=3 if kind == "gathers" else 2, reduce_bucket_bytes=1000)
    engine = side.engine
    engine.passes.reducer._max_in_flight_nbytes = 1 << 30  # else it would wait for the rank that does not come
    out = side.module(floats(0, 4, WIDTH)) if kind == "reductions" else None
    dist.barrier()
    if dist.get_rank() == 0:
        with abandoning_after(0.5):
            started = time.monotonic()
            if out is None:
                for unit in engine.units[1:]:
                    unit.unshard_begin()
                engine.passes.abort()
            else:
                side.module[0].norm.bias.register_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    side.backward(out.sum())
            assert 0.4 < time.monotonic() - started < 2.0
        messages = sum(n for (what, _), n in engine.comm.counts.items() if what in ("all_gather", "reduce_scatter"))
        assert messages >= 6
    dist.barrier()
    engine.comm.waits.close()  # the groups have lost messages: this engine is not released


@on_ranks(2)
@pytest.mark.parametrize("comes", [True, False], ids=["the other comes late", "the other never comes"])
def test_a_gather_that_was_given_up_writes_into_no_memory_of_others(comes: bool) -> None:
    module = Model()
    twin = Twin(module)
    side = Sharded(module, stage=3)
    engine, is_late = side.engine, dist.get_rank() == 1
    unit = engine.units[1]

    def both(steps: range) -> None:
        for one in (side, twin):
            train(one, steps)

    both(range(2))
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
    both(range(2, 5))  # the other memory is as good
    assert_same(side, twin)
    engine.release()
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize("what", ["release", "state dict"])
def test_whole_values_are_right_after_ranks_have_gathered_different_units(what: str) -> None:
    """Each has raised in another place. A gather of one rank must not be matched with a later one of the other."""
    side = Sharded(blocks(6), stage=3)
    engine = side.engine
    wanted = {name: value.clone() for name, value in engine.state_dict(only_rank_0=False).items()}
    with abandoning_after(0.2):
        for unit in engine.units[1 : 3 + 2 * dist.get_rank()]:
            unit.unshard_begin()
        engine.passes.abort()
    if what == "release":
        engine.release()
        found = side.module.state_dict()
    else:
        found = engine.state_dict(only_rank_0=False)
        engine.release()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], value) for name, value in found.items())


@on_ranks(2)
@pytest.mark.parametrize("what", ["gather", "state dict"])
def test_whole_values_are_right_after_ranks_have_raised_unnoticed_in_different_places(what: str) -> None:
    """One rank has asked for the next unit, and the other has not."""
    module = blocks(6)
    nbytes = sum(4 * p.numel() for p in module[0].parameters())
    with abandoning_after(0.2), Sharded(module, stage=3, prefetch_bytes=nbytes, stall_timeout_s=20.0) as side:
        wanted = {name: value.clone() for name, value in side.engine.state_dict(only_rank_0=False).items()}
        for fails in (False, False, True):
            with side.engine.step_scope():
                loss = module(floats(0, 4, WIDTH)).square().mean()
                if fails:
                    module[3 - dist.get_rank()].up.weight.register_hook(fail)
                with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                    loss.backward()
            side.zero_grad()
        if what == "gather":
            with lightning_zero.gather(module):
                found = {name: value.detach().clone() for name, value in module.named_parameters()}
        else:
            found = side.engine.state_dict(only_rank_0=False)
        assert all(torch.equal(wanted[name], value) for name, value in found.items())


@on_ranks(2)
def test_a_graph_of_before_a_gather_was_given_up_is_refused() -> None:
    """Its weights are views of memory that only the abandoned message writes to."""
    with Sharded(Model(), stage=3) as side:
        train(side, range(2))
        loss = language_loss(side.module, tokens(2))
        side.engine.passes.abort()
        unit = side.engine.units[1]
        for bucket in unit.resharded:
            bucket.leave_memory()
        side.engine.passes.saved.plans_changed()
        with pytest.raises(RuntimeError, match="expected a graph whose weights can be gathered again"):
            side.backward(loss)
        side.zero_grad()
        train(side, range(3, 5))
