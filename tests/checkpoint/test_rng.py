"""States of generators, as tensors and back, and seeds for another number of ranks."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_zero.checkpoint.rng import Generators, of_rank

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    before = Generators.now(CPU)
    yield
    before.restore(CPU)


def draw() -> list[float]:
    """From each generator, normal numbers too: NumPy and Python keep one of a pair for the next time."""
    return [
        *torch.rand(3).tolist(),
        *torch.randn(20).tolist(),
        *np.random.rand(3).tolist(),
        float(np.random.randn()),
        random.random(),
        random.gauss(0, 1),
    ]


def table(*states: Generators) -> dict[str, Tensor]:
    rows = [state.as_tensors() for state in states]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_generators_go_on_from_a_saved_state() -> None:
    for number in range(3):  # each time with another normal number kept or not
        draw()
        if number == 0:  # nothing of NumPy's present block of numbers is drawn yet
            kind, words, _, *normal = np.random.get_state()
            np.random.set_state((kind, words, 0, *normal))  # type: ignore[arg-type, misc]
        state = Generators.now(CPU)
        file = io.BytesIO()
        torch.save(state.as_tensors(), file)
        file.seek(0)
        expected = [draw(), draw()]
        Generators.from_tensors(torch.load(file, weights_only=True)).restore(CPU)
        assert [draw(), draw()] == expected


def drawn(saved: dict[str, Tensor], world_size: int) -> list[tuple[float, ...]]:
    found = []
    for rank in range(world_size):
        of_rank(saved, rank, world_size, CPU).restore(CPU)
        found.append(tuple(draw()))
    return found


def test_as_many_ranks_have_their_own_again_and_others_numbers_of_their_own() -> None:
    states = [Generators.seeded(seed, CPU) for seed in (1, 2)]
    saved = table(*states)
    own = []
    for state in states:
        state.restore(CPU)
        own.append(tuple(draw()))
    assert drawn(saved, 2) == own
    for world_size in (1, 3, 4):
        found = drawn(saved, world_size)
        assert len(set(found)) == world_size and found == drawn(saved, world_size)
    assert len({*drawn(saved, 2), *drawn(saved, 3), *drawn(saved, 4)}) == 9
    assert drawn(saved, 3) != drawn(table(*(Generators.seeded(seed, CPU) for seed in (1, 3))), 3)


def test_ranks_that_had_the_same_numbers_have_the_same_again() -> None:
    """Some samplers rely on it."""
    saved = table(*(Generators.seeded(5, CPU) for _ in range(2)))
    assert len(set(drawn(saved, 3))) == 1


@pytest.mark.filterwarnings("error")
def test_another_generator_of_numpys_stays_as_it_is() -> None:
    """What another number of ranks goes on with, and what was saved before the user has set another, included."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        own, seeded = Generators.now(CPU), Generators.seeded(3, CPU)
        copies = [Generators.from_tensors(each.as_tensors()) for each in (own, seeded)]
        state = np.random.get_state(legacy=False)
        for generators in (own, seeded, *copies):
            generators.restore(CPU)
            assert np.random.get_state(legacy=False) == state
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_generators_of_a_gpu_go_on_from_a_saved_state() -> None:
    device = torch.device("cuda", 0)
    torch.rand(5, device=device)
    states = Generators.now(device).as_tensors()
    expected = torch.rand(5, device=device)
    Generators.from_tensors(states).restore(device)
    assert torch.equal(torch.rand(5, device=device), expected)
    Generators.seeded(3, device).restore(device)
    torch.cuda.get_rng_state(device)
