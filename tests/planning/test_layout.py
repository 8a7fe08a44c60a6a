"""The layout of buckets, for every size and number of ranks; a range of a flattened tensor, as few boxes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.planning.boxes import boxes, memory_order
from lightning_zero.planning.layout import (
    PARAM_ALIGN,
    SHARD_ALIGN,
    BucketLayout,
    Fragment,
    cut_runs,
    lay_out,
    split_by_bytes,
)

sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=12)
worlds = st.integers(1, 9)


@st.composite
def layouts(draw: st.DrawFn) -> BucketLayout:
    return lay_out(draw(sizes), draw(worlds))


@given(layouts())
def test_shards_tile_the_bucket(layout: BucketLayout) -> None:
    ranges = [layout.shard_range(rank) for rank in range(layout.world_size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layout.numel
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert len({high - low for low, high in ranges}) == 1


@given(sizes, worlds)
def test_parameters_and_shards_are_aligned_and_padding_is_small(numels: list[int], world: int) -> None:
    layout = lay_out(numels, world)
    assert layout.shard_numel % SHARD_ALIGN == 0
    assert all(slot.start % PARAM_ALIGN == 0 for slot in layout.slots)
    assert [slot.numel for slot in layout.slots] == numels
    assert layout.numel - layout.used_numel < world * SHARD_ALIGN
    assert layout.used_numel - sum(numels) < PARAM_ALIGN * len(numels)


@given(layouts())
def test_fragments_tile_every_parameter(layout: BucketLayout) -> None:
    found: dict[int, list[tuple[int, int]]] = {slot.index: [] for slot in layout.slots}
    for rank in range(layout.world_size):
        low, high = layout.shard_range(rank)
        for fragment in layout.fragments(rank):
            slot = layout.slots[fragment.index]
            assert low + fragment.start == slot.start + fragment.offset  # both ways lead to one element
            assert fragment.start + fragment.numel <= fragment.stop <= high - low
            found[fragment.index].append((fragment.offset, fragment.offset + fragment.numel))
    for slot in layout.slots:
        parts = found[slot.index]
        assert parts[0][0] == 0 and parts[-1][1] == slot.numel
        assert all(a[1] == b[0] for a, b in pairwise(parts))


@given(layouts())
def test_gaps_are_what_slots_leave(layout: BucketLayout) -> None:
    slots = set().union(*(range(s.start, s.start + s.numel) for s in layout.slots))
    gaps = [range(low, high) for low, high in layout.gaps()]
    assert all(gaps)
    assert sum(map(len, gaps)) + len(slots) == layout.numel
    assert set().union(slots, *gaps) == set(range(layout.numel))


@given(layouts(), st.data())
def test_a_cut_of_the_whole_bucket_joins_the_cuts_of_shards(layout: BucketLayout, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, layout.numel))
    high = data.draw(st.integers(low, layout.numel))
    wanted = set(range(low, high)).difference(*(range(*gap) for gap in layout.gaps()))
    cut = list(layout.cut(low, high))
    assert set().union(*(range(low + f.start, low + f.start + f.numel) for f in cut)) == wanted
    assert sum(f.numel for f in cut) == len(wanted)


def test_a_gap_and_another_key_part_runs() -> None:
    fragments = [Fragment(i, 0, 16, start, start + 16) for i, start in enumerate((0, 16, 48, 64, 80))]
    found = [(key, run.start, run.stop) for key, run in cut_runs(fragments, ["a", "a", "a", None, "b"])]
    assert found == [("a", 0, 32), ("a", 48, 64), ("b", 80, 96)]


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 120))
def test_split_by_bytes_keeps_order_and_limit(nbytes: list[int], limit: int) -> None:
    groups = split_by_bytes(nbytes, limit)
    assert sorted(i for group in groups for i in group) == list(range(len(nbytes)))
    assert groups == sorted(sorted(group) for group in groups)
    for group in groups:
        assert sum(nbytes[i] for i in group) <= limit or len(group) == 1
    for group, following in pairwise(groups):  # no group is begun while an earlier one has room
        earlier = [i for i in group if i < following[0]]
        assert sum(nbytes[i] for i in earlier) + nbytes[following[0]] > limit


@st.composite
def ranges(draw: Any) -> tuple[list[int], list[int], int, int]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    stop = draw(st.integers(0, math.prod(shape)))
    return shape, order, draw(st.integers(0, stop)), stop


@settings(max_examples=300, deadline=None)
@given(ranges())
def test_boxes_tile_a_range(case: tuple[list[int], list[int], int, int]) -> None:
    shape, order, start, stop = case
    flat = torch.arange(math.prod(shape))
    tensor = flat.view([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    found = boxes(shape, start, stop, order)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    elements: list[int] = []
    for box in found:
        assert box.start == start + len(elements)
        part = tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert tuple(part.shape) == box.sizes and part.numel() == box.numel
        elements += part.permute(order).reshape(-1).tolist()
    assert elements == list(range(start, stop))


def test_memory_order_follows_strides() -> None:
    assert memory_order(torch.empty(3, 4).stride()) == (0, 1)
    assert memory_order(torch.empty(3, 4).t().stride()) == (1, 0)
    channels_last = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert memory_order(channels_last.stride()) == (0, 2, 3, 1)
    assert memory_order(()) == ()
