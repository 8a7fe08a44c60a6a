"""``python -m benchmarks.bench``: that every side runs, that losses are compared, that what cannot run is left out."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import bench, bench_whole
from benchmarks.sides import deep_speed, is_peer
from benchmarks.sides.side import COMPILED
from tests.harness import run_command


def run(*arguments: str) -> list[dict[str, Any]]:
    command = ("python", "-m", "benchmarks.bench", "--tiny", "--rounds", 1, *arguments)
    done = run_command(*command, timeout=300, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.full
def test_every_side_of_the_table_runs() -> None:
    eager = [side for side in bench.SIDES.split(",") if not side.endswith(COMPILED)]
    names = ",".join([*eager, "zero3+optimizer_cpu"])
    rows = {row["side"]: row for row in run("--case", "1:bf16", "--no-memory", "--sides", names)}
    assert sorted(rows) == sorted(names.split(","))
    for side, row in rows.items():
        if "skipped" in row:
            assert side in deep_speed.STAGES and "deepspeed is not installed" in row["skipped"]
            continue
        assert row["tokens_per_s"] > 0 and row["loss_differs_by"] <= bench.TOLERANCE["bf16"]
        peers = [other for other, found in rows.items() if is_peer(other) and "skipped" not in found]
        assert {"ddp", "ddp+zero1", "fsdp2"} <= {*peers}
        assert all(row[f"vs_{other}"] > 0 for other in peers)


@pytest.mark.full
def test_one_rank_reports_its_memory_and_compiled_sides_their_speedup() -> None:
    rows = run("--case", "1:bf16", "--one-rank")
    assert [row["side"] for row in rows] == bench.ONE_RANK.split(",")
    for row in rows:
        assert row["loss_differs_by"] <= bench.TOLERANCE["bf16"] and row["peak_mib"] >= 0
        assert ("cpu_vs_eager" in row) == row["side"].endswith(COMPILED)


@pytest.mark.full
def test_steps_of_whole_tensors_are_measured_on_each_rank() -> None:
    found = bench_whole.measure(2, 3, width=16, depth=1, rounds=1)
    assert len(found) == 2 and all(0 < seconds < 60 for seconds in found)


@pytest.mark.parametrize(("loss", "is_error"), [(4.0, False), (4.0002, False), (4.002, True), (float("nan"), True)])
def test_a_side_with_other_losses_is_an_error(monkeypatch: pytest.MonkeyPatch, loss: float, is_error: bool) -> None:
    found = [("ddp", [1.0], [1.0], [4.0]), ("zero0", [0.5], [0.5], [loss])]
    monkeypatch.setattr(bench, "launch", lambda *_: found)
    rows = bench.report("1:fp32", ["ddp", "zero0"], 1, 2, memory=False)
    assert rows[1]["vs_ddp"] == 2.0
    assert ("error" in rows[1]) == is_error and "error" not in rows[0]
    monkeypatch.setattr(sys, "argv", ["bench", "--case", "1:fp32", "--sides", "ddp,zero0", "--no-memory"])
    if is_error:
        with pytest.raises(SystemExit, match=r"losses differ: zero0 \(1:fp32\)"):
            bench.main()
    else:
        bench.main()
