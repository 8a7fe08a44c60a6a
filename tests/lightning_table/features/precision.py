"""Trainer(precision=...)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.lightning_table.bench import Bench, checkpoint
from tests.lightning_table.table import feature
from tests.trainer.toys import Lit, seeded

# How far sums of a precision differ that are made in another order.
CASES = {"32-true": 1e-5, "64-true": 1e-9, "bf16-mixed": 2e-2, "bf16-true": 5e-2, "16-true": 2e-2}


class Dtypes(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        self.dtypes += [str(batch[0].dtype), str(out.dtype), str(self.head.weight.dtype), str(torch.ones(1).dtype)]
        return super().training_step(batch, batch_idx)


def _ran(bench: Bench, module: Any = None, **settings: Any) -> Any:
    ran = bench.fit(seeded(Dtypes) if module is None else module, gradient_clip_val=0.5, **settings)
    ran.trainer.save_checkpoint(bench.root / "a.ckpt")
    file = checkpoint(bench.root / "a.ckpt")
    kept = {name: str(value.dtype) for name, value in sorted(file["state_dict"].items())}
    return ran.seen, ran.module.dtypes, ran.trainer.precision, kept


for _flag, _tolerance in CASES.items():

    def _with(bench: Bench, flag: str = _flag) -> Any:
        # Parameters that autocast has already cast are bf16 in our forward, where DDP casts them in each call.
        dtypes = seeded(Dtypes)
        ran = _ran(bench, dtypes, precision=flag)
        return (ran[0], [d for place, d in enumerate(ran[1]) if place % 4 != 2], *ran[2:]) if "mixed" in flag else ran

    _with.__doc__ = "Losses, metrics, weights, dtypes in a step and in the file"
    feature(f'precision="{_flag}"', tolerance=_tolerance)(_with)


@feature('precision="16-mixed", which Lightning turns into bf16-mixed on the CPU', tolerance=2e-2)
def mixed(bench: Bench) -> Any:
    """Losses, metrics, weights, the precision"""
    ran = bench.fit(precision="16-mixed")
    return ran.seen, ran.trainer.precision


@feature("MixedPrecision with a GradScaler", tolerance=2e-2)
def scaled(bench: Bench) -> Any:
    """Losses, metrics, weights, scales, where a step is skipped"""

    class Overflows(Lit):
        def forward(self, x: Any) -> Any:
            return super().forward(x).float()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            scales.append(float(self.trainer.precision_plugin.scaler.get_scale()))
            return loss * float("inf") if self.trainer.fit_loop.total_batch_idx == 2 else loss

    scales: list[float] = []
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    ran = bench.fit(seeded(Overflows), plugins=plugin)
    assert len(set(scales)) > 1
    return ran.seen, scales


@feature('precision="transformer-engine"', ddp_raises="TransformerEngine|transformer.engine")
def transformer_engine(bench: Bench) -> Any:
    """Not installed: Lightning's error"""
    return bench.fit(precision="transformer-engine")
