"""Compares a checkpoint with its checksums before anything of it is loaded, all ranks together."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.checkpoint.crc import Report
from lightning_zero.checkpoint.sharded.index import INDEX, refusal
from lightning_zero.checkpoint.verify import check
from lightning_zero.config import ConfigError
from lightning_zero.lightning_api import get_filesystem, is_local, rank_zero_info
from lightning_zero.ranks.progress import SILENT, LongWork

_ZIP = b"PK\x03\x04"  # how a file of torch.save begins


def verify(
    path: Any,
    rank: int,
    gather: Callable[[Any], list[Any]],
    together: Callable[[Callable[[], Report]], Report],
    long_work: LongWork = SILENT,
) -> None:
    """Check a file on all ranks; those that see the same one look at a part of it each.

    Args:
        gather: an object from each rank.
        together: do this on all ranks, and raise on all where it fails on one.
        long_work: shows how far it is.

    Raises:
        ConfigError: on all ranks, with the file: it is not as it was written.
        OSError: the system's.
    """
    if not is_local(path):
        raise ConfigError(
            f"zero.checkpoint.verify: expected false for a checkpoint that is no local file, got true for {path}. Drop "
            "zero.checkpoint.verify, or copy the checkpoint."
        )
    name = get_filesystem(path)._strip_protocol(str(path))
    found = gather(_identity(name))
    # A node that has a copy of its own reads all of it.
    peers = [r for r, identity in enumerate(found) if identity == found[rank]]
    report = together(lambda: _checked(name, peers.index(rank), len(peers), long_work))
    total = sum(r.checked for r in gather(report)) // max(1, len(found) // len(peers))
    if report.unknown:
        rank_zero_warn(
            f"{name} has no checksums for all that is in it: it is loaded as it is (zero.checkpoint.verify)."
        )
    elif total:
        rank_zero_info(f"{name} is as it was written: {total:,} bytes agree with their checksums")


def _identity(name: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _checked(name: str, part: int, parts: int, long_work: LongWork) -> Report:
    if not os.path.isfile(name) and not os.path.isfile(os.path.join(name, INDEX)):  # said by who loads it
        return Report(0, 0, [])
    try:
        report = check(name, part, parts, long_work)
    except zipfile.BadZipFile as error:
        with open(name, "rb") as file:
            if file.read(len(_ZIP)) == _ZIP:  # torch might read it all the same, and take other bytes for tensors
                raise ConfigError(refusal(Path(name), f"it cannot be read: {error}")) from error
        return Report(0, 1, [])  # an older format, or no checkpoint: likewise
    if report.damage:
        raise ConfigError(
            f"ckpt_path (path of fabric.load): expected {name} as it was written, got other values in "
            f"{', '.join(report.damage[:5])}"
            f"{' and more' if len(report.damage) > 5 else ''}: it was damaged since. "
            "Give another one (a job that starts again takes the one before it when this file is gone), or "
            "zero.checkpoint.verify=false."
        )
    return report
