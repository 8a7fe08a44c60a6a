"""Load text by the Hugging Face package ``datasets`` and cut it into pieces of tokens: ``data=dataset``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.data.resumable import LanguageData
from lightning_zero.data.sources import find_sources
from lightning_zero.data.text import check_enough
from lightning_zero.settings import ConfigError, check_installed

Encode = Callable[[list[str]], list[list[int]]]


class DatasetText(LanguageData):
    """Language modelling over a text column of a dataset, or over text files.

    Args:
        path: a folder written by ``save_to_disk``; else a text file, folder or glob.
        split: the split to use, if the folder has several; ``null``: ``train``, else the first one.
        column: the column that holds the text. Text files have a column ``text``, in which each file is a document.
        tokenizer: a folder with a Hugging Face tokenizer. ``null``: each byte is a token.
        block_size, batch_size, val_fraction, split_seed, num_workers: see :class:`~lightning_zero.data.text.TextData`.

    Raises ConfigError if dataset, split, column, tokenizer or a package is missing.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        split: str | None = None,
        column: str = "text",
        tokenizer: str | None = None,
        block_size: int = 256,
        batch_size: int = 4,
        val_fraction: float = 0.01,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(block_size, batch_size, num_workers)
        self.column, self.val_fraction, self.split_seed = column, val_fraction, split_seed
        found = (_bytes, 256, "bytes") if tokenizer is None else _tokenizer(tokenizer)
        self.encode, self.vocab_size, self._key = found
        self.dataset = _load(path, split)
        if column not in self.dataset.column_names:
            raise ConfigError(
                f"data.column: expected one of {', '.join(self.dataset.column_names)}, got {column!r}. Change "
                "data.column."
            )
        if (dtype := getattr(self.dataset.features[column], "dtype", "a list")) not in ("string", "large_string"):
            raise ConfigError(f"data.column: expected a column of text, got {dtype} in {column!r}. Change data.column.")

    def _pieces(self) -> Any:
        """Return the text as a dataset of pieces of ``block_size + 1`` tokens, which overlap by one token. The package
        ``datasets`` caches this dataset on disk."""
        from datasets.fingerprint import Hasher

        rows = self.dataset.select_columns([self.column])
        settings = {"column": self.column, "encode": self.encode, "block_size": self.block_size}
        return rows.map(
            _cut,
            batched=True,
            remove_columns=[self.column],
            fn_kwargs=settings,
            new_fingerprint=Hasher.hash([rows._fingerprint, self._key, self.block_size]),
        )

    @staticmethod
    def collate(items: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([item["tokens"] for item in items])

    def prepare_data(self) -> None:
        self._pieces()

    def setup(self, stage: str) -> None:
        pieces = self._pieces()
        count = len(pieces)
        n_val, needed = max(1, round(count * self.val_fraction)), self.batch_size * self.n_replicas
        check_enough(count - n_val, needed, self.block_size, f"{len(self.dataset)} documents")
        self.bytes_per_token = sum(pieces["bytes_per_token"]) / count
        parts = pieces.with_format("torch", columns=["tokens"]).train_test_split(n_val, seed=self.split_seed)
        self.train_data, self.val_data = parts["train"], parts["test"]


def _load(path: str | None, split: str | None) -> Any:
    if path is None:
        raise ConfigError("data.path: expected a folder of save_to_disk, or files of text, got none. Set data.path.")
    check_installed("data", ["datasets"])
    import datasets

    folder = Path(path).expanduser()
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        files = [str(source.path) for source in find_sources(path)]
        return datasets.load_dataset("text", data_files=files, sample_by="document", split="train")
    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.Dataset):
        if split is None:
            return found
        raise ConfigError(f"data.split: expected null (there is one split), got {split!r}. Change data.split.")
    name = split or ("train" if "train" in found else next(iter(found)))
    if name not in found:
        raise ConfigError(f"data.split: expected one of {', '.join(found)}, got {name!r}. Change data.split.")
    return found[name]


def _bytes(texts: list[str]) -> list[list[int]]:
    return [[*text.encode("utf-8", "surrogatepass"), 0] for text in texts]


def _tokenizer(folder: str) -> tuple[Encode, int, str]:
    """Return a function that encodes texts and adds an end-of-text token, the number of tokens, and a cache key."""
    files = [f for f in sorted(Path(folder).expanduser().glob("*")) if f.suffix in (".json", ".model", ".txt")]
    check_installed("data.tokenizer", ["datasets", "transformers"])
    from datasets.fingerprint import Hasher
    from transformers import AutoTokenizer

    try:
        inner: Any = AutoTokenizer.from_pretrained(Path(folder).expanduser(), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.tokenizer: expected a folder with the files of a tokenizer (tokenizer.json, ...), got {folder!r}: "
            f"{str(error).splitlines()[0]} Set data.tokenizer=FOLDER (model=hf takes model.path), or "
            "data.tokenizer=null for bytes."
        ) from error
    inner.model_max_length = 2**60  # avoid a warning: the text is cut later
    end = [] if inner.eos_token_id is None else [inner.eos_token_id]

    def encode(texts: list[str]) -> list[list[int]]:
        return [[*tokens, *end] for tokens in inner(texts, add_special_tokens=False)["input_ids"]]

    return encode, len(inner), Hasher.hash([f.read_bytes() for f in files])


def _cut(rows: Mapping[str, list[str]], column: str, encode: Encode, block_size: int) -> dict[str, list[Any]]:
    texts = rows[column]
    tokens = [token for found in encode(texts) for token in found]
    starts = range(0, len(tokens) - block_size, block_size)
    rate = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) / max(1, len(tokens))
    return {
        "tokens": [tokens[start : start + block_size + 1] for start in starts],
        "bytes_per_token": [rate] * len(starts),
    }
