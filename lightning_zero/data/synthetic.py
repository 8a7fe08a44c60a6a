"""Generate random tokens that a model can learn: ``data=synthetic``. Reads and writes no files."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_zero.data.resumable import LanguageData
from lightning_zero.settings import ConfigError, check_whole_number

BRANCHES = 4  # tokens that may follow a token


class Walks(Dataset[Tensor]):
    """Random walks ``[block_size + 1] int64`` on a graph where each token has :data:`BRANCHES` followers.

    The best loss is log2(4) = 2 bits per token. An item depends only on the seed and the item's index.
    """

    def __init__(self, n_items: int, first: int, block_size: int, vocab_size: int, seed: int) -> None:
        self.n_items, self.first, self.block_size, self.seed = n_items, first, block_size, seed
        self.followers = np.random.default_rng(seed).integers(vocab_size, size=(vocab_size, BRANCHES))

    def __len__(self) -> int:
        return self.n_items

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.n_items:
            raise IndexError(index)
        random = np.random.default_rng([self.seed, self.first + index])
        token = int(random.integers(len(self.followers)))
        tokens = [token]
        for branch in random.integers(BRANCHES, size=self.block_size):
            token = int(self.followers[token, branch])
            tokens.append(token)
        return torch.tensor(tokens)


class SyntheticData(LanguageData):
    """Random walks of tokens, in batches like those of :class:`lightning_zero.data.text.TextData`.

    Args:
        vocab_size: number of tokens.
        block_size: context length; a batch is ``[batch_size, block_size + 1]``.
        batch_size: items per process.
        n_train, n_val: items of training and validation.
        seed: seed of the graph and the walks.
        num_workers: loader processes per training process.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        block_size: int = 256,
        batch_size: int = 4,
        n_train: int = 100_000,
        n_val: int = 256,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(block_size, batch_size, num_workers)
        for key, value in {"vocab_size": vocab_size, "n_train": n_train, "n_val": n_val}.items():
            check_whole_number(f"data.{key}", value, 1)
        check_whole_number("data.seed", seed, 0)
        self.vocab_size, self.n_train, self.n_val = vocab_size, n_train, n_val
        self.train_data = Walks(n_train, n_val, block_size, vocab_size, seed)
        self.val_data = Walks(n_val, 0, block_size, vocab_size, seed)

    def check(self, world_size: int) -> None:
        """Raise ConfigError if there is less than one training batch per process."""
        if self.n_train < self.batch_size * world_size:
            raise ConfigError(
                f"data.n_train: expected at least a batch for each of {world_size} processes "
                f"({self.batch_size * world_size}), got {self.n_train}. Change data.n_train or data.batch_size."
            )
