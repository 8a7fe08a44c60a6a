"""What can be said of the images without building one: versions, users, the entry point."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.harness import ROOT, run_command

pytestmark = pytest.mark.full

FOLDER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = {
    r.name: r
    for line in (FOLDER / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for r in [Requirement(line)]
}


def version(name: str) -> str:
    (specifier,) = PINS[name].specifier
    assert specifier.operator == "==", f"{name} is not pinned"
    assert "*" not in specifier.version
    return specifier.version


# -- versions ----------------------------------------------------------------------------------------------------------


def test_pins_are_exact_and_within_the_bounds_of_the_project() -> None:
    assert all(version(name) for name in PINS)
    for text in PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]:
        assert Requirement(text).specifier.contains(version(Requirement(text).name)), text
    assert f"torch=={version('torch')}" in (ROOT / "constraints-cpu.txt").read_text().splitlines()


def test_every_package_that_is_needed_is_pinned_and_the_pins_agree() -> None:
    """Follows the requirements of the packages that the tests run on."""
    waiting = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = ["", *requirement.extras]
        assert name in PINS, f"{name} is not in docker/constraints.txt"
        assert requirement.specifier.contains(version(name)), f"{requirement}: {version(name)} is pinned"
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a part of the CUDA build
        if Version(found.version).base_version != Version(version(name)).base_version:
            continue  # another version may ask for other packages
        for text in found.requires or []:
            more = Requirement(text)
            wanted = more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in extras)
            if wanted and (name, text) not in seen:
                seen.add((name, text))
                waiting.append(more)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_user_is_not_root_and_owns_nothing_that_is_copied(kind: str) -> None:
    text = (FOLDER / f"Dockerfile.{kind}").read_text()
    image = text[text.rindex("\nFROM ") :]
    assert all(int(number) > 0 for number in re.findall(r"^ARG [UG]ID=(\d+)$", image, re.MULTILINE))
    assert re.findall(r"^USER (\S+)$", image, re.MULTILINE) == ["${UID}:${GID}"]
    assert "--chown" not in image and image.index("\nUSER") > max(image.rindex("\nRUN"), image.rindex("\nCOPY"))


# -- the entry point ---------------------------------------------------------------------------------------------------


@pytest.fixture
def enter(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs the entry point with a ``python`` that prints its arguments and some of its environment."""
    programs, runs = tmp_path / "bin", tmp_path / "runs"
    programs.mkdir()
    runs.mkdir()
    (programs / "python").write_text(
        '#!/bin/sh\necho "main job: $* in $LIGHTNING_ZERO_RUNS"\necho "home: $HOME"\nexit 7\n'
    )
    (programs / "python").chmod(0o755)

    def call(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{programs}:/usr/bin:/bin", "LIGHTNING_ZERO_RUNS": str(runs), "HOME": str(tmp_path), **environ}
        command = ["sh", str(FOLDER / "entrypoint.sh"), *arguments]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    return call


@pytest.mark.parametrize("arguments", [(), ("experiment=tiny", "data.path=a b"), ("+a=1",), ("~logger",), ("tipo",)])
def test_overrides_go_to_the_main_job(enter, tmp_path: Path, arguments: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    done = enter(*arguments)
    words = " ".join(("-m", "lightning_zero", *arguments))
    assert done.stdout.splitlines()[0] == f"main job: {words} in {tmp_path}/runs"
    assert done.returncode == 7, "the exit code is that of the main job"
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_where_one_is_needed(enter, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    nowhere = {"LIGHTNING_ZERO_RUNS": "/proc/self"}  # where root cannot write either
    done = enter("experiment=tiny", **nowhere)
    assert (done.returncode, done.stdout) == (2, "")
    first = done.stderr.splitlines()[0]
    user = f"{os.getuid()}:{os.getgid()}"
    assert first.startswith(f"error: /proc/self: expected a folder that user {user} can write in, got: ")
    assert f"folder of user {user} with mode 555" in first
    assert "--user" in done.stderr
    missing = enter(LIGHTNING_ZERO_RUNS=str(tmp_path / "none"))
    assert missing.returncode == 2 and "No such file or directory. Mount one" in missing.stderr
    for flag in ("--help", "--cfg", "--info=searchpath", "hydra.run.dir=elsewhere"):
        assert enter(flag, **nowhere).returncode == 7
    done = enter("sh", "-c", "echo $LIGHTNING_ZERO_RUNS; exit 3", **nowhere)  # another program
    assert (done.returncode, done.stdout) == (3, "/proc/self\n")


@pytest.mark.parametrize("home", ["/proc/self", "/no/such", ""])
def test_a_user_without_a_home_gets_one(enter, tmp_path: Path, home: str) -> None:  # type: ignore[no-untyped-def]
    done = enter(HOME=home, TMPDIR=str(tmp_path))
    made = tmp_path / f"lightning_zero-{os.getuid()}"
    assert done.stdout.splitlines()[1] == f"home: {made}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    done = enter(HOME=home, TMPDIR="/no/scratch")
    assert done.stdout.splitlines()[1] == f"home: /tmp/lightning_zero-{os.getuid()}"


def test_runs_go_where_the_environment_says(tmp_path: Path) -> None:
    """What the entry point relies on; ranks of one torchrun share a folder."""
    command = ("python", "-m", "lightning_zero.train", "--cfg", "hydra", "--resolve")
    done = run_command(*command, LIGHTNING_ZERO_RUNS=tmp_path / "runs", TORCHELASTIC_RUN_ID="abc")
    config = yaml.safe_load(done.stdout)["hydra"]
    assert Path(config["run"]["dir"]) == tmp_path / "runs" / "train" / "torchrun-abc"
    assert Path(config["sweep"]["dir"]).parent == tmp_path / "runs" / "sweep"
