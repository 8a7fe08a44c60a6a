"""What is shown at the start: the units that were chosen."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.unit import Unit

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(nbytes: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for size in _SIZES:
        if nbytes < 1024 or size == _SIZES[-1]:
            return f"{nbytes:.0f} {size}" if size == "B" else f"{nbytes:.1f} {size}"
        nbytes /= 1024
    raise AssertionError


def unit_rows(engine: Engine) -> list[tuple[str, str, str, str]]:
    """Rows (unit, parameters, gathered bytes, tier); runs of equal units share one."""

    def facts(unit: Unit) -> tuple[int, int, str]:
        nbytes = sum(b.full.nbytes for b in unit.buckets)
        return sum(i.numel for i in unit.infos()), nbytes, engine.config.offload.name.name

    rows = []
    for (numel, nbytes, offload), same in groupby(engine.units, facts):
        units = list(same)
        name = units[0].title if len(units) == 1 else f"{units[0].title} .. {units[-1].title} ({len(units)} units)"
        tier = "device" if offload == "none" else offload
        each = "" if len(units) == 1 else " each"
        rows.append((name, f"{numel:,}{each}", f"{human_bytes(nbytes)}{each}", tier))
    return rows


def print_units(engine: Engine, console: Console | None = None) -> None:
    """The table of units."""
    precision = engine.precision.name
    table = Table(
        title=f"{engine.config.stage.name.name}, {precision}, {engine.world_size} rank(s)", title_justify="left"
    )
    for column in ("unit", "parameters", "gathered", "tier"):
        table.add_column(column, justify="left" if column in ("unit", "tier") else "right")
    for row in unit_rows(engine):
        table.add_row(*row)
    (console or Console(stderr=True)).print(table)
