"""The registry of features, what a run on two ranks finds of one, and the table as text."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.lightning_table import features
from tests.lightning_table.bench import Bench

ROWS = ("zero1", "zero3", "zero3_offload")
Body = Callable[[Bench], Any]
EQUAL, REFUSED, AS_DDP = "equal", "refused", "refused, as under DDP"


@dataclass(frozen=True)
class Refusal:
    """How a row refuses a feature.

    Args:
        entry: a part of the line of docs/refused.md.
        match: a pattern in the error.
    """

    entry: str
    match: str
    rows: tuple[str, ...] = ROWS


@dataclass(frozen=True)
class Feature:
    """
    Args:
        body: what a row does; it returns what is compared, of any nested lists, dicts, tensors and values.
        compared: in words.
        refused: by which rows, and how.
        ddp_raises: a pattern in the error by which Lightning refuses this on several ranks, whatever the strategy.
        beside: the strategy whose result is the expected one; ``auto``: one process on the batches of all ranks.
        tolerance: relative and absolute.
        needs: packages that it is left out without.
        slow: too slow for each run of the tests.
    """

    group: str
    name: str
    compared: str
    body: Body
    refused: Refusal | None = None
    ddp_raises: str | None = None
    beside: str = "ddp"
    tolerance: float = 1e-5
    needs: tuple[str, ...] = ()
    slow: bool = False

    def cell(self, row: str) -> str:
        """What the table says."""
        if self.ddp_raises is not None:
            return AS_DDP
        return REFUSED if self.refused is not None and row in self.refused.rows else EQUAL

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


_REGISTRY: dict[str, Feature] = {}


def feature(name: str, **how: Any) -> Callable[[Body], Body]:
    """Registers a function; its docstring says what is compared, its module the group."""

    def register(body: Body) -> Body:
        assert body.__doc__ is not None and name not in _REGISTRY, name
        group = features.HEADINGS[body.__module__.rpartition(".")[2]]
        compared = " ".join(body.__doc__.split()).rstrip(".")
        _REGISTRY[name] = Feature(group, name, compared, body, **how)
        return body

    return register


def all_features() -> dict[str, Feature]:
    """By name, in the order of the table."""
    for name in features.HEADINGS:
        importlib.import_module(f"{features.__name__}.{name}")
    groups = list(features.HEADINGS.values())
    return dict(sorted(_REGISTRY.items(), key=lambda item: groups.index(item[1].group)))


# -- what a run finds ---------------------------------------------------------------------------------------------


def outcomes(name: str, rows: Sequence[str], root: Path) -> dict[str, str]:
    """On all ranks of a pool: by row :data:`EQUAL`, :data:`REFUSED`, :data:`AS_DDP`, or what differs."""
    what = all_features()[name]
    expected, error = _of(what, what.beside, root)
    if what.ddp_raises is not None:
        assert error is not None, f"{name}: {what.beside} does not refuse it"
        assert re.search(what.ddp_raises, str(error)), error
    elif error is not None:
        raise error
    else:
        assert not _empty(expected), f"{name}: nothing to compare"
    found = {}
    for row in rows:
        result, refusal = _of(what, row, root)
        if what.ddp_raises is not None:
            same = type(refusal) is type(error) and re.search(what.ddp_raises, str(refusal))
            found[row] = AS_DDP if same else f"{refusal!r} and not {error!r}"
        elif refusal is not None:
            refuses = what.refused is not None and re.search(what.refused.match, str(refusal))
            if not refuses and what.cell(row) == EQUAL:
                raise refusal
            found[row] = REFUSED if refuses else repr(refusal)
        else:
            found[row] = "; ".join(differences(result, expected, what.tolerance)) or EQUAL
    return found


def _of(what: Feature, strategy: str, root: Path) -> tuple[Any, Exception | None]:
    folder = root / strategy
    folder.mkdir(exist_ok=True, parents=True)
    try:
        return what.body(Bench(strategy, folder)), None
    except Exception as error:
        return None, error
    finally:
        dist.barrier()


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping | list | tuple | str) and not value)


def differences(found: Any, expected: Any, tolerance: float, at: str = "") -> Iterator[str]:
    """Where two nested results differ: numbers and tensors by more than ``tolerance``, the rest at all."""
    if isinstance(expected, Tensor | np.ndarray):
        own, other = torch.as_tensor(found), torch.as_tensor(expected)
        if own.dtype != other.dtype or own.shape != other.shape:
            yield f"{at}: {own.dtype} {tuple(own.shape)} and not {other.dtype} {tuple(other.shape)}"
        elif not torch.allclose(own.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            yield f"{at}: differs by {(own.double() - other.double()).abs().max():.3g}"
    elif isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or list(found) != list(expected):
            yield f"{at}: {_short(list(found))} and not {_short(list(expected))}"
        else:
            for key in expected:
                yield from differences(found[key], expected[key], tolerance, f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        if type(found) is not type(expected) or len(found) != len(expected):
            yield f"{at}: {_short(found)} and not {_short(expected)}"
        else:
            for place, (own, other) in enumerate(zip(found, expected, strict=True)):
                yield from differences(own, other, tolerance, f"{at}[{place}]")
    elif isinstance(expected, float) and isinstance(found, float):
        both_nan = math.isnan(found) and math.isnan(expected)
        if not both_nan and not math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{at}: {found:.6g} and not {expected:.6g}"
    elif type(found) is not type(expected) or found != expected:
        yield f"{at}: {_short(found)} and not {_short(expected)}"


def _short(value: Any) -> str:
    return textwrap.shorten(repr(value), 1000)


# -- the table ----------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """The table with the cells that ``cells`` has, else with those the registry claims."""

    cells: dict[tuple[str, str], str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        group = None
        for what in all_features().values():
            if what.group != group:
                group = what.group
                yield from ("", f"## {group}", "", f"| feature | compared with DDP's | {' | '.join(ROWS)} |")
                yield "|---" * (2 + len(ROWS)) + "|"
            compared = what.compared
            if what.refused is not None:
                compared += f" (refused: [{what.refused.entry}](refused.md))"
            if what.beside == "auto":
                compared += " (beside one process on the batches of all ranks)"
            cells = " | ".join(self.cells.get((what.name, row), what.cell(row)) for row in ROWS)
            yield f"| {what.name} | {compared} | {cells} |".replace("||", "|")
        yield ""

    def __str__(self) -> str:
        return "\n".join(self.lines())


def claims() -> str:
    """What docs/lightning.md says below its preface: by group the features that equal DDP, then a table of the rest."""
    lines, others = [], ["", "## What differs", "", "| feature | what happens |", "|---|---|"]
    for group in dict.fromkeys(what.group for what in all_features().values()):
        members = [what for what in all_features().values() if what.group == group]
        equal = [what.name for what in members if {what.cell(row) for row in ROWS} == {EQUAL}]
        lines += ["", f"## {group}", "", *textwrap.wrap("; ".join(equal) + ".", 120, break_on_hyphens=False)]
        for what in members:
            rows = ", ".join(row for row in ROWS if what.cell(row) == REFUSED)
            if what.ddp_raises is not None:
                others.append(f"| {what.name} | {AS_DDP}. {what.compared}. |")
            elif what.refused is not None:
                others.append(f"| {what.name} | refused under {rows}: [{what.refused.entry}](refused.md) |")
    return "\n".join(lines + others)
