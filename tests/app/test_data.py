"""Text as tokens: which files, which split, one cache file made once, and what a model is handed."""

from __future__ import annotations

import os
import shutil
import stat
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_zero.config import ConfigError
from lightning_zero.data import text as module
from lightning_zero.data.sources import find_sources
from lightning_zero.data.text import TextData, split_chunks


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


def make(path: Path | str, cache: Path, **settings: object) -> TextData:
    data = TextData(str(path), cache_dir=str(cache), **{"block_size": 32, "batch_size": 2, **settings})  # type: ignore
    data.prepare_data()
    data.setup("fit")
    return data


def names(path: object) -> list[str]:
    return [s.path.name for s in find_sources(str(path))]


def test_a_file_a_folder_and_a_glob(texts: Path) -> None:
    assert names(texts / "a.txt") == ["a.txt"]
    assert names(texts) == ["a.txt", "b.txt", "c.md"]  # sorted, without hidden and binary files
    assert names(texts / "*.txt") == ["a.txt", "b.txt"]
    assert names(texts / "**" / "*.md") == ["c.md"]


def test_by_default_the_sources_of_the_standard_library() -> None:
    sources = find_sources(None)
    root = Path(sysconfig.get_path("stdlib"))
    paths = [s.path for s in sources]
    assert root / "dataclasses.py" in paths
    assert paths == sorted(paths)
    assert all(p.suffix == ".py" and p.is_relative_to(root) and "site-packages" not in p.parts for p in paths)
    assert sum(s.nbytes for s in sources) > 4_000_000


@pytest.mark.parametrize("path", ["nowhere.txt", "nowhere/", "nowhere/*.txt", "*.nothing"])
def test_a_path_with_nothing_there(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.path: .*nowhere|data\.path: .*nothing"):
        TextData(str(tmp_path / path))


def test_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0\1")
    with pytest.raises(ConfigError, match="data.path: expected files of text in the folder"):
        TextData(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 0),
        ("block_size", "abc"),
        ("batch_size", -1),
        ("batch_size", True),
        ("val_fraction", 0.0),
        ("val_fraction", 1.0),
        ("num_workers", -1),
        ("split_seed", -1),
        ("path", 5),
    ],
)
def test_a_bad_value_names_its_key(texts: Path, tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"data.{key}: expected .*{value!r}"):
        TextData(**{"path": str(texts), "cache_dir": str(tmp_path / "c"), key: value})  # type: ignore[arg-type]


def test_too_little_text_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(ConfigError, match=r"data\.path: .*batch.*data\.batch_size or data\.block_size"):
        TextData(str(tmp_path / "short.txt"), cache_dir=str(tmp_path / "c"))


def test_more_processes_need_more_text(texts: Path, tmp_path: Path) -> None:
    data = TextData(str(texts / "a.txt"), block_size=1000, batch_size=8, cache_dir=str(tmp_path / "c"))
    data.check(world_size=2)
    with pytest.raises(ConfigError, match="24 pieces of 1000 tokens"):
        data.check(world_size=3)


def test_a_cache_folder_that_cannot_be_made(texts: Path) -> None:
    with pytest.raises(ConfigError, match="data.cache_dir: cannot make the folder"):
        TextData(str(texts), cache_dir=str(texts / "a.txt" / "inside"))


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_a_user_whose_folder_cannot_be_written(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """As in a read-only image."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, "/proc/self")  # where root cannot write either
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"lightning_zero-{os.getuid()}"
    assert TextData(str(texts), block_size=32).cache_file.parent == own / "cache"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    shutil.rmtree(own)
    own.symlink_to(texts)  # somebody else's doing
    with pytest.raises(ConfigError, match="data.cache_dir: cannot make the folder /proc/self"):
        TextData(str(texts), block_size=32)


def test_default_cache_folder_is_the_users(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TextData(str(texts), block_size=32).cache_file.parent == tmp_path / "xdg" / "lightning_zero"


def test_items_are_the_bytes_of_the_files(texts: Path, tmp_path: Path) -> None:
    data = make(texts, tmp_path / "c")
    joined = b"".join((texts / n).read_bytes() + b"\0" for n in ("a.txt", "b.txt", "deep/c.md"))
    assert data.cache_file.read_bytes() == joined
    for part in (data.train_data, data.val_data):
        for index in (0, len(part) - 1):
            start = int(part.chunks[index]) * 32
            item = part[index]
            assert item.dtype == torch.int64
            assert bytes(item.tolist()) == joined[start : start + 33]
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (2, 33)


def test_tokens_are_made_once_and_again_when_a_file_changes(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c"
    first = make(texts, cache)
    made = first.cache_file.stat().st_mtime_ns
    assert make(texts, cache).cache_file.stat().st_mtime_ns == made
    same_size = (texts / "a.txt").read_bytes()[::-1]
    (texts / "a.txt").write_bytes(same_size)
    os.utime(texts / "a.txt", ns=(1, 1))  # whatever the resolution of the clock
    second = make(texts, cache)
    assert second.cache_file != first.cache_file
    assert second.cache_file.read_bytes().startswith(same_size)


def test_half_a_cache_file_is_made_again(texts: Path, tmp_path: Path) -> None:
    first = make(texts, tmp_path / "c")
    whole = first.cache_file.read_bytes()
    first.cache_file.write_bytes(whole[:100])
    assert make(texts, tmp_path / "c").cache_file.read_bytes() == whole


def test_a_failure_leaves_no_file_behind(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TextData(str(texts), block_size=32, cache_dir=str(tmp_path / "c"))

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfileobj", full_disk)
    with pytest.raises(OSError, match="No space left"):
        data.prepare_data()
    assert list((tmp_path / "c").iterdir()) == []


def test_files_that_change_while_they_are_read(texts: Path, tmp_path: Path) -> None:
    data = TextData(str(texts), block_size=32, cache_dir=str(tmp_path / "c"))
    with (texts / "a.txt").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ConfigError, match="changed while they were read"):
        data.prepare_data()
    assert list((tmp_path / "c").iterdir()) == []


def test_several_at_once_make_one_whole_file(texts: Path, tmp_path: Path) -> None:
    several = [TextData(str(texts), block_size=32, cache_dir=str(tmp_path / "c")) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: data.prepare_data(), several))
    assert [f.name for f in (tmp_path / "c").iterdir()] == [several[0].cache_file.name]
    assert several[0].cache_file.stat().st_size == several[0].n_tokens


@given(st.integers(2, 5000), st.floats(0.001, 0.5), st.integers(0, 99))
def test_a_split_is_a_partition_and_reproducible(n_chunks: int, fraction: float, seed: int) -> None:
    split = split_chunks(n_chunks, fraction, seed)
    both = np.concatenate([split.train, split.val])
    assert sorted(both.tolist()) == list(range(n_chunks))
    assert len(split.val) >= 1
    again = split_chunks(n_chunks, fraction, seed)
    assert np.array_equal(split.val, again.val)
    if n_chunks >= 1000:
        assert abs(len(split.val) / n_chunks - fraction) < 0.02


def test_another_seed_holds_out_other_text() -> None:
    assert not np.array_equal(split_chunks(5000, 0.1, 0).val, split_chunks(5000, 0.1, 1).val)


def test_ranks_see_different_items_and_together_all(texts: Path, tmp_path: Path) -> None:
    data = make(texts, tmp_path / "c").train_data
    seen = [set(DistributedSampler(data, num_replicas=2, rank=rank, drop_last=True)) for rank in (0, 1)]
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) >= len(data) - 1


def test_items_can_be_loaded_by_worker_processes(texts: Path, tmp_path: Path) -> None:
    data = make(texts, tmp_path / "c", num_workers=1)
    assert sum(batch.shape[0] for batch in data.val_dataloader()) == len(data.val_data)
