"""Vertical accumulation divides what is of the batch, and no table that has as many rows by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine import gather
from lightning_zero.engine.vertical.chunked import CannotDivide

ROWS, LENGTH, WIDTH = 8, 5, 8


class Block(nn.Module):
    """A block whose ``work`` is of x [rows, length, width] and of what else it is given."""

    def __init__(self, work: Callable[..., Any], gate: float | None) -> None:
        super().__init__()
        self.inner, self.work = nn.Linear(WIDTH, WIDTH), work
        self.gate = 1.0 if gate is None else nn.Parameter(torch.tensor(gate))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.work(self.inner, self.gate, *args, **kwargs)


class Network(nn.Module):
    """Two blocks that are given x, and what ``tables`` makes of the root's parameters and of the batch."""

    def __init__(self, work: Callable[..., Any], tables: Callable[..., Any], gate: float | None = None) -> None:
        super().__init__()
        self.enter, self.tables = nn.Linear(WIDTH, WIDTH), tables
        self.rows = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.cache = nn.Buffer(torch.randn(2 * ROWS, WIDTH))
        self.blocks = nn.ModuleList([Block(work, gate), Block(work, gate)])

    def forward(self, batch: Tensor) -> Tensor:
        x = self.enter(batch)
        for block in self.blocks:
            x = block(x, *self.tables(self, batch))
            x = x[0] + x[1].sum() if isinstance(x, tuple) else x
        return x.square().mean()


def attends(inner: nn.Module, gate: Any, x: Tensor, keys: Tensor) -> Tensor:
    """To prototypes, latents, or names of classes."""
    return inner(x) + gate * (x @ keys.T).softmax(-1) @ keys


def looks_up(inner: nn.Module, gate: Any, x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    return inner(x) + gate * table[ids][:, None]


def slopes(inner: nn.Module, gate: Any, x: Tensor, of_heads: Tensor) -> Tensor:
    """A head for each feature: a bias that grows with the distance."""
    away = torch.arange(LENGTH, dtype=x.dtype)
    scores = of_heads[:, None, None] * (away - away[:, None]).abs()
    return inner(x) + gate * torch.einsum("hst,bth->bsh", scores.softmax(-1), x)


def rotates(inner: nn.Module, gate: Any, x: Tensor, table: Tensor) -> Tensor:
    """By a cache of rotations, of which it takes the first."""
    return x + inner(x) * table[: x.shape[1]]


def drops(inner: nn.Module, gate: Any, x: Tensor, table: Tensor) -> Tensor:
    """Dropout of probability 0, and noise that has no weight: what parts draw is not what two parts as one draw."""
    y = F.dropout(inner(x), 1e-9) + 0 * torch.randn_like(x) * F.dropout(x, 0.5)
    return y + gate * table.mean(0)


def weighs(inner: nn.Module, gate: Any, x: Tensor, weights: Tensor, mask: Tensor, keys: Tensor) -> Tensor:
    """Three tensors of the batch, and a table."""
    y = (x @ keys.T).softmax(-1) @ keys
    return inner(x) * weights[:, None, None] + gate * y * mask[..., None]


def first_of_length(inner: nn.Module, gate: Any, x: Tensor, state: Tensor) -> Tensor:
    """Of a state of samples that are all alike: it is to be divided, though it need not be."""
    return inner(x) + state[: len(x), None]


def gives_table(inner: nn.Module, gate: Any, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return attends(inner, gate, x, table), (table * 2)[:2]


def made_of(name: str) -> Callable[..., Any]:
    return lambda network, batch: (getattr(network, name) * 1,)


CASES: dict[str, tuple[Any, ...]] = {
    "prototypes": (attends, made_of("rows")),
    "prototypes behind a gate of zero": (attends, made_of("rows"), 0.0),
    "names of classes": (looks_up, lambda network, batch: (network.rows * 1, batch[:, 0, 0].abs().mul(3).long() % 8)),
    "slopes": (slopes, lambda network, batch: (torch.arange(1.0, ROWS + 1) / ROWS,)),
    "a cache of rotations": (rotates, lambda network, batch: (network.cache[:ROWS],)),
    "under dropout": (drops, made_of("rows")),
    "beside several of the batch": (
        weighs,
        lambda network, batch: (batch[:, 0, 0], (batch[..., 0] > 0).float(), network.rows * 1),
    ),
    "a table of the batch": (attends, lambda network, batch: (torch.cat([batch[1:, 0], batch[:1, 0]]),)),
    "a result": (gives_table, made_of("rows")),
}


def prepared(
    *case: Any, k: int, length: int = LENGTH, precision: str = "fp32"
) -> tuple[nn.Module, nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    module, plain = Network(*case), Network(*case)
    plain.load_state_dict(module.state_dict())
    settings: dict[str, Any] = {"activation_checkpointing": "blocks", "precision": precision, "device": "cpu"}
    engine = lightning_zero.shard(module, vertical_chunks=k, stage=3, **settings)
    return module, plain, engine, torch.randn(ROWS, length, WIDTH)


def assert_equal(module: nn.Module, plain: nn.Module, batch: Tensor) -> None:
    loss, expected = module(batch), plain(batch)
    assert torch.allclose(loss, expected, rtol=1e-5)
    loss.backward()
    expected.backward()
    with gather(module, grads=True):
        for (name, found), wanted in zip(module.named_parameters(), plain.parameters(), strict=True):
            if wanted.grad is not None:
                assert found.grad is not None, name
                assert torch.allclose(found.grad, wanted.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_tables_as_long_as_the_batch(case: str, k: int) -> None:
    module, plain, engine, batch = prepared(*CASES[case], k=k)
    module.cache = module.cache.clone()
    for inference in (torch.no_grad, torch.inference_mode):
        with inference():
            assert torch.allclose(module(batch), plain(batch), rtol=1e-5)
    assert_equal(module, plain, batch)
    engine.release()


def test_rows_that_are_alike_at_first_and_of_samples_later() -> None:
    """A state of the samples, of which a block takes as many rows as it has samples."""
    state = torch.zeros(ROWS, WIDTH)
    module, plain, engine, batch = prepared(first_of_length, lambda network, batch: (state * 1,), k=4)
    for _ in range(2):
        module.zero_grad()
        plain.zero_grad()
        assert_equal(module, plain, batch)
        state.normal_()
    engine.release()


def test_as_many_samples_as_tokens() -> None:
    """A mask [length, length] is not divided, one [batch, length] is."""

    def masked(inner: nn.Module, gate: Any, x: Tensor, causal: Tensor, padded: Tensor) -> Tensor:
        scores = (x @ x.mT + causal + padded[:, None]).softmax(-1)
        return inner(x) + scores @ x

    def masks(network: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        length = batch.shape[1]
        return torch.ones(length, length).tril().log(), torch.where(batch[..., 0] > 1, -9.0, 0.0)

    for k in (2, 4, 8):
        module, plain, engine, batch = prepared(masked, masks, k=k, length=ROWS)
        assert_equal(module, plain, batch)
        engine.release()


def test_a_block_that_couples_samples_is_refused() -> None:
    """A mean over the batch is no table: no division gives what the whole batch gives."""

    def centers(inner: nn.Module, gate: Any, x: Tensor) -> Tensor:
        return inner(x - x.mean(0))

    module, plain, engine, batch = prepared(centers, lambda network, batch: (), k=4)
    with torch.no_grad():
        assert torch.allclose(module(batch), plain(batch))
    with pytest.raises(CannotDivide, match=r"gives for 4 samples .* got a result \[2, 5, 8\] with other values"):
        module(batch)
    engine.release()


def test_a_table_is_found_in_bf16_too() -> None:
    module, plain, engine, batch = prepared(*CASES["prototypes"], k=4, precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = module(batch), plain(batch)
    assert torch.allclose(loss, expected, rtol=1e-2)
    engine.release()
