"""torch's own clipping of gradients that are in shards, by norm and by value, and changes in place of single ones."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import lightning_zero
from lightning_zero.comm.agreements import ApartError
from lightning_zero.ranks.waits import StallError
from tests.engine.support import Model, Sharded, assert_same, language_loss, language_work, tokens
from tests.engine.test_grad_norms import exchanges
from tests.engine.test_offload import offload
from tests.engine.test_values import trained
from tests.harness import on_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PLACES = [("none", 0), ("none", 3), ("optimizer_nvme", 2), ("cpu", 3)]


def weights(side: Sharded) -> list[Tensor]:
    with lightning_zero.gather(side.module):
        return [p.detach().clone() for p in side.module.parameters()]


def run(
    clip: Callable[[Sharded], Any], tmp_path: Path, row: str = "none", stage: int = 3, **config: Any
) -> tuple[list[Any], list[Tensor]]:
    """What ``clip`` returns in each of a few steps, and the weights at the end."""
    torch.manual_seed(3)
    found = []
    with Sharded(Model(), stage=stage, **offload(row, tmp_path), **config) as side:
        for step in range(3):
            language_work(side, step)
            found.append(clip(side))
            side.step()
            side.zero_grad()
        return found, weights(side)


@on_ranks(2, full=(1, 3))
@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_it_is_our_own_to_the_bit(
    place: tuple[str, int], norm_type: float, foreach: bool | None, tmp_path: Path
) -> None:
    def own(side: Sharded) -> Tensor:
        return lightning_zero.clip_grad_norm_(side.module, 0.1, norm_type)

    def torchs(side: Sharded) -> Tensor:
        norm = clip_grad_norm_(side.module.parameters(), 0.1, norm_type, foreach=foreach)
        assert type(norm) is Tensor
        return norm

    def in_halves(side: Sharded) -> Tensor:
        params = list(side.module.parameters())
        norm = get_total_norm([p.grad for p in params if p.grad is not None], norm_type, foreach=foreach)
        clip_grads_with_norm_(params, 0.1, norm, foreach=foreach)
        return norm

    norms, expected = run(own, tmp_path, *place)
    for other in (torchs, in_halves):
        with exchanges() as met:
            found, values = run(other, tmp_path, *place)
        assert all(map(torch.equal, found, norms)), (found, norms)
        assert all(map(torch.equal, values, expected))
        assert not met, "a message that is not needed"


@on_ranks(1, 2, full=(3,))
@STAGES
@pytest.mark.parametrize("foreach", [None, True])
def test_it_is_that_of_plain_gradients(stage: int, foreach: bool | None) -> None:
    sharded, twin = trained(stage=stage)
    with sharded:
        some = [p for i, p in enumerate(sharded.module.parameters()) if i % 3]
        assert clip_grad_norm_(some, 1e6, foreach=foreach) < clip_grad_norm_(sharded.module.parameters(), 1e6)
        norm = clip_grad_norm_(sharded.module.parameters(), 0.1, foreach=foreach)
        torch.testing.assert_close(norm, get_total_norm(twin.grads.values()))
        for grad in twin.grads.values():
            grad.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))  # of the last bits of ours
        assert_same(sharded, twin, grads=True)
        assert clip_grad_norm_(sharded.module.parameters(), 1e6) == pytest.approx(0.1, rel=1e-3)
        clip_grad_value_(sharded.module.parameters(), 1e-3, foreach=foreach)
        for grad in twin.grads.values():
            grad.clamp_(-1e-3, 1e-3)
        assert_same(sharded, twin, grads=True)
        for side in (sharded, twin):
            side.step()
        assert_same(sharded, twin)


@on_ranks(2)
@STAGES
def test_changes_in_place(stage: int) -> None:
    """In their order, and before the next backward adds to what they leave."""
    sharded, twin = trained(stage=stage)
    with sharded:
        for step in range(2):
            names = dict(twin.module.named_parameters())
            number = torch.tensor(3.0)
            for name, param in sharded.module.named_parameters():
                grads = [param.grad, twin.grads.get(names[name])]
                if grads[0] is None:
                    continue
                for grad in grads:
                    grad.mul_(number)
                number.fill_(2.0)  # what was asked for is what it was
                for grad in grads:
                    grad.mul_(number).clamp_(max=0.5)
                    grad.div_(number).clamp_(-1.0, 1e-2)
                    grad.clamp_(min=-1e-2)
                    grad *= 0.5
                    grad /= 3
                number.fill_(3.0)
                if name == "head.bias":
                    for grad in grads:
                        grad.zero_()
                        grad.mul_(math.inf if step else 2.0)
                        grad.zero_()
                assert grads[0].norm() == pytest.approx(float(grads[1].norm()))
            assert_same(sharded, twin, grads=True)
            if not step:
                for side in (sharded, twin):
                    language_work(side, 5)
        for side in (sharded, twin):
            side.step()
        assert_same(sharded, twin)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_norms_that_are_not_finite(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        language_work(side, 0)
        with lightning_zero.gather(side.module, grads=True):
            side.module.head.bias.grad[-1] = math.inf
        with pytest.raises(RuntimeError, match="total norm of order 2.0 .* is non-finite"):
            clip_grad_norm_(side.module.parameters(), 1.0, error_if_nonfinite=True)
        assert clip_grad_norm_(side.module.parameters(), 1.0).isinf()


@on_ranks(2)
def test_gradients_are_shown_with_the_scale_of_the_loss() -> None:
    """As under DDP, until they are unscaled."""
    with Sharded(Model(), stage=3) as side:
        side.engine.passes.reducer.set_loss_scale(1024.0)
        side.backward(1024.0 * language_loss(side.module, tokens(0)))
        params = list(side.module.parameters())
        true = lightning_zero.grad_norm(side.module)
        assert torch.equal(get_total_norm([p.grad for p in params]), 1024.0 * true)
        clip_grad_norm_(params, 512.0 * float(true))
        torch.testing.assert_close(lightning_zero.grad_norm(side.module), true / 2)
        clip_grad_value_(params, 1.024)
        torch.testing.assert_close(lightning_zero.grad_norm(side.module, math.inf), torch.tensor(1e-3))
        side.engine.passes.reducer.unscale(params[:1])  # by one of two optimizers
        found = get_total_norm([p.grad for p in params])
        torch.testing.assert_close(found, torch.stack([p.grad.norm() for p in params]).norm())
        side.engine.passes.reducer.unscale(params)
        clip_grad_value_(params, 1e-4)
        torch.testing.assert_close(lightning_zero.grad_norm(side.module, math.inf), torch.tensor(1e-4))


@on_ranks(2)
def test_two_modules_and_a_plain_one() -> None:
    """The norm of all is that of norms of each; one that is not of ours is clipped by torch."""
    torch.manual_seed(3)
    first, second = Sharded(Model(), stage=3), Sharded(Model(), stage=1)
    plain = nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    with first, second:
        for side in (first, second):
            language_work(side, 0)
        params = [*first.module.parameters(), *second.module.parameters(), *plain.parameters()]
        for foreach in (None, True):
            each = [lightning_zero.grad_norm(side.module) for side in (first, second)]
            own = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
            norm = clip_grad_norm_(params, 0.1, foreach=foreach)
            torch.testing.assert_close(norm, torch.stack([*each, own]).norm())
            torch.testing.assert_close(lightning_zero.grad_norm(first.module), each[0] * min(1.0, 0.1 / float(norm)))


@on_ranks(2)
@STAGES
def test_gradients_that_are_not_whole_are_refused(stage: int) -> None:
    side = Sharded(Model(), stage=stage)

    def fails(_: object) -> None:
        raise ZeroDivisionError

    with side:
        with side.no_sync():
            language_work(side, 0)
        for clip in (
            lambda: clip_grad_value_(side.module.parameters(), 1.0),
            lambda: side.module.head.bias.grad.mul_(2),
        ):
            with pytest.raises(RuntimeError, match=r"after a backward inside no_sync.*before the step"):
                clip()
        with pytest.raises(RuntimeError, match=r"inside no_sync\(\)"):
            clip_grad_norm_(side.module.parameters(), 1.0)
        language_work(side, 1)
        clip_grad_norm_(side.module.parameters(), 1.0)
        handle = side.module.blocks[1].up.weight.register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            language_work(side, 1)
        handle.remove()
        for clip in (clip_grad_norm_, clip_grad_value_):
            with pytest.raises(RuntimeError, match="a backward has raised before its end"):
                clip(side.module.parameters(), 1.0)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_rank_that_clips_alone_gets_an_error(stage: int) -> None:
    own = dist.new_group()  # in which a message is lost
    side = Sharded(Model(), stage=stage, stall_timeout_s=60.0, process_group=own)
    language_work(side, 0)
    started = time.monotonic()
    with pytest.raises((StallError, ApartError)) as caught:
        if dist.get_rank() == 0:
            clip_grad_norm_(side.module.parameters(), 1.0)
        for step in range(1, 3):
            side.step()
            side.zero_grad()
            language_work(side, step)
    assert time.monotonic() - started < 45.0
    assert "norm of gradients" in str(caught.value)
    side.engine.comm.waits.close()  # messages were lost: there is no release


@on_ranks(2)
def test_other_uses_are_refused_in_words() -> None:
    with Sharded(Model(), stage=3) as side:
        language_work(side, 0)
        weight = side.module.head.weight
        mask = torch.ones_like(weight)
        uses: Sequence[Callable[[], Any]] = (
            lambda: weight.grad.mul_(mask),
            lambda: weight.grad.add_(1),
            lambda: weight.grad.clamp_(mask, mask),
            lambda: torch._foreach_mul_([weight.grad], [mask]),
            lambda: weight.grad.div_(2, rounding_mode="floor"),
        )
        for use in uses:
            with pytest.raises(RuntimeError, match=r"gradient of head\.weight is sharded") as caught:
                use()
            assert not re.search(r"aten|_copy|default", str(caught.value))
