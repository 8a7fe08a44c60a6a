"""Builds an image: ``make image [KIND=cpu|cuda] [BASE=...] [TAG=...] [TORCH_INDEX_URL=...]``.

With Docker where its engine answers, else with buildah. pip inside the build uses the same indexes as pip outside: what
``pip config list`` shows goes in as arguments of the build. Of the local files that it names, buildah mounts all, and
Docker the certificate.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("cpu", "cuda")
NAME = "lightning-zero"

# Settings of pip that say where packages come from.
PIP_SETTINGS = ("index-url", "extra-index-url", "find-links", "no-index", "cert", "trusted-host")
BUILDAH_DEFAULTS = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}  # what works in a container and as root
DOCKER_DEFAULTS = {"DOCKER_BUILDKIT": "1"}  # of itself before Docker 23


class Refusal(Exception):
    """Something that the user has to change; the message says what."""


@dataclass(frozen=True)
class Source:
    """Where pip finds packages: arguments of the build, and the local paths among them."""

    arguments: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)


def pip_source(listing: str) -> Source:
    """Reads the output of ``pip config list``. The environment comes before files, as with pip itself."""
    values: dict[str, list[str]] = {}
    for line in sorted(listing.splitlines(), key=lambda text: text.startswith(":env:")):
        key, separator, value = line.partition("=")
        name = key.rpartition(".")[2]
        if separator and name in PIP_SETTINGS:
            values[name] = str(ast.literal_eval(value)).split()
    arguments = {f"PIP_{name.replace('-', '_').upper()}": " ".join(words) for name, words in values.items()}
    words = [word.removeprefix("file://") for found in values.values() for word in found]
    # An index refers to files beside itself: its parent is mounted.
    indexes = {w.removeprefix("file://") for n in ("index-url", "extra-index-url") for w in values.get(n, [])}
    paths = [str(Path(w).parent) if w in indexes else w for w in words if w.startswith("/")]
    return Source(arguments, [path for path in dict.fromkeys(paths) if os.path.exists(path)])


def docker_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode == 0


def choose_engine() -> str:
    """``docker`` or ``buildah``.

    Raises:
        Refusal: there is neither.
    """
    if docker_answers():
        return "docker"
    if shutil.which("buildah"):
        return "buildah"
    raise Refusal(
        "expected Docker with its engine running, or buildah; found neither. Start Docker, or install buildah "
        "(apt-get install buildah crun)."
    )


def build_command(
    engine: str, kind: str, tag: str, *, base: str | None, torch_index_url: str | None, source: Source
) -> list[str]:
    arguments = dict(source.arguments)
    command = ["docker", "build"]
    if engine == "buildah":
        command = ["buildah", "bud", "--format", "docker"]
        command += [part for path in source.paths for part in ("--volume", f"{path}:{path}:ro")]
    else:
        # Docker mounts nothing of this machine into a build but a secret; what is left of a setting is the rest of it.
        certificate = arguments.pop("PIP_CERT", "")
        arguments = {key: rest for key, value in arguments.items() if (rest := " ".join(_of_the_network(value)))}
        if os.path.isfile(certificate):
            command += ["--secret", f"id=pip_cert,src={certificate}"]
            arguments["PIP_CERT"] = "/run/secrets/pip_cert"
        unseen = [path for path in source.paths if path != certificate]
        if unseen:
            print(f"note: not seen by this build, which has the network instead: {' '.join(unseen)}", flush=True)
    if base:
        arguments["BASE"] = base
    if torch_index_url:
        arguments["TORCH_INDEX_URL"] = torch_index_url
    command += ["--file", f"docker/Dockerfile.{kind}", "--tag", tag]
    command += [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
    return [*command, "."]


def _of_the_network(words: str) -> list[str]:
    return [word for word in words.split() if not word.removeprefix("file://").startswith("/")]


def environment(engine: str) -> dict[str, str]:
    defaults = DOCKER_DEFAULTS if engine == "docker" else BUILDAH_DEFAULTS if os.geteuid() == 0 else {}
    return {**defaults, **os.environ}


def call(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Runs it from the root of the repository.

    Raises:
        Refusal: it fails; what it printed says why.
    """
    code = subprocess.run(command, cwd=ROOT, env=env).returncode
    if code != 0:
        raise Refusal(f"{' '.join(command[:2])} ended with {code}, see above.")


def build(kind: str, tag: str, *, engine: str, base: str | None = None, torch_index_url: str | None = None) -> float:
    """Builds the image and returns the seconds it took."""
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    source = pip_source(listing.stdout)
    command = build_command(engine, kind, tag, base=base, torch_index_url=torch_index_url, source=source)
    start = time.monotonic()
    call(command, environment(engine))
    return time.monotonic() - start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", help="image to build on; default: the one in the Dockerfile")
    parser.add_argument("--tag", help=f"name of the image; default: {NAME}:KIND")
    parser.add_argument("--torch-index-url", help="an index with builds of torch")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build an image of the main job.")
    parser.add_argument("--kind", choices=KINDS, required=True)
    add_arguments(parser)
    given = parser.parse_args()
    tag = given.tag or f"{NAME}:{given.kind}"
    engine = choose_engine()
    took_s = build(given.kind, tag, engine=engine, base=given.base, torch_index_url=given.torch_index_url)
    print(f"{tag}: built with {engine} in {took_s:.0f} s")


def report_refusals(task: object) -> None:
    """Runs ``task()``; a :class:`Refusal` ends with one sentence and exit code 2."""
    assert callable(task)
    try:
        task()
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    report_refusals(main)
