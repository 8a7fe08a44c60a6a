"""The memory plan as a command: what it shows, what fits and what would, mistakes, and that it takes no memory."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch  # noqa: F401  here, because it sets environment variables
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import plan_memory
from lightning_zero.app import plan
from lightning_zero.planning.buckets import BucketShape, Itemsizes
from lightning_zero.planning.fit import Machine, Model, Row, best, plan_row
from lightning_zero.planning.memory import Limits
from lightning_zero.planning.placement import Tier
from lightning_zero.settings import ConfigError, HybridShard, Offload, OffloadConfig, Stage, allowed_rows
from tests.harness import forked, on_ranks, run_command

PLAIN = "activations=false"  # most tests are about what the engine holds
MACHINE = (PLAIN, "machine.gpus=8", "machine.gpu_memory=80GB", "machine.host_memory=512GB", "machine.nvme=2TB")
LARGE = ("model.n_layer=80", "model.d_model=8192", "model.n_head=64", "model.vocab_size=131072")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("COLUMNS", "120")

    def run(*overrides: str) -> tuple[int, str, str]:
        done = forked(plan.main, tmp_path, ["plan", *overrides])
        return done.returncode, done.stdout, done.stderr

    return run


PLANNED: dict[tuple[str, ...], dict[str, Any]] = {}


@pytest.fixture
def planned(command: Any) -> Callable[..., dict[str, Any]]:
    """The document of a plan; one that was asked for before is not made again."""

    def find(*overrides: str) -> dict[str, Any]:
        if overrides not in PLANNED:
            code, out, err = command("json=true", *overrides)
            assert code == 0, err
            PLANNED[overrides] = json.loads(out)
        return PLANNED[overrides]

    return find


def row_of(document: dict[str, Any], stage: str, offload: str) -> dict[str, Any]:
    (row,) = (r for r in document["rows"] if (r["stage"], r["offload"]) == (stage, offload))
    return row


def test_json_has_every_row_with_the_bytes_of_the_formula(planned: Any) -> None:
    """Matrices of the default model in bf16 with fp32 masters, over 8 ranks; norms and padding are the rest."""
    document = planned(*MACHINE, "zero/precision=bf16", "zero/stage=zero2")
    assert [(r["stage"], r["offload"]) for r in document["rows"]] == [(s.value, o.value) for s, o in allowed_rows()]
    assert len(document["rows"]) == 16
    assert [r["stage"] for r in document["rows"] if r["chosen"]] == ["zero2"]
    assert document["machine"]["gpu_memory"] == 80 * 10**9
    assert document["model"]["parameters"] == document["model"]["trainable"] == (p := 858_880)
    assert document["model"]["optimizer_states"] == 2
    assert all(r["fits"] for r in document["rows"])
    assert document["first_that_fits"] == {"stage": "zero0", "offload": "none"}
    for stage, grads in (("zero0", 1), ("zero1", 8), ("zero2", 8)):
        rest = row_of(document, stage, "none")["at_rest"]["device"]
        assert rest["compute_param"] == pytest.approx(2 * p, rel=0.04)
        assert rest["grad"] == pytest.approx(4 * p / grads, rel=0.04)
        assert rest["optim_state"] == pytest.approx(8 * p / grads, rel=0.04)
    cpu = row_of(document, "zero3", "cpu")
    assert cpu["at_rest"]["host"]["optim_state"] == pytest.approx(8 * p / 8, rel=0.04)
    assert cpu["per_host"] >= 8 * sum(cpu["at_rest"]["host"].values())


@pytest.mark.mainly(lambda columns: columns == 120)
@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_cuts_nothing_off(
    command: Any, monkeypatch: pytest.MonkeyPatch, columns: int, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = command(*MACHINE, "zero/precision=bf16", "zero.offload.name=cpu")
    assert code == 0, err
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns and "\N{HORIZONTAL ELLIPSIS}" not in out
    chosen = [line for line in lines if ">" in line and "your settings" not in line]
    assert re.search(r"zero3\W+cpu .* us\W+host memory", chosen[-1])
    assert "zero3" in chosen[0] and " cpu " in chosen[0] and "yes" in chosen[0]
    text = " ".join(out.split())
    assert "858,880 parameters, bf16; 8 GPU(s) of 74.5G each, 476.8G of host memory, 1.8T of disk" in text
    assert "Try first: zero/stage=zero0 zero/offload=none" in text
    for stage, offload in allowed_rows():
        assert any(re.match(rf"\W*>?\W*{stage.value}\W+{offload.value} .*\byes\W*$", line) for line in lines)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_what_does_not_fit_says_what_would(command: Any, planned: Any) -> None:
    small = (PLAIN, "machine.gpus=2", "machine.gpu_memory=12MB", "machine.host_memory=400MB", "machine.nvme=0")
    document = planned(*small)
    full = row_of(document, "zero0", "none")
    assert not full["fits"] and full["missing"] == {"gpu": full["per_gpu"] - 12 * 10**6}
    assert full["gpus_that_fit"] is None  # replicated: no number of GPUs helps
    sharded = row_of(document, "zero3", "none")
    assert (sharded["gpus_that_fit"], sharded["offload_that_fits"]) == (4, "optimizer_cpu")
    assert row_of(document, "zero3", "optimizer_cpu")["fits"]
    out = command(*small)[1]
    line = r"^zero3 \+ none: needs [\d.]+M more on each GPU; fits with 4 GPUs or zero/offload=optimizer_cpu$"
    assert re.search(line, out, re.MULTILINE), out
    assert re.search(r"^zero3 \+ nvme:.*machine.nvme or zero.offload.nvme_path", out, re.MULTILINE), out


@pytest.mark.full
def test_a_machine_too_small_for_all_rows_is_told(command: Any) -> None:
    _, out, _ = command("machine.gpus=1", "machine.gpu_memory=1kB", "machine.host_memory=1kB", "machine.nvme=1kB")
    assert "Nothing fits" in out
    assert "auto selects nothing: zero/stage and zero/offload: expected a combination that" in out.replace("\n  ", " ")


@pytest.mark.sample
@pytest.mark.parametrize(("override", "message"), [
    ("+machine.rates.speed=3", "machine.rates.speed: no such rate; there are compute,"),
    ("model=hf model.path=nothing", "model.path: expected a folder with a config.json"),
    ("machine.gpu_memory=80XB", "machine.gpu_memory: expected a size"),
    ("machine.gpus=0", "machine.gpus: expected a number > 0, got 0"),
    ("optimizer_states=-1", "optimizer_states: expected a number >= 0, got -1"),
    ("machine.gpu=8", "machine.gpu"),
    ("+machine.gpu=8", "machine.gpu: no such setting"),
    ("+extra=1", "extra: no such setting"),
])  # fmt: skip
def test_mistakes_end_in_a_sentence(command: Any, override: str, message: str) -> None:
    code, _, err = command(*override.split())
    assert code == 2 and message in err and "Traceback" not in err, err


def test_a_terminal_shows_at_once_that_a_plan_is_on_its_way(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (False, True):
        stderr = mock.Mock(wraps=io.StringIO(), isatty=lambda shown=is_terminal: shown)
        monkeypatch.setattr(sys, "stderr", stderr)
        assert in_process(plan, "optimizer_states=-1")[0] == 2
        first, *more = stderr.getvalue().splitlines()
        assert (first == "importing torch and Lightning ...") is is_terminal and len(more) == is_terminal, first


@pytest.mark.full
def test_states_are_those_of_the_optimizer(planned: Any) -> None:
    """Adafactor keeps a row and a column of a matrix; nothing of it is as large as the parameters."""
    optimizers = {
        ("optimizer=sgd",): 1,
        ("optimizer=sgd", "optimizer.momentum=0"): 0,
        ("optimizer=adafactor", "optimizer._target_=torch.optim.Muon"): 1,
        ("optimizer=adafactor",): None,
    }
    assert {given: planned(*MACHINE, *given)["model"]["optimizer_states"] for given in optimizers} == optimizers
    assert planned(*MACHINE, "optimizer_states=3", "optimizer=sgd")["model"]["optimizer_states"] == 3
    whole, by_element = planned(*MACHINE, "optimizer=adafactor"), planned(*MACHINE)
    assert 0 < whole["model"]["optimizer_state_bytes"] < by_element["model"]["parameters"]
    assert row_of(whole, "zero3", "none")["per_gpu"] < row_of(by_element, "zero3", "none")["per_gpu"]


@pytest.mark.full
def test_a_model_that_looks_at_values(
    command: Any, planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many do for the rates of stochastic depth. What raises anyway says so itself, with its traceback."""
    (tmp_path / "drops.py").write_text(
        "import torch\n"
        "from lightning.pytorch import LightningModule\n"
        "class Drops(LightningModule):\n"
        "    def __init__(self, asks=True, raises=False):\n"
        "        super().__init__()\n"
        "        depth = int(torch.linspace(1, 3, 2)[-1].item()) if asks else 3\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(depth))\n"
        "        if raises:\n"
        "            raise NotImplementedError('not on this machine')\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return self.layers[0](batch[:, :8].float()).sum()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ("~model", "+model._target_=drops.Drops", *MACHINE)
    assert planned(*own) == planned(*own, "+model.asks=false")
    code, _, err = command(*own, "+model.raises=true")
    assert code == 1 and re.search(r'drops\.py", line 9.*\nNotImplementedError: not on this machine\n', err, re.S)


def test_without_machine_the_one_at_hand_is_planned_for(planned: Any) -> None:
    document = planned(PLAIN, "trainer.devices=3")
    assert document["machine"]["gpus"] == 3
    if not torch.cuda.is_available():
        assert document["machine"]["gpus_share_host_memory"]
    assert 0 < document["machine"]["host_memory"] < 2**50
    assert document["machine"]["nvme"] == 0


@pytest.mark.mainly(lambda name: name == "llama_70b")
@pytest.mark.parametrize(("name", "billions", "fits"), [
    ("gpt_1b", 1.2, "zero0"), ("llama_7b", 6.7, "zero1"), ("llama_70b", 69.0, "zero3"),
])  # fmt: skip
def test_experiments_of_real_size_are_planned_on_any_machine(
    planned: Any, name: str, billions: float, fits: str
) -> None:
    nodes = ("machine=h100", "machine.gpus=32", "machine.host_memory=2TB", "machine.nvme=8TB")
    document = planned(PLAIN, f"experiment={name}", *nodes)
    assert round(document["model"]["parameters"] / 1e9, 1) == billions
    assert document["first_that_fits"]["stage"] == fits


@pytest.mark.full
def test_seventy_billion_parameters_take_seconds_and_no_memory(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from lightning_zero import plan; plan.main();"
        "own = resource.getrusage(resource.RUSAGE_SELF);"
        "print(own.ru_utime + own.ru_stime, own.ru_maxrss, file=sys.stderr)"
    )
    done = run_command(
        "python", "-c", code, "json=true", "zero/precision=bf16", *MACHINE, *LARGE, folder=tmp_path, code=0
    )
    seconds, kilobytes = map(float, done.stderr.split()[-2:])
    assert seconds < 60  # of processor time
    document = json.loads(done.stdout)
    assert 64e9 < document["model"]["parameters"] < 72e9
    assert kilobytes * 1024 < 2 * 2**30  # of 130 GiB of weights
    assert document["first_that_fits"] == {"stage": "zero3", "offload": "optimizer_nvme"}
    assert row_of(document, "zero3", "none")["gpus_that_fit"] == 32  # 16 would hold 67 GB at rest, but not the peak


def test_processes_without_gpus_share_the_hosts_memory() -> None:
    model = Model(("",), (BucketShape(0, (2**20,), Itemsizes(4, 4, 4, 4)),), Limits(0, 0, 1))

    def planned(host_memory: int) -> Row:
        machine = Machine(gpus=2, gpu_memory=0, host_memory=host_memory, nvme=0, shared=True)
        return plan_row(model, Stage.zero1, Offload.optimizer_cpu, machine, OffloadConfig())

    row = planned(10**9)
    assert row.fits and row.together <= row.per_host[Tier.device] + row.per_host[Tier.host]
    row = planned(row.together - 1)
    assert [(s.tier, s.nbytes) for s in row.shortages] == [(Tier.host, 1)]
    assert best([row]) is None


def test_split_parameters_have_no_replicas_on_nodes() -> None:
    model = Model(("",), (BucketShape(0, (2**20,), Itemsizes(4, 4, 4, 4), parts=4),), Limits(0, 0, 1))
    machine = Machine(gpus=2, gpu_memory=10**11, host_memory=10**11, nvme=0, nodes=2)
    auto, flat = (
        plan_row(model, Stage.zero3, Offload.none, replace(machine, hybrid_shard=shard), OffloadConfig())
        for shard in (HybridShard.auto, HybridShard.flat)
    )
    assert auto == flat


# -- after a run ------------------------------------------------------------------------------------------------------


def whole(command: Any, planned: Any, gather_after_fit: str, host: str) -> tuple[dict[str, Any], str]:
    machine = (*MACHINE[:3], f"machine.host_memory={host}", f"zero.gather_after_fit={gather_after_fit}")
    return planned(*machine), " ".join(command(*machine)[1].split())


@pytest.mark.full
def test_the_copy_of_the_module_that_is_there_after_a_run(command: Any, planned: Any) -> None:
    """Stage 0 has nothing else on the host; at cpu masters and state rest there. 858,880 parameters are 3.3 MiB."""
    document, text = whole(command, planned, "null", "4MB")
    nbytes = document["model"]["whole_copy"]
    assert 0 <= nbytes - 4 * document["model"]["parameters"] < 64 * 100
    row, without = row_of(document, "zero0", "none"), row_of(document, "zero3", "cpu")
    assert row["after_run"]["host"] == {"whole_copy": -(-nbytes // 8)} and row["fits"]
    assert row["per_host"] == 8 * -(-nbytes // 8)
    assert without["after_run"] is None and not without["fits"]
    assert (
        "a copy of the whole module takes 3.3M of each host; peak/host includes it (zero.gather_after_fit=null)" in text
    )
    document, text = whole(command, planned, "null", "3MB")  # nothing fits beside it, and nothing need
    assert row_of(document, "zero0", "none")["fits"] and row_of(document, "zero0", "none")["per_host"] == 0
    assert "After a run the module stays sharded: a whole copy takes 3.3M of each host, which do not fit" in text
    document, text = whole(command, planned, "true", "3MB")
    row = row_of(document, "zero0", "none")
    lack = -int(-nbytes / 0.9 // 1) - 3_000_000  # a tenth of what is there stays free
    assert not row["fits"] and row["missing"] == {"host": lack}
    assert "set zero.gather_after_fit=null" in text
    document, text = whole(command, planned, "false", "3MB")
    assert row_of(document, "zero0", "none")["after_run"] is None
    assert "After a run the module stays sharded (zero.gather_after_fit=false)." in text


# -- activations, seconds, auto, pictures -----------------------------------------------------------------------------

GPUS = ("machine=h100", "machine.host_memory=1TB", "zero/precision=bf16")


@pytest.mark.full
def test_activations_are_in_the_peaks_and_auto_says_what_it_takes(command: Any, planned: Any) -> None:
    document, without = planned(*GPUS), planned(*GPUS, PLAIN)
    found = document["activations"]
    assert found["samples"] == 4 and found["counted"] == found["without_checkpointing"] and found["not_known"] is None
    assert found["with_checkpointing"]["saved"] < found["counted"]["saved"] < found["counted"]["backward"]
    assert without["activations"]["counted"] is None
    for row, plain in zip(document["rows"], without["rows"], strict=True):
        assert row["at_rest"] == plain["at_rest"]
        most = max(found["counted"]["forward"], found["counted"]["backward"]) + found["counted"]["batch"]
        assert plain["per_gpu"] < row["per_gpu"] <= plain["per_gpu"] + most
        assert row["seconds_per_step"] > 0 and row["bound_by"] in row["seconds_by_resource"]
    fewer = planned(*GPUS, "zero.activation_checkpointing=blocks")
    assert fewer["activations"]["counted"] == found["with_checkpointing"]
    assert row_of(fewer, "zero3", "none")["per_gpu"] < row_of(document, "zero3", "none")["per_gpu"]
    split = ("zero.tensor_parallel=2", "machine.gpus=2", "zero.unit.classes=[Linear]")
    assert planned(*GPUS, *split, "zero.activation_checkpointing=blocks")["activations"]["not_known"] is None
    out = command(*GPUS)[1].replace("\n  ", " ")
    choice = r"^auto selects zero/stage=zero1 zero/offload=none: the fastest of \d+ combinations that fit"
    assert re.search(choice, out, re.MULTILINE), out
    assert re.search(r"The largest micro-batch that fits: \d+ sample\(s\) per rank\.$", out, re.MULTILINE)


@pytest.mark.full
def test_rates_that_are_given_decide_what_binds(planned: Any) -> None:
    slow = planned(*GPUS, PLAIN, "machine.rates.network=1MB")
    assert slow["machine"]["rates"]["network"] == 10**6
    row = row_of(slow, "zero3", "none")
    assert row["bound_by"] == "network"
    assert row["seconds_per_step"] > (row["sent_per_step"]["gathers"] + row["sent_per_step"]["reductions"]) / 10**6


@pytest.mark.full
def test_a_config_of_hugging_face_is_planned_from_its_folder(planned: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    ).save_pretrained(tmp_path / "llama")
    document = planned(*GPUS, "model=hf", "model.path=llama", "data.batch_size=3", "data.block_size=16")
    assert document["model"]["units"] == 3 and document["activations"]["samples"] == 3
    assert document["activations"]["counted"]["batch"] == 3 * 17 * 8  # the last token is a target alone


@pytest.mark.full
def test_a_picture_has_every_row(command: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = command(*GPUS, PLAIN, "picture=plan", "machine.nvme=1GB")
    assert code == 0, err
    assert f"Wrote {tmp_path / 'plan'}" in out
    assert {f.name for f in tmp_path.iterdir()} == {"plan.png", "plan.svg"}
    picture = (tmp_path / "plan.svg").read_text()
    assert all(f"{stage.value} + {offload.value}" in picture for stage, offload in allowed_rows())
    assert "each GPU" in picture and "79.0G available" in picture and "optimizer state" in picture
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
def test_a_picture_that_cannot_be_drawn_is_refused(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    code, _, err = command("picture=plan.png")
    assert code == 2 and "picture: expected matplotlib to be installed. Run pip install matplotlib." in err


# -- a module of one's own --------------------------------------------------------------------------------------------


class Own(LightningModule):
    """As users have them: batches are dicts, the step logs, the optimizer has a schedule."""

    def __init__(self, width: int = 64, late: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width = width
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList() if late else self.made()

    def made(self) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(4))

    def configure_model(self) -> None:
        if not len(self.blocks):
            self.blocks = self.made()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = batch["tokens"] if isinstance(batch, dict) else batch[:, :-1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        loss = x.square().mean()
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        self.log_dict({"lr": self.trainer.optimizers[0].param_groups[0]["lr"], "loss": loss.item()})
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


BATCH = {"tokens": torch.zeros(2, 16, dtype=torch.int64)}
ON = {"name": "h100", "nodes": 2, "host_memory": "1TB"}


@on_ranks(1)
def test_a_module_of_ones_own_is_planned_as_a_class_as_a_function_and_as_it_is() -> None:
    plan = plan_memory(Own, BATCH, ON, precision="bf16-mixed", stage=2, offload="optimizer_cpu")
    assert [(row.stage, row.offload) for row in plan.rows] == [(s.value, o.value) for s, o in allowed_rows()]
    parameters = 100 * 64 + 4 * (64 * 64 + 64)
    assert f"{parameters:,} parameters, bf16; 2 hosts, each with 8 GPU(s) of 79.0G each, 931.3G of host" in " ".join(
        str(plan).split()
    )
    assert plan.described.model.states == 2 and "of activations for 2 sample(s)" in " ".join(str(plan).split())
    (chosen,) = (line for line in str(plan).splitlines() if ">" in line and "peak" not in line and "yes" in line)
    assert re.search(r"zero2\W+optimizer_cpu", chosen)
    assert plan.best is not None and (plan.best.stage, plan.best.offload, plan.best.fits) == ("zero0", "none", True)
    assert plan.auto in plan.rows and min(row.per_gpu for row in plan.rows) > 0
    built = Own(late=True)
    for module in (built, Own(), lambda: Own(late=True)):
        again = plan_memory(module, BATCH, ON, precision="bf16", stage=2, offload="optimizer_cpu")
        assert str(again) == str(plan)
    assert not len(built.blocks) and not built.embedding.weight.is_meta and built._trainer is None
    slower = plan_memory(Own, BATCH, {**ON, "rates": {"network": "1MB"}}, precision="bf16")
    assert all(row.bound_by == "network" for row in slower.rows if row.offload == "none")


@pytest.mark.full
def test_the_command_prints_the_same_plan(command: Any, tmp_path: Path) -> None:
    own = (f"~model=gpt +model._target_={__name__}.Own", "data.batch_size=2", "data.block_size=16", *GPUS)
    code, out, err = command(*" ".join(own).split(), "machine.nodes=2")
    assert code == 0, err
    batch = torch.zeros(2, 17, dtype=torch.int64, device="meta")
    again = forked(lambda: print(plan_memory(Own, batch, ON, precision="bf16")), tmp_path, [], code=0)
    assert again.stdout.rstrip() == out.rstrip()


class ConvNet(nn.Sequential):
    """Plain torch, and trained by a function."""

    def __init__(self) -> None:
        sizes = ((3, 8), (8, 16), (16, 32))
        stages = [nn.Sequential(nn.Conv2d(i, o, 3), nn.BatchNorm2d(o), nn.ReLU(inplace=True)) for i, o in sizes]
        super().__init__(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@on_ranks(1)
def test_a_plain_convolutional_network_is_planned_with_a_function_that_trains_it(tmp_path: Path) -> None:
    images = TensorDataset(torch.zeros(20, 3, 32, 32), torch.zeros(20, dtype=torch.int64))

    def step(module: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    plan = plan_memory(ConvNet, DataLoader(images, batch_size=8), "a100_40gb", training_step=step)
    text = " ".join(str(plan).split())
    assert "of activations for 8 sample(s)" in text
    assert "2 tensors of optimizer state for each parameter are assumed: the module has no configure_optimizers" in text
    assert "assumed: the module" not in str(plan_memory(ConvNet, optimizer_states=0, training_step=step))
    without = plan_memory(ConvNet, next(iter(DataLoader(images, 8))), "a100_40gb")
    assert "Activations are not counted: a ConvNet has no training_step" in " ".join(str(without).split())
    if importlib.util.find_spec("matplotlib"):
        assert plan.picture(tmp_path / "plan.svg") == [str(tmp_path / "plan.svg")]


@pytest.mark.parametrize(("given", "message"), [
    ({"machine": "h10"}, r"machine: expected one of a100_40gb, .*, got 'h10'\. Write machine=h100\."),
    ({"machine": {"gpu": 3}}, r"machine: expected name, .*, got 'gpu'\. Write machine\.gpus\."),
    ({"machine": {"gpus": 0}}, "machine.gpus: expected a number > 0, got 0"),
    ({"prefetch_byte": 1}, "zero.prefetch_byte: no such setting; .* Write zero.prefetch_bytes."),
    ({"module": 3}, "plan_memory: expected a module, or a class or function that makes one, got 3"),
])  # fmt: skip
def test_mistakes_in_a_plan_of_ones_own_module(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(given.pop("module", ConvNet), **given)
