"""Files that several processes write, and their checksums."""

from __future__ import annotations

import itertools
import os
import random
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_zero.checkpoint import archive, durable, verify
from lightning_zero.checkpoint.__main__ import main
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO, load

CHUNK = archive.CHUNK_NBYTES


@pytest.mark.parametrize("nbytes", [0, 1, 40, 100, 101])
def test_pieces_in_any_order_and_gaps(nbytes: int) -> None:
    generator = random.Random(nbytes)
    data = bytearray(generator.randbytes(nbytes))
    cuts = sorted({0, nbytes, *(generator.randrange(nbytes + 1) for _ in range(7))})
    found = [archive.Piece("r", a, b - a, zlib.crc32(data[a:b])) for a, b in itertools.pairwise(cuts)]
    generator.shuffle(found)
    assert archive.add_up("r", nbytes, found) == zlib.crc32(data)
    if not found:
        return
    with pytest.raises(RuntimeError, match="written twice"):
        archive.add_up("r", nbytes, [*found, found[0]])
    lost = found.pop()
    with pytest.raises(RuntimeError, match="not at all"):
        archive.add_up("r", nbytes, found)
    data[lost.start : lost.start + lost.nbytes] = bytes(lost.nbytes)
    assert archive.add_up("r", nbytes, found, gaps_are_zeros=True) == zlib.crc32(data)


def contents() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(CHUNK // 4 + 1001, generator=generator)
    return {
        "big": big,
        "view": big[7:9],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "strided": torch.randn(7, 8, generator=generator).t(),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False]),
        "nested": [1, "two", {"x": torch.arange(10)[2:5], 3: None}],
        "param": torch.nn.Parameter(torch.ones(2)),
    }


def write(path: Path, value: Any) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    archive.write_archive(value, fd)
    os.close(fd)


WRITERS = {"ours": write, "torch": lambda path, value: torch.save(value, path)}


def test_torch_load_reads_a_file_written_by_pieces(tmp_path: Path) -> None:
    path, plain, value = tmp_path / "a.ckpt", tmp_path / "plain.ckpt", contents()
    write(path, contents())
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert list(found) == list(value)
        for name in ("big", "view", "half", "strided", "empty", "bool", "param"):
            assert torch.equal(found[name], value[name]) and found[name].stride() == value[name].stride()
            assert found[name].dtype == value[name].dtype and type(found[name]) is type(value[name])
        assert found["view"].data_ptr() == found["big"].data_ptr() + 28
        assert torch.equal(found["nested"][2]["x"], value["nested"][2]["x"])
    assert zipfile.ZipFile(path).testzip() is None
    torch.save(value, plain)
    readers = [torch._C.PyTorchFileReader(str(file)) for file in (path, plain)]
    assert sorted(readers[0].get_all_records()) == sorted(readers[1].get_all_records())


def test_more_than_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With holes, so that it takes no such disk; and where the system writes less than it is asked to."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, place: pwrite(fd, data[:3000], place))
    monkeypatch.setattr(archive, "CHUNK_NBYTES", 4096)
    with FakeTensorMode():
        big = torch.empty(2**30 + 5000)
    fd = os.open(tmp_path / "a.ckpt", os.O_RDWR | os.O_CREAT)
    skeleton = archive.Skeleton({"big": big, "last": torch.ones(3)}, fd)
    done = skeleton.fill()
    hole = skeleton.holes[big.untyped_storage()._cdata]
    done += archive.write_values(partial(durable.write_at, fd), hole, 4 * 2**30, torch.full((5000,), 2.0))
    skeleton.finish(done, may_have_gaps=lambda name: name == hole.name)
    os.close(fd)
    found = torch.load(tmp_path / "a.ckpt", mmap=True)
    assert found["big"][2**30 :].eq(2).all() and found["last"].eq(1).all() and not found["big"][:1000].any()
    assert os.stat(tmp_path / "a.ckpt").st_blocks * 512 < 2**20
    [record] = [r for r in archive.records_of(open(tmp_path / "a.ckpt", "rb")) if r.name == hole.name]  # noqa: SIM115
    assert record.nbytes == 4 * (2**30 + 5000)


@pytest.mark.parametrize("by", WRITERS)
def test_a_flipped_byte_is_found(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ckpt"
    WRITERS[by](path, contents())
    assert main(["verify", str(path)]) == 0
    assert "agree with their checksums" in capsys.readouterr().out
    data = bytearray(path.read_bytes())
    with path.open("rb") as file:
        records = {r.name: r for r in archive.records_of(file)}
    big = max(records.values(), key=lambda r: r.nbytes)
    for place, name in (
        (big.start, big.name),
        (big.start + CHUNK + 7, big.name),
        (records["data.pkl"].start + 3, "data.pkl"),
        (records["data/2"].start, "data/2"),
    ):
        data[place] ^= 4
        path.write_bytes(data)
        [damage] = verify.check(path).damage
        low, high = (int(word) for word in damage.split() if word.isdigit())
        assert name in damage and low <= place < high <= low + big.nbytes
        parts = [verify.check(path, part, 3) for part in range(3)]
        assert [d for part in parts for d in part.damage] == [damage]
        assert sum(part.checked for part in parts) == verify.check(path).checked
        assert main(["verify", str(path)]) == 1
        assert "damaged: bytes" in capsys.readouterr().out
        data[place] ^= 4


@pytest.mark.sample
@pytest.mark.parametrize("by", WRITERS)
def test_what_is_called_whole_loads_alike(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each flipped bit is reported, in words, or changes nothing: mapped or read, by torch alone or by us."""
    path, generator = tmp_path / "a.ckpt", random.Random(5)
    content = {"state_dict": {"a": torch.arange(20.0), "b": torch.ones(3, dtype=torch.int64)}, "hp": {"lr": 0.1}}
    WRITERS[by](path, content)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        table = file.start_dir  # what torch.save gives no checksum
    places = [generator.randrange(table, len(data)) for _ in range(400)]
    places += [generator.randrange(len(data)) for _ in range(200)]
    whole = 0
    for place in places:
        bit = 1 << generator.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        found = main(["verify", str(path)])
        assert str(path) in capsys.readouterr().out
        if not found:
            whole += 1
            for loaded in (torch.load(path), torch.load(path, mmap=True), load(ZeroCheckpointIO(), path, None)):
                assert repr(loaded) == repr(content), (place, bit)
    assert 50 < whole < 400


def test_a_file_without_checksums_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(5)}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert verify.check(tmp_path / "a.ckpt").damage == []
    (tmp_path / "text.ckpt").write_text("hello")
    assert main(["verify", str(tmp_path / "text.ckpt"), str(tmp_path / "missing.ckpt")]) == 1
    said = capsys.readouterr().out
    assert main([]) == 2 and main(["--help"]) == 0 and main(["verify"]) == 2 and main(["what"]) == 2
    assert "text.ckpt: not a whole checkpoint" in said and "missing.ckpt: not a whole checkpoint" in said
