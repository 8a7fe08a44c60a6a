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
from benchmarks.gpu.__main__ import chosen, parse
from benchmarks.gpu.fits import GIB, fitted
from benchmarks.gpu.gpu_tests import files
from benchmarks.gpu.plan import SIZES, parts, tiny_parts
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


def test_parts_that_are_asked_for() -> None:
    names = [p.name for p in chosen(parse(["--only", "7b,tests"]))]
    assert names[:2] == ["tests marked gpu", "rates of compute, memory, link and disk"]
    assert names[2:] == ["7b bare", "7b zero3", "7b zero3+optimizer_cpu", "7b fsdp2"]
    assert chosen(parse([])) == parts(130.0)
    known = (("0.1b", 0.09e9, 0.15e9), ("1b", 0.95e9, 1.1e9), ("3b", 2.85e9, 2.95e9), ("7b", 6.5e9, 7.2e9))
    assert all(low < SIZES[name].parameters < high for name, low, high in known)
    assert len(files()) > 2 and files()[-1] == "tests/engine/test_gpu.py"  # the long ones last


@pytest.mark.parametrize(("gib", "batch_of_1b", "batch_of_7b"), [(138.0, 16, 4), (78.5, 8, 8), (30.0, 4, 4)])
def test_rows_and_batches_are_those_that_a_device_holds(gib: float, batch_of_1b: int, batch_of_7b: int) -> None:
    found = {p.name: p for p in fitted(parts(), int(gib * GIB))}
    for name, held_from in (("7b zero3", 130), ("7b bare", 105), ("3b zero3", 60), ("1b zero3", 28)):
        assert bool(found[name].why_not) == (gib < held_from), name
    assert not found["7b zero3+optimizer_cpu"].why_not and not found["0.1b zero3"].why_not
    batches = {p.row.size.name: p.row.size.micro_batch for p in found.values() if p.row is not None}
    assert (batches["1b"], batches["7b"]) == (batch_of_1b, batch_of_7b)
    if gib == 78.5:
        assert "GiB of the device, 78 are free" in found["7b zero3"].why_not
