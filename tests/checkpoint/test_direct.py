"""Writes past the page cache."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint import direct
from lightning_zero.checkpoint.direct import DirectFile, DirectStream

NBYTES = 5 * direct.PAGE + 1234


def test_any_range_is_written_and_nothing_else(tmp_path: Path) -> None:
    chance = random.Random(0)
    path = tmp_path / "a"
    expected = bytearray(NBYTES)
    path.write_bytes(expected)
    for _ in range(100):
        with DirectFile(path) as file:
            low, high = sorted((chance.randrange(NBYTES), chance.randrange(NBYTES)))
            expected[low:high] = chance.randbytes(high - low)
            file.write_at(memoryview(bytes(expected[low:high])), low)
        assert path.read_bytes() == expected, (low, high)


def test_several_write_parts_of_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BUFFER_NBYTES", 2 * direct.PAGE)
    path = tmp_path / "a"
    expected = random.Random(1).randbytes(NBYTES)
    path.write_bytes(bytes(NBYTES))
    cuts = [0, 100, direct.PAGE - 1, direct.PAGE + 1, 2 * direct.PAGE + 7, NBYTES]
    files = [DirectFile(path) for _ in cuts[1:]]
    for n in (3, 0, 4, 1, 2):
        files[n].write_at(memoryview(expected)[cuts[n] : cuts[n + 1]], cuts[n])
    for file in files:
        file.sync()
        file.close()
    assert path.read_bytes() == expected


@pytest.mark.parametrize("at", ["open", "write"])
def test_a_file_system_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    path, refused = tmp_path / "a", list[str]()
    path.write_bytes(bytes(NBYTES))
    plain_open, plain_write = os.open, os.pwrite
    direct_fds = set[int]()

    def refuse() -> None:
        refused.append(at)
        raise OSError(errno.EINVAL, "no O_DIRECT")

    def opened(name: Any, flags: int, *rest: Any) -> int:
        wanted = flags & os.O_DIRECT
        if wanted and at == "open":
            refuse()
        fd = plain_open(name, flags, *rest)
        if wanted:
            direct_fds.add(fd)
        return fd

    def written(fd: int, *rest: Any) -> int:
        if fd in direct_fds:
            refuse()
        return plain_write(fd, *rest)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", written)
    expected = random.Random(2).randbytes(NBYTES)
    with DirectFile(path) as file:
        file.write_at(memoryview(expected), 0)
        file.write_at(memoryview(expected), 0)
    monkeypatch.undo()
    assert refused == [at]
    assert path.read_bytes() == expected


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(NBYTES))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with DirectFile(path) as file:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            file.write_at(memoryview(bytes(NBYTES)), 0)


def test_what_torch_saves_to_a_stream_it_loads(tmp_path: Path) -> None:
    values = {"a": torch.randn(100_000), "b": torch.arange(7)}
    with DirectStream(tmp_path / "a") as stream:
        torch.save(values, stream)
        assert stream.tell() == (tmp_path / "a").stat().st_size
    loaded = torch.load(tmp_path / "a")
    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    with pytest.raises(FileExistsError):
        DirectStream(tmp_path / "a")
