"""The selection of cases for the default run."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import pairwise_places

PAIRED = [{"a": a, "b": b, "c": c, "d": d} for a, b, c, d in itertools.product("xyz", "pq", (1, 2, 3), (True, False))]


def test_every_pair_occurs_in_few_cases() -> None:
    chosen = [PAIRED[place] for place in pairwise_places(PAIRED)]
    for one, other in itertools.combinations("abcd", 2):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in PAIRED}
    assert len(chosen) <= 12 < len(PAIRED)


def test_of_two_parameters_all_cases_are_taken() -> None:
    cases = [{"a": a, "b": b} for a in range(3) for b in range(2)]
    assert sorted(pairwise_places(cases)) == list(range(6))


@pytest.mark.parametrize("a", ["x", "y"])
@pytest.mark.parametrize("b", ["p", "q"])
@pytest.mark.parametrize("c", [1, 2])
def test_products_of_three_parameters_are_thinned(request: pytest.FixtureRequest, a: str, b: str, c: int) -> None:
    """Of the eight cases the default run has four."""
    name = request.node.nodeid.partition("[")[0]
    default = [i for i in request.session.items if i.nodeid.startswith(name) and not i.get_closest_marker("full")]
    assert len(default) <= 4
    assert request.node in default or request.node.get_closest_marker("full")
