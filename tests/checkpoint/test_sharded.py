"""What one rank writes and reads, without other ranks."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zero.checkpoint import durable, verify
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.checkpoint.sharded.save import alone, save_folder
from lightning_zero.engine.units.master_storage import FlatSlice
from lightning_zero.engine.whole.values import Part, TensorParts, Unsharded, Value
from lightning_zero.planning.boxes import memory_order
from lightning_zero.pretrained.stored import KeptTensor, StoredTensor
from lightning_zero.settings import ConfigError
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_view_is_written_alone_and_not_copied(dtype: torch.dtype) -> None:
    memory = torch.arange(10_000).to(dtype)
    for view in (memory[300:400], memory[400:640].view(12, 20), memory[400:640].view(12, 20).t()):
        found = alone(view)
        assert found.data_ptr() == view.data_ptr() and found.untyped_storage().nbytes() == view.nbytes
        file = io.BytesIO()
        torch.save(found, file)
        assert file.tell() < view.nbytes + 3000
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), view)
    memory.untyped_storage().resize_(0)  # as storages in files do
    memory = torch.arange(100)
    gaps = memory.view(10, 10)[:, :3]
    assert torch.equal(alone(gaps), gaps)


def parts_of(value: Tensor, cuts: list[int], rank: int, ranks: int) -> TensorParts:
    """``value``, flattened and cut; rank ``r`` of ``ranks`` has every ``ranks``-th part from the ``r``-th on."""
    order = memory_order(value.stride())
    flat = value.permute(order).reshape(-1)
    ends = [0, *sorted(cuts), len(flat)]
    own = [(a, b) for a, b in itertools.pairwise(ends) if a < b][rank::ranks]
    parts = [Part(Value(0, 0), a, FlatSlice(flat, a, b - a), None) for a, b in own]
    return TensorParts(value.shape, value.dtype, parts, value.stride())


@st.composite
def tensors(draw: Any) -> tuple[Tensor, list[int], int, int]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    value = torch.arange(torch.Size(shape).numel(), dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])))
    value = value.view(shape).permute(draw(st.permutations(range(len(shape)))))
    cuts = draw(st.lists(st.integers(0, value.numel()), max_size=4))
    stop = draw(st.integers(0, value.numel()))
    return value, cuts, draw(st.integers(0, stop)), stop


@settings(max_examples=60, deadline=None)
@given(case=tensors())
def test_what_is_cut_is_read_in_any_range(case: tuple[Tensor, list[int], int, int], tmp_path_factory: Any) -> None:
    value, cuts, start, stop = case
    path = tmp_path_factory.mktemp("folder") / "a.ckpt"
    save_folder({"top": {"value": parts_of(value, cuts, 0, 1)}}, {}, path)
    found = ShardedFolder(path).tensor("top.value")
    assert found.shape == value.shape and found.dtype == value.dtype
    assert torch.equal(found.whole(), value)
    order = memory_order(value.stride())
    assert torch.equal(found.read(start, stop, order), value.permute(order).reshape(-1)[start:stop])
    assert torch.equal(found.read(start, stop), value.reshape(-1)[start:stop])


def test_values_that_are_not_sharded_are_read_back(tmp_path: Path) -> None:
    state = {
        "a": {"plain": torch.arange(3), "turned": torch.arange(6).view(2, 3).t(), "lone": Unsharded(torch.tensor(2.0))},
        "b": {"groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["x", "y"]}], "none": None},
    }
    save_folder(state, {"epoch": 3}, tmp_path / "a.ckpt")
    folder = ShardedFolder(tmp_path / "a.ckpt")
    assert torch.equal(folder.tensor("a.turned").whole(), state["a"]["turned"])  # type: ignore[index]
    assert folder.tensor("a.lone").whole() == 2
    assert folder.value("b.groups.0.betas") == (0.9, 0.99)
    assert folder.path_of("b.groups.0.params") == ("b", "groups", 0, "params")
    assert torch.load(tmp_path / "a.ckpt" / "meta.pt") == {"epoch": 3}


def test_a_file_is_whole_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another node's file rank 0 may sync what it sees, later; what that node holds back is not on the disk then."""
    synced: dict[str, int] = {}

    def sync(fd: int) -> None:
        synced.setdefault(Path(os.readlink(f"/proc/self/fd/{fd}")).name, os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", sync)
    save_folder({"a": {"plain": torch.arange(3)}}, {}, tmp_path / "a.ckpt")
    (file,) = (tmp_path / "a.ckpt").glob("*.distcp")
    assert synced[file.name] == file.stat().st_size


def test_a_stored_tensor_reads_what_is_used() -> None:
    read: list[tuple[int, int]] = []
    values = torch.arange(12.0)

    def reads(start: int, stop: int, order: Any) -> Tensor:
        read.append((start, stop))
        return values[start:stop]

    stored = StoredTensor((3, 4), torch.float32, reads)
    assert stored.shape == (3, 4) and stored.detach() is stored and not read
    assert stored.read(2, 5).tolist() == [2, 3, 4] and read == [(2, 5)]
    target = torch.zeros(3, 4)
    target.copy_(stored)
    assert torch.equal(target, values.view(3, 4)) and torch.equal(stored * 2, target * 2)
    assert torch.equal(pickle.loads(pickle.dumps(stored)), target)
    with pytest.raises(RuntimeError, match="exclude_frozen"):
        KeptTensor((2,), torch.float32) + 1


@pytest.mark.full
def test_no_flipped_bit_loads_other_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not in the index either, which says what lies where; and each damage is said in words."""
    path, generator = tmp_path / "a.ckpt", random.Random(4)
    state = {"state_dict": {str(n): torch.arange(float(n * 9)).view(3, -1) for n in range(1, 5)}, "rate": 0.5}
    parts = {k: parts_of(v, [4, 9], 0, 1) for k, v in state["state_dict"].items()}  # type: ignore[attr-defined]
    save_folder({**state, "state_dict": parts}, {"epoch": 3}, path)

    def loaded() -> Any:
        folder = ShardedFolder(path)
        found = [folder.tensor(k).whole().tolist() if folder.is_tensor(k) else folder.value(k) for k in folder.keys]
        return [*found, torch.load(path / "meta.pt")]

    whole, found = loaded(), 0
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for _ in range(150):
            at, bit = generator.randrange(len(data)), 1 << generator.randrange(8)
            file.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            damaged = verify.main([str(path)])
            assert str(path) in capsys.readouterr().out
            assert damaged or loaded() == whole, (file, at, bit)
            found += damaged
        file.unlink()
        assert verify.main([str(path)]) == 1
        file.write_bytes(data)
    assert found > 150 and loaded() == whole and verify.main([str(path)]) == 0


def test_an_index_is_no_way_out_of_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_folder({"a": {"b": torch.ones(3)}}, {}, path)
    index = ShardedFolder(path).index
    for info in index.storage_data.values():
        info.relative_path = "../other"
    (tmp_path / "other").write_bytes(bytes(5000))
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ConfigError, match=r"\.metadata: it names \.\./other, which is not in the folder"):
        ShardedFolder(path)


def test_a_checkpoint_that_is_half_removed_has_not_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder({"a": {"b": torch.ones(3)}}, {}, tmp_path / "a.ckpt")
    names: list[str] = []

    def killed(path: Path) -> None:
        names.extend(os.listdir(tmp_path))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(durable, "_remove", killed)
        patched.setattr(durable, "sync_folder", lambda folder: names.extend(os.listdir(folder)))
        with pytest.raises(KeyboardInterrupt):
            ZeroCheckpointIO().remove_checkpoint(tmp_path / "a.ckpt")
    assert len(names) == 2 and all(name.endswith(".part") for name in names)
    with durable.written_aside(tmp_path / "b.ckpt"):
        pass
    assert os.listdir(tmp_path) == ["b.ckpt"]
    ZeroCheckpointIO().remove_checkpoint(tmp_path / "a.ckpt")  # as Lightning's: nothing is there
