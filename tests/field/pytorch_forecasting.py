"""Temporal Fusion Transformer: recurrent layers and attention for time series; gradients are clipped."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

from tests.field.support import on_two_ranks, trainer_arguments


def fit(strategy: str) -> None:
    arguments = trainer_arguments(strategy)
    time, group = np.tile(np.arange(30), 4), np.repeat(np.arange(4), 30)
    table = pd.DataFrame({"time": time, "group": group.astype(str), "value": np.sin(time / 4 + group) + 2})
    series = TimeSeriesDataSet(
        table,
        time_idx="time",
        target="value",
        group_ids=["group"],
        static_categoricals=["group"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
        max_encoder_length=8,
        max_prediction_length=4,
    )
    model = TemporalFusionTransformer.from_dataset(
        series, hidden_size=8, attention_head_size=2, hidden_continuous_size=4, dropout=0.1, loss=QuantileLoss()
    )
    trainer = pl.Trainer(**arguments, gradient_clip_val=0.1)
    trainer.fit(model, train_dataloaders=series.to_dataloader(train=True, batch_size=4, num_workers=0))


if __name__ == "__main__":
    on_two_ranks(fit)
