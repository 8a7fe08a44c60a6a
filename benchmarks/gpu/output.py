"""The folder that comes back: lines of JSON, a table, timelines. Each is whole after every row."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

VOLUME_NBYTES = 15 << 20  # a file that comes back may have 16 MiB
VOLUMES = 3  # ... and there may be 8 of them, with the output of the command
COLUMNS = (
    ("size", "size"),
    ("side", "side"),
    ("status", "status"),
    ("micro_batch", "batch"),
    ("step_ms", "step ms"),
    ("tokens_per_s", "tokens/s"),
    ("vs_fsdp2", "x FSDP2"),
    ("vs_bare", "x bare"),
    ("tflops", "TFLOP/s"),
    ("of_matmul", "of matmul"),
    ("device_peak_gib", "device GiB"),
    ("device_peak_small_gib", "without activations"),
    ("planned_device_gib", "planned"),
    ("peak_over_plan", "of plan"),
    ("host_used_gib", "host GiB"),
    ("planned_host_gib", "planned host"),
    ("phi", "phi"),
    ("bound_by", "bound by"),
    ("host_waits", "host waits"),
    ("host_waits_ms", "waited ms"),
    ("host_us_per_unit", "host us per unit"),
    ("loss_difference", "loss differs by"),
)


class Output:
    """Writes as it goes, so that a run that is cut still tells what it has found."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self._lines = (folder / "results.jsonl").open("w")
        for old in folder.glob("traces-*.tar"):
            old.unlink()

    def write(self, record: Mapping[str, Any]) -> None:
        """A line, and the table anew."""
        self.records.append(dict(record))
        text = json.dumps(record)
        print(text, flush=True)
        self._lines.write(text + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        new = self.folder / "table.md.new"
        new.write_text(table(self.records))
        new.replace(self.folder / "table.md")

    def add_timeline(self, path: Path, name: str) -> str:
        """Put a timeline into the volume that has room for it. Returns where it is, or why not."""
        nbytes = path.stat().st_size + 2 * tarfile.RECORDSIZE
        for number in range(1, VOLUMES + 1):
            volume = self.folder / f"traces-{number}.tar"
            if (volume.stat().st_size if volume.exists() else 0) + nbytes <= VOLUME_NBYTES:
                with tarfile.open(volume, "a") as archive:
                    archive.add(path, name)
                return f"{volume.name}:{name}"
        return f"left out: {nbytes >> 20} MiB and no room"


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the machine, its rates, the tests, the rows, what did not run."""
    of = {kind: [r for r in records if r["part"] == kind] for kind in ("machine", "tests", "rates", "row")}
    # In the title, since figures of two machines must not be mixed.
    devices = [f" on {r['device']}, {r['device_gib']:.0f} GiB" for r in of["machine"] if "device" in r]
    lines = [f"# {datetime.now():%Y-%m-%d %H:%M}{''.join(devices)}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in r.items() if key != "part") for r in of["machine"]]
    for record in of["tests"]:
        keys = ("status", "passed", "skipped", "not_run", "seconds")
        lines += ["", "Tests marked gpu: " + ", ".join(f"{key} {record[key]}" for key in keys if key in record)]
        lines += [f"- failed: {name}" for name in record.get("failed", [])]
    for record in of["rates"]:
        found = [f"{key} {value / 1e9:.4g}" for key, value in record.get("rates", {}).items()]
        lines += ["", "Rates (10^9 per second): " + (", ".join(found) or record["status"])]
    for record in records:
        if record["part"] in ("job", "bits", "sanitizer", "trainer") and record["status"] != "not run":
            found = [f"{key} {value}" for key, value in record.items() if key not in ("part", "name", "size", "error")]
            lines += ["", f"{record['name']}: " + ", ".join(found)]
    rows = [r for r in of["row"] if r["status"] != "not run"]
    if rows:
        lines += ["", *_markdown(rows)]
    lines += _notes(records)
    return "\n".join(lines) + "\n"


def _markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    shown = [(key, title) for key, title in COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = ["| " + " | ".join(title for _, title in shown) + " |", "|" + "---|" * len(shown)]
    for row in rows:
        cells = ["" if row.get(key) is None else str(row[key]).replace("|", "/") for key, _ in shown]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _notes(records: Sequence[Mapping[str, Any]]) -> list[str]:
    failed = [r for r in records if r.get("error")]
    left = [r for r in records if r["status"] == "not run"] if records else []
    lines = ["", "Failed or cut:", ""] if failed else []
    lines += [f"- {r['name']}: {str(r['error']).splitlines()[0]}" for r in failed]
    lines += ["", "Not run:", ""] if left else []
    lines += [f"- {r['name']} ({r['estimate_s']:g} s): {r['why']}" for r in left]
    return lines
