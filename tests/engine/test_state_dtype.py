"""Optimizer state in bf16 is the same numbers at every stage, on any number of ranks, under every row.

The twin rounds the state of whole parameters, one number after the other; see ``narrow_twin.py``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine.steps import runs
from lightning_zero.optimizers import low_bits
from lightning_zero.optimizers.low_bits import STATES, Stretch, in_threads, narrow
from lightning_zero.planning.buckets import Role
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import ConfigError
from lightning_zero.trainer.memory.held_bytes import held_bytes, state_tensors
from tests.engine.narrow_twin import narrow_twin
from tests.engine.optimizers import SignDescent, WarmsUp
from tests.engine.sides import MakeOptimizer, Sharded, Twin, adamw, load_state, state_of, step_and_clear
from tests.engine.snapshots import KeptRanges
from tests.engine.support import assert_equal, assert_same, cases, pairwise_selection
from tests.engine.test_offload import offload
from tests.engine.test_restage import check_held
from tests.engine.works import accumulate, autocast, loss_at, train
from tests.harness import on_ranks, run
from tests.models import Model, Odd

pytestmark = [pytest.mark.sample, pytest.mark.filterwarnings("ignore:.*has no O_DIRECT:RuntimeWarning")]

MOMENTS = STATES[torch.optim.AdamW]
ROWS = [(0, "none"), (1, "optimizer_cpu"), (2, "none"), (3, "none"), (3, "nvme")]
MORE_ROWS = [(1, "none"), (2, "optimizer_nvme"), (3, "cpu")]


def side_of(
    build: Callable[[], nn.Module], *, make: MakeOptimizer = adamw, dtype: str = "bf16", **config: Any
) -> Sharded:
    torch.default_generator.manual_seed(3)
    return Sharded(build(), optimizer=make, optimizer_settings={"state_dtype": dtype}, **config)


wide_model = functools.partial(Model, width=37)  # parameters that shards cut


VALUES: dict[str, Sequence[Any]] = {
    "world": (1, 2, 3, 4),
    "place": ROWS,
    "precision": ("fp32", "bf16"),
    "micro_batches": (2, 1),
    "reduce_bucket_bytes": (4_000, 2**28),
}
Case = namedtuple("Case", VALUES)


def selected(rows: Sequence[tuple[int, str]]) -> list[Any]:
    return pairwise_selection([Case(*values) for values in itertools.product(*{**VALUES, "place": rows}.values())])


def _equals_the_twin(case: Case, folder: Path, make: MakeOptimizer = adamw, moments: Sequence[str] = MOMENTS) -> None:
    stage, row = case.place
    names = [name for name, _ in wide_model().named_parameters()]
    twin_of = narrow_twin(make, names, moments)
    more = {"precision": case.precision, "reduce_bucket_bytes": case.reduce_bucket_bytes}
    torch.default_generator.manual_seed(3)
    twin = Twin(wide_model(), optimizer=twin_of, precision=case.precision, each=stage >= 2)
    with side_of(wide_model, make=make, stage=stage, **offload(row, folder), **more) as side:
        for step in range(3):
            for each in (side, twin):
                with autocast(case.precision):
                    accumulate(each, step, case.micro_batches)
                step_and_clear(each)
            assert_same(side, twin, what=f"step {step}: ")
        state = state_of(side)["state"]
        for number, master in enumerate(twin.optimizer.param_groups[0]["params"]):
            for name in moments:
                assert state[number][name].dtype is torch.bfloat16
                found = state[number][name].float().view(-1)
                assert torch.equal(found, twin.optimizer.state[master][name][: len(found)]), (names[number], name)


@cases(selected(ROWS), selected(MORE_ROWS))
def test_training_equals_the_twin(case: Case, tmp_path: Path) -> None:
    run(case.world, _equals_the_twin, case, tmp_path)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.05),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.05),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1, fused=True),
    "adadelta": lambda params: torch.optim.Adadelta(params),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_equal_their_twins(name: str, tmp_path: Path) -> None:
    states = STATES[type(OPTIMIZERS[name]([torch.ones(1)]))]
    _equals_the_twin(Case(2, (3, "none"), "fp32", 1, 2**28), tmp_path, OPTIMIZERS[name], states)


@on_ranks(2)
@pytest.mark.parametrize("name", ["adamw", "rmsprop", "sgd"])
def test_pieces_and_threads_change_nothing(name: str) -> None:
    """Pieces of 512 elements by three threads, and all of a run at once."""
    make = (OPTIMIZERS | {"adamw": adamw})[name]
    found: list[dict[str, Tensor]] = []
    for pieces in ((512, 3), (1 << 18, 1)):
        with (
            mock.patch.object(low_bits, "pieces_of", return_value=pieces),
            side_of(wide_model, make=make, stage=1) as side,
        ):
            for step in range(3):
                side.backward(loss_at(side.module, step, rank=0))
                with threads(pieces[1]):  # not for products, whose sums depend on it
                    side.step()
                    assert torch.get_num_threads() == pieces[1]
                side.zero_grad()
            found.append(everything(side))
    assert_equal(*found)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_thread_is_raised_and_the_rest_is_done() -> None:
    done: list[int] = []

    def work(left: Iterator[int], memory: str) -> None:
        for item in left:
            if item == 3:
                raise ZeroDivisionError
            done.append(item)
            torch.ones(1 << 16).sum()
            assert torch.get_num_threads() == 1

    with threads(3), pytest.raises(ZeroDivisionError):
        in_threads(work, range(100), ["one", "two"])
    assert sorted(done) == [n for n in range(100) if n != 3]
    done.clear()
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        in_threads(work, range(4, 8), ["one", "two"])
    assert done == [4, 5, 6, 7]


# -- layouts, files, rows -----------------------------------------------------------------------------------------


def seldom_module() -> nn.Module:
    """Has a layer that is left out in odd steps: runs are cut there."""
    module = Odd()
    module.extra, module.step = nn.Linear(33, 41), 0
    more = lambda m, _, out: out + m.extra(torch.ones(33)).mean() if m.step % 2 == 0 else out  # noqa: E731
    module.register_forward_hook(more)
    return module


def seldom(side: Sharded, steps: range) -> None:
    for side.module.step in steps:  # type: ignore[assignment]
        side.backward(loss_at(side.module, side.module.step, rank=0))
        step_and_clear(side)


def everything(side: Sharded) -> dict[str, Tensor]:
    """Weights and state, whole, by name; on every rank."""
    names = [name for name, _ in side.module.named_parameters()]
    found = {f"{names[n]}.{k}": v for n, entry in state_of(side)["state"].items() for k, v in entry.items()}
    return found | side.engine.state_dict(only_rank_0=False)


def _train_to_file(file: Path, stage: int, steps: int) -> None:
    """All ranks have the same data: with 1, 2 and 4 of them the gradients are the same bits."""
    with side_of(seldom_module, stage=stage) as side:
        seldom(side, range(steps))
        found = everything(side), side.engine.state_dict(only_rank_0=False), state_of(side)
    if torch.distributed.get_rank() == 0:
        torch.save(found, file)


def _go_on(saved: Path, expected: Path, stage: int, row: str, folder: Path) -> None:
    values, weights, state = torch.load(saved, weights_only=True)
    with side_of(seldom_module, stage=stage, **offload(row, folder)) as side:
        side.engine.load_state_dict(weights)
        load_state(side, state)
        assert_equal(everything(side), values)
        seldom(side, range(2, 4))
        assert_equal(everything(side), torch.load(expected, weights_only=True)[0])


@pytest.mark.parametrize(("ranks", "stage", "row"), [(2, 3, "nvme"), (4, 1, "none")])
def test_resumed_on_other_ranks_it_is_stage_0_in_one_process(ranks: int, stage: int, row: str, tmp_path: Path) -> None:
    run(1, _train_to_file, tmp_path / "whole", 0, 4)
    run(ranks, _train_to_file, tmp_path / "saved", stage, 2)
    run(6 - ranks, _go_on, tmp_path / "saved", tmp_path / "whole", stage, row, tmp_path)


@on_ranks(2)
def test_a_restaged_run_is_the_one_that_was_not(tmp_path: Path) -> None:
    found = []
    for restages in (True, False):
        with side_of(seldom_module, stage=1) as side:
            seldom(side, range(2))
            for step, (stage, row) in enumerate([(3, "nvme"), (0, "none"), (3, "cpu"), (2, "none")], 2):
                if restages:
                    side.engine.restage(stage=stage, **offload(row, tmp_path))
                seldom(side, range(step, step + 1))
            found.append(everything(side))
    assert_equal(*found)


@on_ranks(3, full=(1,))
@pytest.mark.parametrize(("stage", "row"), [(0, "none"), (3, "none"), (2, "optimizer_cpu"), (3, "nvme")])
def test_the_plan_is_the_bytes_that_are_held(stage: int, row: str, tmp_path: Path) -> None:
    with side_of(Odd, stage=stage, **offload(row, tmp_path)) as side:
        train(side, range(2))
        engine = side.engine
        check_held(engine)
        assert state_tensors(engine) == 2
        if row == "none":
            numel = sum(b.plan.state_numel(engine.comm.rank) for b in engine.buckets if b.plan.trainable)
            assert held_bytes(engine)[Role.optim_state, Tier.device] == 2 * 2 * numel


@on_ranks(2)
@pytest.mark.parametrize(("stage", "row"), [(0, "none"), (1, "optimizer_cpu"), (3, "cpu")])
def test_what_is_kept_is_read_behind_a_step(stage: int, row: str, tmp_path: Path) -> None:
    with side_of(seldom_module, stage=stage, **offload(row, tmp_path)) as side:
        seldom(side, range(2))
        before, engine = everything(side), side.engine
        kept = KeptRanges(engine, mock.MagicMock(__contains__=lambda *_: True))
        kept.snapshot.stage()
        seldom(side, range(2, 4))
        seen = set()
        for value, start, values in kept:
            info = engine.buckets[value.bucket].params[value.slot]
            expected = info.flattened(before[info.fqn + (f".{value.name}" if value.name else "")])
            assert torch.equal(values, expected[start : start + len(values)]), (info.fqn, value)
            seen.add(value.name)
        kept.close()
        assert seen >= set(MOMENTS)


# -- other programs, other settings ----------------------------------------------------------------------------------


@on_ranks(2)
def test_torch_takes_what_is_saved_and_its_own_is_taken() -> None:
    with side_of(seldom_module) as side:
        seldom(side, range(2))
        state, values = state_of(side), everything(side)
    moments = {name: value.float() for name, value in values.items() if name.endswith(MOMENTS)}

    def assert_loaded(side: Sharded) -> None:
        load_state(side, state)
        found = everything(side)
        assert_equal({name: found[name].float() for name in moments}, moments)

    plain = seldom_module()
    optimizer = adamw(plain.parameters())
    optimizer.load_state_dict(copy.deepcopy(state))
    names = {param: name for name, param in plain.named_parameters()}
    assert_equal({f"{names[p]}.{k}": optimizer.state[p][k] for p in optimizer.state for k in MOMENTS}, moments)
    with side_of(seldom_module, dtype="fp32") as side:  # wider: the same values
        assert_loaded(side)
        seldom(side, range(2, 3))
        wide = state_of(side)
    with side_of(seldom_module) as side, mock.patch.object(runs, "_log") as log:
        with mock.patch.object(runs, "STORE_CHUNK", 256):
            assert_loaded(side)
        assert not log.info.called
        load_state(side, wide)
        assert "the optimizer state that was loaded is wider" in log.info.call_args.args[0]
        seldom(side, range(2, 3))


REFUSED: dict[str, tuple[MakeOptimizer, dict[str, Any], str]] = {
    "no state": (lambda p: torch.optim.SGD(p, lr=0.1), {}, "SGD without momentum keeps no state"),
    "step sizes": (lambda p: torch.optim.Rprop(p), {}, "torch.optim.Rprop keeps more than moments"),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), {}, r"AdamW\(amsgrad=True\)"),
    "centered": (lambda p: torch.optim.RMSprop(p, centered=True), {}, r"RMSprop\(centered=True\)"),
    "unknown": (SignDescent, {"sharding": "slices"}, "whose state is not known"),
    "stepped whole": (SignDescent, {}, "steps whole tensors"),
    "own step": (WarmsUp, {"sharding": "slices"}, "whose state is not known"),
    "torchao": (
        lambda p: type("AdamW8bit", (SignDescent,), {"__module__": "torchao.optim.adam"})(p),
        {"sharding": "slices"},
        "torchao.optim.adam.AdamW8bit chooses by the size of a tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_narrowed_is_refused(name: str) -> None:
    make, more, words = REFUSED[name]
    module = Model()
    engine = lightning_zero.shard(module, device="cpu", optimizer={"state_dtype": "bf16", **more})
    with pytest.raises(ConfigError, match=words) as caught:
        engine.add_optimizer(make(module.parameters()))
    assert "zero.optimizer.state_dtype" in str(caught.value)
    engine.release()


@on_ranks(2)
@pytest.mark.parametrize("how", ["loaded", "set"])
def test_settings_that_come_later_and_cannot_be_narrowed_are_refused(how: str) -> None:
    with Sharded(Model(), optimizer_settings={"state_dtype": "bf16"}) as side:
        train(side, range(1))
        state = copy.deepcopy(state_of(side))
        with pytest.raises(ConfigError, match=r"AdamW\(amsgrad=True\)"):
            for group in (state if how == "loaded" else side.optimizer.__dict__)["param_groups"]:
                group["amsgrad"] = True
            if how == "loaded":
                load_state(side, state)
            train(side, range(1))


def test_state_of_two_bytes_is_not_asked_for_twice() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\['state_dtype'\]: .* precision='bf16_true'"):
        lightning_zero.shard(Model(), device="cpu", precision="bf16_true", optimizer={"state_dtype": "bf16"})


# -- the numbers -----------------------------------------------------------------------------------------------------


def noise(bits: Tensor) -> list[Stretch]:
    bits = bits.to(torch.int32)
    return [Stretch(0, 77, bits[:77]), Stretch(77, len(bits), bits[77:])]


def test_rounded_values_are_right_on_average() -> None:
    torch.default_generator.manual_seed(0)
    values = (torch.randn(4096) * torch.exp(40 * torch.randn(4096))).clamp(-3e38, 3e38)
    total, place = torch.zeros(4096, dtype=torch.float64), torch.zeros(4096, dtype=torch.bfloat16)
    for _ in range(200):
        narrow(values.clone(), place, noise(torch.randint(0, 1 << 16, (4096,))))
        total += place
    large = values.abs() > 1e-30
    assert ((total / 200 - values) / values)[large].abs().max() < 0.02
    assert ((total / 200 - values) / values)[large].mean().abs() < 1e-3


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_values_that_are_not_finite_stay_so(bad: float) -> None:
    values, place = torch.ones(512), torch.zeros(512, dtype=torch.bfloat16)
    values[300] = bad
    narrow(values, place, noise(torch.full((512,), 0xFFFF)))
    assert not place[300].isfinite() and place[:256].isfinite().all()
