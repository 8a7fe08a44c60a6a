"""pytorch_lightning and lightning_fabric: the same presets, by classes of their own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.presets import PRESETS
from lightning_zero.pytorch_lightning import mirror
from tests.harness import on_ranks
from tests.test_architecture import SPEAK_LIGHTNING
from tests.trainer.toys import Samples, loader

pl = pytest.importorskip("pytorch_lightning")  # a requirement of the distribution "lightning"


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    "order",
    ["lightning_zero, pytorch_lightning", pytest.param("pytorch_lightning, lightning_zero", marks=pytest.mark.full)],
)
def test_presets_are_known_and_the_other_package_is_not_imported(order: str) -> None:
    code = f"""
import sys, {order}
from pytorch_lightning.strategies import StrategyRegistry
from lightning_fabric.strategies import STRATEGY_REGISTRY
for known in StrategyRegistry, STRATEGY_REGISTRY:
    print(sorted(name for name in known if name.startswith("zero")))
from lightning_zero.pytorch_lightning import ZeroFabricStrategy, ZeroMonitor, ZeroPrecision, ZeroStrategy
print([name for name in sys.modules if name == "lightning" or name.startswith("lightning.")])
"""
    known = str(sorted(PRESETS))
    assert python(code).splitlines() == [known, known, "[]"]


def test_what_names_lightning_is_loaded_twice_and_the_rest_once() -> None:
    from lightning_zero import ZeroStrategy
    from lightning_zero.pytorch_lightning import ZeroFabricStrategy as OtherFabric
    from lightning_zero.pytorch_lightning import ZeroMonitor
    from lightning_zero.pytorch_lightning import ZeroStrategy as Other

    assert set(mirror.TWICE) == SPEAK_LIGHTNING
    assert Other is not ZeroStrategy and issubclass(Other, pl.strategies.Strategy)  # type: ignore[comparison-overlap]
    assert issubclass(ZeroMonitor, pl.Callback)
    assert OtherFabric.__mro__[-3].__module__.startswith("lightning_fabric")
    assert Other.__module__ == "lightning_zero.pytorch_lightning.trainer.strategy"
    assert pickle.loads(pickle.dumps(Other)) is Other
    assert sys.modules[Other.__module__].Engine is sys.modules[ZeroStrategy.__module__].Engine  # type: ignore[attr-defined]
    path = sys.modules[Other.__module__].__file__
    assert path == sys.modules[ZeroStrategy.__module__].__file__  # tracebacks lead to the sources


def _module(base: Any) -> Any:
    class Net(base.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

        def training_step(self, batch: Any, _: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2, fused=True)

    torch.manual_seed(2)
    return Net()


def _fit(base: Any, strategy: Any, root: Path, ckpt_path: Any = None, **settings: Any) -> tuple[Any, Any]:
    module = _module(base)
    callbacks = [base.callbacks.ModelCheckpoint(root, save_last=True)]
    trainer = base.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
        default_root_dir=root,
        **{"max_epochs": 2, **settings},
    )
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return trainer, module


@on_ranks(2)
@pytest.mark.parametrize("preset", ["zero3", "zero1_offload"])
def test_training_is_that_of_ddp_and_goes_on_from_a_checkpoint(preset: str, tmp_path: Path) -> None:
    _, expected = _fit(pl, "ddp", tmp_path / "ddp", gradient_clip_val=0.5)
    trainer, found = _fit(pl, preset, tmp_path / "zero", gradient_clip_val=0.5)
    assert type(trainer.strategy).__module__.startswith("lightning_zero.pytorch_lightning.")
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-6, atol=1e-7)
    last = tmp_path / "zero" / "last.ckpt"
    _, again = _fit(pl, preset, tmp_path / "again", ckpt_path=last, max_epochs=3, gradient_clip_val=0.5)
    _, whole = _fit(pl, preset, tmp_path / "whole", max_epochs=3, gradient_clip_val=0.5)
    assert again.losses == whole.losses[-len(again.losses) :] and len(Samples()) == 24


@on_ranks(2)
def test_both_namespaces_in_one_process(tmp_path: Path) -> None:
    import lightning.pytorch

    from lightning_zero.pytorch_lightning import ZeroStrategy

    _, ours = _fit(pl, ZeroStrategy("zero3", summary=False, prefetch_bytes=0), tmp_path / "a", precision="bf16-mixed")
    _, theirs = _fit(lightning.pytorch, "zero3", tmp_path / "b", precision="bf16-mixed")
    assert ours.losses == theirs.losses


@on_ranks(2)
def test_fabric_of_lightning_fabric() -> None:
    from lightning_fabric import Fabric

    of = Fabric(strategy="zero3", accelerator="cpu", devices=2)
    of.launch()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    model, optimizer = of.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    losses = []
    for x, y in loader():
        loss = torch.nn.functional.mse_loss(model(x), y)
        of.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] != losses[0]
