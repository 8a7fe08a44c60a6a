"""``python -m lightning_zero.env``: versions, devices, links, memory, disk, network and cluster, as text or JSON.

Environment variables are named here one by one, or by prefixes that hold no secrets, and still those whose names sound
like a secret are left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_zero.config import ConfigError
from lightning_zero.tiers.limits import available_cpus, available_host_memory, lines_of
from lightning_zero.trainer.summary import human_bytes

PACKAGES = (
    "lightning-zero", "torch", "lightning", "pytorch-lightning", "torchmetrics", "hydra-core", "omegaconf", "numpy",
    "safetensors", "psutil", "rich", "transformers", "peft", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "submitit", "hydra-submitit-launcher", "tensorboard", "wandb", "mlflow",
)  # fmt: skip
VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|CUDA|NVIDIA_VISIBLE|UCX|FI|KMP|LIGHTNING_ZERO)_\w+"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|NODE_RANK|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)|LD_PRELOAD|PYTHONHASHSEED"
    r"|SLURM_(JOB_ID|JOB_NUM_NODES|NNODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK|GPUS_ON_NODE|GPUS_PER_NODE|MEM_PER_NODE"
    r"|PROCID|LOCALID|NODEID|RESTART_COUNT|VERSION|CPU_BIND|STEP_ID)"
)
SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")  # user and password
DISK_NBYTES = 256 << 20
COPY_NBYTES = 256 << 20
COMMAND_S = 10.0

Facts = dict[str, Any]


def facts(disk: str | None = None) -> dict[str, Facts]:
    """All sections. One that fails says why, and leaves the others as they are.

    Args:
        disk: a folder whose disk is measured; None: none is.
    """
    sections: dict[str, Callable[[], Facts]] = {
        "versions": _versions,
        "system": _system,
        "memory": _memory,
        "devices": _devices,
        "network": _network,
        "cluster": _cluster,
        "environment": lambda: variables(os.environ),
    }
    if disk is not None:
        sections["disk"] = lambda: _disk(disk)
    found: dict[str, Facts] = {}
    for name, section in sections.items():
        try:
            found[name] = section()
        except Exception as error:  # a report of a broken machine is what this is for
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
    return found


def _versions() -> Facts:
    found: Facts = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import lightning_zero

    return {"lightning_zero": lightning_zero.__version__, **found}


def _system() -> Facts:
    models = [line.split(":", 1)[1].strip() for line in lines_of(Path("/proc/cpuinfo")) if "model name" in line]
    release = dict(line.split("=", 1) for line in lines_of(Path("/etc/os-release")) if "=" in line)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": release.get("PRETTY_NAME", "").strip('"'),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "cores for this process": available_cpus(),
        "C++ compiler": _line_of([os.environ.get("CXX", "c++"), "--version"]),
        "in a container": Path("/.dockerenv").exists() or "container" in os.environ,
    }


def _memory() -> Facts:
    import psutil

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found: Facts = {
        "of the machine": human_bytes(psutil.virtual_memory().total),
        "for this process": human_bytes(available_host_memory()),
        "swap": human_bytes(psutil.swap_memory().total),
        "may be locked": "unlimited" if soft == resource.RLIM_INFINITY else human_bytes(soft),
        "open files": files,
    }
    if os.path.isdir("/dev/shm"):
        found["/dev/shm free"] = human_bytes(shutil.disk_usage("/dev/shm").free)
    import torch

    source = torch.ones(COPY_NBYTES // 4)
    found["copy"] = f"{2 * COPY_NBYTES / _least_s(source.clone) / 1e9:.1f} GB/s read and written"
    return found


def _devices() -> Facts:
    import torch

    from lightning_zero.device.cuda import gpu_count

    found: Facts = {"CUDA of torch": torch.version.cuda or "none", "GPUs": gpu_count()}
    query = "index,name,memory.total,driver_version,compute_cap,pcie.link.gen.current,pcie.link.width.current"
    for line in _lines_of(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]):
        number, _, rest = line.partition(",")
        found[f"GPU {number.strip()}"] = rest.strip()
    if links := _lines_of(["nvidia-smi", "topo", "-m"]):
        found["links"] = links
    if gpu_count():
        found |= _copies()
    found["backends"] = ", ".join(
        name for name in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{name}_available")()
    )
    if found["GPUs"]:
        found["NCCL"] = ".".join(map(str, _nccl_version()))
    return found


def _nccl_version() -> tuple[int, ...]:
    from lightning_zero.device.cuda import nccl_version

    return nccl_version()


def _copies() -> Facts:
    """How fast pinned memory goes to the first GPU and back."""
    import torch

    from lightning_zero.device import accelerator_of
    from lightning_zero.device.cuda import default_device

    accelerator = accelerator_of(default_device())
    host = accelerator.host_memory(torch.Size([COPY_NBYTES]), torch.uint8)
    device = torch.empty(COPY_NBYTES, dtype=torch.uint8, device=accelerator.device)

    def seconds(target: Any, source: Any) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            accelerator.synchronize()

        return _least_s(copy)

    return {
        "to the device": f"{COPY_NBYTES / seconds(device, host) / 1e9:.1f} GB/s",
        "to the host": f"{COPY_NBYTES / seconds(host, device) / 1e9:.1f} GB/s",
    }


def _network() -> Facts:
    import psutil

    found: Facts = {"host name resolves": _resolves()}
    for name, state in sorted(psutil.net_if_stats().items()):
        if name != "lo" and state.isup:
            found[name] = f"{state.speed} Mbit/s, mtu {state.mtu}" if state.speed > 0 else f"mtu {state.mtu}"
    folder = Path("/sys/class/infiniband")
    for port in sorted(folder.glob("*/ports/*")) if folder.is_dir() else []:
        rate, state_of = ("".join(lines_of(port / name)) for name in ("rate", "state"))
        found[f"InfiniBand {port.parent.parent.name} port {port.name}"] = f"{rate}, {state_of}"
    return found


def _resolves() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def _cluster() -> Facts:
    from lightning_zero.ranks.started_by import launched

    place = launched()
    found: Facts = {"started by": place.by if place is not None else "nobody"}
    if shutil.which("sbatch"):
        found["SLURM"] = _line_of(["sbatch", "--version"])
    return found


def _disk(folder: str) -> Facts:
    """How fast an offload to ``folder`` reads and writes, in the way in which it does."""
    import torch

    from lightning_zero.tiers.extents import Wanted
    from lightning_zero.tiers.nvme import NvmeTier

    usage = shutil.disk_usage(folder)
    found: Facts = {"folder": folder, "free": human_bytes(usage.free), "of": human_bytes(usage.total)}
    with tempfile.TemporaryDirectory(dir=folder, prefix="lightning_zero-env-") as place:
        tier = NvmeTier(place, rank=0)
        try:
            (extent,) = tier.reserve([Wanted("the disk's rate", DISK_NBYTES // 4, torch.float32)])
            values = torch.ones(DISK_NBYTES // 4)
            write = _least_s(lambda: tier.stage_out(extent, values).result())
            read = _least_s(lambda: tier.stage_in(extent, values).result())
        finally:
            tier.close()
    return {**found, "write": f"{DISK_NBYTES / write / 1e9:.2f} GB/s", "read": f"{DISK_NBYTES / read / 1e9:.2f} GB/s"}


def variables(environ: Mapping[str, str]) -> Facts:
    """The environment variables that matter to a run, without secrets."""
    return {
        name: _IN_URL.sub("", value)
        for name, value in sorted(environ.items())
        if VARIABLES.fullmatch(name) and not SECRETS.search(name)
    }


def _least_s(act: Callable[[], Any], times: int = 3) -> float:
    act()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        act()
        found.append(time.perf_counter() - begin)
    return max(min(found), 1e-9)


def _lines_of(command: list[str]) -> list[str]:
    """What a command prints; nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


def _line_of(command: list[str]) -> str:
    return next(iter(_lines_of(command)), "none")


def text_of(found: Mapping[str, Facts]) -> str:
    """As text that can be pasted."""
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
    """The command. It ends well on any machine, also where a section fails."""
    parser = argparse.ArgumentParser(prog="python -m lightning_zero.env", description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument(
        "--disk", metavar="FOLDER", help="measure this folder's disk (default: $LIGHTNING_ZERO_NVME_PATH)"
    )
    given = parser.parse_args(arguments)
    disk = given.disk or os.environ.get("LIGHTNING_ZERO_NVME_PATH")
    if given.disk is not None and not os.path.isdir(given.disk):
        parser.error(str(ConfigError(f"--disk: expected a folder, got {given.disk!r}.")))
    found = facts(disk)
    print(json.dumps(found, indent=1) if given.json else text_of(found))
