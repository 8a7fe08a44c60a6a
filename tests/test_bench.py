"""``benchmarks.bench`` and ``benchmarks.checkpoint``: every side runs and is compared, what cannot run is left out.
``benchmarks.bench_scale``: engines as first and last rank of 4096."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench
from benchmarks.bench_scale import Case, Result, measure
from benchmarks.checkpoint import hugging_face, tables
from benchmarks.checkpoint.measure import SIDES
from benchmarks.sides import deep_speed, is_peer
from benchmarks.sides.side import COMPILED
from lightning_zero.planning.layout import SHARD_ALIGN
from lightning_zero.planning.topology import rounds_of
from tests.harness import run_command


def run(*arguments: str) -> list[dict[str, Any]]:
    command = ("python", "-m", "benchmarks.bench", "--tiny", "--rounds", 1, *arguments)
    done = run_command(*command, timeout=300, PYTHONWARNINGS="ignore", code=0)
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


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("sides", "only"), [(("sharded, background", "dcp.save"), "saves"), (tuple(SIDES), None)])
def test_every_side_saves_loads_and_is_compared(sides: tuple[str, ...], only: str | None, tmp_path: Path) -> None:
    command = ["python", "-m", "benchmarks.checkpoint", "--size", "tiny", "--rounds", "1", "--ranks", "2"]
    command += ["--steps", "1", "--sides", ";".join(sides), "--folder", str(tmp_path), "--out", str(tmp_path / "lines")]
    done = run_command(*command, *(["--only", only] if only else []), timeout=280, PYTHONWARNINGS="ignore", code=0)
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


# -- simulated scale --------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 96, "n_layer": 3, "n_head": 4, "d_model": 64, "block_size": 64}
SHARDED = 3 + 1  # a bucket of each block, and one of the root; norms are one more, which is replicated
RANKS = 4096
SHARD = SHARD_ALIGN  # elements of every bucket on every rank: the model is that small
LAST = RANKS - 1
NORMS = 7 * 2 * 64


def small(stage: int, rank: int, world_size: int = RANKS) -> Case:
    return Case("small", SMALL, stage, world_size, rank)


@pytest.fixture(scope="module")
def worker() -> Iterator[Callable[[Case], Result]]:
    """Measures many cases in one process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        pool.submit(int).result()  # its thread belongs to no test
        yield lambda case: pool.submit(measure, case, 0).result()


GATHERS = 1 + 2 * 2 + 1  # at stage 3: the root and the last block once, the others in forward and backward


@pytest.mark.mainly(lambda stage: stage == 3)
@pytest.mark.parametrize(("stage", "counts"), [
    (0, {"all_reduce": SHARDED + 1}),
    (1, {"all_gather": SHARDED, "reduce_scatter": SHARDED, "all_reduce": 1}),
    (2, {"all_gather": SHARDED, "reduce_scatter": SHARDED, "all_reduce": 1}),
    (3, {"all_gather": GATHERS, "reduce_scatter": SHARDED, "all_reduce": 1}),
])  # fmt: skip
def test_steps_of_first_and_last_rank(stage: int, counts: dict[str, int], worker: Callable[[Case], Result]) -> None:
    first, last = worker(small(stage, 0)), worker(small(stage, LAST))
    for side in (first, last):
        expected = (counts, 4, SHARDED + 1, (SHARDED + 1) * RANKS * SHARD)
        assert (side.counts, side.units, side.buckets, side.padded_numel) == expected
    assert first.nbytes["grad"] == last.nbytes["grad"]
    assert first.exchanges == last.exchanges  # the order is agreed on in the first step only, and only at stage 3
    assert bool(first.exchanges[0]) == (stage == 3) and first.exchanges[1] == 0
    if stage == 0:
        assert first.nbytes == last.nbytes and last.owned_numel == last.parameters
    else:
        for side, owned in ((first, SHARDED * SHARD + NORMS), (last, NORMS)):  # the last holds padding
            assert (side.owned_numel, side.nbytes["optim_state"]) == (owned, 2 * 4 * owned)
    if stage == 3:
        whole = sum(first.nbytes[role] for role in ("compute_param", "master_param", "grad"))
        assert whole == sum(last.nbytes[role] for role in ("compute_param", "master_param", "grad"))
        assert whole == (SHARDED + RANKS) * SHARD * (4 + 4)  # master and gradient, both fp32; of norms all


@pytest.mark.full
def test_growth_with_the_number_of_ranks_is_flat(worker: Callable[[Case], Result]) -> None:
    worlds = (8, 64, 512, RANKS)
    results = [worker(small(3, 0, world)) for world in worlds]

    def same(result: Result) -> tuple[object, ...]:
        return result.units, result.buckets, result.counts, result.exchanges

    assert len({str(same(r)) for r in results}) == 1
    # Of functions in a step, without those of an agreement's rounds: a loop over ranks would show.
    calls = [r.calls - 42 * len(rounds_of(0, world)) for r, world in zip(results, worlds, strict=True)]
    for few, many in (calls[:2], calls[2:]):  # with an all-to-all of gradients, and without
        assert max(few, many) <= 1.001 * min(few, many), calls
    assert max(calls) <= 1.001 * calls[0], calls
    assert [r.norm_table_nbytes for r in results] == [8 * world for world in worlds]
    norms = [(4 + 4) * -(-NORMS // (world * SHARD)) * world * SHARD for world in worlds]  # master and gradient
    rest = [sum(r.nbytes.values()) - whole for r, whole in zip(results, norms, strict=True)]
    assert rest == sorted(rest, reverse=True)
