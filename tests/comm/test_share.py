"""What ranks of one machine share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm import share as module
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.share import Share, available_cpus, own_path, ranks_on_disk, share_of_machine
from lightning_zero.config import ConfigError
from tests.harness import on_ranks


@on_ranks(3)
def test_ranks_find_those_of_their_machine() -> None:
    rank = dist.get_rank()
    comm = Communicator(dist.group.WORLD, torch.device("cpu"))
    cores = available_cpus()
    assert share_of_machine(comm) == Share(rank, 3, max(1, cores // 3))
    original, module.machine = module.machine, lambda: "a" if rank in (0, 2) else "b"
    try:
        found = share_of_machine(comm)
        assert found[:2] == [(0, 2), (0, 1), (1, 2)][rank]
        assert found.cpus == max(1, cores // [2, 1, 2][rank])
        assert ranks_on_disk(comm, "/") == [2, 1, 2][rank]
    finally:
        module.machine = original
        comm.close()


@on_ranks(2)
def test_ranks_with_cores_of_their_own_do_not_share_them(tmp_path: Path) -> None:
    comm = Communicator(dist.group.WORLD, torch.device("cpu"))
    cores = os.sched_getaffinity(0)
    try:
        if len(cores) >= 2:
            os.sched_setaffinity(0, {sorted(cores)[dist.get_rank()]})
            assert share_of_machine(comm) == Share(dist.get_rank(), 2, 1)
    finally:
        os.sched_setaffinity(0, cores)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "4"  # the group is a part of the job
    assert share_of_machine(comm).local_ranks == 4
    comm.close()


def test_one_process_shares_with_nobody() -> None:
    comm = Communicator(None, torch.device("cpu"))
    assert share_of_machine(comm)[:2] == (0, 1)


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/task\n")
    for folder, text in (("job/task", "max 100000"), ("job", "150000 100000"), ("", "400000 100000")):
        level = tmp_path / "sys/fs/cgroup" / folder
        level.mkdir(parents=True, exist_ok=True)
        (level / "cpu.max").write_text(text + "\n")
    assert available_cpus(tmp_path) == min(2, len(os.sched_getaffinity(0)))
    assert available_cpus(tmp_path / "nothing") == len(os.sched_getaffinity(0))


def test_a_path_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/17")
    share = Share(local_rank=1, local_ranks=2)
    assert own_path("/nvme$LOCAL_RANK/${RANK}", share, 5) == "/nvme1/5"
    assert own_path("$SCRATCH/zero", share, 5) == "/scratch/17/zero"
    assert own_path("/nvme", share, 5) == "/nvme"
    with pytest.raises(ConfigError, match=r"zero\.offload\.nvme_path: .* got \$NO_SUCH_FOLDER in .* rank 5"):
        own_path("/a/$NO_SUCH_FOLDER", share, 5)
