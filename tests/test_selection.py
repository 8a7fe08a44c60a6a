"""The selection of cases for the default run."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.harness import run_command
from tests.selection import TIERS, pairwise_places

PAIRED = [{"a": a, "b": b, "c": c, "d": d} for a, b, c, d in itertools.product("xyz", "pq", (1, 2, 3), (True, False))]


def test_every_pair_occurs_in_few_cases() -> None:
    chosen = [PAIRED[place] for place in pairwise_places(PAIRED)]
    for one, other in itertools.combinations("abcd", 2):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in PAIRED}
    assert len(chosen) <= 12 < len(PAIRED)


FILE = """
import pytest

@pytest.mark.parametrize("a", ["x", "y"])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_product(a, b): ...

@pytest.mark.sample
@pytest.mark.parametrize("a", [pytest.param(0, marks=pytest.mark.full), 1, 2])
def test_sampled(a): ...

@pytest.mark.sample
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [3, 4, 5])
def test_pair(a, b): ...

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.mainly(lambda a: a == 2)
def test_main(a): ...

@pytest.mark.full
@pytest.mark.parametrize("a", [1, 2])
def test_full(a): ...
"""


@pytest.mark.full
def test_each_case_is_in_one_tier_and_the_default_one_has_every_value(tmp_path: Path) -> None:
    hooks = "pytest_addoption, pytest_pycollect_makeitem, pytest_leave_out_full_functions"
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import {hooks}")
    (tmp_path / "test_file.py").write_text(FILE)
    found = {}
    for tier in TIERS:
        command = ("python", "-m", "pytest", "--co", "-q", "-c/dev/null", f"--tier={tier}", tmp_path)
        found[tier] = re.findall(r"::(\S+)", run_command(*command).stdout)
    product = [name for name in found["default"] if name.startswith("test_product")]
    assert len(product) == 3
    assert all(any(value in name for name in product) for value in "xy123")
    pair = [re.findall(r"\d", name) for name in found["default"] if name.startswith("test_pair")]
    assert len(pair) == 2 and not set(pair[0]) & set(pair[1])
    others = [name for name in found["default"] if not name.startswith(("test_pair", "test_product"))]
    assert others == ["test_sampled[1]", "test_sampled[2]", "test_main[2]"]
    assert sorted(found["default"] + found["rest"]) == sorted(found["all"])
    assert len(found["all"]) == 19
