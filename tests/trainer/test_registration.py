"""``import lightning_zero`` makes the strategy names known, in whatever order things are imported, without torch.

A process that imports pytorch_lightning and lightning_fabric has strategies of their classes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from unittest import mock

import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_zero
from lightning_zero import ZeroFabricStrategy, ZeroStrategy
from lightning_zero.presets import PRESETS
from lightning_zero.settings import ConfigError, make_config
from lightning_zero.trainer import registration
from tests.harness import run_command

MISSING = "import sys; sys.modules['lightning'] = None\n"


def python(code: str, folder: Path) -> list[str]:
    """Lines that a script prints. It may start other ranks, which run it again."""
    (folder / "script.py").write_text(code)
    done = run_command("python", "-W", "ignore", folder / "script.py", folder=folder, timeout=240, code=0)
    return done.stdout.splitlines()


@pytest.mark.full
def test_import_is_light(tmp_path: Path) -> None:
    heavy = "torch", "lightning", "hydra", "omegaconf", "numpy", "fsspec", "psutil", "safetensors"
    code = f"import sys, lightning_zero; print([m for m in {heavy} if m in sys.modules])"
    assert python(code, tmp_path) == ["[]"]


KNOWN = """
import lightning_zero
from {fabric}.strategies import STRATEGY_REGISTRY
from lightning_zero import ZeroFabricStrategy, ZeroMonitor, ZeroPrecision, ZeroStrategy
from {pytorch}.strategies import Strategy, StrategyRegistry

for known in StrategyRegistry, STRATEGY_REGISTRY:
    print(sorted(name for name in known if name.startswith("zero")))
assert isinstance(StrategyRegistry.get("zero3"), ZeroStrategy) and issubclass(ZeroStrategy, Strategy)
assert isinstance(STRATEGY_REGISTRY.get("zero3"), ZeroFabricStrategy)
from {pytorch}.core import saving
assert saving.pl_load.func.__module__ == "lightning_zero.trainer.registration"
print([name for name in sys.modules if name.split(".")[0] == "{other}" and sys.modules[name]])
"""
BOTH_ORDERS = "import lightning_zero, {0}\n", "import {0}, lightning_zero\n"


@pytest.mark.full
@pytest.mark.parametrize(("pytorch", "fabric", "before"), [
    *[("lightning.pytorch", "lightning.fabric", before) for before in BOTH_ORDERS],
    *[("pytorch_lightning", "lightning_fabric", before) for before in (*BOTH_ORDERS, MISSING)],
])  # fmt: skip
def test_presets_are_known_without_the_other_package(pytorch: str, fabric: str, before: str, tmp_path: Path) -> None:
    other = "lightning" if pytorch == "pytorch_lightning" else "pytorch_lightning"
    code = KNOWN.format(pytorch=pytorch, fabric=fabric, other=other)
    known = str(sorted(PRESETS))
    assert python(f"import sys\n{before.format(pytorch)}{code}", tmp_path) == [known, known, "[]"]


def test_trainer_takes_every_name_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", str(Path.cwd()))
    for name in PRESETS:
        trainer = Trainer(strategy=name.upper(), accelerator="cpu", devices=2, logger=False, barebones=True)
        assert isinstance(trainer.strategy, ZeroStrategy)
        assert trainer.strategy.config == make_config(stage=PRESETS[name].stage, offload=PRESETS[name].offload)
        assert trainer.world_size == 2


def test_aliases_are_ddp_by_name_and_class() -> None:
    for name in ("zero0", "zero3", "zero3_offload", "zero3_notebook"):
        strategy = Trainer(strategy=f"ddp_{name}", accelerator="cpu", devices=2, logger=False, barebones=True).strategy
        plain = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False, barebones=True).strategy
        assert isinstance(strategy, ZeroStrategy) and strategy.config == plain.config  # type: ignore[attr-defined]
        assert isinstance(strategy, DDPStrategy) and not isinstance(plain, DDPStrategy)
        found = Fabric(strategy=f"ddp_{name}", accelerator="cpu", devices=2).strategy
        assert isinstance(found, ZeroFabricStrategy) and isinstance(found, FabricDDPStrategy)


def test_misspelt_preset_is_named_beside_the_error_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pytest.raises(ValueError, match="invalid strategy name")
    for make in (Trainer, Fabric):
        with refused, pytest.warns(UserWarning, match=r"mean 'zero3'\? Presets are zero0, "):
            make(strategy="zer03", accelerator="cpu", devices=1)
    monkeypatch.setitem(StrategyRegistry, "zero3_own", StrategyRegistry["zero3"])
    with warnings.catch_warnings(record=True) as told:  # another name is as without the presets
        with refused:
            Trainer(strategy="ddpp", accelerator="cpu", devices=1)
        assert "zero3_own" in StrategyRegistry.available_strategies()
        assert isinstance(Trainer(strategy="zero3_own", accelerator="cpu", devices=1).strategy, ZeroStrategy)
    assert not [one for one in told if "Presets" in str(one.message)]


def test_a_preset_with_files_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_ZERO_NVME_PATH", raising=False)
    with pytest.raises(ConfigError, match=r"(?s)(?=.*LIGHTNING_ZERO_NVME_PATH).*offload\['nvme_path'\]"):
        Trainer(strategy="zero3_nvme", accelerator="cpu", devices=1, logger=False)


def test_public_names() -> None:
    for name in lightning_zero.__all__:
        assert getattr(lightning_zero, name) is not None
        assert name in dir(lightning_zero)
    with pytest.raises(AttributeError, match="no attribute 'ZeroStrategi'"):
        _ = lightning_zero.ZeroStrategi


FIT = """
import pytorch_lightning as pl, torch
import lightning_zero

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = []
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch, _):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2, fused=True)

def fit(strategy, folder, ckpt_path=None, max_epochs=2):
    torch.manual_seed(2)
    module = Net()
    data = torch.utils.data.DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), 2)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=0.5, max_epochs=max_epochs, default_root_dir=folder,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, save_last=True)],
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer, module.losses

if __name__ == "__main__":
    _, expected = fit("ddp", "ddp")
    trainer, found = fit("zero3", "zero")
    assert type(trainer.strategy) is lightning_zero.ZeroStrategy
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    _, again = fit("zero3", "again", "zero/last.ckpt", 3)
    _, whole = fit("zero3", "whole", None, 3)
    assert 0 < len(again) < len(whole) and again == whole[-len(again):]
    if trainer.is_global_zero:
        print("as under DDP")
"""


@pytest.mark.full
@pytest.mark.parametrize("before", ["", MISSING])
def test_pytorch_lightning_trains_as_under_ddp_and_resumes(before: str, tmp_path: Path) -> None:
    assert python(before + FIT, tmp_path)[-1] == "as under DDP"


OTHER = """
import lightning.pytorch, pytorch_lightning
import lightning_zero

trainer = lightning.pytorch.Trainer(strategy="zero3", accelerator="cpu", devices=1, logger=False)
try:
    pytorch_lightning.Trainer(strategy="zero3", accelerator="cpu", devices=1, logger=False)
except lightning_zero.settings.ConfigError as error:
    print(error)
"""


@pytest.mark.full
def test_trainer_of_the_other_package_is_refused(tmp_path: Path) -> None:
    out = " ".join(python(OTHER, tmp_path))
    assert "expected a Trainer or Fabric of lightning.pytorch and lightning.fabric" in out
    assert "got one of pytorch_lightning" in out and "Import only one of the two packages in a process" in out


@pytest.mark.full
def test_package_that_asks_decides_where_both_are_imported(tmp_path: Path) -> None:
    """As ray imports the one, and a package of the user's trains with the other."""
    assert python(f"import lightning.pytorch\n{FIT}", tmp_path)[-1] == "as under DDP"


def test_a_checkpoint_that_lightning_loads_is_not_looked_at(tmp_path: Path) -> None:
    with mock.patch("lightning_zero.tiers.remote.is_folder", side_effect=AssertionError):
        assert registration._load(lambda path, **_: path, "s3://bucket/a.ckpt") == "s3://bucket/a.ckpt"
    with pytest.raises(FileNotFoundError, match="theirs"):
        registration._load(mock.Mock(side_effect=FileNotFoundError("theirs")), tmp_path / "a.ckpt")


def test_a_folder_that_reads_as_an_empty_file_loads(tmp_path: Path) -> None:
    """As object stores give a folder that has a marker of its own."""
    with mock.patch("lightning_zero.trainer.saves.sharded_checkpoints.read_module", return_value="module"):
        assert registration._load(mock.Mock(side_effect=EOFError), tmp_path) == "module"
