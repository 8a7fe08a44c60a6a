"""SCARF for tables: pretraining, then a second fit of the same module with other steps and a frozen encoder."""

from __future__ import annotations

import numpy as np
import pandas as pd
from pytorch_lightning import Trainer
from ts3l.pl_modules import SCARFLightning
from ts3l.utils import TS3LDataModule
from ts3l.utils.backbone_utils import MLPBackboneConfig
from ts3l.utils.embedding_utils import IdentityEmbeddingConfig
from ts3l.utils.scarf_utils import SCARFConfig, SCARFDataset

from tests.field.support import RANKS, STEPS, on_two_ranks, trainer_arguments

NAMES = list("abcd")


def fit(strategy: str) -> None:
    # Each phase leaves parameters of the other out of its loss.
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(8 * RANKS * STEPS, len(NAMES))), columns=NAMES)
    columns = {"continuous_cols": NAMES, "category_cols": []}
    config = SCARFConfig(
        task="classification",
        loss_fn="CrossEntropyLoss",
        metric="accuracy_score",
        embedding_config=IdentityEmbeddingConfig(input_dim=len(NAMES)),
        backbone_config=MLPBackboneConfig(input_dim=len(NAMES), hidden_dims=8, output_dim=8),
        output_dim=2,
        optim="SGD",
        optim_hparams={"lr": 0.05},
    )
    model = SCARFLightning(config)
    labels = (table["a"] > 0).astype(int).to_numpy()
    for phase in ("first", "second"):
        if phase == "second":
            model.set_second_phase(freeze_encoder=True)
            rows = SCARFDataset(table, labels, is_second_phase=True, **columns)
        else:
            rows = SCARFDataset(table, config=config, **columns)
        data = TS3LDataModule(rows, rows, batch_size=8, train_sampler="random", n_jobs=0)
        Trainer(**trainer_arguments(strategy) | {"max_steps": STEPS // 2}).fit(model, data)


if __name__ == "__main__":
    on_two_ranks(fit)
