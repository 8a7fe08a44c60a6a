"""Read how much memory and how many cores this process may still take, by the limits of machine and cgroups."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_host_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process may still take: the minimum of MemAvailable and of limit minus
    usage of its cgroup (v1 or v2) and of each parent cgroup. Page cache counts as available. ``root``: the root of the
    file system, which tests replace."""
    bounds = [_fields(root / "proc/meminfo").get("MemAvailable:", 0) * 1024]
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, mount = ("memory.max", "memory.current", ""), root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names, mount = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), root / "sys/fs/cgroup/memory"
        else:
            continue
        # In a container the path may be the host's while the mount shows only a part. Missing folders are skipped.
        inner = Path(path.lstrip("/"))
        bounds += [left for level in (inner, *inner.parents) if (left := _left(mount / level, *names)) is not None]
    return max(0, min(bounds))


def free_swap() -> int:
    return _fields(Path("/proc/meminfo")).get("SwapFree:", 0) * 1024


def available_cpus(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, by affinity and cgroup quotas (v2). ``root``: the root of
    the file system, which tests replace."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            inner = Path(path.lstrip("/"))
            for level in (inner, *inner.parents):
                quota, _, period = "".join(lines_of(root / "sys/fs/cgroup" / level / "cpu.max")).partition(" ")
                if quota.isdigit() and period.isdigit():
                    cpus = min(cpus, math.ceil(int(quota) / int(period)))
    return max(1, cpus)


def _left(folder: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    """Return the bytes of memory left in the cgroup of ``folder``; None if it has no limit or does not exist."""
    limit, usage = ("".join(lines_of(folder / name)) for name in (limit_name, usage_name))
    if not limit.isdigit() or not usage.isdigit():
        return None
    stat = _fields(folder / "memory.stat")
    return int(limit) - int(usage) + stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)


def lines_of(path: Path) -> list[str]:
    """Return the lines of a small file; [] if the file cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _fields(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in lines_of(path) if len(words := line.split()) >= 2}
