"""What a run leaves to look at: numbers, a picture, and a page that a browser opens without an error."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.app import train
from lightning_zero.report import results
from tests.harness import run_command

BROWSER = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")

RUN = dict.fromkeys(("metrics", "checkpoint", "best_checkpoint", "next", "commit")) | {
    "task": "fit",
    "status": "failed: ValueError: <b>",
    "steps": 3,
    "setup": {"stage": "zero3", "ranks": 2, "parameters": 1234},
    "duration_s": 1.5,
    "command": "python -m lightning_zero.train",
    "versions": {"torch": "2"},
}
METRICS = """epoch,step,train_loss,val_loss,zero/bytes/grad/device,zero/mfu,zero/tokens_per_s,zero/wait_s/gather
,0,,,2048,0.1,100,5.0
0,0,5.5,,,,,
,1,,,2048,0.2,200,0.25
0,1,nan,4.5,,,,
"""


def written(folder: Path, **more: Any) -> dict[str, Any]:
    """Write the report of a run with two steps, and return its numbers."""
    (folder / "metrics.csv").write_text(METRICS)
    series = results.logged([folder])
    found = RUN | results.measured(series, ()) | more
    results.write(folder, found, series, None)
    return json.loads((folder / "results.json").read_text())


def test_numbers_of_a_run_that_failed_are_those_that_were_logged(tmp_path: Path) -> None:
    found = written(tmp_path)
    assert found["tokens_per_s"] == 200 and found["mfu"] == 0.2 and found["last"]["val_loss"] == 4.5
    assert found["bytes"] == [{"role": "grad", "tier": "device", "planned": None, "measured": 2048}]
    assert found["wait_s_per_step"] == {"gather": 0.25}  # without the first steps
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 2_000_000 and "&lt;b&gt;" in page
    assert not re.findall(r"(?:src|href)=\"(?!#)[^\"]*", page.replace("xlink:", ""))  # it is one file
    assert "currentColor" in page and "#1c2230" not in page[page.index("<svg") :]  # of both colour schemes


def test_metrics_from_before_a_restart_are_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "metrics-1.csv").write_text("epoch,step,train_loss\n0,0,9.0\n0,1,8.0\n")
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss\n0,1,7.0\n0,2,6.0\n")
    assert results.logged([tmp_path, tmp_path]) == {"train_loss": [(0, 9.0), (1, 7.0), (2, 6.0)]}


def colours(folder: Path, scheme: int) -> tuple[str, list[str]]:
    """Open the page in a browser with a light (1) or dark (0) scheme. Return ground and ink, and console messages."""
    script = "<script>const s = getComputedStyle(document.body); document.title = s.backgroundColor + '; ' + s.color"
    probe = folder / f"probe-{scheme}.html"
    probe.write_text((folder / "report.html").read_text() + script + "</script>")
    user = f"--user-data-dir={folder / f'user-{scheme}'}"
    chosen = f"--blink-settings=preferredColorScheme={scheme}"
    done = run_command(*BROWSER, user, chosen, "--dump-dom", probe.as_uri())
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    return title[1], [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_opens_in_a_browser_in_both_colour_schemes(tmp_path: Path) -> None:
    written(tmp_path)
    assert colours(tmp_path, 1) == ("rgb(255, 255, 255); rgb(28, 34, 48)", [])
    assert colours(tmp_path, 0) == ("rgb(20, 23, 30); rgb(228, 231, 238)", [])


def test_without_matplotlib_or_logs_there_is_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "can_draw", lambda: False)
    written(tmp_path)
    assert "matplotlib is not installed" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "<svg" not in page and "2.0 KiB" in page and not (tmp_path / "results.png").exists()
    monkeypatch.undo()
    results.write(tmp_path, RUN | results.measured({}, ()), {}, None)
    page = (tmp_path / "report.html").read_text()
    assert "nothing was logged" in page and "<td>stage</td><td>zero3</td>" in page and "<td>1,234</td>" in page


def test_a_full_disk_is_said_in_a_sentence_and_a_users_mistake_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.said_in_a_sentence(OSError(errno.ENOSPC, "No space left on device", "/run/metrics.csv"))
    assert "error: [Errno 28] No space left on device: '/run/metrics.csv'" in capsys.readouterr().err
    assert not train.said_in_a_sentence(FileNotFoundError(errno.ENOENT, "there is nothing", "/mine"))
    assert not train.said_in_a_sentence(RuntimeError("my own mistake"))


@pytest.mark.full
def test_a_run_folder_that_cannot_be_made_is_refused_in_a_sentence() -> None:
    done = run_command("python", "-m", "lightning_zero.train", "hydra.run.dir=/proc/nowhere/run", code=2)
    assert done.stderr.startswith("error: hydra.run.dir: expected a folder that can be made, got '/proc/nowhere'")
    assert "Traceback" not in done.stderr
