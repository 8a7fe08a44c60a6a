"""What launchers leave in the environment, and what follows from it: no process is started here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zero import ZeroStrategy
from lightning_zero.ranks import rendezvous, resume
from lightning_zero.ranks.started_by import MPI_VARIABLES, Launched, launched, tasks_of_nodes
from lightning_zero.settings import ConfigError, ZeroConfig
from lightning_zero.trainer import launchers, processes
from lightning_zero.trainer.processes import own_environment
from tests.harness import LAUNCHERS

TORCHRUN = {"TORCHELASTIC_RUN_ID": "abc", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
SRUN = {"JOB_ID": "17", "PROCID": "3", "NTASKS": "4", "LOCALID": "1", "NODEID": "1", "NNODES": "2"}
SRUN = {f"SLURM_{name}": value for name, value in SRUN.items()} | {"SLURM_NTASKS_PER_NODE": "2"}
UNEVEN = SRUN | {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
OPEN_MPI = dict(zip(MPI_VARIABLES[0], ["3", "4", "1", "2"], strict=True))
MPICH = dict(zip(MPI_VARIABLES[2], ["3", "4", "1", "2"], strict=True))
POD = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}  # of Kubeflow's PyTorchJob
BY_HAND = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "1"}
PLACE = {"rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "nodes": 2}


@pytest.fixture
def environ() -> Iterator[Any]:
    """Replaces what a launcher may have left in the environment."""

    def replace(**variables: str) -> None:
        for name in list(os.environ):
            if name.startswith(LAUNCHERS):
                del os.environ[name]
        os.environ.update(variables)

    with mock.patch.dict(os.environ):
        yield replace


@pytest.mark.parametrize(("environ", "expected"), [
    (TORCHRUN, Launched(by="torchrun", **PLACE)),
    (SRUN, Launched(by="srun", **PLACE)),
    (OPEN_MPI, Launched(by="mpirun", **PLACE)),
    (MPICH, Launched(by="mpirun", **PLACE)),
    (SRUN | TORCHRUN, Launched(by="torchrun", **PLACE)),  # in a job of SLURM
    (SRUN | {"SLURM_JOB_NAME": "bash"}, None),  # a shell in an allocation
    ({}, None),
    ({"LOCAL_RANK": "1"}, Launched(by="plain", local_rank=1)),  # told in part
    (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_NNODES": "3"},
        Launched(by="srun", rank=0, world_size=6, local_world_size=2, nodes=3),
    ),
    (UNEVEN, Launched(by="srun", **PLACE | {"world_size": 3, "local_world_size": 1})),
])  # fmt: skip
def test_each_launcher_tells_the_place_of_a_rank(environ: dict[str, str], expected: Launched | None) -> None:
    assert launched(environ) == expected


def test_tasks_per_node_as_slurm_writes_them() -> None:
    tasks = {"2(x3),1": [2, 2, 2, 1], "4": [4], "2,1(x2)": [2, 1, 1], "": [], "two": []}
    assert {text: tasks_of_nodes(text) for text in tasks} == tasks


# -- allocations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("environment", "variables", "nodes", "devices", "words"), [
    (SLURMEnvironment, UNEVEN, 1, 3, ["equally many processes on every node, got 1 on this one and 3 on 2 nodes"]),
    (TorchElasticEnvironment, TORCHRUN, 1, 2, ["4 processes", "torchrun", "1 x 2 = 2", "trainer.num_nodes=2"]),
    (TorchElasticEnvironment, TORCHRUN, 1, 4, ["1 x 4 = 4", "torchrun --nnodes=1 --nproc-per-node=4"]),
    (SLURMEnvironment, SRUN, 2, 8, ["4 processes", "2 x 8 = 16", "srun --nodes=2 --ntasks-per-node=8"]),
    (own_environment, {**OPEN_MPI, "MASTER_ADDR": "a"}, 1, 1, ["4 processes", "mpirun", "1 x 1 = 1"]),
    (LightningEnvironment, {}, 2, 2, ["MASTER_PORT, NODE_RANK", "trainer.num_nodes=1", "torchrun --nnodes=2"]),
    (LightningEnvironment, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, 2, 2, ["expected NODE_RANK", "0 .. 1"]),
    (LightningEnvironment, {**BY_HAND, "NODE_RANK": "2"}, 2, 2, ["NODE_RANK", "0 .. 1", "'2'"]),
    (LightningEnvironment, POD, 1, 1, ["number of pods", "WORLD_SIZE is 2", "trainer.num_nodes=1"]),
])  # fmt: skip
def test_a_wrong_allocation_says_expected_found_and_what_to_change(
    environ: Any, environment: type, variables: dict[str, str], nodes: int, devices: int, words: list[str]
) -> None:
    environ(**variables)
    with pytest.raises(ConfigError) as caught:
        processes.check_allocation(environment(), nodes=nodes, devices=devices)
    assert all(word in str(caught.value) for word in words), caught.value
    if variables is not UNEVEN and environment is not LightningEnvironment:
        processes.check_allocation(environment(), nodes=2, devices=2)


def test_srun_without_tasks_per_node() -> None:
    with pytest.raises(ConfigError, match="--nodes=2 --ntasks-per-node=2 to srun"):
        processes.check_srun({k: v for k, v in SRUN.items() if k != "SLURM_NTASKS_PER_NODE"})
    processes.check_srun(SRUN)
    processes.check_srun({})


def test_nodes_that_are_started_by_hand_are_told_where_they_are(environ: Any) -> None:
    for variables, nodes in ((BY_HAND, 2), ({}, 1)):
        environ(**variables)
        processes.check_allocation(LightningEnvironment(), nodes=nodes, devices=2)


# -- mpirun without mpi4py --------------------------------------------------------------------------------------------


def test_mpirun_is_recognised_by_its_variables(environ: Any) -> None:
    environ(**OPEN_MPI)
    with pytest.raises(ConfigError, match="-x MASTER_ADDR=<name> -x MASTER_PORT=<port> to mpirun"):
        own_environment()
    environ(**OPEN_MPI, MASTER_ADDR="a")
    for _ in range(2):  # of two trainers
        found = own_environment()
        assert found is not None and found.creates_processes_externally
        assert (found.global_rank(), found.world_size(), found.local_rank(), found.node_rank()) == (3, 4, 1, 1)
        assert (found.main_address, found.main_port) == ("a", 29500)
        processes.check_allocation(found, nodes=2, devices=2)
    environ(**OPEN_MPI, **TORCHRUN)
    assert own_environment() is None
    environ(**dict(zip(MPI_VARIABLES[0], ["1", "2", "1", "2"], strict=True)))  # of one node
    found = own_environment()
    assert found is not None and found.main_address == "127.0.0.1"
    environ(PMI_RANK="0", PMI_SIZE="2")
    with pytest.raises(ConfigError, match="MPI_LOCALRANKID"):
        own_environment()


@pytest.mark.parametrize("devices", [1, 8])
def test_the_rank_of_a_pod_is_that_of_its_node(environ: Any, devices: int) -> None:
    environ(**POD | {"WORLD_SIZE": str(2 * devices)})
    assert own_environment() is None and LightningEnvironment().node_rank() == 1
    processes.check_allocation(LightningEnvironment(), nodes=2, devices=devices)


# -- what all ranks must have alike -----------------------------------------------------------------------------------


def test_paths_and_threads_may_differ_between_nodes() -> None:
    one = ZeroConfig()
    more = {"run_dir": "/a/run", "callbacks": {"checkpoint": {"dirpath": "/a/run/checkpoints"}}, "seed": 1}
    first = rendezvous.shared_settings(one, more)
    other = {"run_dir": "/b/run", "callbacks": {"checkpoint": {"dirpath": "/b/run/checkpoints"}}, "seed": 1}
    assert rendezvous.shared_settings(one, other) == first
    assert first != rendezvous.shared_settings(one, {**more, "seed": 2})
    assert first["zero.stage.name"] == "zero3" and "zero.offload.nvme_path" not in first
    assert rendezvous.versions("2.6")["torch"] == torch.__version__


# -- jobs that start again --------------------------------------------------------------------------------------------


def checkpoint(path: Path, written: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": 1}, path)
    os.utime(path, (written, written))
    return path


def test_a_job_has_one_name_on_all_ranks_and_restarts(environ: Any) -> None:
    unnamed = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    names = [
        (TORCHRUN, "torchrun-abc"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "my job/1"}, "torchrun-my-job-1"),
        (SRUN, "slurm-17-0"),
        (unnamed | {"SLURM_JOB_ID": "17"}, "slurm-17"),
        (OPEN_MPI | {"PMIX_NAMESPACE": "prterun-a-1@1"}, "mpirun-prterun-a-1-1"),
        ({}, None),
    ]
    for variables, name in names:
        environ(**variables)
        assert resume.job_name() == name
    environ(**unnamed)
    named = resume.job_name()
    assert named == resume.job_name() and named is not None and named.endswith(f"-{os.getppid()}")


def test_a_job_goes_on_from_its_own_newest_checkpoint(environ: Any, tmp_path: Path) -> None:
    environ(**TORCHRUN)
    folder = tmp_path / "checkpoints"
    old = checkpoint(folder / "of-another-job.ckpt", 1e9)
    assert resume.checkpoint_of_job(tmp_path, [folder]) is None
    resume.note_job(tmp_path)
    assert resume.checkpoint_of_job(tmp_path, [folder]) is None  # the note is newer
    os.utime(tmp_path / resume.NOTE, (2e9, 2e9))
    checkpoint(folder / "step-10.ckpt", 2e9 + 1)
    newest = checkpoint(folder / "step-20.ckpt", 2e9 + 2)
    (folder / "last.ckpt").symlink_to(newest.name)
    (folder / "half.ckpt").write_bytes(newest.read_bytes()[:-30])
    (folder / "gone.ckpt").symlink_to("nowhere.ckpt")
    assert resume.checkpoint_of_job(tmp_path, [folder]) == newest
    requeued = checkpoint(tmp_path / "hpc_ckpt_1.ckpt", 2e9 + 3)
    assert resume.checkpoint_of_job(tmp_path, [folder]) == requeued
    environ(**{**TORCHRUN, "TORCHELASTIC_RUN_ID": "another"})
    assert resume.checkpoint_of_job(tmp_path, [folder]) is None
    resume.note_job(tmp_path)
    assert resume.checkpoint_of_job(tmp_path, [folder]) != old


def test_newest_checkpoint_may_be_remote(tmp_path: Path) -> None:
    fs, folder = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    whole = checkpoint(tmp_path / "step-1.ckpt", 1e9).read_bytes()
    fs.pipe({f"{folder}/step-1.ckpt": whole, f"{folder}/step-2.ckpt": whole})
    fs.pipe({f"{folder}/half.ckpt": whole[:-30], f"{folder}/more/step-3.ckpt": whole})
    found = resume.newest_checkpoint([tmp_path, folder])
    assert found == f"memory:///{tmp_path.name}/step-2.ckpt" and torch.load(fs.open(found)) is not None
    fs.pipe({f"{folder}/step-4.ckpt/.metadata": b"", f"{folder}/step-5.ckpt/__0_1.distcp": b""})
    assert resume.newest_checkpoint([tmp_path, folder]) == f"memory:///{tmp_path.name}/step-4.ckpt"
    assert resume.newest_checkpoint([f"{folder}/none", folder], since_ns=int(4e18)) is None


def test_a_remote_folder_may_have_the_signs_of_a_pattern_in_its_name(tmp_path: Path) -> None:
    fs, whole = fsspec.filesystem("memory"), checkpoint(tmp_path / "step-1.ckpt", 1e9).read_bytes()
    fs.pipe({f"/{tmp_path.name}/run=[12]/step-1.ckpt": whole, f"/{tmp_path.name}/run=1/step-9.ckpt": whole})
    found = resume.newest_checkpoint([f"memory://{tmp_path.name}/run=[12]"])
    assert found == f"memory:///{tmp_path.name}/run=[12]/step-1.ckpt"


def test_of_equal_times_the_largest_number_counts(tmp_path: Path) -> None:
    for step in (8, 10, 9):
        checkpoint(tmp_path / f"hpc_ckpt_{step}.ckpt", 1e9)
    assert resume.newest_checkpoint([tmp_path]) == tmp_path / "hpc_ckpt_10.ckpt"


def test_a_job_finds_its_checkpoint_in_a_store_whose_clock_is_late(environ: Any, tmp_path: Path) -> None:
    environ(**TORCHRUN)
    fs, folder = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    whole = checkpoint(tmp_path / "old.ckpt", 1e9).read_bytes()
    fs.pipe({f"{folder}/step-1.ckpt": whole, f"{folder}/of-another-job.ckpt": whole})
    resume.note_job(tmp_path)
    resume.note_file(tmp_path, "saves", f"{folder}/step-1.ckpt")
    assert resume.checkpoint_of_job(tmp_path, [folder]) == f"memory:///{tmp_path.name}/step-1.ckpt"
    day = (tmp_path / resume.NOTE).stat().st_mtime + 24 * 3600
    os.utime(tmp_path / resume.NOTE, (day, day))  # the file was there before: its replacement was not finished
    assert resume.checkpoint_of_job(tmp_path, [folder]) is None


def test_a_checkpoint_that_is_a_folder_is_whole_with_its_metadata(tmp_path: Path) -> None:
    (tmp_path / "step-1.ckpt").mkdir()
    assert resume.newest_checkpoint([tmp_path]) is None
    (tmp_path / "step-1.ckpt" / ".metadata").write_bytes(b"")
    assert resume.newest_checkpoint([tmp_path]) == tmp_path / "step-1.ckpt"


class Started(Exception):
    pass


@pytest.mark.parametrize("start_method", ["popen", "fork"])
@pytest.mark.parametrize("function", ["fit", "validate"])
def test_a_missing_checkpoint_is_refused_before_the_start(
    start_method: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = mock.Mock(side_effect=Started)
    monkeypatch.setattr(launchers.ScriptLauncher, "_call_children_scripts", start)
    monkeypatch.setattr(launchers.ForkLauncher, "_fit_to_fork", start)
    torch.save({}, tmp_path / "there.ckpt")
    for path, error in {"missing.ckpt": ConfigError, "there.ckpt": Started, "": Started}.items():
        strategy = ZeroStrategy("zero3", start_method=start_method)
        run = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
        with pytest.raises(error, match="missing.ckpt., which does" if error is ConfigError else None) as raised:
            getattr(run, function)(BoringModel(), ckpt_path=str(tmp_path / path) if path else "last")
        assert isinstance(raised.value, FileNotFoundError) or error is not ConfigError  # as under DDP
