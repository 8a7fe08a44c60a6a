"""Keeps what ``torch.compile`` makes of a sharded module inside of our hooks.

A compiled call of a unit would hold our hooks too: traced into the graph, they would run once and never again, and the
graph would be made for placeholders. So what is compiled of a unit is its ``forward``, and hooks, ours and the user's,
are called around it as always::

    unit.compile()                     before sharding or after it: its forward is compiled
    container.compile(), of modules    units inside are compiled each for itself, and are called from outside of the
      around units; of the root;       graphs of what is around them. With ``fullgraph`` it is refused: graphs break
      torch.compile(module)            where units are called
    zero.compile=blocks                as if each unit but the root had been compiled

Under activation checkpointing the forward that is computed again is the compiled one.

The engine's own functions are called in the middle of what is compiled: a backward inside of a compiled step calls our
hooks. torch looks into no file of the engine but the one that is part of what modules compute.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pkgutil import iter_modules
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_zero.config import Compile as Blocks
from lightning_zero.config import CompileConfig, ConfigError
from lightning_zero.engine.passes.recompute import UnitForward
from lightning_zero.engine.torch_modes import outside_graphs

_TRACED = "containers"  # the file that is part of what modules compute
_CALL = "_compiled_call_impl"  # where ``nn.Module.compile`` keeps the compiled call of a module


class Compile(NamedTuple):
    """How ``torch.compile`` was called, or is to be.

    Attributes:
        apply: compiles a function so.
        inductor: torch's own compiler is asked for.
        fullgraph: breaks are errors.
    """

    apply: Callable[[Any], Any]
    inductor: bool
    fullgraph: bool


def compile_with(**settings: Any) -> Compile:
    """Describe ``torch.compile(function, **settings)``."""

    def apply(function: Any) -> Any:
        options = settings.get("options")
        given = (
            {**settings, "options": dict(options)} if isinstance(options, dict) else settings
        )  # torch takes some out
        return torch.compile(function, **given)

    return Compile(apply, settings.get("backend", "inductor") == "inductor", settings.get("fullgraph", False))


def how_compiled(function: Any) -> Compile | None:
    """Find how ``function``, or a module, was compiled; None where it was not."""
    context: Any = vars(function).get("dynamo_ctx") if isinstance(function, nn.Module) else None
    if context is None and isinstance(function, types.FunctionType) and hasattr(function, "_torchdynamo_orig_callable"):
        # torch keeps no other way from a compiled function to what it was compiled with.
        context = inspect.getclosurevars(function).nonlocals.get("self")
    backend = getattr(context, "callback", None)
    if not callable(backend):
        return None  # torch.compiler.disable
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    inductor = getattr(backend, "compiler_name", "") == "inductor"
    return Compile(context, inductor, bool(getattr(context, "fullgraph", False)))


def from_settings(config: CompileConfig) -> Compile | None:
    """What ``zero/compile`` asks for."""
    if config.name is Blocks.none:
        return None
    return compile_with(**config.arguments)


def needs_compiler(module: nn.Module) -> bool:
    """Whether something in ``module`` is compiled by inductor."""
    found = (how for inner in module.modules() for _, how in _compiled_parts(inner))
    return any(how.inductor for how in found)


def check_compiled(module: nn.Module, units: Sequence[str]) -> None:
    """Check what is compiled of a module whose units have these names.

    Raises:
        ConfigError: a module around units was compiled with ``fullgraph``.
    """
    for around in _units_inside(module, {name: module.get_submodule(name) for name in units if name}):
        for _, how in _compiled_parts(around):
            _refuse_fullgraph(around, how)


def _refuse_fullgraph(module: nn.Module, how: Compile) -> None:
    if how.fullgraph:
        raise ConfigError(
            f"{type(module).__name__} is compiled with fullgraph=True, and holds units, which are gathered between "
            "graphs: it cannot be one graph. Compile its blocks so (block.compile(fullgraph=True)), or drop fullgraph."
        )


def _units_inside(module: nn.Module, units: Mapping[str, nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Find the modules that hold ``units``, innermost ones too, and list these of each."""
    found: dict[nn.Module, list[nn.Module]] = {}
    for name, around in module.named_modules():
        prefix = f"{name}." if name else ""
        if inside := [unit for key, unit in units.items() if key != name and key.startswith(prefix)]:
            found[around] = inside
    return found


def check_compiler(config: CompileConfig) -> None:
    """
    Raises:
        ConfigError: ``zero/compile`` asks for inductor, and this node has no C++ compiler.
    """
    if config.name is not Blocks.none and config.arguments.get("backend", "inductor") == "inductor":
        find_compiler("zero/compile=blocks", "choose zero/compile=none")


def find_compiler(what: str, way_out: str) -> None:
    """
    Raises:
        ConfigError: there is no C++ compiler, which inductor needs for ``what``.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            f"{what}: expected a C++ compiler, which torch.compile's backend inductor needs, found none. Install g++, "
            f"name one by the variable CXX, or {way_out}."
        ) from error


@functools.cache
def keep_out() -> None:
    """Have torch.compile make no graphs of the engine's functions, and end those that lead to them."""
    from torch._dynamo import trace_rules

    import lightning_zero.engine.passes as passes

    engine = importlib.import_module(passes.__name__.rpartition(".")[0])
    names = [
        module.name for package in (engine, passes) for module in iter_modules(package.__path__, f"{package.__name__}.")
    ]
    layers = [
        f"lightning_zero.{layer}"
        for layer in ("comm", "ranks", "tiers", "device", "planning", "optimizers", "timeline")
    ]
    for name in (*names, *layers):
        if name != passes.__name__ and name.rpartition(".")[2] != _TRACED:
            trace_rules.add(name)


class CompiledModules:
    """What is compiled of the units of one sharded module, and of the modules around them.

    Args:
        module: the root.
        forwards: of the units, by their names, the root's ("") first.
        blocks: compile each unit but the root so that nothing else has compiled; None: do not.
        refuse: is called with a function that was compiled as a module is to be, and with the module's class; it may
            raise.
    """

    def __init__(
        self,
        module: nn.Module,
        forwards: Mapping[str, UnitForward],
        blocks: Compile | None,
        refuse: Callable[[Any, str], None],
    ) -> None:
        keep_out()
        self._root, self._refuse = module, refuse
        units = {name: module.get_submodule(name) for name in forwards}
        self._forwards = {units[name]: forward for name, forward in forwards.items()}
        self._inside = _units_inside(module, units)
        self._own: set[nn.Module] = set()  # units that were compiled themselves, not with what is around them
        self._later: dict[nn.Module, Mapping[str, Any]] = {}  # what was compiled after sharding
        modules = [inner for inner in module.modules() if inner in self._inside or inner in self._forwards]
        self._calls = [(inner, {_CALL: vars(inner)[_CALL]} if _CALL in vars(inner) else {}) for inner in modules]
        for inner in modules:
            for name, how in list(_compiled_parts(inner)):
                if name == _CALL and inner in self._forwards:
                    del vars(inner)[_CALL]
                    self._forwards[inner].compile(how.apply)
                self._compiled(inner, how)
        for name, forward in forwards.items():
            if blocks is not None and name and units[name] not in self._own and not forward.is_compiled:
                forward.compile(blocks.apply)
        for inner in modules:
            vars(inner)["compile"] = types.MethodType(self._compile_later, inner)

    @property
    def are_there(self) -> bool:
        """Whether anything of the sharded module is compiled, by whomever."""
        return any(forward.is_compiled for forward in self._forwards.values()) or any(
            True for inner in self._root.modules() for _ in [*_compiled_parts(inner), *_calls_compiled(inner)]
        )

    def undo(self) -> None:
        """Give the modules back as they were, and what was compiled since compiled in torch's own way."""
        for module, call in self._calls:
            vars(module).pop(_CALL, None)
            vars(module).pop("compile", None)
            vars(module).update(call)
        for module, settings in self._later.items():
            module.compile(**settings)

    def _compiled(self, module: nn.Module, how: Compile) -> None:
        """``module`` has been compiled: follow it in what is inside."""
        if module in self._forwards:
            self._own.add(module)
        for unit in self._inside.get(module, ()):
            if unit not in self._own and not any(True for _ in _compiled_parts(unit)):
                self._forwards[unit].compile(how.apply)
            # The graphs around it end where it is called, and torch would go on to compile what is inside of the call:
            # our hooks, and ``nn.Module._call_impl``, which is one function for all modules, with few graphs allowed.
            vars(unit)[_CALL] = outside_graphs(unit._call_impl)

    def _compile_later(self, module: nn.Module, **settings: Any) -> None:
        """``module.compile(**settings)``, after sharding."""
        how = compile_with(**settings)
        self._refuse(how.apply(_probe), type(module).__name__)  # before anything has changed; torch may refuse them too
        if module in self._inside:
            _refuse_fullgraph(module, how)
        self._later[module] = settings
        if module in self._forwards:
            self._forwards[module].compile(how.apply)
        else:
            vars(module)[_CALL] = how.apply(module._call_impl)
        self._compiled(module, how)


def _probe() -> None:
    """A function to try settings of torch.compile with. It is never called."""


def _calls_compiled(module: nn.Module) -> Iterator[str]:
    """The compiled call of a module that we have not replaced."""
    call = vars(module).get(_CALL)
    if call is not None and not getattr(call, "_torchdynamo_disable", False):
        yield _CALL


def _compiled_parts(module: nn.Module) -> Iterator[tuple[str, Compile]]:
    """What users compiled of a module itself: its call, or methods of its own that were replaced on the instance."""
    for name, value in vars(module).items():
        of = getattr(getattr(value, "_torchdynamo_orig_callable", None), "__self__", None)
        wraps = vars(module).get("_modules", {}).get("_orig_mod")
        if of is not None and (of is module or of is wraps) and (how := how_compiled(value)) is not None:
            yield name, how
