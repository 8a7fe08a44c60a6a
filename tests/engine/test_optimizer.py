"""Optimizers on shards: norms, clipping, state, refusals."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import lightning_zero
from lightning_zero.engine.whole import state_dicts, whole_params
from lightning_zero.engine.whole.values import OnRank0
from lightning_zero.optimizers.known import ELEMENTWISE
from tests.engine.optimizers import Lamb, Langevin, NormOverAll, Shared, SignDescent, WarmsUp
from tests.engine.sides import MakeOptimizer, Sharded, Side, adamw, load_state, sgd, state_of, step_and_clear, with_twin
from tests.engine.support import IN_STAGES, OUTER_STAGES, PRECISIONS, STAGES, assert_equal, assert_same, check
from tests.engine.test_mixed_dtypes import STOCHASTIC
from tests.engine.test_offload import offload, slow_steps
from tests.engine.works import floats, language_work, loss_at, mean_square, scope, tokens, train, train_both
from tests.harness import on_ranks
from tests.models import WIDTH, Does, Model, linear
from tests.rows import PLACES as OFFLOADED

pytestmark = pytest.mark.sample  # the full tier has all cases

OUTER = pytest.mark.parametrize("stage", OUTER_STAGES)
PLACES = pytest.mark.parametrize(
    ("stage", "row"), [(0, "none"), (1, "none"), (3, "none"), (2, "optimizer_cpu"), (3, "cpu"), (3, "nvme")]
)


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
    with with_twin(tied_model, stage=stage, optimizer=sgd) as sides:
        sharded, twin = sides
        for step in range(2):
            for side in sides:
                language_work(side, step)
            before = lightning_zero.grad_norm(sharded.module, norm_type)
            own, expected = (side.clip(0.5, norm_type) for side in sides)
            assert torch.equal(before, own)
            torch.testing.assert_close(own, expected)
            assert_same(sharded, twin, grads=True, tolerance=1e-6)
            clipped = lightning_zero.grad_norm(sharded.module, norm_type)
            torch.testing.assert_close(clipped, torch.tensor(0.5), rtol=1e-4, atol=0)
            step_and_clear(*sides)
            assert_same(sharded, twin, tolerance=1e-6)


@on_ranks(2)
def test_complex_parameters_train_and_are_clipped_as_by_torch() -> None:
    """Norms are real; the state of Adagrad starts at another complex number than zero."""

    def build() -> nn.Module:
        turns = lambda: nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))  # noqa: E731
        return nn.Sequential(*(Does(lambda m, x: (x * m.turn).abs() + x, turn=turns()) for _ in range(2)))

    def work(side: Side, step: int) -> Tensor:
        mean_square(side, step)
        norm = side.clip(0.5)
        assert norm.dtype == torch.float32
        return norm

    adagrad = lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1)  # noqa: E731
    check(build, work, stage=OUTER_STAGES, optimizer=adagrad, tolerance=1e-6)


@on_ranks(2)
@OUTER
def test_a_norm_is_that_of_some_parameters_in_one_message(stage: int) -> None:
    with with_twin(stage=stage) as (sharded, twin):
        for side in (sharded, twin):
            language_work(side, 0)
        module = sharded.module
        for name in ("blocks.1", "head", "blocks.0.up"):
            grads = [twin.grads[p] for p in twin.module.get_submodule(name).parameters()]
            expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))
            torch.testing.assert_close(lightning_zero.grad_norm(module.get_submodule(name)), expected)
        before = lightning_zero.grad_norm(module)
        issued: list[str] = []
        sharded.engine.comm.observers.append(lambda kind, _: issued.append(kind))
        sharded.clip(1e6)
        assert len(issued) == 1
        assert torch.equal(lightning_zero.grad_norm(module), before)  # a small norm is not scaled up
        for bad in (math.inf, math.nan):
            with lightning_zero.gather(module, grads=True):
                module.head.bias.grad[0] = bad
            with pytest.raises(RuntimeError, match="gradient norm is"):
                lightning_zero.clip_grad_norm_(module, 1.0, error_if_nonfinite=True)
        assert sharded.clip(1.0).isnan()


# -- graphs of before a step ------------------------------------------------------------------------------------------

ROWS = pytest.mark.parametrize(
    ("stage", "row"), [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer_cpu"), (3, "cpu")]
)


@on_ranks(2)
@ROWS
@pytest.mark.parametrize("precision", ["fp32", "bf16_true"])
def test_a_backward_of_before_a_step_is_refused_as_by_torch(stage: int, row: str, precision: str) -> None:
    """Gradients would be of activations of the old weights and of the new weights."""

    def work(side: Side, step: int) -> Tensor:
        stale = loss_at(side.module, step + 10)
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

    check(Model, work, stage=stage, offload=row, plain=(False, True), precision=precision)


@on_ranks(2)
@ROWS
def test_a_step_of_other_parameters_leaves_a_graph_as_it_was(stage: int, row: str) -> None:
    """Two optimizers, as of adversarial networks; also where their parameters lie in one bucket."""
    heads = lambda m, x: (m.first(x).square().mean(), m.second(x).square().mean())  # noqa: E731
    module = Does(heads, first=linear(), second=linear())  # both are of the root unit
    plain = copy.deepcopy(module)
    x = floats(0, 4, WIDTH, rank=0)  # the same on all ranks: the mean is each
    engine = lightning_zero.shard(module, device="cpu", stage=stage, offload=row)
    for model, act in ((module, engine.passes.backward), (plain, torch.Tensor.backward)):
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model.second)]
        for optimizer in optimizers if model is module else ():
            engine.add_optimizer(optimizer)
        for _ in range(2):
            for loss, optimizer in zip(model(x), optimizers, strict=True):
                act(loss)
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(engine.state_dict(only_rank_0=False), plain.state_dict())
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
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.sample
def test_element_wise_optimizers_of_torch_train(name: str) -> None:
    check(Model, in_turns, stage=OUTER_STAGES, optimizer=OPTIMIZERS[name], steps=4, tolerance=1e-6)


def in_turns(side: Side, step: int) -> None:
    """Trains the rest in step 0 and the head in step 1, with other settings: only their counts of steps are equal."""
    for group in side.optimizer.param_groups:
        group.update({key: group[key] * 0.5 for key in ("lr", "momentum_decay") if key in group})
    if step != 1:
        unused_head(side, 2 * step if step else 1)
        return
    with scope(side):
        side.backward(side.module.head(floats(step, 4, WIDTH)).square().mean())


@on_ranks(2, full=(3,))
@IN_STAGES
@PRECISIONS
def test_param_groups_have_settings_of_their_own(stages: tuple[int, ...], precision: str) -> None:
    """No decay for vectors: groups alternate inside every bucket. The last one is gone for two steps."""

    def work(side: Any, step: int) -> Tensor:
        groups = side.optimizer.param_groups
        if step == 1:
            side.gone = groups.pop()
        elif step == 3:
            groups.append(side.gone)
        side.module.zero_grad()
        return language_work(side, step)

    def grouped(params: Iterable[nn.Parameter]) -> Optimizer:
        params = list(params)
        bounds = (200, 400)  # by size, which the twin's flat masters keep
        groups = [
            {"params": [p for p in params if p.numel() < bounds[0]], "weight_decay": 0.0},
            {"params": [p for p in params if bounds[0] <= p.numel() < bounds[1]], "lr": 0.02},
            {"params": [p for p in params if bounds[1] <= p.numel()], "betas": (0.8, 0.9)},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3, fused=True)

    check(Model, work, stage=stages, precision=precision, optimizer=grouped, steps=4)


# -- refusals ---------------------------------------------------------------------------------------------------------


KINDS: dict[str, tuple[MakeOptimizer, str]] = {
    "of torch": (sgd, "auto"),
    "unknown, declared element-wise": (SignDescent, "slices"),
    "with a step of its own, declared element-wise": (lambda p: WarmsUp(p, weight_decay=0.1, fused=True), "slices"),
    "that steps whole tensors": (sgd, "tensors"),
}


@on_ranks(2, full=(1, 3))
@PLACES
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_and_schedulers_of_any_optimizer_set_what_a_step_takes(
    kind: str, stage: int, row: str, tmp_path: Path
) -> None:
    """Hooks run once a step, see the user's parameters, clip gradients before it and change weights after it."""
    calls: dict[Optimizer, list[str]] = {}
    shown: dict[Optimizer, Any] = {}
    schedulers: dict[Optimizer, Any] = {}
    make, sharding = KINDS[kind]

    def again(optimizer: Optimizer, when: str) -> bool:
        """Whether torch calls hooks of the twin a second time, where its class calls ``super().step()``."""
        twice = shown[optimizer] is contextlib.nullcontext and calls[optimizer][-1:] == [when]
        calls[optimizer] += [when] * (not twice)
        return twice

    def halve(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups if not again(optimizer, "before") else ():
            group["lr"] *= 0.5
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)

    def clamp(optimizer: Optimizer, *_: Any) -> None:
        if again(optimizer, "after"):
            return
        with shown[optimizer](), torch.no_grad():
            for group in optimizer.param_groups:
                torch._foreach_clamp_max_(group["params"], 0.1)

    def work(side: Side, step: int) -> Tensor:
        optimizer = side.optimizer
        if step == 0:
            calls[optimizer], shown[optimizer] = [], contextlib.nullcontext
            if isinstance(side, Sharded):
                shown[optimizer] = functools.partial(lightning_zero.gather, side.module)
            optimizer.register_step_pre_hook(halve)
            if make is not sgd:  # else it is one of all optimizers
                optimizer.register_step_post_hook(clamp)
            schedulers[optimizer] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        else:
            schedulers[optimizer].step()
        if isinstance(side, Sharded):
            listed = [p for group in optimizer.param_groups for p in group["params"]]
            assert [id(p) for p in listed] == [id(p) for p in side.module.parameters()]
        return language_work(side, step)

    settings = {"optimizer_settings": {"sharding": sharding}, **offload(row, tmp_path)}
    with (
        warnings.catch_warnings(),
        register_optimizer_step_post_hook(clamp) if make is sgd else contextlib.nullcontext(),
    ):
        warnings.simplefilter("error", UserWarning)  # of a scheduler that has seen no step
        check(Model, work, stage=stage, optimizer=make, steps=4, tolerance=1e-6, **settings)
    (theirs, expected), (ours, found) = calls.items()
    assert found == expected and type(ours) is type(theirs) and "step" not in ours.__dict__
    assert schedulers[ours].get_last_lr() == schedulers[theirs].get_last_lr()


@on_ranks(1)
def test_what_is_declared_element_wise_and_is_not_is_refused() -> None:
    """Norms of slices are others, and each rank's norm over all is its own; random numbers cannot be tried."""
    for kind in (Lamb, torch.optim.Adafactor, NormOverAll, Shared, Langevin):
        module = Model()
        engine = lightning_zero.shard(module, device="cpu", optimizer={"sharding": "slices"})
        why = rf"zero\.optimizer\.sharding: .*{kind.__name__}.*came out otherwise"
        with contextlib.nullcontext() if kind is Langevin else pytest.raises(ValueError, match=why):
            engine.add_optimizer(kind(module.parameters()))
        engine.release()


@on_ranks(1, 2)
def test_bad_parameters_and_state_dicts_of_slices_are_refused() -> None:
    foreign = nn.Linear(7, 3)
    with Sharded(Model(), optimizer=lambda params: adamw([*params][:-2])) as side:
        head = side.module.head
        with pytest.raises(ValueError, match=r"shape \(3, 7\) is not part of the sharded module"):
            side.engine.add_optimizer(sgd([*head.parameters(), *foreign.parameters()]))
        with pytest.raises(ValueError, match="differentiable"):
            side.engine.add_optimizer(torch.optim.SGD(head.parameters(), differentiable=True))
        with pytest.raises(ValueError, match="SparseAdam steps sparse gradients only, .* Use torch.optim.Adam"):
            side.engine.add_optimizer(torch.optim.SparseAdam(head.parameters()))
        side.engine.add_optimizer(sgd(head.parameters()))
        with pytest.raises(ValueError, match="another optimizer, got the same AdamW"):
            side.engine.add_optimizer(side.optimizer)
        state = side.optimizer.state
        for use in (state.pop, state.get, state.__contains__, state.__getitem__, lambda p: state.__setitem__(p, {})):
            with pytest.raises(RuntimeError, match=r"optimizer\.state: expected .* got embed\.weight.*state_dict\(\)"):
                use(side.module.embed.weight)
        side.optimizer.add_param_group({"params": foreign.parameters()})
        language_work(side, 0)
        with pytest.raises(ValueError, match="not part of the sharded module"):
            side.step()
    side.optimizer.state_dict()  # after release it is the plain object again


# -- optimizer state --------------------------------------------------------------------------------------------------


def through_a_file(*state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def unused_head(side: Side, step: int) -> None:
    """Leaves the head alone in odd steps, so that step counts differ."""
    with scope(side):
        if step % 2 == 0:
            language_work(side, step)
        else:
            x = side.module.embed(tokens(step))
            for block in side.module.blocks:
                x = block(x)
            side.backward(x.square().mean())


@on_ranks(3, full=(1, 2))
@STAGES
@PRECISIONS
@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.mainly(lambda stage, optimizer: stage in (1, 3) or optimizer is adamw)
def test_optimizer_state_is_that_of_the_plain_optimizer(stage: int, precision: str, optimizer: MakeOptimizer) -> None:
    def build() -> nn.Module:
        module = Model()
        module.empty = nn.Parameter(torch.ones(0, 5))
        module.register_forward_hook(lambda m, _, out: out + m.empty.sum())
        return module

    with with_twin(build, stage=stage, precision=precision, optimizer=optimizer) as (sharded, twin):
        for side in (sharded, twin):
            train(side, range(3), unused_head)
        own, expected = state_of(sharded), twin.optimizer.state_dict()
        kernel = {"fused": None, "foreach": None}
        settings = [[{**group, **kernel} for group in state["param_groups"]] for state in (own, expected)]
        assert settings[0] == settings[1]
        for number, param in enumerate(sharded.module.parameters()):
            shaped = {k: v[: param.numel()].view(param.shape) for k, v in expected["state"][number].items() if v.dim()}
            expected["state"][number] |= shaped
        assert_equal(own["state"], expected["state"])
        counts = [entry["step"].data_ptr() for entry in own["state"].values() if "step" in entry]
        assert len(set(counts)) == len(counts)  # one that several share would be counted up several times
        old = {n: {k: int(v) if k == "step" else v for k, v in entry.items()} for n, entry in own["state"].items()}
        load_state(sharded, {**own, "state": old})  # of before torch 1.12
        assert_equal(state_of(sharded)["state"], own["state"])
        on_rank_0 = state_dicts.optimizer_state(sharded.engine, sharded.optimizer)
        leaves = [leaf for entry in on_rank_0["state"].values() for leaf in entry.values() if leaf is not None]
        assert any(type(leaf) is OnRank0 for leaf in leaves) == (dist.get_rank() > 0)


Place = tuple[int, str]
RESUMED: list[tuple[Place, Place]] = [
    ((3, "none"), (3, "none")),
    ((0, "none"), (3, "none")),
    ((2, "none"), (0, "none")),
    *(((stage, row), (3 - stage % 3, "none")) for row, stage in OFFLOADED),
    *(((i % 4, "none"), (stage, row)) for i, (row, stage) in enumerate(OFFLOADED)),
    *(((3, "auto"), (stage, "auto")) for stage in (1, 2, 3)),
]


@on_ranks(2, full=(1,))
@pytest.mark.parametrize(("source", "target"), RESUMED)
@pytest.mark.parametrize("precision, optimizer", [("fp32", adamw), ("fp32", sgd), ("bf16", adamw), (STOCHASTIC, sgd)])
@pytest.mark.mainly(lambda source, target, precision, optimizer: precision == "fp32" and optimizer is adamw)
def test_training_resumes_in_any_stage_and_row(
    source: Place, target: Place, precision: Any, optimizer: MakeOptimizer, tmp_path: Path
) -> None:
    def at(stage: int, row: str) -> Sharded:
        return Sharded(Model(), stage=stage, precision=precision, optimizer=optimizer, **offload(row, tmp_path))

    torch.manual_seed(3)
    with at(*source) as first:
        train(first, range(3), unused_head)
        weights, state = through_a_file(first.engine.state_dict(only_rank_0=False), state_of(first))
        train(first, range(3, 6), unused_head)
        expected = first.engine.state_dict(only_rank_0=False)
    with slow_steps(0.002), at(*target) as second:
        train(second, range(1), unused_head)  # what was there is replaced
        second.engine.load_state_dict(weights)
        whole_params.masters_changed(second.engine)
        load_state(second, state)
        train(second, range(3, 6), unused_head)
        assert_equal(second.engine.state_dict(only_rank_0=False), expected)


@on_ranks(2)
@pytest.mark.parametrize("row", ["none", "optimizer_cpu", "optimizer_nvme"])
def test_state_that_is_loaded_goes_where_the_old_one_was(row: str, tmp_path: Path) -> None:
    """Beside the old one it would be in memory twice for a while."""
    with Sharded(Model(), **offload(row, tmp_path)) as side:
        train(side, range(3), unused_head)
        saved = state_of(side)
        train(side, range(3, 5), unused_head)
        before = {id(state["exp_avg"]) for state in side.optimizer.state.values()}
        load_state(side, saved)
        assert {id(state["exp_avg"]) for state in side.optimizer.state.values()} == before
        assert_equal(state_of(side)["state"], saved["state"])


@on_ranks(2)
@PLACES
@pytest.mark.parametrize("made", ["cleared", "replaced"])
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_state_that_a_user_clears_starts_anew(
    optimizer: MakeOptimizer, made: str, stage: int, row: str, tmp_path: Path
) -> None:
    """Also while steps are under way that write to it."""

    def work(side: Side, step: int) -> Any:
        if step == 2 and made == "cleared":
            side.optimizer.state.clear()
        elif step == 2:
            side.optimizer.state = defaultdict(dict)
        return unused_head(side, step)

    with slow_steps(0.002):
        check(Model, work, stage=stage, optimizer=optimizer, steps=4, tolerance=1e-6, **offload(row, tmp_path))


@on_ranks(2)
@PLACES
@pytest.mark.parametrize("sharding", ["auto", "tensors"])
def test_an_optimizer_that_comes_back_goes_on_with_its_state(
    sharding: str, stage: int, row: str, tmp_path: Path
) -> None:
    """At once, while its steps are under way; after another one has stepped; and at another stage."""
    settings: dict[str, Any] = {"optimizer": adamw, "optimizer_settings": {"sharding": sharding}}
    with with_twin(stage=stage, **settings, **offload(row, tmp_path)) as (sharded, twin):
        engine, first = sharded.engine, sharded.optimizer
        train_both((sharded, twin), range(2))
        engine.renew_optimizers(lambda: [first])
        other = sgd(sharded.module.parameters())
        with slow_steps(0.05):
            train_both((twin, sharded), range(2, 4))
            engine.renew_optimizers(lambda: [other])
        assert_same(sharded, twin, tolerance=1e-6)
        with pytest.raises(KeyError):
            engine.renew_optimizers(lambda: {}[0])
        other.zero_grad()
        engine.renew_optimizers(lambda: [first])
        train_both((sharded, twin), range(4, 6))
        engine.release()
        for param, (_, expected) in zip(sharded.module.parameters(), twin.optimizer.state.items(), strict=True):
            flat = first.state[param]["exp_avg"].flatten()
            torch.testing.assert_close(flat, expected["exp_avg"].flatten()[: flat.numel()])
        sharded.engine = lightning_zero.shard(sharded.module, stage=3 - stage, device="cpu")
        sharded.engine.add_optimizer(first)
        train_both((sharded, twin), range(6, 8))
        assert_same(sharded, twin, tolerance=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("sharding", ["auto", "tensors"])
def test_settings_of_param_groups_are_loaded_and_state_of_another_model_is_refused(sharding: str) -> None:
    other, fewer = adamw(Model(width=23).parameters()), adamw(list(Model().parameters())[:-1])
    for param in other.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    other.step()
    with Sharded(Model(), optimizer_settings={"sharding": sharding}) as side:
        state, lr = state_of(side), torch.tensor(0.123)
        state["param_groups"][0]["lr"] = lr
        load_state(side, state)
        assert side.optimizer.param_groups[0]["lr"].mul_(2) == 0.246 and lr == 0.123  # the state is not changed later
        for foreign, words in ((other, r"embed\.weight has shape"), (fewer, "param groups")):
            with pytest.raises(ValueError, match=words):
                load_state(side, foreign.state_dict())


# -- optimizers that were used before ---------------------------------------------------------------------------------


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_that_has_stepped_before_goes_on(kind: Any, stage: int) -> None:
    """Its state of whole parameters goes into the runs, and is not held a second time."""
    torch.manual_seed(3)
    module = Model()
    plain = copy.deepcopy(module)
    sides = [(m, kind(m.parameters(), lr=0.01)) for m in (module, plain)]

    def train_both(step: int) -> None:
        for m, optimizer in sides:
            loss_at(m, step, rank=0).backward()
            optimizer.step()
            optimizer.zero_grad()

    train_both(0)
    engine = lightning_zero.shard(module, stage=stage, device="cpu")
    engine.add_optimizer(sides[0][1])
    assert not any(isinstance(key, nn.Parameter) for key in sides[0][1].state)
    for step in (1, 2):
        train_both(step)
    torch.testing.assert_close(engine.state_dict(only_rank_0=False), plain.state_dict(), rtol=1e-5, atol=1e-6)
    engine.release()
