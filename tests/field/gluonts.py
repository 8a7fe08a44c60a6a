"""DeepAR: a recurrent network for time series, whose estimator makes its own Trainer and loads its best weights."""

from __future__ import annotations

import os

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator

from tests.field.support import STEPS, on_two_ranks, trainer_arguments


def fit(strategy: str) -> None:
    arguments = trainer_arguments(strategy) | {"max_epochs": 1}
    rank = int(os.environ["LOCAL_RANK"])  # gluonts divides nothing: each rank has series of its own
    waves = np.sin(np.arange(80) / 5 + np.arange(6)[:, None] + rank) + 2
    series = ListDataset([{"start": "2024-01-01", "target": wave} for wave in waves], freq="h")
    estimator = DeepAREstimator(
        freq="h",
        prediction_length=4,
        context_length=8,
        hidden_size=8,
        batch_size=8,
        num_batches_per_epoch=STEPS,
        trainer_kwargs=arguments,
    )
    estimator.train(series)


if __name__ == "__main__":
    on_two_ranks(fit)
