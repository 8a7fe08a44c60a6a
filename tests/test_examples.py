"""Each example runs as it is and learns."""

from __future__ import annotations

import copy
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from examples.muon import MuonAdamW, groups_of
from lightning_zero.models.gpt import GPT
from tests.harness import ROOT, forked, on_ranks, run_command

EXAMPLES = ROOT / "examples"


def run(folder: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_command("python", EXAMPLES / name, *overrides, folder=folder, CUDA_VISIBLE_DEVICES="")


def value(done: subprocess.CompletedProcess[str], name: str) -> float:
    """What rank 0 alone has printed at the end; nothing else is said that a reader would have to think about."""
    assert done.returncode == 0, done.stderr
    found = re.findall(rf"^{name}: (\S+)$", done.stdout, re.MULTILINE)
    assert len(found) == 1, done.stdout
    said = [line for line in done.stderr.splitlines() if re.search("warn|deprecat|recommend|does not have", line, re.I)]
    # Of a machine with SLURM, of what peft asks of transformers, torchao of torch, and peft of adapters of `lm_head`.
    known = r"srun|is_gradient_checkpointing|warn\(|_pytree|save_embedding_layers"
    assert not [line for line in said if not re.search(known, line)], done.stderr
    return float(found[0])


@pytest.mark.full
@pytest.mark.parametrize(("name", "said", "at_least", "at_most"), [
    ("minimal.py", "validation accuracy", 0.9, 1),
    ("vision.py", "validation accuracy", 0.9, 1),
    ("vit.py", "validation accuracy", 0.85, 1),
    ("long_sequences.py", "validation accuracy", 0.9, 1),
    ("mixture_of_experts.py", "validation error", 0, 0.05),
    ("expert_parallel.py", "validation error", 0, 0.05),
    ("tensor_parallel.py", "validation accuracy", 0.9, 1),
    ("optional_images.py", "validation accuracy", 0.9, 1),
    ("token_means.py", "validation accuracy", 0.5, 1),
    ("gan.py", "distance from the circle", 0, 0.5),
    pytest.param(
        *("float8.py", "validation accuracy", 0.9, 1),
        marks=pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed"),
    ),
    ("muon.py", "training loss", 0, 1.5),
])  # fmt: skip
def test_an_example_learns(name: str, said: str, at_least: float, at_most: float, tmp_path: Path) -> None:
    assert at_least <= value(run(tmp_path, name), said) <= at_most


@pytest.mark.full
def test_vision_with_hydra(tmp_path: Path) -> None:
    done = run(tmp_path, "vision_hydra.py", "zero/stage=zero2", "zero/precision=bf16", "hydra.run.dir=run")
    assert value(done, "validation accuracy") > 0.9
    assert [f.name for f in tmp_path.iterdir()] == ["run"]


def test_vision_with_hydra_refuses_in_our_words(tmp_path: Path) -> None:
    def call() -> None:
        sys.path.insert(0, str(EXAMPLES))
        GlobalHydra.instance().clear()
        runpy.run_path(str(EXAMPLES / "vision_hydra.py"), run_name="__main__")

    done = forked(call, tmp_path, ["vision_hydra.py", "zero.prefetch_bytes=-1", "hydra.run.dir=run"])
    assert done.returncode != 0
    assert "error: zero.prefetch_bytes: expected a number >= 0, got -1" in done.stderr
    assert "Traceback" not in done.stderr


def said_by_hydra_project() -> tuple[list[str], list[str]]:
    """The commands of docs/hydra_project.md, and what it says that they print."""
    text = (ROOT / "docs" / "hydra_project.md").read_text().replace(" \\\n", " ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = [line for kind, block in blocks if kind == "bash" for line in block.splitlines()]
    return commands, [line for kind, block in blocks if not kind for line in block.splitlines()]


@pytest.mark.full
def test_the_hydra_project_does_what_its_page_says(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "template", tmp_path / "template", ignore=shutil.ignore_patterns("outputs"))
    commands, said = said_by_hydra_project()
    assert commands.pop(0) == "cd examples/template"
    shown, losses = "", []
    for command in commands:
        code = int(command.endswith("train.py zero/stage=zero2") or command.endswith("+zero/stage=zero2"))
        done = run_command(*shlex.split(command), folder=tmp_path / "template", code=code, CUDA_VISIBLE_DEVICES="")
        shown += done.stdout + done.stderr
        losses += re.findall(r"^(\w+).*: validation loss (\S+) after (\d+) steps$", done.stdout, re.MULTILINE)
    for line in said:
        assert all(part in shown for part in re.split(r"(?:^ConfigError: )|\.\.\.$", line)), line
    assert len(losses) == 8 and [steps for *_, steps in losses] == ["16"] * 7 + ["24"]
    plain = float(losses[0][1])
    assert losses[0][0] == "DDPStrategy" and {name for name, *_ in losses[1:]} == {"ZeroStrategy"}
    fp32 = [float(losses[n][1]) for n in (1, 2, 5, 6)]  # zero2, zero3 with offload, and the two of the sweep
    assert fp32 == pytest.approx([plain] * 4, abs=2e-6)
    assert 0 < abs(float(losses[3][1]) - plain) < 0.01  # bf16


@pytest.mark.full
def test_one_gpu(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for nvme in ((), ("--nvme", str(files))):
        assert value(run(tmp_path, "one_gpu.py", "--width", "64", "--depth", "2", *nvme), "training loss") < 2.3
    assert not list(files.iterdir())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "tiny"
    assert run(folder.parent, "tiny_llama.py", str(folder)).returncode == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in folder.iterdir()}
    return folder


@pytest.mark.full
def test_finetuning_a_folder(llama: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "finetune_causal_lm.py", str(llama))
    assert value(done, "validation loss") < 6.0  # at the start ln(1024) = 6.9
    assert "The statement" in done.stdout.splitlines()[-1] + done.stdout
    assert {"config.json", "tokenizer.json"} <= {f.name for f in (tmp_path / "outputs" / "finetuned").iterdir()}


@pytest.mark.full
@pytest.mark.parametrize(("name", "out"), [
    ("lora.py", "adapters"),
    pytest.param("qlora.py", "qlora", marks=pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs it")),
])  # fmt: skip
def test_adapters_are_trained_and_saved_alone(name: str, out: str, llama: Path, tmp_path: Path) -> None:
    assert value(run(tmp_path, name, str(llama)), "validation loss") < 6.5
    files = {f.name for f in (tmp_path / "outputs" / out).iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


def test_every_example_has_a_test() -> None:
    here = Path(__file__).read_text() + (Path(__file__).parent / "launch" / "test_ray.py").read_text()
    assert all(f'"{f.name}"' in here for f in EXAMPLES.glob("*.py"))


# -- an example's optimizer -------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 32, "n_layer": 2, "n_head": 2, "d_model": 16, "block_size": 8}


@on_ranks(1)
@pytest.mark.sample
def test_example_steps_as_muon_and_adamw_of_torch_do() -> None:
    one, two = (copy.deepcopy(model) for model in [GPT(**SIZES)] * 2)
    mine = MuonAdamW(groups_of(one), lr=0.02)
    matrices, decay, rest = groups_of(two)
    theirs = [
        torch.optim.Muon(matrices["params"], lr=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{**decay, "weight_decay": 0.1}, rest], lr=0.02, betas=(0.9, 0.95)),
    ]
    for step in range(3):
        tokens = torch.arange(16).view(2, 8) * (step + 1) % 32
        for model, optimizers in ((one, [mine]), (two, theirs)):
            model.zero_grad()
            model(tokens).logsumexp(-1).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
