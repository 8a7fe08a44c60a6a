"""Chooses the tests of a run: its tier, and which cases of a parametrized test belong to which tier."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

TIERS = {
    "default": "few cases of each subject: what make test runs",
    "rest": "all other cases: what make test-full runs",
    "all": "both",
}

# Where a subject is shown. The default tier shows it in one place, another one for each test.
AXES = {"world", "stage", "row", "plain", "offload"}


def pairwise_places(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """Give places of ``cases`` to take, so that every pair of values of two parameters occurs which occurs at all."""
    return _covering([set(itertools.combinations(case.items(), 2)) for case in cases])


def _covering(held: Sequence[set[Any]], lots: Sequence[int] = ()) -> list[int]:
    """Give places of sets that hold all values together. ``lots`` decide between two that are as good."""
    missing = set[Any]().union(*held)
    chosen: list[int] = []
    while missing:
        best = max(range(len(held)), key=lambda at: (len(held[at] & missing), lots and lots[at]))
        chosen.append(best)
        missing -= held[best]
    return chosen


def tier_of(config: pytest.Config) -> str:
    """Give the tier that ``config`` asks for: cases that are asked for by their names belong to a run in any tier."""
    return "all" if any("::" in arg for arg in config.args) else config.getoption("--tier")


def choose(items: Sequence[pytest.Item], tier: str) -> list[pytest.Item]:
    """Give the cases of one test function that belong to ``tier``, when the function is collected.

    The default tier takes as few cases as are needed for every value of every parameter to occur (of ``AXES`` only for
    a test with the mark ``smoke``), of those without the mark ``full`` for which the predicate of ``mainly`` holds. Of
    a test with the mark ``sample`` it takes one, and the one that has least in common with it.
    """
    main = [item for item in items if not _is_full(item)]
    if any(item.get_closest_marker("sample") for item in main):
        first = max(main, key=_lot)
        chosen = [first, min(main, key=lambda item: (len(_values(item) & _values(first)), -_lot(item)))]
    else:
        held = [_parameters(item) for item in main]
        chosen = [main[place] for place in _covering(held, [_lot(item) for item in main])]
    if tier == "all" or any(item.get_closest_marker(elsewhere) for item in items for elsewhere in ("gpu", "slurm")):
        return list(items)
    return [item for item in items if (item in chosen) == (tier == "default")]


def has_only_full_cases(file: pytest.Collector, function: object) -> bool:
    """Return whether the marks of a function and its file alone leave all of its cases to the full tier."""
    if not inspect.isfunction(function):  # a file may import a whole file of tests, with marks of its own
        return False
    own = {mark.name for mark in getattr(function, "pytestmark", ()) if isinstance(mark, pytest.Mark)}
    of_file = {mark.name for mark in file.iter_markers()}
    return not (own | of_file) & {"gpu", "slurm"} and ("full" in own or ("full" in of_file and "sample" not in own))


def _is_full(item: pytest.Item) -> bool:
    if item.get_closest_marker("sample"):  # the mark of the file does not count
        full = any(mark.name == "full" for mark in item.own_markers)
    else:
        full = item.get_closest_marker("full") is not None
    for mark in item.iter_markers("mainly"):
        (predicate,) = mark.args
        known = item.callspec.params  # type: ignore[attr-defined]
        full |= not predicate(**{name: known[name] for name in inspect.signature(predicate).parameters})
    return full


def _parameters(item: pytest.Item) -> set[tuple[str, str]]:
    """Give what a case shows: its values by parameter.

    Names that are parametrized together are one parameter. Each field of a dataclass or a named tuple is one.
    """
    shown = {("", "")}
    if not hasattr(item, "callspec"):
        return shown
    values, is_smoke = dict(item.callspec.params), item.get_closest_marker("smoke") is not None
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        given = {name: values.pop(name) for name in names}
        fields = _fields(*given.values()) if len(given) == 1 else None
        if fields is not None:
            given = fields
        elif not given.keys() <= AXES:
            given = {",".join(given): list(given.values())}
        shown |= {(name, repr(value)) for name, value in given.items() if name not in AXES or is_smoke}
    return shown | {(name, repr(value)) for name, value in values.items()}


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, repr(value)) for name, value in params.items()}


def _lot(item: pytest.Item) -> int:
    """Give a number that is the same in every process, and spreads over stages and numbers of ranks."""
    return zlib.crc32(item.nodeid.encode())


def _fields(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value._asdict() if hasattr(value, "_asdict") else None
