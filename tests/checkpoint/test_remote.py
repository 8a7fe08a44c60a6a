"""Checkpoint folders in an object store: what is there at each moment of a save, and what is read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote

import pytest
import torch
from torch import Tensor

from lightning_zero.app.convert import convert
from lightning_zero.checkpoint import verify
from lightning_zero.checkpoint.sharded.read import ShardedFolder
from lightning_zero.checkpoint.sharded.save import save_folder
from lightning_zero.pretrained import SafetensorsFolder
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.remote import is_folder
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO
from lightning_zero.trainer.saves.sharded_checkpoints import read
from tests.object_store import ObjectStore, bucket, keys


def save(address: str, value: float) -> None:
    save_folder({"state_dict": {"w": torch.full((3000,), value), "n": int(value)}}, {"step": value}, address)


def loaded(address: str) -> tuple[float, float, float, float]:
    """Return the values of all parts of the checkpoint."""
    found: Any = read(address, None)
    w: Tensor = found["state_dict"]["w"].whole()
    return w.min().item(), w.max().item(), found["state_dict"]["n"], found["step"]


class Killed(BaseException):
    pass


def test_a_kill_at_any_moment_leaves_the_older_checkpoint_or_the_newer(tmp_path: Path) -> None:
    path, found = f"{bucket(tmp_path / 'b')}/last.ckpt", set()
    for moment in range(100):
        save(path, 1.0)
        before, calls = keys(path), 0

        def act(kind: str, key: str, moment: int = moment) -> None:
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed

        with mock.patch.object(ObjectStore, "before", act), contextlib.suppress(Killed):
            save(path, 2.0)
        value = loaded(path)[0]
        assert loaded(path) == (value,) * 4 and value in (1.0, 2.0)
        assert verify.main([path]) == 0
        found.add(value)
        if calls <= moment:
            break
        if value == 1.0:
            assert set(before) <= set(keys(path))
    assert found == {1.0, 2.0} and moment > 8
    assert len(keys(path)) == 4  # nothing of the killed saves is left


def test_a_file_and_a_folder_of_one_name_replace_each_other(tmp_path: Path) -> None:
    path, io = f"{bucket(tmp_path / 'b')}/last.ckpt", ZeroCheckpointIO()
    io.save_checkpoint({"step": 1}, path)
    save(path, 2.0)
    assert is_folder(path) and len(keys(path)) == 4 and not Path(tmp_path, "b", "last.ckpt").exists()
    io.save_checkpoint({"step": 3}, path)
    assert not is_folder(path) and io.load_checkpoint(path) == {"step": 3}
    save(path, 4.0)
    assert loaded(path) == (4.0,) * 4
    with mock.patch.object(ObjectStore, "before", mock.Mock(side_effect=[None, Killed])), pytest.raises(Killed):
        io.remove_checkpoint(path)
    with pytest.raises(ConfigError, match="store://.*: it has no .metadata, which is written last"):
        convert(path, str(tmp_path / "out"), "full")
    io.remove_checkpoint(path)
    assert not keys(bucket(tmp_path / "b"))


def test_ranges_are_read_and_large_writes_are_cut(tmp_path: Path) -> None:
    path, value = f"{bucket(tmp_path / 'b')}/a.ckpt", torch.arange(12 * 2**20)
    writes, ranges = [], []
    from tests import object_store

    upload, fetch = object_store._Object._upload_chunk, ObjectStore.cat_file

    def noting_upload(self: Any, final: bool = False) -> bool:
        writes.append(self.buffer.getbuffer().nbytes)
        return upload(self, final)

    def noting_fetch(self: Any, *args: Any, **kwargs: Any) -> bytes:
        data = fetch(self, *args, **kwargs)
        ranges.append(len(data))
        return data

    with mock.patch.object(object_store._Object, "_upload_chunk", noting_upload):
        save_folder({"state_dict": {"w": value}}, {}, path)
    assert len(writes) > 6 and max(writes) <= 17 * 2**20
    tensor = ShardedFolder(path).tensor("state_dict.w")
    with mock.patch.object(ObjectStore, "cat_file", noting_fetch):
        assert torch.equal(tensor.read(5_000_000, 5_000_100), value[5_000_000:5_000_100])
        assert sum(ranges) < 8 * 2**20
        assert torch.equal(tensor.whole(), value) and max(ranges) == 64 * 2**20
        small = {f"w{number}": torch.full((300, 300), number) for number in range(20)}
        save_folder({"state_dict": small}, {}, path)
        ranges.clear()
        folder = ShardedFolder(path)
        for name, tensor in small.items():
            assert torch.equal(folder.tensor(f"state_dict.{name}").whole(), tensor)
        total = sum(tensor.nbytes for tensor in small.values())
        assert len(ranges) < len(small) and sum(ranges) < 1.3 * total
        ranges.clear()
        assert verify.main([path]) == 0
    assert len(ranges) < len(small) + 3 and sum(ranges) < 1.3 * total


def test_a_damaged_object_and_other_things_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{bucket(tmp_path / 'b')}/a.ckpt"
    save(path, 1.0)
    (file,) = (tmp_path / "b").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert verify.main([path]) == 1 and "damaged" in capsys.readouterr().out
    file.write_bytes(data[:100])
    with pytest.raises(ValueError, match=f"store://.*{file.name.rpartition('__')[2]}: this file has 100 bytes"):
        ShardedFolder(path)
    (tmp_path / "b" / "a.ckpt%2Fnotes.txt").write_text("mine")
    with pytest.raises(IsADirectoryError, match=r"other files \(notes.txt\)"):
        save(path, 2.0)


def objects(store: Path, name: str) -> dict[str, bytes]:
    """Return the bytes of the object ``name``, or of those in the folder ``name``."""
    found = {unquote(path.name): path.read_bytes() for path in store.iterdir() if not path.name.startswith(".upload")}
    return {key.removeprefix(name)[1:]: data for key, data in found.items() if f"{key}/".startswith(f"{name}/")}


def test_converted_files_and_folders_are_those_of_a_disk_and_a_kill_leaves_none_half(tmp_path: Path) -> None:
    """In a folder of several files, the index is the last to appear; without a file, the folder is refused."""
    state = {f"w{number}": torch.full((9000,), float(number)) for number in range(5)} | {"b": torch.ones(3).double()}
    torch.save({"state_dict": state, "optimizer_states": [], "rest": torch.ones(3)}, tmp_path / "in")
    source, store = str(tmp_path / "in"), bucket(tmp_path / "b")
    for to, options in {"full": {}, "safetensors": {"shard_size": "80KB"}}.items():
        convert(source, str(tmp_path / to), to, **options)  # type: ignore[arg-type]
        paths = [tmp_path / to] if to == "full" else (tmp_path / to).iterdir()
        whole = {path.name if to != "full" else "": path.read_bytes() for path in paths}
        for moment in range(20):
            name, calls = f"{to}{moment}", 0

            def act(kind: str, key: str, moment: int = moment) -> None:
                nonlocal calls
                calls += 1
                if calls > moment:
                    raise Killed

            with mock.patch.object(ObjectStore, "before", act), contextlib.suppress(Killed):
                convert(source, f"{store}/{name}", to, **options)  # type: ignore[arg-type]
            found = objects(tmp_path / "b", name)
            if calls <= moment:
                break
            assert found.items() < whole.items() and "model.safetensors.index.json" not in found
            if len(found) < 3:
                with pytest.raises(ConfigError):
                    SafetensorsFolder(f"{store}/{name}")
        assert found == whole and (len(found), moment) == ((1, 2) if to == "full" else (4, 8))
        with pytest.raises(ConfigError, match="expected an OUT that does not exist, got store://.*"):
            convert(source, f"{store}/{name}", to)
    (tmp_path / "b" / f"{name}%2Fmodel.safetensors.index.json").unlink()
    (tmp_path / "b" / f"{name}%2Foriginal%2Fother.safetensors").touch()
    assert sorted(SafetensorsFolder(f"{store}/{name}").keys) == sorted(state)
