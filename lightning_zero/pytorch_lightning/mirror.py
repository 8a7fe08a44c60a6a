"""Loads modules of this package a second time, with other names for what they import.

::

    in the sources                  in the second modules
    lightning.pytorch               pytorch_lightning
    lightning.fabric                lightning_fabric
    lightning                       pytorch_lightning
    lightning_zero.trainer.strategy <package>.trainer.strategy     so all that is loaded twice

What names no Lightning, the engine above all, is there once.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

_OURS = "lightning_zero"
_FOLDERS = ("trainer", "fabric")  # loaded twice, with all that is in them
TWICE = ("ranks.environments", "ranks.allocation", "ranks.rendezvous")  # and these
_LIGHTNING = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


def install(package: str) -> None:
    """Have ``package.trainer.strategy`` found, and the like."""
    if not any(isinstance(finder, _Finder) and finder.package == package for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package))


def is_twice(name: str) -> bool:
    """Whether a module, or what is in one, is loaded twice, by its name below our package."""
    return name.split(".")[0] in _FOLDERS or any(f"{name}.".startswith(f"{other}.") for other in TWICE)


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(f"{self.package}.")
        holds_some = any(other.startswith(f"{name}.") for other in TWICE)
        if name == fullname or not (is_twice(name) or holds_some):
            return None
        found = importlib.util.find_spec(f"{_OURS}.{name}")
        if found is None or found.origin is None:
            return None
        loader = _Loader(fullname, found.origin, self.package)
        spec = importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)
        if spec is not None and found.submodule_search_locations is not None:
            spec.submodule_search_locations = []  # what is inside of a folder is found here
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, package: str) -> None:
        super().__init__(fullname, path)
        self._package = package

    def get_code(self, fullname: str) -> CodeType:
        """From the source, always: what Python keeps compiled beside it has the names of the first module."""
        path = self.get_filename(fullname)
        tree = _Renamed(self._package).visit(ast.parse(self.get_data(path), path))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code


class _Renamed(ast.NodeTransformer):
    """The imports of a module, with other names."""

    def __init__(self, package: str) -> None:
        self._package = package

    def _name(self, name: str) -> str:
        for old, new in _LIGHTNING.items():
            if name == old or name.startswith(f"{old}."):
                return new + name.removeprefix(old)
        below = name.removeprefix(f"{_OURS}.")
        return f"{self._package}.{below}" if below != name and is_twice(below) else name

    def visit_Import(self, node: ast.Import) -> Any:
        for alias in node.names:
            if alias.name == "lightning":
                alias.name, alias.asname = "pytorch_lightning", alias.asname or "lightning"
            new = self._name(alias.name)
            assert new == alias.name or alias.asname, f"import {alias.name}: this needs a name (import ... as ...)"
            alias.name = new
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        return list(self._divided(node))

    def _divided(self, node: ast.ImportFrom) -> Iterator[ast.ImportFrom]:
        """``from folder import module, other``, where one of the two is loaded twice, becomes two imports."""
        assert node.module is not None and node.level == 0
        by_home: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            whole = self._name(f"{node.module}.{alias.name}")
            by_home.setdefault(whole.removesuffix(f".{alias.name}"), []).append(alias)
        for home, names in by_home.items():
            yield ast.copy_location(ast.ImportFrom(home, names, 0), node)
