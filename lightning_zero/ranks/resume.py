"""Jobs that are started again: their name, which stays the same, and the checkpoint to go on from.

SLURM requeues a job, and torchrun starts its processes again, perhaps another number of them. Their command line is
that of the first start, so the command line does not tell a restart. The job's name does: it gives the run folder, and
a note in the folder names the job that has trained there. A second job in the same folder starts anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from lightning_zero.ranks.started_by import launched

SCHEDULERS = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID", "lsf": "LSB_JOBID"}
NOTE = "job.txt"  # in the run folder: the job that trained there last
FILES = "job_checkpoints.jsonl"  # in the run folder: the checkpoints that this job has begun to write


def job_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """The name of the job that this process belongs to: the same on all ranks, and after every restart.

    ``None`` where nothing restarts processes: they were started by hand, or by Lightning.
    """
    place = launched(environ)
    if place is None or place.by == "plain":
        return None
    run = environ.get("TORCHELASTIC_RUN_ID", "none") if place.by == "torchrun" else "none"
    if run != "none":
        return f"torchrun-{_plain(run)}"
    if place.by == "srun" and "SLURM_JOB_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', '0')}"
    for scheduler, variable in SCHEDULERS.items():  # torchrun and mpirun inside of a job of theirs
        if variable in environ:
            return f"{scheduler}-{_plain(environ[variable])}"
    namespace = environ.get("PMIX_NAMESPACE")  # Open MPI's name of the job
    return f"{place.by}-{_plain(namespace) if namespace and place.by == 'mpirun' else _parent()}"


def _parent() -> str:
    """The launcher's process on this node: when it started, and its id."""
    import psutil

    launcher = psutil.Process(os.getppid())
    return f"{datetime.fromtimestamp(launcher.create_time()):%Y-%m-%d_%H-%M-%S}-{launcher.pid}"


def _plain(text: str) -> str:
    """``text`` as part of a folder's name that can also be typed as an override."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "0"


def checkpoint_of_job(run_dir: str | os.PathLike[str], folders: Iterable[str | os.PathLike[str]] = ()) -> Path | None:
    """The newest whole checkpoint of this job; ``None`` where it has not trained in ``run_dir`` before.

    All ranks find the same one, because nobody saves before all have come together, and the note is written after that.

    Args:
        folders: where checkpoints are, besides ``run_dir`` itself.
    """
    job = job_name()
    if job is None or _noted(Path(run_dir)) != job:
        return None
    since = (Path(run_dir) / NOTE).stat().st_mtime_ns
    return newest_checkpoint([run_dir, *folders], since_ns=since)


def note_job(run_dir: str | os.PathLike[str]) -> bool:
    """Write down that this job trains in ``run_dir``: by one rank, when all have come together.

    Returns:
        Whether it has trained there before.
    """
    job = job_name()
    if job is None:
        return False
    known = _noted(Path(run_dir)) == job
    if not known:
        (Path(run_dir) / FILES).unlink(missing_ok=True)  # another job's
        # Written aside and renamed: a rank that reads meanwhile finds the old name or the new one, never half of it.
        aside = Path(run_dir) / f".{NOTE}.{os.getpid()}"
        aside.write_text(job + "\n")
        os.replace(aside, Path(run_dir) / NOTE)
    return known


def note_file(run_dir: str | os.PathLike[str], owner: str, path: str) -> None:
    """Write down, before it is written, that a checkpoint is this job's: by one rank.

    Args:
        owner: what writes it and is to remove it.
    """
    with (Path(run_dir) / FILES).open("a") as file:
        # A line of its own, also behind one that a killed process has not finished.
        file.write("\n" + json.dumps([owner, os.path.abspath(path)]) + "\n")
        file.flush()
        os.fsync(file.fileno())


def files_of_job(run_dir: str | os.PathLike[str]) -> dict[str, set[Path]]:
    """The checkpoints that this job has begun to write, by owner."""
    found: dict[str, set[Path]] = {}
    with contextlib.suppress(OSError):
        for line in (Path(run_dir) / FILES).read_text().splitlines():
            with contextlib.suppress(ValueError):  # an empty line, or one that a killed process has not finished
                owner, path = json.loads(line)
                found.setdefault(owner, set()).add(Path(path))
    return found


def _noted(run_dir: Path) -> str | None:
    try:
        return (run_dir / NOTE).read_text().strip()
    except OSError:
        return None


def newest_checkpoint(folders: Iterable[str | os.PathLike[str]], *, since_ns: int = 0) -> Path | None:
    """The checkpoint that was written last among those that are whole: a killed process may leave half of one.

    Args:
        since_ns: older ones are another job's.
    """
    found: dict[Path, int] = {}
    for folder in folders:
        for path in Path(folder).glob("*.ckpt"):
            real = path.resolve()  # last.ckpt is a link, which a killed process may have left behind broken
            if _whole(real) and (written := real.stat().st_mtime_ns) >= since_ns:
                found[real] = written
    return max(found, key=lambda path: (found[path], path.name), default=None)


def _whole(path: Path) -> bool:
    """Whether a checkpoint was written to its end.

    The part that is written last tells: a zip archive of torch.save ends with its table, and in a checkpoint that is a
    folder the file of metadata comes last.
    """
    return (path / ".metadata").is_file() if path.is_dir() else path.is_file() and zipfile.is_zipfile(path)
