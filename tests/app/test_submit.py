"""Submitting runs and sweeps without SLURM: the script's text, what is checked before, a sbatch that writes down."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  here, because it sets environment variables
import pytest

from lightning_zero.app import jobs, submit, sweep, train
from lightning_zero.app.schema import TrainConfig
from lightning_zero.app.slurm import ClusterConfig, ClusterName, ContainerRuntime, script, seconds_of
from lightning_zero.ranks.rendezvous import StartError
from lightning_zero.settings import ConfigError

SMALL = ("experiment=tiny", "data.path=words.txt")
SIZE = ("cluster.nodes=4", "cluster.gpus_per_node=8", "cluster.time=24:00:00", "cluster.partition=long")


@pytest.fixture
def command(in_process: Any, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs submit in a folder with a text."""
    (tmp_path / "words.txt").write_text("some words of text\n" * 5000)
    return functools.partial(in_process, submit)


@pytest.fixture
def fake_sbatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts a sbatch on PATH that keeps what it is given, and answers as told."""

    def install(answer: str = "4711;main", error: str = "") -> Path:
        file = tmp_path / "bin" / "sbatch"
        file.parent.mkdir(exist_ok=True)
        ending = f"echo {shlex.quote(error)} >&2; exit 1" if error else f"echo '{answer}'"
        file.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/options\ncat >{tmp_path}/script\n{ending}\n')
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
        return tmp_path / "script"

    return install


def slurm(**settings: Any) -> ClusterConfig:
    return ClusterConfig(name=ClusterName.slurm, **{"nodes": 2, "gpus_per_node": 8, **settings})


def text_of(cluster: ClusterConfig, *arguments: str, run_dir: str | None = None) -> str:
    return script(cluster, arguments, folder=Path("/home/me"), run_dir=run_dir)


# -- the script -------------------------------------------------------------------------------------------------------


def test_the_whole_script() -> None:
    expected = f"""#!/bin/bash
#SBATCH --job-name=lightning_zero
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --chdir=/home/me
#SBATCH --output=outputs/train/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue

export NCCL_SOCKET_IFNAME=ib0
module load cuda

run_dir="outputs/train/slurm-$SLURM_JOB_ID"
mkdir -p "$run_dir"
rm -f "$run_dir/outcome" "$run_dir/raised-"*
touch "$run_dir/started"
export LIGHTNING_ZERO_OUTCOME="$PWD/$run_dir/outcome"

srun --kill-on-bad-exit=1 --cpus-per-task=12 \\
    {sys.executable} -m lightning_zero.train \\
    "hydra.run.dir='$run_dir'" \\
    experiment=gpt_25m \\
    "data.path='my texts'"

code=$?
outcome=$(cat "$run_dir/outcome" 2>/dev/null)
raised=$(ls "$run_dir" | grep -c "^raised-")
trained=$(find "$run_dir" -name "*.ckpt" | head -1)

# The time is up, and the ranks have saved and left.
if [ "$outcome" = requeue ]; then
    scontrol requeue "$SLURM_JOB_ID"
# A task was killed or failed: at most 3 times without a new checkpoint, and never if
# all tasks have raised an error before the first step of the job: they would again.
elif [ $code -ne 0 ] && [ "$outcome" != refused ] && {{ [ "$raised" -lt 16 ] || [ -n "$trained" ]; }}; then
    new=$(find "$run_dir" -name "*.ckpt" -newer "$run_dir/started" | head -1)
    if [ -n "$new" ]; then rm -f "$run_dir/failures"; fi
    echo "$(date): exit code $code on $SLURM_JOB_NODELIST" >>"$run_dir/failures"
    if [ "$(wc -l <"$run_dir/failures")" -le 3 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit $code
"""
    cluster = slurm(cpus_per_task=12, time="24:00:00", env={"NCCL_SOCKET_IFNAME": "ib0"}, setup=["module load cuda"])
    assert text_of(cluster, "experiment=gpt_25m", "data.path='my texts'") == expected


def test_options_of_a_site() -> None:
    names = ("partition", "account", "qos", "constraint", "reservation", "job_name")
    more = {"mem": "500G", "exclusive": True, "sbatch": ["--mail-type=END", "--comment=two words"]}
    text = text_of(slurm(**dict(zip(names, names, strict=True)), **more, srun=["--mpi=none"]))
    lines = [f"{name.replace('_', '-')}={name}" for name in names] + ["mem=500G", "exclusive", "mail-type=END"]
    assert [line for line in lines if f"\n#SBATCH --{line}\n" not in text] == []
    assert "\nsrun --kill-on-bad-exit=1 --mpi=none \\\n" in text


def test_settings_leave_lines_of_the_script_out() -> None:
    text = text_of(slurm(gpus_per_node=0, tasks_per_node=4), run_dir="/runs/first")
    assert "--ntasks-per-node=4" in text and "gpus" not in text
    assert 'export LIGHTNING_ZERO_OUTCOME="$run_dir/outcome"' in text  # a folder from the root needs no $PWD
    text = text_of(slurm(requeue=False))
    assert "#SBATCH --no-requeue" in text
    assert not any(word in text for word in ("--signal", "scontrol", "OUTCOME"))
    assert "srun" in text.strip().splitlines()[-3]  # whose exit code is the job's
    text = text_of(slurm(retries=0))
    assert text.count("scontrol requeue") == 1 and "failures" not in text


def test_a_container_wraps_the_command() -> None:
    pyxis = text_of(slurm(container="me/image:1", container_mounts=["/data:/data"]), "seed=1")
    assert "    --container-image=me/image:1 \\\n" in pyxis
    assert "    --container-mounts=/home/me:/home/me,/data:/data --container-workdir=/home/me \\\n" in pyxis
    assert "    python -m lightning_zero.train \\\n" in pyxis
    settings = {"container": "image.sif", "container_runtime": ContainerRuntime.apptainer}
    with_gpus = text_of(slurm(**settings))
    assert "    apptainer exec --nv --bind /home/me:/home/me --pwd /home/me image.sif \\\n" in with_gpus
    assert " --nv " not in text_of(slurm(**settings, gpus_per_node=0, tasks_per_node=1))


@pytest.mark.parametrize(("code", "does", "earlier", "comes_back"), [
    (0, "", 0, False),
    (0, "echo requeue >$LIGHTNING_ZERO_OUTCOME", 9, True),
    (143, "echo requeue >$LIGHTNING_ZERO_OUTCOME", 9, True),
    (2, "echo refused >$LIGHTNING_ZERO_OUTCOME", 0, False),
    (143, "echo refused >$LIGHTNING_ZERO_OUTCOME", 0, False),  # some ranks were slower, and were taken down
    (1, "", 0, True),
    (137, "", 2, True),
    (137, "", 3, False),
    (137, "sleep 0.05; touch step-5.ckpt", 3, True),  # got on in the meantime
    (1, "rm *.ckpt; touch raised-$(seq -s ' raised-' 0 15)", 0, False),
    (1, "touch raised-$(seq -s ' raised-' 0 15)", 0, True),  # an earlier start has trained
    (137, "rm *.ckpt; touch raised-$(seq -s ' raised-' 1 15)", 0, True),  # one task was killed
])  # fmt: skip
def test_a_job_goes_back_to_the_queue(code: int, does: str, earlier: int, comes_back: bool, tmp_path: Path) -> None:
    """The script in a shell, with commands that only write down."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name, body in (("srun", f"cd {run_dir}; {does}\nexit {code}"), ("scontrol", f'echo "$@" >>{tmp_path}/asked')):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
    (run_dir / "failures").write_text("before\n" * earlier)
    (run_dir / "outcome").write_text("requeue\n")  # of the stretch before
    (run_dir / "step-1.ckpt").touch()
    os.utime(run_dir / "step-1.ckpt", (1, 1))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(["bash", "-s"], input=text_of(slurm(), run_dir=str(run_dir)), env=environ, text=True)
    assert done.returncode == code
    assert (tmp_path / "asked").exists() is comes_back
    assert not comes_back or (tmp_path / "asked").read_text() == "requeue 5\n"


# -- the command ------------------------------------------------------------------------------------------------------


def test_dry_run_prints_the_script_and_makes_the_folder_of_its_log(command: Any, tmp_path: Path) -> None:
    files = ("zero/offload=nvme", "zero.offload.nvme_path=/disk/of/a/node")  # which need not be here
    code, out, err = command(*SMALL, *SIZE, *files, "dry_run=true", "machine=h100", "trainer.max_steps=7")
    assert code == 0, err
    assert out.startswith("#!/bin/bash\n#SBATCH") and out.endswith("exit $code\n")  # nothing but the script
    for argument in (*SMALL, *SIZE, *files, "trainer.max_steps=7", "cluster=slurm"):
        assert f"    {argument}" in out
    assert "    machine" not in out and "    dry_run" not in out
    assert "not submitted: dry_run=true" in err
    assert "of 79.0G on each GPU" in err
    assert "cluster.cpus_per_task is not set: " in err
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        *("outputs", "outputs/train", "words.txt")  # SLURM does not make the folder of its log
    ]


def test_submits_and_says_where_things_are(command: Any, fake_sbatch: Any, tmp_path: Path) -> None:
    script = fake_sbatch()
    code, out, err = command(
        *SMALL, *SIZE, "+cluster.env.NCCL_DEBUG=INFO", "cluster.signal=USR2", "cluster.signal_delay=300"
    )
    assert code == 0, err
    assert out.endswith("job: 4711\nrun folder: outputs/train/slurm-4711\nlog: outputs/train/slurm-4711.log\n")
    assert (tmp_path / "options").read_text() == "--parsable\n"
    assert script.read_text() in out
    assert "\nexport NCCL_DEBUG=INFO\n" in script.read_text()
    assert "#SBATCH --signal=USR2@300" in script.read_text()
    assert f"#SBATCH --chdir={tmp_path}" in script.read_text()
    assert (tmp_path / "outputs/train").is_dir()  # SLURM does not make the folder of its log


def test_a_site_and_a_run_folder_of_ones_own_reach_the_job(command: Any, fake_sbatch: Any, tmp_path: Path) -> None:
    """By --config-dir: the job gets it too."""
    (tmp_path / "site" / "cluster").mkdir(parents=True)
    (tmp_path / "site" / "cluster" / "ours.yaml").write_text(
        "defaults: [slurm]\npartition: big\ntime: '2-0'\nsetup: ['module load cuda']\ngpus_per_node: 4\n"
    )
    script = fake_sbatch()
    own = ("hydra.run.dir=runs/first", "hydra.job.name=x")
    code, out, err = command("--config-dir", "site", *SMALL, "cluster=ours", *own)
    assert code == 0, err
    assert "run folder: runs/first\nlog: runs/first/slurm-4711.log\n" in out
    text = script.read_text()
    assert "run_dir=runs/first\n" in text and "    hydra.job.name=x" in text
    assert "#SBATCH --output=runs/first/slurm-%j.log" in text
    assert f"    --config-dir \\\n    {tmp_path}/site \\\n" in text
    assert "    cluster=ours" in text and "cluster=slurm" not in text
    assert "--partition=big" in text and "--time=2-0" in text and "\nmodule load cuda\n" in text


def test_a_command_of_ones_own_is_submitted_as_given(command: Any, fake_sbatch: Any, tmp_path: Path) -> None:
    script = fake_sbatch()
    site = ("cluster.nodes=2", "cluster.gpus_per_node=8", "cluster.cpus_per_task=12", "machine=h100")
    words = ("python", "train.py", "--name", "two words", "lr=1e-3", "$HOME", "--", "data.path='a b'")
    code, out, err = command(*site, "hydra.run.dir=runs/first", "--", *words)
    assert code == 0, err
    text = script.read_text()
    begin, srun = text.index("run_dir=runs/first\n"), text.index("srun --kill-on-bad-exit=1 --cpus-per-task=12")
    assert 'export LIGHTNING_ZERO_RUN_DIR="$PWD/$run_dir"\n' in text[begin:srun]
    assert text[srun:].partition("\n\n")[0].endswith(f" \\\n    {shlex.join(words)}")
    main_job = text_of(slurm(cpus_per_task=12), run_dir="runs/first")
    assert text.partition("code=$?")[2] == main_job.partition("code=$?")[2]
    assert "#SBATCH --signal=USR1@120\n#SBATCH --requeue\n" in text
    assert out.endswith("job: 4711\nrun folder: runs/first\nlog: runs/first/slurm-4711.log\n")
    assert (tmp_path / "runs/first").is_dir() and "cpus_per_task is not set" not in out


OWN = ("--", "python", "train.py")
ONE_OF_A_KIND = {
    "zero/stage=zero2",
    "cluster.nodes=0",
    "trainer.num_nodes=3",
    "data.path=other.txt",
    "machine.gpu_memory=2MB",
}


@pytest.mark.mainly(lambda overrides: overrides[0] in ONE_OF_A_KIND)
@pytest.mark.parametrize(("overrides", "message"), [
    (["cluster=none"], "cluster: expected a cluster to submit to, got none"),
    (["cluster=none", "cluster.partition=long"], "cluster.partition has no effect with cluster=none"),
    (["cluster.nodes=0"], "cluster.nodes: expected a number >= 1, got 0"),
    (["cluster.time=86400"], "cluster.time: expected hours:minutes:seconds"),
    (["cluster.time=00:01:00"], "cluster.time: expected more than cluster.signal_delay (120 s"),
    (["cluster.signal=KILL"], "cluster.signal: expected USR1 or USR2, got KILL"),
    (["cluster.gpus_per_node=0"], "cluster.tasks_per_node: expected the number of processes of a node"),
    (["cluster.gpus_per_node=8", "cluster.tasks_per_node=4"], "cluster.tasks_per_node: expected one task for each"),
    (["cluster.container_mounts=[/a:/b]"], "cluster.container_mounts has no effect without cluster.container"),
    (["cluster.sbatch=[mail]"], "cluster.sbatch: expected options"),
    (["cluster.job_name=bash"], "cluster.job_name: expected another name than bash and interactive"),
    (["cluster.node=4"], "node"),
    (["trainer.num_nodes=3", "cluster.nodes=4"], "trainer.num_nodes: expected 4, which is cluster.nodes, got 3"),
    (["trainer.devices=2", "cluster.gpus_per_node=8"], "trainer.devices: expected 8, which is cluster.gpus_per"),
    (["trainer.accelerator=cpu"], "trainer.accelerator: expected gpu with cluster.gpus_per_node=1, got cpu"),
    (["trainer.gradient_clip_algorithm=no"], "trainer: lightning.pytorch.Trainer refuses these settings"),
    (["task=test"], "ckpt_path: expected a checkpoint for task=test, got none"),
    (["ckpt_path=not/there.ckpt"], "ckpt_path: expected a checkpoint, got 'not/there.ckpt'"),
    (["data.path=other.txt"], "data.path: expected a file"),
    (["cluster.nodes=400", "data.batch_size=100"], "data.path: expected text for at least one batch of training"),
    (["model.n_head=3"], "model.d_model"),
    (["optimizer.lr=-1"], "optimizer: torch.optim.AdamW refuses these settings"),
    (["machine=h100", "cluster.gpus_per_node=16"], "cluster.gpus_per_node: expected at most 8, which is machine.g"),
    (["machine.gpu_memory=1MB"], "zero3 + none: needs "),
    (["machine.gpu_memory=2MB"], "fits with 4 GPUs"),
    (["--multirun", "seed=1,2"], "--multirun: expected one run, got a sweep"),
    ([*SMALL, *OWN], "experiment has no effect on a command after --"),
    (["zero/stage=zero2", *OWN], "zero/stage has no effect on a command after --"),
    (["hydra.job.name=x", *OWN], "hydra.job.name has no effect on a command after --"),
    (["machine.gpu_memory=80GB", *OWN], "machine.gpu_memory has no effect on a command after --"),
    (["cluster.python=python3", *OWN], "cluster.python has no effect on a command after --"),
    (["machine=h100", "cluster.gpus_per_node=16", *OWN], "cluster.gpus_per_node: expected at most 8"),
    (["cluster=none", *OWN], "cluster: expected a cluster to submit to, got none"),
    (["cluster.time=86400", *OWN], "cluster.time: expected hours:minutes:seconds"),
    (["--"], "--: expected a command that srun can start 1 time(s) on each node"),
    (["--", "torchrun", "train.py"], "such as python train.py, got torchrun"),
])  # fmt: skip
def test_mistakes_end_before_sbatch(
    command: Any, fake_sbatch: Any, overrides: list[str], message: str, tmp_path: Path
) -> None:
    fake_sbatch()
    code, _, err = command(*(() if "--" in overrides else SMALL), *overrides)
    assert code == 2 and message in err and "Traceback" not in err, err
    assert not (tmp_path / "script").exists()


@pytest.mark.parametrize(("answer", "key"), [
    ("Batch job submission failed: Requested node configuration is not available", "cluster.nodes, cluster.gpus"),
    ("something else", "cluster.*"),
])  # fmt: skip
def test_what_sbatch_refuses_names_the_key(command: Any, fake_sbatch: Any, answer: str, key: str) -> None:
    fake_sbatch(error=f"sbatch: error: {answer}")
    code, _, err = command(*SMALL)
    assert code == 2 and f"error: sbatch refuses the job: {answer}. Change {key}" in err


def test_memory_of_processes_without_gpus(command: Any, fake_sbatch: Any) -> None:
    fake_sbatch()
    cpus = ("cluster.gpus_per_node=0", "cluster.tasks_per_node=2")
    assert command(*SMALL, *cpus)[0] == 0
    code, _, err = command(*SMALL, *cpus, "cluster.mem=2M")
    assert code == 2 and "more on the host" in err
    assert submit.slurm_memory("500G") == 500 * 2**30 and submit.slurm_memory("100") == 100 * 2**20
    assert submit.slurm_memory("0") is None and submit.slurm_memory(None) is None


# -- the group --------------------------------------------------------------------------------------------------------


def test_times_of_slurm_are_seconds() -> None:
    times = {"24:00:00": 86400, "1-0": 86400, "2-12": 216000, "0-1:30": 5400, "1-00:00:05": 86405, "00:02:30": 150}
    assert {text: seconds_of(text) for text in times} == times
    for text in ("86400", "10:00", "tomorrow", ""):
        with pytest.raises(ConfigError, match="Change cluster.time"):
            seconds_of(text)


def test_a_run_is_fitted_to_its_cluster() -> None:
    on_cpus = slurm(gpus_per_node=0, tasks_per_node=3)
    fitted = [
        (TrainConfig(cluster=slurm()), {"num_nodes": 2, "devices": 8, "accelerator": "gpu"}),
        (TrainConfig(cluster=on_cpus), {"num_nodes": 2, "devices": 3, "accelerator": "cpu"}),
        (TrainConfig(), {}),
    ]
    for config, trainer in fitted:
        jobs.fit_trainer(config)
        assert config.trainer == trainer


# -- inside a job -----------------------------------------------------------------------------------------------------


def test_outside_of_a_job_a_run_for_a_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.check_inside(ClusterConfig())
    with pytest.raises(ConfigError, match="cluster=slurm: expected a process that srun has started in a job"):
        jobs.check_inside(slurm())
    task = {"JOB_ID": "7", "PROCID": "0", "LOCALID": "0", "NNODES": "2", "NTASKS": "4", "NTASKS_PER_NODE": "2"}
    for name, value in task.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    jobs.check_inside(slurm())


def test_a_refused_run_says_so_to_the_script(in_process: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks that do not come are no refusal: the job goes back to the queue."""
    monkeypatch.setenv("LIGHTNING_ZERO_OUTCOME", str(tmp_path / "outcome"))
    with pytest.raises(SystemExit), train.refusals():
        raise StartError("rank 3 did not come")
    assert not (tmp_path / "outcome").exists()
    assert in_process(train, "zero/stage=7")[0] == 2
    assert (tmp_path / "outcome").read_text() == "refused\n"


# -- sweeps -----------------------------------------------------------------------------------------------------------

SBATCH = """#!{python}
import json, os, re, sys
text = sys.stdin.read()
folder = re.search(r"^run_dir=(.*)$", text, re.MULTILINE)[1].strip("'")
open(folder + "/script", "w").write(text)
seed = int(re.search(r"seed=(\\d+)", text)[1])
json.dump({{"metrics": {{"bits": seed / 2}}}}, open(folder + "/results.json", "w"))
print("4711", sys.argv[1:])
sys.exit(seed == 3)
"""


def test_each_run_is_a_job(in_process: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH.format(python=sys.executable))
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(sweep, "failed", [])
    settings = ("cluster=slurm", "cluster.nodes=2", "cluster.time=1:00:00", "optimized_metric=bits")
    code, out, _ = in_process(train, "--multirun", "seed=2,3", "hydra.sweep.dir=s", *settings)
    assert code == 1 and out.count("4711 ['--parsable', '--wait']") == 2, out
    assert "=== run 1 has failed, with exit status 1" in out and "run 0 has failed" not in out
    for number, seed in enumerate((2, 3)):
        text = (tmp_path / "s" / str(number) / "script").read_text()
        assert f"    seed={seed} \\\n" in text and "    cluster=slurm \\\n" in text
        assert "#SBATCH --nodes=2\n" in text and "#SBATCH --signal=USR1@120\n" in text and "hydra.mode=RUN" in text
        assert json.loads((tmp_path / "s" / str(number) / "results.json").read_text())["metrics"] == {"bits": seed / 2}


def test_without_sbatch_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = sweep.ClusterConfig(name=sweep.ClusterName.slurm)
    with pytest.raises(ConfigError, match="sbatch: expected the command on PATH, .* drop cluster=slurm"):
        sweep.submit_job(cluster, ["seed=1"], tmp_path)


def test_a_package_that_a_sweep_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep.check_packages(["hydra/launcher=processes", "hparams_search=grid"])
    with pytest.raises(ConfigError, match=r"hydra/launcher=submitit_slurm: .* Drop hydra/launcher=submitit_slurm\."):
        sweep.check_packages(["--multirun", "hydra/launcher=submitit_slurm"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-zero\[search\]'"):
        sweep.check_packages(["hparams_search=optuna"])
