"""Optimizers that need whole tensors: their steps are those of one process, to the bit, wherever shards rest."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
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
        own = torch.nn.utils.get_total_norm([g for g in self.grads.values()])
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
