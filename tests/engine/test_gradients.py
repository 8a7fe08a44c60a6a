"""Norms and values of sharded gradients, torch's clipping of them, and changes in place: true, or refused in words."""

from __future__ import annotations

import copy
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
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import lightning_zero
from lightning_zero.comm.agreements import ApartError
from lightning_zero.comm.communicator import Communicator
from lightning_zero.ranks.verdict import StallError
from tests.engine.sides import Sharded, Twin, step_and_clear
from tests.engine.support import STAGES, assert_equal, assert_same
from tests.engine.test_hierarchy import history
from tests.engine.test_offload import offload
from tests.engine.works import language_work, loss_at, trained
from tests.harness import on_ranks
from tests.models import Model

pytestmark = pytest.mark.sample  # the full tier has all cases


@contextmanager
def exchanges() -> Iterator[list[str]]:
    """What ranks met for inside, besides a gather and the end."""
    found: list[str] = []
    gather = Communicator.gather_checked

    def counted(self: Communicator, value: object, what: str, **settings: bool) -> list[object]:
        if not what.startswith(("gather()", "inside gather()", "engine.release()")):
            found.append(what)
        return gather(self, value, what, **settings)

    with mock.patch.object(Communicator, "gather_checked", counted):
        yield found


def shared_grads(sharded: Sharded, twin: Twin) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Parameters by name, each with the gradient that its twin has; where that has none, so has this."""
    for (name, own), other in zip(sharded.module.named_parameters(), twin.masters, strict=True):
        assert (own.grad is None) == (other not in twin.grads), name
        if own.grad is not None:
            yield name, own, twin.grads[other]


def assert_norms(sharded: Sharded, twin: Twin, norm_type: float) -> None:
    for _, own, grad in shared_grads(sharded, twin):
        expected = torch.linalg.vector_norm(grad.double(), norm_type).float()
        torch.testing.assert_close(own.grad.norm(norm_type), expected, rtol=1e-5, atol=1e-12, equal_nan=True)


@on_ranks(2)
def test_all_stages_and_rows_agree_to_the_bit(tmp_path: Path) -> None:
    def norms(stage: int, row: str = "none") -> list[torch.Tensor]:
        torch.manual_seed(3)
        with Sharded(Model(), stage=stage, **offload(row, tmp_path)) as side:
            language_work(side, 0)
            return [p.grad.norm(p=t) for p in side.module.parameters() for t in (1, 2)]

    expected = norms(3)
    for place in ((0,), (1,), (2,), (2, "optimizer_nvme"), (3, "cpu")):
        assert_equal(norms(*place), expected, str(place))


@on_ranks(2)
def test_norms_take_one_exchange_until_gradients_change_and_none_where_they_are_replicated() -> None:
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
        assert head.bias.grad.norm() == 0.0 < head.weight.grad.norm()
        assert len(met) == 4
        with lightning_zero.gather(module, grads=True):
            head.bias.grad.fill_(2.0)
        for act in (lambda: None, sharded.step):
            act()
            assert head.bias.grad.norm() == pytest.approx(2.0 * head.bias.numel() ** 0.5)
        assert len(met) == 5
        sharded.zero_grad()
        language_work(sharded, 7)
        with lightning_zero.gather(module, grads=True):
            expected = head.bias.grad.norm()
        torch.testing.assert_close(head.bias.grad.norm(), expected)
        assert len(met) == 6
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


@on_ranks(2, full=(1, 3))
@STAGES
def test_norms_and_values_are_true(stage: int) -> None:
    sharded, twin = trained(stage=stage)
    with sharded:
        for norm_type in (0.0, 0.5, 1.0, 2.0, 3.0, 8.0, math.inf, -1.0, -math.inf):
            assert_norms(sharded, twin, norm_type)
        for name, param, expected in shared_grads(sharded, twin):
            for number, read in enumerate(READS):
                given = [torch.as_tensor(read(grad)) for grad in (param.grad, expected)]
                torch.testing.assert_close(*given, msg=lambda m, at=(name, number): f"{at}: {m}")
            values = param.grad.clone()
            assert type(values) is Tensor
            with lightning_zero.gather(param, grads=True):
                assert torch.equal(values, param.grad)


CHANGES: tuple[Callable[[Any], object], ...] = (
    lambda grad: grad[0].zero_(),
    lambda grad: grad.view(-1).mul_(2),
    lambda grad: grad[:2].unbind()[0].fill_(1),
    lambda grad: torch._foreach_mul_(list(grad.split(2)), 2.0),
    lambda grad: grad.__setitem__(0, 1.0),
    lambda grad: grad.__setitem__(grad > 0.1, 0.05),
    lambda grad: torch.add(grad, 1, out=grad),
    lambda grad: grad.data.add_(grad.data.sign()),
    lambda grad: grad.mul_(torch.arange(grad.numel()).view(grad.shape) % 3),
    lambda grad: grad.mul_(grad).add_(1).sub_(grad.mean()),
    lambda grad: grad.copy_(grad.T.contiguous().view(grad.shape)) if grad.dim() > 1 else grad.neg_(),
    lambda grad: torch._foreach_add_([grad, grad.view(-1)], 0.5),
    lambda grad: grad.div_(0.01, rounding_mode="floor").normal_(),
)


@on_ranks(2, full=(1, 3))
@STAGES
def test_gradients_that_are_changed_are_stepped_as_under_ddp(stage: int) -> None:
    sharded, twin = trained(stage=stage)
    with sharded:
        for number, change in enumerate(CHANGES):
            for name, param, expected in shared_grads(sharded, twin):
                kept = [grad.view(-1)[1:] for grad in (param.grad, expected)]
                torch.manual_seed(1)
                change(param.grad)
                torch.manual_seed(1)
                change(expected)
                at = f"{number}, {name}"
                torch.testing.assert_close(*[torch.add(view, 0) for view in kept], msg=lambda m, at=at: f"{at}: {m}")
        for _, param, expected in shared_grads(sharded, twin):
            param.grad.data = param.grad.sin()
            expected.sin_()
        assert_same(sharded, twin, grads=True)
        for side in (sharded, twin):
            side.step()
        for param in sharded.module.parameters():
            param.grad = torch.full_like(param, 0.5, dtype=param.grad.dtype)
        assert not any((grad - 0.5).any() for grad in [param.grad for param in sharded.module.parameters()])
        for other in twin.grads:
            twin.grads[other] = torch.full_like(other, 0.5)
        for side in (sharded, twin):
            side.step()
        assert_same(sharded, twin)


@on_ranks(2, full=(1, 3))
@STAGES
def test_gradients_are_assigned_in_the_dtype_that_they_are_read_in(stage: int) -> None:
    """And plain training after it computes as before: nothing is left on the parameter."""
    sharded, _ = trained(stage=stage, precision="bf16")
    params = list(sharded.module.parameters())
    with sharded:
        for param in params:
            wanted = param.grad + 2**-12
            assert wanted.dtype is torch.float32
            param.grad = wanted
            assert torch.equal(param.grad, wanted)
        sharded.step()
        language_work(sharded, 1)
    sharded.engine.release()
    assert {(param.dtype, param.grad_dtype) for param in params} == {(torch.float32,) * 2}


@on_ranks(2)
@STAGES
def test_what_cannot_be_written_to_gradients_is_refused_in_words(stage: int) -> None:
    sharded, twin = trained(stage=stage)
    weight = sharded.module.head.weight
    grad = weight.grad
    assert grad is not None and grad.shape == weight.shape and "head.weight" in repr(grad)
    with sharded:
        for use in (
            lambda: setattr(grad, "data", torch.zeros_like(sharded.module.head.bias)),
            lambda: setattr(grad[0], "data", torch.zeros_like(grad[0])),
        ):
            with pytest.raises(RuntimeError, match=r"grad\.data of head\.weight: expected a tensor of shape"):
                use()
        assert_same(sharded, twin, grads=True)
        sharded.zero_grad()
        for step in range(2):  # what a user has kept shows no gradient of a later backward
            for use in (grad.clone, grad.norm, grad.zero_):
                with pytest.raises(RuntimeError, match=r"head\.weight .*has been cleared.*clone"):
                    use()
            now = weight.grad
            language_work(sharded, step)
            assert now is None or weight.grad is now
            sharded.optimizer.zero_grad(set_to_none=False)
        weight.grad = grad
        for use in (sharded.step, lambda: clip_grad_norm_([weight], 1.0), lambda: language_work(sharded, 2)):
            with pytest.raises(RuntimeError, match="has been cleared"):
                use()
        sharded.engine.passes.abort()
        sharded.zero_grad()
        weight.grad = torch.full_like(weight, float(dist.get_rank()))
        with pytest.raises(RuntimeError, match=r"head\.weight\.grad was assigned, with other values on some ranks"):
            sharded.step()
        sharded.zero_grad()


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
@pytest.mark.parametrize(("read", "own", "others"), [
    ("norm", "norms of gradients", r"norm\(\)"),
    ("abs", "a read of the gradient of head", r"a read of \.grad,"),
    ("clip", "norm of gradients", "norm of gradients"),
])  # fmt: skip
def test_a_rank_that_asks_alone_gets_an_error(read: str, own: str, others: str) -> None:
    """And so does the other one, which goes on to its step and its next backward."""
    group = dist.new_group()  # in which a message is lost
    side = Sharded(Model(), stage=3, stall_timeout_s=3.0, process_group=group)
    language_work(side, 0)
    started = time.monotonic()
    soon = mock.patch("lightning_zero.engine.passes.passes.ABANDON_S", 0.5)
    with soon, pytest.raises((StallError, ApartError)) as caught:
        if dist.get_rank() == 0 and read == "clip":
            clip_grad_norm_(side.module.parameters(), 1.0)
        elif dist.get_rank() == 0:
            getattr(side.module.head.weight.grad, read)()
        for step in (1, 2):
            step_and_clear(side)
            language_work(side, step)
    assert time.monotonic() - started < 20.0
    assert re.search(own if dist.get_rank() == 0 else others, str(caught.value))
    side.engine.comm.waits.close()  # messages were lost: there is no release


@on_ranks(2)
def test_ranks_that_ask_for_other_types_of_norm_get_an_error() -> None:
    side = Sharded(Model(), stage=3, stall_timeout_s=3.0)
    language_work(side, 0)
    norm_type = 2 if dist.get_rank() == 0 else 1
    with pytest.raises(ApartError, match=r"norms of gradients, of type 2\n.*norms of gradients, of type 1"):
        side.module.head.weight.grad.norm(norm_type)
    assert side.module.head.weight.grad.norm() > 0  # nothing was lost
    side.engine.release()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_norms_after_a_backward_in_no_sync_are_of_this_ranks_gradients(stage: int) -> None:
    torch.manual_seed(0)
    alone = Model()
    with Sharded(copy.deepcopy(alone), stage=stage) as side:
        with side.no_sync():
            language_work(side, 0)
        loss_at(alone, 0).backward()
        for own, param in zip(side.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad.norm(), param.grad.norm())


@on_ranks(2)
@STAGES
def test_gradients_that_are_not_whole_are_neither_read_nor_changed(stage: int) -> None:
    with Sharded(Model(), stage=stage) as side:
        params, head = list(side.module.parameters()), side.module.head
        with side.no_sync():
            language_work(side, 0)
        waits = r"after a backward inside no_sync.*before the step"
        for use, said in (
            *[(lambda: clip_grad_value_(params, 1.0), waits)] * (stage > 1),
            *[(lambda: head.bias.grad.sign_(), waits)] * (stage > 1),
            (lambda: clip_grad_norm_(params, 1.0), r"inside no_sync\(\)"),
        ):
            with pytest.raises(RuntimeError, match=said):
                use()
        head.bias.grad.mul_(2)[1:] = 0
        first = head.bias.grad[0].item()
        head.bias.grad = head.bias.grad * (torch.arange(len(head.bias)) != 2)
        assert head.bias.grad.tolist() == [first, *[0] * (len(head.bias) - 1)] and first
        language_work(side, 1)
        clip_grad_norm_(params, 1.0)
        with side.module.blocks[1].up.weight.register_hook(lambda _: 1 / 0), pytest.raises(ZeroDivisionError):
            language_work(side, 1)
        read = head.weight.grad
        for use in (lambda: clip_grad_norm_(params, 1.0), lambda: clip_grad_value_(params, 1.0), read.norm, read.abs):
            with pytest.raises(RuntimeError, match="a backward has raised before its end"):
                use()
        side.zero_grad()
        language_work(side, 2)
        assert head.weight.grad.norm() > 0


# -- torch's own clipping, by norm and by value -----------------------------------------------------------------------


@on_ranks(2, full=(1, 3))
@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize(("row", "stage"), [("none", 0), ("none", 3), ("optimizer_nvme", 2), ("cpu", 3)])
def test_torch_s_clipping_is_our_own_to_the_bit(
    row: str, stage: int, norm_type: float, foreach: bool | None, tmp_path: Path
) -> None:
    def torchs(side: Sharded) -> Tensor:
        norm = clip_grad_norm_(side.module.parameters(), 0.1, norm_type, foreach=foreach)
        assert type(norm) is Tensor
        return norm

    def in_halves(side: Sharded) -> Tensor:
        params = list(side.module.parameters())
        norm = get_total_norm([p.grad for p in params if p.grad is not None], norm_type, foreach=foreach)
        clip_grads_with_norm_(params, 0.1, norm, foreach=foreach)
        return norm

    def trained_with(clip: Callable[[Sharded], Tensor]) -> list[Any]:
        torch.manual_seed(3)
        with exchanges() as met, Sharded(Model(), stage=stage, **offload(row, tmp_path)) as side:
            found = history(side, lambda side, step: (language_work(side, step).detach(), clip(side)))
            assert not met, "a message that is not needed"
        return found

    expected = trained_with(lambda side: side.clip(0.1, norm_type))
    for clip in (torchs, in_halves):
        assert_equal(trained_with(clip), expected)


@on_ranks(2, full=(1, 3))
@STAGES
@pytest.mark.parametrize("foreach", [None, True])
def test_torch_s_clipping_is_that_of_plain_gradients(stage: int, foreach: bool | None) -> None:
    sharded, twin = trained(stage=stage)
    with sharded:
        params, grads = list(sharded.module.parameters()), twin.grads.values()
        some = [p for i, p in enumerate(params) if i % 3]
        assert clip_grad_norm_(some, 1e6, foreach=foreach) < clip_grad_norm_(params, 1e6)
        norm = clip_grad_norm_(params, 0.1, foreach=foreach)
        torch.testing.assert_close(norm, get_total_norm(grads))
        for grad in grads:
            grad.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))  # of the last bits of ours
        assert_same(sharded, twin, grads=True)
        assert clip_grad_norm_(params, 1e6) == pytest.approx(0.1, rel=1e-3)
        clip_grad_value_(params, 1e-3, foreach=foreach)
        for grad in grads:
            grad.clamp_(-1e-3, 1e-3)
        assert_same(sharded, twin, grads=True)
        step_and_clear(sharded, twin)
        assert_same(sharded, twin)


@on_ranks(2)
@STAGES
def test_changes_in_place_are_made_in_their_order(stage: int) -> None:
    """And before the next backward adds to what they leave."""
    sharded, twin = trained(stage=stage)
    with sharded:
        for step in range(2):
            number = torch.tensor(3.0)
            for name, param, expected in shared_grads(sharded, twin):
                grads = [param.grad, expected]
                for grad in grads:
                    grad.mul_(number)
                number.fill_(2.0)  # what was asked for is what it was
                for grad in grads:
                    grad.mul_(number).clamp_(max=0.5)
                    grad.div_(number).clamp_(-1.0, 1e-2)
                    grad.clamp_(min=-1e-2)
                    if name == "embed.weight":
                        torch.nan_to_num(grad.div_(0.0), 0.5, posinf=0.25, neginf=-0.25, out=grad)
                        grad.div_(0.0).nan_to_num_(posinf=0.125, neginf=-0.5)
                    grad *= 0.5
                    grad /= 3
                    if name == "head.bias":
                        grad.zero_()
                        grad.mul_(math.inf if step else 2.0)
                        grad.zero_()
                number.fill_(3.0)
                assert grads[0].norm() == pytest.approx(float(grads[1].norm()))
            assert_same(sharded, twin, grads=True)
            if not step:
                for side in (sharded, twin):
                    language_work(side, 5)
        step_and_clear(sharded, twin)
        assert_same(sharded, twin)


@on_ranks(2)
def test_gradients_are_shown_with_the_scale_of_the_loss() -> None:
    """As under DDP, until they are unscaled."""
    with Sharded(Model(), stage=3) as side:
        reducer, params = side.engine.passes.reducer, list(side.module.parameters())

        def shown() -> Tensor:
            total = get_total_norm([p.grad for p in params])
            torch.testing.assert_close(torch.stack([p.grad.norm() for p in params]).norm(), total)
            return total

        reducer.set_loss_scale(1024.0)
        side.backward(1024.0 * loss_at(side.module, 0))
        true = lightning_zero.grad_norm(side.module)
        assert torch.equal(shown(), 1024.0 * true)
        clip_grad_norm_(params, 512.0 * float(true))
        torch.testing.assert_close(lightning_zero.grad_norm(side.module), true / 2)
        clip_grad_value_(params, 1.024)
        torch.testing.assert_close(lightning_zero.grad_norm(side.module, math.inf), torch.tensor(1e-3))
        reducer.unscale(params[:1])  # by one of two optimizers
        shown()
        reducer.unscale(params)
        clip_grad_value_(params, 1e-4)
        torch.testing.assert_close(lightning_zero.grad_norm(side.module, math.inf), torch.tensor(1e-4))


@on_ranks(2)
def test_two_modules_and_a_plain_one_are_clipped_together() -> None:
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
            own = get_total_norm([p.grad for p in plain.parameters()])
            norm = clip_grad_norm_(params, 0.1, foreach=foreach)
            torch.testing.assert_close(norm, torch.stack([*each, own]).norm())
            torch.testing.assert_close(lightning_zero.grad_norm(first.module), each[0] * min(1.0, 0.1 / float(norm)))


@on_ranks(1)
def test_a_scaler_of_ones_own_is_refused_by_name() -> None:
    module = Model()
    engine = lightning_zero.shard(module, stage=1, device="cpu")
    optimizer, scaler = torch.optim.AdamW(module.parameters()), torch.amp.GradScaler("cpu")
    engine.add_optimizer(optimizer)
    scaler.scale(sum(param.sum() for param in module.parameters())).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler: expected whole gradients .* precision='16-mixed'"):
        scaler.step(optimizer)
    engine.release()
