"""A range of a flattened tensor, as boxes: they tile it, in order, and are few."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.planning.boxes import boxes, memory_order


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
