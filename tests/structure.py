"""Figures of the package's structure: ``python -m tests.structure``, or ``make structure``.

How many files a gradient and a parameter pass is counted of a traced step, how many concepts a step needs by hand: both
in ``docs/one_step.md``.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import statistics
from collections.abc import Iterator
from pathlib import Path

import lightning_zero

PACKAGE = Path(lightning_zero.__file__).parent


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "conf" not in p.relative_to(PACKAGE).parts[:1])


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All of a module: many rules look at each."""
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


def circle(paths: list[Path]) -> list[str]:
    """Modules that import one another in a circle; empty where there is none. Folders' docstrings are not in it."""
    names = {f"lightning_zero.{name_of(p)}" for p in paths if p.stem != "__init__"}
    graph = {
        f"lightning_zero.{name_of(p)}": {i for i in imports_of(p) if i in names} for p in paths if p.stem != "__init__"
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def functions(paths: list[Path]) -> dict[str, int]:
    """Lines of each function."""
    return {
        f"{name_of(path)}.{node.name}:{node.lineno}": (node.end_lineno or 0) - node.lineno + 1
        for path in paths
        for node in nodes(path.read_text())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def report() -> Iterator[str]:
    paths = modules()
    lines = {name_of(p): len(p.read_text().splitlines()) for p in paths}
    lengths = functions(paths)
    sizes = sorted(lengths.values())
    comments = sum(line.lstrip().startswith("# ") for p in paths for line in p.read_text().splitlines())
    biggest, longest = max(lines, key=lambda n: lines[n]), max(lengths, key=lambda n: lengths[n])
    yield f"files {len(lines)}, lines {sum(lines.values()):,}; in the root {len(list(PACKAGE.glob('*.py')))}"
    yield f"file: median {statistics.median(lines.values()):.0f}, largest {lines[biggest]} ({biggest})"
    p95 = sizes[int(0.95 * len(sizes))]
    yield f"function: median {statistics.median(sizes):.0f}, p95 {p95}, longest {lengths[longest]} ({longest})"
    yield f"lines of comment per 100: {100 * comments / sum(lines.values()):.1f}"
    yield f"circle of imports: {' -> '.join(circle(paths)) or 'none'}"


if __name__ == "__main__":
    print(*report(), sep="\n")
