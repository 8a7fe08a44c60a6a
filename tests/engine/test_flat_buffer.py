"""Flat buffers that come and go under one storage object, and what stands for values that are gone."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.engine.units.param_store import FlatBuffer, placeholders

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_memory_comes_and_goes_under_the_same_storage(dtype: torch.dtype) -> None:
    buffer = FlatBuffer(10, dtype, CPU)
    view = buffer.view(2, torch.Size([2, 3]), (3, 1))
    storage = buffer.data.untyped_storage()._cdata
    assert buffer.allocated and buffer.nbytes == 10 * dtype.itemsize
    buffer.release()
    assert not buffer.allocated
    assert buffer.data.untyped_storage().nbytes() == 0
    buffer.allocate()
    assert buffer.allocated
    buffer.data.copy_(torch.arange(10))
    assert view.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert view.untyped_storage()._cdata == storage


def test_what_autograd_saved_finds_the_refilled_values() -> None:
    buffer = FlatBuffer(4, torch.float32, CPU)
    buffer.data.copy_(torch.arange(4.0))
    weight = torch.nn.Parameter(torch.empty(2, 2))
    weight.data = buffer.view(0, torch.Size([2, 2]), (2, 1))
    x = torch.ones(1, 2, requires_grad=True)
    out = torch.nn.functional.linear(x, weight)
    buffer.release()
    with torch.no_grad():
        buffer.allocate()
        buffer.data.copy_(torch.arange(4.0))
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[2.0, 4.0]]


def test_views_are_refused_while_there_is_no_memory() -> None:
    buffer = FlatBuffer(4, torch.float32, CPU)
    buffer.release()
    with pytest.raises(RuntimeError, match="has memory"):
        buffer.view(0, torch.Size([4]), (1,))


def test_allocating_twice_and_releasing_twice_do_nothing() -> None:
    buffer = FlatBuffer(4, torch.float32, CPU)
    pointer = buffer.data.data_ptr()
    buffer.allocate()
    assert buffer.data.data_ptr() == pointer
    buffer.release()
    buffer.release()
    assert not buffer.allocated


def test_a_buffer_made_under_inference_mode_can_train() -> None:
    with torch.inference_mode():
        buffer = FlatBuffer(4, torch.float32, CPU)
        (placeholder,) = placeholders([torch.Size([2])], torch.float32, CPU)
    assert not buffer.data.is_inference()
    assert not placeholder.is_inference()


def test_placeholders_have_the_true_shape_and_read_nan() -> None:
    shapes = [torch.Size([3, 4]), torch.Size([5])]
    first, second = placeholders(shapes, torch.bfloat16, CPU)
    assert first.shape == (3, 4) and first.ndim == 2 and first.numel() == 12 and second.shape == (5,)
    assert first.dtype is torch.bfloat16
    assert first.isnan().all() and second.isnan().all()
    assert first.untyped_storage().nbytes() == 2 * 2  # one element for each placeholder


def test_memory_that_numpy_looks_at_stays() -> None:
    buffer = FlatBuffer(4, torch.float32, CPU)
    buffer.data.fill_(2)
    view = buffer.data.numpy()
    buffer.release()
    assert view.tolist() == [2, 2, 2, 2] and buffer.allocated
    buffer.allocate()
    buffer.data.fill_(3)
    assert view.tolist() == [3, 3, 3, 3]
