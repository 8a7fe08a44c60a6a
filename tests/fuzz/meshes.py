"""Random modules on random meshes: what is split among ranks must train as one process does, and go on on other meshes.

::

    python -m tests.fuzz.meshes --minutes 10            # with a new seed, which it prints
    python -m tests.fuzz.meshes --program 7:12          # one program again
"""

from __future__ import annotations

import copy
import random
import sys
import traceback
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine import Engine
from lightning_zero.engine.whole.state_dicts import load_optimizer_state, optimizer_state
from lightning_zero.mesh.plans import device_mesh
from tests.engine.support import adamw, sgd
from tests.engine.test_tensor_parallel import load_example
from tests.fuzz.sequences import main

WIDTH, WORDS, ROWS, LENGTH, RANKS = 8, 12, 8, 3, 4
KINDS = ("pair", "gathered", "plain", "norm", "experts", "pair without bias")
OPTIMIZERS = {"sgd": sgd, "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3), "fused": adamw}


class Mesh(NamedTuple):
    stage: int
    offload: str
    tensor: int
    expert: int
    recompute: str
    bucket: int


class Program(NamedTuple):
    """``styled``: which of the layers are in the plan. ``meshes``: one after the other, each for ``steps`` steps."""

    layers: tuple[str, ...]
    styled: tuple[bool, ...]
    tied: bool
    optimizer: str
    micro: int
    clip: float
    steps: int
    meshes: tuple[Mesh, ...]


def draw(chance: random.Random) -> Program:
    layers = tuple(chance.choice(KINDS) for _ in range(chance.randint(1, 5)))
    meshes = []
    for _ in range(chance.randint(1, 3)):
        stage = chance.randrange(4)
        offload = chance.choice(["none", "none", "optimizer_cpu"] + ["cpu"] * (stage == 3)) if stage else "none"
        tensor, expert = chance.choice([1, 2, 4]), chance.choice([1, 2, 4]) if "experts" in layers else 1
        recompute = chance.choice(["none", "none", "blocks"])
        meshes.append(Mesh(stage, offload, tensor, expert, recompute, chance.choice([1, 200, 10**6])))
    return Program(
        layers,
        tuple(chance.random() < 0.8 for _ in layers),
        chance.random() < 0.3,
        chance.choice(["sgd", "adamw"]),
        chance.randint(1, 3),
        chance.choice([0.0, 0.3]),
        chance.randint(1, 2),
        tuple(meshes),
    )


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind.startswith("pair"):
            self.up, self.down = (nn.Linear(*sizes, bias=kind == "pair") for sizes in ((WIDTH, 16), (16, WIDTH)))
        elif kind == "experts":
            self.inner = load_example("expert_parallel").MixtureOfExperts(WIDTH, 4)
        else:
            self.inner = nn.LayerNorm(WIDTH) if kind == "norm" else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "up"):
            return x + self.down(F.gelu(self.up(x)))
        return x + self.inner(x.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for kind in program.layers)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if program.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def plan_of(program: Program) -> dict[str, str]:
    plan = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
    for number, (kind, styled) in enumerate(zip(program.layers, program.styled, strict=True)):
        if styled and kind.startswith("pair"):
            plan |= {f"layers.{number}.up": "colwise", f"layers.{number}.down": "rowwise"}
        elif styled and kind == "gathered":
            plan[f"layers.{number}.inner"] = "colwise_gather_output"
    return plan


def sharded(module: Net, program: Program, mesh: Mesh) -> Engine:
    settings: dict[str, Any] = {"tensor_parallel": mesh.tensor, "expert_parallel": mesh.expert}
    if mesh.tensor > 1:
        settings["tensor_plan"] = plan_of(program)
    experts = [layer.inner for layer, kind in zip(module.layers, program.layers, strict=True) if kind == "experts"]
    if mesh.expert > 1 and mesh.tensor == 1:  # the plan cannot stand beside DTensors
        for inner in experts:
            inner.split(device_mesh("cpu", mesh.expert, "expert_parallel")["expert_parallel"])  # type: ignore[union-attr, operator]
    else:
        settings["expert_parallel"] = 1
    return lightning_zero.shard(
        module,
        stage=mesh.stage,
        offload=mesh.offload,
        activation_checkpointing=mesh.recompute,
        reduce_bucket_bytes=mesh.bucket,
        unit={"classes": ["Layer"]},
        **settings,
    )


def train(module: nn.Module, optimizer: Any, program: Program, first: int, rows: slice) -> Tensor:
    found = []
    for step in range(first, first + program.steps):
        for micro in range(program.micro):
            generator = torch.Generator().manual_seed(100 * step + micro)
            tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)[rows]
            loss = F.cross_entropy(module(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
            (loss / program.micro).backward()
            found.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), program.clip or 1e9)
        found.append(norm * 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found)


def run(program: Program) -> str:
    """On each of four ranks: ``equal``, or what went wrong."""
    twin = Net(program)
    steps = OPTIMIZERS[program.optimizer](twin.parameters())
    saved: tuple[Any, Any] | None = None
    for number, mesh in enumerate(program.meshes):
        first = number * program.steps
        expected = train(twin, steps, program, first, slice(None))
        module = Net(program)
        try:
            engine = sharded(module, program, mesh)
            optimizer = OPTIMIZERS[program.optimizer](module.parameters())
            engine.add_optimizer(optimizer)
            if saved is not None:
                engine.load_state_dict(saved[0])
                load_optimizer_state(engine, optimizer, saved[1])
            size = ROWS * mesh.tensor // RANKS
            start = dist.get_rank() // mesh.tensor * size
            found = train(module, optimizer, program, first, slice(start, start + size))
            losses = torch.ones(len(found), dtype=torch.bool)
            losses[program.micro :: program.micro + 1] = False
            dist.all_reduce(means := torch.where(losses, found, 0.0))
            found = torch.where(losses, means / RANKS, found)
            saved = copy.deepcopy(
                (engine.state_dict(only_rank_0=False), optimizer_state(engine, optimizer, only_rank_0=False))
            )
            engine.release()
        except Exception:
            return f"raises: {traceback.format_exc()}"
        if not torch.allclose(found, expected, rtol=2e-5, atol=1e-6):
            return f"differs: losses and norms {found.tolist()} in the place of {expected.tolist()} on mesh {number}"
        for name, value in twin.state_dict().items():
            if not torch.allclose(saved[0][name], value, rtol=0, atol=2e-5):
                return f"differs: {name} by {float((saved[0][name] - value).abs().max())} on mesh {number}"
    return "equal"


if __name__ == "__main__":
    sys.exit(main("meshes", __doc__ or "", draw, run, RANKS))
