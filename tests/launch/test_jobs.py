"""The main job under each launcher, in real processes: start-up, ranks that die, jobs that start again, a cut cable."""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.engine.support import assert_equal
from tests.harness import ROOT, free_port, run_command

TORCHRUN = ("python", "-m", "torch.distributed.run")
TRAIN = ("-m", "lightning_zero.train")
STEPS = 14
KILLED_AT = 10
RESTARTS = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
SMALL = (
    "experiment=tiny",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    f"trainer.max_steps={STEPS}",
    "trainer.enable_model_summary=false",
    "+callbacks.checkpoint.every_n_train_steps=4",
    "model._target_=killed.Lit",
    "hydra.run.dir=run",
)

# Is killed once, on one rank; with its torchrun, as if the node were gone.
KILLED = """
import os, signal
from lightning_zero.models.gpt import LitGPT

class Lit(LitGPT):
    def on_train_batch_start(self, batch, batch_idx):
        once = os.environ.get("KILL_ONCE")
        here = self.trainer.global_step == {at} and str(self.global_rank) == os.environ.get("KILL_RANK")
        if once and here and not os.path.exists(once):
            open(once, "w").close()
            if os.environ.get("KILL_AGENT"):
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), getattr(signal, os.environ.get("KILL_SIGNAL", "SIGKILL")))
"""


def run(folder: Path, *command: str, **more: object) -> subprocess.CompletedProcess[str]:
    (folder / "killed.py").write_text(KILLED.format(at=KILLED_AT))
    more = {"PYTHONPATH": f"{ROOT}:{folder}", "XDG_CACHE_HOME": folder / "cache"} | more
    return run_command(*command, folder=folder, **more)  # type: ignore[arg-type]


def torchrun(
    folder: Path, *options: str, overrides: Sequence[str] = (), **more: object
) -> subprocess.CompletedProcess[str]:
    launch = options or ("--standalone", "--nproc-per-node=2")
    return run(folder, *TORCHRUN, *launch, *TRAIN, *SMALL, *overrides, **more)


def together(folder: Path, *commands: tuple[Sequence[str], dict[str, object]]) -> list[tuple[int, str]]:
    """Exit codes and output of processes that run at the same time."""
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda command: run(folder, *command[0], **command[1]), commands))
    return [(done.returncode, done.stdout + done.stderr) for done in ends]


def losses(folder: Path, name: str = "metrics.csv") -> dict[int, str]:
    with (folder / "run" / "csv" / name).open() as file:
        return {int(row["step"]): row["train_loss"] for row in csv.DictReader(file) if row["train_loss"]}


def assert_same_weights(*folders: Path) -> None:
    found, expected = (torch.load(folder / "run" / "checkpoints" / "last.ckpt")["state_dict"] for folder in folders)
    assert_equal(found, expected)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two processes of torchrun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = torchrun(folder, code=0)
    assert re.search(r"^ranks: 2 of 2 on 1 node \(\S+: 0-1\)$", done.stdout, re.MULTILINE)
    assert "address: " not in done.stdout and "same on all ranks: " not in done.stdout  # of one machine
    assert list(losses(folder)) == list(range(STEPS))
    return folder


# -- jobs that start again --------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_a_job_whose_rank_was_killed(rank: int, undisturbed: Path, tmp_path: Path) -> None:
    done = torchrun(tmp_path, *RESTARTS, KILL_ONCE=tmp_path / "once", KILL_RANK=rank, code=0)
    assert "has started again: it resumes from run/checkpoints/step-8.ckpt" in done.stdout
    assert "Signal 9" in done.stderr or "exitcode: -9" in done.stderr
    expected = losses(undisturbed)
    assert losses(tmp_path) == {step: expected[step] for step in range(8, STEPS)}
    assert_same_weights(tmp_path, undisturbed)


@pytest.mark.full
def test_sigterm_to_one_rank_saves_and_torchrun_starts_again(undisturbed: Path, tmp_path: Path) -> None:
    """No step is lost: all ranks save at the end of the one in which the signal came."""
    done = torchrun(tmp_path, *RESTARTS, KILL_ONCE=tmp_path / "once", KILL_RANK=1, KILL_SIGNAL="SIGTERM", code=0)
    assert re.search(r"interrupted: saved step 1[01] in \S+hpc_ckpt_1.ckpt", done.stdout), done.stdout
    assert "To resume: start the same command again with ckpt_path=" in done.stdout
    assert "has started again: it resumes from run/hpc_ckpt_1.ckpt" in done.stdout
    assert "exitcode: 143" in done.stderr
    expected = losses(undisturbed)
    assert {**losses(tmp_path, "metrics-1.csv"), **losses(tmp_path)} == expected
    assert_same_weights(tmp_path, undisturbed)


@pytest.mark.full
def test_sigterm_to_a_run_started_by_hand(undisturbed: Path, tmp_path: Path) -> None:
    """As docker stop sends it, to the process that has started the others; a user goes on from what was saved."""
    kill = {"KILL_ONCE": tmp_path / "once", "KILL_RANK": 0, "KILL_SIGNAL": "SIGTERM"}
    hand = ("python", *TRAIN, *SMALL, "trainer.devices=2")
    first = run(tmp_path, *hand, **kill, code=143)
    assert "Traceback" not in first.stderr
    (command,) = re.findall(r"^To resume: python (-m lightning_zero.train .*)$", first.stdout, re.MULTILINE)
    said = shlex.split(command)
    assert said[2:] == [*SMALL, "trainer.devices=2", f"ckpt_path={tmp_path / 'run' / 'hpc_ckpt_1.ckpt'}"]
    run(tmp_path, "python", *TRAIN, *said[2:], code=0)
    assert_same_weights(tmp_path, undisturbed)


@pytest.mark.full
def test_a_job_that_is_started_again_with_another_number_of_processes(undisturbed: Path, tmp_path: Path) -> None:
    def job() -> tuple[str, ...]:
        return "--rdzv-id=job", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-backend=c10d"

    first = torchrun(tmp_path, *job(), "--nproc-per-node=2", KILL_ONCE=tmp_path / "once", KILL_RANK=1)
    assert first.returncode != 0
    again = torchrun(tmp_path, *job(), "--nproc-per-node=3", code=0)
    assert "torchrun-job has started again: it resumes from run/checkpoints/step-8.ckpt" in again.stdout
    assert "ranks: 3 of 3" in again.stdout
    found, whole = losses(tmp_path), losses(undisturbed)
    assert list(found) == list(range(8, STEPS))
    assert float(found[STEPS - 1]) < float(whole[7])


@pytest.mark.full
def test_torchrun_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    """Two nodes of one process; one is killed with its torchrun, and the other goes on alone."""
    port = free_port()
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"

    def node(first: bool) -> tuple[Sequence[str], dict[str, object]]:
        launch = (
            *TORCHRUN,
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            "--rdzv-id=elastic",
            f"--rdzv-endpoint=localhost:{port}",
            f"--rdzv-conf=is_host={int(first)},{conf}",
        )
        return (*launch, *TRAIN, *SMALL), {"KILL_ONCE": tmp_path / "once", "KILL_RANK": 1, "KILL_AGENT": int(not first)}

    # Which of them becomes rank 1 is torchrun's affair; the one that is rank 0 of the rendezvous holds the store.
    command, kill = node(True)
    kill["KILL_AGENT"] = ""
    (code, out), (other, _) = together(tmp_path, (command, kill), node(False))
    if other == -signal.SIGKILL:
        assert "torchrun-elastic has started again: it resumes from run/checkpoints/step-8.ckpt" in out
        assert "Starting with 1 processes" in out
    assert code == 0, out
    assert STEPS - 1 in losses(tmp_path)


# -- ranks that die ---------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_dies_under_lightnings_launcher_ends_all(rank: int, tmp_path: Path) -> None:
    started = time.monotonic()
    kill = {"KILL_ONCE": tmp_path / "once", "KILL_RANK": rank}
    done = run(tmp_path, "python", *TRAIN, *SMALL, "trainer.devices=3", **kill)
    assert done.returncode != 0
    assert f"rank {rank} (on {socket.gethostname()}, process " in done.stderr, done.stderr
    assert "has ended without a word" in done.stderr or "holds the store, has ended" in done.stderr
    assert time.monotonic() - started < 100


# Rank 0 alone enters gather(), while the other rank waits in a collective of Lightning's.
ALONE = """
import lightning as L
import lightning_zero
import torch
from lightning_zero import ZeroStrategy

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.net(batch).square().mean(), on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            lightning_zero.gather(self).__enter__()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = L.Trainer(
    strategy=ZeroStrategy("zero3", stall_timeout_s=150), accelerator="cpu", devices=2, max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Lit(), torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2))
"""


@pytest.mark.full
def test_a_rank_whose_wait_fails_ends_at_once(tmp_path: Path) -> None:
    """Messages that it has sent are still under way, and the other rank takes no part in them."""
    (tmp_path / "train.py").write_text(ALONE)
    started = time.monotonic()
    done = run(tmp_path, "python", "train.py")
    assert done.returncode == 1
    assert "waits for 'gather()" in done.stderr and "Look for a call that only some ranks make" in done.stderr
    assert time.monotonic() - started < 100


# -- other launchers --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_nodes_that_are_started_by_hand(undisturbed: Path, tmp_path: Path) -> None:
    """Two nodes of one process, told by MASTER_ADDR; one that is killed is named by the other, and ends it."""
    port = free_port()

    def node(rank: int, *overrides: str, **more: object) -> tuple[Sequence[str], dict[str, object]]:
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "NODE_RANK": rank}
        nodes = ("trainer.num_nodes=2", "trainer.devices=1", f"hydra.run.dir=run{rank or ''}")
        nodes += ("zero.hybrid_shard=flat",)  # as the undisturbed run: norms add in the order of shards
        return ("python", *TRAIN, *SMALL, *nodes, *overrides), {**place, **more}

    for code, out in together(tmp_path, node(0), node(1)):
        assert code == 0, out
    assert losses(tmp_path) == losses(undisturbed)
    kill = {"KILL_ONCE": tmp_path / "once", "KILL_RANK": 1}
    (code, out), (killed, _) = together(tmp_path, node(0, **kill), node(1, **kill))
    assert killed == -signal.SIGKILL and code not in (0, -signal.SIGKILL)
    assert f"rank 1 (on {socket.gethostname()}, process " in out
    (code, out), (other, other_out) = together(tmp_path, node(0), node(1, "zero.prefetch_bytes=1"))
    assert (code, other) == (2, 2)
    for text in (out, other_out):
        assert "zero.prefetch_bytes: expected 268435456, as rank 0 has it, got 1 on rank 1." in text


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "MASTER_ADDR"])
def test_the_commands_of_the_docs(launcher: str, undisturbed: Path, tmp_path: Path) -> None:
    """As written, on two nodes of one process: a name that is not in the command here fails."""
    text = (ROOT / "docs" / "launching.md").read_text().partition("```bash\n")[2].partition("```")[0]
    commands = re.sub(r"\\\n *", "", re.sub(r" *#.*", "", text)).splitlines()
    command = next(each for each in commands if each.startswith(launcher) and "..." not in each)
    here = {
        "torchrun": {"nnodes=4": "nnodes=2", "node=8": "node=1", "node0:29500": f"localhost:{free_port()}"},
        "MASTER_ADDR": {"node0": "localhost", "29500": str(free_port()), "devices=8": "devices=1", "runs/first": "run"},
    }[launcher]
    for written, changed in here.items():
        assert written in command
        command = command.replace(written, changed)
    settings = shlex.join(each for each in SMALL if launcher == "torchrun" or "run.dir" not in each)
    command = f"{command.replace('experiment=gpt_25m', '')} {settings} zero.hybrid_shard=flat"
    assert launcher == "torchrun" or "NODE_RANK=0" in command
    nodes = [command, command.replace("NODE_RANK=0", "NODE_RANK=1")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for code, out in together(tmp_path, *((("bash", "-ec", node), {"PATH": path}) for node in nodes)):
        assert code == 0, out
    assert losses(tmp_path) == losses(undisturbed)


@pytest.mark.full
def test_a_node_that_never_comes_is_named_in_time(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "NODE_RANK": 0}
    started = time.monotonic()
    overrides = ("trainer.num_nodes=2", "trainer.devices=2", "zero.stall_timeout_s=20")
    done = run(tmp_path, "python", *TRAIN, *SMALL, *overrides, **place, code=2)
    assert "ranks 2-3 of 4 (all of node 1) did not come to localhost:" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 60


@pytest.mark.full
@pytest.mark.parametrize("launch", ["mpirun.openmpi --allow-run-as-root --oversubscribe", "mpiexec.hydra"])
def test_real_mpirun(launch: str, undisturbed: Path, tmp_path: Path) -> None:
    """Open MPI's and MPICH's; a rank that is killed ends the job."""
    program, *options = launch.split()
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    mpirun = (program, *options, "-n", "2", "python", *TRAIN, *SMALL)
    done = run(tmp_path, *mpirun, code=0)
    assert "ranks: 2 of 2 on 1 node" in done.stdout
    assert losses(tmp_path) == losses(undisturbed)
    done = run(tmp_path, *mpirun, "hydra.run.dir=again", KILL_ONCE=tmp_path / "once", KILL_RANK=1)
    assert done.returncode != 0
    assert not (tmp_path / "again" / "checkpoints" / f"step-{STEPS}.ckpt").exists()


@pytest.mark.full
def test_mpirun_without_mpi4py(undisturbed: Path, tmp_path: Path) -> None:
    """Processes with the variables of Open MPI's mpirun."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = {"MASTER_PORT": free_port(), "PMIX_NAMESPACE": "job"}
    places = [job | dict(zip(names, (rank, 2, rank, 2), strict=True)) for rank in range(2)]
    for code, out in together(tmp_path, *((("python", *TRAIN, *SMALL), place) for place in places)):
        assert code == 0, out
    assert losses(tmp_path) == losses(undisturbed)


@pytest.mark.full
def test_a_wrong_allocation_ends_before_training(tmp_path: Path) -> None:
    done = torchrun(tmp_path, overrides=["trainer.num_nodes=2"])
    assert done.returncode != 0
    assert "trainer.num_nodes x trainer.devices: expected the 2 processes that torchrun has started" in done.stderr
    assert "torchrun --nnodes=2 --nproc-per-node=1" in done.stderr


# -- two machines with a network between them: as root, with network namespaces ---------------------------------------

STALL_S = 15


def ip(*words: str, check: bool = True) -> bool:
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode == 0


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """The names of two namespaces, 10.77.0.1 and 10.77.0.2."""
    names = [f"zero{os.getpid()}-{i}" for i in range(2)]
    if shutil.which("ip") is None or os.geteuid() != 0 or not ip("netns", "add", names[0], check=False):
        pytest.skip("needs root, and ip netns")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "zv0", "netns", names[0], "type", "veth", "peer", "name", "zv1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"zv{i}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"zv{i}", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def on_machine(machine: str, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    place = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555", "NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    more = {"GLOO_SOCKET_IFNAME": f"zv{rank}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    settings = (
        *("experiment=tiny", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=2"),
        *("trainer.max_steps=1000000", "trainer.enable_progress_bar=false"),
        *(f"hydra.run.dir=run{rank}", f"zero.stall_timeout_s={STALL_S}"),
    )
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, sys.executable, "-m", "lightning_zero.train", *settings],
        cwd=folder,
        env={**os.environ, **place, **more},
        stdout=(folder / f"out{rank}").open("w"),
        stderr=subprocess.STDOUT,
    )


@pytest.mark.full
def test_both_sides_of_a_cut_network_end_in_time_and_name_the_other(machines: list[str], tmp_path: Path) -> None:
    """Nobody hears that a connection is broken, and the store does not answer the far side. In the engine this is an
    error; in a barrier of others (a metric's, at the end of a validation) the process is ended.
    """
    ranks = [on_machine(machine, rank, tmp_path) for rank, machine in enumerate(machines)]

    def out(rank: int) -> str:
        return (tmp_path / f"out{rank}").read_text()

    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("run0/csv/metrics.csv")):  # it trains
            assert time.monotonic() < deadline and ranks[0].poll() is None, out(0) + out(1)
            time.sleep(0.5)
        ip("-n", machines[1], "link", "set", "zv1", "down")
        for process in ranks:
            assert process.wait(timeout=STALL_S + 100) not in (0, 2), out(0) + out(1)
        in_engine = f"zero.stall_timeout_s (now {STALL_S})"
        assert ("  rank 1: " if in_engine in out(0) else "ends: it has made no progress for") in out(0), out(0)
        assert "(does not answer: it has ended or hangs)" in out(0) or "rank 1 (on " in out(0), out(0)
        assert "rank 0 (on " in out(1) and ("the network to it is cut" if in_engine in out(1) else "ends: ") in out(1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
