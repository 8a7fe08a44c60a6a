"""Figures of the package beside their budgets and beside FSDP2: ``python -m tests.structure``, or ``make structure``.

A budget may fall. It rises only in a commit that says what it buys and what was taken out in exchange.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard as fsdp2
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

import lightning_zero
from lightning_zero.engine.engine import Engine
from lightning_zero.settings import ZeroConfig

PACKAGE = Path(lightning_zero.__file__).parent
ROOT = PACKAGE.parent
FSDP2 = Path(fsdp2.__file__).parent
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")

BUDGETS = {
    "lines of the package": 44_260,
    "lines of the engine": 11_720,
    "files of the engine": 43,
    "lines of the longest file": 600,
    "lines of tests": 44_580,
    "pairs of folders of the engine that import each other": 0,
    "Any in the engine": 42,
    "private names of Lightning": 11,
    "keys of zero": 41,
    "public members of the strategy": 12,
    "public members of Engine": 20,
    "words of README and docs": 26_000,
    "calls of a step": 1_630,
    "files of a step": 29,
    "changes of file in a step": 830,
}


def modules(root: Path = PACKAGE) -> list[Path]:
    return sorted(p for p in root.rglob("*.py") if "conf" not in p.relative_to(root).parts[:1])


def name_of(path: Path) -> str:
    """The dotted name of a module without ``lightning_zero.``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree."""
    return tuple(ast.walk(ast.parse(text)))


def imports_of(path: Path) -> Iterator[str]:
    """Names of imported modules, those imported inside of functions and for type checking included."""
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_names_of_lightning(path: Path) -> list[str]:
    """Names with an underscore that a module imports from Lightning, or takes as an attribute of it and names anew."""
    imported = [
        alias.name
        for node in nodes(path.read_text())
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIGHTNING
        for alias in node.names
        if alias.name.startswith("_")
    ]
    return imported + re.findall(r"^\w+ = (?:pl|fabric)\.[\w.]*\.(_\w+)$", path.read_text(), re.MULTILINE)


def lines_of(paths: list[Path]) -> int:
    return sum(len(p.read_text().splitlines()) for p in paths)


def pairs_both_ways(folder: str) -> list[tuple[str, str]]:
    """Pairs of folders inside ``folder`` of the package that import each other. Its top-level files are left out."""
    prefix = f"lightning_zero.{folder}."
    arrows = set()
    for path in modules(PACKAGE / folder):
        parts = path.relative_to(PACKAGE / folder).parts
        targets = {i.removeprefix(prefix).split(".")[0] for i in imports_of(path) if i.startswith(prefix)}
        if len(parts) > 1:
            arrows |= {(parts[0], t) for t in targets if (PACKAGE / folder / t).is_dir() and t != parts[0]}
    return sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)


def count_keys(config: Any) -> int:
    """The number of settings in a dataclass and in those inside it."""
    return sum(
        count_keys(value) if dataclasses.is_dataclass(value := getattr(config, field.name)) else 1
        for field in dataclasses.fields(config)
    )


def public_members(cls: type, base: type = object) -> set[str]:
    """Methods, properties and attributes set in methods whose names have no underscore and are not of ``base``."""
    package = [c for c in cls.__mro__ if c.__module__.startswith("lightning_zero")]
    tree = [ast.parse(textwrap.dedent(inspect.getsource(c))) for c in package]
    set_on_self = {
        node.attr
        for node in itertools.chain.from_iterable(map(ast.walk, tree))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return {name for name in {*dir(cls), *set_on_self} if not name.startswith("_") and not hasattr(base, name)}


class Step:
    """Counts the calls of Python functions of some files, and how often a call is in another file than the last."""

    def __init__(self, root: Path) -> None:
        self.calls, self.changes, self.files = 0, 0, set[str]()
        self._root, self._last = str(root), ""

    def __enter__(self) -> Step:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(self._root):
            self.calls, self.changes, self._last = self.calls + 1, self.changes + (name != self._last), name
            self.files.add(name)


class Blocks(nn.Module):
    """An embedding, four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def ours() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks()
    engine = lightning_zero.shard(model, stage=3, unit={"classes": ["Sequential"]})
    optimizer = torch.optim.AdamW(model.parameters())
    engine.add_optimizer(optimizer)
    return model, optimizer


def theirs() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    model = Blocks()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def traced_step(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], root: Path) -> Step:
    """Trace twenty steps of a small model after the third on this rank, and return the one of the fewest calls.

    A rank that waits for a late one asks more often. Collective: every rank must call it."""
    model, optimizer = make()
    x = torch.arange(8).reshape(2, 4)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    traced = []
    for _ in range(20):
        with Step(root) as one:
            step()
        traced.append(one)
    return min(traced, key=lambda one: one.calls)


def figures_of_sources() -> dict[str, int]:
    package, engine = modules(), modules(PACKAGE / "engine")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {
        "lines of the package": lines_of(package),
        "lines of the engine": lines_of(engine),
        "files of the engine": len(engine),
        "lines of the longest file": max(lines_of([p]) for p in package),
        "lines of tests": lines_of(list((ROOT / "tests").rglob("*.py"))),
        "pairs of folders of the engine that import each other": len(pairs_both_ways("engine")),
        "Any in the engine": sum(len(re.findall(r"\bAny\b", p.read_text())) for p in engine),
        "private names of Lightning": sum(len(private_names_of_lightning(p)) for p in package),
        "keys of zero": count_keys(ZeroConfig()),
        "public members of the strategy": len(public_members(lightning_zero.ZeroStrategy, ParallelStrategy)),
        "public members of Engine": len(public_members(Engine)),
        "words of README and docs": sum(len(p.read_text().split()) for p in pages),
    }


def figures_of_step(step: Step) -> dict[str, int]:
    return {
        "calls of a step": step.calls,
        "files of a step": len(step.files),
        "changes of file in a step": step.changes,
    }


def figures_of_fsdp2(step: Step) -> dict[str, int]:
    files = modules(FSDP2)
    return {
        "lines of the engine": lines_of(files),
        "files of the engine": len(files),
        "lines of the longest file": max(lines_of([p]) for p in files),
        "Any in the engine": sum(len(re.findall(r"\bAny\b", p.read_text())) for p in files),
        **figures_of_step(step),
    }


def _on_rank(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    own, other = traced_step(ours, PACKAGE), traced_step(theirs, FSDP2)
    if rank == 0:
        results.put((figures_of_step(own), figures_of_fsdp2(other)))
    dist.barrier()
    dist.destroy_process_group()


def report() -> Iterator[str]:
    """Lines of a table: each figure, its budget, and FSDP2's by the same script. Starts two processes."""
    import tempfile

    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, (f"{folder}/store", results), nprocs=2)
        step, fsdp2_figures = results.get(timeout=60)
    yield f"{'':54}{'now':>9}{'at most':>9}{'FSDP2':>9}"
    for name, now in (figures_of_sources() | step).items():
        over = " over" if now > BUDGETS[name] else ""
        other = f"{fsdp2_figures[name]:,}" if name in fsdp2_figures else ""
        yield f"{name:54}{now:>9,}{BUDGETS[name]:>9,}{other:>9}{over}".rstrip()


if __name__ == "__main__":
    print(*report(), sep="\n")
