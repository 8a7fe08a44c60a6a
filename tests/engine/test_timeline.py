"""zero.timeline and ranges for profilers: what is recorded is what was done, and where nobody records nothing costs."""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.device import recording
from lightning_zero.device.recording import Span
from lightning_zero.settings import ConfigError
from lightning_zero.timeline.page import lanes_of, outermost, without
from lightning_zero.timeline.record import offsets
from tests.engine.sides import Sharded
from tests.engine.support import assert_equal
from tests.engine.test_offload import offload
from tests.engine.works import train
from tests.harness import on_ranks
from tests.models import Model

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")

Event = dict[str, Any]


def recorded(folder: Path) -> list[Event]:
    """On all ranks: the events of the trace that rank 0 has written."""
    dist.barrier()
    return list(json.loads((folder / "trace.json").read_text())["traceEvents"])


def by_lane(events: list[Event]) -> dict[tuple[int, str], list[Event]]:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], names[event["pid"], event["tid"]].split()[0]), []).append(event)
    return found


def at(after: int, steps: int) -> Any:
    """Record ``steps`` steps after ``after``."""
    return mock.patch.multiple("lightning_zero.timeline.record", AFTER=after, STEPS=steps)


def end_of(event: Event) -> float:
    return float(event["ts"] + event["dur"])


@pytest.mark.sample
@on_ranks(2, full=(3,))
@pytest.mark.parametrize("stage, tiers", [(1, "none"), (3, "none"), (3, "nvme"), (2, "optimizer_cpu")])
def test_what_was_done_is_in_the_lanes(stage: int, tiers: str, tmp_path: Path) -> None:
    folder, found = tmp_path / "made" / "here", []
    for timeline in (None, str(folder)):  # which changes no number
        torch.manual_seed(0)
        with at(2, 2), Sharded(Model(), stage=stage, timeline=timeline, **offload(tiers, tmp_path)) as side:
            train(side, range(5))
            found.append(side.engine.state_dict(only_rank_0=False))
            units = [unit.title for unit in side.engine.units]
            labels = {bucket.label for bucket in side.engine.buckets if bucket.plan.shards_master}
    assert_equal(*found)
    assert recording.recorder is None
    events = recorded(folder)
    lanes = by_lane(events)
    for rank in range(dist.get_world_size()):
        done = Counter(event["name"] for event in lanes[rank, "compute"] if not event["cat"].startswith("exposed"))
        for title in units[1:]:
            assert done[f"{title} forward"] >= 2 and done[f"{title} backward"] >= 2, (title, done)
        assert {event["name"] for event in lanes[rank, "reduce"]} >= labels
        gathered = Counter(event["name"] for event in lanes[rank, "gather"])
        if tiers == "none":
            assert all(gathered[label] >= 2 for label in labels), gathered
        assert any(event["dur"] > 0 for event in lanes[rank, "step"])
        assert ((rank, "disk") in lanes) == (tiers == "nvme")
        assert ((rank, "h2d") in lanes) == (tiers != "none")
    ends = [event for event in events if event["ph"] == "i"]
    assert len(ends) == 3 * dist.get_world_size()  # of the step before, and of those that were recorded
    assert_rows(events)


def assert_rows(events: list[Event]) -> None:
    """Bars of one row do not overlap: Perfetto would nest them."""
    bars = sorted((e["pid"], e["tid"], e["ts"], end_of(e)) for e in events if e["ph"] == "X")
    for one, other in itertools.pairwise(bars):
        assert one[:2] != other[:2] or one[3] <= other[2] + 0.01, (one, other)


@on_ranks(2)
def test_ranks_are_on_one_clock(tmp_path: Path) -> None:
    """Clocks that differ by hours: no message ends on one rank before it has begun on the other."""
    real, ahead = time.perf_counter, 7200.0 * dist.get_rank()
    clock = mock.patch("time.perf_counter", lambda: real() + ahead)
    with at(2, 2), clock, Sharded(Model(), timeline=str(tmp_path)) as side:
        train(side, range(5))
    lanes = by_lane(recorded(tmp_path))
    for lane in ("gather", "reduce"):
        ours, theirs = (sorted(lanes[rank, lane], key=lambda e: (e["name"], e["ts"])) for rank in (0, 1))
        for one, other in zip(ours, theirs, strict=True):
            # A broadcast ends for who sends before the other has it: only ends of receivers are bound.
            assert one["name"] == other["name"] and abs(one["ts"] - other["ts"]) < 10e6
            assert max(end_of(one), end_of(other)) >= max(one["ts"], other["ts"]) - 5e3, (one, other)


@on_ranks(2)
def test_what_compute_waits_for_is_exposed(tmp_path: Path) -> None:
    with at(2, 2), Sharded(Model(), timeline=str(tmp_path)) as side:
        for number in range(5):
            time.sleep(0.1 * dist.get_rank())
            train(side, [number])
    lanes = by_lane(recorded(tmp_path))
    exposed = [sum(e["dur"] for e in lanes[rank, "compute"] if e["cat"].startswith("exposed")) / 1e6 for rank in (0, 1)]
    assert exposed[0] > 0.15 > exposed[1], exposed


@on_ranks(2)
def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    with at(1, 1), Sharded(Model(), timeline=str(tmp_path)) as side:
        train(side, range(3))
    dist.barrier()
    page = (tmp_path / "timeline.html").read_text()
    assert not re.search(r"(src|href)=|url\(|@import", page)
    drawings = re.findall(r"<svg height=.*?</svg></div>", page, re.DOTALL)
    assert len(drawings) == 2
    bars = [e for d in drawings for e in ElementTree.fromstring(d.removesuffix("</div>")).iter("rect")]
    assert any((title.text or "").startswith("blocks.1 backward") for bar in bars for title in bar.iter("title"))
    assert all(0 <= float(bar.attrib["x"].rstrip("%")) <= 100 for bar in bars)


@contextmanager
def warned() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(warning.message) for warning in caught if "timeline" in str(warning.message)]


@on_ranks(2)
def test_a_run_that_ends_early_says_so(tmp_path: Path) -> None:
    is_first = dist.get_rank() == 0
    with Sharded(Model(), timeline=str(tmp_path)) as side:
        train(side, range(3))
        with warned() as found:
            side.engine.passes.end_run()
    assert ["ended after 3 steps" in text for text in found] == [True] * is_first
    with at(1, 9), Sharded(Model(), timeline=str(tmp_path)) as side:
        train(side, range(3))
        side.engine.passes.end_run()
    ends = [event for event in recorded(tmp_path) if event["ph"] == "i"]
    assert len(ends) == 3 * 2  # two steps
    assert recording.recorder is None


@on_ranks(2)
def test_a_disk_that_is_full_ends_no_training(tmp_path: Path) -> None:
    with at(1, 2), Sharded(Model(), timeline=str(tmp_path)) as side, warned() as found:
        with mock.patch("pathlib.Path.write_text", side_effect=OSError(28, "No space left on device")):
            train(side, range(5))
        assert side.engine.comm.rank or not (tmp_path / "timeline.html").exists()
    assert ["No space left" in text for text in found] == [True] * (dist.get_rank() == 0)


@on_ranks(2)
def test_an_exception_while_it_records_leaves_nothing(tmp_path: Path) -> None:
    with at(1, 9), Sharded(Model(), timeline=str(tmp_path)) as side:
        train(side, range(2))
        side.engine.passes.abort()
        # A device may wait for a message of a rank that is gone: nobody may wait for the device.
        accelerator = side.engine.comm.streams.accelerator
        with mock.patch.object(type(accelerator), "synchronize", side_effect=AssertionError("waits")):
            side.engine.passes.end_run()
        assert recording.recorder is None
    dist.barrier()
    assert not (tmp_path / "trace.json").exists()


@on_ranks(2)
@pytest.mark.parametrize("row", ["optimizer_cpu", "cpu", "optimizer_nvme", "nvme"])
def test_bytes_to_the_device_are_those_that_are_sent(row: str, tmp_path: Path) -> None:
    """Masters in host memory are sent as they are; what files hold is sent in bf16."""
    with Sharded(Model(), stage=3, precision="bf16", **offload(row, tmp_path)) as side:
        engine = side.engine
        train(side, range(1))
        engine.passes.wait_for_all()
        recorder = recording.listen(engine.comm.streams.accelerator)
        before, counted = recorder.moved_so_far(), Counter(engine.comm.counts)
        train(side, range(1))
        engine.passes.wait_for_all()
        moved = recorder.moved_so_far()["h2d"] - before["h2d"]
        recording.stop()
        gathers = Counter(engine.comm.counts) - counted
        expected = 0
        for bucket in engine.buckets:
            if bucket.plan.whole:
                continue  # on the device already
            each = bucket.plan.owned_numel * (bucket.dtypes.compute.itemsize if "nvme" in row else 4)
            steps_here = bucket.plan.state_numel(dist.get_rank()) > 0  # not if this rank has padding only
            expected += each * (steps_here if "optimizer" in row else gathers["all_gather", bucket.label])
        assert moved == expected > 0


@pytest.mark.parametrize("inside", ["", "inside"])
def test_refusals(inside: str, tmp_path: Path) -> None:
    path = tmp_path / "file" / inside
    (tmp_path / "file").write_text("")
    for use in (ZeroStrategy, functools.partial(lightning_zero.shard, torch.nn.Linear(2, 2), device="cpu")):
        with pytest.raises(ConfigError, match=r"^timeline: expected a folder"):
            use(timeline=str(path))


def bar(begin: float, end: float, what: str = "", why: str = "") -> Span:
    return Span("compute", what, begin, end, why)


def test_bars_are_what_is_left_between_waits() -> None:
    left = without([bar(0, 10, "a"), bar(10, 20, "b")], [bar(2, 3), bar(9, 12), bar(19, 25)])
    assert [(s.what, s.begin, s.end) for s in left] == [("a", 0, 2), ("a", 3, 9), ("b", 12, 19)]


def test_a_wait_inside_of_another_counts_once() -> None:
    found = outermost([bar(0, 10, why="transfer"), bar(2, 5, why="disk")])
    assert [(s.waits_for, s.begin, s.end) for s in found] == [("transfer", 0, 2), ("disk", 2, 5), ("transfer", 5, 10)]
    lanes = lanes_of(0, [bar(0, 10, why="transfer"), bar(2, 5, why="disk"), *(Span("mark", "", t, t) for t in (1, 9))])
    assert lanes.stood() == {"transfer": 5, "disk": 3}
    # A device's clock is coarse: both may begin at once.
    assert lanes_of(0, [bar(0, 4, why="disk"), bar(0, 9, why="transfer")]).stood() == {"disk": 4, "transfer": 5}


@on_ranks(2)
def test_gathers_reductions_steps_and_transfers_have_ranges_with_names(tmp_path: Path) -> None:
    with Sharded(Model(), prefetch_bytes=0, **offload("nvme", tmp_path)) as side:
        train(side, range(1))  # what rests in files is read from the second step on
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(side, range(1))
            side.engine.passes.wait_for_all()
        found = {event.name for event in profile.events()}
        names = [f"{what} {unit.title}" for unit in side.engine.units for what in ("gather", "wait for")]
        names += [f"reduce {bucket.label}" for bucket in side.engine.buckets]
        assert {f"zero: {name}" for name in names} <= found
        assert any(name.startswith("zero: step ") for name in found)
        assert any(name.startswith("zero: transfer ") for name in found)


# -- clocks of ranks: within their own error of the truth, whatever messages take -------------------------------------

seconds = st.floats(0, 0.01)


@given(
    st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=4),
    st.lists(st.lists(st.tuples(seconds, seconds), min_size=4, max_size=4), min_size=1, max_size=6),
)
def test_the_truth_is_within_the_error(clocks: list[float], rounds: list[list[tuple[float, float]]]) -> None:
    """In each round ranks come after some time, and go some time after the last has come."""
    clocks = [clock - clocks[0] for clock in clocks]  # what a rank's clock is ahead of rank 0's
    begins: list[list[float]] = [[] for _ in clocks]
    ends: list[list[float]] = [[] for _ in clocks]
    now = 0.0
    for waits in rounds:
        came = [now + waits[rank][0] for rank in range(len(clocks))]
        for rank, clock in enumerate(clocks):
            begins[rank].append(came[rank] + clock)
            ends[rank].append(max(came) + waits[rank][1] + clock)
        now = max(came) + 0.02
    for offset, clock in zip(offsets(begins, ends), clocks, strict=True):
        assert abs(offset.seconds + clock) <= offset.error + max(offset.error, 1e-6)
        if clock == 0:
            assert offset.seconds == 0
