"""``python -m benchmarks.gpu`` on the CPU: that each part runs, and tells what it should, also where it fails."""

from __future__ import annotations

import gzip
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import trace
from benchmarks.gpu.plan import tiny_parts
from tests.harness import run_command

BROKEN = "zero3+optimizer_cpu"
WITHOUT_HYDRA = "import sys, runpy; sys.modules['hydra'] = sys.modules['omegaconf'] = None; sys.argv[0] = 'gpu'; "


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Where there is no Hydra."""
    code = WITHOUT_HYDRA + "runpy.run_module('benchmarks.gpu', run_name='__main__')"
    return run_command("python", "-c", code, "--tiny", "--out", out, "--nvme", out.parent, *arguments, OUT="")


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def rows_of_table(text: str) -> list[dict[str, str]]:
    """The one table of ``table.md``; every row has a cell for every title."""
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    titles, rule, *rows = cells
    assert set(rule) == {"---"}
    return [dict(zip(titles, row, strict=True)) for row in rows]


@pytest.mark.full
def test_every_part_has_its_line_also_one_that_raises(tmp_path: Path) -> None:
    """One run of everything, in which one row raises."""
    out = tmp_path / "out"
    done = run(out, "--break-row", BROKEN)
    assert done.returncode == 1
    found = lines(out)
    assert [r["name"] for r in found] == ["machine", *(p.name for p in tiny_parts())], done.stderr
    for record in found:
        assert record["status"] == ("error" if record.get("side") == BROKEN else "ok"), record
    tests, rates, *rows = found[1:]
    assert tests["failed"] == [] and tests["collected"] == tests["passed"] + tests["skipped"] > 20
    assert all(rates["rates"][name] > 0 for name in ("host_copy", "host_adam", "disk_read", "disk_write"))
    for row in rows:
        if row["side"] == BROKEN:
            assert "RuntimeError: this row was to fail" in row["error"]
            assert any("side.py" in line for line in row["traceback"])
            continue
        assert row["step_ms"] > 0 and row["tokens_per_s"] > 0 and row["tflops"] > 0
        assert row["phi"] > 0 and row["bound_by"] in row["bounds_s"]
        assert row["host_waits"] == 0 and row["host_rss_peak_gib"] > 0
        assert "extras_error" not in row and "left_out" not in row
        if row["side"] != "bare":
            assert row["vs_bare"] > 0 and row["loss_difference"] <= row["loss_tolerance"]
        if row["side"].startswith("zero"):
            assert row["planned_device_gib"] >= 0
            assert row["size"] != "tiny" or row["alternated_with"] == ["bare", "fsdp2"]

    text = (out / "table.md").read_text()
    assert text in done.stdout
    assert f"- tiny {BROKEN}: build: RuntimeError: this row was to fail" in text
    shown = rows_of_table(text)
    expected = [(p.row.size.name, p.row.name) for p in tiny_parts() if p.row is not None]
    assert [(row["size"], row["side"]) for row in shown] == expected
    assert all(float(row["step ms"]) > 0 for row in shown if row["status"] == "ok")

    with tarfile.open(out / "traces-1.tar") as archive:
        for record in found:
            if "timeline" in record:
                file = archive.extractfile(record["timeline"].split(":")[1])
                assert file is not None
                events = json.loads(gzip.decompress(file.read()))["traceEvents"]
                assert sum(e.get("name") == trace.STEP for e in events) == 2
        assert len(archive.getnames()) == sum(p.kind == "row" for p in tiny_parts()) - 1


@pytest.mark.full
def test_its_processes_need_no_hydra_and_tests_have_the_time_of_the_environment() -> None:
    """And import no Lightning either; the command itself has had none above."""
    check = "import benchmarks.gpu.side, sys; assert not {'hydra', 'omegaconf', 'lightning'} & {*sys.modules};"
    check += "from tests.engine import test_gpu; assert test_gpu.TIMEOUT_S == 41"
    done = run_command("python", "-c", check, LIGHTNING_ZERO_TEST_TIMEOUT_S=41)
    assert done.returncode == 0, done.stderr


# -- without processes ------------------------------------------------------------------------------------------------
