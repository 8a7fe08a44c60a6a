"""A dataset of Hugging Face on disk, as text for a language model: ``data=dataset``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_zero.config import ConfigError
from lightning_zero.data.text import TextData


class DatasetText(TextData):
    """The texts of one column of a dataset that ``datasets`` has saved (``save_to_disk``).

    Args:
        path: the folder. Of several splits ``split`` is taken.
        split: ``null``: the only one, or ``train``.
        column: that holds the text.
        settings: as of :class:`TextData`.

    Raises:
        ConfigError: no such dataset, split or column; ``datasets`` is not installed.
    """

    def __init__(
        self, path: str | None = None, *, split: str | None = None, column: str = "text", **settings: Any
    ) -> None:
        if path is None:
            raise ConfigError(
                "data.path: expected the folder of a dataset that save_to_disk has written. Set data.path."
            )
        self.column, self.split_name = column, split
        super().__init__(path, **settings)

    def _find(self) -> None:
        self._dataset = self._load()
        self.where = f"{len(self._dataset)} rows of {self.path}"

    def _load(self) -> Any:
        assert self.path is not None
        folder = Path(self.path).expanduser()
        splits = None
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        elif not (folder / "state.json").is_file():
            raise ConfigError(
                f"data.path: expected the folder of a dataset that save_to_disk has written (with a state.json or a "
                f"dataset_dict.json), got {self.path!r}. Change data.path."
            )
        name = self.split_name or (None if splits is None else "train" if "train" in splits else splits[0])
        if name is not None and name not in (splits or []):
            raise ConfigError(
                f"data.split: expected {'one of ' + ', '.join(splits) if splits else 'null (there is one split)'}, got "
                f"{name!r}. Change data.split."
            )
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise ConfigError(
                "data: expected the package datasets, which is not installed. pip install 'lightning-zero[data]'."
            ) from error
        dataset = datasets.load_from_disk(str(folder / name if name is not None else folder))
        if self.column not in dataset.column_names:
            raise ConfigError(
                f"data.column: expected one of {', '.join(dataset.column_names)}, got {self.column!r}. Change "
                "data.column."
            )
        return dataset

    def _corpus_key(self) -> str:
        return hashlib.sha256(f"{self._dataset._fingerprint}\0{self.column}".encode()).hexdigest()[:16]

    def _documents(self) -> Iterator[bytes]:
        for row in self._dataset.select_columns([self.column]):
            text = row[self.column]
            if not isinstance(text, str):
                raise ConfigError(
                    f"data.column: expected a column of text, got {type(text).__name__} in {self.column!r}. Change "
                    "data.column."
                )
            yield text.encode("utf-8", "surrogatepass")
