"""Message passing on molecules, with BatchNorm and the Noam schedule."""

from __future__ import annotations

import lightning.pytorch as pl
from chemprop import data, models, nn

from tests.field.support import on_two_ranks, trainer_arguments


def fit(strategy: str) -> None:
    arguments = trainer_arguments(strategy)
    smiles = ["C" * n + end for n in range(1, 9) for end in ("O", "N", "Cl", "C(=O)O")]
    molecules = [data.MoleculeDatapoint.from_smi(text, [len(text) / 4]) for text in smiles]
    loader = data.build_dataloader(data.MoleculeDataset(molecules), batch_size=4, num_workers=0)
    network = nn.BondMessagePassing(d_h=16, depth=2)
    model = models.MPNN(network, nn.MeanAggregation(), nn.RegressionFFN(input_dim=16, hidden_dim=16), batch_norm=True)
    pl.Trainer(**arguments).fit(model, loader)


if __name__ == "__main__":
    on_two_ranks(fit)
