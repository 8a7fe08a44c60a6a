"""``python -m benchmarks.checkpoint``: every side saves and loads and is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint import hugging_face, tables
from benchmarks.checkpoint.measure import SIDES
from tests.harness import run_command


@pytest.mark.full
@pytest.mark.parametrize(("sides", "only"), [(("sharded, background", "dcp.save"), "saves"), (tuple(SIDES), None)])
def test_every_side_saves_loads_and_is_compared(sides: tuple[str, ...], only: str | None, tmp_path: Path) -> None:
    command = ["python", "-m", "benchmarks.checkpoint", "--size", "tiny", "--rounds", "1", "--ranks", "2"]
    command += ["--steps", "1", "--sides", ";".join(sides), "--folder", str(tmp_path), "--out", str(tmp_path / "lines")]
    done = run_command(*command, *(["--only", only] if only else []), timeout=280, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    saves = {row["side"]: row for row in lines if "load_s" in row}
    assert tuple(saves) == sides
    for side, row in saves.items():
        assert "error" not in row and row["loss_differs_by"] <= tables.TOLERANCE
        assert row["nbytes"] >= 12 * row["parameters"]  # all of it was written
        assert row["stall_s"] <= row["durable_s"] or row["stall_s"] > 0
        assert all(row[key] > 0 for key in ("load_s", "of_disk", "load_vs_dcp", "save_mib"))
        assert row.get("vs_dcp", 1) > 0 and ("vs_dcp" in row or "dcp.async_save" not in sides)
        assert ("step_speed" in row) == ("async" in side or "background" in side)
    folders = {row["side"]: row for row in lines if "in_s" in row}
    assert list(folders) == ([] if only else list(hugging_face.WAYS))
    assert all("error" not in row and row["in_vs_dcp"] > 0 and row["out_vs_dcp"] > 0 for row in folders.values())
    assert [f.name for f in tmp_path.iterdir()] == ["lines"]  # nothing is left
    shown = [line for line in done.stdout.splitlines() if line.startswith("| 2 |")]
    assert len(shown) == len(saves) + len(folders)
