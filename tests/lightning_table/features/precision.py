"""Trainer(precision=...)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.lightning_table.bench import Bench, Notes
from tests.lightning_table.table import heading
from tests.trainer.toys import seeded

feature = heading("Precision")

# How far sums of a precision differ that are made in another order.
CASES = {"32-true": 1e-5, "64-true": 1e-9, "bf16-mixed": 2e-2, "bf16-true": 5e-2, "16-true": 2e-2}


class Dtypes(Notes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        dtypes = [batch[0].dtype, self(batch[0]).dtype, torch.ones(1).dtype]
        # Parameters that autocast has already cast are bf16 in our forward, where DDP casts them in each call.
        dtypes += [] if "mixed" in self.trainer.precision else [self.head.weight.dtype]
        self.noted += map(str, dtypes)
        return super().training_step(batch, batch_idx)


def _with(flag: str) -> Any:
    def ran(bench: Bench) -> Any:
        """Losses, metrics, weights, dtypes in a step and in the file"""
        ran = bench.fit(seeded(Dtypes), precision=flag, gradient_clip_val=0.5)
        kept = torch.load(ran.save(), weights_only=False)["state_dict"]
        return ran.seen, ran.trainer.precision, {name: str(value.dtype) for name, value in sorted(kept.items())}

    return ran


for _flag, _tolerance in CASES.items():
    feature(f'precision="{_flag}"', tolerance=_tolerance)(_with(_flag))


@feature('precision="16-mixed", which Lightning turns into bf16-mixed on the CPU', tolerance=2e-2)
def mixed(bench: Bench) -> Any:
    """Losses, metrics, weights, the precision"""
    ran = bench.fit(precision="16-mixed")
    return ran.seen, ran.trainer.precision


@feature("MixedPrecision with a GradScaler", tolerance=2e-2)
def scaled(bench: Bench) -> Any:

    class Overflows(Notes):
        def forward(self, x: Any) -> Any:
            return super().forward(x).float()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.noted.append(float(self.trainer.precision_plugin.scaler.get_scale()))
            return loss * float("inf") if self.trainer.fit_loop.total_batch_idx == 2 else loss

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    ran = bench.fit(seeded(Overflows), plugins=plugin)
    assert len(set(ran.module.noted)) > 1
    return ran.seen


@feature('precision="transformer-engine"', ddp_raises="TransformerEngine|transformer.engine")
def transformer_engine(bench: Bench) -> Any:
    """The package is not installed"""
    return bench.fit(precision="transformer-engine")
