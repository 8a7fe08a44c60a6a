"""fabric.save and fabric.load: the file of DDP's, a folder, and back under any settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_zero import ZeroFabricStrategy
from lightning_zero.settings import ConfigError
from tests.engine.optimizers import Shampoo
from tests.fabric.toys import Net, Run, adamw, assert_equal, fabric, make, setup, train, weights
from tests.harness import on_ranks
from tests.trainer.toys import Lit, assert_weights, loader, once, trainer

pytestmark = pytest.mark.full


def state_of(run: Run, **more: Any) -> dict[str, Any]:
    return {"model": run.model, "optimizer": run.optimizer, "epoch": 3, **more}


def fresh(strategy: Any, model: nn.Module | None = None) -> Run:
    """Set up, with other weights than those of ``make``."""
    return setup(strategy, Net() if model is None else model)


def strategy_of(name: str) -> Any:
    """Give a preset's, ``ddp``, or one that saves folders (``zero3 folder``)."""
    return ZeroFabricStrategy(name.split()[0], checkpoint="sharded") if name.endswith("folder") else name


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("strategy", "name"), [("zero3", "model"), ("zero3", "state_dict"), ("zero3 folder", "model")])
def test_trainer_refuses_what_fabric_has_written(strategy: str, name: str, tmp_path: Path) -> None:
    run = train(strategy_of(strategy))
    run.fabric.save(tmp_path / "a.ckpt", {name: run.model, "optimizer": run.optimizer})
    of = trainer("zero3", tmp_path)
    says = r"expected a checkpoint of Lightning, got .*a\.ckpt, .* Change ckpt_path; .* what fabric\.save .* by fabric"
    with pytest.raises(ConfigError, match=says):
        of.fit(Lit(), loader(), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3", "zero3_offload"])
def test_file_of_fabric_is_that_of_ddp(preset: str, tmp_path: Path) -> None:
    for strategy in (preset, "ddp"):
        run = train(strategy)
        run.fabric.save(tmp_path / strategy, state_of(run, lr=[0.1], part=torch.ones(2)))
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in (preset, "ddp"))
    assert list(ours) == list(theirs)
    assert_weights(ours.pop("model"), theirs.pop("model"), tolerance=0)
    # A fused step rounds the last elements of a tensor otherwise.
    torch.testing.assert_close(ours["optimizer"].pop("state"), theirs["optimizer"].pop("state"), rtol=1e-6, atol=1e-9)
    assert str(ours) == str(theirs)


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize("strategy", ["zero3", "zero3 folder"])
@pytest.mark.parametrize("alone", [False, True])
def test_module_in_another_entry_is_saved_with_its_values(strategy: str, alone: bool, tmp_path: Path) -> None:
    run = train(strategy_of(strategy))
    settings = {"net": [run.model.module], "lr": 0.1}
    run.fabric.save(tmp_path / "a", {"settings": settings} if alone else state_of(run, settings=settings))
    expected = weights(run)
    net = run.fabric.load(tmp_path / "a", weights_only=False)["settings"]["net"][0]
    assert_weights(net.state_dict(), expected, tolerance=0)
    assert all(type(param) is nn.Parameter for param in net.parameters())


@pytest.mark.sample
@on_ranks(2)
@pytest.mark.parametrize(("saved", "loaded", "optimizer"), [
    ("zero3", "zero3", adamw),
    ("zero1", "zero3_offload", adamw),
    ("zero3", "ddp", adamw),
    ("ddp", "zero3", adamw),
    ("zero3 folder", "zero3 folder", adamw),
    ("zero3 folder", "zero1", adamw),
    ("zero3_offload", "zero1 folder", adamw),
    ("zero3 folder", "zero1", Shampoo),  # whose state is in lists
    ("zero1", "ddp", Shampoo),
])  # fmt: skip
def test_loaded_training_goes_on_as_if_it_had_not_ended(
    saved: str, loaded: str, optimizer: Any, tmp_path: Path
) -> None:
    first = train(strategy_of(saved), optimizer=optimizer)
    first.fabric.save(tmp_path / "state", state_of(first))
    again = setup(strategy_of(loaded), Net(), optimizer)
    state = state_of(again, epoch=0)
    assert again.fabric.load(tmp_path / "state", state) == {}
    assert state["epoch"] == 3 and state["model"] is again.model
    assert_weights(weights(again), weights(first), tolerance=0)
    assert_equal(train("", run=again), train("", run=Run(first.fabric, first.model, first.optimizer)))


@on_ranks(2)
def test_what_has_been_frozen_since_a_save_and_is_thawed_has_the_masters_of_the_save(tmp_path: Path) -> None:
    first = train("zero3", precision="bf16-mixed")
    first.fabric.save(tmp_path / "state", state_of(first))
    model = Net()
    model.first.requires_grad_(False)
    again = setup("zero3", model, lambda _: adamw(model.parameters()), precision="bf16-mixed")
    again.fabric.load(tmp_path / "state", state_of(again))
    model.first.requires_grad_(True)
    assert_weights(weights(again), weights(first), tolerance=0)


@on_ranks(2)
def test_load_without_a_state_and_with_a_part_of_it_gives_the_rest(tmp_path: Path) -> None:
    run = train("zero3")
    run.fabric.save(tmp_path / "state", state_of(run))
    again = fresh("zero3")
    whole = again.fabric.load(tmp_path / "state")
    assert set(whole) == {"model", "optimizer", "epoch"}
    assert_weights(whole["model"], weights(run), tolerance=0)
    rest = again.fabric.load(tmp_path / "state", {"model": again.model})
    assert set(rest) == {"optimizer", "epoch"}
    assert_weights(weights(again), weights(run), tolerance=0)
    raw = tmp_path / "raw"
    once(lambda: torch.save(whole["model"], raw))
    other = fresh("zero3_offload")
    other.fabric.load_raw(raw, other.model)
    assert_weights(weights(other), weights(run), tolerance=0)


@pytest.mark.sample
@on_ranks(2)
def test_checkpoint_that_cannot_be_loaded_or_written_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = train("zero3")
    run.fabric.save(tmp_path / "state", state_of(run))
    before = weights(run)
    with pytest.raises(KeyError, match="'scheduler'"):
        run.fabric.load(tmp_path / "state", {"model": run.model, "scheduler": 0})
    other = fresh("zero3", nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match=r"expected a checkpoint of this Sequential.*fabric\.load: strict=False"):
        other.fabric.load(tmp_path / "state", {"model": other.model})
    wide = fresh("zero3", Net(width=16))
    with pytest.raises(ConfigError, match="shape"):
        wide.fabric.load(tmp_path / "state", state_of(wide))
    with pytest.raises(ConfigError, match=r"fabric\.load\): expected a whole checkpoint"):
        once(lambda: (tmp_path / "broken").write_bytes(b"PK\x03\x04 no archive"))
        run.fabric.load(tmp_path / "broken", state_of(run))
    with pytest.raises(FileNotFoundError, match=r"nowhere.*Change .*path of fabric\.load"):
        run.fabric.load(tmp_path / "nowhere", state_of(run))
    with pytest.raises(Exception, match="broken"):  # which is no folder
        run.fabric.save(tmp_path / "broken" / "state", state_of(run))
    lacking = {"model": other.model, "more": 1}
    other.fabric.load(tmp_path / "state", lacking, strict=False)
    assert lacking["more"] == 1
    assert_weights(weights(run), before, tolerance=0)


@on_ranks(2)
@pytest.mark.parametrize("form", ["zero3", "zero3 folder"])
def test_filters_see_names_and_leave_tensors_out(form: str, tmp_path: Path) -> None:
    """They see names and tensors; in a file these have values."""
    run = train(strategy_of(form))
    seen = []

    def keep(name: str, value: Any) -> bool:
        seen.append(name)
        return "bias" not in name and (form == "zero3 folder" or bool(value.isfinite().all()))

    run.fabric.save(tmp_path / "state", state_of(run), filter={"model": keep})
    found = run.fabric.load(tmp_path / "state")
    assert set(found["model"]) == {name for name in weights(run) if "bias" not in name}
    assert seen or not run.fabric.is_global_zero


@on_ranks(2)
def test_two_models_and_states_of_other_objects_are_saved_in_one_file(tmp_path: Path) -> None:
    def state_of_two(strategy: str, make: Callable[[], nn.Module]) -> tuple[Fabric, dict[str, Any]]:
        of, state = fabric(strategy), {}
        for name, model in (("one", make()), ("two", Net(width=16))):
            state[name], state[f"{name}'s"] = of.setup(model, adamw(model.parameters()))
        state["schedule"] = torch.optim.lr_scheduler.StepLR(state["one's"].optimizer, 1, 0.5)
        return of, state

    of, saved = state_of_two("zero3", make)
    saved["schedule"].step()
    of.save(tmp_path / "state", saved)
    again, loaded = state_of_two("zero1", Net)
    again.load(tmp_path / "state", loaded)
    assert loaded["schedule"].state_dict() == saved["schedule"].state_dict()
    for name in ("one", "two"):
        found, expected = weights(Run(again, loaded[name], None)), weights(Run(of, saved[name], None))
        assert_weights(found, expected, tolerance=0)
