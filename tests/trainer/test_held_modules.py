"""Modules and parameters that lie in a checkpoint (hyperparameters, states of callbacks): as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn

from lightning_zero.checkpoint.verify import check
from lightning_zero.trainer.saves.sharded_checkpoints import read
from tests.harness import on_ranks
from tests.trainer import toys
from tests.trainer.toys import Block, Lit, fit, loader, same, seeded, strategy_of, trainer


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(toys.FEATURES, 7), Block(7), nn.LSTM(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
        self[3].eps_of_user = 1  # type: ignore[assignment]
        self[4].bias.kind = "bias"  # type: ignore[attr-defined]
        self[1].up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self[4](self[3](self[2](self[1](self[0](x)))[0]))
        return out


class Holder:
    """An object that a state may hold."""

    def __init__(self, module: Any) -> None:
        self.module = module


class WithNet(Lit):
    def __init__(self, net: nn.Module, lr: float = 0.05) -> None:
        super().__init__()
        del self.first, self.blocks, self.head
        self.save_hyperparameters()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Keeps(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.module = pl_module

    def state_dict(self) -> dict[str, Any]:
        return {"block": Holder([self.module.net[1]]), "weight": self.module.net[4].weight, "count": 3}


class Looks(WithNet):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self


FORMS = ("file", "hook", "async", "folder", "background", "averages", "after the fit")


def save(form: str, path: Path, **zero: Any) -> Any:
    """Save at the last step of a fit. Return the fit."""
    if "folder" in form or form == "background":
        zero["checkpoint"] = {"name": "sharded", "background": form == "background", **zero.get("checkpoint", {})}
    module = seeded(lambda: (Looks if form == "hook" else WithNet)(Net()))
    callbacks = [Keeps(), *([WeightAveraging()] if form == "averages" else [])]
    settings: dict[str, Any] = {"plugins": [AsyncCheckpointIO()]} if form == "async" else {}
    if form != "after the fit":
        callbacks.append(toys.saves_at(path, 4))
    strategy: Any = zero.pop("strategy", None) or strategy_of(zero.pop("row"), **zero)
    run = fit(strategy, path.parent, module, max_epochs=1, callbacks=callbacks, **settings)
    if form == "after the fit":
        run.trainer.save_checkpoint(path)
    dist.barrier()
    return run


@on_ranks(2, full=(1,))
@pytest.mark.parametrize("row", ["zero3", "zero1", "zero0", "zero3_offload"])
@pytest.mark.parametrize("form", FORMS)
def test_modules_in_a_checkpoint_are_those_that_ddp_saves(row: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / "held.ckpt"
    theirs = form if form in ("hook", "averages", "after the fit") else "file"
    expected = save(theirs, tmp_path / "ddp.ckpt", strategy="ddp")
    run = save(form, path, row=row)
    toys.assert_same(run, expected)  # the save has left everything at its place
    there = torch.load(tmp_path / "ddp.ckpt", weights_only=False)
    found = read(path, False) if path.is_dir() else torch.load(path, weights_only=False)
    assert check(path).damage == []
    modules = {"hyperparameters": lambda c: c["hyper_parameters"]["net"]}
    modules["state of a callback"] = lambda c: c["callbacks"]["Keeps"]["block"].module[0]
    if form == "hook":
        modules["module"] = lambda c: c["own"].net
        assert found["own"]._trainer is None and "_lightning_zero_engine" not in vars(found["own"])
    for what, of in modules.items():
        net, other = of(found), of(there)
        assert all(type(param) is nn.Parameter for param in net.parameters()), what
        toys.assert_weights(net.state_dict(), other.state_dict(), what=what)
        for param, twin in zip(net.parameters(), other.parameters(), strict=True):
            assert vars(param) == vars(twin) and param.requires_grad == twin.requires_grad
        assert vars(net).keys() == vars(other).keys()
    net, held = found["hyper_parameters"]["net"], found["callbacks"]["Keeps"]
    assert held["block"].module[0] is net[1] and held["count"] == 3
    assert torch.equal(held["weight"], net[4].weight) and net(torch.ones(2, toys.FEATURES)).isfinite().all()
    if form in ("file", "hook", "after the fit"):  # they are there once (the writer of "async" clones the others)
        state = found["state_dict"]
        assert all(p.data_ptr() == state[f"net.{name}"].data_ptr() for name, p in net.named_parameters())
        loaded = WithNet.load_from_checkpoint(path, weights_only=False)
        assert same(dict(loaded.state_dict()), dict(state))


@on_ranks(2)
@pytest.mark.parametrize("form", ["file", "hook", "folder"])
def test_frozen_weights_that_a_state_dict_leaves_out_are_in_the_module(form: str, tmp_path: Path) -> None:
    path = tmp_path / "held.ckpt"
    run = save(form, path, row="zero3", checkpoint={"exclude_frozen": True})
    found = read(path, False) if path.is_dir() else torch.load(path, weights_only=False)
    net = found["hyper_parameters"]["net"]
    assert "net.1.up.weight" not in found["state_dict"]
    assert torch.equal(net[1].up.weight, run.weights["net.1.up.weight"])


@pytest.mark.full
@on_ranks(2)
def test_folder_that_holds_modules_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "held.ckpt"
    save("folder", path, row="zero3")
    of = trainer(strategy_of("zero3"), tmp_path)
    of.test(seeded(lambda: WithNet(Net()), 5), loader(), ckpt_path=path, weights_only=False, verbose=False)
    found = read(path, False)["hyper_parameters"]["net"].state_dict(prefix="net.")
    toys.assert_weights(toys.weights(of), found, tolerance=0)
