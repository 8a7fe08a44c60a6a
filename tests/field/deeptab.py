"""FT-Transformer for tables, by the interface of scikit-learn: a forward before the fit, validation, best weights."""

from __future__ import annotations

import numpy as np
import pandas as pd
from deeptab.configs import FTTransformerConfig
from deeptab.models import FTTransformerRegressor

from tests.field.support import RANKS, STEPS, on_two_ranks, trainer_arguments


def fit(strategy: str) -> None:
    arguments = trainer_arguments(strategy)
    rows = np.random.default_rng(0).normal(size=(8 * RANKS * STEPS, 3))
    table = pd.DataFrame({"a": rows[:, 0], "b": rows[:, 1], "kind": np.where(rows[:, 2] > 0, "x", "y")})
    model = FTTransformerRegressor(FTTransformerConfig(d_model=8, n_layers=1, n_heads=2), random_state=0)
    model.fit(table, rows.sum(axis=1), max_epochs=2, batch_size=8, lr=0.01, **arguments)


if __name__ == "__main__":
    on_two_ranks(fit)
