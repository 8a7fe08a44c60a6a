"""``python -m tests.lightning_table [NAME ...]``: runs features (default: all) under all rows and prints the table.

``--claimed`` prints what docs/lightning.md holds below its preface, without a run.
Ends with 1 where a cell is another than the registry claims.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests import harness
from tests.lightning_table.table import ROWS, Table, all_features, claims, outcomes

TIMEOUT_S = 240.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_table", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of features")
    parser.add_argument("--claimed", action="store_true", help="print what docs/lightning.md holds; run nothing")
    asked = parser.parse_args()
    if asked.claimed:
        print(claims())
        return 0
    table, wrong = Table(), 0
    names = [name.lower() for name in asked.names]
    for what in all_features().values():
        if names and not any(name in what.name.lower() for name in names):
            continue
        if what.missing:
            print(f"{what.name}: left out without {', '.join(what.missing)}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = _outcomes(what.name, Path(folder))
        for row, outcome in found.items():
            wrong += outcome != what.cell(row)
            table.cells[what.name, row] = outcome
        print(what.name, *dict.fromkeys(found.values()), sep=": ", file=sys.stderr, flush=True)
    harness.close_pools()
    print(table)
    return 1 if wrong else 0


def _outcomes(name: str, folder: Path) -> dict[str, str]:
    """By row: what rank 0 found, or another rank where that differs."""
    try:
        ranks = harness.run(2, outcomes, name, ROWS, folder, timeout=TIMEOUT_S)
    except Exception as error:
        return dict.fromkeys(ROWS, f"{type(error).__name__}: {error}")
    claimed = all_features()[name]
    return {row: next((r[row] for r in ranks if r[row] != claimed.cell(row)), ranks[0][row]) for row in ROWS}


if __name__ == "__main__":
    sys.exit(main())
