"""Ranges for profilers: there where somebody profiles, and free of cost where nobody does."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.engine.support import Model, Sharded, language_work
from tests.engine.test_offload import offload
from tests.harness import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")


def ranges(side: Sharded) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        language_work(side, 0)
        side.step()
        side.engine.passes.wait_for_all()
    return {event.name for event in profile.events() if event.name.startswith("zero: ")}


@on_ranks(2)
def test_gathers_reductions_and_steps_have_ranges_with_names() -> None:
    with Sharded(Model(), prefetch_bytes=0) as side:
        found = ranges(side)
        for unit in side.engine.units:
            assert f"zero: gather {unit.title}" in found and f"zero: wait for {unit.title}" in found
        for bucket in side.engine.buckets:
            assert f"zero: reduce {bucket.label}" in found
        assert f"zero: step {len(side.engine.buckets)} buckets" in found


@on_ranks(2)
def test_transfers_have_ranges(tmp_path: Path) -> None:
    with Sharded(Model(), **offload("nvme", tmp_path)) as side:
        ranges(side)  # what rests in files is read from the second step on
        found = ranges(side)
        assert any(name.startswith("zero: transfer ") for name in found), found


@on_ranks(1)
def test_where_nobody_profiles_no_range_is_made() -> None:
    with Sharded(Model()) as side, mock.patch("torch.profiler.record_function", side_effect=AssertionError):
        language_work(side, 0)
        side.step()
