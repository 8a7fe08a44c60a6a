"""Bytes of real text as tokens, or what a tokenizer makes of it.

The files are joined once into a flat file of bytes in a cache folder, which every process then maps::

    file 0 | 0 | file 1 | 0 | ... | file n | 0        one token per byte, 0 ends a document (or the tokenizer's own)
    chunk 0   chunk 1   chunk 2   ...                 block_size tokens each; an item holds one token more
    segment 0         segment 1         ...           neighbouring chunks: a whole segment is for training or validation
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_zero.config import ConfigError
from lightning_zero.data.resumable import ResumableLoader
from lightning_zero.data.sources import Source, find_sources, open_source
from lightning_zero.data.tokenizer import Tokenizer, write_aside, write_once
from lightning_zero.device.cuda import gpu_count

FORMAT = 1  # of the cache file; part of its name
SEGMENT_CHUNKS = 16
MIN_SEGMENTS = 50  # a short text has shorter segments


class Split(NamedTuple):
    train: np.ndarray  # chunk indices
    val: np.ndarray


def split_chunks(n_chunks: int, val_fraction: float, seed: int) -> Split:
    """Divide chunks into training and validation by whole segments; the same for the same arguments everywhere."""
    length = max(1, min(SEGMENT_CHUNKS, n_chunks // MIN_SEGMENTS))
    n_segments = -(-n_chunks // length)
    n_val = max(1, round(n_segments * val_fraction))
    held_out = np.zeros(n_segments, dtype=bool)
    held_out[np.random.default_rng(seed).permutation(n_segments)[:n_val]] = True
    is_val = np.repeat(held_out, length)[:n_chunks]
    return Split(np.flatnonzero(~is_val), np.flatnonzero(is_val))


class Chunks(Dataset[Tensor]):
    """Items ``[block_size + 1] int64`` of a mapped file of tokens."""

    def __init__(self, path: Path, chunks: np.ndarray, block_size: int, dtype: np.dtype[Any]) -> None:
        self.chunks = chunks
        self.dtype = dtype
        self.block_size = block_size
        self.path = path
        self._tokens: np.memmap | None = None  # mapped by the process that reads: pickling a map would copy it

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Tensor:
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=self.dtype, mode="r")
        start = int(self.chunks[index]) * self.block_size
        return torch.from_numpy(self._tokens[start : start + self.block_size + 1].astype(np.int64))


class TextData(LightningDataModule):
    """Language modelling over text files, byte by byte or by the tokens of a tokenizer.

    Args:
        path: a file, a folder or a glob. Default: the Python sources of the interpreter's standard library.
        tokenizer: a folder with a tokenizer of Hugging Face. Default: each byte is a token.
        block_size: tokens that the model sees at once; a batch is ``[batch_size, block_size + 1]``.
        batch_size: items per process.
        val_fraction: share of the text that is held out.
        split_seed: which part that is.
        cache_dir: where the joined tokens are kept. Default: ``lightning_zero`` in the user's cache folder, or
            among the temporary files where that cannot be written.
        num_workers: processes that load data, for each training process.

    Raises:
        ConfigError: no such file, too little text, a value out of range: at once, before any process starts.
    """

    sources: list[Source] | None = None  # files

    def __init__(
        self,
        path: str | None = None,
        *,
        tokenizer: str | None = None,
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
        self._find()
        self.tokenizer = Tokenizer(tokenizer) if tokenizer is not None else None
        self.vocab_size = self.tokenizer.vocab_size if self.tokenizer is not None else 256
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self.bytes_per_token = 1.0
        self._count(_cache_folder(cache_dir))
        self.check(world_size=1)

    # -- where the text comes from ------------------------------------------------------------------------------------

    def _find(self) -> None:
        self.sources = find_sources(self.path)
        self.where = f"{len(self.sources)} files"

    def _corpus_key(self) -> str:
        return _key(self.sources or [])

    def _documents(self) -> Iterator[bytes]:
        for source in self.sources or []:
            with open_source(source.path) as file:
                yield file.read()

    # -- as tokens ----------------------------------------------------------------------------------------------------

    def _count(self, cache: Path) -> None:
        """Find how many tokens there are. Bytes of files are counted by their sizes, and joined later; all else is
        written to the cache now, before any process starts."""
        key, tokenizer = self._corpus_key(), self.tokenizer
        if tokenizer is None and self.sources is not None:
            self.cache_file = cache / f"text-{key}.bin"
            self.n_tokens = sum(s.nbytes + 1 for s in self.sources)
            return
        if tokenizer is not None:
            self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
            key += f"-{tokenizer.key}"
        self.cache_file = cache / f"text-{key}.bin"
        sizes = cache / f"text-{key}.nbytes"  # of the text; there before the tokens

        def write(out: BinaryIO) -> None:
            nbytes = _Counted(self._documents())
            if tokenizer is None:
                for document in nbytes:
                    out.write(document + b"\0")
            else:
                for tokens in tokenizer.chunks(d.decode("utf-8", "replace") for d in nbytes):
                    out.write(tokens.tobytes())

            def note(file: BinaryIO) -> None:
                file.write(str(nbytes.total).encode())

            write_aside(sizes, note)

        if not self.cache_file.is_file():
            print(f"reading {self.where} into {self.cache_file}", flush=True)
        write_once(self.cache_file, write)
        self.n_tokens = self.cache_file.stat().st_size // self.dtype.itemsize
        if tokenizer is not None and self.n_tokens:
            self.bytes_per_token = int(sizes.read_text()) / self.n_tokens

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text) if self.tokenizer is not None else list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens) if self.tokenizer is not None else bytes(tokens).decode("utf-8", "replace")

    def check(self, world_size: int) -> None:
        """Refuse a text that has no full batch for every process.

        Raises:
            ConfigError: names what is needed and what there is.
        """
        n_chunks = (self.n_tokens - 1) // self.block_size
        needed = self.batch_size * world_size
        found = len(self.split().train) if n_chunks >= 2 else 0
        if found < needed:
            raise ConfigError(
                f"data.path: expected text for at least one batch of training on each of {world_size} processes "
                f"({needed} pieces of {self.block_size} tokens), got {found} pieces from {self.n_tokens} tokens in "
                f"{self.where}. Give more text by data.path, or lower data.batch_size or data.block_size."
            )

    @property
    def batch(self) -> str:
        """What a batch is, in words."""
        shape = [self.batch_size, self.block_size + 1]
        kind = "a byte" if self.tokenizer is None else "a token"
        return (
            f"one tensor of tokens {shape}, int64 from 0 to {self.vocab_size - 1}: each {kind}, and the target of the "
            "one before it"
        )

    def split(self) -> Split:
        return split_chunks((self.n_tokens - 1) // self.block_size, self.val_fraction, self.split_seed)

    def prepare_data(self) -> None:
        if self.cache_file.is_file() and self.cache_file.stat().st_size == self.n_tokens * self.dtype.itemsize:
            return
        _join(self.sources or [], self.cache_file, self.n_tokens)

    def setup(self, stage: str) -> None:
        if self.trainer is not None:
            self.check((self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
        split = self.split()
        self.train_data = Chunks(self.cache_file, split.train, self.block_size, self.dtype)
        self.val_data = Chunks(self.cache_file, split.val, self.block_size, self.dtype)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.train_data, train=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.val_data, train=False)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    def _loader(self, data: Chunks, train: bool) -> DataLoader[Tensor]:
        options: dict[str, Any] = {
            "drop_last": train,
            "num_workers": self.num_workers,
            "pin_memory": gpu_count() > 0,
            "persistent_workers": self.num_workers > 0,
        }
        if train:
            return ResumableLoader(data, self.batch_size, trainer=self.trainer, **options)
        return DataLoader(data, batch_size=self.batch_size, **options)  # Lightning gives it a distributed sampler


def check_whole_number(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"data.{key}: expected a whole number >= {least}, got {value!r}. Change data.{key}.")


def _cache_folder(cache_dir: str | None) -> Path:
    """The folder of the cache, made here so that one which cannot be written is refused before any process starts.

    Where none is asked for and the user's cannot be written (a read-only image, a user without a home folder), it is
    one among the temporary files.
    """
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
            raise  # anyone can put something there
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


class _Counted:
    """Documents, and how many bytes of them have passed."""

    def __init__(self, documents: Iterator[bytes]) -> None:
        self._documents, self.total = documents, 0

    def __iter__(self) -> Iterator[bytes]:
        for document in self._documents:
            self.total += len(document)
            yield document


def _join(sources: list[Source], target: Path, expected_nbytes: int) -> None:
    def write(out: BinaryIO) -> None:
        for source in sources:
            with open_source(source.path) as file:
                shutil.copyfileobj(file, out)
            out.write(b"\0")
        if (written := out.tell()) != expected_nbytes:
            raise ConfigError(
                f"data.path: the files changed while they were read (expected {expected_nbytes} bytes, got {written}). "
                "Start again once they are at rest."
            )

    write_aside(target, write)
