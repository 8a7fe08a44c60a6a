"""Print the facts about this machine that a bug report needs, as text or JSON; ``--check`` tests the machine.

Environment variables are shown only if their prefix is harmless and their name does not sound like a secret.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_zero.planning.choose import human_bytes
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.limits import available_cpus, available_host_memory, lines_of

VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|CUDA|NVIDIA_VISIBLE|UCX|FI|KMP|LIGHTNING_ZERO)_\w+"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|NODE_RANK|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)|LD_PRELOAD|PYTHONHASHSEED"
    r"|SLURM_(JOB_ID|JOB_NUM_NODES|NNODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK|GPUS_ON_NODE|GPUS_PER_NODE|MEM_PER_NODE"
    r"|PROCID|LOCALID|NODEID|RESTART_COUNT|VERSION|CPU_BIND|STEP_ID)"
)
SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")  # user and password
PROBE_NBYTES = 256 << 20

Facts = dict[str, Any]


def facts(disk: str | None = None) -> dict[str, Facts]:
    """Return facts about this machine, by section. A section that fails holds its error instead. ``disk``: a folder
    whose speed is measured; None: measure none."""
    sections: dict[str, Callable[[], Facts]] = {
        "torch": _torch,
        "packages": _packages,
        "host": _host,
        "GPUs": _gpus,
        "network": _network,
        "environment": lambda: variables(os.environ),
    }
    if disk is not None:
        sections["disk"] = lambda: _disk(disk)
    found: dict[str, Facts] = {}
    for name, section in sections.items():
        try:
            found[name] = section()
        except Exception as error:  # the report is for broken machines too
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
    return found


def _torch() -> Facts:
    """Return torch's own report (``collect_env``), without processor flags and package lists."""
    from torch.utils.collect_env import get_env_info

    found = get_env_info()._asdict()
    models = re.findall(r"Model name: *(.+)", str(found.pop("cpu_info")))
    lists = ("pip_version", "pip_packages", "conda_packages")
    return {k: v for k, v in found.items() if v not in (None, "N/A") and k not in lists} | {"cpu": ", ".join(models)}


def _packages() -> Facts:
    found = {}
    for requirement in ["lightning-zero", *(importlib.metadata.requires("lightning-zero") or ())]:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _host() -> Facts:
    import psutil

    from lightning_zero.ranks.started_by import launched

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    place = launched()
    found: Facts = {
        "cores": os.cpu_count(),
        "cores for this process": available_cpus(),
        "memory": human_bytes(psutil.virtual_memory().total),
        "memory for this process": human_bytes(available_host_memory()),
        "may be locked": "unlimited" if soft == resource.RLIM_INFINITY else human_bytes(soft),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "in a container": Path("/.dockerenv").exists() or "container" in os.environ,
        "started by": place.by if place is not None else "nobody",
        "SLURM": next(iter(_lines_of(["sbatch", "--version"])), "none"),
    }
    if os.path.isdir("/dev/shm"):
        found["/dev/shm free"] = human_bytes(shutil.disk_usage("/dev/shm").free)
    return found


def _gpus() -> Facts:
    """Describe the GPUs and their links, and measure transfers between pinned memory and the first GPU."""
    import torch

    from lightning_zero.device import accelerator_of
    from lightning_zero.device.cuda import default_device, gpu_count, nccl_version

    found: Facts = {"count": gpu_count()}
    query = "index,name,memory.total,driver_version,compute_cap,pcie.link.gen.current,pcie.link.width.current"
    for line in _lines_of(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]):
        number, _, rest = line.partition(",")
        found[f"GPU {number.strip()}"] = rest.strip()
    if links := _lines_of(["nvidia-smi", "topo", "-m"]):
        found["links"] = links
    if gpu_count():
        found["NCCL"] = ".".join(map(str, nccl_version()))
        accelerator = accelerator_of(default_device())
        host = accelerator.host_memory(torch.Size([PROBE_NBYTES]), torch.uint8)
        device = torch.empty(PROBE_NBYTES, dtype=torch.uint8, device=accelerator.device)
        for name, target, source in (("to the device", device, host), ("to the host", host, device)):

            def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source, non_blocking=True)
                accelerator.synchronize()

            found[name] = _rate(copy)
    return found


def _network() -> Facts:
    import psutil

    found: Facts = {"host name resolves": False}
    with contextlib.suppress(OSError):
        found["host name resolves"] = bool(socket.getaddrinfo(socket.gethostname(), None))
    for name, state in sorted(psutil.net_if_stats().items()):
        if name != "lo" and state.isup:
            found[name] = f"{state.speed} Mbit/s, mtu {state.mtu}" if state.speed > 0 else f"mtu {state.mtu}"
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        rate, state_of = ("".join(lines_of(port / name)) for name in ("rate", "state"))
        found[f"InfiniBand {port.parent.parent.name} port {port.name}"] = f"{rate}, {state_of}"
    return found


def _disk(folder: str) -> Facts:
    """Return the disk space of ``folder``, and how fast offload writes and reads files there."""
    import torch

    from lightning_zero.tiers.extents import Wanted
    from lightning_zero.tiers.nvme import NvmeTier

    usage = shutil.disk_usage(folder)
    found: Facts = {"folder": folder, "free": human_bytes(usage.free), "of": human_bytes(usage.total)}
    with tempfile.TemporaryDirectory(dir=folder, prefix="lightning_zero-env-") as place:
        tier = NvmeTier(place, rank=0)
        try:
            (extent,) = tier.reserve([Wanted("the disk's rate", PROBE_NBYTES // 4, torch.float32)])
            values = torch.ones(PROBE_NBYTES // 4)
            found["write"] = _rate(lambda: tier.stage_out(extent, values).result())
            found["read"] = _rate(lambda: tier.stage_in(extent, values).result())
        finally:
            tier.close()
    return found


def variables(environ: Mapping[str, str]) -> Facts:
    """Return the variables in ``environ`` that affect a run. Leave out secrets, and users and passwords in URLs."""
    return {
        name: _IN_URL.sub("", value)
        for name, value in sorted(environ.items())
        if VARIABLES.fullmatch(name) and not SECRETS.search(name)
    }


def _rate(move: Callable[[], Any]) -> str:
    """Call ``move``, which transfers ``PROBE_NBYTES`` bytes, a few times. Return the best rate as text, in GB/s."""
    move()
    seconds = min(timeit.repeat(move, repeat=3, number=1))
    return f"{PROBE_NBYTES / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def _lines_of(command: list[str]) -> list[str]:
    """Run a command and return the lines of its output that are not blank; an empty list if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


def text_of(found: Mapping[str, Facts]) -> str:
    """Return a text for a bug report, with all sections in ``found``, which :func:`facts` returned."""
    lines = []
    for section, entries in found.items():
        lines.append(section)
        width = max((len(name) for name in entries), default=0)
        for name, value in entries.items():
            if isinstance(value, list):
                lines += [f"  {name}", *(f"    {line}" for line in value)]
            else:
                lines.append(f"  {name:<{width}}  {value}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run ``python -m lightning_zero.env``. Without ``--check`` the exit code is 0 even if a section fails."""
    parser = argparse.ArgumentParser(prog="python -m lightning_zero.env", description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--disk", metavar="FOLDER", help="measure this folder's disk (default: $LIGHTNING_ZERO_NVME_PATH)"
    )
    parser.add_argument(
        "--check", metavar="TEXT", nargs="?", const="",
        help="train a small model at every stage and with every offload, or with those whose names contain TEXT",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if given.disk is not None and not os.path.isdir(given.disk):
        parser.error(str(ConfigError(f"--disk: expected a folder, got {given.disk!r}.")))
    disk = given.disk or os.environ.get("LIGHTNING_ZERO_NVME_PATH")
    if given.check is not None:
        from lightning_zero.app.check import check

        check(given.check, disk)
        return
    found = facts(disk)
    print(json.dumps(found, indent=1) if given.json else text_of(found))
