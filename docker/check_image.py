"""Builds the CPU image and tries it: ``make image-test``.

With Docker where its engine answers. Elsewhere with buildah, without any registry, on a base that debootstrap makes: it
is kept in the storage of buildah (``buildah rmi localhost/lightning-zero-base:bookworm`` removes it), and as root, what
is missing of these programs is installed. Containers get no network but the loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import image

SUITE = "bookworm"  # of Debian: has Python 3.11
BASE = f"localhost/{image.NAME}-base:{SUITE}"
BASE_PACKAGES = "python3,python3-venv,ca-certificates,tini"
TOOLS = {"buildah": "buildah", "crun": "crun", "debootstrap": "debootstrap", "ip": "iproute2"}  # program -> package
TAG = f"{image.NAME}:test"
USER, STRANGER = 1000, 4321
TIMEOUT_S = 280
TINY = ("experiment=tiny", "trainer.max_steps=8", "trainer.enable_progress_bar=false")
# In a namespace of its own: what would fetch something fails.
OFFLINE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
# What is written last can be lost on its way through buildah (seen on a busy machine).
INTO_FILES = ("sh", "-c", 'exec "$@" > /output/stdout 2> /output/stderr', "sh")

# Starts a program and ends it when it has written a checkpoint.
STOP = (
    '"$@" & job=$!; until [ -n "$(find /runs -name "step-*.ckpt")" ] || ! kill -0 $job; do sleep 0.2; done; '
    "kill -TERM $job; wait $job"
)

PRINT_VERSIONS = (
    "from importlib.metadata import distributions as d; import json; "
    "print(json.dumps({x.metadata['Name'].lower().replace('_', '-'): x.version for x in d()}))"
)
COUNT_SETTINGS = (
    "import lightning_zero.conf as c; from pathlib import Path; print(len([*Path(c.__file__).parent.rglob('*.yaml')]))"
)


def install_tools() -> None:
    """What the build needs where there is no Docker.

    Raises:
        image.Refusal: it is not there, and this user cannot put it there.
    """
    if os.geteuid() != 0:
        raise image.Refusal(
            f"expected Docker with its engine running, or root, whom debootstrap needs; found user {os.geteuid()} and "
            "no engine. Start Docker, or run this as root."
        )
    missing = sorted(package for program, package in TOOLS.items() if shutil.which(program, path=_path()) is None)
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise image.Refusal(
            f"expected Docker with its engine running, or {', '.join(TOOLS)}; missing: {' '.join(missing)}. "
            "Install them."
        )
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = ("-o", "DPkg::Lock::Timeout=300")
    image.call(["apt-get", *wait, "update", "-qq"], env)
    image.call(["apt-get", *wait, "install", "-y", "-qq", "--no-install-recommends", *missing], env)


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def make_base(engine_env: dict[str, str]) -> None:
    """An image of a small Debian with Python, from its packages; kept."""
    if subprocess.run(["buildah", "inspect", "--type", "image", BASE], env=engine_env, capture_output=True).returncode:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            root = f"{folder}/root"
            image.call(["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", SUITE, root], engine_env)
            shutil.rmtree(f"{root}/var/cache/apt/archives", ignore_errors=True)
            shutil.rmtree(f"{root}/var/lib/apt/lists", ignore_errors=True)
            tar = ["tar", "--create", "--numeric-owner", f"--file={folder}/base.tar", f"--directory={root}", "."]
            image.call(tar, engine_env)
            shutil.rmtree(root)
            Path(folder, "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
            image.call(["buildah", "bud", "--format", "docker", "--tag", BASE, folder], engine_env)


class Containers:
    """Runs an image without a network; with buildah, the entry point is read from the image."""

    def __init__(self, engine: str, env: dict[str, str]) -> None:
        self.engine = engine
        self.env = env
        if engine == "buildah":
            self.container = self._ask("buildah", "from", "--pull-never", TAG)
            self.config = json.loads(self._ask("buildah", "inspect", "--type", "image", TAG))["Docker"]["config"]
        else:
            self.config = json.loads(self._ask("docker", "image", "inspect", TAG))[0]["Config"]

    def nbytes(self) -> int:
        if self.engine == "docker":
            return int(json.loads(self._ask("docker", "image", "inspect", TAG))[0]["Size"])
        mount = self._ask("buildah", "mount", self.container)
        size = self._ask("du", "--summarize", "--bytes", mount).split()[0]
        self._ask("buildah", "umount", self.container)
        return int(size)

    def _ask(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True).stdout.strip()

    def run(
        self, *arguments: str, runs: Path | None = None, user: int | None = None, bare: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """
        Args:
            bare: without the entry point, and where the engine can, with nothing of the image to write to.
        """
        mounts = ["--volume", f"{runs}:/runs"] if runs else []
        users = ["--user", f"{user}:{user}"] if user is not None else []
        if self.engine == "docker":
            command = ["docker", "run", "--rm", "--network", "none", "--shm-size", "1g", *mounts, *users]
            if bare:
                command += ["--read-only", "--tmpfs", "/tmp", "--entrypoint", "env"]
            command += [TAG, *arguments]
            return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=TIMEOUT_S)
        with tempfile.TemporaryDirectory() as name:
            files = [Path(name, "stdout"), Path(name, "stderr")]
            for file in files:
                file.touch()
                file.chmod(0o666)
            Path(name).chmod(0o755)
            command = [*OFFLINE, "buildah", "run", *mounts, *users, "--volume", f"{name}:/output", self.container, "--"]
            command += [*INTO_FILES, *(["env"] if bare else self.config["Entrypoint"]), *arguments]
            done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=TIMEOUT_S)
            out, err = (file.read_text() for file in files)
        return subprocess.CompletedProcess(command, done.returncode, out, err + done.stderr)

    def close(self, keep: bool) -> None:
        if self.engine == "buildah":
            self._ask("buildah", "rm", self.container)
        if not keep:
            self._ask(*(("buildah", "rmi", TAG) if self.engine == "buildah" else ("docker", "rmi", TAG)))


class Checks:
    """Prints one line for each and counts those that fail."""

    def __init__(self) -> None:
        self.failed = 0
        self._start = time.monotonic()

    def expect(self, what: str, holds: object, seen: object = "") -> None:
        now = time.monotonic()
        print(f"{'ok  ' if holds else 'FAIL'} {what} ({now - self._start:.1f} s)", flush=True)
        self._start = now
        if not holds:
            self.failed += 1
            print(f"     seen: {seen}", flush=True)


@contextlib.contextmanager
def folder_for_runs(containers: Containers, mode: int = 0o777) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name) / "runs"
        folder.mkdir()
        folder.chmod(mode)
        yield folder
        containers.run("find", "/runs", "-mindepth", "1", "-delete", runs=folder)  # these files are not ours to remove


def last_lines(done: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def check_words(containers: Containers, checks: Checks) -> None:
    """What is answered without training."""
    done = containers.run("--help")
    known = done.returncode == 0 and "\n  checkpoint " in done.stdout
    checks.expect("--help shows the commands, without a folder", known, last_lines(done))
    done = containers.run("train", "--help")
    known = done.returncode == 0 and "zero/stage" in done.stdout
    checks.expect("train --help shows the groups, without a folder", known, last_lines(done))
    with folder_for_runs(containers) as runs:
        for typo, said in (
            ("experimnt=tiny", "experimnt"),
            ("experiment=tinny", "tinny"),
            ("trainer.max_step=3", "max_step"),
            ("zero.prefetch_bytes=-1", "error: zero.prefetch_bytes: expected"),
            ("tiny", "tiny"),
        ):
            done = containers.run(typo, runs=runs)
            good = done.returncode == 2 and said in done.stdout + done.stderr and "Traceback" not in done.stderr
            checks.expect(f"{typo} ends with 2", good, last_lines(done))
    with folder_for_runs(containers, mode=0o555) as runs:
        done = containers.run(*TINY, runs=runs)
        good = done.returncode == 2 and done.stderr.startswith(
            "error: /runs: expected a folder that user 1000:1000 can"
        )
        checks.expect("a folder that cannot be written ends with 2", good, last_lines(done))


def check_contents(containers: Containers, checks: Checks) -> None:
    """Who runs, what is installed."""
    done = containers.run("id", "-u")
    checks.expect("another program runs, as the user of the image", done.stdout.strip() == str(USER), last_lines(done))
    done = containers.run("python", "-c", PRINT_VERSIONS)
    found = json.loads(done.stdout)
    del found["lightning-zero"]
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (image.ROOT / "docker/constraints.txt").read_text(), re.MULTILINE))
    others = {name: version for name, version in found.items() if pins.get(name) != version.partition("+")[0]}
    checks.expect(f"all {len(found)} packages are those of constraints.txt", found and not others, others)
    done = containers.run("python", "-c", COUNT_SETTINGS)
    shipped = sum(1 for _ in (image.ROOT / "conf").rglob("*.yaml"))
    checks.expect(f"all {shipped} files of conf are there", done.stdout.strip() == str(shipped), last_lines(done))
    done = containers.run("sh", "-c", "command -v gcc git pip; find / -xdev -user 1000 ! -path '/home/*' 2> /dev/null")
    left = [line for line in done.stdout.split() if line not in ("/runs", "/usr/bin/pip", "/usr/local/bin/pip")]
    checks.expect("no tools of the build, and nothing that its user could change", not left, left[:20])
    done = containers.run(
        "python", "-m", "lightning_zero.plan", *TINY, "machine.gpus=2", "machine.gpu_memory=80GB", "json=true"
    )
    checks.expect("the memory plan runs", done.returncode == 0, last_lines(done))


def check_training(containers: Containers, checks: Checks, user: int | None) -> None:
    """The main job for some steps: its end, its files, their owner."""
    owner = USER if user is None else user
    with folder_for_runs(containers) as runs:
        done = containers.run(*TINY, runs=runs, user=user)
        found = re.findall(r"^validation bits per byte: (\d\.\d+)$", done.stdout, re.MULTILINE)
        checks.expect(
            f"the main job as user {owner}: bits per byte {found}", done.returncode == 0 and found, last_lines(done)
        )
        files = sorted(runs.rglob("*"))
        names = {re.sub(r"^train/[^/]+/", "", f.relative_to(runs).as_posix()) for f in files}
        wanted = {"csv/metrics.csv", "checkpoints/last.ckpt", "checkpoints/step-8.ckpt", ".hydra/config.yaml"}
        checks.expect(
            f"{len(files)} files below /runs/train/<time>", wanted <= names and len(list(runs.iterdir())) == 1, names
        )
        owners = {(f.lstat().st_uid, f.lstat().st_gid) for f in files}
        checks.expect(f"their owner is {owners}", owners == {(owner, owner)}, owners)
        if user is None and found:
            checkpoint = next(f for f in files if f.name == "last.ckpt").relative_to(runs)
            more = (*TINY, "trainer.max_steps=10", f"ckpt_path=/runs/{checkpoint}")
            done = containers.run(*more, runs=runs)
            steps = [steps_logged(f.parent.parent / "csv" / "metrics.csv") for f in runs.rglob("step-10.ckpt")]
            good = done.returncode == 0 and steps == [[8, 9]]
            checks.expect("another container resumes from its checkpoint", good, f"{steps}\n{last_lines(done)}")


def check_clusters(containers: Containers, checks: Checks) -> None:
    """What tools of clusters make of an image: pyxis and ``apptainer exec`` start no entry point, enroot starts a login
    shell, all of them have another user, and an environment of the host that means nothing here.
    """
    host = ("PYTHONPATH=/no/such", "TMPDIR=/no/such", "USER=me", "PATH=/usr/bin:/bin")
    with folder_for_runs(containers) as runs:
        call = f"cd /runs && exec python -m lightning_zero.train {' '.join(TINY)} hydra.run.dir=job"
        done = containers.run(*host, "bash", "-lc", call, runs=runs, user=STRANGER, bare=True)
        good = done.returncode == 0 and (runs / "job" / "checkpoints" / "last.ckpt").exists()
        checks.expect("the main job of a login shell, without the entry point", good, last_lines(done))
    with folder_for_runs(containers) as runs:
        words = ("HOME=/no/such", "/usr/local/bin/lightning-zero", *TINY)
        done = containers.run(*host, *words, runs=runs, user=STRANGER, bare=True)
        good = done.returncode == 0 and "validation bits per byte" in done.stdout
        checks.expect("the entry point without a home folder and a PATH", good, last_lines(done))


def check_stop(containers: Containers, checks: Checks) -> None:
    """``docker stop``: tini hands SIGTERM on to the main job, which saves and leaves."""
    with folder_for_runs(containers) as runs:
        more = ("trainer.max_steps=1000000", "+callbacks.checkpoint.every_n_train_steps=5")
        done = containers.run(
            "sh", "-c", STOP, "sh", *containers.config["Entrypoint"], *TINY, *more, runs=runs, bare=True
        )
        saved = [f.name for f in runs.rglob("hpc_ckpt_*.ckpt")]
        good = done.returncode == 143 and saved == ["hpc_ckpt_1.ckpt"] and "Traceback" not in done.stderr
        checks.expect("a run that is stopped saves first and ends with 143", good, f"{saved}\n{last_lines(done)}")


def steps_logged(file: Path) -> list[int]:
    with file.open() as lines:
        return sorted(int(row["step"]) for row in csv.DictReader(lines) if row["train_loss"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Build the CPU image and try it.")
    parser.add_argument("--base", help="image to build on; default: the Dockerfile's, or one made here without Docker")
    parser.add_argument("--torch-index-url", help="an index with builds of torch")
    parser.add_argument("--keep", action="store_true", help=f"do not remove the image {TAG} at the end")
    given = parser.parse_args(arguments)
    engine = "docker" if image.docker_answers() else "buildah"
    if engine == "buildah":
        install_tools()
    env = {**image.environment(engine), "PATH": _path()}
    base = given.base
    if engine == "buildah" and base is None:
        make_base(env)
        base = BASE
    took_s = image.build("cpu", TAG, engine=engine, base=base, torch_index_url=given.torch_index_url)
    containers = Containers(engine, env)
    checks = Checks()
    try:
        print(f"built with {engine} in {took_s:.0f} s, {containers.nbytes() / 1e6:.0f} MB", flush=True)
        check_words(containers, checks)
        check_contents(containers, checks)
        check_training(containers, checks, None)
        check_training(containers, checks, STRANGER)
        check_clusters(containers, checks)
        check_stop(containers, checks)
    finally:
        containers.close(given.keep)
    if checks.failed:
        sys.exit(f"{checks.failed} checks failed")


if __name__ == "__main__":
    image.report_refusals(main)
