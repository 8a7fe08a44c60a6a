"""Rows of ``zero/offload`` that tests go through, made from ``OFFLOADS``: a new row is in all of them."""

from __future__ import annotations

from lightning_zero.planning.placement import OFFLOADS, Tier

ROWS = [row.name for row in OFFLOADS]  # all but ``auto``
OFFLOADED = [row for row in ROWS if row != "none"]
STATE_IN_FILES = {row.name for row, tiers in OFFLOADS.items() if tiers.master is Tier.nvme}
PARAMS_IN_FILES = {row.name for row, tiers in OFFLOADS.items() if tiers.compute_param is Tier.nvme}
IN_FILES = [row for row in ROWS if row in STATE_IN_FILES | PARAMS_IN_FILES]
# Each offloaded row at each stage that allows it, those for all stages first.
PLACES = [
    (row.name, stage)
    for row in sorted(OFFLOADS, key=lambda row: row.moves_params)
    for stage in ((3,) if row.moves_params else (1, 2, 3))
    if row.name in OFFLOADED
]
