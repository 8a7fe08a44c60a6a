"""Vertical accumulation divides what is of the batch, and no table that has as many rows by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.engine.vertical.chunked import CannotDivide
from tests.engine.test_vertical import beside_plain, released
from tests.engine.works import autocast
from tests.models import Does, linear

ROWS, LENGTH, WIDTH = 8, 5, 8


def network(work: Callable[..., Any], tables: Callable[..., Any], gate: float | None = None) -> nn.Module:
    """Blocks whose ``work`` is of x [rows, length, width] and of what ``tables`` makes of the root and the batch."""

    def act(m: Any, batch: Tensor) -> Tensor:
        x = m.enter(batch)
        for block in m.blocks:
            x = block(x, *tables(m, batch))
            x = x[0] + x[1].sum() if isinstance(x, tuple) else x
        return x.square().mean()

    def block() -> nn.Module:
        return Does(work, inner=linear(WIDTH), gate=1.0 if gate is None else nn.Parameter(torch.tensor(gate)))

    rows, cache = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Buffer(torch.randn(2 * ROWS, WIDTH))
    return Does(act, enter=linear(WIDTH), rows=rows, cache=cache, blocks=nn.ModuleList([block(), block()]))


def attends(m: Any, x: Tensor, keys: Tensor) -> Tensor:
    """To prototypes, latents, or names of classes."""
    return m.inner(x) + m.gate * (x @ keys.T).softmax(-1) @ keys


def looks_up(m: Any, x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    return m.inner(x) + m.gate * table[ids][:, None]


def slopes(m: Any, x: Tensor, of_heads: Tensor) -> Tensor:
    """A head for each feature: a bias that grows with the distance."""
    away = torch.arange(LENGTH, dtype=x.dtype)
    scores = of_heads[:, None, None] * (away - away[:, None]).abs()
    return m.inner(x) + m.gate * torch.einsum("hst,bth->bsh", scores.softmax(-1), x)


def rotates(m: Any, x: Tensor, table: Tensor) -> Tensor:
    """By a cache of rotations, of which it takes the first."""
    return x + m.inner(x) * table[: x.shape[1]]


def drops(m: Any, x: Tensor, table: Tensor) -> Tensor:
    """Dropout of probability 0, and noise that has no weight: what parts draw is not what two parts as one draw."""
    y = F.dropout(m.inner(x), 1e-9) + 0 * torch.randn_like(x) * F.dropout(x, 0.5)
    return y + m.gate * table.mean(0)


def weighs(m: Any, x: Tensor, weights: Tensor, mask: Tensor, keys: Tensor) -> Tensor:
    """Three tensors of the batch, and a table."""
    y = (x @ keys.T).softmax(-1) @ keys
    return m.inner(x) * weights[:, None, None] + m.gate * y * mask[..., None]


def first_of_length(m: Any, x: Tensor, state: Tensor) -> Tensor:
    """Of a state of samples that are all alike: it is to be divided, though it need not be."""
    return m.inner(x) + state[: len(x), None]


def gives_table(m: Any, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return attends(m, x, table), (table * 2)[:2]


def made_of(name: str) -> Callable[..., Any]:
    return lambda m, batch: (getattr(m, name) * 1,)


CASES: dict[str, tuple[Any, ...]] = {
    "prototypes": (attends, made_of("rows")),
    "prototypes behind a gate of zero": (attends, made_of("rows"), 0.0),
    "names of classes": (looks_up, lambda m, batch: (m.rows * 1, batch[:, 0, 0].abs().mul(3).long() % 8)),
    "slopes": (slopes, lambda m, batch: (torch.arange(1.0, ROWS + 1) / ROWS,)),
    "a cache of rotations": (rotates, lambda m, batch: (m.cache[:ROWS],)),
    "under dropout": (drops, made_of("rows")),
    "beside several of the batch": (weighs, lambda m, batch: (batch[:, 0, 0], (batch[..., 0] > 0).float(), m.rows * 1)),
    "a table of the batch": (attends, lambda m, batch: (torch.cat([batch[1:, 0], batch[:1, 0]]),)),
    "a result": (gives_table, made_of("rows")),
}


def backward(module: nn.Module, plain: nn.Module, batch: Tensor) -> None:
    loss, expected = module(batch), plain(batch)
    assert torch.allclose(loss, expected, rtol=1e-5)
    loss.backward()
    expected.backward()


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_tables_as_long_as_the_batch(case: str, k: int) -> None:
    with beside_plain(lambda: network(*CASES[case]), k=k, near=1e-5) as (module, plain, _):
        batch = torch.randn(ROWS, LENGTH, WIDTH)
        module.cache = module.cache.clone()
        for inference in (torch.no_grad, torch.inference_mode):
            with inference():
                assert torch.allclose(module(batch), plain(batch), rtol=1e-5)
        backward(module, plain, batch)


def test_rows_that_are_alike_at_first_and_of_samples_later() -> None:
    """A state of the samples, of which a block takes as many rows as it has samples."""
    state, batch = torch.zeros(ROWS, WIDTH), torch.randn(ROWS, LENGTH, WIDTH)
    with beside_plain(lambda: network(first_of_length, lambda m, batch: (state * 1,)), near=1e-5) as (module, plain, _):
        for _ in range(2):
            backward(module, plain, batch)
            state.normal_()


def test_as_many_samples_as_tokens() -> None:
    """A mask [length, length] is not divided, one [batch, length] is."""

    def masked(m: Any, x: Tensor, causal: Tensor, padded: Tensor) -> Tensor:
        scores = (x @ x.mT + causal + padded[:, None]).softmax(-1)
        return m.inner(x) + scores @ x

    def masks(_: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        length = batch.shape[1]
        return torch.ones(length, length).tril().log(), torch.where(batch[..., 0] > 1, -9.0, 0.0)

    for k in (2, 4, 8):
        with beside_plain(lambda: network(masked, masks), k=k, near=1e-5) as (module, plain, _):
            backward(module, plain, torch.randn(ROWS, ROWS, WIDTH))


@pytest.mark.parametrize(("work", "k", "words"), [
    (lambda m, x: m.inner(x - x.mean(0)), 4, r"gives for 4 samples .* got a result \[2, 5, 8\] with other values"),
    # As long as a chunk, and not.
    (lambda m, x: (m.inner(x), x.mean((0, 1))[:2]), 4, r"a result \[2\] with one that is not of samples"),
    (lambda m, x: (m.inner(x), x.mean((0, 1))[:2]), 2, r"a result \[2\] with one that is not of samples"),
], ids=["a mean", "a result like chunks", "a result unlike chunks"])  # fmt: skip
def test_a_block_that_couples_samples_is_refused_and_run_whole_in_an_evaluation(work: Any, k: int, words: str) -> None:
    """A mean over the batch is no table: no division gives what the whole batch gives."""
    module, batch = network(work, lambda m, batch: ()), torch.randn(ROWS, LENGTH, WIDTH)
    expected = module(batch)
    with released(module, k=k):
        state = torch.get_rng_state()
        for _ in range(2):
            with torch.no_grad():
                assert torch.allclose(module(batch), expected)
        with pytest.raises(CannotDivide, match=words):
            module(batch)
        assert torch.equal(state, torch.get_rng_state())


def test_a_table_is_found_in_bf16_too() -> None:
    module, batch = network(*CASES["prototypes"]), torch.randn(ROWS, LENGTH, WIDTH)
    with autocast("bf16"):
        expected = module(batch)
        with released(module, precision="bf16"):
            assert torch.allclose(module(batch), expected, rtol=1e-2)
