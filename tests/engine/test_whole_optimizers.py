"""Optimizers that need whole tensors: their steps are those of one process, to the bit, wherever shards rest."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

import lightning_zero
from lightning_zero.comm.agreements import FailedElsewhereError
from lightning_zero.device import accelerator_of, recording
from lightning_zero.layerwise.whole_optimizer import WholeOptimizer
from lightning_zero.settings import ConfigError
from tests.engine import optimizers as toys
from tests.engine.sides import Master, Sharded, Twin, load_state, state_of, step_and_clear, with_twin
from tests.engine.support import assert_equal, assert_same, cases, pairwise_selection
from tests.engine.test_offload import offload
from tests.engine.test_restage import check_held
from tests.engine.works import accumulate, autocast, language_work, loss_at, train, train_both
from tests.harness import on_ranks, run
from tests.models import VOCABULARY, Does, Model, frozen, linear
from tests.trainer.step_peak import _silence

SMALL = 3000  # bytes: several messages for the models here


def clip_by(twin: Twin, norm: Tensor, max_norm: float) -> None:
    """Clip by a norm that the ranks have found: a sum in one order on all sides."""
    own = torch.nn.utils.get_total_norm([grad.float() for grad in twin.grads.values()])
    torch.testing.assert_close(norm, own)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    twin.grads = {param: grad * factor for param, grad in twin.grads.items()}


OPTIMIZERS = {
    "adafactor": toys.adafactor,
    "lamb": toys.Lamb,
    "shampoo": toys.Shampoo,
    "sign": toys.SignDescent,
    "muon_and_adam": toys.muon_and_adam,
}
VALUES: dict[str, Sequence[Any]] = {
    "world": (1, 2, 3, 4),
    "stage": (0, 1, 2, 3),
    "micro_batches": (1, 2),
    "clip": (False, True),
    "precision": ("fp32", "bf16", "bf16_true"),
    "offload": ("none", "optimizer_cpu", "cpu", "optimizer_nvme", "nvme"),
    "message": (SMALL, 1 << 28),
    "optimizer": tuple(OPTIMIZERS),
}
Case = namedtuple("Case", VALUES)
MATRIX = [
    case
    for case in (Case(*values) for values in itertools.product(*VALUES.values()))
    if (case.stage > 0 or case.offload == "none") and (case.stage == 3 or case.offload not in ("cpu", "nvme"))
]
SELECTED = pairwise_selection(MATRIX)
MORE = [  # every row and number of ranks with every optimizer, and all ways to train with one
    case
    for case in MATRIX
    if case not in SELECTED
    and case.message == SMALL
    and (case[2:5] == (2, True, "bf16") or (case.optimizer == "muon_and_adam" and case.world == 2))
]


def train_case(case: Case, folder: Path) -> None:
    norms: list[Tensor] = []

    def work(side: Any, step: int) -> None:
        with autocast(case.precision):
            accumulate(side, step, case.micro_batches)
        if case.clip and isinstance(side, Twin):
            clip_by(side, norms[-1], 0.05)
        elif case.clip:
            norms.append(side.clip(0.05))

    settings = {"stage": case.stage, "precision": case.precision, "reduce_bucket_bytes": case.message}
    side_by_side(OPTIMIZERS[case.optimizer], work, **settings, **offload(case.offload, folder))


@pytest.mark.sample
@cases(SELECTED, MORE)
def test_a_step_is_that_of_one_process(case: Case, tmp_path: Path) -> None:
    run(case.world, train_case, case, tmp_path)


# -- state ------------------------------------------------------------------------------------------------------------

WITH_STATE = {**OPTIMIZERS, "lookahead": toys.lookahead}  # the last has an optimizer inside, and its own state_dict()


@pytest.mark.sample
@on_ranks(3, full=(1,))
@pytest.mark.parametrize("name", ["shampoo", "muon_and_adam", "lookahead"])
@pytest.mark.parametrize(("stage", "row"), [(0, "none"), (2, "optimizer_cpu"), (3, "nvme")])
def test_whole_state_is_that_of_the_plain_optimizer_and_goes_on(
    name: str, stage: int, row: str, tmp_path: Path
) -> None:
    more = {"reduce_bucket_bytes": SMALL, **offload(row, tmp_path)}
    with with_twin(stage=stage, optimizer=WITH_STATE[name], shaped=True, **more) as (side, twin):
        train_both((side, twin), range(2))
        state, weights = state_of(side), side.engine.state_dict(only_rank_0=False)
        assert_equal(state, twin.optimizer.state_dict())
        train(side, [2])  # something else, which is to be forgotten
        vars(side.optimizer)["steps"] = 2  # what no state_dict has, under torch either
        side.engine.load_state_dict(weights)
        load_state(side, copy.deepcopy(state))
        train_both((side, twin), range(2, 4))
        assert_same(side, twin)


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("name", ["shampoo", "muon_and_adam", "lookahead"])
def test_restaged_training_is_the_one_that_was_not(name: str, tmp_path: Path) -> None:
    rows = ["0 none", "2 optimizer_cpu", "2 none", "0 none", "3 nvme", "3 cpu", "0 none", "1 none"]

    def between(side: Any, step: int) -> None:
        if isinstance(side, Sharded):
            stage, place = rows[step].split()
            side.engine.restage(f"zero{stage}", **offload(place, tmp_path))
            check_held(side.engine, rows[step])

    side_by_side(WITH_STATE[name], steps=len(rows), between=between)


# -- what people do to optimizers -------------------------------------------------------------------------------------


def side_by_side(
    make: Any,
    work: Any = language_work,
    *,
    build: Any = Model,
    steps: int = 3,
    between: Any = lambda side, step: None,
    **settings: Any,
) -> None:
    """Train as a plain optimizer of whole tensors; ``between`` is called on both sides behind each step."""
    settings = {"reduce_bucket_bytes": SMALL, **settings}
    with with_twin(build, optimizer=make, shaped=True, **settings) as sides:
        for step in range(steps):
            for side in sides:
                work(side, step)
                step_and_clear(side)
                side.module.zero_grad()
                between(side, step)
            assert_same(*sides, what=f"step {step}: ")


def is_matrix(param: Tensor) -> bool:
    return param.dim() == 2 and VOCABULARY not in param.shape


@on_ranks(3, full=(1, 2))
@pytest.mark.parametrize(("stage", "row"), [(0, "none"), (3, "none"), (2, "optimizer_cpu")])
def test_muon_for_matrices_and_adamw_for_the_rest_share_buckets(stage: int, row: str) -> None:
    torch.default_generator.manual_seed(3)
    module = Model()
    twin = Twin(module, optimizer=lambda params: torch.optim.SGD(params, lr=0), shaped=True)
    for param, master in twin.masters.items():
        if not is_matrix(param):  # AdamW of torch steps slices: see Master
            twin.masters[param] = Master(nn.Parameter(master.value))
    engine = lightning_zero.shard(module, stage=stage, offload=row, device="cpu")
    optimizers: list[Optimizer] = []
    for params in ({p: p for p in module.parameters()}, {p: master.flat for p, master in twin.masters.items()}):
        optimizers.append(torch.optim.Muon([own for p, own in params.items() if is_matrix(p)], lr=0.05))
        rest = [own for p, own in params.items() if not is_matrix(p)]
        optimizers.append(torch.optim.AdamW(rest, lr=0.01, fused=True))
    made = [engine.add_optimizer(optimizer) for optimizer in optimizers[:2]]
    assert [isinstance(sharded, WholeOptimizer) for sharded in made] == [True, False]
    for step in range(3):
        language_work(twin, step)
        twin.show_grads()
        engine.passes.backward(loss_at(module, step))
        for optimizer in optimizers:
            optimizer.step()
        twin.step()
        twin.zero_grad()
        module.zero_grad()
    check_held(engine)
    expected = [master.value for master in twin.masters.values()]
    assert_equal(list(engine.state_dict(only_rank_0=False).values()), expected)
    engine.release()


def optional() -> nn.Module:
    """Uses a part of its parameters in some steps, and never another part."""

    def act(m: Any, x: Tensor, full: bool) -> Tensor:
        out = m.first(x)
        return m.second(out) if full else out

    return Does(act, first=linear(9, 40), second=linear(40, 9), never=linear(7, 30))


@pytest.mark.sample
@on_ranks(4, full=(2,))
@pytest.mark.parametrize("make", [toys.Lamb, toys.Decaying, toys.muon_and_adam])
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_without_a_gradient_are_stepped_as_in_one_process(make: Any, stage: int) -> None:
    """On more ranks than there are tensors, of which some own nothing."""
    side_by_side(make, in_part, build=optional, steps=4, stage=stage)


def in_part(side: Any, step: int) -> None:
    side.backward(side.module(torch.full((2, 9), step + 1.0), step % 2 == 1).square().sum())


def in_groups(params: Any) -> Optimizer:
    """Two groups, the second of one tensor: ranks have none of it."""
    *some, last = params
    return toys.CountsUsed([{"params": some}, {"params": [last]}])


def flagged(params: Any) -> Optimizer:
    params = list(params)
    for place, param in enumerate(params):
        param.scale = 1.0 + place % 3
    return toys.Flagged(params)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("make", [toys.Counting, toys.CountingObjects, in_groups, flagged, toys.Slow])
def test_classes_as_people_write_them(make: Any) -> None:
    """Collections, functions and objects in attributes, counts of some groups, state from the beginning, wrappers."""
    side_by_side(make, in_part, build=optional, steps=5, reduce_bucket_bytes=500)
    with Sharded(Model(), optimizer=make, reduce_bucket_bytes=SMALL) as side:
        train(side, range(2))
        loss = side.optimizer.step(lambda: torch.ones(()))  # no gradient at all: counted, as in one process
        assert float(loss) == 1
        if make is toys.Counting:
            assert side.optimizer.counts == {"steps": 3}  # type: ignore[attr-defined]


@pytest.mark.full
@on_ranks(2)
def test_schedules_new_groups_and_what_is_thawed() -> None:
    def between(side: Any, step: int) -> None:
        if step == 0:
            side.optimizer.param_groups[0]["lr"] = 0.005
        if step == 1:
            thawed = [*side.module.blocks[1].requires_grad_(True).parameters()]
            if isinstance(side, Twin):
                thawed = [side.masters[param].flat.requires_grad_(True) for param in thawed]
            side.optimizer.add_param_group({"params": thawed, "lr": 0.03})
        if step == 3:
            side.gone = side.optimizer.param_groups.pop()
        if step == 4:
            side.optimizer.param_groups.append(side.gone)

    make = lambda params: toys.Lamb([p for p in params if p.requires_grad])  # noqa: E731
    side_by_side(make, build=lambda: frozen("blocks.1"), steps=6, between=between)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "stage", "settings"),
    [(torch.optim.AdamW, stage, {"sharding": "tensors"}) for stage in (0, 2)]
    + [(kind, stage, {}) for kind in (toys.Shrinking, toys.Signed, toys.WarmsUp) for stage in (0, 1, 3)],
)
def test_optimizers_that_are_told_to_and_classes_with_a_step_of_their_own_step_whole_tensors(
    kind: Any, stage: int, settings: dict[str, Any]
) -> None:
    make = functools.partial(kind, lr=0.01, weight_decay=0.1, fused=True)
    side_by_side(make, stage=stage, optimizer_settings=settings, offload="optimizer_cpu" if stage == 1 else "none")


@on_ranks(2)
def test_state_that_finds_no_room_is_an_error_on_all() -> None:
    """A budget that the state is beyond, after all that could be known of it before."""
    settings = {"offload": "optimizer_cpu", "reduce_bucket_bytes": SMALL}
    side = Sharded(Model(), stage=2, optimizer=toys.Shampoo, **settings)
    language_work(side, 0)
    tiers = side.engine.tiers
    if side.engine.comm.rank:
        tiers.set_budgets(tiers.host.nbytes + 3000, None)  # type: ignore[union-attr]
    with pytest.raises((ConfigError, FailedElsewhereError), match="budget"):
        side.step()
    tiers.set_budgets(None, None)
    side.engine.release()


@pytest.mark.sample
@on_ranks(2, 3)
@pytest.mark.parametrize("limit", [1 << 14, 1 << 28])
def test_a_step_takes_the_bytes_and_messages_that_were_planned(limit: int) -> None:
    torch.default_generator.manual_seed(3)
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    with Sharded(module, stage=3, optimizer=toys.SignDescent, reduce_bucket_bytes=limit) as side:
        engine, sharded = side.engine, side.engine.optimizers[0]
        side.backward(module(torch.ones(2, 64)).square().sum())
        side.step()
        recorder = recording.listen(accelerator_of(torch.device("cpu")))
        before, moved = engine.comm.counts.copy(), recorder.moved["reduce"]
        try:
            peaks = [peak_of(side.step)]
            moved = recorder.moved["reduce"] - moved
        finally:
            recording.stop()
        sent = engine.comm.counts - before
        torch.distributed.all_reduce(total := torch.tensor(moved))
        # What an owner lacks of a matrix: its weights and gradient come, and its new weights go back.
        assert total.item() > 0
        # A thread of the library lets go of a message when it comes to it, which may be after this one has gone on.
        peaks += [peak_of(side.step) for _ in range(7)]
        largest = min(peaks)
        messages = sharded._messages  # type: ignore[attr-defined]
        assert sum(n for (kind, _), n in sent.items() if kind == "all_to_all") == 2 * len(messages)
        assert all(kind == "all_to_all" for kind, _ in sent)
        planned = sharded.step_peak()
        temporary = 64 * 64 * 4  # of the optimizer: a sign
        assert planned <= largest <= planned + temporary + 20_000
        own = sum(2 * 4 * t.info.numel for message in messages for t in message if t.is_owner)
        message = max(sum(2 * 4 * tensor.info.numel for tensor in m) for m in messages)
        assert own <= largest <= own + message + temporary + 20_000


def peak_of(act: Any) -> int:
    """The most bytes that torch's memory grows by while ``act`` runs."""
    with _silence(), profile(use_kineto=True, profile_memory=True) as recorded:
        act()
    now = most = 0
    for event in recorded.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.full
@on_ranks(4)
@pytest.mark.parametrize(("hybrid_shard", "beside"), [("node", "node"), ("node_backward", "flat")])
def test_shards_within_a_node_and_replicas_across_nodes(hybrid_shard: str, beside: str) -> None:
    """Each replica steps all tensors, divided among its ranks; one saves their state."""
    settings = {"node": f"node {torch.distributed.get_rank() // 2}", "reduce_bucket_bytes": SMALL}
    found = []
    for stage, name in ((0, beside), (3, hybrid_shard)):
        torch.default_generator.manual_seed(3)
        how = settings | {"stage": stage, "hybrid_shard": name}
        with Sharded(Model(), optimizer=toys.muon_and_adam, **how) as side:
            train(side, range(3))
            found.append((side.engine.state_dict(only_rank_0=False), state_of(side)))
    assert_equal(found[1], found[0])


@on_ranks(2)
def test_what_fails_on_one_rank_fails_on_all_and_none_waits() -> None:
    class Failing(toys.SignDescent):
        broken = False

        def update(self) -> None:
            if self.broken and any(tuple(p.shape) == (11,) for g in self.param_groups for p in g["params"]):
                raise ArithmeticError("no root")
            super().update()

    side = Sharded(Model(), optimizer=Failing, reduce_bucket_bytes=SMALL)
    language_work(side, 0)
    side.optimizer.broken = True  # type: ignore[attr-defined]
    with pytest.raises((ArithmeticError, FailedElsewhereError), match="no root") as caught:
        side.optimizer.step()
    kinds = side.engine.comm.all_gather_objects(type(caught.value).__name__, "what was raised")
    assert sorted(kinds) == ["ArithmeticError", "FailedElsewhereError"]
    assert "Load the last checkpoint" in caught.value.__notes__[0]
    side.engine.release()


class Scaled(Model):
    """With a parameter that every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * super().forward(tokens)


# -- steps of tensors that depend on each other ---------------------------------------------------------------------


@on_ranks(2, full=(3,))
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.full), 3])
def test_tensors_that_are_stepped_together_are_stepped_by_one_rank(stage: int) -> None:
    """By a norm over all, also if few gradients are large enough, or if a class takes no group without tensors."""
    for make in (toys.NormOverAll, toys.RareClip, toys.WantsTensors):
        side_by_side(make, build=Scaled, stage=stage)


@on_ranks(2)
@pytest.mark.parametrize("make", [toys.Langevin, toys.Coin])
def test_random_numbers_of_a_step_are_those_of_one_rank(make: Any) -> None:
    with Sharded(Model(), stage=2, optimizer=make) as side:
        for step in range(2):
            language_work(side, step)
            step_and_clear(side)
        with lightning_zero.gather(side.module):
            found = [p.detach().clone() for p in side.module.parameters()]
        assert_equal(found, side.engine.comm.all_gather_objects(found, "parameters")[0])


@on_ranks(2)
def test_tensors_that_are_stepped_together_move_to_another_stage() -> None:
    def restage(side: Any, step: int) -> None:
        if isinstance(side, Sharded) and step < 3:
            side.engine.restage(("zero2", "zero0", "zero3")[step])

    side_by_side(toys.RareClip, build=Scaled, stage=0, steps=4, between=restage)


# -- methods that change parameters outside of steps ------------------------------------------------------------


class ScheduleFree(toys.SignDescent):
    """Trains at one point and evaluates at another (Defazio et al. 2024, arXiv:2405.15682)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["train_mode"] = False

    def update(self) -> None:
        for group, p in self.used():
            assert group["train_mode"], "not in train mode"
            z = self.state[p].setdefault("z", p.clone())
            p.lerp_(z.sub_(p.grad.sign(), alpha=0.01), 0.3)

    @torch.no_grad()
    def _turn(self, train_mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = train_mode

    def train(self, mode: bool = True) -> None:
        self._turn(mode, 0.1 if mode else 1 - 1 / 0.9)

    def eval(self) -> None:
        self._turn(False, 1 - 1 / 0.9)


@on_ranks(2, full=(3,))
@pytest.mark.parametrize(("stage", "row"), [(0, "none"), (2, "optimizer_cpu"), (3, "none")])
def test_methods_that_change_parameters_outside_of_steps_are_run(stage: int, row: str) -> None:
    """Also if a wrapper of Lightning calls them, whose class inherits from that of the optimizer."""

    def turn(side: Any, method: str, *args: bool) -> None:
        getattr(LightningOptimizer(side.optimizer), method)(*args)
        if isinstance(side, Twin):
            for param, master in side.masters.items():
                param.data.copy_(master.value)

    def work(side: Any, step: int) -> Tensor:
        turn(side, "train")
        loss = language_work(side, step)
        assert side.optimizer.param_groups[0]["train_mode"]
        return loss

    side_by_side(
        ScheduleFree,
        work,
        build=Scaled,
        stage=stage,
        offload=row,
        between=lambda side, step: turn(side, *[("eval",), ("train", False)][step % 2]),
    )


# -- steps that call their closure ------------------------------------------------------------------------------------


class LooksAhead(toys.SignDescent):
    """As one that looks at the gradient at another point (Foret et al. 2021, arXiv:2010.01412)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        for p in params:
            self.state[p]["before"] = p.clone()
            p.add_(0.05 * p.grad / norm)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p in params:
            p.copy_(self.state[p]["before"])
        super().step()
        return loss


CLOSURES: dict[str, Any] = {
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=3, history_size=2),
    "search": functools.partial(torch.optim.LBFGS, max_iter=2, line_search_fn="strong_wolfe"),
    "ahead": LooksAhead,
}


def stepped_by_closure(module: nn.Module, optimizer: Optimizer, step: int, backward: Any, *, clears: bool) -> None:
    def closure() -> Tensor:
        if clears:
            optimizer.zero_grad()
        loss = loss_at(module, step)
        backward(loss)
        return loss

    if not clears:
        optimizer.zero_grad()
        closure()
    optimizer.step(closure)


@on_ranks(2)
@pytest.mark.parametrize("kind", CLOSURES)
@pytest.mark.parametrize(
    ("stage", "row", "then"),
    [(0, "none", 3), (2, "optimizer_cpu", 0), (3, "none", 1), pytest.param(3, "nvme", 2, marks=pytest.mark.full)],
)
def test_steps_that_call_their_closure_are_those_of_one_process(
    kind: str, stage: int, row: str, then: int, tmp_path: Path
) -> None:
    """Also after the optimizer's state was loaded at another stage. Ranks have losses of their own: rank 0's counts."""
    torch.default_generator.manual_seed(3)
    plain, make = Scaled(), CLOSURES[kind]
    optimizer = make(plain.parameters())
    sides = [
        Sharded(copy.deepcopy(plain), stage=at, optimizer=make, **offload(name, tmp_path))
        for at, name in ((stage, row), (then, "none"))
    ]

    def average(loss: Tensor) -> None:
        loss.backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        dist.broadcast(loss.detach(), 0)

    with sides[0], sides[1]:
        for step in range(4):
            stepped_by_closure(plain, optimizer, step, average, clears=kind != "ahead")
            if step == 2:
                load_state(sides[1], state_of(sides[0]))
                sides[1].engine.load_state_dict(sides[0].engine.state_dict(only_rank_0=False))
            side = sides[step >= 2]
            stepped_by_closure(side.module, side.optimizer, step, side.backward, clears=kind != "ahead")
            with lightning_zero.gather(side.module):
                for (name, own), param in zip(side.module.named_parameters(), plain.parameters(), strict=True):
                    assert torch.equal(own, param), f"step {step}: {name}"


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1])  # at other stages each backward reduces gradients
def test_a_step_that_calls_its_closure_ends_an_accumulation(stage: int) -> None:
    """Whose first backward was not synchronized: the gradients are complete after that of the closure."""
    with with_twin(stage=stage, optimizer=CLOSURES["lbfgs"], shaped=True) as sides:
        for side in sides:
            with side.no_sync():
                side.backward(loss_at(side.module, 0))

            def closure(side: Any = side) -> Tensor:
                if isinstance(side, Twin):
                    for param, master in side.masters.items():
                        param.data.copy_(master.value)
                loss = loss_at(side.module, 0, 1)
                side.backward(loss)
                if isinstance(side, Twin):
                    side.show_grads()
                return loss.detach()

            side.optimizer.step(closure)
        assert_same(*sides)
    with Sharded(Model(), stage=stage, optimizer=LooksAhead) as side:
        with side.no_sync():
            side.backward(loss_at(side.module, 0))
        with pytest.raises((RuntimeError, FailedElsewhereError), match="calls its closure first"):
            side.optimizer.step(lambda: side.backward(loss_at(side.module, 0, 1)))


@on_ranks(4)
def test_replicas_of_shards_step_together_with_the_loss_of_rank_0() -> None:
    """Each has an owner of its own, and ranks have other losses."""
    node = f"node {dist.get_rank() // 2}"
    with Sharded(Scaled(), optimizer=CLOSURES["search"], hybrid_shard="node", node=node) as side:
        for step in range(2):
            stepped_by_closure(side.module, side.optimizer, step, side.backward, clears=True)
        with lightning_zero.gather(side.module):
            found = [p.detach().clone() for p in side.module.parameters()]
        assert_equal(found, side.engine.comm.all_gather_objects(found, "parameters")[0])


@on_ranks(1)
def test_an_interrupt_in_a_step_leaves_the_param_groups() -> None:
    class Interrupted(LooksAhead):
        def step(self, closure: Any) -> Any:
            raise KeyboardInterrupt

    with Sharded(Model(), stage=1, optimizer=Interrupted) as side, pytest.raises(KeyboardInterrupt):
        groups = [list(group["params"]) for group in side.optimizer.param_groups]
        try:
            side.optimizer.step(lambda: None)
        finally:
            now = side.optimizer.param_groups
            assert all(
                a is b for g, known in zip(now, groups, strict=True) for a, b in zip(g["params"], known, strict=True)
            )


# -- what is refused --------------------------------------------------------------------------------------------------


class Sending(toys.SignDescent):
    def update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                torch.distributed.all_reduce(p.grad)
        super().update()


def patched(params: Any) -> Optimizer:
    optimizer = toys.SignDescent(params)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


class Picky(toys.SignDescent):
    def update(self) -> None:
        assert all(p.numel() % 2 for group in self.param_groups for p in group["params"]), "too even"
        super().update()


class Wraps(Picky):
    def update(self) -> None:
        super().update()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["average"] = TwoTensor(torch.zeros_like(p), torch.zeros_like(p))


@on_ranks(2)
def test_wrapped_state_that_the_trial_has_not_shown_is_refused_at_the_first_step() -> None:
    with Sharded(Model(), stage=1, optimizer=Wraps, optimizer_settings={"sharding": "tensors"}) as side:
        language_work(side, 0)
        with pytest.raises((ConfigError, FailedElsewhereError), match="expected state in plain tensors, got a Two"):
            side.step()


@pytest.mark.full
@on_ranks(2)
def test_what_cannot_be_stepped_apart_is_refused() -> None:
    refusals = {
        Sending: "sends messages between ranks itself",
        Picky: "(?s)failed in the trial step.*too even.*zero.optimizer.sharding=tensors",
    }
    for make, match in refusals.items():
        module = Model()
        engine = lightning_zero.shard(module, device="cpu", stage=1)
        with pytest.raises(ConfigError, match=match):
            engine.add_optimizer(make(module.parameters()))
        engine.release()
    side_by_side(Picky, stage=1, optimizer_settings={"sharding": "tensors"})
    side_by_side(toys.Shared, in_part, build=optional, steps=4, stage=0)
    with pytest.raises(ConfigError, match=r"a step\(\) was set"):
        Sharded(Model(), stage=0, optimizer=patched)
    with pytest.raises(ConfigError, match=r"whose train\(\) and eval\(\)"):
        Sharded(Model(), optimizer=ScheduleFree, optimizer_settings={"sharding": "slices"})
    with pytest.raises(ConfigError, match="no optimizer inside of another, got Lookahead"):
        Sharded(Model(), optimizer=toys.lookahead, optimizer_settings={"sharding": "slices"})


def large() -> nn.Module:
    """Two matrices above a side of 64, of unequal shapes, and what is below it."""
    return nn.Sequential(nn.Linear(20, 70), nn.Linear(70, 72), nn.Linear(72, 66))


@pytest.mark.sample
@on_ranks(2)
def test_what_couples_large_tensors_alone_cannot_be_declared_element_wise() -> None:
    module = large()
    engine = lightning_zero.shard(module, device="cpu", optimizer={"sharding": "slices"})
    with pytest.raises(ConfigError, match="came out otherwise"):
        engine.add_optimizer(toys.NormOverLarge(module.parameters()))
    engine.release()
