"""pytorch_lightning and lightning_fabric: a process that imports these has strategies of their classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero.presets import PRESETS
from tests.harness import run_command

pytestmark = pytest.mark.full

pytest.importorskip("pytorch_lightning")  # a requirement of the distribution "lightning"
MISSING = "import sys; sys.modules['lightning'] = None\n"


def python(code: str, folder: Path) -> list[str]:
    """Lines that a script prints. It may start other ranks, which run it again."""
    (folder / "script.py").write_text(code)
    done = run_command("python", "-W", "ignore", folder / "script.py", folder=folder, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


KNOWN = """
import lightning_zero
from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_zero import ZeroFabricStrategy, ZeroMonitor, ZeroPrecision, ZeroStrategy
from pytorch_lightning.strategies import Strategy, StrategyRegistry

for known in StrategyRegistry, STRATEGY_REGISTRY:
    print(sorted(name for name in known if name.startswith("zero")))
assert isinstance(StrategyRegistry.get("zero3"), ZeroStrategy) and issubclass(ZeroStrategy, Strategy)
assert isinstance(STRATEGY_REGISTRY.get("zero3"), ZeroFabricStrategy)
print([name for name in sys.modules if name.split(".")[0] == "lightning" and sys.modules[name]])
"""


@pytest.mark.parametrize(
    "before", ["import lightning_zero, pytorch_lightning\n", "import pytorch_lightning, lightning_zero\n", MISSING]
)
def test_presets_are_known_and_lightning_is_not_imported(before: str, tmp_path: Path) -> None:
    known = str(sorted(PRESETS))
    assert python(f"import sys\n{before}{KNOWN}", tmp_path) == [known, known, "[]"]


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


@pytest.mark.parametrize("before", ["", MISSING])
def test_pytorch_lightning_trains_as_under_ddp_and_resumes(before: str, tmp_path: Path) -> None:
    assert python(before + FIT, tmp_path)[-1] == "as under DDP"


OTHER = """
import lightning.pytorch, pytorch_lightning
import lightning_zero

trainer = lightning.pytorch.Trainer(strategy="zero3", accelerator="cpu", devices=1, logger=False)
try:
    pytorch_lightning.Trainer(strategy="zero3", accelerator="cpu", devices=1, logger=False)
except lightning_zero.config.ConfigError as error:
    print(error)
"""


def test_trainer_of_the_other_package_is_refused(tmp_path: Path) -> None:
    out = " ".join(python(OTHER, tmp_path))
    assert "expected a Trainer or a Fabric of lightning.pytorch and lightning.fabric" in out
    assert "got one of pytorch_lightning" in out and "Import everything from one of the two" in out
