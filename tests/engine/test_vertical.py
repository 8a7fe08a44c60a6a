"""Vertical accumulation: units in chunks equal ordinary accumulation, with fewer gathers and reductions."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lightning_zero
from lightning_zero.config import ConfigError
from lightning_zero.engine import Engine, gather
from lightning_zero.engine.vertical import units
from lightning_zero.engine.vertical.chunked import CannotDivide
from lightning_zero.layerwise.loss import chunks_of
from tests.engine.support import VOCABULARY, Model, autocast, language_loss, tokens
from tests.harness import assert_gone, on_ranks
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


def ordinary(module: nn.Module, *, how: str = "blocks", **settings: Any) -> Engine:
    return lightning_zero.shard(module, activation_checkpointing=how, device="cpu", **settings)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    with gather(module, grads=True):
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def backward(module: nn.Module, batch: Tensor, parts: int, precision: str = "fp32", loss: Any = language_loss) -> float:
    total = 0.0
    for part in batch.chunk(parts):
        with autocast(precision):
            value = loss(module, part) / parts
        value.backward()
        total += value.item()
    return total


def both(
    make: Callable[[], nn.Module], batch: Tensor, *, loss: Any = language_loss, k: int = K, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], Counter[str], Counter[str]]:
    """Gradients of ordinary and of vertical accumulation, and what was sent for the second block."""
    found: list[Any] = []
    for count, parts in ((1, k), (k, 1)):
        torch.manual_seed(3)
        module = make()
        engine = vertical(module, k=k, **settings) if count > 1 else ordinary(module, **settings)
        backward(module, batch, parts, settings.get("precision", "fp32"), loss)
        counts: Counter[str] = Counter()
        for (kind, label), number in engine.comm.counts.items():
            counts[kind] += number * ("blocks.1" in label)
        found.append((gradients(module), +counts))
        engine.release()
    (one, of_one), (other, of_other) = found
    return one, other, of_one, of_other


def assert_close(
    one: dict[str, Tensor], other: dict[str, Tensor], precision: str = "fp32", *, of_all: bool = False
) -> None:
    """
    Args:
        of_all: beside the largest gradient of all, in place of the parameter's own.
    """
    assert one.keys() == other.keys() and one
    for name, grad in one.items():
        largest = max(g.abs().max().item() for g in (one.values() if of_all else [grad]))
        near = {"fp32": 1e-6, "bf16": 2e-2, "bf16_true": 4e-2}[precision]
        assert (grad - other[name]).abs().max().item() <= near * max(largest, 1e-2), name


@on_ranks(2, full=[4])
@pytest.mark.parametrize(
    "case", [CASES[place] for place in pairwise_places(CASES)], ids=lambda c: "-".join(map(str, c.values()))
)
def test_gradients_are_those_of_ordinary_accumulation(case: dict[str, Any], tmp_path: Path) -> None:
    folder = {"nvme_path": str(tmp_path)} if "nvme" in case["offload"] else {}
    settings = {key: case[key] for key in ("stage", "precision", "how")}
    one, other, *_ = both(Model, tokens(0, rows=ROWS), offload={"name": case["offload"], **folder}, **settings)
    assert_close(one, other, case["precision"])


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_one_rank(offload: str) -> None:
    one, other, *_ = both(Model, tokens(0, rank=0, rows=ROWS), offload=offload, stage=3)
    assert_close(one, other)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_unit_is_gathered_twice_and_reduced_once(stage: int) -> None:
    _, _, ordinary_counts, counts = both(Model, tokens(0, rows=ROWS), stage=stage)
    reduction = "all_reduce" if stage == 0 else "reduce_scatter"
    assert ordinary_counts[reduction] == K
    assert counts[reduction] == 1
    assert (ordinary_counts["all_gather"], counts["all_gather"]) == ((2 * K, 2) if stage == 3 else (0, 0))


@on_ranks(2)
def test_steps_with_clipping_and_accumulation_too() -> None:
    """Two backwards of two chunks each are four of one, through several steps."""
    found = []
    for k in (1, 2):
        torch.manual_seed(0)
        module = Model()
        engine = vertical(module, k=2, stage=3) if k == 2 else ordinary(module, stage=3)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        engine.add_optimizer(optimizer)
        for step in range(3):
            backward(module, tokens(step, rows=ROWS), 4 // k)
            lightning_zero.clip_grad_norm_(module, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        with gather(module):
            found.append([p.detach().clone() for p in module.parameters()])
        engine.release()
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=2e-5, rtol=1e-4)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_adds_up(stage: int) -> None:
    torch.manual_seed(0)
    module, plain = Model(), Model()
    plain.load_state_dict(module.state_dict())
    engine = vertical(module, stage=stage)
    with engine.passes.no_sync():
        language_loss(module, tokens(0, rows=ROWS)).backward()
    language_loss(module, tokens(1, rows=ROWS)).backward()
    for rank in range(2):
        for step in (0, 1):
            (language_loss(plain, tokens(step, rank=rank, rows=ROWS)) / 2).backward()
    assert_close({name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, gradients(module))
    counts = engine.comm.counts.items()
    assert sum(number for (kind, label), number in counts if "reduce" in kind and "blocks.1" in label) == 1
    engine.release()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.inner(x), 0.5, self.training)


class Layers(nn.Module):
    def __init__(self, *blocks: nn.Module, first: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(first, 8)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_a_chunk_draws_the_same_numbers_again() -> None:
    """Equal to blocks that are called chunk by chunk with a graph; what follows draws what it would draw."""
    torch.manual_seed(0)
    module = Layers(Dropping(), Dropping())
    plain = Layers(Dropping(), Dropping())
    plain.load_state_dict(module.state_dict())
    engine = vertical(module, stage=3, offload="cpu")
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
    assert_close({name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, gradients(module))
    engine.release()


class Doubles(TorchFunctionMode):
    """A mode under which ``torch.tanh`` is another function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result.sigmoid() if func is torch.tanh else result


class UnderMode(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(8, 8), nn.Sequential(self.Block(), self.Block())

    def forward(self, x: Tensor) -> Tensor:
        with Doubles():
            return self.blocks(self.enter(x))


def test_a_chunk_is_computed_again_under_the_function_modes_of_its_forward() -> None:
    batch = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    unit = {"classes": ["Block"]}
    one, other, *_ = both(UnderMode, batch, loss=lambda module, part: module(part).square().mean(), stage=3, unit=unit)
    assert_close(one, other)


def test_autocast_around_all_of_a_step() -> None:
    """A weight that was cast while no graph was made would be found in the cache, and have no gradient."""
    torch.manual_seed(0)
    module, plain = Layers(Dropping(), Dropping()).eval(), Layers(Dropping(), Dropping()).eval()
    plain.load_state_dict(module.state_dict())
    engine = vertical(module, stage=3)
    x = torch.randn(ROWS, 8)
    for side in (plain, module):
        with torch.autocast("cpu", torch.bfloat16):
            side(x).backward()
    found, expected = gradients(module), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert_close(expected, found, "bf16")
    engine.release()


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x * self.weight * table


class SharesTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Parameter(torch.ones(1, 1)), nn.ModuleList([Scales(), Scales()])

    def forward(self, x: Tensor) -> Tensor:
        table = self.table * 1
        for block in self.blocks:
            x = block(x, table)
        return x.sum()


def test_gradients_of_chunks_are_added_in_fp32() -> None:
    """Of parameters, and of what all chunks are given."""
    module = SharesTable()
    engine = vertical(module, k=ROWS, stage=3, precision="bf16_true", offload="cpu", unit={"classes": ["Scales"]})
    x = torch.full((ROWS, 1), 2.0**-9, dtype=torch.bfloat16)
    x[0] = 1  # in bf16, 1 + 2 ** -9 is 1
    module(x).backward()
    exact = torch.tensor(1 + 7 * 2.0**-9)
    assert exact.bfloat16() > 1
    for name, grad in gradients(module).items():
        of_blocks = 2 if name == "table" else 1
        assert torch.allclose(grad.float().flatten(), of_blocks * exact, rtol=2.0**-9), name
    engine.release()


def test_a_hook_that_would_be_shown_the_gradient_of_a_chunk_is_refused() -> None:
    module = Layers(Dropping(), Dropping()).eval()
    engine = vertical(module, stage=3, offload="cpu")
    weight: Any = module.blocks[1].inner.weight  # type: ignore[union-attr]
    weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match=r"hook .* on blocks\.1\.inner\.weight"):
        module(torch.randn(ROWS, 8)).backward()
    engine.release()


def test_images_keep_their_layout() -> None:
    class Convolves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    module = nn.Sequential(nn.Conv2d(3, 4, 1), Convolves(), Convolves()).to(memory_format=torch.channels_last)
    engine = vertical(module, stage=3, offload="cpu", unit={"classes": ["Convolves"]})
    found = module(torch.randn(ROWS, 3, 5, 5).to(memory_format=torch.channels_last))
    assert found.is_contiguous(memory_format=torch.channels_last)
    found.mean().backward()
    engine.release()


def test_inputs_wait_on_the_host() -> None:
    for how, calls in (("blocks", 0), ("offload", 2)):
        module = Layers(Dropping(), Dropping())
        with mock.patch("lightning_zero.engine.vertical.units.save_on_cpu", wraps=units.save_on_cpu) as saves:
            engine = vertical(module, stage=3, how=how)
            module(torch.randn(ROWS, 8)).backward()
        assert saves.call_count == calls
        engine.release()


def test_the_batch_of_a_step_is_that_of_its_scope_alone() -> None:
    module = Layers(Dropping(), Dropping())
    engine = vertical(module, stage=3)
    with engine.step_scope(), engine.forwards.vertical.step(torch.randn(ROWS, 8), evaluation=False):
        with pytest.raises(CannotDivide, match=rf"the batch \({ROWS}\)"):
            module(torch.randn(2 * ROWS, 8))
        loss = module(torch.randn(ROWS, 8))
    engine.passes.backward(loss)
    module(torch.randn(2 * ROWS, 8)).backward()
    engine.release()


# -- what a unit may be given, and give ------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    hidden: Tensor
    loss: Tensor
    note: str = "same"


class Wide(nn.Module):
    """Tuples, dicts, keywords and None; a mask for all; a table with a gradient; an input that is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, pair: Any, *, options: dict[str, Any], mask: Tensor, table: Tensor, none: None = None) -> Any:
        x, weight = pair
        y = self.inner(x) * mask + weight[:, None] * options["scale"] + table
        return Result(y, y.square().mean()), (mask, x.shape[1], {"flat": y.flatten(), "long": (y > 0).long()})


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(1, 8))
        self.blocks = nn.ModuleList([Wide(), Wide()])

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        mask = torch.arange(8.0)[None]
        x, total = self.enter(x), torch.zeros(())
        for block in self.blocks:
            scale = torch.full((len(x), 1), 0.5)
            result, (same, width, more) = block(
                (x, weight), options={"scale": scale}, mask=mask, table=torch.tanh(self.table), none=None
            )
            assert same is mask and width == 8 and result.note == "same"
            assert more["flat"].shape == (8 * len(x),) and more["long"].dtype == torch.int64
            x, total = result.hidden, total + 0.1 * result.loss + more["flat"].mean()
        return x.square().mean() + total


@on_ranks(2)
@pytest.mark.parametrize("how", ["blocks", "offload"])
def test_nested_inputs_and_outputs(how: str) -> None:
    torch.manual_seed(dist.get_rank())
    x, weight = torch.randn(ROWS, 8), torch.randn(ROWS)

    def loss(module: nn.Module, rows: Tensor) -> Tensor:
        return module(x[rows], weight[rows])

    one, other, *_ = both(Uses, torch.arange(ROWS), loss=loss, stage=3, how=how)
    assert_close(one, other)


class Tied(nn.Module):
    """A weight that two blocks and the root share; a block that is called twice; a frozen block and parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Dropping().eval() for _ in range(4))
        self.blocks[1].inner.weight = self.blocks[0].inner.weight  # type: ignore[union-attr]
        self.enter.weight = self.blocks[0].inner.weight  # type: ignore[union-attr]
        self.blocks[2].requires_grad_(False)
        self.blocks[3].inner.bias.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number in (0, 1, 2, 3, 3):
            x = self.blocks[number](x)
        return x.square().mean()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_shared_repeated_and_frozen_parameters(stage: int) -> None:
    batch = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    one, other, *_ = both(Tied, batch, loss=lambda module, part: module(part), stage=stage)
    assert_close(one, other)


@on_ranks(2)
def test_unfreezing_and_several_optimizers() -> None:
    torch.manual_seed(0)
    module = Model()
    module.blocks[0].requires_grad_(False)
    engine = vertical(module, stage=3)
    first = torch.optim.SGD([*module.embed.parameters(), *module.blocks[1].parameters()], lr=0.1)
    engine.add_optimizer(first)
    language_loss(module, tokens(0, rows=ROWS)).backward()
    assert not any("blocks.0" in name for name in gradients(module))
    first.step()
    module.zero_grad()
    module.blocks[0].requires_grad_(True)
    second = torch.optim.SGD([*module.blocks[0].parameters()], lr=0.1)
    engine.add_optimizer(second)
    language_loss(module, tokens(1, rows=ROWS)).backward()
    assert any("blocks.0" in name for name in gradients(module))
    second.step()
    engine.release()


def test_parameters_toggled_before_the_backward_are_refused() -> None:
    module = Model()
    engine = vertical(module, stage=3)
    loss = language_loss(module, tokens(0, rank=0, rows=ROWS))
    module.blocks[1].requires_grad_(False)
    with pytest.raises(RuntimeError, match="requires_grad of its parameters has changed"):
        loss.backward()
    engine.release()


@pytest.mark.full
@on_ranks(2)
def test_compiled_blocks() -> None:
    compiled = {"name": "blocks", "arguments": {"backend": "aot_eager"}}
    one, other, _, counts = both(Model, tokens(0, rows=ROWS), stage=3, compile=compiled)
    assert_close(one, other)
    assert counts["all_gather"] == 2


def test_evaluation_is_in_chunks_where_the_batch_divides() -> None:
    module = Model()
    sizes: list[int] = []
    module.blocks[1].up.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    engine = vertical(module, stage=3)
    with torch.no_grad():
        module(tokens(0, rank=0, rows=ROWS))
        sizes.clear()  # of a trial, too
        module(tokens(0, rank=0, rows=ROWS))
        module(tokens(0, rank=0, rows=ROWS + 1))
    assert sizes == [ROWS // K] * K + [ROWS + 1]
    engine.release()


def test_a_block_keeps_its_inputs_only() -> None:
    """Autograd holds one input for each unit, and what the root needs."""
    kept: dict[int, int] = {}
    for k in (1, K):
        torch.manual_seed(0)
        module = Model(width=19, depth=6)
        engine = vertical(module, k=k, stage=3) if k > 1 else lightning_zero.shard(module, stage=3)
        kept[k] = _saved_nbytes(language_loss(module, tokens(0, rank=0, rows=ROWS)))
        engine.release()
    inputs = 6 * ROWS * 7 * 19 * 4
    rest = 3 * ROWS * 7 * (VOCABULARY + 19) * 4 + sum(p.numel() * 4 for p in Model(width=19, depth=0).parameters())
    assert inputs <= kept[K] <= inputs + rest < kept[1] / 2


def _saved_nbytes(loss: Tensor) -> int:
    seen: set[Any] = set()
    storages: dict[int, int] = {}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        found = [getattr(node, name) for name in names]
        found += list(getattr(node, "saved_tensors", ()))
        for tensor in found:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


# -- refused ---------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.BatchNorm1d(8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.weight


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(x)


class Memory:
    """As a cache of keys and values is one."""

    keys: Tensor | None = None


class Gives(nn.Module):
    """What a block does that cannot be divided."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.what = what

    def forward(self, x: Tensor, collected: list[Tensor] | None = None, memory: Memory | None = None) -> Any:
        y = self.inner(x)
        if self.what == "vector":
            return y, y.sum(0)[:3]
        if self.what == "number":
            return y, x.sum().item()
        if self.what == "in place":
            x.add_(1)
        if self.what == "keeps":
            self.kept = y
        if self.what == "looks":
            self.kept = y.detach()
        if self.what == "collects" and collected is not None:
            collected.append(y)
        if self.what == "remembers" and memory is not None:
            memory.keys = y.detach()
        return y


class Passes(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Gives(what), Gives("nothing")])

    def forward(self, x: Tensor) -> Tensor:
        found = self.blocks[0](self.enter(x), [], Memory())
        return (found[0] if isinstance(found, tuple) else found).mean()


@pytest.mark.parametrize(
    ("blocks", "settings", "words"),
    [
        ([Norm(), Norm()], {}, r"blocks\.0 \(Norm\) holds inner \(BatchNorm1d\).*whole_batch=\[BatchNorm1d\]"),
        ([Norm(nn.GRU(8, 8)), Norm(nn.GRU(8, 8))], {}, "batch_first=False"),
        ([Dropping(), Dropping()], {"unit": {"whole_batch": ["Norn"]}}, "whole_batch: expected class names.*'Norn'"),
        ([Dropping(), Dropping()], {"unit": {"whole_batch": ["Dropping"]}}, "none of whose units do"),
        ([Dropping(), Dropping()], {"how": "none"}, "activation_checkpointing=blocks, or offload"),
        (
            [Dropping(), Dropping()],
            {"k": 1, "unit": {"whole_batch": ["Norm"]}},
            "has no effect with zero.vertical_chunks=1",
        ),
        ([Dropping(), Dropping()], {"k": 0}, "zero.vertical_chunks"),
        (
            [Dropping(), Dropping()],
            {"comm": {"grad_comm_dtype": "bf16"}, "precision": "bf16"},
            "zero.comm.grad_comm_dtype",
        ),
    ],
)
def test_refused_before_anything_is_sharded(blocks: list[nn.Module], settings: dict[str, Any], words: str) -> None:
    module = Layers(*blocks)
    with pytest.raises(ConfigError, match=words):
        vertical(module, **{"stage": 3, **settings})
    assert all(type(p) is nn.Parameter for p in module.parameters())


@pytest.mark.parametrize(
    ("module", "x", "words"),
    [
        (Layers(Dropping(), Dropping()), torch.randn(6, 8), "divides by zero.vertical_chunks=4, got 6 samples"),
        (Layers(Counts(), Counts()), torch.randn(ROWS, 8), r"changes the buffer seen of Counts"),
        (Passes("vector"), torch.randn(ROWS, 8), r"a result \[3\] with one that is not of samples"),
        (Passes("number"), torch.randn(ROWS, 8), "results with other numbers"),
        (Passes("in place"), torch.randn(ROWS, 8), "changes an input in place"),
        (Passes("keeps"), torch.randn(ROWS, 8), "leaves it by another way than its results"),
        (Passes("collects"), torch.randn(ROWS, 8), "changes a list, a dict or an object"),
        (Passes("remembers"), torch.randn(ROWS, 8), "changes a list, a dict or an object"),
    ],
)
def test_refused_in_a_forward(module: nn.Module, x: Tensor, words: str) -> None:
    engine = vertical(module, stage=3, offload="cpu")
    with pytest.raises(RuntimeError, match=words):
        module(x)
    engine.release()


def test_an_evaluation_does_not_change_buffers_chunk_by_chunk() -> None:
    module = Layers(Counts(), Counts())
    engine = vertical(module, stage=3, offload="cpu")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"changes the buffer seen of Counts"):
        module(torch.randn(ROWS, 8))
    with torch.no_grad():
        assert module(torch.randn(ROWS + 1, 8)).isfinite()
    engine.release()


@pytest.mark.parametrize(
    "compile", ["none", {"name": "blocks", "arguments": {"backend": "eager"}}], ids=["plain", "compiled"]
)
def test_a_tensor_that_leaves_a_unit_is_refused_behind_an_evaluation_too(compile: Any) -> None:
    module = Passes("keeps").eval()
    engine = vertical(module, stage=3, offload="cpu", compile=compile)
    with torch.no_grad():
        module(torch.randn(ROWS, 8))
    with pytest.raises(CannotDivide, match="leaves it by another way than its results"):
        module(torch.randn(ROWS, 8))
    engine.release()


def test_a_unit_may_keep_what_has_no_gradient() -> None:
    module = Passes("looks")
    engine = vertical(module, stage=3, offload="cpu")
    module(torch.randn(ROWS, 8)).backward()
    assert module.blocks[0].kept.shape == (ROWS // K, 8)
    engine.release()


class Turns(nn.Module):
    """Of a batch, or of a table that is as long as the batch: a cache of rotations, of which it takes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, table: Tensor, x: Tensor) -> Tensor:
        return x + self.inner(x) * table[: x.shape[1]]


class HasTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(8, 8), nn.ModuleList([Turns(), Turns(), Turns()])
        self.learned = nn.Parameter(torch.randn(2 * ROWS, 8))
        self.cache = torch.nn.Buffer(torch.randn(2 * ROWS, 8))
        self.short = torch.nn.Buffer(torch.randn(ROWS, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block, table in zip(self.blocks, (self.learned[:ROWS], self.cache[:ROWS], self.short), strict=True):
            x = block(table, x)
        return x.square().mean()


@pytest.mark.parametrize("length", [2, ROWS])
def test_parameters_and_buffers_as_long_as_the_batch_are_not_divided(length: int) -> None:
    batch = torch.randn(ROWS, length, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module, plain = HasTables(), HasTables()
    plain.load_state_dict(module.state_dict())
    engine = vertical(module, stage=3, offload="cpu")
    module.cache = module.cache.clone()
    for inference in (torch.no_grad, torch.inference_mode):
        with inference():
            assert torch.allclose(module(batch), plain(batch), rtol=1e-6)
    module(batch).backward()
    plain(batch).backward()
    assert_close({name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, gradients(module))
    engine.release()


class Heads(nn.Module):
    """Attention with a bias of heads, of which there are as many as samples; and a number for each of two experts."""

    def __init__(self, gives: bool = False) -> None:
        super().__init__()
        self.inner, self.gives = nn.Linear(16, 16), gives

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        q = x.unflatten(2, (8, 2)).transpose(1, 2)
        scores = q @ q.transpose(2, 3) + bias
        x = x + self.inner((scores.softmax(-1) @ q).transpose(1, 2).flatten(2))
        return (x, x.flatten(0, 1)[:, :2].mean(0)) if self.gives else x


class OfHeads(nn.Module):
    def __init__(self, bias: Tensor, gives: bool = False) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(16, 16), nn.ModuleList([Heads(gives), Heads(gives)])
        self.bias = [bias]

    def forward(self, x: Tensor) -> Tensor:
        x, loads = self.enter(x), torch.zeros(2)
        for block in self.blocks:
            x = block(x, self.bias[0])
            x, loads = (x[0], loads + x[1]) if isinstance(x, tuple) else (x, loads)
        return x.mean() + loads.sum()


@pytest.mark.parametrize(
    ("k", "bias", "gives", "words"),
    [
        (8, torch.randn(8, 5, 5), False, None),
        (8, torch.randn(8, 1, 5, 5), False, None),
        (4, torch.randn(1, 8, 5, 5), True, r"a result \[2\] with one that is not of samples"),
        (2, torch.randn(1, 8, 5, 5), True, r"a result \[2\] with one that is not of samples"),
    ],
    ids=["a bias", "a bias of samples", "a result like chunks", "a result unlike chunks"],
)
def test_sizes_that_are_the_batchs_by_chance(k: int, bias: Tensor, gives: bool, words: str | None) -> None:
    module = OfHeads(bias, gives)
    engine = vertical(module, k=k, stage=3)
    x, plain = torch.randn(8, 5, 16), OfHeads(bias, gives)
    plain.load_state_dict(engine.state_dict())
    state = torch.get_rng_state()
    for _ in range(2):  # in an evaluation it is run whole where it cannot be divided
        with torch.no_grad():
            assert torch.allclose(module(x), plain(x))
    with pytest.raises(CannotDivide, match=words) if words else contextlib.nullcontext():
        loss = module(x)
        assert torch.allclose(loss, plain(x))
        loss.backward()
    assert torch.equal(state, torch.get_rng_state())
    engine.release()


def test_an_error_in_a_chunk_says_what_was_divided() -> None:
    module = OfHeads(torch.randn(8, 4, 5))
    engine = vertical(module, k=4, stage=3)
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        module(torch.randn(8, 5, 16))
    assert raised.value.__notes__ == [
        "unit blocks.0 was being run in 4 chunks: Of its inputs, [8, 5, 16], [8, 4, 5] are divided along their first "
        "dimension."
    ]
    engine.release()


def test_another_first_dimension_than_the_batch_is_refused() -> None:
    class Turned(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(0, 1))

    module = Turned(Dropping(), Dropping())
    engine = vertical(module, stage=3)
    with pytest.raises(CannotDivide, match=r"first dimension is the batch \(4\), got \[8, 4, 8\]"):
        module(torch.randn(4, 8, 8))
    engine.release()


def test_gradients_of_inputs_alone_are_refused() -> None:
    module = Model()
    engine = vertical(module, stage=3)
    loss = language_loss(module, tokens(0, rank=0, rows=ROWS))
    with pytest.raises(RuntimeError, match="loss.backward"):
        torch.autograd.grad(loss, [module.embed.weight])
    engine.release()


def test_units_on_the_whole_batch() -> None:
    """Batch norms see the batch, and their gradients are those of an ordinary step on it."""
    torch.manual_seed(0)
    module, plain = Layers(Norm(), Dropping().eval(), Norm()), Layers(Norm(), Dropping().eval(), Norm())
    plain.load_state_dict(module.state_dict())
    units = {"classes": ["Norm", "Dropping"], "whole_batch": ["BatchNorm1d"]}
    engine = vertical(module, stage=3, unit=units, offload="cpu")
    x = torch.randn(ROWS, 8)
    module(x).backward()
    plain(x).backward()
    assert_close({name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, gradients(module))
    buffers = list(zip(module.buffers(), plain.buffers(), strict=True))  # moved once, though computed twice
    before_chunks = buffers[: len(buffers) // 2]
    assert all(torch.equal(buffer, other) for buffer, other in before_chunks)
    # A product of two rows may round otherwise than one of eight, by the processor's kernels.
    assert all(torch.allclose(buffer, other, rtol=0, atol=1e-6) for buffer, other in buffers)
    engine.release()


# -- faults ----------------------------------------------------------------------------------------------------------


class Fails(Dropping):
    where: ClassVar[tuple[bool, int] | None] = None  # in the second forward, at which chunk
    calls: ClassVar[Counter[bool]] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        again = torch.is_grad_enabled()
        number = self.calls[again]
        Fails.calls[again] += 1
        if (again, number) == Fails.where:
            raise ValueError("a fault")
        return super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("again", [False, True])
def test_an_exception_in_a_chunk_leaves_the_engine_usable(again: bool) -> None:
    torch.manual_seed(0)
    module, plain = Layers(Fails(), Fails()).eval(), Layers(Fails(), Fails()).eval()
    plain.load_state_dict(module.state_dict())
    engine = vertical(module, stage=3)
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    Fails.where, Fails.calls = (again, 2 if again else 4), Counter()  # behind the trial
    with pytest.raises(ValueError, match="a fault"):
        module(x).backward()
    Fails.where = None
    assert engine.passes.sums is None
    module.zero_grad()
    module(x).backward()
    plain(x).backward()
    assert_close({name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, gradients(module))
    engine.release()


def test_the_engine_goes_with_its_module() -> None:
    module = Model()
    engine = vertical(module, stage=3)
    loss = language_loss(module, tokens(0, rank=0, rows=ROWS))
    loss.backward()
    gone = [weakref.ref(engine), weakref.ref(module)]
    del module, engine, loss
    assert_gone(gone)


# -- a head and its loss ---------------------------------------------------------------------------------------------


class WithLoss(Model):
    most: int = 0  # logits at a time

    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(lambda _, args, out: setattr(self, "most", max(self.most, len(out))))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        targets = tokens.roll(1, 1).masked_fill(tokens % 3 == 0, -100)
        return lightning_zero.chunked_loss(self.head, None, x, targets)


def whole_loss(module: Model, batch: Tensor) -> Tensor:
    x = module.embed(batch)
    for block in module.blocks:
        x = block(x)
    targets = batch.roll(1, 1).masked_fill(batch % 3 == 0, -100)
    return F.cross_entropy(module.head(x).flatten(0, 1).float(), targets.flatten())


@on_ranks(2)
@pytest.mark.parametrize("classes", [["Block"], ["Block", "Linear"]], ids=["head in the root", "head is a unit"])
def test_the_loss_in_chunks_is_that_of_the_whole(classes: list[str]) -> None:
    torch.manual_seed(0)
    module, plain = WithLoss(), Model()
    plain.load_state_dict(module.state_dict())
    engine = vertical(module, stage=3, unit={"classes": classes})
    assert any(unit.name == "head" for unit in engine.units) == ("Linear" in classes)
    assert chunks_of(module.head) == K
    batch = tokens(0, rows=ROWS)
    loss = module(batch)
    expected = whole_loss(plain, batch)
    assert torch.allclose(loss, expected, rtol=1e-6)
    loss.backward()
    expected.backward()
    for p in plain.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
    assert_close({name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, gradients(module))
    assert 0 < module.most < ROWS * 7 / 2
    counts = engine.comm.counts
    for kind in ("reduce_scatter", "all_gather"):  # a head that is a unit stays from its first chunk on
        assert {n for (one, label), n in counts.items() if one == kind and "head" in label} <= {1}
    engine.release()


class Selects(Model):
    """The loss of some tokens only, whose number does not divide."""

    def forward(self, batch: Tensor, *, count: int, chunks: int | None = None, plain: bool = False) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        hidden, targets = x.flatten(0, 1)[:count], batch.roll(1, 1).flatten()[:count]
        if plain:
            return F.cross_entropy(self.head(hidden).float(), targets)
        return lightning_zero.chunked_loss(self.head, None, hidden, targets, chunks=chunks)


@on_ranks(2)
def test_a_head_that_is_a_unit_takes_any_number_of_tokens() -> None:
    """Also one that is less than the number of chunks, on one rank alone; and one chunk."""
    torch.manual_seed(0)
    module, plain = Selects(), Selects()
    plain.load_state_dict(module.state_dict())
    engine = vertical(module, stage=3, unit={"classes": ["Block", "Linear"]})
    assert any(unit.name == "head" for unit in engine.units)
    for count, chunks in ((53, None), (3 + 50 * dist.get_rank(), None), (56, 1), (53, None)):
        module.zero_grad()
        plain.zero_grad()
        batch = tokens(0, rows=ROWS)
        module(batch, count=count, chunks=chunks).backward()
        plain(batch, count=count, plain=True).backward()
        for p in plain.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        assert_close({name: p.grad for name, p in plain.named_parameters() if p.grad is not None}, gradients(module))
    engine.release()


def test_ignored_tokens_do_not_count_whatever_the_loss() -> None:
    """A loss of the user's that is not 0 for them; chunks in which all are ignored; parameters of the loss."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            z = logits.logsumexp(-1).square() * self.scale
            return z + F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)

    torch.manual_seed(0)
    head, loss = nn.Linear(5, 7).requires_grad_(False), Loss()
    hidden, targets = torch.randn(6, 4, 5), torch.randint(0, 7, (6, 4))
    targets[:3] = -100
    targets[4, 1] = -100
    found = lightning_zero.chunked_loss(head, loss, hidden, targets, chunks=6)
    kept = targets != -100
    wanted = loss(head(hidden[kept]), targets[kept]).mean()
    assert torch.allclose(found, wanted)
    (one,) = torch.autograd.grad(wanted, [loss.scale])
    found.backward()
    assert loss.scale.grad is not None and torch.allclose(one, loss.scale.grad)


def test_the_loss_of_parameters_and_buffers_is_in_chunks_too() -> None:
    head, hidden, targets = nn.Linear(5, 7), nn.Parameter(torch.randn(6, 5)), torch.nn.Buffer(torch.arange(6))
    found = lightning_zero.chunked_loss(head, None, hidden, targets, chunks=3)
    wanted = F.cross_entropy(head(hidden), targets)
    assert torch.allclose(found, wanted)
    (grad,) = torch.autograd.grad(wanted, [hidden])
    found.backward()
    assert torch.allclose(grad, hidden.grad, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunks", [1, 3, 100])
def test_the_loss_in_chunks_without_an_engine(reduction: str, chunks: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(5, 7)
    hidden, targets = torch.randn(4, 5, 5, requires_grad=True), torch.randint(0, 7, (4, 5))
    targets[1] = -100
    found = lightning_zero.chunked_loss(head, None, hidden, targets, chunks=chunks, reduction=reduction)
    wanted = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction=reduction)
    assert torch.allclose(found.flatten(), wanted.flatten())
    one = torch.autograd.grad(wanted.sum(), [hidden, head.weight])
    found.sum().backward()
    for grad, other in zip(one, (hidden.grad, head.weight.grad), strict=True):
        assert torch.allclose(grad, other, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reduction": "max"}, "reduction to be one of"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, "of the same sizes"),
        ({"chunks": 0}, "chunks to be a whole number"),
        ({"head": F.normalize}, "head to be a module"),
        ({"loss": F.cross_entropy, "chunks": 2}, "one number for each of 2 tokens"),
    ],
)
def test_a_loss_that_cannot_be_in_chunks_is_refused(settings: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "head": nn.Linear(5, 7),
        "loss": None,
        "hidden": torch.randn(4, 5),
        "targets": torch.zeros(4, dtype=torch.long),
    }
    with pytest.raises(ConfigError, match=words):
        lightning_zero.chunked_loss(**{**given, **settings})


# -- models of transformers ------------------------------------------------------------------------------------------


def of_transformers(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "t5":  # the first block makes a bias for all of them
        sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        )
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    if kind == "mistral":  # its cache holds a number before it holds keys
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=2, output_router_logits=True)
        return transformers.MixtralForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def causal_loss(module: nn.Module, ids: Tensor, **settings: Any) -> Tensor:
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    return module(input_ids=ids, attention_mask=mask, labels=ids, **settings).loss


@pytest.mark.parametrize("kind", ["llama", "mistral", "t5"])
def test_models_of_transformers(kind: str) -> None:
    """They make a cache of keys and values in training too, where nobody tells them not to."""
    ids = torch.randint(1, 32, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    one, other, *_ = both(lambda: of_transformers(kind), ids, loss=causal_loss, stage=3, offload="cpu")
    assert_close(one, other, of_all=True)


@pytest.mark.parametrize("kind", ["llama", "mistral", "t5"])
def test_models_of_transformers_that_are_computed_again(kind: str) -> None:
    """The second forward does not add to the cache of the first."""
    ids = torch.randint(1, 32, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    plain, module = of_transformers(kind), of_transformers(kind)
    engine = ordinary(module, stage=3)
    for side in (plain, module):
        causal_loss(side, ids).backward()
    found = gradients(module)
    assert_close(
        {n: p.grad for n, p in plain.named_parameters() if n in found and p.grad is not None}, found, of_all=True
    )
    engine.release()


def test_a_cache_that_holds_keys_is_refused_in_training_and_filled_in_an_evaluation() -> None:
    module, plain = of_transformers("llama"), of_transformers("llama")
    engine = vertical(module, stage=3)
    ids = torch.randint(1, 32, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = module(input_ids=ids), plain(input_ids=ids)
    assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    one, other = (output.past_key_values.layers[1].keys for output in (found, expected))
    assert torch.allclose(one, other, atol=1e-6)
    with pytest.raises(CannotDivide, match="inside of an object of class DynamicCache"):
        module(input_ids=ids, past_key_values=found.past_key_values)
    engine.release()


def test_router_logits_that_a_hook_collects_are_refused() -> None:
    """Their loss would have no gradient. Without vertical accumulation, they train (gather() of such a model too)."""
    ids = torch.randint(1, 32, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    module = of_transformers("mixtral")
    engine = ordinary(module, stage=3)
    causal_loss(module, ids).backward()
    assert gradients(module)
    engine.release()
    engine = vertical(module, stage=3)
    with pytest.raises(CannotDivide, match="leaves it by another way than its results"):
        causal_loss(module, ids)
    engine.release()
