"""Optimizers that need whole tensors: their steps are those of one process, to the bit, wherever shards rest."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine.whole.held_bytes import held_bytes, plan_of, state_tensors
from lightning_zero.planning.memory import Moment, planned_bytes
from tests.engine.optimizers import Lamb, Shampoo, SignDescent, adafactor, muon_and_adam
from tests.engine.support import Model, Sharded, Twin, assert_same, language_loss, pairwise_selection, tokens
from tests.harness import on_ranks, run

SMALL_WINDOWS = 3000  # bytes: several windows for the models here


class ShapedMaster:
    """What a plain optimizer steps for one parameter: of its shape."""

    def __init__(self, param: nn.Parameter) -> None:
        self.flat = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)

    @property
    def value(self) -> Tensor:
        return self.flat.detach()

    @property
    def grad(self) -> Tensor | None:
        return self.flat.grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        self.flat.grad = None if grad is None else grad.clone().to(self.flat.dtype)


class WholeTwin(Twin):
    """A twin whose optimizer steps tensors of the parameters' own shapes, as one process does."""

    def __init__(self, module: nn.Module, *, optimizer: Any, precision: str = "fp32", each: bool = True) -> None:
        super().__init__(module, optimizer=lambda _: torch.optim.SGD([torch.zeros(1)]), precision=precision, each=each)
        for param, master in self.masters.items():
            value = nn.Parameter(master.value.clone(), requires_grad=param.requires_grad)
            self.masters[param] = ShapedMaster(value)  # type: ignore[assignment]
        self.optimizer = optimizer([master.flat for master in self.masters.values()])

    def clip_by(self, norm: Tensor, max_norm: float) -> None:
        """Clip by a norm that the ranks have found: a sum in one order on all sides."""
        self.show_grads()
        own = torch.nn.utils.get_total_norm(list(self.grads.values()))
        torch.testing.assert_close(norm, own)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.grads = {param: grad * factor for param, grad in self.grads.items()}


class Case(NamedTuple):
    world: int
    stage: int
    micro_batches: int
    clip: bool
    precision: str
    offload: str
    window: int
    optimizer: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


OPTIMIZERS = {
    "adafactor": adafactor,
    "lamb": Lamb,
    "shampoo": Shampoo,
    "sign": SignDescent,
    "muon_and_adam": muon_and_adam,
}
VALUES: dict[str, Sequence[Any]] = {
    "world": (1, 2, 3, 4),
    "stage": (0, 1, 2, 3),
    "micro_batches": (1, 2),
    "clip": (False, True),
    "precision": ("fp32", "bf16"),
    "offload": ("none", "optimizer_cpu", "cpu", "optimizer_nvme", "nvme"),
    "window": (SMALL_WINDOWS, 1 << 28),
    "optimizer": tuple(OPTIMIZERS),
}
MATRIX = [
    case
    for case in (Case(*values) for values in itertools.product(*VALUES.values()))
    if (case.stage > 0 or case.offload == "none") and (case.stage == 3 or case.offload not in ("cpu", "nvme"))
]
SELECTED = pairwise_selection(MATRIX)


def train(case: Case, folder: str, steps: int = 3) -> None:
    torch.default_generator.manual_seed(3)
    module = Model()
    make = OPTIMIZERS[case.optimizer]
    twin = WholeTwin(module, optimizer=make, precision=case.precision, each=case.stage >= 2)
    offload: Any = {"name": case.offload} | ({"nvme_path": folder} if "nvme" in case.offload else {})
    settings: dict[str, Any] = {"offload": offload, "reduce_bucket_bytes": case.window}
    with Sharded(module, stage=case.stage, precision=case.precision, optimizer=make, **settings) as sharded:
        for step in range(steps):
            for side in (sharded, twin):
                for micro in range(case.micro_batches):
                    last = micro == case.micro_batches - 1
                    with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16", cache_enabled=False):
                        if last:
                            side.backward(language_loss(side.module, tokens(step, micro)) / case.micro_batches)
                        else:
                            with side.no_sync():
                                side.backward(language_loss(side.module, tokens(step, micro)) / case.micro_batches)
            if case.clip:
                twin.clip_by(sharded.clip(0.05), 0.05)
            for side in (sharded, twin):
                side.step()
                side.zero_grad()
            assert_same(sharded, twin, what=f"step {step}: ")


@pytest.mark.parametrize("case", SELECTED, ids=str)
def test_a_step_is_that_of_one_process(case: Case, tmp_path: Any) -> None:
    run(case.world, train, case, str(tmp_path))


# -- state ------------------------------------------------------------------------------------------------------------


def steps_of(sharded: Sharded, first: int, count: int) -> None:
    for step in range(first, first + count):
        sharded.backward(language_loss(sharded.module, tokens(step)))
        sharded.step()
        sharded.zero_grad()


def plain_state(make: Any, steps: int) -> tuple[dict[str, Any], list[Tensor]]:
    """State and parameters of a plain optimizer after ``steps`` steps of a twin."""
    torch.default_generator.manual_seed(3)
    twin = WholeTwin(Model(), optimizer=make)
    for step in range(steps):
        twin.backward(language_loss(twin.module, tokens(step)))
        twin.step()
        twin.zero_grad()
    return twin.optimizer.state_dict(), [master.value for master in twin.masters.values()]


def assert_equal(found: Any, expected: Any, what: str = "") -> None:
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), what
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), (what, found.keys(), expected.keys())
        for key in expected:
            assert_equal(found[key], expected[key], f"{what}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), what
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{what}/{place}")
    else:
        assert found == expected, what


@on_ranks(1, 3)
@pytest.mark.parametrize("name", ["shampoo", "muon_and_adam"])
@pytest.mark.parametrize("row", ["0 none", "2 optimizer_cpu", "3 nvme"])
def test_whole_state_is_that_of_the_plain_optimizer_and_goes_on(name: str, row: str, tmp_path: Any) -> None:
    make, (stage, offload) = OPTIMIZERS[name], row.split()
    settings = {"name": offload} | ({"nvme_path": str(tmp_path)} if "nvme" in offload else {})
    expected, _ = plain_state(make, 2)
    _, later = plain_state(make, 4)
    torch.default_generator.manual_seed(3)
    with Sharded(Model(), stage=stage, offload=settings, optimizer=make, reduce_bucket_bytes=SMALL_WINDOWS) as side:
        steps_of(side, 0, 2)
        state = side.engine.optimizer_state(side.optimizer, only_rank_0=False)
        assert_equal(state, expected)
        weights = side.engine.state_dict(only_rank_0=False)
        steps_of(side, 2, 1)  # something else, which is to be forgotten
        vars(side.optimizer)["steps"] = 2  # what no state_dict has, under torch either
        side.engine.load_state_dict(weights)
        side.engine.load_optimizer_state(side.optimizer, copy.deepcopy(state))
        steps_of(side, 2, 2)
        found = side.engine.state_dict(only_rank_0=False)
        assert_equal(list(found.values()), later)


@on_ranks(2)
@pytest.mark.parametrize("name", ["shampoo", "muon_and_adam"])
def test_restaged_training_is_the_one_that_was_not(name: str, tmp_path: Any) -> None:
    make = OPTIMIZERS[name]
    rows = ["3 none", "0 none", "2 optimizer_cpu", "2 none", "0 none", "3 nvme", "3 cpu", "0 none", "1 none"]
    _, expected = plain_state(make, len(rows))
    torch.default_generator.manual_seed(3)
    with Sharded(Model(), stage=1, optimizer=make, reduce_bucket_bytes=SMALL_WINDOWS) as side:
        for step, row in enumerate(rows):
            stage, offload = row.split()
            settings = {"name": offload} | ({"nvme_path": str(tmp_path)} if "nvme" in offload else {})
            if step:
                side.engine.restage(f"zero{stage}", settings)
            steps_of(side, step, 1)
            side.engine.settle()
            side.engine.forget_zeroed()
            engine = side.engine
            states = state_tensors(engine)
            plan = planned_bytes(plan_of(engine), engine.rank, state_tensors=states, moment=Moment.cleared)
            assert held_bytes(engine) == plan, row
        assert_equal(list(side.engine.state_dict(only_rank_0=False).values()), expected)
