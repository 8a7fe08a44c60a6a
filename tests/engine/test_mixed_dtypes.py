"""Steps in pieces, and weights that are rounded stochastically."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lightning_zero
from lightning_zero.optimizers import chunks
from lightning_zero.optimizers.chunks import round_stochastically, salt_of, step_in_chunks
from lightning_zero.optimizers.known import start_state
from lightning_zero.settings import ConfigError
from tests.engine.optimizers import SignDescent
from tests.engine.sides import Sharded
from tests.engine.support import assert_equal
from tests.engine.test_hierarchy import accumulated, history
from tests.engine.test_offload import OPTIMIZERS, offload
from tests.engine.works import train
from tests.harness import on_ranks
from tests.models import Model

pytestmark = pytest.mark.sample  # the full tier has all cases

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd, dampened": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "adagrad": (torch.optim.Adagrad, {}),
    "nadam": (torch.optim.NAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
}

# -- rounding ---------------------------------------------------------------------------------------------------------


def test_rounding_is_right_on_average_and_to_a_neighbour() -> None:
    for value in (1.0 + 2**-9, -3.0 - 2**-8, 1e-30 * (1 + 2**-10)):
        exact = torch.full((1 << 16,), value)
        rounded = round_stochastically(exact, 0, salt_of("x")).float()
        nearest = exact[:1].to(torch.bfloat16)
        step = abs(nearest.item()) * 2**-7
        assert len(rounded.unique()) == 2 and (rounded - value).abs().max() <= step
        # The mean of n draws strays by step / (2 sqrt(n)): four of those.
        assert abs(rounded.double().mean().item() - value) < 4 * step / 2 / (1 << 8)


def test_what_bf16_holds_is_kept() -> None:
    kept = torch.randn(1000).to(torch.bfloat16)
    assert torch.equal(round_stochastically(kept.float(), 5, 7), kept)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically(special, 0, 1).float(), special)
    assert round_stochastically(torch.tensor([float("nan")]), 0, 1).isnan().all()


def test_rounding_depends_on_place_and_salt_alone() -> None:
    values = torch.randn(5000)
    whole_ = round_stochastically(values, 100, 3)
    parts = [round_stochastically(values[low : low + 700].clone(), 100 + low, 3) for low in range(0, 5000, 700)]
    assert torch.equal(torch.cat(parts), whole_)
    assert not torch.equal(round_stochastically(values, 100, 4), whole_)
    assert not torch.equal(round_stochastically(values, 101, 3), whole_)
    assert len({salt_of("a", step) for step in range(1000)}) == 1000


def training(optimizer: str, **config: Any) -> list[Any]:
    torch.manual_seed(3)
    with Sharded(Model(), optimizer=OPTIMIZERS[optimizer], **config) as side:
        return history(side, accumulated())


# -- pieces -----------------------------------------------------------------------------------------------------------


@on_ranks(1)
@pytest.mark.parametrize("name", list(KINDS))
def test_pieces_give_what_a_whole_step_gives(name: str) -> None:
    kind, settings = KINDS[name]
    generator = torch.Generator().manual_seed(1)
    run = torch.randn(1000, generator=generator)
    param = torch.nn.Parameter(run.clone())
    plain, pieced = kind([param], lr=0.1, **settings), kind([torch.nn.Parameter(run)], lr=0.1, **settings)
    with mock.patch.object(chunks, "CHUNK", 256), torch.no_grad():
        for _ in range(3):
            grad = torch.randn(1000, generator=generator).to(torch.bfloat16)
            param.grad = grad.float()
            plain.step()
            start_state(pieced, pieced.param_groups[0], [run])
            step_in_chunks(pieced, pieced.param_groups[0], run, grad)
            assert torch.equal(run, param)
    assert_equal(pieced.state[run], plain.state[param])


@on_ranks(2)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_no_whole_copy_of_gradients_in_another_dtype(stage: int, optimizer: str) -> None:
    """What is stepped is never more than a piece, and the size of pieces changes no bit."""

    def trained(chunk: int) -> tuple[list[Any], int]:
        pieces = mock.patch.object(chunks, "_write_back", side_effect=chunks._write_back)  # called with every piece
        with mock.patch.object(chunks, "CHUNK", chunk), pieces as stepped:
            found = training(optimizer, stage=stage, precision={"name": "bf16", "grad_dtype": "bf16"})
        return found, max(call.args[2].numel() for call in stepped.call_args_list)

    found, largest = trained(256)
    expected, _ = trained(1 << 20)
    assert largest == 256
    assert_equal(found, expected)


# -- training ---------------------------------------------------------------------------------------------------------

STOCHASTIC = {"name": "bf16_true", "stochastic_rounding": True}


@on_ranks(2)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_stages_and_tiers_round_alike(optimizer: str, tmp_path: Path) -> None:
    expected = training(optimizer, stage=3, precision=STOCHASTIC)
    for row, stage in (("none", 0), ("none", 1), ("none", 2), ("cpu", 3), ("nvme", 3)):
        found = training(optimizer, stage=stage, precision=STOCHASTIC, **offload(row, tmp_path))
        assert_equal(found, expected, f"{row} at stage {stage}")
    nearest = training(optimizer, stage=3, precision="bf16_true")
    assert any(not torch.equal(a, b) for a, b in zip(nearest, expected, strict=True) if isinstance(a, Tensor))


@on_ranks(1)
def test_small_steps_are_not_lost() -> None:
    """A thousand steps of a thousandth of the weight's last bit."""
    moved = {}
    ones = torch.ones(1, 64, dtype=torch.bfloat16)
    for stochastic in (False, True):
        module = torch.nn.Linear(64, 64, bias=False)
        torch.nn.init.ones_(module.weight)
        precision = {"name": "bf16_true", "stochastic_rounding": stochastic}
        with Sharded(module, optimizer=lambda params: torch.optim.SGD(params, lr=2**-14), precision=precision) as side:
            train(side, range(200), lambda side, _: side.backward(side.module(ones).sum()))
            with lightning_zero.gather(module):
                moved[stochastic] = 1.0 - module.weight.double().mean().item()
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(200 * 2**-14, rel=0.1)


@on_ranks(1)
def test_where_nothing_is_rounded_and_other_optimizers_are_refused() -> None:
    slices = {"precision": STOCHASTIC, "optimizer_settings": {"sharding": "slices"}}
    for says, config in (
        (r"False .* got True with precision='fp32'\.", {"precision": {"stochastic_rounding": True}}),
        (r"False .* got True with precision='bf16'\.", {"precision": {**STOCHASTIC, "name": "bf16"}}),
        (r"one of torch's .* got .*SignDescent", {"optimizer": SignDescent, **slices}),
    ):
        with pytest.raises(ConfigError, match=rf"stochastic_rounding('\])?: expected {says}"):
            Sharded(torch.nn.Linear(8, 8), **config)
