"""docs/lightning.md says what the registry claims, and the claims are true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as callbacks
import pytest
import torch

from tests.harness import run
from tests.lightning_table.table import ROWS, all_features, claims, differences, outcomes

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")

DOCS = Path(__file__).parents[2] / "docs"
FEATURES = all_features()
EVERY = 13  # of so many features one is run by each run of the tests, under one row


def _cases() -> list[Any]:
    """Give features with rows. The rows of a feature share DDP's run."""
    cases = []
    for number, what in enumerate(FEATURES.values()):
        often = ROWS[number // EVERY % len(ROWS)] if number % EVERY == 0 and not what.slow else None
        if often is not None:
            cases.append(pytest.param(what.name, (often,), id=f"{what.name}-{often}"))
        rest = tuple(row for row in ROWS if row != often)
        cases.append(pytest.param(what.name, rest, marks=pytest.mark.full, id=what.name))
    return cases


@pytest.mark.parametrize(("name", "rows"), _cases())
def test_feature_is_what_the_table_says(name: str, rows: tuple[str, ...], tmp_path: Path) -> None:
    what = FEATURES[name]
    if what.missing:
        pytest.skip(f"needs {', '.join(what.missing)}")
    for rank, found in enumerate(run(2, outcomes, name, rows, tmp_path, timeout=240)):
        assert found == {row: what.cell(row) for row in rows}, f"rank {rank}"


def test_all_rows_occur_in_each_run() -> None:
    assert {row for case in _cases() if not case.marks for row in case.values[1]} == set(ROWS)


def test_page_says_what_the_registry_claims() -> None:
    page, refused = (DOCS / "lightning.md").read_text(), (DOCS / "refused.md").read_text()
    assert claims().strip() in page, "python -m tests.lightning_table --claimed prints it"
    assert not [f.name for f in FEATURES.values() if f.refused is not None and f"| {f.refused.entry}" not in refused]


def test_every_callback_of_lightning_is_in_the_table() -> None:
    words = set(re.findall(r"\w+", " ".join(FEATURES)))
    assert set(callbacks.__all__) - {"Callback", "Checkpoint", "ProgressBar"} <= words


SAME = {"a": [1.0, float("nan"), torch.ones(2)], "b": ("x", None, 1)}


@pytest.mark.parametrize(("found", "expected", "differ"), [
    (SAME, SAME, False),
    ({"a": 1.0 + 1e-7}, {"a": 1.0}, False),
    ({"a": 1.0}, {"a": 1.1}, True),
    ({"a": 1}, {"b": 1}, True),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
    ([1, 2], [1], True),
    (1, 1.0, True),
    (torch.ones(2), torch.ones(2).double(), True),
    (torch.ones(2), torch.ones(2, 1), True),
    (torch.ones(2), torch.tensor([1.0, float("nan")]), True),
    ("a", "b", True),
    (None, [1], True),
])  # fmt: skip
def test_differences_are_found_in_nested_results(found: Any, expected: Any, differ: bool) -> None:
    assert bool(list(differences(found, expected, 1e-5))) is differ
