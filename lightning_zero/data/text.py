"""Use the bytes of text files as tokens: ``data=text``, the default. Needs no other package.

Each process holds the bytes of all files in memory; for more text there is ``data=dataset``::

    file 0 | 0 | file 1 | 0 | ... | file n | 0        one token per byte, 0 ends a document
    chunk 0   chunk 1   chunk 2   ...                 block_size tokens each; an item holds one token more
    segment 0         segment 1         ...           neighbouring chunks, all for training or all for validation
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_zero.data.resumable import LanguageData
from lightning_zero.data.sources import find_sources, open_source
from lightning_zero.settings import ConfigError, check_whole_number

SEGMENT_CHUNKS = 16
MIN_SEGMENTS = 50  # short texts get shorter segments
MOST_NBYTES = 1 << 30  # of all files


class Split(NamedTuple):
    train: np.ndarray  # chunk indices
    val: np.ndarray


def split_chunks(n_chunks: int, val_fraction: float, seed: int) -> Split:
    """Return indices of chunks for training and for validation. ``seed`` chooses the segments for validation."""
    length = max(1, min(SEGMENT_CHUNKS, n_chunks // MIN_SEGMENTS))
    n_segments = -(-n_chunks // length)
    n_val = max(1, round(n_segments * val_fraction))
    held_out = np.zeros(n_segments, dtype=bool)
    held_out[np.random.default_rng(seed).permutation(n_segments)[:n_val]] = True
    is_val = np.repeat(held_out, length)[:n_chunks]
    return Split(np.flatnonzero(~is_val), np.flatnonzero(is_val))


class Chunks(Dataset[Tensor]):
    """Items ``[block_size + 1] int64``, cut from ``tokens [n] uint8``. ``chunks``: the index of each item's chunk."""

    def __init__(self, tokens: Tensor, chunks: np.ndarray, block_size: int) -> None:
        self.tokens, self.chunks, self.block_size = tokens, chunks, block_size

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.chunks[index]) * self.block_size
        return self.tokens[start : start + self.block_size + 1].long()


class TextData(LanguageData):
    """Language modelling over text files, byte by byte.

    Args:
        path: a file, folder or glob, of at most 1 GiB. Default: the Python sources of the standard library.
        block_size: context length; a batch is ``[batch_size, block_size + 1]``.
        batch_size: items per process.
        val_fraction: share of the text for validation.
        split_seed: seed that chooses the text for validation.
        num_workers: loader processes per training process.

    Raises ConfigError before any process starts if a file is missing, the text too short, or a value out of range.
    """

    vocab_size = 256

    def __init__(
        self,
        path: str | None = None,
        *,
        block_size: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.01,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(block_size, batch_size, num_workers)
        check_whole_number("data.split_seed", split_seed, 0)
        if isinstance(val_fraction, bool) or not isinstance(val_fraction, (int, float)) or not 0 < val_fraction < 1:
            raise ConfigError(
                f"data.val_fraction: expected a number > 0 and < 1, got {val_fraction!r}. Change data.val_fraction."
            )
        if path is not None and not isinstance(path, str):
            raise ConfigError(f"data.path: expected text, got {path!r}. Change data.path.")
        self.path, self.val_fraction, self.split_seed = path, val_fraction, split_seed
        self.sources = find_sources(path)
        self.n_tokens = sum(s.nbytes + 1 for s in self.sources)
        if self.n_tokens > MOST_NBYTES:
            raise ConfigError(
                f"data.path: expected at most {MOST_NBYTES:,} bytes of text, because each process holds all text in "
                f"memory, got {self.n_tokens:,}. Choose data=dataset, which keeps text on disk (with "
                "data.tokenizer=null each byte is a token)."
            )
        self.check(world_size=1)

    def check(self, world_size: int) -> None:
        """Raise ConfigError if the text has less than one training batch per process."""
        n_chunks = (self.n_tokens - 1) // self.block_size
        found = len(self.split().train) if n_chunks >= 2 else 0
        where = f"{self.n_tokens} bytes in {len(self.sources)} files"
        check_enough(found, self.batch_size * world_size, self.block_size, where)

    @property
    def batch(self) -> str:
        """Return a description of a batch in words, for an error raised by a model that expects other batches."""
        shape = [self.batch_size, self.block_size + 1]
        return f"one tensor of tokens {shape}, int64 from 0 to 255: each a byte, and the target of the one before it"

    def split(self) -> Split:
        return split_chunks((self.n_tokens - 1) // self.block_size, self.val_fraction, self.split_seed)

    @cached_property
    def tokens(self) -> Tensor:
        """Return the bytes of all files, each followed by a 0: ``[n_tokens] uint8``."""
        joined = bytearray()
        for source in self.sources:
            with open_source(source.path) as file:
                joined += file.read() + b"\0"
        if len(joined) != self.n_tokens:
            raise ConfigError(
                f"data.path: expected files that do not change while they are read, got {len(joined)} bytes instead of "
                f"{self.n_tokens}. Start the run again when no program writes to the files."
            )
        return torch.frombuffer(joined, dtype=torch.uint8)

    def setup(self, stage: str) -> None:
        if self.trainer is not None:
            self.check(self.n_replicas)
        split = self.split()
        self.train_data = Chunks(self.tokens, split.train, self.block_size)
        self.val_data = Chunks(self.tokens, split.val, self.block_size)


def check_enough(found: int, needed: int, block_size: int, where: str) -> None:
    """Raise ConfigError if ``found``, the number of training items in the text, is less than ``needed``."""
    if found < needed:
        raise ConfigError(
            f"data.path: expected text for at least one batch of training on each process ({needed} pieces of "
            f"{block_size} tokens), got {found} pieces from {where}. Give more text by data.path, or lower "
            "data.batch_size or data.block_size."
        )
