"""What a run leaves to look at: numbers, a picture, and a page that a browser opens without an error."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_zero.app import train
from lightning_zero.device.accelerator import Accelerator
from lightning_zero.report import results
from lightning_zero.report.compare import main
from lightning_zero.report.figure import _by_unit
from lightning_zero.report.page import MEANING
from lightning_zero.report.record import Curves, of_rank
from tests.harness import run_command

BROWSER = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")

RUN = dict.fromkeys(("metrics", "checkpoint", "best_checkpoint", "next", "commit")) | {
    "task": "fit",
    "status": "failed: ValueError: <b>",
    "steps": 3,
    "setup": {"stage": "zero3", "ranks": 2, "parameters": 1234},
    "configuration": {"model": "LitGPT(n_layer=2)", "samples per step, all ranks": 16},
    "seen": {"tokens seen": 123456},
    "duration_s": 1.5,
    "command": "python -m lightning_zero.train",
    "versions": {"torch": "2"},
}
ENGINE = SimpleNamespace(comm=SimpleNamespace(
    rank=0, device=torch.device("cpu"), streams=SimpleNamespace(accelerator=Accelerator(torch.device("cpu")))
))  # fmt: skip
LOGGED = [
    {"step": 0, "zero/bytes/grad/device": 2048, "zero/mfu": 0.1, "zero/tokens_per_s": 100, "zero/wait_s/gather": 5.0},
    {"step": 0, "train_loss": 5.5, "epoch": 0},
    {"step": 1, "zero/bytes/grad/device": 2048, "zero/mfu": 0.2, "zero/tokens_per_s": 200, "zero/wait_s/gather": 0.25},
    {"step": 1, "train_loss": math.nan, "val_loss": 4.5, "epoch": 0},
]


def logged(folder: Path, lines: list[dict[str, float]]) -> Curves:
    curves = Curves(folder)
    for line in lines:
        curves.log_metrics(line, int(line["step"]))
    return curves


def written(folder: Path, **more: Any) -> dict[str, Any]:
    """Write the report of a run with two steps, and return its numbers."""
    folder.mkdir(exist_ok=True)
    series = logged(folder, LOGGED).series
    ranks = [of_rank(cast(Any, ENGINE), series)]
    results.write(folder, RUN | results.measured(series, (), ranks) | more, series, None)
    return json.loads((folder / "results.json").read_text())


def test_numbers_of_a_run_that_failed_are_those_that_were_logged(tmp_path: Path) -> None:
    found = written(tmp_path)
    assert found["tokens_per_s"] == 200 and found["mfu"] == 0.2 and found["last"]["val_loss"] == 4.5
    grads, process = found["bytes"]
    assert grads == {"role": "grad", "tier": "device", "planned": None, "measured": 2048, "most": 2048}
    assert process["role"] == "whole process" and process["measured"] == process["most"] > 10 * 2**20
    assert found["wait_s_per_step"] == {"gather": 0.25}  # without the first steps
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 2_000_000 and "&lt;b&gt;" in page
    assert not re.findall(r"(?:src|href)=\"(?!#)[^\"]*", page.replace("xlink:", ""))  # it is one file
    assert "currentColor" in page and "#1c2230" not in page[page.index("<svg") :]  # of both colour schemes


def test_curves_go_on_after_a_restart_and_not_after_another_run(tmp_path: Path) -> None:
    logged(tmp_path, [{"step": step, "train_loss": 9.0 - step} for step in range(2)])
    with (tmp_path / "curves.jsonl").open("a") as file:
        file.write('{"step": 2, "train_l')  # killed here
    for step, kept in ((1, [(0, 9.0), (1, 8.0), (2, 6.0)]), (0, [(2, 6.0)])):
        curves = Curves(tmp_path)
        curves.start_at(step)
        curves.log_metrics({"train_loss": 6.0}, 2)
        assert curves.series == Curves(tmp_path).series == {"train_loss": kept}


def test_training_and_validation_in_one_unit_share_an_axis() -> None:
    names = ("train_loss", "val_loss", "train/acc", "val/acc", "train_grad", "epoch_time")
    left, right = _by_unit({key: [(0, 1.0)] for key in names})
    assert ({*left}, {*right}) == ({"train_loss", "val_loss"}, {"train/acc", "val/acc"})
    left, right = _by_unit({key: [(0, 1.0)] for key in ("train_loss", "val_acc")})
    assert ({*left}, {*right}) == ({"train_loss"}, {"val_acc"})


def test_of_many_ranks_those_that_waited_least_and_most_are_shown(tmp_path: Path) -> None:
    series = logged(tmp_path, LOGGED).series
    own = of_rank(cast(Any, ENGINE), series)
    ranks = [own | {"rank": rank, "wait_s_per_step": {"gather": float(rank)}} for rank in range(100)]
    found = RUN | results.measured(series, (), ranks)
    results.write(tmp_path, found, series, None)
    assert found["wait_s_per_step"] == {"gather": 49.5} and found["most_wait_s_per_step"] == {"gather": 99}
    page = (tmp_path / "report.html").read_text()
    shown = re.findall(r"<tr><td>(\d+)</td>", page[page.index("Ranks that waited least and longest") :])
    assert [int(rank) for rank in shown] == [*range(16), *range(84, 100)]


def test_what_is_not_known_is_not_said_to_be_nothing(tmp_path: Path) -> None:
    """A run without ZeroMonitor, whose losses are known and whose waits are not."""
    series = logged(tmp_path, LOGGED[1::2]).series
    results.write(tmp_path, RUN | results.measured(series, (), [of_rank(cast(Any, ENGINE), series)]), series, None)
    svg = (tmp_path / "report.html").read_text().partition("<svg")[2]
    assert "train_loss" in svg and "nothing was logged" not in svg and " 0 ms" not in svg
    assert svg.count("not measured (needs callbacks.monitor)") == 3  # speed, memory, waits


# -- two runs, and many -----------------------------------------------------------------------------------------------


def csv_of_ddp(folder: Path) -> Path:
    """What a CSVLogger leaves of a run with DDP and ThroughputMonitor: 0.5 s a step, then a step that differs most."""
    (folder / "version_0").mkdir(parents=True)
    lines = ["epoch,step,train_loss,train/time,train/device/samples_per_sec,train/samples_per_sec,train/acc"]
    lines += ["0,0,5.5,1.0,8,16,", "0,1,4.25,1.5,8,16,0.5", "0,2,,2.0,8,16,"]
    (folder / "version_0" / "metrics.csv").write_text("\n".join(lines))
    return folder


def hydra_file(folder: Path, text: str) -> None:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(text)


def cells(page: Path, row: str) -> list[str]:
    found = re.search(rf"<tr><td>{re.escape(row)}</td>(.*?)</tr>", page.read_text())
    assert found is not None, f"{row}?"
    return re.findall(r"<td>(.*?)</td>", found[1])


def test_a_run_beside_one_of_ddp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zero").mkdir()
    lines = [{**LOGGED[0], "zero/steps_per_s": 1.0, "zero/samples_per_s": 8.0}, *LOGGED[1:2]]
    logged(tmp_path / "zero", [*lines, {"step": 1, "train_loss": 4.0}])
    page, ddp = tmp_path / "beside.html", csv_of_ddp(tmp_path / "ddp")
    assert main(["compare", str(tmp_path / "zero"), str(ddp), "--out", str(page)]) == 0
    assert cells(page, "step time: total") == ["1.00 s", "500 ms", "0.5", MEANING["total"]]
    assert cells(page, "step time: waiting for gather") == [
        "5.00 s",
        "not measured",
        "",
        MEANING["gather"].replace("'", "&#x27;"),
    ]
    assert cells(page, "speed: samples_per_s") == ["8", "16", "2", "all ranks together"]
    assert cells(page, "memory of a rank: grad, device") == ["2.0 KiB", "not measured", "", MEANING["grad"]]
    assert cells(page, "train_loss") == ["4", "4.25", "0.25", "1"] and cells(page, "train/acc")[:2] == ["-", "0.5"]
    text = page.read_text()
    assert "train/time" not in text and text.count("zero: train_loss") == text.count("ddp: train_loss") == 1
    shown = capsys.readouterr().out
    assert re.search(r"^train_loss +4 +4.25 +0.25 +1$", shown, re.MULTILINE) and "are not compared" in shown


def test_what_differs_in_two_runs(tmp_path: Path) -> None:
    for name, size, loss in (("a", 1, 5.0), ("b", 2, math.nan)):
        hydra_file(tmp_path / name, f"model: {{width: {size}, depth: 3, more: {{bias: true}}}}\nrun: ${{oc.env:NO}}")
        written(tmp_path / name, versions={"torch": str(size)})
        logged(tmp_path / name, [{"step": 2, "train_loss": 3.0}, {"step": 3, "train_loss": loss}])
    page = tmp_path / "compare.html"
    main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(page)])
    differing = page.read_text().partition("Differences in")[2]
    assert re.findall(r"<tr><td>(.*?)</td>", differing) == ["model.width", "version.torch"]
    assert cells(page, "model.width") == ["1", "2"] and cells(page, "train_loss") == ["5", "nan", "nan", "3"]
    assert 'href="a/report.html"' in page.read_text()


def test_folders_without_a_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ddp, out = str(csv_of_ddp(tmp_path / "ddp")), f"--out={tmp_path / 'page.html'}"
    for arguments in (["compare", ddp, str(tmp_path / "none"), out], ["compare", ddp, ddp, out], ["index", "/nowhere"]):
        assert main(arguments) == 2 and re.match(
            r"error: report \w+: expected .* got .* Give ", capsys.readouterr().err
        )
    assert not (tmp_path / "page.html").exists()


def test_an_index_lists_all_runs_and_stumbles_over_none(tmp_path: Path) -> None:
    hydra_file(tmp_path / "sweep" / "lr=0.1,#1", "seed: 1")
    written(tmp_path / "sweep" / "lr=0.1,#1", configuration={"model": "GPT(width=1)"})
    csv_of_ddp(tmp_path / "ddp")
    for name, file, text in (("half", "results.json", '{"setup": '), ("theirs", "metrics.csv", "a;b\n1;2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    assert main(["index", str(tmp_path)]) == 0
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", (tmp_path / "index.html").read_text())
    found = {re.sub(r"<.*?>", "", name): (name, *rest) for name, _, *rest in (row.split("</td><td>") for row in rows)}
    assert 'href="sweep/lr%3D0.1%2C%231/report.html"' in found["sweep/lr=0.1,#1"][0]
    assert found["sweep/lr=0.1,#1"][1:] == ("GPT", "zero3", "-", "3", "nan (train_loss)", "200")
    assert found["ddp/version_0"][4:] == ("2", "4.25 (train_loss)", "-") and 'href="half"' in found["half"][0]
    assert set(found) == {"sweep/lr=0.1,#1", "ddp/version_0", "half", "theirs"}


@pytest.mark.full
def test_the_commands_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        csv_of_ddp(tmp_path / name)
    done = run_command(
        "python", "-m", "lightning_zero", "report", "compare", tmp_path / "a", tmp_path / "b", folder=tmp_path
    )
    assert done.stdout.endswith("report: compare.html\n") and (tmp_path / "compare.html").is_file(), done.stderr
    assert "(2 runs)" in run_command("python", "-m", "lightning_zero", "report", "index", tmp_path, code=0).stdout


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
    results.write(tmp_path, RUN | results.measured({}, (), [of_rank(cast(Any, ENGINE), {})]), {}, None)
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
