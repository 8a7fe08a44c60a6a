"""Real jobs on a throw-away SLURM of two nodes: ``make test-slurm``.

Each run is the main job in its smallest size, on the CPU. A job that goes back to the queue is held by SLURM for two
minutes; the tests let it start at once.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch  # noqa: F401  here, because it sets environment variables
import pytest
import torch

from tests.engine.support import assert_equal
from tests.harness import ROOT

LAB = Path(__file__).parent / "lab.sh"
OWN = Path(__file__).parent / "own.py"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
STEPS = 20
RUN = (
    *("experiment=tiny", "data.path=words.txt", "logger=csv"),
    *("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "+callbacks.checkpoint.every_n_train_steps=5"),
)
CLUSTER = (
    *("cluster.nodes=2", "cluster.gpus_per_node=0", "cluster.time=00:10:00", "cluster.partition=lab"),
    *("+cluster.env.OMP_NUM_THREADS=1", f"+cluster.env.PYTHONPATH={ROOT}"),
)
DISTURB = "+callbacks.disturb._target_=tests.slurm.disturb.Disturb"

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two nodes, for the tests of this file."""
    environ = {"SLURM_LAB": str(tmp_path_factory.mktemp("lab")), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    before = {key: os.environ.get(key) for key in (*environ, "SLURM_CONF")}
    os.environ.update(environ)
    done = subprocess.run([LAB, "up", "2"], capture_output=True, text=True, timeout=60)
    os.environ["SLURM_CONF"] = f"{environ['SLURM_LAB']}/slurm.conf"
    try:
        assert done.returncode == 0, f"{done.stderr}\nInstall SLURM by {LAB} install."
        yield
    finally:
        subprocess.run([LAB, "down"], check=True, timeout=60)
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs are submitted: with a text of several epochs in a run, so that runs go on inside of one."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "words.txt").write_text(" ".join(f"word{i * i}" for i in range(1000)))
    return folder


# -- a job ------------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A job that has ended."""

    id: str
    folder: Path
    log: str
    state: str
    restarts: int
    exit_code: str

    def losses(self, file: str = "metrics.csv") -> dict[int, float]:
        """Training loss by step."""
        with (self.folder / "csv" / file).open() as lines:
            return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(lines) if row["train_loss"]}

    def validation(self) -> str:
        """The result, which is printed once. (srun mixes what is written to stdout and stderr in any order.)"""
        (found,) = re.findall(r"^validation bits per byte: (\S+)$", self.log, re.MULTILINE)
        return str(found)

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def command(module: str, *overrides: str, folder: Path, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", f"lightning_zero.{module}", *overrides]
    done = subprocess.run(arguments, cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
    assert check is None or done.returncode == check, done.stdout + done.stderr
    return done


def slurm(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


def submitted(folder: Path, tasks: int, *overrides: str) -> str:
    """The id of a job of the main job on two nodes."""
    done = command("submit", *RUN, *CLUSTER, f"cluster.tasks_per_node={tasks}", *overrides, folder=folder)
    (job,) = re.findall(r"^job: (\d+)$", done.stdout, re.MULTILINE)
    assert f"run folder: outputs/train/slurm-{job}\nlog: outputs/train/slurm-{job}.log\n" in done.stdout
    return job


def shown(job: str) -> dict[str, str]:
    """What SLURM knows of a job."""
    return dict(re.findall(r"(\S+?)=(\S*)", slurm("scontrol", "show", "job", "--oneliner", job)))


_seen: dict[tuple[str, str], float] = {}  # job, restarts -> when it was found in the queue again


def start_requeued() -> None:
    """Let jobs that are back in the queue start now, and not after SLURM's two minutes.

    But not at once: a job that starts in the second in which it was ended has a credential that counts as revoked.
    """
    for job in slurm("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i").split():
        restarts = shown(job).get("Restarts", "0")
        if restarts != "0" and time.monotonic() > _seen.setdefault((job, restarts), time.monotonic()) + 3:
            subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], capture_output=True, timeout=30)


def ended(folder: Path, job: str, within_s: float = 240, log: str = "outputs/train/slurm-{}.log") -> Job:
    """Wait for the end of a job, through its requeues."""
    deadline = time.monotonic() + within_s
    file = folder / log.format(job)
    while (known := shown(job))["JobState"] not in ENDED:
        assert time.monotonic() < deadline, f"{known}\n{file.read_text() if file.exists() else ''}"
        start_requeued()
        time.sleep(0.5)
    return Job(
        job, file.with_suffix(""), file.read_text(), known["JobState"], int(known["Restarts"]), known["ExitCode"]
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["2x1", "2x2"])
def undisturbed(request: pytest.FixtureRequest, folder: Path, lab: None) -> tuple[int, Job]:
    """Tasks of a node, and a run to the end."""
    return request.param, ended(folder, submitted(folder, request.param))


def assert_same_run(job: Job, whole: Job, resumed_at: int) -> None:
    """From the step on at which it went on, a run is the undisturbed one: losses to the last digit, weights, result."""
    again = job.losses()
    assert list(again) == list(range(resumed_at, STEPS))
    assert again == {step: loss for step, loss in whole.losses().items() if step >= resumed_at}
    assert job.validation() == whole.validation()  # of the weights at the end
    assert_equal(job.weights(), whole.weights())


# -- runs -------------------------------------------------------------------------------------------------------------


def test_the_main_job_by_submit(undisturbed: tuple[int, Job]) -> None:
    _, job = undisturbed
    assert (job.state, job.restarts, job.exit_code) == ("COMPLETED", 0, "0:0"), job.log
    assert float(job.validation()) > 0
    assert list(job.losses()) == list(range(STEPS))
    assert "Traceback" not in job.log
    runs = [p for p in job.folder.parent.iterdir() if p.is_dir()]
    assert all(re.fullmatch(r"slurm-\d+", p.name) for p in runs), runs  # one folder for all ranks


def test_a_killed_task(undisturbed: tuple[int, Job], folder: Path) -> None:
    """The task of one node dies: the job ends, goes back to the queue and on from the last checkpoint."""
    tasks, whole = undisturbed
    disturb = (DISTURB, "+callbacks.disturb.step=13", f"+callbacks.disturb.rank={2 * tasks - 1}")
    job = ended(folder, submitted(folder, tasks, *disturb))
    assert (job.state, job.restarts) == ("COMPLETED", 1), job.log
    (failure,) = (job.folder / "failures").read_text().splitlines()
    assert re.search(r"exit code (137|143) on vn\[0-1\]$", failure)
    assert f" {2 * tasks - 1}: Killed" in job.log
    assert_same_run(job, whole, resumed_at=10)


def test_a_signal_to_one_rank(undisturbed: tuple[int, Job], folder: Path) -> None:
    tasks, whole = undisturbed
    disturb = (DISTURB, "+callbacks.disturb.step=7", "+callbacks.disturb.rank=1", "+callbacks.disturb.send=USR2")
    job = ended(folder, submitted(folder, tasks, *disturb, "cluster.signal=USR2"))
    assert (job.state, job.restarts) == ("COMPLETED", 1), job.log
    assert job.log.count("interrupted: saved step 7 in ") == 1, job.log
    assert not (job.folder / "failures").exists()
    assert_same_run(job, whole, resumed_at=7)
    assert job.losses("metrics-1.csv") == {step: loss for step, loss in whole.losses().items() if step < 7}


def test_the_signal_before_the_time_limit(folder: Path, undisturbed: tuple[int, Job]) -> None:
    tasks, whole = undisturbed
    if tasks != 1:
        pytest.skip("once is enough: it takes as long as SLURM's clock")
    slow = (DISTURB, "+callbacks.disturb.sleep_s=4")
    limits = ("cluster.time=00:01:00", "cluster.signal_delay=5")  # SLURM looks every 30 s
    job = ended(folder, submitted(folder, tasks, *slow, *limits))
    assert (job.state, job.restarts) == ("COMPLETED", 1), job.log
    (saved,) = re.findall(r"^interrupted: saved step (\d+) in ", job.log, re.MULTILINE)
    assert 0 < int(saved) < STEPS
    assert_same_run(job, whole, resumed_at=int(saved))


def test_a_cancelled_job_does_not_come_back(folder: Path) -> None:
    job = submitted(folder, 1, DISTURB, "+callbacks.disturb.sleep_s=1")
    log = folder / f"outputs/train/slurm-{job}.log"
    deadline = time.monotonic() + 60
    metrics = folder / f"outputs/train/slurm-{job}/csv"
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    slurm("scancel", job)
    found = ended(folder, job)
    assert (found.state, found.restarts) == ("CANCELLED", 0), log.read_text()


def test_a_mistake_in_the_run_does_not_come_back(folder: Path) -> None:
    """What is found in the job only: the folder for files of the nodes is missing there."""
    job = ended(folder, submitted(folder, 1, "zero/offload=nvme", "zero.offload.nvme_path=no/such/folder"))
    assert (job.state, job.restarts) == ("FAILED", 0)
    assert "zero.offload.nvme_path" in job.log


def test_a_sweep_of_jobs(folder: Path, tmp_path: Path) -> None:
    """Two runs of two nodes; one of them gets the signal, goes back to the queue and on."""
    disturb = (DISTURB, "+callbacks.disturb.step=7", "+callbacks.disturb.rank=1", "+callbacks.disturb.send=USR1")
    sweep = ("cluster=slurm", "cluster.tasks_per_node=1", "seed=0,1")
    arguments = [sys.executable, "-m", "lightning_zero.train", "--multirun", "hydra.sweep.dir=sweep"]
    arguments += [*RUN, *CLUSTER, *disturb, *sweep]
    (tmp_path / "words.txt").write_bytes((folder / "words.txt").read_bytes())
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(arguments, cwd=tmp_path, env=environ, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + 400
            while process.poll() is None and time.monotonic() < deadline:
                start_requeued()
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
    logs = "\n".join(p.read_text() for p in sorted(tmp_path.rglob("slurm-*.log")))
    assert process.returncode == 0, (tmp_path / "out").read_text() + logs
    assert logs.count("interrupted: saved step 7 in ") == 2
    found = []
    for number in (0, 1):
        with (tmp_path / "sweep" / str(number) / "csv" / "metrics.csv").open() as lines:
            rows = [row for row in csv.DictReader(lines) if row["train_loss"]]
        assert [int(row["step"]) for row in rows] == list(range(7, STEPS))
        found.append([row["train_loss"] for row in rows])
        assert list((tmp_path / "sweep" / str(number)).glob("slurm-*.log"))
    assert found[0] != found[1]


def own_job(folder: Path, event: str) -> Job:
    """A job of a script of the user's own, to its end."""
    settings = (*CLUSTER, "cluster.tasks_per_node=1")
    done = command("submit", *settings, "--", sys.executable, str(OWN), event, folder=folder)
    (job,) = re.findall(r"^job: (\d+)$", done.stdout, re.MULTILINE)
    return ended(folder, job)


def losses_of(job: Job) -> dict[tuple[int, int], str]:
    """Loss by step and rank, of each step that was trained last."""
    found = re.findall(r"step (\d+) of rank (\d): (\S+)$", job.log, re.MULTILINE)
    assert len({line[:2] for line in found}) == len(found)  # none was trained twice
    return {(int(step), int(rank)): loss for step, rank, loss in found}


def test_a_script_of_ones_own_goes_on_after_the_signal(tmp_path: Path) -> None:
    whole = own_job(tmp_path, "nothing")
    assert (whole.state, whole.restarts) == ("COMPLETED", 0), whole.log
    job = own_job(tmp_path, "signal")
    assert (job.state, job.restarts) == ("COMPLETED", 1), job.log
    assert "interrupted: saved step 8 in " in job.log and f"slurm-{job.id}-0 has started again" in job.log
    assert "ended after step 24" in job.log
    assert losses_of(job) == losses_of(whole) and len(losses_of(job)) == 2 * 24
    assert list(tmp_path.rglob("*.ckpt")) == [job.folder / "hpc_ckpt_1.ckpt"]  # nothing in the user's folder


def test_a_script_of_ones_own_that_fails_on_all_ranks_does_not_come_back(tmp_path: Path) -> None:
    job = own_job(tmp_path, "fail")
    assert (job.state, job.restarts) == ("FAILED", 0), job.log
    assert "mat1 and mat2 shapes cannot be multiplied" in job.log


TRAIN = """
import os, sys
from lightning.pytorch import Trainer, seed_everything
from tests.slurm.own import Regression, loader

sys.argv.append("signal")
seed_everything(1)
TRAINER
trainer.fit(Regression(), loader())
trainer.print(f"ended after step {trainer.global_step}")
"""


def test_the_batch_script_of_the_guide(tmp_path: Path) -> None:
    """With fewer tasks, and without GPUs, which this machine lacks."""
    guide = (ROOT / "docs" / "cluster.md").read_text()
    (script,) = re.findall(r"```sh\n(#!.*?)```", guide, re.DOTALL)
    (trainer,) = re.findall(r"```python\n(trainer = [^`]*num_nodes.*?)```", guide, re.DOTALL)
    smaller = {"--nodes=4": "--nodes=2", "--gpus-per-node=8": "--partition=lab", "per-node=8": "per-node=1"}
    for given, here in (smaller | {"task=12": "task=1", "24:00:00": "00:10:00"}).items():
        assert given in script
        script = script.replace(given, here, 1)
    assert "devices=8," in trainer
    quiet = 'devices=1, accelerator="cpu", max_epochs=3, logger=False, enable_progress_bar=False,'
    (tmp_path / "train.py").write_text(TRAIN.replace("TRAINER", trainer.replace("devices=8,", quiet)))
    (tmp_path / "job.sh").write_text(script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(["sbatch", "--parsable", "job.sh"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    job = ended(tmp_path, done.stdout.strip(), log="train-{}.log")
    assert (job.state, job.restarts) == ("COMPLETED", 1), job.log
    assert "ranks: 2 of 2 on " in job.log and "ended after step 24" in job.log
    assert len(losses_of(job)) == 2 * 24  # the second start goes on after the step of the signal
    assert list((tmp_path / "runs" / job.id).glob("hpc_ckpt_*.ckpt"))


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_plain_srun_is_enough(folder: Path) -> None:
    job = [sys.executable, "-m", "lightning_zero.train", *RUN, "trainer.max_steps=2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    text = shlex.join(["srun", "-N2", "--ntasks-per-node=1", *job])
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation bits per byte: " in done.stdout


@pytest.mark.parametrize(("override", "words"), [
    ("cluster.partition=other", "invalid partition specified: other"),
    ("cluster.nodes=9", "More processors requested"),
])  # fmt: skip
def test_what_sbatch_refuses_names_the_key(folder: Path, override: str, words: str) -> None:
    done = command("submit", *RUN, *CLUSTER, "cluster.tasks_per_node=1", override, folder=folder, check=2)
    assert f"sbatch refuses the job: {words}" in done.stderr.replace("Batch job submission failed: ", "")
    assert f"Change {override.partition('=')[0]}" in done.stderr
