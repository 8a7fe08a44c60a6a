"""``python -m benchmarks.gpu`` on the CPU: that each part runs, and tells what it should, also where it fails."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import gpu_tests, trace
from benchmarks.gpu.__main__ import BUDGET_S, chosen, parse
from benchmarks.gpu.bounds import bounds, phi
from benchmarks.gpu.check import MARGIN_S, Check
from benchmarks.gpu.fits import GIB, fitted
from benchmarks.gpu.gpu_tests import files
from benchmarks.gpu.output import Output
from benchmarks.gpu.plan import SIZES, Row, parts, tiny_parts
from benchmarks.gpu.worker import CutError
from tests.harness import run_command

BROKEN = "zero3+optimizer_cpu"
MACHINE_S = 12.0  # to describe it, and to touch half of its memory
RATES = {"matmul": 8e14, "device_copy": 4e12, "h2d": 5e10, "d2h": 5e10, "host_copy": 2e11, "disk_read": 2e9}
WITHOUT_HYDRA = "import sys, runpy; sys.modules['hydra'] = sys.modules['omegaconf'] = None; sys.argv[0] = 'gpu'; "


def run(out: Path, *arguments: str, code: int) -> subprocess.CompletedProcess[str]:
    """Where there is no Hydra."""
    command = ("python", "-c", WITHOUT_HYDRA + "runpy.run_module('benchmarks.gpu', run_name='__main__')", "--tiny")
    return run_command(*command, "--out", out, "--nvme", out.parent, *arguments, code=code, timeout=500.0, OUT="")


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
    done = run(out, "--break-row", BROKEN, code=1)
    found = lines(out)
    assert [r["name"] for r in found] == ["machine", *(p.name for p in tiny_parts())], done.stderr
    for record in found:
        expected = "error" if record.get("side") == BROKEN else "not run" if record["part"] == "job" else "ok"
        assert record["status"] == expected, record
    tests, rates = found[2:4]
    rows = [record for record in found if record["part"] == "row"]
    bits = {record["ranks"]: record for record in found if record["part"] == "bits"}
    assert bits[1]["equal_to_bare"]
    for each in bits.values():
        assert each["late_runs"] > 0 and each["other_bits"] == each["other_bits_late"] == each["far_from_bare"] == []
    for fits in [record for record in found if record["part"] == "trainer"]:
        assert fits["alone_ms"] > 0 and fits["zero3_ms"] > 0 and fits["zero3_save_stall_ms"] > 0
    assert tests["failed"] == [] and tests["collected"] == tests["passed"] + tests["skipped"] > 20
    assert all(rates["rates"][name] > 0 for name in ("host_copy", "host_adam", "disk_read", "disk_write"))
    for row in rows:
        if row["side"] == BROKEN:
            assert "RuntimeError: this row was to fail" in row["error"]
            assert any("side.py" in line for line in row["traceback"])
            continue
        assert row["step_ms"] > 0 and row["tokens_per_s"] > 0 and row["tflops"] > 0
        if row["side"].endswith("+compiled"):
            assert "phi" not in row, "the bound is of the bare module as it is"
        else:
            assert row["side"].endswith("+auto") or (row["phi"] > 0 and row["bound_by"] in row["bounds_s"])
        assert row["host_waits"] == 0 and row["host_rss_peak_gib"] > 0
        assert "extras_error" not in row and "left_out" not in row
        if row["side"] != "bare":
            assert row["size"] != "tiny" or row["host_us_per_unit"] is not None
            assert row["side"].endswith("+compiled") or row["vs_bare"] > 0
            assert row["side"].endswith("+auto") or row["loss_difference"] <= row["loss_tolerance"]
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
def test_without_time_everything_is_listed_as_not_run(tmp_path: Path) -> None:
    run(tmp_path / "out", "--budget", "0", code=0)
    found = lines(tmp_path / "out")
    assert [(r["name"], r["status"]) for r in found] == [(p.name, "not run") for p in tiny_parts()]
    assert all(f"- {p.name} (" in (tmp_path / "out/table.md").read_text() for p in tiny_parts())


@pytest.mark.full
def test_its_processes_need_no_hydra_and_tests_have_the_time_of_the_environment() -> None:
    """And import no Lightning either; the command itself has had none above. Nor torch's sanitizer, which is on once it
    is imported: rows would be slower, and recomputation fails under it."""
    check = "import benchmarks.gpu.side, sys; assert not {'hydra', 'omegaconf', 'lightning', 'torch.cuda._sanitizer'} &"
    check += " {*sys.modules};"
    check += "from tests.engine import test_gpu; assert test_gpu.TIMEOUT_S == 41"
    run_command("python", "-c", check, LIGHTNING_ZERO_TEST_TIMEOUT_S=41, code=0)


# -- rows and tests that do not end well ------------------------------------------------------------------------------


@pytest.mark.full
def test_tests_that_take_too_long_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_slow.py"
    file.write_text(
        "import time, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_a(): assert 1 == 2, 'seen all the same'\ndef test_b(): time.sleep(100)\ndef test_c(): ...\n"
    )
    monkeypatch.setattr(gpu_tests, "files", lambda: [str(file)])
    for given_s in (9, 60):  # to collect and come to the second; on a machine with much to do more
        found = gpu_tests.run(tmp_path / "log", gpu_tests.SUMMARY_S + given_s)
        assert found["seconds"] < gpu_tests.SUMMARY_S + given_s + 2
        if found["failed"]:
            break
    assert (found["collected"], len(found["failed"]), found["not_run"]) == (3, 1, 2)
    assert found["status"] == "error"  # a failure counts for more than the cut
    assert "seen all the same" in (tmp_path / "log").read_text()


# -- without processes ------------------------------------------------------------------------------------------------


def test_parts_that_are_asked_for() -> None:
    names = [p.name for p in chosen(parse(["--only", "7b,tests"]))]
    assert names[:2] == ["tests marked gpu", "rates of compute, memory, link and disk"]
    assert names[2:] == ["7b bare", "7b zero3", "7b zero3+optimizer_cpu", "7b fsdp2", "7b fsdp2+cpu"]
    assert chosen(parse([])) == parts(60.0)
    known = (("0.1b", 0.09e9, 0.15e9), ("1b", 0.95e9, 1.1e9), ("7b", 6.5e9, 7.2e9), ("13b", 12.5e9, 13e9))
    assert all(low < SIZES[name].parameters < high for name, low, high in known)
    assert len(files()) > 2 and files()[-1] == "tests/engine/test_gpu.py"  # the long ones last


def test_two_calls_hold_what_is_worth_most(tmp_path: Path) -> None:
    names = [p.name for p in parts()]
    first, second = names.index("7b fsdp2") + 1, names.index("7b fsdp2+cpu") + 1
    seconds = [p.estimate_s for p in parts()]
    assert sum(seconds[:first]) + MACHINE_S < BUDGET_S and sum(seconds[first:second]) + MARGIN_S < 150
    found = [{"name": name, "status": "ok" if n < first else "not run"} for n, name in enumerate(names)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    assert [p.name for p in chosen(parse(["--rest", str(tmp_path / "results.jsonl")]))] == names[first:]


def test_a_later_call_compares_with_an_earlier_one(check: Check) -> None:
    row = {"part": "row", "size": "tiny", "side": "bare", "status": "ok", "step_ms": 50.0, "forward_backward_ms": 40.0}
    check.compare_with([{"part": "rates", "rates": RATES}, row])
    found = raced(check)
    assert found["vs_bare"] == 0.5 and found["phi"] > 0


@pytest.mark.parametrize(("gib", "batch_of_1b", "batch_of_7b"), [(138.0, 16, 4), (78.5, 8, 8), (30.0, 4, 4)])
def test_rows_and_batches_are_those_that_a_device_holds(gib: float, batch_of_1b: int, batch_of_7b: int) -> None:
    found = {p.name: p for p in fitted(parts(), int(gib * GIB))}
    for name, held_from in (("7b zero3", 130), ("7b bare", 105), ("1b zero3", 28)):
        assert bool(found[name].why_not) == (gib < held_from), name
    assert not found["7b zero3+optimizer_cpu"].why_not and not found["0.1b zero3"].why_not
    batches = {p.row.size.name: p.row.size.micro_batch for p in found.values() if p.row is not None}
    assert (batches["1b"], batches["7b"]) == (batch_of_1b, batch_of_7b)
    if gib == 78.5:
        assert "GiB of the device, 78 are free" in found["7b zero3"].why_not


class Peer:
    """A process that takes turns, or does not answer in time."""

    def __init__(self, *losses: float, hangs: bool = False) -> None:
        self.losses, self.hangs, self.closed = losses, hangs, False
        self.deadlines: list[float] = []

    def ask(self, command: str, deadline: float, **_: Any) -> dict[str, Any]:
        self.deadlines.append(deadline - time.monotonic())
        if self.hangs:
            raise CutError(f"{command} was not over in time")
        return {"step_s": [0.1], "forward_backward_s": [0.1], "losses": dict(enumerate(self.losses))}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")  # or it would set that itself
    return Check(Output(tmp_path / "out"), "cpu", str(tmp_path), 1000.0)


def raced(check: Check, **peers: Peer) -> dict[str, Any]:
    for name, peer in peers.items():
        row = Row(SIZES["tiny"], name)
        check._peers[name] = row, peer  # type: ignore[assignment]
        check._found["tiny", name] = {"step_ms": 100.0, "forward_backward_ms": 50.0}
    row = Row(SIZES["tiny"], "zero3")
    found = check._race(row, Peer(2.0, 1.0), time.monotonic() + 500)  # type: ignore[arg-type]
    return found | check._judge(row, found)


def test_a_side_whose_losses_are_no_numbers_blames_no_other(check: Check) -> None:
    found = raced(check, bare=Peer(2.0, 1.0), fsdp2=Peer(2.0, math.nan))
    assert "error" not in found and found["loss_difference"] == 0
    assert check._judge(Row(SIZES["tiny"], "fsdp2"), found)["error"] == "its losses are not finite"
    found = raced(check, bare=Peer(2.0, 1.0), fsdp2=Peer(2.0, 3.0))
    assert found["error"] == "its losses are not those of fsdp2"


def test_a_peer_that_hangs_is_left_out_and_cuts_no_row(check: Check) -> None:
    peer = Peer(hangs=True)
    found = raced(check, bare=Peer(2.0, 1.0), fsdp2=peer)
    assert found["vs_bare"] == 1 and found["alternated_with"] == ["bare"] and "error" not in found
    assert peer.closed and [*check._peers] == ["bare"]
    assert peer.deadlines[0] < 20  # not all of the row's time


@pytest.mark.full
def test_make_installs_nothing_where_torch_finds_a_gpu(tmp_path: Path) -> None:
    calls, python = tmp_path / "calls", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')  # torch is there, and finds a GPU
    python.chmod(0o755)
    run_command("make", "gpu-check", f"PYTHON={python}", f"VENV={tmp_path}/venv", "ARGS=--only rates", code=0)
    assert calls.read_text().endswith("-m benchmarks.gpu --only rates\n") and "venv" not in calls.read_text()


@pytest.mark.parametrize(("offload", "expected"), [
    ("none", {"compute": 28 / 4e3}),
    ("nvme", {"link to the device": 4 / 50, "link from the device": 4 / 50, "host memory": 28 / 200, "disk": 16 / 2}),
])  # fmt: skip
def test_bounds_by_resource(offload: str, expected: dict[str, float]) -> None:
    """What a billion parameters add to the second that is measured of compute."""
    row = Row(SIZES["1b"], "zero3", offload)
    added = {name: seconds - (name == "compute") for name, seconds in bounds(row, RATES, 1.0).items()}
    assert {name: s / row.size.parameters * 1e9 for name, s in added.items() if s} == pytest.approx(expected)


def test_phi_names_the_resource_that_binds() -> None:
    found = {"compute": 1.0, "disk": 3.0}
    assert phi(found, 4.0, overlap=True)["phi"] == 0.75
    assert phi(found, 4.0, overlap=True)["bound_by"] == "disk"
    assert phi(found, 4.0, overlap=False)["bound_s"] == 4.0
    assert phi({}, 4.0, overlap=True) == {}


def event(name: str, category: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, "pid": 7, "tid": tid}


def test_what_a_timeline_says() -> None:
    events = [
        event(trace.STEP, "user_annotation", 0, 1000),
        event(trace.STEP, "user_annotation", 1000, 2000),
        event("cudaEventSynchronize", "cuda_runtime", 100, 500),
        event("cudaMemcpyAsync", "cuda_runtime", 600, 610),  # does not wait
        event("cudaStreamSynchronize", "cuda_runtime", 700, 900, tid=2),  # of a worker
        event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", 1000, 1300, tid=3),
        event("cudaStreamSynchronize", "cuda_runtime", 1100, 1200, tid=3),
        event("cudaDeviceSynchronize", "cuda_runtime", 2100, 2200),  # after the steps
        event("gemm", "kernel", 0, 1200),
        event("gemm", "kernel", 1100, 1500),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 1400, 1800),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 200, 400),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", "kernel", 1400, 1900),
    ]
    found = trace.of_trace({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]})
    assert found == {
        "host_waits": 1.0,
        "host_waits_ms": 0.25,
        "host_waits_by_call": {"cudaEventSynchronize": 0.5, "cudaStreamSynchronize": 0.5},
        "other_threads_waits": 0.5,
        "device_busy_ms": 0.95,
        "HtoD_ms": 0.2,
        "HtoD_exposed_ms": 0.0,
        "DtoH_ms": 0.1,
        "DtoH_exposed_ms": 0.0,
        "AllGather_ms": 0.25,
        "AllGather_exposed_ms": 0.2,
    }
