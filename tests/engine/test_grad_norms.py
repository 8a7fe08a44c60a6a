"""Norms and values of sharded gradients, read from ``param.grad``: true, and no rank waits for ever."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_zero
from lightning_zero.comm.agreements import ApartError
from lightning_zero.comm.communicator import Communicator
from lightning_zero.ranks.waits import StallError
from tests.engine.support import Model, Sharded, Twin, assert_same, language_work
from tests.engine.test_offload import offload
from tests.engine.test_values import trained
from tests.harness import on_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TYPES = (0.0, 0.5, 1.0, 2.0, 3.0, 8.0, math.inf)


@contextmanager
def exchanges() -> Iterator[list[str]]:
    """What ranks met for inside, besides a gather and the end."""
    found: list[str] = []
    meet = Communicator.meet

    def counted(self: Communicator, value: object, what: str) -> list[object]:
        if not what.startswith(("gather()", "engine.release()")):
            found.append(what)
        return meet(self, value, what)

    with mock.patch.object(Communicator, "meet", counted):
        yield found


def assert_norms(sharded: Sharded, twin: Twin, norm_type: float) -> None:
    for (name, own), other in zip(sharded.module.named_parameters(), twin.masters, strict=True):
        grad = twin.grads.get(other)
        assert (own.grad is None) == (grad is None), name
        if grad is not None:
            assert own.grad is not None
            expected = torch.linalg.vector_norm(grad.double(), norm_type).float()
            torch.testing.assert_close(
                own.grad.norm(norm_type),
                expected,
                rtol=1e-5,
                atol=1e-12,
                equal_nan=True,
                msg=lambda m, n=name: f"{n}, {norm_type}: {m}",
            )


@on_ranks(1, 2, 3)
@STAGES
def test_norms_are_true(stage: int) -> None:
    sharded, twin = trained(stage=stage)
    with sharded:
        for norm_type in (*TYPES, -1.0, -math.inf):
            assert_norms(sharded, twin, norm_type)


@on_ranks(2)
def test_all_stages_and_rows_agree_to_the_bit(tmp_path: Path) -> None:
    def norms(stage: int, row: str = "none") -> list[torch.Tensor]:
        torch.manual_seed(3)
        with Sharded(Model(), stage=stage, **offload(row, tmp_path)) as side:
            language_work(side, 0)
            return [p.grad.norm(p=t) for p in side.module.parameters() for t in (1, 2)]

    expected = norms(3)
    places = [(stage, "none") for stage in range(3)] + [(2, "optimizer_nvme"), (3, "cpu")]
    for place in places:
        assert all(map(torch.equal, norms(*place), expected)), place


@on_ranks(2)
def test_one_exchange_until_gradients_change() -> None:
    sharded, twin = trained(stage=3)
    module, head = sharded.module, sharded.module.head
    with sharded, exchanges() as met:
        assert_norms(sharded, twin, 2.0)
        assert_norms(sharded, twin, 2.0)
        assert len(met) == 1
        head.weight.grad.norm(1)
        assert len(met) == 2
        before = head.bias.grad.norm()

        norm = lightning_zero.clip_grad_norm_(module, 1e-3)
        torch.testing.assert_close(head.bias.grad.norm(), before * 1e-3 / norm)
        assert len(met) == 3
        head.bias.grad.zero_()
        assert head.bias.grad.norm() == 0.0 and head.weight.grad.norm() > 0.0
        assert len(met) == 4
        with lightning_zero.gather(module, grads=True):
            head.bias.grad.fill_(2.0)
        assert head.bias.grad.norm() == pytest.approx(2.0 * head.bias.numel() ** 0.5)
        sharded.step()
        assert head.bias.grad.norm() == pytest.approx(2.0 * head.bias.numel() ** 0.5)
        assert len(met) == 5
        sharded.zero_grad()
        twin.zero_grad()
        with lightning_zero.gather(module):
            twin.module.load_state_dict(module.state_dict())
        for side in (sharded, twin):
            language_work(side, 7)
        assert_norms(sharded, twin, 2.0)
        assert len(met) == 6


@on_ranks(2)
def test_replicated_gradients_need_no_other_rank() -> None:
    sharded, _ = trained(stage=0)
    with sharded, exchanges() as met:
        if dist.get_rank() == 0:
            assert sharded.module.head.weight.grad.norm() > 0
        assert not met


READS: tuple[Callable[[Tensor], Any], ...] = (
    lambda grad: grad.clone(),
    lambda grad: grad.data.cpu(),
    lambda grad: grad.detach().norm(dim=0),
    lambda grad: grad.abs().max().item(),
    lambda grad: torch.isnan(grad).any(),
    lambda grad: torch.cat([grad.view(-1), (2 * grad).flatten()]),
    lambda grad: grad * grad,
    lambda grad: grad[..., -1].double().std(unbiased=False),
    lambda grad: torch.zeros_like(grad).add_(grad),
    lambda grad: grad.numpy(),
    lambda grad: numpy.asarray(grad).sum(),
    lambda grad: grad.tolist(),
)


@on_ranks(1, 2, full=(3,))
@STAGES
def test_values_are_true(stage: int) -> None:
    sharded, twin = trained(stage=stage)
    with sharded:
        for (name, param), other in zip(sharded.module.named_parameters(), twin.masters, strict=True):
            if (expected := twin.grads.get(other)) is None:
                continue
            for number, read in enumerate(READS):
                torch.testing.assert_close(
                    torch.as_tensor(read(param.grad)),
                    torch.as_tensor(read(expected)),
                    msg=lambda m, at=(name, number): f"{at}: {m}",
                )
            values = param.grad.clone()
            assert type(values) is Tensor
            with lightning_zero.gather(param, grads=True):
                assert torch.equal(values, param.grad)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_read_cannot_be_written(stage: int) -> None:
    """It would be lost."""
    sharded, twin = trained(stage=stage)
    grad = sharded.module.head.weight.grad
    with sharded:
        for use in (
            lambda: grad[0].zero_(),
            lambda: grad.view(-1).mul_(2),
            lambda: grad.t().add_(1),
            lambda: grad[:2].unbind()[0].fill_(1),
            lambda: torch._foreach_mul_(list(grad.split(2)), 2.0),
            lambda: grad.__setitem__(0, 1.0),
            lambda: torch.add(grad, 1, out=grad),
            lambda: setattr(grad, "data", torch.zeros_like(sharded.module.head.bias)),
        ):
            with pytest.raises(RuntimeError, match=r"gradient of head\.weight is sharded") as caught:
                use()
            assert not re.search(r"aten|_copy|default", str(caught.value))
        assert_same(sharded, twin, grads=True)


@on_ranks(2)
def test_a_read_inside_a_backward_is_refused() -> None:
    """Which gradients there are then is nobody's to say, and ranks may come to it at different moments."""
    sharded, _ = trained(stage=3)
    weight = sharded.module.head.weight
    with sharded:
        scale = torch.ones(weight.shape, requires_grad=True)
        loss = (weight.grad * scale).sum()
        with pytest.raises(RuntimeError, match=r"gradient of head\.weight is read inside a backward"):
            loss.backward()


@on_ranks(2)
@pytest.mark.parametrize(
    ("read", "own", "others"),
    [("norm", "norms of gradients", r"norm\(\)"), ("abs", "a read of the gradient of head", r"a read of \.grad,")],
)
def test_a_rank_that_asks_alone_gets_an_error(read: str, own: str, others: str) -> None:
    """And so does the other one, which goes on to its step and its next backward."""
    group = dist.new_group()  # in which a message is lost
    side = Sharded(Model(), stage=3, stall_timeout_s=3.0, process_group=group)
    language_work(side, 0)
    started = time.monotonic()
    soon = mock.patch("lightning_zero.engine.passes.passes.ABANDON_S", 0.5)
    with soon, pytest.raises((StallError, ApartError)) as caught:
        if dist.get_rank() == 0:
            getattr(side.module.head.weight.grad, read)()
        else:
            side.step()
            side.zero_grad()
            language_work(side, 1)
    assert time.monotonic() - started < 20.0
    assert re.search(own if dist.get_rank() == 0 else others, str(caught.value))
    side.engine.comm.waits.close()  # messages were lost: there is no release


@on_ranks(2)
def test_ranks_that_ask_for_other_types() -> None:
    side = Sharded(Model(), stage=3, stall_timeout_s=3.0)
    language_work(side, 0)
    norm_type = 2 if dist.get_rank() == 0 else 1
    with pytest.raises(ApartError, match=r"norms of gradients, of type 2\n.*norms of gradients, of type 1"):
        side.module.head.weight.grad.norm(norm_type)
    assert side.module.head.weight.grad.norm() > 0  # nothing was lost
    side.engine.release()


@on_ranks(2)
def test_gradients_that_lack_some_of_a_backward_have_no_norm() -> None:
    side = Sharded(Model(), stage=3)

    def fails(_: object) -> None:
        raise ZeroDivisionError

    with side:
        language_work(side, 0)
        handle = side.module.blocks[1].up.weight.register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            language_work(side, 1)
        handle.remove()
        for read in (lambda grad: grad.norm(), lambda grad: grad.abs()):
            with pytest.raises(RuntimeError, match="a backward has raised before its end"):
                read(side.module.head.weight.grad)
        side.zero_grad()
        language_work(side, 2)
        assert side.module.head.weight.grad.norm() > 0
