"""``python -m benchmarks.checkpoint``: every side saves and loads and is compared; a wrong save has no figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint import hugging_face, tables
from benchmarks.checkpoint.measure import SIDES, Found, Save
from benchmarks.checkpoint.ranks import Memory, Turn, Window
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


def a_turn(**changed: Any) -> Turn:
    """Of one rank with a million parameters: a save of 1 s in the background, with steps of 2 s, then of 1 s."""
    save = Save(
        "p", 10.0, call_s=0.5, waited_s=0.25, ended=20.0, steps=[(10.5, 12.5), (12.5, 13.5), (13.5, 14.5)], load_s=2.0
    )
    save.nbytes, save.plain_s = 12_000_000, [1.0, 3.0]
    found = Found("a", True, 1_000_000, 4 << 20, [5.0], [0.9], [save, save])
    found.windows = [Window("steps", 1.0, 2.0), Window("save", 10.0, 10.5), Window("steps beside a save", 10.5, 20.0)]
    found.windows.append(Window("load", 30.0, 32.0))
    for name, value in changed.items():
        setattr(found, name, value)
    memory = Memory(0)
    memory.times = [0.5, 1.5, 9.9, 10.2, 12.0, 29.0, 31.0]
    memory.nbytes = [n << 20 for n in (100, 130, 100, 103, 150, 100, 107)]
    return Turn([found], [memory], {"p": 14.0})


def test_a_stall_is_the_call_and_what_steps_wait() -> None:
    row = tables.row_of([a_turn()])
    assert row["stall_s"] == 0.5 + 0.25
    assert row["durable_s"] == 4.0
    assert row["step_speed"] == 0.9 / 1.5  # the step that ended after the write was done is not beside it
    assert row["of_disk"] == (12 / 4) / (12 / 2)
    blocking = tables.row_of([a_turn(background=False, saves=[Save("p", 0, 0.5, nbytes=1, plain_s=[1])] * 2)])
    assert blocking["stall_s"] == blocking["durable_s"] == 0.5 and "step_speed" not in blocking
