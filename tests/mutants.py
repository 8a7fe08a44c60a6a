"""Breaks the package in places drawn by lot and prints the breaks that no test sees: ``make mutants``.

It works in copies of the tree. A first run of the default tier notes which test reaches which block, also in processes
that a test starts (``outputs/mutants/reached.json`` keeps it). Then each break is tried on the tests that reach its
block, the fastest of each file first, until one fails or hangs.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "comm", "checkpoint")
REACHED = ROOT / "outputs" / "mutants" / "reached.json"
WAITS = re.compile(r"wait|synchronize|join|result|flush|fsync")
ORDERED = re.compile(WAITS.pattern + r"|sync|copy|write|gather|sum_|meet|together")
TOUCHED = re.compile(r"([\w.\[\]]+)\.\w+\(|([\w.\[\]]+\.\w+) = |\w+\(([\w.]+)")  # what a statement may change
QUIET = re.compile(r"warn|log|info|debug|append_note|add_note")  # a call without which numbers stay the same

Reached = dict[str, tuple[float, list[str]]]  # by test: its seconds, and the blocks that it reaches


@dataclasses.dataclass(frozen=True)
class Break:
    """One change of one file: bytes ``start`` to ``end`` become ``text``."""

    file: str
    function: str
    block: int  # the line of its first statement
    line: int
    kind: str
    start: int
    end: int
    old: str
    text: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:70] for text in (self.old, self.text))
        return f"{self.file}:{self.line} {self.function}: {self.kind}: {old}  ->  {new}"


class Finder(ast.NodeVisitor):
    """Finds the places of one file that can be broken, and its blocks: a function's body, an ``if``'s, a loop's."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.breaks: list[Break] = []
        self.blocks: list[tuple[int, int, int]] = []  # where it begins, its indent, its line
        self._block = 0
        self._names: list[str] = []
        self._in_function = 0
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.visit(ast.parse(source))

    def _place(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column

    def _text(self, node: ast.expr | ast.stmt) -> str:
        return self.source[self._place(node.lineno, node.col_offset) : self._end(node)].decode()

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)

    def _add(self, kind: str, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt, text: str) -> None:
        if self._block:
            start, end = self._place(first.lineno, first.col_offset), self._end(last)
            old = self.source[start:end].decode()
            name = ".".join(self._names)
            self.breaks.append(Break(self.file, name, self._block, first.lineno, kind, start, end, old, text))

    def generic_visit(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt) and self._in_function:
                self._visit_block(value, after=getattr(node, "lineno", 0))
            else:
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        self.visit(each)

    def _visit_block(self, block: list[ast.stmt], after: int) -> None:
        first, outer = block[0], self._block
        is_elif = self._text(first).startswith("elif")
        if first.lineno > after and not is_elif and not getattr(first, "decorator_list", None):
            self._block = first.lineno
            self.blocks.append((self._place(first.lineno, first.col_offset), first.col_offset, first.lineno))
        self._look_at_block(block)
        for statement in block:
            self.visit(statement)
        self._block = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not body or node.name == "__repr__":
            return
        self._names.append(node.name)
        self._in_function += 1
        self._visit_block(body, after=node.lineno)
        self._in_function -= 1
        self._names.pop()

    def _leave(self, node: ast.AST) -> None:
        """Leave texts of errors, assertions and strings as they are."""

    visit_Raise = visit_Assert = visit_JoinedStr = visit_AnnAssign = _leave

    def _look_at_block(self, block: list[ast.stmt]) -> None:
        for statement in block:
            name = self._called(statement)
            if name and not QUIET.search(name):
                self._add("no wait" if WAITS.search(name) else "no call", statement, statement, "pass")
        for one, other in itertools.pairwise(block):
            if self._order_counts(one, other):
                between = self.source[self._end(one) : self._place(other.lineno, other.col_offset)].decode()
                self._add("order", one, other, self._text(other) + between + self._text(one))

    def _called(self, node: ast.stmt) -> str:
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        return self._text(node.value.func).rpartition(".")[2] if is_call else ""  # type: ignore[attr-defined]

    def _order_counts(self, *pair: ast.stmt) -> bool:
        """Return whether one calls a method of an object that the other names, or is a wait, a copy or a message."""
        texts, names = [self._text(s) for s in pair], " ".join(map(self._called, pair))
        touched = [found.group(found.lastindex or 0) for found in map(TOUCHED.match, texts) if found]
        if not self._called(pair[0]) or len(touched) < 2 or re.search(r"check|refuse|^(\w+) \1$", names):
            return False
        named = zip(touched, reversed(texts), strict=True)
        shares = any(re.search(rf"(?<![\w.]){re.escape(name)}\b", text) for name, text in named if name != "self")
        return shares or ORDERED.search(names) is not None

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_path = isinstance(node.op, ast.Div) and re.search(r"path|folder|target|name", self._text(node))
        if isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv) and not (
            isinstance(node.left, ast.List | ast.Tuple) or is_path
        ):
            self._add("no factor", node, node, f"({self._text(node.left)})")
        if isinstance(node.op, ast.Add | ast.Sub) and isinstance(node.right, ast.Constant | ast.Name):
            self._add("no summand", node, node, f"({self._text(node.left)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        turned = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}.get(type(node.ops[0]))
        left, right = node.left, node.comparators[0]
        if turned and len(node.ops) == 1 and not (isinstance(left, ast.Name) and isinstance(right, ast.Name)):
            more = {"0": "1", "1": "2"}.get(self._text(right)) if turned == ">=" else None  # sizes are all >= 0 or 1
            text = f"> {more}" if more else f"{turned} {self._text(right)}"
            self._add("off by one", node, node, f"{self._text(left)} {text}")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if not isinstance(node.body[0], ast.Raise):
            self._add("condition", node.test, node.test, f"(not ({self._text(node.test)}))")
        self.generic_visit(node)


def find() -> Iterator[Finder]:
    for path in sorted(path for folder in FOLDERS for path in (ROOT / "lightning_zero" / folder).rglob("*.py")):
        yield Finder(str(path.relative_to(ROOT)), path.read_bytes())


def draw(seed: int, count: int) -> list[Break]:
    """Draw ``count`` breaks, of each kind as many."""
    kinds: dict[str, list[Break]] = {}
    for finder in find():
        for each in finder.breaks:
            kinds.setdefault(each.kind, []).append(each)
    chance = random.Random(seed)
    for each_kind in kinds.values():
        chance.shuffle(each_kind)
    order = sorted(kinds)
    return [kinds[order[i % len(order)]][i // len(order)] for i in range(count)]


@contextlib.contextmanager
def copy_of_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for name in listed.splitlines():
            if (ROOT / name).exists():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name, follow_symlinks=False)
        yield Path(folder)


def run_tests(tree: Path, args: list[str], timeout: float, **environ: str) -> str:
    """Run pytest in ``tree``: what it printed, or an empty text if it took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *args]
    environ = os.environ | environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tree, env=environ, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            said: str = process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return ""
    return said


def make_map(jobs: int, args: list[str]) -> Reached:
    """Run the default tier, or tests that ``args`` of pytest name, and keep what each test reaches."""
    with copy_of_tree() as tree:
        for finder in find():
            source = finder.source
            for start, indent, line in sorted(finder.blocks, reverse=True):
                call = f'__import__("tests.mutants_recorder").mutants_recorder.reached("{finder.file}:{line}")'
                source = source[:start] + f"{call}\n{' ' * indent}".encode() + source[start:]
            (tree / finder.file).write_bytes(source)
        args = ["-p", "tests.mutants_recorder", "-n", str(jobs), "--dist", "worksteal", *args]
        print(run_tests(tree, args, 7200, MUTANTS_REACHED=f"{tree}/reached")[-600:], flush=True)
        tests: Reached = {}
        for log in tree.glob("reachedgw*.log"):
            lines = [line.split("\t") for line in log.read_text().splitlines()]
            names = {line[0]: line[2] for line in lines if line[1] == "="}
            for number, sign, what, *when in lines:
                seconds, places = tests.setdefault(names.get(number, ""), (0.0, []))
                if sign == "@":
                    places.append(what)
                else:
                    tests[what] = (seconds + float(when[0]) * (-1 if sign == "=" else 1), places)
    REACHED.parent.mkdir(parents=True, exist_ok=True)
    REACHED.write_text(json.dumps(tests))
    return tests


def choose(tests: Reached, broken: Break, seconds: float) -> list[str]:
    """Give tests that reach the broken block, for ``seconds``: a case of each test first, of each file by turns."""
    place = f"{broken.file}:{broken.block}"
    cases, of_file = Counter[str](), Counter[tuple[int, str]]()
    ranked: list[tuple[int, int, float, str]] = []
    for cost, name in sorted((cost, name) for name, (cost, places) in tests.items() if place in places):
        turn, file = cases[name.partition("[")[0]], name.partition("::")[0]
        ranked.append((turn, of_file[turn, file], cost, name))
        cases[name.partition("[")[0]] += 1
        of_file[turn, file] += 1
    chosen = []
    for *_, cost, name in sorted(ranked):
        if (seconds := seconds - cost) < 0 and chosen:
            break
        chosen.append(name)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the draw")
    parser.add_argument("--count", type=int, default=60, help="breaks to try")
    parser.add_argument("--minutes", type=float, default=60, help="stop after so many, without the map")
    parser.add_argument("--jobs", type=int, default=2, help="breaks at a time")
    parser.add_argument("--map", nargs="*", metavar="ARG", help="make the map anew; arguments for pytest")
    options = parser.parse_args()
    written = max((ROOT / finder.file).stat().st_mtime for finder in find())
    if options.map is not None or not REACHED.exists() or REACHED.stat().st_mtime < written:
        make_map(options.jobs, options.map or [])
    tests: Reached = json.loads(REACHED.read_text())
    breaks, until = draw(options.seed, options.count), time.monotonic() + 60 * options.minutes
    each_s = 2 * 60 * options.minutes * options.jobs / options.count  # most are seen in a part of their time

    def attempt(broken: Break) -> str | None:
        """Give who saw it; an empty text if nobody did; None if there was no time."""
        if time.monotonic() > until:
            return None
        chosen = choose(tests, broken, each_s)
        if not chosen:
            return ""
        with copy_of_tree() as tree:
            path = tree / broken.file
            source = path.read_bytes()
            path.write_bytes(source[: broken.start] + broken.text.encode() + source[broken.end :])
            said = run_tests(tree, ["-x", "--timeout=90", "--tb=no", *chosen], max(120.0, 3 * each_s))
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return failed.group(1) if failed else "" if re.search(r"\d passed", said) else "a run that hangs or breaks off"

    print(f"seed {options.seed}", flush=True)
    found: dict[Break, str | None] = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for broken, seen in zip(breaks, pool.map(attempt, breaks), strict=True):
            found[broken] = seen
            what = f"seen by {seen}" if seen else "not tried" if seen is None else "NOT SEEN"
            print(f"{len(found)}/{len(breaks)} {what}: {broken}", flush=True)
    tried = [seen for seen in found.values() if seen is not None]
    print(f"{sum(map(bool, tried))} of {len(tried)} breaks were seen by the default tests.")
    for broken, seen in found.items():
        if seen == "":
            print(f"  not seen: {broken}")


if __name__ == "__main__":
    main()
