"""Text as tokens: which files, which split, and what a model is handed."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.data.sources import find_sources
from lightning_zero.data.text import MOST_NBYTES, TextData, split_chunks
from lightning_zero.settings import ConfigError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("b.txt", "a.txt", "deep/c.md"):
        (folder / name).write_bytes(rng.integers(32, 127, 20_000, dtype=np.uint8).tobytes())
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (folder / ".hidden").write_text("no")
    return folder


def make(path: Path | str, **settings: object) -> TextData:
    data = TextData(str(path), **{"block_size": 32, "batch_size": 2, **settings})  # type: ignore
    data.setup("fit")
    return data


def test_a_file_a_folder_and_a_glob(texts: Path) -> None:
    expected = {
        "a.txt": ["a.txt"],
        "": ["a.txt", "b.txt", "c.md"],  # sorted, without hidden and binary files
        "*.txt": ["a.txt", "b.txt"],
        "**/*.md": ["c.md"],
    }
    assert {path: [source.path.name for source in find_sources(str(texts / path))] for path in expected} == expected


def test_by_default_the_sources_of_the_standard_library() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [source.path for source in find_sources(None)]
    assert root / "dataclasses.py" in paths and paths == sorted(paths)
    assert all(p.suffix == ".py" and p.is_relative_to(root) and "site-packages" not in p.parts for p in paths)


@pytest.mark.parametrize(("path", "message"), [
    *((path, r"data\.path: .*nowhere") for path in ("nowhere.txt", "nowhere/", "nowhere/*.txt")),
    ("*.nothing", r"data\.path: .*nothing"),
    ("binary", r"data\.path: expected files of text in the folder"),
    ("short.txt", r"data\.path: .*batch.*data\.batch_size or data\.block_size"),
    ("large.txt", r"expected at most 1,073,741,824 bytes .* Choose data=dataset"),
])  # fmt: skip
def test_a_path_that_gives_no_batches_is_refused(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x.bin").write_bytes(b"\0\1")
    (tmp_path / "short.txt").write_text("a few words")
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(MOST_NBYTES)
    with pytest.raises(ConfigError, match=message):
        TextData(str(tmp_path / path))


BAD = {
    "block_size": [0, "abc"],
    "batch_size": [-1, True],
    "val_fraction": [0.0, 1.0],
    "num_workers": [-1],
    "split_seed": [-1],
    "path": [5],
}


def test_a_bad_value_names_its_key(texts: Path) -> None:
    for key, values in BAD.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"data.{key}: expected .*{value!r}"):
                TextData(**{"path": str(texts), key: value})  # type: ignore[arg-type]


def test_more_processes_need_more_text(texts: Path) -> None:
    data = TextData(str(texts / "a.txt"), block_size=1000, batch_size=8)
    data.check(world_size=2)
    with pytest.raises(ConfigError, match="24 pieces of 1000 tokens"):
        data.check(world_size=3)


@pytest.mark.parametrize("block_size", [1, 7, 32, 5000])
def test_items_are_the_bytes_of_the_files(texts: Path, block_size: int) -> None:
    (texts / "aa.txt").write_bytes(b"")
    for n in range(9):
        (texts / f"ab{n}.txt").write_bytes(bytes([65 + n]) * n)
    data = make(texts, block_size=block_size)
    joined = b"".join(path.read_bytes() + b"\0" for path, _ in data.sources)
    assert len(joined) == data.n_tokens
    for part in (data.train_data, data.val_data):
        for index in range(0, len(part), 1 + len(part) // 1000):
            start = int(part.chunks[index]) * block_size
            item = part[index]
            assert item.dtype == torch.int64
            assert bytes(item.tolist()) == joined[start : start + block_size + 1]
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (2, block_size + 1)


def test_files_that_change_while_they_are_read(texts: Path) -> None:
    data = TextData(str(texts), block_size=32)
    with (texts / "a.txt").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ConfigError, match="do not change while they are read"):
        data.setup("fit")


@given(st.integers(2, 5000), st.floats(0.001, 0.5), st.integers(0, 99))
def test_a_split_is_a_partition_and_reproducible(n_chunks: int, fraction: float, seed: int) -> None:
    split = split_chunks(n_chunks, fraction, seed)
    both = np.concatenate([split.train, split.val])
    assert sorted(both.tolist()) == list(range(n_chunks))
    assert len(split.val) >= 1
    again = split_chunks(n_chunks, fraction, seed)
    assert np.array_equal(split.val, again.val)
    other = split_chunks(n_chunks, fraction, seed + 1)
    assert n_chunks < 500 or fraction < 0.1 or not np.array_equal(split.val, other.val)
    if n_chunks >= 1000:
        assert abs(len(split.val) / n_chunks - fraction) < 0.02
