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
from tests.lightning_table.table import ROWS, Feature, all_features, claims, outcomes

TIMEOUT_S = 240.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_table", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of features")
    parser.add_argument("--claimed", action="store_true", help="print what docs/lightning.md holds; run nothing")
    asked = parser.parse_args()
    if asked.claimed:
        print(claims())
        return 0
    wrong = 0
    print(f"| group | feature | compared with DDP's | {' | '.join(ROWS)} |\n{'|---' * (3 + len(ROWS))}|")
    for what in all_features().values():
        if asked.names and not any(name.lower() in what.name.lower() for name in asked.names):
            continue
        if what.missing:
            print(f"{what.name}: left out without {', '.join(what.missing)}", file=sys.stderr)
            continue
        found = _outcomes(what)
        wrong += any(found[row] != what.cell(row) for row in ROWS)
        print(f"| {what.group} | {what.name} | {what.compared} | {' | '.join(found.values())} |", flush=True)
    harness.close_pools()
    return int(wrong > 0)


def _outcomes(what: Feature) -> dict[str, str]:
    """By row: what rank 0 found, or another rank where that differs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = harness.run(2, outcomes, what.name, ROWS, Path(folder), timeout=TIMEOUT_S)
        except Exception as error:
            return dict.fromkeys(ROWS, f"{type(error).__name__}: {error}")
    return {row: next((r[row] for r in ranks if r[row] != what.cell(row)), ranks[0][row]) for row in ROWS}


if __name__ == "__main__":
    sys.exit(main())
