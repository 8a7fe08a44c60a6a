"""Values, children, schedulers, buffers and state around passes; engines that are dropped or aborted."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.comm import communicator
from lightning_zero.engine import engine_of
from lightning_zero.engine.passes import passes
from lightning_zero.engine.units.unit import State
from lightning_zero.engine.whole import state_dicts, whole_params
from tests.engine.support import (
    MakeOptimizer,
    Model,
    Sharded,
    Side,
    Twin,
    accumulate,
    adamw,
    assert_same,
    floats,
    language_loss,
    language_work,
    sgd,
    tokens,
)
from tests.harness import assert_gone, on_ranks

WIDTH = 19
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def train(side: Side, steps: range) -> None:
    for step in steps:
        language_work(side, step)
        side.step()
        side.zero_grad()


# -- gather and children of the module ---------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("argument", [{"from_rank": 0}, {"grads": True}], ids=str)
def test_arguments_of_a_nested_gather_are_refused(stage: int, argument: dict[str, int]) -> None:
    with Sharded(Model(), stage=stage) as side:
        weight = side.module.head.weight
        with lightning_zero.gather(side.module):
            before = weight.detach().clone()
            with pytest.raises(RuntimeError, match="cannot be nested"), lightning_zero.gather(weight, **argument):
                weight.data.fill_(7.0)
            assert torch.equal(weight, before)
        with lightning_zero.gather(weight, **argument):  # alone it works
            assert torch.equal(weight, before)
        train(side, range(1))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_children_are_guarded_outside_of_gather_and_free_inside(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        train(side, range(1))
        block = side.module.blocks[0]
        for call in (
            block.state_dict,
            lambda: copy.deepcopy(block),
            lambda: copy.deepcopy(side.module.blocks),
            block.half,
            block.up.double,
            lambda: block.load_state_dict({}, strict=False),
        ):
            with pytest.raises(RuntimeError, match="gather"):
                call()
        with lightning_zero.gather(side.module):
            before = {key: value.clone() for key, value in block.state_dict().items()}
            block.load_state_dict({key: value * 2 for key, value in before.items()})
            assert all(torch.equal(value, 2 * before[key]) for key, value in block.state_dict().items())
        with lightning_zero.gather(side.module):
            assert all(torch.equal(value, 2 * before[key]) for key, value in block.state_dict().items())
        train(side, range(1, 2))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_copy_made_inside_gather_is_plain(stage: int, precision: str) -> None:
    with Sharded(Model(), stage=stage, precision=precision) as side:
        handle = side.module.blocks[0].register_forward_hook(_doubles)  # the user's own hooks are copied
        with lightning_zero.gather(side.module):
            block, whole = copy.deepcopy(side.module.blocks[0]), copy.deepcopy(side.module)
            values = [p.detach().clone() for p in side.module.parameters()]
        handle.remove()
        assert len(block._forward_hooks) == 1
        for copied in (block, whole):
            for inner in copied.modules():
                assert not inner._forward_pre_hooks and not inner._state_dict_pre_hooks
                assert not inner._load_state_dict_pre_hooks and not {"_apply", "__deepcopy__"} & set(inner.__dict__)
                assert set(inner._forward_hooks.values()) <= {_doubles}
            assert not any(p._post_accumulate_grad_hooks for p in copied.parameters())
        side.engine.comm.counts.clear()
        language_loss(whole, tokens(0)).backward()
        block(floats(0, 4, WIDTH)).sum().backward()
        assert not side.engine.comm.counts and not side.engine.passes.in_backward
        assert all(type(p.grad) is Tensor for p in (*whole.parameters(), *block.parameters()))
        copy.deepcopy(whole).double().load_state_dict(whole.state_dict())
        assert all(torch.equal(p, v) for p, v in zip(whole.parameters(), values, strict=True))
        train(side, range(1))
        assert all(torch.equal(p, v) for p, v in zip(whole.parameters(), values, strict=True))


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_a_module_is_plain_inside_gather(stage: int, checkpointing: str) -> None:
    """It can be pickled and scripted, and what comes of it needs nothing of ours."""
    with Sharded(Model(), stage=stage, activation_checkpointing=checkpointing) as side:
        train(side, range(1))
        module, engine = side.module, side.engine
        hooks = [dict(m._forward_hooks) for m in module.modules()]
        with pytest.raises(RuntimeError, match=r"pickling.*gather"):
            torch.save(module, io.BytesIO())
        engine.comm.counts.clear()
        with lightning_zero.gather(module):
            assert engine_of(module) is engine
            assert all(type(p) is nn.Parameter for p in module.parameters())
            file = io.BytesIO()
            torch.save(module, file)
            scripted, traced = torch.jit.script(module), torch.jit.trace(module, tokens(0))
            expected = module(tokens(0))  # on this rank alone
            assert all(torch.equal(other(tokens(0)), expected) for other in (scripted, traced))
            if dist.get_rank() == 0:
                module(tokens(1))
        assert b"lightning_zero" not in file.getvalue()
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(tokens(0)), expected)
        assert [dict(m._forward_hooks) for m in module.modules()] == hooks
        train(side, range(1, 3))
        loss = language_loss(loaded, tokens(0))
        loss.backward()
        assert all(p.grad is not None for p in loaded.parameters())


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_norm_without_parameters_is_plain_inside_gather_too(stage: int, precision: str) -> None:
    """Norms keep the dtype of their inputs in lower precision; that is for training alone."""
    norm = nn.LayerNorm(6, elementwise_affine=False)
    module = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6))
    with Sharded(module, stage=stage, precision=precision) as side:
        hooks = dict(norm._forward_hooks)
        with lightning_zero.gather(module):
            file = io.BytesIO()
            torch.save(module, file)
            expected = module(floats(0, 2, 6))
        assert hooks and dict(norm._forward_hooks) == hooks
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(floats(0, 2, 6)), expected)
        assert not whole_params.gathered_buckets(side.engine)


@on_ranks(2)
@STAGES
def test_data_of_another_shape_inside_gather_is_refused(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        weight = side.module.head.weight
        shape = tuple(weight.shape)
        with (
            pytest.raises(RuntimeError, match=r"head\.weight\.data = .*expected a tensor of shape .*, got \(2, 5\)"),
            lightning_zero.gather(side.module),
        ):
            weight.data = torch.zeros(2, 5)
        assert tuple(weight.shape) == shape
        train(side, range(1))


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_are_replaced_inside_gather_are_refused(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        module = side.module
        before = module.head.weight
        with (
            pytest.raises(RuntimeError, match=r"head\.weight was replaced.*assign=False"),
            lightning_zero.gather(module),
        ):
            module.head.weight = nn.Parameter(torch.zeros_like(module.head.weight))
        module.head.weight = before
        train(side, range(1))


def _doubles(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2


# -- engines that are dropped, passes that are aborted -----------------------------------------------------------------


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


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer_cpu"])
def test_an_engine_goes_with_its_module_whatever_leads_back_to_it(stage: int, offload: str) -> None:
    """A hook of the optimizer that reaches the model, as those that keep averages by hand."""
    if offload != "none" and stage == 0:
        return
    kept: list[torch.optim.Optimizer] = []
    assert_gone(_train_with_hooks(stage, offload))
    assert_gone(_train_with_hooks(stage, offload, kept))
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
        handle = side.module.blocks[1].up.weight.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            side.backward(loss)
        handle.remove()
    references = [weakref.ref(o) for o in (side.engine, side.engine.passes, side.module, *side.engine.buckets)]
    del side, loss
    torch.ones(1, requires_grad=True).sum().backward()  # until then torch keeps what a backward that raised had to do
    assert_gone(references)


def _train_with_hooks(
    stage: int, offload: str, kept_optimizers: list[torch.optim.Optimizer] | None = None
) -> list[weakref.ref[Any]]:
    side = Sharded(Model(), stage=stage, offload=offload)
    module, engine = side.module, side.engine
    if kept_optimizers is None:
        side.optimizer.register_step_post_hook(lambda *_: module.train() and None)
    module.register_forward_hook(lambda *_: engine.passes.sharded_grads.finish_pending())
    module.losses = [language_work(side, 0)]
    side.step()
    dist.barrier()
    if kept_optimizers is not None:
        kept_optimizers.append(side.optimizer)
    return [weakref.ref(o) for o in (engine, engine.passes, module, *engine.buckets)]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["gathers", "reductions"])
def test_an_abort_waits_once_for_all_messages(kind: str) -> None:
    side = Sharded(_blocks(8), stage=3 if kind == "gathers" else 2, reduce_bucket_bytes=1000)
    engine = side.engine
    engine.passes.reducer._max_in_flight_nbytes = 1 << 30  # else it would wait for the rank that does not come
    out = None
    if kind == "reductions":
        out = side.module(floats(0, 4, WIDTH))
    dist.barrier()
    if dist.get_rank() == 0:
        with _abandoning_after(0.5):
            started = time.monotonic()
            with pytest.raises(ZeroDivisionError):
                if out is None:
                    _raise_with_gathers(engine)
                else:
                    side.module[0].norm.bias.register_hook(_raise)
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
        with _abandoning_after(0.2):
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
def test_whole_values_after_ranks_have_gathered_different_units(what: str) -> None:
    """Each has raised in another place. A gather of one rank must not be matched with a later one of the other."""
    side = Sharded(_blocks(6), stage=3)
    engine = side.engine
    wanted = {name: value.clone() for name, value in engine.state_dict(only_rank_0=False).items()}
    with _abandoning_after(0.2):
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


def _blocks(number: int) -> nn.Sequential:
    return nn.Sequential(*(Model(depth=1).blocks[0] for _ in range(number)))


def _raise_with_gathers(engine: lightning_zero.engine.Engine) -> None:
    try:
        for unit in engine.units[1:]:
            unit.unshard_begin()
        raise ZeroDivisionError
    except ZeroDivisionError:
        engine.passes.abort()
        raise


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError


@contextlib.contextmanager
def _abandoning_after(seconds: float) -> Iterator[None]:
    before = communicator.ABANDON_S
    communicator.ABANDON_S = passes.ABANDON_S = seconds
    try:
        yield
    finally:
        communicator.ABANDON_S = passes.ABANDON_S = before


# -- schedulers, buffers, sparse gradients -----------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_scheduler_made_after_add_optimizer_sees_the_steps(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        scheduler = torch.optim.lr_scheduler.StepLR(side.optimizer, 1, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(2):
                train(side, range(step, step + 1))
                scheduler.step()
        assert side.optimizer.param_groups[0]["lr"] == 0.01 / 4
    with Sharded(Model(), stage=stage) as side:
        scheduler = torch.optim.lr_scheduler.StepLR(side.optimizer, 1)
        with pytest.warns(UserWarning, match=r"before `optimizer\.step"):
            scheduler.step()  # and a wrong order is still told


@on_ranks(2)
@pytest.mark.parametrize("expanded", [False, True])
def test_buffers_of_every_kind_start_as_on_rank_0(expanded: bool) -> None:
    mark = 1 + dist.get_rank()
    buffers = {
        "int16": torch.full((3,), mark, dtype=torch.int16),
        "boolean": torch.tensor([mark == 1, mark == 2]),
        "complex": torch.full((3,), complex(mark, -mark)),
        "row": torch.full((1, 3), float(mark)).expand(4 if expanded else 1, 3),
        "transposed": torch.arange(6.0).view(2, 3).mul(mark).t(),
        "every_second": torch.arange(8.0).mul(mark)[::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(mark),
    }
    module = Model()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    with Sharded(module) as side:
        train(side, range(1))
        for name, buffer in buffers.items():
            now = getattr(module, name)
            assert now.dtype == buffer.dtype and now.shape == buffer.shape, name
        assert module.int16.tolist() == [1] * 3 and module.boolean.tolist() == [True, False]
        assert module.complex.tolist() == [1 - 1j] * 3 and set(module.row.flatten().tolist()) == {1.0}
        assert module.transposed.tolist() == [[0, 3], [1, 4], [2, 5]]
        assert module.every_second.tolist() == [0, 2, 4, 6] and module.scalar.item() == 1


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])
def test_sparse_gradients_of_embeddings_train_as_dense_ones(stage: int, plain: bool) -> None:
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=stage >= 2)
    module.embed.sparse = True
    with Sharded(module, stage=stage, plain=plain) as sharded:
        for step in range(3):
            for side in (sharded, twin):
                accumulate(side, step, micro_batches=2)
            assert_same(sharded, twin, grads=True, tolerance=1e-6)
            for side in (sharded, twin):
                side.step()
                side.zero_grad()
            assert_same(sharded, twin, tolerance=1e-6)


# -- state through the engine's own methods ----------------------------------------------------------------------------


@on_ranks(2, 3)
@STAGES
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_state_of_module_and_optimizer_goes_out_and_back(stage: int, optimizer: MakeOptimizer) -> None:
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, optimizer=optimizer)
    with Sharded(module, stage=stage, optimizer=optimizer) as side:
        for one in (side, twin):
            train(one, range(2))
        engine = side.engine
        state, optimizer_state = engine.state_dict(), state_dicts.optimizer_state(engine, side.optimizer)
        assert bool(state) == bool(optimizer_state) == (dist.get_rank() == 0)
        state = engine.state_dict(only_rank_0=False)
        optimizer_state = state_dicts.optimizer_state(engine, side.optimizer, only_rank_0=False)
        for value, master in zip(state.values(), twin.masters.values(), strict=True):
            assert torch.equal(value, master.value)
        kept = copy.deepcopy((state, optimizer_state))
        train(side, range(50, 53))  # to somewhere else
        _assert_equal_state((state, optimizer_state), kept)  # nothing taken out is shared with the engine
        engine.load_state_dict(state)
        state_dicts.load_optimizer_state(engine, side.optimizer, optimizer_state)
        _assert_equal_state(engine.state_dict(only_rank_0=False), state)
        _assert_equal_state(state_dicts.optimizer_state(engine, side.optimizer, only_rank_0=False), optimizer_state)
        for one in (side, twin):
            train(one, range(2, 5))
        assert_same(side, twin)
        _assert_equal_state((state, optimizer_state), kept)  # nor what was loaded


@on_ranks(2)
@STAGES
def test_a_plain_optimizer_goes_on_from_the_state(stage: int) -> None:
    """One by one parameter, where a step count that several share would be counted up several times."""
    torch.manual_seed(3)
    module = Model()
    with Sharded(module, stage=stage) as side:
        train(side, range(2))
        plain = Model()
        plain.load_state_dict(side.engine.state_dict(only_rank_0=False))
        single = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1, foreach=False, fused=False)
        state = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)
        state["param_groups"][0].update(foreach=False, fused=False)
        single.load_state_dict(state)
        batch = tokens(2, rank=0)  # the same on all ranks
        for _ in range(2):
            side.backward(language_loss(module, batch))
            language_loss(plain, batch).backward()
            for optimizer in (side.optimizer, single):
                optimizer.step()
                optimizer.zero_grad()
        assert {entry["step"].item() for entry in single.state.values()} == {4}
        with lightning_zero.gather(module):
            for own, other in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def _assert_equal_state(own: object, other: object) -> None:
    assert type(own) is type(other)
    if isinstance(own, Tensor):
        assert isinstance(other, Tensor) and own.dtype == other.dtype and torch.equal(own, other)
    elif isinstance(own, dict):
        assert isinstance(other, dict) and own.keys() == other.keys()
        for key, value in own.items():
            _assert_equal_state(value, other[key])
    elif isinstance(own, (list, tuple)):
        assert isinstance(other, (list, tuple)) and len(own) == len(other)
        for a, b in zip(own, other, strict=True):
            _assert_equal_state(a, b)
    else:
        assert own == other
