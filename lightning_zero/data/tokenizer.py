"""Text as the tokens of a tokenizer of Hugging Face, written once into a flat file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lightning_zero.config import ConfigError

BATCH = 256  # documents that the tokenizer gets at once
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


class Tokenizer:
    """A tokenizer in a folder.

    Args:
        folder: as ``save_pretrained`` writes it. Nothing is downloaded.

    Raises:
        ConfigError: there is none, or the package transformers is missing.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser()
        self.files = [self.folder / name for name in FILES if (self.folder / name).is_file()]
        if not self.files:
            raise ConfigError(
                f"data.tokenizer: expected a folder with the files of a tokenizer (tokenizer.json, ...), got "
                f"{folder!r}. Set data.tokenizer=FOLDER (model=hf takes model.path), or data.tokenizer=null for bytes."
            )
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            raise ConfigError(
                "data.tokenizer: expected the package transformers, which is not installed. pip install it."
            ) from error
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.tokenizer: cannot be read from {folder!r}: {error}. Change data.tokenizer."
            ) from error
        self.inner.model_max_length = 2**60  # no warning: text is cut into pieces after this
        self.vocab_size = len(self.inner)

    @property
    def key(self) -> str:
        """Changes with the tokenizer."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        return str(self.inner.decode(tokens))

    def chunks(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """Tokens of some documents at a time, each with the end-of-text token behind it, if there is one."""
        dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        end = [] if self.inner.eos_token_id is None else [self.inner.eos_token_id]
        iterator = iter(documents)
        while batch := list(islice(iterator, BATCH)):
            found = self.inner(batch, add_special_tokens=False)["input_ids"]
            yield np.fromiter((token for tokens in found for token in [*tokens, *end]), dtype)


def write_once(target: Path, write: Callable[[BinaryIO], None]) -> None:
    """Have ``write`` fill ``target``, unless it is there. One process of a host writes, the others wait for it."""
    if target.is_file():
        return
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            write_aside(target, write)


def write_aside(target: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write aside and rename: no process ever maps half a file, and two jobs may do this at once."""
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
