"""TSMixer for time series, with validation; Lightning is ``pytorch_lightning``, which the package calls by itself."""

from __future__ import annotations

import numpy as np
from darts import TimeSeries
from darts.models import TSMixerModel

from tests.field.support import on_two_ranks, trainer_arguments


def fit(strategy: str) -> None:
    arguments = trainer_arguments(strategy)
    wave = np.sin(np.arange(60) / 4).astype(np.float32) + 2
    model = TSMixerModel(
        input_chunk_length=8,
        output_chunk_length=4,
        hidden_size=8,
        ff_size=8,
        num_blocks=2,
        batch_size=4,
        random_state=0,
        pl_trainer_kwargs=arguments,
    )
    model.fit(TimeSeries.from_values(wave), val_series=TimeSeries.from_values(wave[:30]))


if __name__ == "__main__":
    on_two_ranks(fit)
