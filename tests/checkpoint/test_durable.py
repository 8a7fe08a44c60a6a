"""Processes that are killed at the worst moments, disks that are full, and what is left over."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_zero.checkpoint import durable
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO

OLD, NEW = {"value": torch.zeros(50_000)}, {"value": torch.ones(50_000)}


def write_whole(path: Path, during: Callable[[], object] = lambda: None) -> None:
    with durable.written_aside(path) as part:
        os.write(part.fd, b"x")
        during()


def killed(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(act: Callable[[], object]) -> int | None:
    """Exit code of a forked process that does ``act``."""
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join(30)
    code = child.exitcode
    child.close()
    return code


def killed_at(moment: str, folder: Path, write: Callable[[], object]) -> bool:
    """Whether a forked process dies that is killed at ``moment`` of a write into ``folder``."""

    def write_and_die() -> None:
        pwrite, rename, renames, sync = os.pwrite, os.rename, itertools.count(), durable.sync_folder
        if moment == "half of the file":
            os.pwrite = lambda fd, data, offset: (pwrite(fd, data[: len(data) // 2], offset), killed())
        elif moment == "fsync":
            os.fsync = killed
        elif moment == "rename":
            os.replace = os.rename = killed
        elif moment == "in between":
            os.rename = lambda *names: killed() if next(renames) else rename(*names)
        elif moment == "fsync of the folder":
            durable.sync_folder = lambda path: killed() if path == folder else sync(path)
        elif moment == "removal":
            shutil.rmtree = killed  # type: ignore[assignment]
        write()

    return in_child(write_and_die) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("moment", "ends"), [("half of the file", OLD), ("fsync", OLD), ("rename", OLD), ("fsync of the folder", NEW)]
)
def test_a_kill_leaves_the_old_file_or_the_new_one(moment: str, ends: dict[str, Any], tmp_path: Path) -> None:
    io = ZeroCheckpointIO()
    io.save_checkpoint(OLD, tmp_path / "last.ckpt")
    assert killed_at(moment, tmp_path, lambda: io.save_checkpoint(NEW, tmp_path / "last.ckpt"))
    assert torch.equal(torch.load(tmp_path / "last.ckpt")["value"], ends["value"])
    assert not [p for p in tmp_path.glob("*.ckpt") if p.name != "last.ckpt"]
    io.save_checkpoint(NEW, tmp_path / "other.ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "other.ckpt"]  # what was left over is gone


def write_folder(path: Path, value: str) -> None:
    with durable.written_aside(path, folder=True) as part:
        (part.path / "deep").mkdir()
        for name in ("a", "deep/b"):
            (part.path / name).write_text(value)


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize(
    ("moment", "ends"), [("fsync", "old"), ("in between", "old"), ("fsync of the folder", "new"), ("removal", "new")]
)
def test_a_kill_leaves_the_old_folder_or_the_new_one(
    moment: str, ends: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:  # as on NFS
        fails = SimpleNamespace(renameat2=lambda *_: ctypes.set_errno(errno.EINVAL) or -1)
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: fails)
    elif moment == "in between":
        pytest.skip("there is no such moment")
    write_folder(tmp_path / "last.ckpt", "old")
    assert killed_at(moment, tmp_path, lambda: write_folder(tmp_path / "last.ckpt", "new"))
    assert len(list(tmp_path.iterdir())) == 2  # both, in any moment
    write_whole(tmp_path / "other.ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "other.ckpt"]  # what was left over is gone
    assert {p.read_text() for p in tmp_path.glob("last.ckpt/**/*") if p.is_file()} == {ends}


def test_another_process_leaves_the_old_folder_until_the_new_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, rename = SimpleNamespace(renameat2=lambda *_: ctypes.set_errno(errno.EINVAL) or -1), os.rename
    write_folder(tmp_path / "last.ckpt", "old")

    def then_others_look(*names: Any) -> None:
        rename(*names)
        monkeypatch.setattr(os, "rename", rename)
        durable.remove_leftovers(tmp_path)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: fails)
    monkeypatch.setattr(os, "rename", then_others_look)
    write_folder(tmp_path / "last.ckpt", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt" / "a").read_text() == "new"


@pytest.mark.parametrize("new", ["folder", "file"])
@pytest.mark.parametrize("old", ["none", "file", "folder", "link"])
def test_a_folder_or_file_in_the_place_of_anything(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "last_1.ckpt"
    if old == "file":
        path.write_text("old")
    elif old == "folder":
        write_folder(path, "old")
    elif old == "link":
        write_folder(tmp_path / "best.ckpt", "old")
        path.symlink_to("best.ckpt")
    if new == "folder":
        write_folder(path, "new")
        assert (path / "deep" / "b").read_text() == "new"
    else:
        write_whole(path)
        assert path.is_file()
    assert not path.is_symlink()
    assert not (tmp_path / "best.ckpt").exists() or (tmp_path / "best.ckpt" / "a").read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} <= {"last_1.ckpt", "best.ckpt"}


def test_a_folder_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    write_folder(tmp_path / "last.ckpt", "old")
    names = r"last\.ckpt: the folder could not be written: OSError: .*No space"
    with pytest.raises(OSError, match=names), durable.written_aside(tmp_path / "last.ckpt", folder=True) as part:
        (part.path / "a").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt" / "a").read_text() == "old"


def test_a_folder_that_is_being_written_stays(tmp_path: Path) -> None:
    with durable.written_aside(tmp_path / "last.ckpt", folder=True) as part:
        write_whole(tmp_path / "other.ckpt")
        assert part.path.is_dir()


def test_a_link_that_was_not_renamed_goes_and_its_process_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / durable.part_name("last.ckpt")).symlink_to("folder")
    assert len(durable.remove_leftovers(tmp_path)) == 1
    replace, taken = os.replace, list[str]()

    def late(source: Path, target: Path) -> None:
        if not taken:
            taken.extend(durable.remove_leftovers(tmp_path))
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    durable.link(tmp_path / "last.ckpt", tmp_path / "folder")
    assert len(taken) == 1 and os.readlink(tmp_path / "last.ckpt") == "folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "last.ckpt"]


def test_without_locks_a_file_must_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    left = [tmp_path / durable.part_name(name) for name in ("new.ckpt", "long-ago.ckpt")]
    for path in left:
        path.mkdir()
    os.utime(left[1], (0, 0))
    assert durable.remove_leftovers(tmp_path) == [left[1].name]


def test_the_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    ZeroCheckpointIO().save_checkpoint(NEW, tmp_path / "new" / "folder" / "last.ckpt")
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir()] == ["last.ckpt"]


def test_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    replace, kinds = os.replace, ("file", "folder")
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(kinds[os.path.isdir(f"/proc/self/fd/{fd}")]))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), replace(*names)))
    write_whole(tmp_path / "a.ckpt")
    assert done == ["file", "rename", "folder"]


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_written_leaves_nothing_and_names_file_and_cause(tmp_path: Path) -> None:
    io = ZeroCheckpointIO()
    path = tmp_path / "last.ckpt"
    io.save_checkpoint(OLD, path)
    with full_disk(100_000), pytest.raises(OSError, match=r"last\.ckpt: .*File too large") as full:
        io.save_checkpoint(NEW, path)
    assert full.value.errno == errno.EFBIG
    with pytest.raises(RuntimeError, match=r"last\.ckpt: .*local object"):
        io.save_checkpoint({"made": lambda: 1}, path)
    with pytest.raises(FileExistsError, match=r"below\.ckpt"):
        io.save_checkpoint(NEW, path / "below.ckpt")
    assert torch.equal(torch.load(path)["value"], OLD["value"])
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_only_what_the_dead_have_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "dead": durable.part_name("hpc_ckpt_3.ckpt"),
        "written": durable.part_name("last.ckpt"),
        "of another node": durable.part_name("last.ckpt").replace(durable._host(), "elsewhere"),
        "long ago": durable.part_name("last.ckpt").replace(durable._host(), "elsewhere"),
        "the user's": ".notes.part",
    }
    for name in names.values():
        (tmp_path / name).touch()
    os.utime(tmp_path / names["long ago"], (0, 0))
    with (tmp_path / names["written"]).open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_whole(tmp_path / "a.ckpt")
    left = {key for key, name in names.items() if (tmp_path / name).exists()}
    assert left == {"written", "of another node", "the user's"}


def test_a_process_with_the_ids_of_one_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that starts again."""
    monkeypatch.setattr(durable, "_numbers", itertools.count(1))
    left = [tmp_path / durable.part_name("last.ckpt") for _ in range(2)]
    for path in left:
        path.touch()
    monkeypatch.setattr(durable, "_numbers", itertools.count(1))
    write_whole(tmp_path / "last.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_names_that_lightning_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node_1.cluster")
    for part in map(durable.part_name, ("hpc_ckpt_3.ckpt", "last.ckpt", "é" * 120)):
        assert durable._PART.fullmatch(part) and len(part.encode()) < 255
        assert "ckpt_" not in part and part.startswith(".") and not part.endswith("ckpt")


def has_part_open() -> bool:
    return any(os.readlink(path).endswith(".part") for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_a_forked_process_holds_no_lock(tmp_path: Path) -> None:
    """A worker of a data loader, made while a thread writes, may outlive the writer."""

    def look() -> None:
        assert in_child(lambda: os._exit(has_part_open())) == 0 and has_part_open()

    write_whole(tmp_path / "a.ckpt", look)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), durable.written_aside(tmp_path / "a.ckpt"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_addresses_of_fsspec_are_taken(tmp_path: Path) -> None:
    io = ZeroCheckpointIO()
    io.save_checkpoint(NEW, f"file://{tmp_path}/a.ckpt")
    assert torch.load(tmp_path / "a.ckpt").keys() == NEW.keys()
    io.save_checkpoint(NEW, "memory://folder/b.ckpt")
    assert io.load_checkpoint("memory://folder/b.ckpt").keys() == NEW.keys()
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint(NEW, tmp_path / "c.ckpt", storage_options={})
    shutil.rmtree(tmp_path)
