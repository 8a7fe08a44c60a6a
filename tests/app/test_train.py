"""The main job in real processes: what it prints and leaves, a user's own model, resuming, failing, steps run again."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import lightning.pytorch  # noqa: F401  here, because it sets environment variables
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_zero.app import jobs, train
from lightning_zero.app.replay import compare, read
from lightning_zero.models.gpt import GPT, LitGPT
from lightning_zero.models.language_model import decay_groups, warmup_cosine
from lightning_zero.settings import ConfigError
from tests.harness import ROOT, forked, run_command

LIMIT_S = 880  # of a busy machine
SMALL = ("experiment=tiny", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.enable_progress_bar=false")

Finished = tuple[Path, subprocess.CompletedProcess[str]]  # the folder of a run, and what it gave

OWN_MODEL = """
import torch
from lightning.pytorch import LightningModule

class Lit(LightningModule):
    def __init__(self, width=8, fail_on_rank=None):
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.head = torch.nn.Embedding(256, width), torch.nn.Linear(width, 256)

    def training_step(self, batch, batch_idx):
        if self.global_rank == self.hparams.fail_on_rank:
            raise RuntimeError("my own mistake")
        logits = self.head(self.embed(batch[:, :-1]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def run(folder: Path, *overrides: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    command = ("python", "-m", "lightning_zero.train", *overrides)
    more = {"PYTHONPATH": f"{ROOT}:{folder}", "XDG_CACHE_HOME": folder / "cache"}
    return run_command(*command, folder=folder, timeout=LIMIT_S, code=code, **more)


def alone(folder: Path, *overrides: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """As :func:`run`, of a run of one process."""
    cache = str(folder / "cache")
    return forked(_main, folder, ["train", *overrides], timeout=LIMIT_S, code=code, XDG_CACHE_HOME=cache)


def _main() -> None:
    GlobalHydra.instance().clear()
    train.main()


def bits_per_byte(out: str) -> float:
    found = re.findall(r"^validation bits per byte: (\S+)$", out, re.MULTILINE)
    assert len(found) == 1, out
    return float(found[0])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The folder and the result of one small run of the main job under stage 3 on two processes."""
    folder = tmp_path_factory.mktemp("main_job")
    return folder, run(folder, *SMALL[:-1], "hydra.run.dir=run")


def test_main_job_ends_well_and_shows_what_it_planned_and_measured(finished: Finished) -> None:
    _, done = finished
    assert "Traceback" not in done.stderr
    last = done.stdout.strip().splitlines()[-3:]
    assert any(line.startswith("validation bits per byte: ") for line in last)
    assert 3 < bits_per_byte(done.stdout) < 7.0  # near 8 at the start
    shown = done.stdout + done.stderr
    assert "train_loss=" in shown
    assert "zero/tokens_per_s=" in shown and " tokens_per_s=" not in shown  # one rate, and not two that differ
    assert done.stderr.count("bytes of rank 0 between steps") == 1
    rows = re.findall(r"│ (compute_param|grad|optim_state) +│ device +│ +(\S+ \S+) +│ +(\S+ \S+) +│", done.stderr)
    assert {"compute_param", "optim_state"} <= {role for role, _, _ in rows}, done.stderr
    assert all(planned == measured for _, planned, measured in rows)


def test_one_run_folder_holds_logs_as_csv_and_ordinary_checkpoints(finished: Finished) -> None:
    assert sorted(f.name for f in finished[0].iterdir()) == ["cache", "run"]
    folder = finished[0] / "run"
    assert (folder / ".hydra" / "config.yaml").is_file()
    with (folder / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(r["train_loss"]) for r in rows if r["train_loss"]]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    rates = [float(r["zero/tokens_per_s"]) for r in rows if r["zero/tokens_per_s"]]
    assert rates and min(rates) > 0 and "tokens_per_s" not in rows[0]
    bits = [float(r["val_bits_per_byte"]) for r in rows if r["val_bits_per_byte"]]
    assert len(bits) == 2  # every ten steps: that of the last one is what is said at the end
    assert bits[-1] == pytest.approx(bits_per_byte(finished[1].stdout), abs=1e-4)
    assert all(float(r["zero/grad_norm"]) > 0 for r in rows if r["zero/tokens_per_s"])
    results = json.loads((folder / "results.json").read_text())  # rank 1's numbers too
    assert [(r["rank"], r["device"][:4]) for r in results["ranks"]] == [(0, "cpu,"), (1, "cpu,")]
    assert all(r["peak_process"] > 2**27 and r["wait_s_per_step"] and r["bytes"] for r in results["ranks"])
    batch, step = (results["configuration"][f"samples per {what}"] for what in ("batch and rank", "step, all ranks"))
    assert (batch, step, results["seen"]["samples seen"]) == (4, 8, 20 * 8)
    assert "2 x" in results["configuration"]["hosts"] and "AdamW(lr=" in results["configuration"]["optimizer"]
    saved = folder / "checkpoints"
    assert sorted(f.name for f in saved.iterdir()) == ["last.ckpt", "step-20.ckpt"]  # names that can be typed
    checkpoint = torch.load(saved / "last.ckpt", weights_only=True)  # no objects of Hydra inside
    assert checkpoint["global_step"] == 20
    model = LitGPT.load_from_checkpoint(saved / "step-20.ckpt")
    assert all(p.isfinite().all() and p.numel() for p in model.parameters())
    assert model.gpt.head.weight.shape == (256, 64)


@pytest.mark.full
def test_a_checkpoint_is_tested_and_predicted_from_and_is_at_its_end(finished: Finished, tmp_path: Path) -> None:
    last = finished[0] / "run" / "checkpoints" / "last.ckpt"
    settings = (*SMALL[:2], "trainer.devices=1", f"ckpt_path={last}", "logger=none")
    done = alone(tmp_path, *settings, "task=test", "hydra.run.dir=test", "trainer.limit_test_batches=8", "tags=[mine]")
    (bits,) = re.findall(r"^test bits per byte: (\S+)$", done.stdout, re.MULTILINE)
    assert float(bits) == pytest.approx(bits_per_byte(finished[1].stdout), abs=0.3)  # the same 32 pieces of text
    results = json.loads((tmp_path / "test" / "results.json").read_text())
    assert results["task"] == "test" and results["tags"] == ["mine"] and "task=test" in results["overrides"]
    assert results["setup"].items() >= {"stage": "zero3", "offload": "none", "precision": "fp32", "ranks": 1}.items()
    assert results["metrics"]["test_bits_per_byte"] == pytest.approx(float(bits), abs=1e-4)
    assert "dirpath has changed" not in done.stderr
    done = alone(tmp_path, *settings, "task=predict", "hydra.run.dir=predict", "trainer.limit_predict_batches=8")
    written = torch.load(tmp_path / "predict" / "predictions" / "rank-0.pt")
    assert [i for indices, _ in written for i in indices] == list(range(32))
    mean = torch.cat([values for _, values in written]).mean().item()
    assert mean == pytest.approx(float(bits), abs=1e-4)
    done = alone(tmp_path, *settings, "hydra.run.dir=again")
    assert "\ncheckpoint: none was written: all steps were done before; raise" in done.stdout, done.stderr


@pytest.mark.full
@pytest.mark.parametrize(("more", "there"), [
    ((), "val_bits_per_byte"),
    (("trainer.num_sanity_val_steps=0", "trainer.val_check_interval=2"), "val_bits_per_byte"),
    (("trainer.limit_val_batches=0",), r"\(nothing was logged\)"),
], ids=["sanity check", "first validation", "no validation"])  # fmt: skip
def test_a_metric_that_is_not_logged_is_refused_early(more: tuple[str, ...], there: str, tmp_path: Path) -> None:
    settings = ("trainer.devices=1", "trainer.max_steps=3", "hydra.run.dir=run")
    done = alone(tmp_path, *SMALL, *settings, "optimized_metric=val_bits", *more, code=2)
    assert re.search(f"error: optimized_metric: expected .*one of {there}, got 'val_bits'", done.stderr)
    assert "checkpoint" not in done.stdout and not list(tmp_path.glob("run/checkpoints/*"))


@pytest.mark.full
def test_a_sweep_of_runs_of_two_ranks_ends_in_a_table(tmp_path: Path) -> None:
    """One of the three fails, which the others do not mind."""
    overrides = ("seed=1,2,-1", "hydra.sweep.dir=sweep", "optimized_metric=val_bits_per_byte")
    done = run(tmp_path, "-m", *SMALL, *overrides, "trainer.max_steps=4", "data.val_fraction=0.002", code=1)
    assert done.stdout.count("validation bits per byte") == 2 and "run 2 has failed" in done.stdout
    table = done.stdout[done.stdout.index("sweep: sweep") :]
    assert re.findall(r"seed=(\S+)", table)[-1] == "-1" and "(failed)" in table
    values = [float(v) for v in re.findall(r"\d\.\d{4}", table)]
    assert len(values) >= 2 and sorted(f.name for f in (tmp_path / "sweep").iterdir() if f.is_dir()) == ["0", "1", "2"]


@pytest.mark.full
def test_resumes_elsewhere_and_refuses_a_checkpoint_that_may_run_code(finished: Finished, tmp_path: Path) -> None:
    """At another stage and precision, with another number of processes."""
    checkpoint = torch.load(finished[0] / "run" / "checkpoints" / "last.ckpt")
    torch.save({**checkpoint, "extra": tmp_path}, tmp_path / "odd.ckpt")
    other = ("trainer.devices=1", "trainer.max_steps=25", "zero/stage=zero2", "zero/precision=bf16")
    settings = (*SMALL, f"ckpt_path={tmp_path / 'odd.ckpt'}", *other, "hydra.run.dir=run")
    done = alone(tmp_path, *settings, code=2)
    assert "error: ckpt_path (path of fabric.load): expected a checkpoint of tensors and plain values" in done.stderr
    assert "weights_only=false to lightning_zero.train" in done.stderr
    done = alone(tmp_path, *settings, "weights_only=false")
    assert (tmp_path / "run" / "checkpoints" / "step-25.ckpt").is_file()
    assert bits_per_byte(done.stdout) < bits_per_byte(finished[1].stdout) + 0.1


@pytest.mark.full
def test_a_model_of_ones_own_whose_mistake_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "users_model.py").write_text(OWN_MODEL)
    mistake = ("model._target_=users_model.Lit", "+model.width=4", "+model.fail_on_rank=1")
    # The other rank would wait for longer than `run` does.
    done = run(tmp_path, *SMALL, *mistake, "logger=none", f"zero.stall_timeout_s={2 * LIMIT_S}", code=None)
    assert done.returncode != 0
    assert "note: users_model.Lit gets width=4, fail_on_rank=1 of model.*: the values that you have set." in done.stdout
    assert "users_model.py" in done.stderr
    assert "RuntimeError: my own mistake" in done.stderr


@pytest.mark.full
def test_a_tensor_plan_is_taken_and_its_typo_named(tmp_path: Path) -> None:
    split = (*SMALL, "logger=none", "zero.tensor_parallel=2", "trainer.limit_train_batches=2")
    run(tmp_path, *split, "+zero.tensor_plan={gpt.blocks.*.up: colwise, gpt.blocks.*.down: rowwise}")
    done = run(tmp_path, *split, "+zero.tensor_plan={gpt.blocks.*.upp: colwise}", code=None)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "got 'gpt.blocks.*.upp', which splits nothing. There are gpt.embed, gpt.blocks.*.qkv, " in done.stderr
    assert "gpt.blocks.*.up, gpt.blocks.*.down, gpt.head." in done.stderr and "skipping this plan" not in done.stderr


@pytest.mark.full
def test_a_model_that_expects_other_batches_is_told_what_a_batch_is(tmp_path: Path) -> None:
    (tmp_path / "users_model.py").write_text(OWN_MODEL.replace("if self.global_rank", "x, y = batch\n        if self"))
    overrides = ("experiment=tiny", "debug=fast", "trainer.accelerator=cpu", "model._target_=users_model.Lit")
    done = alone(tmp_path, *overrides, "hydra.run.dir=run", code=1)
    assert "x, y = batch" in done.stderr and "ValueError: too many values to unpack" in done.stderr
    assert "A batch of data._target_=lightning_zero.data.text.TextData, the default, is one tensor of" in done.stderr
    assert "[4, 65], int64 from 0 to 255" in done.stderr


def test_one_process_without_logs_and_callbacks(tmp_path: Path) -> None:
    (tmp_path / "users_model.py").write_text(OWN_MODEL)
    (tmp_path / "words.txt").write_text("some words of text\n" * 500)
    own = ("data.path=words.txt", "model._target_=users_model.Lit", "hydra.run.dir=run")
    alone(tmp_path, "experiment=tiny", "debug=fast", "trainer.accelerator=cpu", *own)
    # (matplotlib, which torchmetrics imports where it is installed, has a cache.)
    others = {"cache", "__pycache__", "matplotlib"}
    there = {f.name for f in [*tmp_path.iterdir(), *(tmp_path / "cache").glob("*")]}
    assert there - others == {"run", "users_model.py", "words.txt"}
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert found["configuration"]["optimizer"] == "SGD" and found["configuration"]["model"] == "Lit()"
    overfit = ("debug=overfit", "trainer.max_steps=4", "trainer.accelerator=cpu", "trainer.devices=1")
    more = ("logger=none", "trainer.log_every_n_steps=1", "hydra.run.dir=overfit")
    alone(tmp_path, "experiment=tiny", *overfit, "data=synthetic", *more)
    found = json.loads((tmp_path / "overfit" / "results.json").read_text())  # its curves need no logger
    assert found["last"]["train_loss"] > 0 and found["tokens_per_s"] > 0 and found["wait_s_per_step"] == {}


# -- pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie_weights", [False, True])
def test_gpt_is_causal(tie_weights: bool) -> None:
    torch.manual_seed(0)
    gpt = GPT(vocab_size=11, n_layer=2, n_head=2, d_model=16, block_size=8, tie_weights=tie_weights)
    assert (gpt.head.weight is gpt.embed.weight) is tie_weights
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = gpt(tokens), gpt(changed)
    assert before.shape == (1, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_sizes_that_cannot_work_are_refused() -> None:
    for sizes in ({"n_layer": 0}, {"d_model": 6, "n_head": 4}, {"dropout": -0.1}):
        with pytest.raises(ConfigError, match=f"model.{next(iter(sizes))}"):
            GPT(**sizes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model.block_size: expected at least the 5 positions of a sequence"):
        GPT(n_layer=1, block_size=4)(torch.zeros(1, 5, dtype=torch.int64))


def test_matrices_decay_and_vectors_do_not() -> None:
    model = GPT(n_layer=1, d_model=8, n_head=1)
    model.head.requires_grad_(False)
    decay, no_decay = decay_groups(model.parameters())
    assert {p.ndim for p in decay["params"]} == {2}
    assert {p.ndim for p in no_decay["params"]} == {1}
    assert no_decay["weight_decay"] == 0.0
    assert sum(len(g["params"]) for g in (decay, no_decay)) == len(list(model.parameters())) - 1


def test_learning_rate_rises_and_falls() -> None:
    factor = warmup_cosine(warmup_steps=4, total_steps=20, min_ratio=0.1)
    values = [factor(step) for step in range(25)]
    assert values[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert values[4] == 1.0
    assert all(a >= b for a, b in pairwise(values[4:]))
    assert values[20:] == pytest.approx([0.1] * 5)
    assert warmup_cosine(0, float("inf"), 0.1)(10**6) == 1.0


def test_the_command_to_go_on_names_the_checkpoint_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "launched", lambda: None)
    monkeypatch.setattr(jobs, "job_name", lambda: None)
    said = jobs.command_to_go_on(("zero/stage=zero2", "ckpt_path=/old.ckpt", "data.path='x y'"), "/a/b.ckpt")
    given = """zero/stage=zero2 'data.path='"'"'x y'"'"'' ckpt_path=/a/b.ckpt"""
    assert said == f"python -m lightning_zero.train {given}"
    said = jobs.command_to_go_on(("+ckpt_path=x",), "/a b/c=d.ckpt")
    (parsed,) = OverridesParser.create().parse_overrides(shlex.split(said)[3:])
    assert parsed.key_or_group == "ckpt_path" and parsed.value() == "/a b/c=d.ckpt"


# -- ``lightning-zero replay`` ----------------------------------------------------------------------------------------

COMMAND = ("python", "-m", "lightning_zero")


@pytest.mark.full
def test_steps_that_are_run_again_are_compared(tmp_path: Path) -> None:
    settings = ["experiment=tiny", "trainer.devices=2", "trainer.max_steps=8", "zero.fingerprint=2"]
    saves = ["callbacks.checkpoint.save_top_k=-1", "+callbacks.checkpoint.every_n_train_steps=3"]
    saves += [f"callbacks.checkpoint.dirpath={tmp_path}/run/checkpoints"]
    run_command(*COMMAND, "train", *settings, *saves, "hydra.run.dir=run", folder=tmp_path, code=0)
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/checkpoints/*")}
    replay = (*COMMAND, "replay", "run", "--from", "run/checkpoints/step-3.ckpt", "--steps", "4")
    again = run_command(*replay, "zero/stage=zero1", folder=tmp_path, code=0)
    assert "all 2 steps that both have are equal" in again.stdout  # 4 and 6
    assert max(read(tmp_path / "run" / "replay-1" / "fingerprints.csv")) == 6  # it stops after step 7
    assert saved == {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/checkpoints/*")}
    path = tmp_path / "run" / "fingerprints.csv"
    path.write_text(re.sub(r"(?m)^(6,gpt\.blocks\.1,)\w{16}", r"\g<1>0123456789abcdef", path.read_text()))
    other = run_command(*replay, folder=tmp_path, code=1)
    assert "1 steps are equal; after step 6, unit gpt.blocks.1: ('0123456789abcdef', " in other.stderr


def test_the_first_difference_is_named() -> None:
    a, b = ("1", "2"), ("1", "3")
    said = f"after step 2, unit y: {a} in the run, {b} again"
    assert compare({1: {"x": a}, 2: {"x": a, "y": a}}, {2: {"x": a, "y": b}, 3: {}}) == (said, 0)
    assert compare({1: {"x": a}, 2: {"x": a}}, {1: {"x": a}, 2: {"x": a}}) == (None, 1)  # 1: of the checkpoint
    units = [f"blocks.{number}" for number in range(20)]
    said, _ = compare({1: dict.fromkeys(units, a)}, {1: dict.fromkeys(units, b)})
    assert said == f"after step 1, unit blocks.0: {a} in the run, {b} again"
    assert compare({1: {"x": a}}, {1: {}})[1] == 0
    assert compare({1: {"x": a}}, read(Path("nothing.csv"))) == (None, 0)  # from the checkpoint of the last step


@pytest.mark.full
def test_a_run_without_fingerprints_is_refused(tmp_path: Path) -> None:
    replay = (*COMMAND, "replay", "run", "--from", "a.ckpt", "--steps")
    assert "--steps: expected a number >= 1, got 0" in run_command(*replay, "0", folder=tmp_path, code=2).stderr
    done = run_command(*replay, "4", folder=tmp_path, code=2)
    assert "run/fingerprints.csv: expected a file that replay reads, got none" in done.stderr
