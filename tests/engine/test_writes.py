"""What users' code writes to parameters is kept where all ranks write alike, and refused where they do not."""

from __future__ import annotations

import ast
import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine.passes.writes import CHUNK, checksum
from tests.engine.sides import Sharded, Side, Twin, sgd, step_and_clear, with_twin
from tests.engine.support import IN_STAGES, PRECISIONS, STAGES, assert_same, check
from tests.engine.test_offload import offload
from tests.engine.works import autocast, floats, language_work, loss_at, mean_square, scope, tokens, train_both
from tests.harness import on_ranks
from tests.models import VOCABULARY, WIDTH, Block, Clamped, Does, Model, frozen, linear, write

pytestmark = [pytest.mark.sample, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]

ROWS = pytest.mark.parametrize(
    ("stage", "row"), [(0, "none"), (1, "none"), (2, "optimizer_cpu"), (3, "none"), (3, "cpu"), (3, "nvme")]
)
ROUNDED = r"loses changes below 1/512 of a value. Set zero\.precision\.fp32_modules=\['"
WRITTEN_OTHERWISE = r": written to in a step, with other values"


def keep_in_masters(side: Side) -> None:
    """The twin's optimizer steps masters, which know nothing of what was written to parameters."""
    if isinstance(side, Twin):
        for param, master in side.masters.items():
            master.value.copy_(param.detach())


def kept(work: Callable[[Side, int], Tensor]) -> Callable[[Side, int], Tensor]:
    def and_kept(side: Side, step: int) -> Tensor:
        loss = work(side, step)
        keep_in_masters(side)
        return loss

    return and_kept


# -- in the forward ---------------------------------------------------------------------------------------------------


@on_ranks(2, full=(1, 3))
@ROWS
@pytest.mark.parametrize("how", ["in place", "data", "assigned"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.mainly(lambda stage, row, precision: (stage, row) == (3, "none") or precision == "fp32")
def test_writes_in_the_forward_are_kept(stage: int, row: str, how: str, precision: str, tmp_path: Path) -> None:
    """Under bf16 the twin would round its masters, so there they are compared with what was clamped."""
    settings = {"stage": stage, "unit": {"classes": ["Clamped"]}, "optimizer": sgd, **offload(row, tmp_path)}
    build = lambda: nn.Sequential(*(Clamped(how) for _ in range(3)))  # noqa: E731
    if precision == "fp32":
        check(build, kept(mean_square), steps=3, **settings)
        return
    torch.manual_seed(3)
    warned = pytest.warns(UserWarning, match=ROUNDED) if dist.get_rank() == 0 else contextlib.nullcontext()
    with Sharded(build(), precision=precision, **settings) as side, autocast(precision), warned:
        mean_square(side, 0)
        masters = [p for p in side.engine.state_dict(only_rank_0=False).values() if p.ndim == 2]
    bound = torch.tensor(0.15).bfloat16().float()
    assert all(p.abs().max() <= bound for p in masters)
    assert any((p.bfloat16().float() != p).any() for p in masters)  # others keep their digits


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_frozen_teacher_that_follows_is_refused_under_bf16_unless_it_keeps_fp32(stage: int) -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(m.teacher.parameters(), m.student.parameters(), strict=True):
                own.mul_(0.99).add_(other.detach(), alpha=0.01)
            seen = m.teacher(x)
        return m.student(x) - seen

    make = lambda: Does(act, student=Block(), teacher=Block().requires_grad_(False))  # noqa: E731
    weights = lambda: copy.deepcopy(side.engine.state_dict(only_rank_0=False))  # noqa: E731
    settings: dict[str, Any] = {"stage": stage, "unit": {"classes": ["Block"]}, "optimizer": sgd}
    own = {"name": "bf16", "fp32_modules": ["*Norm", "Does"]}
    with Sharded(make(), precision=own, **settings) as side, autocast("bf16"):
        with pytest.raises(RuntimeError, match=rf"teacher\.\S+: .*{ROUNDED}") as refused:
            mean_square(side, 0)
        side.engine.passes.abort()
        warned = pytest.warns(UserWarning, match=ROUNDED) if dist.get_rank() == 0 else contextlib.nullcontext()
        with warned, lightning_zero.gather(side.module), torch.no_grad():
            for param in side.module.teacher.parameters():
                param.mul_(0.99)
    advice = ast.literal_eval(str(refused.value).partition("fp32_modules=")[2].rstrip("."))
    assert advice == ["*Norm", "Does", "teacher.*"]  # what it replaces is in it
    with Sharded(make(), precision={"name": "bf16", "fp32_modules": advice}, **settings) as side:
        for step in range(3):
            before = weights()
            with autocast("bf16"):
                mean_square(side, step)
            for name, now in weights().items():
                if name.startswith("teacher"):
                    wanted = before[name].mul(0.99).add(before[name.replace("teacher", "student")], alpha=0.01)
                    torch.testing.assert_close(now, wanted, rtol=0, atol=4e-5)
            side.step()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("in_a_unit", [False, True])
def test_an_embedding_with_max_norm_whose_ranks_write_differently_is_refused(stage: int, in_a_unit: bool) -> None:
    module = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5), Block(), Block())
    unit = {"classes": ["Embedding", "Block"] if in_a_unit else ["Block"]}
    with Sharded(module, stage=stage, unit=unit) as side:
        loss = module(torch.arange(3) + 3 * dist.get_rank()).square().mean()
        with pytest.raises(RuntimeError, match=rf"0\.weight{WRITTEN_OTHERWISE}.*max_norm"):
            side.backward(loss)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("writer", [0, 1])
def test_a_write_on_the_rank_that_owns_all_of_it_is_refused_too(stage: int, writer: int) -> None:
    """What is written to is small, and lies in the shard of rank 0 alone."""

    def act(m: Any, x: Tensor) -> Tensor:
        if dist.get_rank() == writer:
            write(m.small, lambda small: small.clamp_(max=1.0), "in place")
        return m.rest(x) * m.small.sum()

    module = Does(act, small=nn.Parameter(torch.full((3,), 2.0)), rest=nn.Sequential(Block(), Block()))
    with Sharded(module, stage=stage) as side, pytest.raises(RuntimeError, match=f"small{WRITTEN_OTHERWISE}"):
        mean_square(side, 0)


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("how", "precision"),
    [("in place", "bf16"), ("data", "bf16"), ("assigned", "bf16"), ("data", "fp32"), ("data", "bf16_true")],
)
@pytest.mark.parametrize("writers", [{0, 1}, {1}])
def test_writes_that_differ_are_refused_on_all_ranks(stage: int, how: str, precision: str, writers: set[int]) -> None:
    """Unless they change nothing; also where the masters are the ranks' own slices of what is written to."""
    with Sharded(Model(), stage=stage, precision=precision) as side:
        for step, factor in enumerate((0, 1)):
            with side.engine.step_scope("train"), autocast(precision):
                if dist.get_rank() in writers:
                    change = factor * (dist.get_rank() + 1)
                    write(side.module.head.weight, lambda weight, by=change: weight.add_(by), how)
                loss = loss_at(side.module, step)
            refused = pytest.raises(RuntimeError, match=rf"head\.weight{WRITTEN_OTHERWISE}")
            with refused if factor else contextlib.nullcontext():
                side.backward(loss)
                step_and_clear(side)


@on_ranks(2, full=(3,))
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.filterwarnings("ignore:.*loses changes below")
def test_what_one_rank_writes_and_sends_to_the_others_is_kept(stage: int, precision: str) -> None:
    """The others receive it into the parameter itself, by a message that changes no version."""
    with Sharded(Model(), stage=stage, precision=precision, optimizer=sgd) as side:
        for step in range(3):
            weight = side.module.head.weight
            with side.engine.step_scope(), torch.no_grad():
                if dist.get_rank() == 0:
                    weight.mul_(0.5)
                dist.broadcast(weight, 0)
                wanted = weight.float()
                with torch.enable_grad(), autocast(precision):
                    language_work(side, step)
            masters = side.engine.state_dict(only_rank_0=False)
            assert torch.equal(masters["head.weight"].to(weight.dtype).float(), wanted)
            step_and_clear(side)
            for name, own in side.engine.state_dict(only_rank_0=False).items():
                of_rank_0 = own.clone()
                dist.broadcast(of_rank_0, 0)
                assert torch.equal(own, of_rank_0), name


def subtract(weight: Tensor) -> None:
    weight -= 1


def put(weight: Tensor) -> None:
    weight[0] = 1


def put_out(weight: Tensor) -> None:
    torch.add(torch.ones(()), 1, out=weight)


def put_in_a_list(weight: Tensor) -> None:
    torch._foreach_copy_([weight], [torch.ones(WIDTH)])


def average(weight: Tensor) -> None:
    weight.lerp_(torch.ones(()), 0.1)


@on_ranks(2)
@pytest.mark.parametrize("change", [subtract, put, put_out, put_in_a_list, average, nn.init.zeros_])
def test_no_write_reaches_a_placeholder(change: Callable[[Tensor], Any]) -> None:
    """Wherever weights are used without being gathered."""
    refused = pytest.raises(RuntimeError, match="would write to a placeholder of a sharded parameter")
    with Sharded(Model(), stage=3) as side, side.engine.passes.fence.lowered(), torch.no_grad(), refused:
        change(side.module.blocks[0].norm.weight)


def codebook(kind: str, how: str) -> nn.Module:
    """A block that quantises, and moves its codebook in each forward, alike on all ranks."""

    def act(m: Any, x: Tensor) -> Tensor:
        h = m.inner(x)
        nearest = torch.cdist(h.detach(), m.codes.detach()).argmin(1)
        x = x + h + (m.codes[nearest] - h).detach() * h.tanh()
        with torch.no_grad():
            moved = m.codes * 0.5 + 0.1
            (m.codes.data if how == "data" else m.codes).copy_(moved)
        return x

    codes = torch.randn(5, WIDTH)
    module = Does(act, inner=linear())
    if kind == "buffer":
        module.register_buffer("codes", codes)
    else:
        module.codes = nn.Parameter(codes, requires_grad=False)
    return module


@on_ranks(2)
@IN_STAGES
@pytest.mark.parametrize("how", ["in place", "data"])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_block_computed_again_starts_from_what_it_wrote_to(stages: tuple[int, ...], kind: str, how: str) -> None:
    again: dict[str, Any] = {"activation_checkpointing": "blocks", "unit": {"classes": ["Does"]}}
    build = lambda: nn.Sequential(linear(), codebook(kind, how), codebook(kind, how))  # noqa: E731
    check(build, kept(mean_square), steps=3, stage=stages, optimizer=sgd, **again)


# -- between forward and forward --------------------------------------------------------------------------------------


@on_ranks(2, full=(3,))
@ROWS
@pytest.mark.parametrize("how", ["in place", "data"])
@pytest.mark.parametrize("unit", ["Block", "Model"])
@pytest.mark.mainly(lambda stage, how: stage == 3 or how == "in place")
def test_writes_after_a_step_inside_of_a_step_are_kept(
    stage: int, row: str, how: str, unit: str, tmp_path: Path
) -> None:
    """As in ``training_step`` with manual optimization: clamped critics, averaged targets, which are frozen."""

    def work(side: Side, step: int) -> Tensor:
        with scope(side):
            loss = language_work(side, step)
            step_and_clear(side)
            for param in side.module.parameters():
                write(param, lambda value: value.clamp_(-0.2, 0.2), how)
            keep_in_masters(side)
        return loss

    build = lambda: frozen("blocks.1")  # noqa: E731
    check(build, work, stage=stage, steps=3, unit={"classes": [unit]}, **offload(row, tmp_path))


# -- assigning --------------------------------------------------------------------------------------------------------


@on_ranks(2, full=(1, 3))
@ROWS
@PRECISIONS
@pytest.mark.parametrize("right_after_a_step", [False, True])
@pytest.mark.mainly(lambda stage, row, precision: (stage, row) == (3, "none") or precision == "bf16")
def test_data_that_is_assigned_is_kept(
    stage: int, row: str, precision: str, right_after_a_step: bool, tmp_path: Path
) -> None:
    """What a good deal of old code does; the values are taken over, unrounded."""
    with with_twin(stage=stage, precision=precision, **offload(row, tmp_path)) as (sharded, twin):
        params = dict(sharded.module.named_parameters())
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for i, (param, (other, master)) in enumerate(zip(params.values(), twin.masters.items(), strict=True)):
                if step and (i + step) % 3:
                    value = torch.randn(master.value.shape, generator=generator).to(master.value.dtype)
                    param.data = value
                    master.value.copy_(value)
                low = precision != "fp32" and other.ndim > 1
                other.data.copy_(master.value.to(torch.bfloat16) if low else master.value)
            if not right_after_a_step:
                assert_same(sharded, twin, what=f"step {step}: ")
            train_both((sharded, twin), [step])
        assert_same(sharded, twin)
        assert [name for name, _ in sharded.module.named_parameters()] == list(params)


@on_ranks(2)
@STAGES
def test_data_that_was_read_keeps_its_values_when_other_data_is_assigned(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side, scope(side):
        weight, average = side.module.head.weight, torch.full_like(side.module.head.weight, 0.5)
        before, kept = weight.data.clone(), weight.data
        weight.data, average = average, weight.data
        assert torch.equal(kept, before) and torch.equal(average, before) and (weight == 0.5).all()


@on_ranks(2)
@pytest.mark.parametrize(
    ("stage", "row", "precision"), [(0, "none", "bf16"), (2, "none", "bf16"), (1, "optimizer_cpu", "fp32")]
)
def test_data_that_was_read_in_a_step_is_written_to_after_it(stage: int, row: str, precision: str) -> None:
    with Sharded(Model(), stage=stage, offload=row, precision=precision) as side:
        language_work(side, 0)
        kept = side.module.head.weight.data
        side.step()
        before = side.engine.state_dict(only_rank_0=False)["head.weight"]
        kept.mul_(0.5)
        after = side.engine.state_dict(only_rank_0=False)["head.weight"]
        torch.testing.assert_close(after, before * 0.5, rtol=1e-2 if precision == "bf16" else 1e-6, atol=1e-6)


@on_ranks(2)
def test_data_that_was_read_in_a_step_touches_no_freed_memory_after_it() -> None:
    with Sharded(Model(), stage=3) as side:
        loss = side.module(tokens(0)).square().mean()
        kept, row = side.module.head.weight.data, side.module.blocks[0].up.weight.data[0]
        assert kept.isfinite().all()
        with (
            pytest.warns(UserWarning, match="views of its .data") if dist.get_rank() == 0 else contextlib.nullcontext()
        ):
            side.backward(loss)
        assert kept.isnan().all()
        with pytest.raises(RuntimeError, match="single memory location"):
            kept.mul_(2)
        for step in range(2):
            row.mul_(2)  # its memory is still there
            side.backward(side.module(tokens(step)).square().mean())
        del row
        side.backward(side.module(tokens(0)).square().mean())
        assert not any(bucket.full.allocated for bucket in side.engine.buckets)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("how", ["assigned inside gather", "of another rank", "loaded"])
def test_a_backward_of_values_that_were_replaced_is_refused(stage: int, how: str) -> None:
    """Plain graphs may hold the memory of before; ours is one buffer that is written to."""
    with Sharded(Model(), stage=stage) as side:
        weight = side.module.head.weight
        loss = side.module(tokens(0)).square().mean()
        if how == "assigned inside gather":
            with lightning_zero.gather(side.module):
                weight.data = torch.full(weight.shape, 0.5)
        elif how == "of another rank":
            with lightning_zero.gather(side.module, from_rank=1):
                weight.data.fill_(float(dist.get_rank()))
        else:
            state = side.engine.state_dict(only_rank_0=False)
            side.engine.load_state_dict({name: value * 0.5 for name, value in state.items()})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            side.backward(loss)
        side.engine.passes.abort()
        language_work(side, 0)


def assigned_in_step(side: Side, step: int) -> Tensor:
    """Assigns between a forward and its backward, to weights that autograd has saved themselves (of a convolution and a
    norm) and to those of which it has saved views (of linear layers), and uses the new values."""
    with scope(side):
        x = floats(step, 2, 4, 6)
        loss = side.module(x).square().mean()
        for i, param in enumerate(side.module.parameters()):
            if (i + step) % 3:
                param.data = param.data * 0.9
        loss = loss + side.module(x + 1).square().mean()
        last = list(side.module.parameters())[-2]
        last.data = last.detach().clamp(-0.2, 0.2)
        last.data.mul_(1.1)
        loss = loss + 0.1 * last.square().sum()
        keep_in_masters(side)
        side.backward(loss)
    return loss


def some_layers() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


@on_ranks(2, full=(1,))
@IN_STAGES
@pytest.mark.parametrize("row", ["none", pytest.param("optimizer_cpu", marks=pytest.mark.full)])
def test_a_backward_after_assignments_to_data_is_that_of_torch(stages: tuple[int, ...], row: str) -> None:
    """New values where autograd has saved the parameter, old ones where it has saved a view."""
    units = {"classes": ["Conv1d", "LayerNorm", "Linear"]}
    for each in stages[row != "none" :]:  # stage 0 has nothing to offload
        check(some_layers, assigned_in_step, stage=each, steps=3, unit=units, offload=row)
    check(some_layers, assigned_in_step, stage=stages, steps=2)


@on_ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32")])
@pytest.mark.filterwarnings("ignore:.*loses changes below")
def test_assignments_to_data_are_kept_whatever_follows(stage: int, precision: str) -> None:
    """No backward, an exception, a write to what was read after the assignment."""
    with (
        autocast(precision),
        Sharded(some_layers(), stage=stage, precision=precision, unit={"classes": ["Linear"]}) as side,
    ):
        weight = side.module[4].weight

        def found() -> float:
            return float(side.engine.state_dict(only_rank_0=False)["4.weight"].unique())

        with scope(side):
            side.module(floats(0, 2, 4, 6))
            weight.data = torch.full_like(weight, 0.25)
        assert found() == 0.25
        with pytest.raises(ZeroDivisionError), scope(side):
            side.module(floats(0, 2, 4, 6))
            weight.data = torch.full_like(weight, 0.5)
            raise ZeroDivisionError
        assert found() == 0.5
        with scope(side):
            loss = side.module(floats(0, 2, 4, 6)).sum()
            weight.data = torch.full_like(weight, 0.75)
            later = weight.data
            side.backward(loss)
        if stage < 3:  # at stage 3 it is a placeholder after the step
            later.mul_(2)
        assert found() == (1.5 if stage < 3 else 0.75)


@on_ranks(2)
def test_a_teacher_that_is_assigned_in_a_step_takes_no_memory_of_its_own() -> None:
    with Sharded(nn.ModuleList([some_layers(), some_layers()]), unit={"classes": ["Linear"]}) as side, scope(side):
        student, teacher = side.module
        with torch.no_grad():
            target = teacher(floats(0, 2, 4, 6))
        loss = (student(floats(0, 2, 4, 6)) - target).square().mean()
        for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
            own.data = 0.9 * own.data + 0.1 * other.data
        in_units = [bucket for unit in side.engine.units[1:] for bucket in unit.buckets]
        assert in_units and not any(bucket.assigned for bucket in in_units)
        side.backward(loss)


@on_ranks(2)
@STAGES
@pytest.mark.parametrize("inside_gather", [False, True])
def test_data_of_another_shape_is_refused(stage: int, inside_gather: bool) -> None:
    with Sharded(Model(), stage=stage) as side:
        weight = side.module.head.weight
        shown = lightning_zero.gather(side.module) if inside_gather else contextlib.nullcontext()
        words = r"head\.weight\.data = .*expected a tensor of shape .*, got \(3,\)"
        with pytest.raises(RuntimeError, match=words), shown:
            weight.data = torch.zeros(3)
        language_work(side, 0)


@on_ranks(2)
@pytest.mark.parametrize(("how", "stage"), [("assigned", 1), ("assigned", 3), ("in place", 1)])
def test_writes_that_differ_are_refused_before_values_are_saved(how: str, stage: int) -> None:
    with Sharded(Model(), stage=stage) as side, torch.no_grad():
        weight = side.module.head.weight
        if how == "assigned":
            weight.data = torch.full(weight.shape, float(dist.get_rank()))
        else:
            weight.fill_(float(dist.get_rank()))
        with pytest.raises(RuntimeError, match=r"head\.weight: written to"):
            side.engine.state_dict()


@on_ranks(2)
@pytest.mark.parametrize("writer", [0, 1])
def test_what_one_rank_writes_inside_gather_is_refused_whoever_owns_the_shard(writer: int) -> None:
    """A rank keeps its own shard only, so that the writes of others to it would be lost without a word."""
    for stage in (2, 3):
        with Sharded(Model(), stage=stage) as side:
            for name, param in side.module.named_parameters():
                with (
                    pytest.raises(RuntimeError, match=rf"^{re.escape(name)}: written to inside gather\(\), with other"),
                    lightning_zero.gather(side.module),
                ):
                    if dist.get_rank() == writer:
                        param.data[-1:].mul_(0.5).add_(0.25)
            language_work(side, 0)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("open_pass", [False, True])
def test_writes_that_differ_are_refused_before_the_sharding_is_undone(stage: int, open_pass: bool) -> None:
    with Sharded(Model(), stage=stage) as side:
        module, engine = side.module, side.engine
        with engine.step_scope(evaluation=not open_pass):
            with torch.no_grad():
                module.head.weight.fill_(float(dist.get_rank()))
            module(tokens(0))
        with pytest.raises(RuntimeError, match=r"head\.weight: written to"):
            engine.release()
        language_work(side, 0)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_after_an_exception_the_sharding_can_be_undone_whatever_was_written(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side, pytest.raises(ZeroDivisionError), side.engine.step_scope():
        write(side.module.head.weight, lambda weight: weight.fill_(float(dist.get_rank())), "in place")
        side.module(tokens(0))
        raise ZeroDivisionError
    assert type(side.module.head.weight) is nn.Parameter


# -- checksums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_checksums_of_parts_add_up_and_tell_places_apart(dtype: torch.dtype) -> None:
    values = torch.randn(CHUNK + 5, dtype=torch.float64).mul(50).to(dtype)
    cuts = [0, 7, 7, CHUNK - 3, CHUNK + 5]
    parts: Callable[[int], int] = lambda i: checksum(values[cuts[i] : cuts[i + 1]], cuts[i])  # noqa: E731
    assert sum(parts(i) for i in range(4)) & 0xFFFFFFFFFFFFFFFF == checksum(values)
    swapped = values.clone()
    swapped[[3, 9]] = values[[9, 3]]
    assert torch.equal(swapped, values) or checksum(swapped) != checksum(values)
    assert checksum(values.clone()) == checksum(values)
