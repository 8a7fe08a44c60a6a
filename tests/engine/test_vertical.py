"""Vertical accumulation: units in chunks equal ordinary accumulation, with fewer gathers and reductions."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine import Engine, gather
from lightning_zero.engine.vertical.chunked import CannotDivide
from lightning_zero.layerwise.loss import chunks_of
from lightning_zero.settings import ConfigError
from tests.engine.test_offload import offload
from tests.engine.works import autocast, language_loss, loss_at, tokens
from tests.harness import on_ranks
from tests.models import VOCABULARY, Does, Dropping, Layers, Model, linear, of_transformers
from tests.selection import pairwise_places

K = 4
ROWS = 8
CASES = [
    {"stage": stage, "precision": precision, "offload": offload, "how": how}
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16", "bf16_true")
    for offload in ("none", "optimizer_cpu", "cpu", "optimizer_nvme", "nvme")
    for how in ("blocks", "offload")
    if not (stage == 0 and offload != "none") and not (stage < 3 and offload in ("cpu", "nvme"))
]


def vertical(module: nn.Module, *, k: int = K, how: str = "blocks", **settings: Any) -> Engine:
    return lightning_zero.shard(module, vertical_chunks=k, activation_checkpointing=how, device="cpu", **settings)


ordinary = functools.partial(vertical, k=1)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    with gather(module, grads=True):
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def compare(
    make: Callable[[], nn.Module], batch: Tensor, *, loss: Any = language_loss, of_all: bool = False, **settings: Any
) -> tuple[Counter[str], Counter[str]]:
    """Gradients of ordinary and of vertical accumulation are the same; what was sent for the second block."""
    found: list[dict[str, Tensor]] = []
    sent: list[Counter[str]] = []
    precision = settings.get("precision", "fp32")
    for shard, parts in ((ordinary, K), (vertical, 1)):
        torch.manual_seed(3)
        module = make()
        engine = shard(module, **settings)
        for part in batch.chunk(parts):
            with autocast(precision):
                value = loss(module, part) / parts
            value.backward()
        sent.append(Counter())
        for (kind, label), number in engine.comm.counts.items():
            sent[-1][kind] += number * ("blocks.1" in label)
        found.append(gradients(module))
        engine.release()
    assert_close(*found, NEAR[precision], of_all=of_all)
    return sent[0], sent[1]


NEAR = {"fp32": 1e-6, "bf16": 2e-2, "bf16_true": 4e-2}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], near: float = 1e-6, *, of_all: bool = False) -> None:
    """
    Args:
        of_all: beside the largest gradient of all, in place of the parameter's own.
    """
    assert one.keys() == other.keys() and one
    for name, grad in one.items():
        largest = max(g.abs().max().item() for g in (one.values() if of_all else [grad]))
        assert (grad - other[name]).abs().max().item() <= near * max(largest, 1e-2), name


@contextlib.contextmanager
def released(module: nn.Module, **settings: Any) -> Iterator[Engine]:
    engine = vertical(module, **{"stage": 3, **settings})
    yield engine
    engine.release()


@contextlib.contextmanager
def beside_plain(build: Callable[[], nn.Module], *, near: float = 1e-6, **settings: Any) -> Iterator[Any]:
    """A module, a plain copy and the engine; in the end their gradients are the same, averaged over the ranks."""
    torch.manual_seed(0)
    module, plain = build(), build()
    plain.load_state_dict(module.state_dict())
    with released(module, **settings) as engine:
        yield module, plain, engine
        expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        for grad in expected.values() if dist.is_initialized() else ():
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        assert_close(expected, gradients(module), near)


def of_rank(*shape: int) -> Tensor:
    seed = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@on_ranks(2, full=[4])
@pytest.mark.sample
@pytest.mark.parametrize(
    "case", [CASES[place] for place in pairwise_places(CASES)], ids=lambda c: "-".join(map(str, c.values()))
)
def test_gradients_are_those_of_ordinary_accumulation(case: dict[str, Any], tmp_path: Path) -> None:
    compare(Model, tokens(0, rows=ROWS), **case | offload(case["offload"], tmp_path))


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_unit_is_gathered_twice_and_reduced_once(stage: int) -> None:
    of_ordinary, of_vertical = compare(Model, tokens(0, rows=ROWS), stage=stage)
    reduction = "all_reduce" if stage == 0 else "reduce_scatter"
    assert (of_ordinary[reduction], of_vertical[reduction]) == (K, 1)
    gathers = (of_ordinary["all_gather"], of_vertical["all_gather"])
    assert gathers == ((2 * K, 2) if stage == 3 else (0, 0))


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_of_no_sync_add_up(stage: int) -> None:
    with beside_plain(Model, stage=stage) as (module, plain, engine):
        with engine.passes.no_sync():
            loss_at(module, 0, rows=ROWS).backward()
        loss_at(module, 1, rows=ROWS).backward()
        for step in (0, 1):
            loss_at(plain, step, rows=ROWS).backward()
        counts = engine.comm.counts.items()
        reductions = sum(number for (kind, label), number in counts if "reduce" in kind and "blocks.1" in label)
        assert reductions == (2 if stage == 3 else 1)


def test_a_chunk_draws_the_same_numbers_again() -> None:
    """Equal to blocks that are called chunk by chunk with a graph; what follows draws what it would draw."""
    with beside_plain(lambda: Layers(Dropping(), Dropping()), offload="cpu") as (module, plain, _):
        x = torch.randn(ROWS, 8)
        torch.manual_seed(5)
        module(x).backward()
        after = torch.rand(3)
        torch.manual_seed(5)
        y = plain.enter(x)
        for block in plain.blocks:
            y = torch.cat([block(part) for part in y.chunk(K)])
        y.square().mean().backward()
        assert torch.equal(after, torch.rand(3))


def test_a_weight_that_was_cast_without_a_graph_has_a_gradient_under_autocast_around_all_of_a_step() -> None:
    """It would be found in the cache."""
    with beside_plain(lambda: Layers(Dropping(), Dropping()).eval(), near=NEAR["bf16"]) as (module, plain, _):
        x = torch.randn(ROWS, 8)
        for side in (plain, module):
            with torch.autocast("cpu", torch.bfloat16):
                side(x).backward()


def test_gradients_of_chunks_are_added_in_fp32() -> None:
    def act(m: Any, x: Tensor) -> Tensor:
        table = m.table * 1
        for block in m.blocks:
            x = block(x, table)
        return x.sum()

    class Scales(Does):
        """A unit."""

    scales = [Scales(lambda m, x, t: x * m.weight * t, weight=nn.Parameter(torch.ones(1))) for _ in range(2)]
    module = Does(act, table=nn.Parameter(torch.ones(1, 1)), blocks=nn.ModuleList(scales))
    with released(module, k=ROWS, precision="bf16_true", offload="cpu", unit={"classes": ["Scales"]}):
        x = torch.full((ROWS, 1), 2.0**-9, dtype=torch.bfloat16)
        x[0] = 1  # in bf16, 1 + 2 ** -9 is 1
        module(x).backward()
        exact = torch.tensor(1 + 7 * 2.0**-9)
        assert exact.bfloat16() > 1
        for name, grad in gradients(module).items():
            of_blocks = 2 if name == "table" else 1
            assert torch.allclose(grad.float().flatten(), of_blocks * exact, rtol=2.0**-9), name


def test_the_batch_of_a_step_is_that_of_its_scope_alone() -> None:
    module = Layers(Dropping(), Dropping())
    with released(module) as engine:
        with engine.step_scope(), engine.forwards.vertical.step(torch.randn(ROWS, 8), evaluation=False):
            with pytest.raises(CannotDivide, match=rf"the batch \({ROWS}\)"):
                module(torch.randn(2 * ROWS, 8))
            loss = module(torch.randn(ROWS, 8))
        engine.passes.backward(loss)
        module(torch.randn(2 * ROWS, 8)).backward()


# -- what a unit may be given, and give ------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    hidden: Tensor
    loss: Tensor
    note: str = "same"


def wide(m: Any, pair: Any, *, options: dict[str, Any], mask: Tensor, table: Tensor, none: None = None) -> Any:
    """Tuples, dicts, keywords and None; a mask for all; a table with a gradient; an input that is passed on."""
    x, weight = pair
    y = m.inner(x) * mask + weight[:, None] * options["scale"] + table
    return Result(y, y.square().mean()), (mask, x.shape[1], {"flat": y.flatten(), "long": (y > 0).long()})


def uses_wide(m: Any, x: Tensor, weight: Tensor) -> Tensor:
    mask = torch.arange(8.0)[None]
    x, total = m.enter(x), torch.zeros(())
    for block in m.blocks:
        options = {"scale": torch.full((len(x), 1), 0.5)}
        result, (same, width, more) = block((x, weight), options=options, mask=mask, table=torch.tanh(m.table))
        assert same is mask and width == 8 and result.note == "same"
        assert more["flat"].shape == (8 * len(x),) and more["long"].dtype == torch.int64
        x, total = result.hidden, total + 0.1 * result.loss + more["flat"].mean()
    return x.square().mean() + total


@on_ranks(2)
@pytest.mark.parametrize("how", ["blocks", "offload"])
def test_inputs_and_outputs_may_be_nested(how: str) -> None:
    torch.manual_seed(dist.get_rank())
    x, weight = torch.randn(ROWS, 8), torch.randn(ROWS)

    def build() -> nn.Module:
        blocks = nn.ModuleList(Does(wide, inner=linear(8)) for _ in range(2))
        return Does(uses_wide, enter=linear(8), table=nn.Parameter(torch.randn(1, 8)), blocks=blocks)

    loss = lambda module, rows: module(x[rows], weight[rows])  # noqa: E731
    compare(build, torch.arange(ROWS), loss=loss, stage=3, how=how)


def tied() -> nn.Module:
    """A weight that two blocks and the root share; a block that is called twice; a frozen block and parameter."""
    blocks = [Dropping().eval() for _ in range(4)]
    module = Layers(*blocks, blocks[3])
    module.enter.weight = blocks[1].inner.weight = blocks[0].inner.weight
    blocks[2].requires_grad_(False)
    blocks[3].inner.bias.requires_grad_(False)
    return module


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_shared_repeated_and_frozen_parameters_train(stage: int) -> None:
    compare(tied, of_rank(ROWS, 8), loss=lambda module, part: module(part), stage=stage)


@on_ranks(2)
def test_a_block_that_is_thawed_trains() -> None:
    with beside_plain(Model) as (module, plain, _):
        for step, frozen in enumerate((True, False)):
            for side in (module, plain):
                side.blocks[0].requires_grad_(not frozen)
                loss_at(side, step, rows=ROWS).backward()


def test_what_a_graph_of_chunks_cannot_follow_is_refused() -> None:
    """Parameters that are toggled before the backward, and gradients of inputs alone."""
    module = Model()
    with released(module):
        loss = loss_at(module, 0, rank=0, rows=ROWS)
        with pytest.raises(RuntimeError, match="loss.backward"):
            torch.autograd.grad(loss, [module.embed.weight])
    with released(module):
        loss = loss_at(module, 0, rank=0, rows=ROWS)
        module.blocks[1].requires_grad_(False)
        with pytest.raises(RuntimeError, match="requires_grad of its parameters has changed"):
            loss.backward()


@pytest.mark.full
@on_ranks(2)
def test_compiled_blocks() -> None:
    compiled = {"name": "blocks", "arguments": {"backend": "aot_eager"}}
    _, counts = compare(Model, tokens(0, rows=ROWS), stage=3, compile=compiled)
    assert counts["all_gather"] == 2


@pytest.mark.parametrize("k", [2, K])
def test_evaluation_is_in_chunks_where_the_batch_divides(k: int) -> None:
    module = Model()
    sizes: list[int] = []
    module.blocks[1].up.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    with released(module, k=k), torch.no_grad():
        module(tokens(0, rank=0, rows=ROWS))
        sizes.clear()  # of a trial, too
        module(tokens(0, rank=0, rows=ROWS))
        module(tokens(0, rank=0, rows=ROWS + 1))
    assert sizes == [ROWS // k] * k + [ROWS + 1]


def test_a_block_keeps_its_inputs_only() -> None:
    """Autograd holds one input for each unit, and what the root needs."""
    plain = Model(depth=6)
    module = copy.deepcopy(plain)
    with released(module):
        kept = saved_nbytes(module)
    inputs = 6 * ROWS * 7 * 19 * 4
    rest = 3 * ROWS * 7 * (VOCABULARY + 19) * 4 + sum(p.numel() * 4 for p in Model(depth=0).parameters())
    assert inputs <= kept <= inputs + rest < saved_nbytes(plain) / 2


def saved_nbytes(module: nn.Module) -> int:
    storages: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss_at(module, 0, rank=0, rows=ROWS)
    return sum(storages.values())


# -- refused ---------------------------------------------------------------------------------------------------------


class Norm(Does):
    def __init__(self, inner: nn.Module | None = None) -> None:
        weight = nn.Parameter(torch.ones(8))
        super().__init__(lambda m, x: x + m.inner(x) * m.weight, inner=inner or nn.BatchNorm1d(8), weight=weight)


def counts() -> nn.Module:
    def act(m: Any, x: Tensor) -> Tensor:
        m.seen += 1
        return m.inner(x)

    return Does(act, inner=linear(8), seen=nn.Buffer(torch.zeros(())))


@dataclasses.dataclass
class Memory:
    """As a cache of keys and values is one."""

    keys: Tensor | None = None


def gives(what: str) -> nn.Module:
    """A block that does what cannot be divided."""

    def act(m: Any, x: Tensor, collected: list[Tensor] | None = None, memory: Memory | None = None) -> Any:
        y = m.inner(x)
        if what == "vector":
            return y, y.sum(0)[:3]
        if what == "number":
            return y, x.sum().item()
        if what == "in place":
            x.add_(1)
        if what == "keeps":
            m.kept = y
        if what == "collects" and collected is not None:
            collected.append(y)
        if what == "remembers" and memory is not None:
            memory.keys = y.detach()
        return y

    return Does(act, inner=linear(8))


def passes(what: str) -> nn.Module:
    def act(m: Any, x: Tensor) -> Tensor:
        found = m.blocks[0](m.enter(x), [], Memory())
        return (found[0] if isinstance(found, tuple) else found).mean()

    return Does(act, enter=linear(8), blocks=nn.ModuleList([gives(what), gives("nothing")]))


DROPPING = [Dropping(), Dropping()]


@pytest.mark.parametrize(("blocks", "settings", "words"), [
    ([Norm(), Norm()], {}, r"blocks\.0 \(Norm\) holds inner \(BatchNorm1d\).*\{'whole_batch': \['BatchNorm1d'\]"),
    ([Norm(nn.GRU(8, 8)), Norm(nn.GRU(8, 8))], {}, "batch_first=False"),
    (DROPPING, {"unit": {"whole_batch": ["Norn"]}}, r"whole_batch'\]: expected class names.*'Norn'"),
    (DROPPING, {"unit": {"whole_batch": ["Dropping"]}}, "none of whose units do"),
    (DROPPING, {"how": "none"}, "activation_checkpointing='blocks', or 'offload'"),
    (DROPPING, {"k": 1, "unit": {"whole_batch": ["Norm"]}}, "has no effect with vertical_chunks=1"),
    (DROPPING, {"k": 0}, "^vertical_chunks"),
])  # fmt: skip
def test_refused_before_anything_is_sharded(blocks: list[nn.Module], settings: dict[str, Any], words: str) -> None:
    module = Layers(*blocks)
    with pytest.raises(ConfigError, match=words):
        vertical(module, **{"stage": 3, **settings})
    assert all(type(p) is nn.Parameter for p in module.parameters())


def hooked() -> nn.Module:
    """With a hook that would be shown the gradient of a chunk."""
    module = Layers(Dropping(), Dropping()).eval()
    module.blocks[1].inner.weight.register_post_accumulate_grad_hook(lambda p: None)
    return module


TURNED = Does(lambda m, x: m.layers(x.transpose(0, 1)), layers=Layers(Dropping(), Dropping()))


@pytest.mark.parametrize(("module", "x", "words"), [
    (Layers(Dropping(), Dropping()), torch.randn(6, 8), "divides by zero.vertical_chunks=4, got 6 samples"),
    (Layers(counts(), counts()), torch.randn(ROWS, 8), r"changes the buffer seen of Does"),
    (passes("vector"), torch.randn(ROWS, 8), r"a result \[3\] with one that is not of samples"),
    (passes("number"), torch.randn(ROWS, 8), "results with other numbers"),
    (passes("in place"), torch.randn(ROWS, 8), "changes an input in place"),
    (passes("keeps"), torch.randn(ROWS, 8), "leaves it by another way than its results"),
    (passes("collects"), torch.randn(ROWS, 8), "changes a list, a dict or an object"),
    (passes("remembers"), torch.randn(ROWS, 8), "changes a list, a dict or an object"),
    (TURNED, torch.randn(4, 8, 8), r"dimension is the batch \(4\), got \[8, 4, 8\]"),
    (hooked(), torch.randn(ROWS, 8), r"hook .* on blocks\.1\.inner\.weight"),
])  # fmt: skip
def test_refused_in_a_step(module: nn.Module, x: Tensor, words: str) -> None:
    with released(module, offload="cpu"), pytest.raises(RuntimeError, match=words):
        module(x).backward()


def test_an_evaluation_does_not_change_buffers_chunk_by_chunk() -> None:
    module = Layers(counts(), counts())
    with released(module, offload="cpu"), torch.no_grad():
        with pytest.raises(RuntimeError, match=r"changes the buffer seen of Does"):
            module(torch.randn(ROWS, 8))
        assert module(torch.randn(ROWS + 1, 8)).isfinite()


@pytest.mark.parametrize("compile", ["none", {"name": "blocks", "arguments": {"backend": "eager"}}], ids=type)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_runs_a_unit_whole_that_keeps_a_tensor_and_training_refuses_it(compile: Any, mode: Any) -> None:
    module, x = passes("keeps").eval(), torch.randn(ROWS, 8)
    with released(module, offload="cpu", compile=compile):
        with mode():
            module(x)
        assert module.blocks[0].kept.shape == (ROWS, 8)
        with pytest.raises(CannotDivide, match="leaves it by another way than its results"):
            module(x)


def test_an_error_in_a_chunk_says_what_was_divided() -> None:
    module = Layers(*(Does(lambda m, x: m.inner(x).view(ROWS, 8), inner=linear(8)) for _ in range(2)))
    with released(module, unit={"classes": ["Does"]}), pytest.raises(RuntimeError, match="is invalid") as raised:
        module(torch.randn(ROWS, 8))
    assert raised.value.__notes__ == [
        "unit blocks.0 was being run in 4 chunks: Of its inputs, [8, 8] are divided along their first dimension."
    ]


def test_units_on_the_whole_batch_are_not_divided() -> None:
    """Batch norms see the batch, and their gradients are those of an ordinary step on it."""
    build = lambda: Layers(Norm(), Dropping().eval(), Norm())  # noqa: E731
    whole = {"classes": ["Norm", "Dropping"], "whole_batch": ["BatchNorm1d"]}
    with beside_plain(build, unit=whole, offload="cpu") as (module, plain, _):
        x = torch.randn(ROWS, 8)
        module(x).backward()
        plain(x).backward()
        buffers = list(zip(module.buffers(), plain.buffers(), strict=True))  # moved once, though computed twice
        before_chunks = buffers[: len(buffers) // 2]
        assert all(torch.equal(buffer, other) for buffer, other in before_chunks)
        # A product of two rows may round otherwise than one of eight, by the processor's kernels.
        assert all(torch.allclose(buffer, other, rtol=0, atol=1e-6) for buffer, other in buffers)


# -- faults ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("again", [False, True])
def test_an_exception_in_a_chunk_leaves_the_engine_usable(again: bool) -> None:
    """At a chunk of the first forward behind the trial, or of the second."""
    fails_at, calls = (again, 2 if again else 4), Counter[bool]()

    def act(m: Any, x: Tensor) -> Tensor:
        is_again = torch.is_grad_enabled()
        number = calls[is_again]
        calls[is_again] += 1
        if (is_again, number) == fails_at:
            raise ValueError("a fault")
        return x + m.inner(x)

    with beside_plain(lambda: Layers(*(Does(act, inner=linear(8)) for _ in range(2)))) as (module, plain, engine):
        x = of_rank(ROWS, 8)
        with pytest.raises(ValueError, match="a fault"):
            module(x).backward()
        fails_at = (False, -1)
        assert engine.passes.sums is None
        module.zero_grad()
        module(x).backward()
        plain(x).backward()


# -- a head and its loss ---------------------------------------------------------------------------------------------


class Selects(Model):
    """The loss of the first tokens only, whose number may not divide; of which some are ignored."""

    most: int = 0  # logits at a time

    def forward(self, batch: Tensor, *, count: int, chunks: int | None = None, plain: bool = False) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        targets = batch.roll(1, 1).masked_fill(batch % 3 == 0, -100).flatten()[:count]
        hidden = x.flatten(0, 1)[:count]
        if plain:
            return F.cross_entropy(self.head(hidden).float(), targets)
        return lightning_zero.chunked_loss(self.head, None, hidden, targets, chunks=chunks)


@on_ranks(2)
@pytest.mark.parametrize("classes", [["Block"], ["Block", "Linear"]], ids=["head in the root", "head is a unit"])
def test_the_loss_in_chunks_is_that_of_the_whole(classes: list[str]) -> None:
    """Of any number of tokens: also of less than the number of chunks, on one rank alone; and in one chunk."""
    for count, chunks in ((56, None), (53, None), (3 + 50 * dist.get_rank(), None), (56, 1)):
        if "Linear" not in classes and count != 56:
            continue
        with beside_plain(Selects, unit={"classes": classes}) as (module, plain, engine):
            module.head.register_forward_hook(lambda _, args, out, m=module: setattr(m, "most", max(m.most, len(out))))
            assert any(unit.name == "head" for unit in engine.units) == ("Linear" in classes)
            assert chunks_of(module.head) == K
            batch = tokens(0, rows=ROWS)
            loss, expected = module(batch, count=count, chunks=chunks), plain(batch, count=count, plain=True)
            assert torch.allclose(loss, expected, rtol=1e-6)
            loss.backward()
            expected.backward()
            assert 0 < module.most < ROWS * 7 / 2 or chunks == 1
            if (count, chunks) == (56, None):  # a head that is a unit stays from its first chunk on
                sent = [n for (kind, label), n in engine.comm.counts.items() if "head" in label]
                assert set(sent) <= {1}


def test_ignored_tokens_do_not_count_whatever_the_loss() -> None:
    """A loss of the user's that is not 0 for them; chunks in which all are ignored; parameters of the loss."""

    def act(m: Any, logits: Tensor, targets: Tensor) -> Tensor:
        z = logits.logsumexp(-1).square() * m.scale
        return z + F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)

    torch.manual_seed(0)
    head, loss = nn.Linear(5, 7).requires_grad_(False), Does(act, scale=nn.Parameter(torch.tensor(0.7)))
    hidden, targets = torch.randn(6, 4, 5), torch.randint(0, 7, (6, 4))
    targets[:3] = targets[4, 1] = -100
    found = lightning_zero.chunked_loss(head, loss, hidden, targets, chunks=6)
    kept = targets != -100
    wanted = loss(head(hidden[kept]), targets[kept]).mean()
    assert torch.allclose(found, wanted)
    (expected,) = torch.autograd.grad(wanted, [loss.scale])
    found.backward()
    assert torch.allclose(expected, loss.scale.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunks", [1, 3, 100])
def test_the_loss_in_chunks_without_an_engine(reduction: str, chunks: int) -> None:
    """Also of what is of a class of its own: a parameter and a buffer."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(5, 7), nn.Parameter(torch.randn(4, 5, 5))
    targets = nn.Buffer(torch.randint(0, 7, (4, 5)))
    targets[1] = -100
    found = lightning_zero.chunked_loss(head, None, hidden, targets, chunks=chunks, reduction=reduction)
    wanted = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction=reduction)
    assert torch.allclose(found.flatten(), wanted.flatten())
    expected = torch.autograd.grad(wanted.sum(), [hidden, head.weight])
    found.sum().backward()
    for grad, other in zip(expected, (hidden.grad, head.weight.grad), strict=True):
        assert torch.allclose(grad, other, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "words"), [
    ({"reduction": "max"}, "reduction to be one of"),
    ({"targets": torch.zeros(3, dtype=torch.long)}, "of the same sizes"),
    ({"chunks": 0}, "chunks to be a whole number"),
    ({"head": F.normalize}, "head to be a module"),
    ({"loss": F.cross_entropy, "chunks": 2}, "one number for each of 2 tokens"),
])  # fmt: skip
def test_a_loss_that_cannot_be_in_chunks_is_refused(settings: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"head": nn.Linear(5, 7), "loss": None, "hidden": torch.randn(4, 5)}
    given["targets"] = torch.zeros(4, dtype=torch.long)
    with pytest.raises(ConfigError, match=words):
        lightning_zero.chunked_loss(**{**given, **settings})


# -- models of transformers ------------------------------------------------------------------------------------------


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},  # its cache holds a number at first
    "t5": {"d_kv": 8, "d_ff": 16, "num_decoder_layers": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0},
}


def causal_loss(module: nn.Module, ids: Tensor, **settings: Any) -> Tensor:
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    return module(input_ids=ids, attention_mask=mask, labels=ids, **settings).loss


def token_ids() -> Tensor:
    return torch.randint(1, 32, (ROWS, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers(kind: str) -> None:
    build = functools.partial(of_transformers, kind, **KINDS[kind])
    compare(build, token_ids(), loss=causal_loss, of_all=True, stage=3, offload="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_that_are_computed_again(kind: str) -> None:
    """The second forward does not add to the cache of the first."""
    plain, module = (of_transformers(kind, **KINDS[kind]) for _ in range(2))
    engine = ordinary(module, stage=3)
    for side in (plain, module):
        given: dict[str, Any] = {}
        if kind == "llama":  # a cache whose tensors are there and hold nothing
            given["past_key_values"] = cache = sys.modules["transformers"].DynamicCache(config=side.config)
            cache.early_initialization(ROWS, 2, 8, torch.float32, torch.device("cpu"))
        causal_loss(side, token_ids(), **given).backward()
    found = gradients(module)
    assert_close({n: p.grad for n, p in plain.named_parameters() if n in found}, found, of_all=True)
    engine.release()


def test_a_cache_that_holds_keys_is_refused_in_training_and_filled_in_an_evaluation() -> None:
    module, plain = of_transformers("llama"), of_transformers("llama")
    ids = token_ids()
    with released(module):
        with torch.no_grad():
            found, expected = module(input_ids=ids), plain(input_ids=ids)
        assert torch.allclose(found.logits, expected.logits, atol=1e-6)
        one, other = (output.past_key_values.layers[1].keys for output in (found, expected))
        assert torch.allclose(one, other, atol=1e-6)
        with pytest.raises(CannotDivide, match="inside of an object of class DynamicCache"):
            module(input_ids=ids, past_key_values=found.past_key_values)


def test_router_logits_that_a_hook_collects_are_refused() -> None:
    """Their loss would have no gradient. Without vertical accumulation, they train (gather() of such a model too)."""
    module = of_transformers("mixtral", num_local_experts=2, output_router_logits=True)
    engine = ordinary(module, stage=3)
    causal_loss(module, token_ids()).backward()
    assert gradients(module)
    engine.release()
    with released(module), pytest.raises(CannotDivide, match="leaves it by another way than its results"):
        causal_loss(module, token_ids())
