"""The registry of features, what a run on two ranks finds of one, and what docs/lightning.md says."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.lightning_table import features
from tests.lightning_table.bench import Bench
from tests.trainer.toys import Lit, seeded

ROWS = ("zero1", "zero3", "zero3_offload")
EQUAL, REFUSED, AS_DDP = "equal", "refused", "refused, as under DDP"
SEEN = "Losses, metrics, weights, rates, steps, what a module notes"


class Refusal(NamedTuple):
    """How rows refuse a feature: a part of the line of docs/refused.md, and a pattern in the error."""

    entry: str
    match: str
    rows: tuple[str, ...] = ROWS


@dataclass(frozen=True)
class Feature:
    """
    Args:
        compared: in words.
        body: what a row does; it returns what is compared, of any nested lists, dicts, tensors and values.
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
    body: Callable[[Bench], Any]
    refused: Refusal | None = None
    ddp_raises: str | None = None
    beside: str = "ddp"
    tolerance: float = 1e-5
    needs: tuple[str, ...] = ()
    slow: bool = False

    def cell(self, row: str) -> str:
        """What is claimed."""
        if self.ddp_raises is not None:
            return AS_DDP
        return REFUSED if self.refused is not None and row in self.refused.rows else EQUAL

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


_REGISTRY: dict[str, Feature] = {}


def heading(group: str) -> Callable[..., Any]:
    """Gives the decorator that registers features below a heading.

    It takes what a row does, or the class of a module that each row fits with the settings ``fit``, to compare what
    :class:`tests.lightning_table.bench.Ran` sees. A docstring says what is compared beside or instead of that.
    """

    def feature(name: str, *, fit: Mapping[str, Any] | None = None, **how: Any) -> Callable[[Any], Any]:
        def register(what: Any) -> Any:
            assert name not in _REGISTRY, name
            said = None if what is Lit else what.__doc__
            compared = " ".join((said or SEEN).split()).rstrip(".")
            body = (lambda bench: bench.fit(seeded(what), **fit or {}).seen) if isinstance(what, type) else what
            _REGISTRY[name] = Feature(group, name, compared, body, **how)
            return what

        return register

    return feature


def all_features() -> dict[str, Feature]:
    """By name, in the order of the table."""
    for name in features.MODULES:
        importlib.import_module(f"{features.__name__}.{name}")
    return _REGISTRY


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
        is_empty = expected is None or (isinstance(expected, Mapping | list | tuple | str) and not expected)
        assert not is_empty, f"{name}: nothing to compare"
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


def differences(found: Any, expected: Any, tolerance: float, at: str = "") -> Iterator[str]:
    """Where two nested results differ: numbers and tensors by more than ``tolerance``, the rest at all."""
    alike = type(found) is type(expected)
    if alike and isinstance(expected, Mapping) and list(found) == list(expected):
        for key in expected:
            yield from differences(found[key], expected[key], tolerance, f"{at}.{key}")
    elif alike and isinstance(expected, list | tuple) and len(found) == len(expected):
        for place, (own, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(own, other, tolerance, f"{at}[{place}]")
    elif not _same(found, expected, tolerance):
        yield f"{at}: {textwrap.shorten(repr(found), 1000)} and not {textwrap.shorten(repr(expected), 1000)}"


def _same(found: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, Tensor | np.ndarray):
        own, other = torch.as_tensor(found), torch.as_tensor(expected)
        close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
        alike = own.dtype == other.dtype and own.shape == other.shape
        return alike and torch.allclose(own.double(), other.double(), **close)
    if isinstance(expected, float) and isinstance(found, float):
        both_nan = math.isnan(found) and math.isnan(expected)
        return both_nan or math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    return type(found) is type(expected) and not isinstance(expected, Mapping) and bool(found == expected)


# -- docs/lightning.md -----------------------------------------------------------------------------------------------


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
