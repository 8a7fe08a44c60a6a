"""Optimizers on shards: norms, clipping, state, refusals."""

from __future__ import annotations

import copy
import functools
import io
import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_zero
from lightning_zero.engine.whole import state_dicts, whole_params
from lightning_zero.optimizers.known import ELEMENTWISE
from tests.engine.optimizers import Lamb, Langevin, NormOverAll, Shared, WarmsUp
from tests.engine.support import (
    MakeOptimizer,
    Model,
    Sharded,
    Side,
    Twin,
    adamw,
    assert_same,
    autocast,
    check,
    floats,
    language_loss,
    language_work,
    sgd,
    tokens,
)
from tests.engine.test_offload import offload
from tests.harness import on_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
OUTER_STAGES = pytest.mark.parametrize("stage", [0, 3])


# -- norms and clipping -----------------------------------------------------------------------------------------------


def tied_model() -> nn.Module:
    module = Model()
    module.head.weight = module.embed.weight
    module.scale = nn.Parameter(torch.tensor(2.0))  # 0-d: replicated at every stage, to be counted once
    module.register_forward_hook(lambda m, _, out: out * m.scale)
    return module


@on_ranks(3, full=(1, 2))
@STAGES
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.mainly(lambda stage, norm_type: stage == 3 or norm_type in (2.0, math.inf))
def test_norm_and_clipping_equal_torch_s(stage: int, norm_type: float) -> None:
    torch.manual_seed(3)
    module = tied_model()
    twin = Twin(module, optimizer=sgd, each=stage >= 2)
    with Sharded(module, stage=stage, optimizer=sgd) as sharded:
        for step in range(2):
            for side in (sharded, twin):
                language_work(side, step)
            own = lightning_zero.grad_norm(module, norm_type)
            norms = [side.clip(0.5, norm_type) for side in (sharded, twin)]
            assert torch.equal(own, norms[0])
            torch.testing.assert_close(norms[0], norms[1])
            assert_same(sharded, twin, grads=True, tolerance=1e-6)
            torch.testing.assert_close(
                lightning_zero.grad_norm(module, norm_type), torch.tensor(0.5), rtol=1e-4, atol=0
            )
            for side in (sharded, twin):
                side.step()
                side.zero_grad()
            assert_same(sharded, twin, tolerance=1e-6)


@on_ranks(2)
@OUTER_STAGES
def test_norms_of_complex_gradients_are_real(stage: int) -> None:
    module = nn.Linear(3, 5, dtype=torch.complex64)
    twin = Twin(module, optimizer=sgd)
    with Sharded(module, stage=stage, optimizer=sgd) as side:
        for each in (side, twin):
            each.backward(each.module(torch.ones(2, 3, dtype=torch.complex64)).abs().sum())
        norms = [each.clip(0.5) for each in (side, twin)]
        assert norms[0].dtype == torch.float32
        torch.testing.assert_close(*norms)
        assert_same(side, twin, grads=True, tolerance=1e-6)


@on_ranks(2)
@OUTER_STAGES
def test_norm_of_some_parameters(stage: int) -> None:
    module = Model()
    twin = Twin(module)
    with Sharded(module, stage=stage) as sharded:
        for side in (sharded, twin):
            language_work(side, 0)
        for name in ("blocks.1", "head", "blocks.0.up"):
            grads = [twin.grads[p] for p in twin.module.get_submodule(name).parameters()]
            expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))
            torch.testing.assert_close(lightning_zero.grad_norm(module.get_submodule(name)), expected)


@on_ranks(2)
def test_a_small_norm_is_not_scaled_up() -> None:
    with Sharded(Model()) as side:
        language_work(side, 0)
        before = lightning_zero.grad_norm(side.module)
        side.clip(1e6)
        assert torch.equal(lightning_zero.grad_norm(side.module), before)


@on_ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_on_demand() -> None:
    with Sharded(Model()) as side:
        language_work(side, 0)
        with lightning_zero.gather(side.module, grads=True):
            side.module.head.bias.grad[0] = math.inf
        assert side.clip(1.0).isinf()
        with lightning_zero.gather(side.module, grads=True):
            side.module.head.bias.grad[0] = math.nan
        with pytest.raises(RuntimeError, match="gradient norm is"):
            lightning_zero.clip_grad_norm_(side.module, 1.0, error_if_nonfinite=True)


@on_ranks(2)
def test_norm_takes_one_message() -> None:
    with Sharded(Model()) as side:
        language_work(side, 0)
        issued: list[str] = []
        side.engine.comm.observers.append(lambda kind, _: issued.append(kind))
        side.clip(1.0)
        assert len(issued) == 1


# -- graphs of before a step ------------------------------------------------------------------------------------------

ROWS = pytest.mark.parametrize(
    ("stage", "row"), [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer_cpu"), (3, "cpu")]
)


@on_ranks(2)
@ROWS
@pytest.mark.parametrize("plain", [False, True], ids=["told", "noticed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_true"])
def test_a_backward_of_before_a_step_is_refused_as_by_torch(stage: int, row: str, plain: bool, precision: str) -> None:
    """Gradients would be of activations of the old weights and of the new weights."""

    def work(side: Side, step: int) -> Tensor:
        stale = language_loss(side.module, tokens(step + 10))
        loss = language_work(side, step)
        if step == 1:
            side.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                side.backward(stale)
            if isinstance(side, Sharded):
                side.engine.passes.abort()
            for param in side.module.parameters():
                param.grad = None
            side.zero_grad()
            language_work(side, step)
        return loss

    check(Model, work, stage=stage, offload=row, plain=plain, precision=precision)


class TwoHeads(nn.Module):
    """Both are of the root unit, and so of one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(19, 19), nn.Linear(19, 19)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x).square().mean(), self.second(x).square().mean()


@on_ranks(2)
@ROWS
def test_a_step_of_other_parameters_leaves_a_graph_as_it_was(stage: int, row: str) -> None:
    """Two optimizers, as of adversarial networks; also where their parameters lie in one bucket."""
    torch.manual_seed(3)
    module = TwoHeads()
    plain = copy.deepcopy(module)
    for param in (*module.parameters(), *plain.parameters()):
        dist.broadcast(param.data, 0)
    x = torch.randn(4, 19, generator=torch.Generator().manual_seed(1))  # the same on all ranks: the mean is each
    engine = lightning_zero.shard(module, device="cpu", stage=stage, offload=row)
    for model, act in ((module, engine.passes.backward), (plain, torch.Tensor.backward)):
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model.second)]
        if model is module:
            for optimizer in optimizers:
                engine.add_optimizer(optimizer)
        for _ in range(2):
            first, second = model(x)
            for loss, optimizer in zip((first, second), optimizers, strict=True):
                act(loss)
                optimizer.step()
                optimizer.zero_grad()
    with lightning_zero.gather(module):
        for own, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, other)
    engine.release()


# -- every optimizer --------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw with maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd with nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "sgd with dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def test_every_element_wise_class_is_among_them() -> None:
    made = {type(make([nn.Parameter(torch.zeros(2))])) for make in OPTIMIZERS.values()}
    assert made == set(ELEMENTWISE)


@on_ranks(2)
@OUTER_STAGES
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.mainly(lambda stage, name: stage == 3 or name == "adam")
def test_element_wise_optimizers_of_torch(stage: int, name: str) -> None:
    check(Model, language_work, stage=stage, optimizer=OPTIMIZERS[name], steps=4, tolerance=1e-6)


@on_ranks(2)
@OUTER_STAGES
def test_adagrad_starts_complex_parameters_as_torch_does(stage: int) -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(19, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.turn).abs() + x

    def work(side: Side, step: int) -> Tensor:
        loss = side.module(floats(step, 4, 19)).square().mean()
        side.backward(loss)
        return loss

    check(
        lambda: nn.Sequential(Turns(), Turns()),
        work,
        stage=stage,
        optimizer=lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    )


@on_ranks(2, full=(3,))
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
def test_param_groups_with_settings_of_their_own(stage: int, precision: str) -> None:
    """No decay for vectors: groups alternate inside every bucket."""

    def grouped(params: Iterable[nn.Parameter]) -> Optimizer:
        params = list(params)
        bounds = (200, 400)  # by size, which the twin's flat masters keep
        groups = [
            {"params": [p for p in params if p.numel() < bounds[0]], "weight_decay": 0.0},
            {"params": [p for p in params if bounds[0] <= p.numel() < bounds[1]], "lr": 0.02},
            {"params": [p for p in params if bounds[1] <= p.numel()], "betas": (0.8, 0.9)},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3, fused=True)

    check(Model, language_work, stage=stage, precision=precision, optimizer=grouped)


@on_ranks(2)
@OUTER_STAGES
def test_several_optimizers(stage: int) -> None:
    """Stepped in turns; the second one's gradients wait for it."""
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module)
    engine = lightning_zero.shard(module, stage=stage, device="cpu")
    names = dict(module.named_parameters())
    blocks = [n for n in names if n.startswith("blocks")]
    others = [n for n in names if n not in blocks]
    ours = [adamw([names[n] for n in part]) for part in (blocks, others)]
    for optimizer in ours:
        engine.add_optimizer(optimizer)
    masters = dict(zip(names, twin.masters.values(), strict=True))
    theirs = [adamw([masters[n].flat for n in part]) for part in (blocks, others)]
    for step in range(4):
        engine.passes.backward(language_loss(module, tokens(step)))
        twin.backward(language_loss(twin.module, tokens(step)))
        twin.show_grads()
        which = step % 2
        ours[which].step()
        theirs[which].step()
        with torch.no_grad():
            for param, master in twin.masters.items():
                param.copy_(master.value)
        module.zero_grad()
        twin.zero_grad()
        with lightning_zero.gather(module):
            for own, master in zip(module.parameters(), twin.masters.values(), strict=True):
                assert torch.equal(own, master.value)
    engine.release()


@on_ranks(2)
def test_the_user_s_optimizer_object_lists_the_user_s_parameters() -> None:
    with Sharded(Model()) as side:
        params = list(side.module.parameters())
        assert [id(p) for p in side.optimizer.param_groups[0]["params"]] == [id(p) for p in params]
        language_work(side, 0)
        side.step()
        assert [id(p) for p in side.optimizer.param_groups[0]["params"]] == [id(p) for p in params]


@on_ranks(2)
@OUTER_STAGES
def test_schedulers_and_closures(stage: int) -> None:
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module)
    with Sharded(module, stage=stage) as sharded:
        schedulers = [torch.optim.lr_scheduler.StepLR(side.optimizer, 2, 0.5) for side in (sharded, twin)]
        for step in range(5):
            language_work(twin, step)
            twin.step()
            loss = sharded.optimizer.step(functools.partial(language_work, sharded, step))
            assert isinstance(loss, Tensor)
            for side, scheduler in zip((sharded, twin), schedulers, strict=True):
                side.zero_grad()
                scheduler.step()
            assert_same(sharded, twin)
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() == [0.0025]


@on_ranks(2)
def test_an_optimizer_built_before_sharding() -> None:
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module)
    optimizer = adamw(module.parameters())
    engine = lightning_zero.shard(module, device="cpu")
    engine.add_optimizer(optimizer)
    for step in range(2):
        engine.passes.backward(language_loss(module, tokens(step)))
        optimizer.step()
        optimizer.zero_grad()
        language_work(twin, step)
        twin.step()
        twin.zero_grad()
    with lightning_zero.gather(module):
        for own, master in zip(module.parameters(), twin.masters.values(), strict=True):
            assert torch.equal(own, master.value)
    engine.release()


# -- refusals ---------------------------------------------------------------------------------------------------------


class SignDescent(Optimizer):
    """Element-wise, and unknown to us."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.sub_(self.state[p]["mean"].sign(), alpha=group["lr"])


FIRST_OF_ITS_BASE = """
import torch
from torch import nn
import lightning_zero

class Named(torch.optim.AdamW):
    pass

module = nn.Linear(4, 4)
engine = lightning_zero.shard(module, device="cpu")
optimizer = Named(module.parameters())
engine.add_optimizer(optimizer)
engine.passes.backward(module(torch.ones(2, 4)).sum())
optimizer.step()
assert type(optimizer) is Named
"""


@pytest.mark.full
def test_a_class_without_a_step_of_its_own_is_its_base_also_where_that_was_never_used() -> None:
    """torch puts its hooks around the step of the first class that is used: in a process without others."""
    subprocess.run([sys.executable, "-c", FIRST_OF_ITS_BASE], check=True, timeout=100)


@on_ranks(2, full=(1, 3))
@pytest.mark.parametrize(
    ("stage", "row"), [(0, "none"), (1, "none"), (3, "none"), (2, "optimizer_cpu"), (3, "cpu"), (3, "nvme")]
)
def test_a_class_of_torch_s_with_a_step_of_its_own_that_is_declared_element_wise(
    stage: int, row: str, tmp_path: Path
) -> None:
    make = lambda params: WarmsUp(params, weight_decay=0.1, fused=True)  # noqa: E731
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, optimizer=make, each=stage >= 2)
    calls: dict[Side, list[str]] = {twin: []}
    settings = {"optimizer_settings": {"sharding": "slices"}, **offload(row, tmp_path)}
    with Sharded(module, optimizer=make, stage=stage, **settings) as sharded:
        scheduler = torch.optim.lr_scheduler.LambdaLR(sharded.optimizer, lambda _: 1.0)
        calls[sharded] = []
        for side, own in calls.items():  # torch calls them twice, if the class above has been used too
            side.optimizer.register_step_pre_hook(lambda *_, own=own: own.append("before"))
            side.optimizer.register_step_post_hook(lambda *_, own=own: own.append("after"))
        for step in range(4):
            for side in (sharded, twin):
                language_work(side, step)
                side.step()
                side.zero_grad()
            scheduler.step()
            assert_same(sharded, twin)
        assert calls[sharded] == calls[twin] and type(sharded.optimizer) is WarmsUp
    assert "step" not in sharded.optimizer.__dict__


@on_ranks(2, full=(1, 3))
@pytest.mark.parametrize(
    ("stage", "row"), [(0, "none"), (1, "none"), (3, "none"), (2, "optimizer_cpu"), (3, "cpu"), (3, "nvme")]
)
def test_parameters_in_two_optimizers(stage: int, row: str, tmp_path: Path) -> None:
    """Both step with the same gradient, and keep states of their own."""
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, each=stage >= 2)
    with Sharded(module, stage=stage, **offload(row, tmp_path)) as sharded:
        second = sgd([*module.blocks[1].parameters(), *module.head.parameters()])
        sharded.engine.add_optimizer(second)
        params = dict(twin.module.named_parameters())
        chosen = [twin.masters[p] for n, p in params.items() if n.startswith(("blocks.1.", "head."))]
        plain_second = sgd([master.flat for master in chosen])
        for step in range(4):
            for side in (sharded, twin):
                language_work(side, step)
                side.step()
            second.step()
            twin.show_grads()
            for master in chosen:
                plain_second.state[master.flat].setdefault("momentum_buffer", torch.zeros_like(master.flat))
            plain_second.step()
            for param, master in twin.masters.items():
                param.data.copy_(master.value)
            assert_same(sharded, twin)
            for side in (sharded, twin):
                side.zero_grad()
        states = [
            state_dicts.optimizer_state(sharded.engine, o, only_rank_0=False) for o in (sharded.optimizer, second)
        ]
        assert all("exp_avg" in s for s in states[0]["state"].values())
        assert all("momentum_buffer" in s for s in states[1]["state"].values())
        for optimizer, state in zip((sharded.optimizer, second), states, strict=True):
            state_dicts.load_optimizer_state(sharded.engine, optimizer, state)
        for optimizer, state in zip((sharded.optimizer, second), states, strict=True):
            again = state_dicts.optimizer_state(sharded.engine, optimizer, only_rank_0=False)["state"]
            for number, values in state["state"].items():
                assert all(
                    torch.equal(torch.as_tensor(v), torch.as_tensor(again[number][n])) for n, v in values.items()
                )


@on_ranks(2)
@STAGES
def test_an_unknown_optimizer_that_is_declared_element_wise(stage: int) -> None:
    settings = {"optimizer": {"sharding": "slices"}}
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, optimizer=SignDescent)
    engine = lightning_zero.shard(module, stage=stage, device="cpu", **settings)
    optimizer = SignDescent(module.parameters())
    engine.add_optimizer(optimizer)
    for step in range(3):
        engine.passes.backward(language_loss(module, tokens(step)))
        optimizer.step()
        optimizer.zero_grad()
        language_work(twin, step)
        twin.step()
        twin.zero_grad()
        with lightning_zero.gather(module):
            for own, master in zip(module.parameters(), twin.masters.values(), strict=True):
                assert torch.equal(own, master.value)
    engine.release()


@on_ranks(1)
def test_what_is_declared_element_wise_and_is_not_is_refused() -> None:
    """Norms of slices are others, and each rank's norm over all is its own; random numbers cannot be tried."""
    wrong = "came out otherwise"
    for kind, why in (
        (Lamb, wrong),
        (torch.optim.Adafactor, wrong),
        (NormOverAll, wrong),
        (Shared, wrong),
        (Langevin, ""),
    ):
        module = Model()
        engine = lightning_zero.shard(module, device="cpu", optimizer={"sharding": "slices"})
        if why:
            with pytest.raises(ValueError, match=rf"zero\.optimizer\.sharding: .*{kind.__name__}.*{why}"):
                engine.add_optimizer(kind(module.parameters()))
        else:
            engine.add_optimizer(kind(module.parameters()))
        engine.release()


@on_ranks(1, 2)
def test_bad_parameters_are_refused_by_name() -> None:
    module = Model()
    engine = lightning_zero.shard(module, device="cpu")
    engine.add_optimizer(adamw(module.blocks.parameters()))
    foreign = nn.Linear(7, 3)
    with pytest.raises(ValueError, match=r"shape \(3, 7\) is not part of the sharded module"):
        engine.add_optimizer(sgd([*module.head.parameters(), *foreign.parameters()]))
    with pytest.raises(ValueError, match="differentiable"):
        engine.add_optimizer(torch.optim.SGD(module.head.parameters(), differentiable=True))
    engine.add_optimizer(sgd(module.head.parameters()))
    engine.release()


@on_ranks(2)
def test_a_parameter_added_to_a_group_later_that_is_not_ours_is_refused() -> None:
    with Sharded(Model()) as side:
        side.optimizer.add_param_group({"params": nn.Linear(7, 3).parameters()})
        language_work(side, 0)
        with pytest.raises(ValueError, match="not part of the sharded module"):
            side.step()


@on_ranks(2)
def test_state_dicts_of_slices_are_refused_with_the_way_out() -> None:
    with Sharded(Model()) as side:
        with pytest.raises(RuntimeError, match="optimizer_state"):
            side.optimizer.state_dict()
        with pytest.raises(RuntimeError, match="load_optimizer_state"):
            side.optimizer.load_state_dict({})
    side.optimizer.state_dict()  # after release it is the plain object again


# -- optimizer state --------------------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


def unused_head(side: Side, step: int) -> Tensor:
    """Leaves the head alone in odd steps, so that step counts differ."""
    module = side.module
    if step % 2 == 0:
        return language_work(side, step)
    x = module.embed(tokens(step))
    for block in module.blocks:
        x = block(x)
    loss = x.square().mean()
    side.backward(loss)
    return loss


def train(side: Side, steps: Iterable[int], precision: str) -> None:
    for step in steps:
        scope = side.engine.step_scope("train") if isinstance(side, Sharded) else autocast("fp32")
        with scope, autocast(precision):
            unused_head(side, step)
        side.step()
        side.zero_grad()


@on_ranks(3, full=(1, 2))
@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.mainly(lambda stage, optimizer: stage in (1, 3) or optimizer is adamw)
def test_optimizer_state_is_that_of_the_plain_optimizer(stage: int, precision: str, optimizer: MakeOptimizer) -> None:
    torch.manual_seed(3)
    module = Model()
    twin = Twin(module, optimizer=optimizer, precision=precision, each=stage >= 2)
    with Sharded(module, stage=stage, precision=precision, optimizer=optimizer) as sharded:
        for side in (sharded, twin):
            train(side, range(3), precision)
        own = state_dicts.optimizer_state(sharded.engine, sharded.optimizer, only_rank_0=False)
        expected = twin.optimizer.state_dict()
        settings = [[{**group, "fused": None} for group in state["param_groups"]] for state in (own, expected)]
        assert settings[0] == settings[1]
        assert own["state"].keys() == expected["state"].keys()
        for number, param in enumerate(module.parameters()):
            for key, value in expected["state"][number].items():
                found = own["state"][number][key]
                if value.dim():
                    assert found.shape == param.shape
                    value = value[: param.numel()].view(param.shape)
                assert torch.equal(found, value), (number, key)
        if dist.get_rank():
            assert state_dicts.optimizer_state(sharded.engine, sharded.optimizer) == {}
        else:
            state_dicts.optimizer_state(sharded.engine, sharded.optimizer)


def _assert_resumes(source: int, target: int, precision: str, optimizer: MakeOptimizer) -> None:
    torch.manual_seed(3)
    module, expected = Model(), None
    with Sharded(module, stage=source, precision=precision, optimizer=optimizer) as first:
        train(first, range(3), precision)
        weights = through_a_file(first.engine.state_dict(only_rank_0=False))
        state = through_a_file(state_dicts.optimizer_state(first.engine, first.optimizer, only_rank_0=False))
        train(first, range(3, 6), precision)
        expected = first.engine.state_dict(only_rank_0=False)
    with Sharded(Model(), stage=target, precision=precision, optimizer=optimizer) as second:
        train(second, range(1), precision)  # what was there is replaced
        second.engine.load_state_dict(weights)
        whole_params.masters_changed(second.engine)
        state_dicts.load_optimizer_state(second.engine, second.optimizer, state)
        train(second, range(3, 6), precision)
        for name, value in second.engine.state_dict(only_rank_0=False).items():
            assert torch.equal(value, expected[name]), name


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("source", "target"), [(3, 3), (0, 3), (3, 1), (2, 0)])
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_training_resumes_in_any_stage(source: int, target: int, precision: str, optimizer: MakeOptimizer) -> None:
    _assert_resumes(source, target, precision, optimizer)


@on_ranks(2)
@OUTER_STAGES
def test_state_goes_into_a_plain_optimizer_and_back(stage: int) -> None:
    torch.manual_seed(3)
    module = Model()
    with Sharded(module, stage=stage) as side:
        train(side, range(3), "fp32")
        plain = copy.deepcopy(Model())
        plain.load_state_dict(side.engine.state_dict(only_rank_0=False))
        optimizer = adamw(plain.parameters())
        optimizer.load_state_dict(state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False))
        state_dicts.load_optimizer_state(side.engine, side.optimizer, optimizer.state_dict())
        again = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(again["state"][number][key], value)


@on_ranks(2)
@pytest.mark.parametrize("row", ["none", "optimizer_cpu", "optimizer_nvme"])
def test_state_that_is_loaded_goes_where_the_old_one_was(row: str, tmp_path: Path) -> None:
    """Beside the old one it would be in memory twice for a while."""
    torch.manual_seed(3)
    with Sharded(Model(), **offload(row, tmp_path)) as side:
        train(side, range(3), "fp32")
        saved = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)
        weights = side.engine.state_dict(only_rank_0=False)
        train(side, range(3, 5), "fp32")
        later = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)
        before = [state["exp_avg"] for state in side.optimizer.state.values()]
        state_dicts.load_optimizer_state(side.engine, side.optimizer, saved)
        side.engine.load_state_dict(weights)
        after = [state["exp_avg"] for state in side.optimizer.state.values()]
        assert {id(tensor) for tensor in after} == {id(tensor) for tensor in before}
        assert_states_equal(state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False), saved)
        train(side, range(3, 5), "fp32")
        assert_states_equal(state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False), later)


def assert_states_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert state.keys() == found["state"][number].keys()
        assert all(torch.equal(found["state"][number][key], value) for key, value in state.items())


@on_ranks(2)
def test_state_of_another_model_is_refused() -> None:
    with Sharded(Model()) as side:
        other = adamw(Model(width=23).parameters())
        for param in other.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        other.step()
        with pytest.raises(ValueError, match=r"embed\.weight has shape"):
            state_dicts.load_optimizer_state(side.engine, side.optimizer, other.state_dict())
        fewer = adamw(list(Model().parameters())[:-1])
        with pytest.raises(ValueError, match="param groups"):
            state_dicts.load_optimizer_state(side.engine, side.optimizer, fewer.state_dict())


@on_ranks(2)
def test_settings_of_param_groups_are_loaded() -> None:
    with Sharded(Model()) as side:
        state = state_dicts.optimizer_state(side.engine, side.optimizer, only_rank_0=False)
        state["param_groups"][0]["lr"] = 0.123
        state_dicts.load_optimizer_state(side.engine, side.optimizer, state)
        assert side.optimizer.param_groups[0]["lr"] == 0.123


# -- optimizers that were used before ---------------------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_that_has_stepped_before_goes_on(kind: Any, stage: int) -> None:
    """Its state of whole parameters goes into the runs, and is not held a second time."""
    torch.manual_seed(3)
    module = Model()
    plain = copy.deepcopy(module)
    optimizers = [kind(m.parameters(), lr=0.01) for m in (module, plain)]
    for m, optimizer in zip((module, plain), optimizers, strict=True):
        language_loss(m, tokens(0, rank=0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = lightning_zero.shard(module, stage=stage, device="cpu")
    engine.add_optimizer(optimizers[0])
    assert not any(isinstance(key, nn.Parameter) for key in optimizers[0].state)
    for step in (1, 2):
        engine.passes.backward(language_loss(module, tokens(step, rank=0)))
        language_loss(plain, tokens(step, rank=0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with lightning_zero.gather(module):
        for own, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.detach(), other.detach(), rtol=1e-5, atol=1e-6)
    engine.release()
