"""What is shipped: a wheel that works without the repository, bounds that are true, no names of machines, images."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lightning_zero.__main__ as entry_point
from tests.harness import ROOT, run_command

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
TEXT_FILES = ["pyproject.toml", "Makefile", "README.md", ".ci/run", ".pre-commit-config.yaml"]


@pytest.mark.full
def test_a_python_without_the_dependencies_is_told_what_to_do() -> None:
    ended = run_command("python", "-S", "-m", "lightning_zero.plan")  # -S: without the installed packages
    assert ended.returncode != 0
    last = ended.stderr.splitlines()[-1]
    assert "lightning_zero needs torch," in last and "source .venv/bin/activate" in last


@pytest.mark.parametrize(("arguments", "called"), [
    (["plan", "model.n_layer=3"], "lightning_zero.app.plan"),
    (["train", "seed=1"], "lightning_zero.app.train"),
    (["seed=1"], "lightning_zero.app.train"),  # as Lightning starts other ranks
])  # fmt: skip
def test_the_command_calls_its_part(arguments: list[str], called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROJECT["project"]["scripts"] == {"lightning-zero": "lightning_zero.__main__:main"}
    found: list[list[str]] = []
    monkeypatch.setattr(called.replace("app.", "") + ".main", lambda: found.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["lightning-zero", *arguments])
    entry_point.main()
    assert found == [[a for a in arguments if "=" in a]]


def test_mistakes_of_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[bool] = []
    monkeypatch.setattr("lightning_zero.train.main", lambda: called.append(True))
    cases = (([], "2", "\n  plan "), (["--help"], "0", "\n  plan "), (["checkpoint", "nothing"], "2", "error"))
    cases += ((["trian", "seed=1"], "2", "error: trian: "), (["wrong"], "2", "A setting is written key=value"))
    for arguments, code, said in cases:
        monkeypatch.setattr(sys, "argv", ["lightning-zero", *arguments])
        with pytest.raises(SystemExit, match=code):
            entry_point.main()
        shown = capsys.readouterr()
        assert said in shown.out + shown.err and ("Did you mean train?" in shown.err) == ("trian" in arguments)
    assert not called
    monkeypatch.setattr(sys, "argv", ["lightning-zero"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    entry_point.main()
    assert called == [True]


def test_every_dependency_is_within_its_bounds() -> None:
    """The tests run on these very versions, so that a lower bound above them would be untrue."""
    extras = PROJECT["project"]["optional-dependencies"]["test"]
    for text in PROJECT["project"]["dependencies"] + extras:
        requirement = Requirement(text)
        installed = Version(importlib.metadata.version(requirement.name)).base_version
        assert requirement.specifier.contains(installed), f"{text}: {installed} is installed"
        assert any(s.operator == ">=" for s in requirement.specifier), f"{text} has no lower bound"


# Where they are missing, a sentence says what for.
OPTIONAL = {"matplotlib", "transformers", "datasets", "wandb", "torchao"}


def test_everything_that_is_imported_is_a_dependency() -> None:
    known = {Requirement(t).name.replace("-", "_").partition("_core")[0] for t in PROJECT["project"]["dependencies"]}
    parts_of_lightning = {"lightning_utilities", "lightning_fabric", "pytorch_lightning"}
    known |= {"lightning_zero", *parts_of_lightning, *sys.stdlib_module_names}
    imported: dict[str, str] = {}
    for file in [*(ROOT / "lightning_zero").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in (module.partition(".")[0] for module in modules if module is not None):
                if name not in OPTIONAL or node.col_offset == 0:  # those only inside of functions
                    imported.setdefault(name, str(file))
    assert {name: file for name, file in imported.items() if name not in known} == {}


def test_ci_runs_both_tiers_in_its_time() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text, others = script.read_text(), len(PYTHONS) - 1
    limits = re.findall(r"^ *(?:within|other \S+) (\d+) (\S+)", text, re.MULTILINE)
    expected = ["lint", "test", "test", "smoke", "test-extras", "test-s3", "test-cuda", "image-test"]
    assert [target for _, target in limits] == expected
    times = [others - 1 if target == "smoke" else 1 for _, target in limits]
    seconds = re.findall(r"timeout (\d+)", text)
    minutes = sum(int(minutes) * times for (minutes, _), times in zip(limits, times, strict=True))
    assert 60 * minutes + sum(map(int, seconds)) <= 80 * 60
    assert text.splitlines()[-2] == "left=$((85 - SECONDS / 60))"  # for the cases of the other tier
    assert text.splitlines()[-1].startswith("within $left test-full ")


def test_python_is_one_of_those_that_are_promised() -> None:
    """In pyproject.toml, whose list .ci/run reads, and in the README."""
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}," in (ROOT / "README.md").read_text()


def test_make_targets_are_there_and_install_by_themselves() -> None:
    targets = ("train", "smoke", "test", "test-full", "test-slurm", "bench", "bench-checkpoint", "lint", "clean")
    done = run_command("make", "-n", "VENV=no-such-venv", *targets, "ARGS=seed=7", code=0)
    parts = ["-m venv no-such-venv", "-m lightning_zero.train seed=7", "-m pytest", "tests/slurm/lab.sh install"]
    parts += ["-e '.[test]'", "into no-such-venv: about", "-m benchmarks.bench", "-m benchmarks.checkpoint"]
    assert [part for part in parts if part not in done.stdout] == []


@pytest.mark.parametrize(("variables", "expected"), [
    ([], "torch==2.13.0"),
    (["TORCH_VERSION=2.12.0"], "torch==2.12.0"),
    (["TORCH_INDEX_URL=file:///wheels"], "--extra-index-url file:///wheels"),
    (["GPU=yes"], "install --quiet --disable-pip-version-check  -e"),
])  # fmt: skip
def test_which_torch_is_installed(variables: list[str], expected: str) -> None:
    given = variables if any(v.startswith("GPU") for v in variables) else ["GPU=", *variables]
    done = run_command("make", "-n", "VENV=no-such-venv", "install", *given)
    assert expected in done.stdout, done.stdout + done.stderr


def test_no_names_of_machines_or_indexes() -> None:
    for file in [ROOT / ".dockerignore", *(ROOT / "docker").glob("*.*")]:
        assert not re.search(r"https?://", file.read_text()), file
    for name in TEXT_FILES:
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://(?!download\.pytorch\.org/whl/cpu)", text), name
        assert not re.search(r"(?<![\w.])/(opt|root|home|work|tmp)/", text), name


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution and the wheel that is made of it. Built from a copy: setuptools leaves a
    build folder, whose old files would go into the next wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("lightning_zero", "conf", "hydra_plugins", "tests", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = f"import os; from setuptools.build_meta import build_sdist; os.chdir({str(source)!r}); build_sdist('..')"
    run_command("python", "-c", build, timeout=250, code=0)
    pip = ("python", "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", folder)
    run_command(*pip, next(folder.glob("*.tar.gz")), timeout=250, code=0)
    return folder


@pytest.fixture
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.mark.full
def test_what_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"lightning_zero/conf/{f.relative_to(ROOT / 'conf')}" for f in (ROOT / "conf").rglob("*.yaml")}
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as sources:
        inside = {member.name.partition("/")[2] for member in sources if member.isfile()}
    for kind in (names, inside):
        assert {name for name in kind if name.endswith(".yaml") and name.startswith("lightning_zero")} == shipped
    assert {"lightning_zero/py.typed", "hydra_plugins/lightning_zero_plugin/__init__.py"} <= names
    assert "hydra_plugins/__init__.py" not in names  # it would hide the plugins of others
    tops = {n.split("/")[0] for n in names if ".dist-info/" not in n}
    assert tops == {"lightning_zero", "hydra_plugins"}
    assert any(n.endswith("LICENSE") for n in names)


@pytest.mark.full
def test_the_wheel_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment, which sees the dependencies of this one by a path file, and not the repository."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # path files in there are not read
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [str(python), *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel))
    where = call("-c", "import lightning_zero, hydra_plugins.lightning_zero_plugin as p; print(p.__file__)")
    assert where.startswith(str(site))
    assert "n_layer: 5" in call("-m", "lightning_zero.train", "--cfg", "job", "model.n_layer=5")
    small = ("experiment=tiny", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=3")
    assert "validation bits per byte: " in call("-m", "lightning_zero.train", *small, "hydra.run.dir=run")
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    plugins = "from importlib.metadata import entry_points; print(entry_points(group='hydra.plugins'))"
    assert "hydra_plugins.lightning_zero_plugin" in call("-c", plugins)


DOCKER = ROOT / "docker"
PINS = {
    r.name: r
    for line in (DOCKER / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for r in [Requirement(line)]
}


def version(name: str) -> str:
    (specifier,) = PINS[name].specifier
    assert specifier.operator == "==", f"{name} is not pinned"
    assert "*" not in specifier.version
    return specifier.version


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_pins_are_exact_and_within_the_bounds_of_the_project() -> None:
    assert all(version(name) for name in PINS)
    for text in PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]:
        assert Requirement(text).specifier.contains(version(Requirement(text).name)), text
    assert f"torch=={version('torch')}" in (ROOT / "Makefile").read_text()


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_user_is_not_root_and_owns_nothing_that_is_copied(kind: str) -> None:
    text = (DOCKER / f"Dockerfile.{kind}").read_text()
    image = text[text.rindex("\nFROM ") :]
    assert all(int(number) > 0 for number in re.findall(r"^ARG [UG]ID=(\d+)$", image, re.MULTILINE))
    assert re.findall(r"^USER (\S+)$", image, re.MULTILINE) == ["${UID}:${GID}"]
    assert "--chown" not in image and image.index("\nUSER") > max(image.rindex("\nRUN"), image.rindex("\nCOPY"))


# -- the entry point ---------------------------------------------------------------------------------------------------


@pytest.fixture
def enter(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
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
        command = ["sh", str(DOCKER / "entrypoint.sh"), *arguments]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    return call


@pytest.mark.full
@pytest.mark.parametrize("arguments", [(), ("experiment=tiny", "data.path=a b"), ("+a=1",), ("~logger",), ("tipo",)])
def test_overrides_go_to_the_main_job(enter: Any, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = enter(*arguments)
    words = " ".join(("-m", "lightning_zero", *arguments))
    assert done.stdout.splitlines()[0] == f"main job: {words} in {tmp_path}/runs"
    assert done.returncode == 7, "the exit code is that of the main job"
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.full
def test_a_folder_that_cannot_be_written_is_refused_where_one_is_needed(enter: Any, tmp_path: Path) -> None:
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


@pytest.mark.full
@pytest.mark.parametrize("home", ["/proc/self", "/no/such", ""])
def test_a_user_without_a_home_gets_one(enter: Any, tmp_path: Path, home: str) -> None:
    done = enter(HOME=home, TMPDIR=str(tmp_path))
    made = tmp_path / f"lightning_zero-{os.getuid()}"
    assert done.stdout.splitlines()[1] == f"home: {made}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    done = enter(HOME=home, TMPDIR="/no/scratch")
    assert done.stdout.splitlines()[1] == f"home: /tmp/lightning_zero-{os.getuid()}"


@pytest.mark.full
def test_runs_go_where_the_environment_says(tmp_path: Path) -> None:
    """What the entry point relies on; ranks of one torchrun share a folder."""
    command = ("python", "-m", "lightning_zero.train", "--cfg", "hydra", "--resolve")
    done = run_command(*command, LIGHTNING_ZERO_RUNS=tmp_path / "runs", TORCHELASTIC_RUN_ID="abc")
    config = yaml.safe_load(done.stdout)["hydra"]
    assert Path(config["run"]["dir"]) == tmp_path / "runs" / "train" / "torchrun-abc"
    assert Path(config["sweep"]["dir"]).parent == tmp_path / "runs" / "sweep"
