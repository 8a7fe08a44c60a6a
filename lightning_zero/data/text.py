"""Use the bytes of text files as tokens: ``data=text``, the default. Needs no other package.

The files are joined once into a flat cache file, which every process maps::

    file 0 | 0 | file 1 | 0 | ... | file n | 0        one token per byte, 0 ends a document
    chunk 0   chunk 1   chunk 2   ...                 block_size tokens each; an item holds one token more
    segment 0         segment 1         ...           neighbouring chunks, all for training or all for validation
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_zero.config import ConfigError
from lightning_zero.data.resumable import ResumableLoader
from lightning_zero.data.sources import Source, find_sources, open_source
from lightning_zero.device.cuda import gpu_count

FORMAT = 1  # version of the cache file, part of its name
SEGMENT_CHUNKS = 16
MIN_SEGMENTS = 50  # short texts get shorter segments


class Split(NamedTuple):
    train: np.ndarray  # chunk indices
    val: np.ndarray


def split_chunks(n_chunks: int, val_fraction: float, seed: int) -> Split:
    """Divide chunks into training and validation by whole segments. Deterministic."""
    length = max(1, min(SEGMENT_CHUNKS, n_chunks // MIN_SEGMENTS))
    n_segments = -(-n_chunks // length)
    n_val = max(1, round(n_segments * val_fraction))
    held_out = np.zeros(n_segments, dtype=bool)
    held_out[np.random.default_rng(seed).permutation(n_segments)[:n_val]] = True
    is_val = np.repeat(held_out, length)[:n_chunks]
    return Split(np.flatnonzero(~is_val), np.flatnonzero(is_val))


class Chunks(Dataset[Tensor]):
    """Items ``[block_size + 1] int64`` of a mapped file of bytes."""

    def __init__(self, path: Path, chunks: np.ndarray, block_size: int) -> None:
        self.chunks = chunks
        self.block_size = block_size
        self.path = path
        self._tokens: np.memmap | None = None  # mapped in the reading process, because pickling would copy it

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Tensor:
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=np.uint8, mode="r")
        start = int(self.chunks[index]) * self.block_size
        return torch.from_numpy(self._tokens[start : start + self.block_size + 1].astype(np.int64))


class TextData(LightningDataModule):
    """Language modelling over text files, byte by byte.

    Args:
        path: a file, folder or glob. Default: the Python sources of the standard library.
        block_size: context length; a batch is ``[batch_size, block_size + 1]``.
        batch_size: items per process.
        val_fraction: share of the text for validation.
        split_seed: chooses that share.
        cache_dir: folder of the joined file. Default: in the user's cache folder, or a temporary one if that is
            read-only.
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
        cache_dir: str | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        check_whole_number("block_size", block_size, 1)
        check_whole_number("batch_size", batch_size, 1)
        check_whole_number("split_seed", split_seed, 0)
        check_whole_number("num_workers", num_workers, 0)
        if isinstance(val_fraction, bool) or not isinstance(val_fraction, (int, float)) or not 0 < val_fraction < 1:
            raise ConfigError(
                f"data.val_fraction: expected a number > 0 and < 1, got {val_fraction!r}. Change data.val_fraction."
            )
        if path is not None and not isinstance(path, str):
            raise ConfigError(f"data.path: expected text, got {path!r}. Change data.path.")
        self.path = path
        self.block_size = block_size
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.num_workers = num_workers
        self.sources = find_sources(path)
        self.n_tokens = sum(s.nbytes + 1 for s in self.sources)
        self.cache_file = _cache_folder(cache_dir) / f"text-{_key(self.sources)}.bin"
        self.check(world_size=1)

    def check(self, world_size: int) -> None:
        """Raise ConfigError if the text has less than one training batch per process."""
        n_chunks = (self.n_tokens - 1) // self.block_size
        found = len(self.split().train) if n_chunks >= 2 else 0
        where = f"{self.n_tokens} bytes in {len(self.sources)} files"
        check_enough(found, self.batch_size * world_size, self.block_size, where)

    @property
    def batch(self) -> str:
        """Describe a batch in words."""
        shape = [self.batch_size, self.block_size + 1]
        return f"one tensor of tokens {shape}, int64 from 0 to 255: each a byte, and the target of the one before it"

    def split(self) -> Split:
        return split_chunks((self.n_tokens - 1) // self.block_size, self.val_fraction, self.split_seed)

    def prepare_data(self) -> None:
        if self.cache_file.is_file() and self.cache_file.stat().st_size == self.n_tokens:
            return
        _join(self.sources, self.cache_file, self.n_tokens)

    def setup(self, stage: str) -> None:
        if self.trainer is not None:
            self.check((self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
        split = self.split()
        self.train_data = Chunks(self.cache_file, split.train, self.block_size)
        self.val_data = Chunks(self.cache_file, split.val, self.block_size)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.train_data, train=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.val_data, train=False)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    def _loader(self, data: Chunks, train: bool) -> DataLoader[Tensor]:
        options = loader_options(self.num_workers)
        if train:
            return ResumableLoader(data, self.batch_size, trainer=self.trainer, drop_last=True, **options)
        return DataLoader(data, batch_size=self.batch_size, **options)  # Lightning adds a distributed sampler


def loader_options(num_workers: int) -> dict[str, Any]:
    """Return the DataLoader arguments that all data modules share."""
    return {"num_workers": num_workers, "pin_memory": gpu_count() > 0, "persistent_workers": num_workers > 0}


def check_enough(found: int, needed: int, block_size: int, where: str) -> None:
    """Raise ConfigError if ``found`` pieces of text are fewer than the ``needed`` ones."""
    if found < needed:
        raise ConfigError(
            f"data.path: expected text for at least one batch of training on each process ({needed} pieces of "
            f"{block_size} tokens), got {found} pieces from {where}. Give more text by data.path, or lower "
            "data.batch_size or data.block_size."
        )


def check_whole_number(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"data.{key}: expected a whole number >= {least}, got {value!r}. Change data.{key}.")


def _cache_folder(cache_dir: str | None) -> Path:
    """Create the cache folder before processes start. The default is temporary if the user's cannot be written."""
    if cache_dir:
        return _made(Path(os.path.expanduser(cache_dir)))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    try:
        return _made(Path(base, "lightning_zero"))
    except ConfigError:
        folder = Path(tempfile.gettempdir(), f"lightning_zero-{os.getuid()}")
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
        if not folder.is_dir() or folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise  # other users could write there
        return _made(folder / "cache")


def _made(folder: Path) -> Path:
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: cannot make the folder {folder}: {error.strerror}. Change data.cache_dir."
        ) from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"data.cache_dir: expected a folder to write in, got {folder}. Change data.cache_dir.")
    return folder


def _key(sources: list[Source]) -> str:
    digest = hashlib.sha256(f"format {FORMAT}\n".encode())
    for source in sources:
        digest.update(f"{source.path}\0{source.nbytes}\0{source.mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _join(sources: list[Source], target: Path, expected_nbytes: int) -> None:
    """Write aside and rename, because other processes and jobs may map or write the same file."""
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            for source in sources:
                with open_source(source.path) as file:
                    shutil.copyfileobj(file, out)
                out.write(b"\0")
            if (written := out.tell()) != expected_nbytes:
                raise ConfigError(
                    f"data.path: the files changed while they were read (expected {expected_nbytes} bytes, got "
                    f"{written}). Start again once they are at rest."
                )
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
