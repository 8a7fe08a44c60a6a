"""Find the name of a job, which a restart does not change, and the checkpoint to resume from. SLURM and torchrun
restart a job with the same command line, so a note in the run folder names the job that has trained there. Another job
with the same run folder does not resume."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lightning_zero.ranks.started_by import launched

SCHEDULERS = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID", "lsf": "LSB_JOBID"}
NOTE = "job.txt"  # in the run folder: names the job that trained there last
FILES = "job_checkpoints.jsonl"  # in the run folder: lists the checkpoints that this job has begun to write
# Names a file that tells the job's script what the end of a run means. The script requeues the job, because a container
# has no scontrol.
OUTCOME_VARIABLE = "LIGHTNING_ZERO_OUTCOME"
REQUEUE, REFUSED = "requeue", "refused"
RUN_DIR_VARIABLE = "LIGHTNING_ZERO_RUN_DIR"  # tells a user's own script the run folder of its job
SAVED = (b"PK", b"\x80")  # beginnings of what torch.save writes: a zip file, or a pickle of earlier days
RAISED = "raised-"  # plus a rank: a file beside the outcome file, which says that this rank has raised before training
CLOCKS_DIFFER_NS = 3600 * 10**9  # most that the clock of an object store is taken to be late
MEET_S = 10.0  # seconds that a failed rank waits for others that fail, because srun ends all when one ends


def job_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a name of this process's job, equal on all ranks and after restarts; None if no launcher restarts jobs."""
    place = launched(environ)
    if place is None or place.by == "plain":
        return None
    run = environ.get("TORCHELASTIC_RUN_ID", "none") if place.by == "torchrun" else "none"
    if run != "none":
        return f"torchrun-{_plain(run)}"
    if place.by == "srun" and "SLURM_JOB_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', '0')}"
    for scheduler, variable in SCHEDULERS.items():  # torchrun or mpirun inside a scheduler's job
        if variable in environ:
            return f"{scheduler}-{_plain(environ[variable])}"
    if place.by == "mpirun" and (namespace := environ.get("PMIX_NAMESPACE")):  # Open MPI's name of the job
        return f"mpirun-{_plain(namespace)}"
    import psutil

    launcher = psutil.Process(os.getppid())  # on this node
    return f"{place.by}-{datetime.fromtimestamp(launcher.create_time()):%Y-%m-%d_%H-%M-%S}-{launcher.pid}"


def _plain(text: str) -> str:
    """Return ``text`` with dashes for characters that folder names forbid or that would need quotes in overrides."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "0"


def checkpoint_of_job(
    run_dir: str | os.PathLike[str], folders: Iterable[str | os.PathLike[str]] = ()
) -> Path | str | None:
    """Return the newest complete checkpoint of this job; ``None`` if the job has none, or has not trained in
    ``run_dir``. All ranks return the same, because no rank saves, or calls :func:`note_job`, until all ranks have
    returned from this call. ``folders``: further folders to search.

    Files that are older than the note of :func:`note_job` belong to earlier jobs. Because the clock of an object store
    may be slow, a file that :func:`note_file` has listed counts even if it is up to :data:`CLOCKS_DIFFER_NS` older."""
    job = job_name()
    if job is None or _noted(Path(run_dir)) != job:
        return None
    since = (Path(run_dir) / NOTE).stat().st_mtime_ns
    own = {str(path) for paths in files_of_job(run_dir).values() for path in paths}
    return newest_checkpoint([run_dir, *folders], since_ns=since, own=own)


def note_job(run_dir: str | os.PathLike[str]) -> bool:
    """Write a note into ``run_dir`` that this job trains there. Return whether the note was there already (False
    without a job name). Call this on one rank, after all ranks have joined."""
    job = job_name()
    if job is None:
        return False
    known = _noted(Path(run_dir)) == job
    if not known:
        (Path(run_dir) / FILES).unlink(missing_ok=True)  # another job's
        # Write aside and rename, so that a rank that reads meanwhile finds the old name or the new one.
        aside = Path(run_dir) / f".{NOTE}.{os.getpid()}"
        aside.write_text(job + "\n")
        os.replace(aside, Path(run_dir) / NOTE)
    return known


def note_file(run_dir: str | os.PathLike[str], owner: str, path: str) -> None:
    """Note that this job will write a checkpoint to ``path``. Call on one rank. ``owner``: a callback's state key."""
    with (Path(run_dir) / FILES).open("a") as file:
        # Begin with a newline, because a killed process may have left an unfinished line.
        file.write("\n" + json.dumps([owner, path if "://" in path else os.path.abspath(path)]) + "\n")
        file.flush()
        os.fsync(file.fileno())


def files_of_job(run_dir: str | os.PathLike[str]) -> dict[str, set[Path | str]]:
    """Return the checkpoints that this job has begun to write (remote ones as text), by the callback's state key."""
    found: dict[str, set[Path | str]] = {}
    with contextlib.suppress(OSError):
        for line in (Path(run_dir) / FILES).read_text().splitlines():
            with contextlib.suppress(ValueError):  # empty, or left unfinished by a killed process
                owner, path = json.loads(line)
                found.setdefault(owner, set()).add(path if "://" in path else Path(path))
    return found


def _noted(run_dir: Path) -> str | None:
    try:
        return (run_dir / NOTE).read_text().strip()
    except OSError:
        return None


def newest_checkpoint(
    folders: Iterable[str | os.PathLike[str]], *, since_ns: int = 0, names: str = "*.ckpt", own: Collection[str] = ()
) -> Path | str | None:
    """Return the newest complete checkpoint in ``folders`` that was written at or after ``since_ns`` (nanoseconds of
    the epoch): a Path, or text for a remote address; None if there is none. ``names``: a pattern for its name. ``own``:
    remote addresses that count even if their date is up to :data:`CLOCKS_DIFFER_NS` earlier."""
    found: dict[Path | str, int] = {}
    for folder in folders:
        if "://" in str(folder):
            remote = _remote_checkpoints(str(folder), names, own)
            found |= {url: ns for url, ns, late_ns in remote if ns + late_ns >= since_ns}
            continue
        for path in Path(folder).glob(names):
            real = path.resolve()  # last.ckpt is a link, which a killed process may have left broken
            if _whole(real) and (written := real.stat().st_mtime_ns) >= since_ns:
                found[real] = written
    # Some stores date by whole seconds: of equal times the largest number in the name counts.
    parts = {path: re.split(r"(\d+)", str(path).rpartition("/")[2]) for path in found}
    orders = {path: (found[path], [int(p) if p.isdecimal() else p for p in parts[path]]) for path in found}
    return max(found, key=lambda path: orders[path], default=None)


def listed(fs: Any, root: str, names: str) -> list[str]:
    """Return the paths directly in the folder ``root`` of the fsspec file system ``fs`` whose names match the pattern
    ``names``. (``fs.glob`` would take ``[12]`` in the name of the folder for a pattern.)"""
    paths = fs.find(root, maxdepth=1, withdirs=True)
    return [path for path in paths if path != root and fnmatchcase(path.rpartition("/")[2], names)]


def _remote_checkpoints(folder: str, names: str, own: Collection[str]) -> Iterator[tuple[str, int, int]]:
    """Yield, for each complete checkpoint in the remote ``folder``: its address, the time of its last write, and by how
    much that time may be too early (both in nanoseconds)."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    fs, root = url_to_fs(folder)
    fs.invalidate_cache()  # a listing from before
    keys = {fs._strip_protocol(url) for url in own if "://" in url}
    for path in listed(fs, root, names):
        last = f"{path}/.metadata" if fs.isfile(f"{path}/.metadata") else path  # the part that is written last
        if last == path:
            if not fs.isfile(path):
                continue
            with fs.open(path, "rb") as file:
                if not zipfile.is_zipfile(file):
                    continue
        late_ns = CLOCKS_DIFFER_NS if path in keys else 0
        yield fs.unstrip_protocol(path), int(fs.modified(last).timestamp() * 1e9), late_ns


def _whole(path: Path) -> bool:
    """Return whether a checkpoint has what is written last: a zip file's table, or a folder's ``.metadata``."""
    return (path / ".metadata").is_file() if path.is_dir() else path.is_file() and zipfile.is_zipfile(path)


def refusal(path: object, cause: str) -> str:
    return (
        f"ckpt_path (path of fabric.load): expected a whole checkpoint, got {path}: {cause}. Give another checkpoint."
    )


def damage(path: str | os.PathLike[str]) -> str | None:
    """Return why the local ``path`` is no whole checkpoint, found by a few bytes; None if nothing is found. Raises
    OSError if ``path`` cannot be read."""
    if os.path.isdir(path):
        return None if _whole(Path(path)) else "it has no .metadata, which is written last"
    with open(path, "rb") as file:
        begin = file.read(8)
    if not begin.startswith(SAVED):
        return f"torch.save writes no file that begins with {begin!r}" if begin else "the file is empty"
    if begin.startswith(SAVED[0]) and not zipfile.is_zipfile(path):
        return "the end of the file is missing"
    return None


def write_outcome(word: str) -> bool:
    """Write ``word`` to the file that the job's script reads. Return False if the script has not set a file."""
    path = os.environ.get(OUTCOME_VARIABLE)
    if path:
        Path(path).write_text(f"{word}\n")
    return bool(path)


def note_raised() -> None:
    """Make a file beside the outcome file, to say that this rank has raised an error before any training. Wait up to
    :data:`MEET_S` seconds for the files of other ranks: if all raise, the job's script does not requeue the job."""
    path, place = os.environ.get(OUTCOME_VARIABLE), launched()
    if not path or place is None or place.rank is None or place.world_size is None:
        return
    Path(path).with_name(f"{RAISED}{place.rank}").touch()
    deadline = time.monotonic() + MEET_S
    while len(list(Path(path).parent.glob(f"{RAISED}*"))) < place.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
