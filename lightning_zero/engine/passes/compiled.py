"""Keeps the engine's hooks out of ``torch.compile``'s graphs, because a traced hook would run only during the trace.

::

    unit.compile()                     compiles the unit's forward, before sharding or after it
    container.compile() of a module    compiles the forwards of its units one by one; the container's graph breaks at
      that holds units, or the root;   the units' calls, so ``fullgraph`` is refused
      torch.compile(module)
    zero.compile=blocks                compiles each unit but the root
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

from lightning_zero.engine.passes.containers import Kwargs
from lightning_zero.engine.passes.recompute import UnitForward
from lightning_zero.engine.torch_modes import outside_graphs
from lightning_zero.mesh.local_leaves import split_of
from lightning_zero.settings import Compile as Blocks
from lightning_zero.settings import CompileConfig, ConfigError

_TRACED = "containers"  # the file that graphs may hold, because modules compute with it
_CALL = "_compiled_call_impl"  # the attribute in which ``nn.Module.compile`` keeps the compiled call


class Compile(NamedTuple):
    """The settings of one ``torch.compile`` call. Units inside the compiled module get the same settings."""

    apply: Callable[[Callable[..., object]], Callable[..., object]]  # compiles a function with the same settings
    inductor: bool  # the backend is torch's own compiler
    fullgraph: bool


def compile_with(**settings: Any) -> Compile:

    def apply(function: Callable[..., object]) -> Callable[..., object]:
        options = {"options": dict(settings["options"])} if settings.get("options") else {}  # torch pops some of them
        return torch.compile(function, **settings | options)

    return Compile(apply, settings.get("backend", "inductor") == "inductor", settings.get("fullgraph", False))


def how_compiled(function: object) -> Compile | None:
    """Return the settings with which a function or module was compiled, or None if it is not compiled."""
    context: Any = vars(function).get("dynamo_ctx") if isinstance(function, nn.Module) else None
    if context is None and isinstance(function, types.FunctionType) and hasattr(function, "_torchdynamo_orig_callable"):
        # torch offers no other way to find the settings of a compiled function.
        context = inspect.getclosurevars(function).nonlocals.get("self")
    backend = getattr(context, "callback", None)
    if not callable(backend):
        return None  # torch.compiler.disable
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    inductor = getattr(backend, "compiler_name", "") == "inductor"
    return Compile(context, inductor, bool(getattr(context, "fullgraph", False)))


def needs_compiler(module: nn.Module) -> bool:
    """Return whether inductor compiles any part of ``module``."""
    found = (how for inner in module.modules() for _, how in _compiled_parts(inner))
    return any(how.inductor for how in found)


def check_compiled(module: nn.Module, units: Sequence[str]) -> None:
    """Raise a ConfigError if a module that holds ``units`` was compiled with ``fullgraph``, or if a module that holds
    layers split by tensor parallelism was compiled at all."""
    for inner in module.modules():
        if any(True for _ in _compiled_parts(inner)):
            _refuse_split(getattr(inner, "_orig_mod", inner))
    for around in _units_inside(module, {name: module.get_submodule(name) for name in units if name}):
        for _, how in _compiled_parts(around):
            _refuse_fullgraph(around, how)


def _refuse_fullgraph(module: nn.Module, how: Compile) -> None:
    if how.fullgraph:
        raise ConfigError(
            f"{type(module).__name__} is compiled with fullgraph=True, and holds units, which are gathered between "
            "graphs: it cannot be one graph. Compile its blocks so (block.compile(fullgraph=True)), or drop fullgraph."
        )


def _refuse_split(module: nn.Module) -> None:
    inner = {*module.parameters()} - {*module.parameters(recurse=False)}
    if any((split := split_of(param)) is not None and split.by == "tensor_parallel" for param in inner):
        raise ConfigError(
            "zero.tensor_parallel: expected split layers outside of compiled modules (a graph would not see their "
            f"parts), got a compiled {type(module).__name__} that holds split layers. Compile the layers or functions "
            "inside of it, or drop torch.compile."
        )


def _units_inside(module: nn.Module, units: Mapping[str, nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Map each module that holds units to all units inside it, at any depth."""
    found: dict[nn.Module, list[nn.Module]] = {}
    for name, around in module.named_modules():
        prefix = f"{name}." if name else ""
        if inside := [unit for key, unit in units.items() if key != name and key.startswith(prefix)]:
            found[around] = inside
    return found


def check_compiler(config: CompileConfig) -> None:
    """Raise a ConfigError if ``zero/compile`` asks for inductor and this node has no C++ compiler."""
    if config.name is not Blocks.none and config.arguments.get("backend", "inductor") == "inductor":
        find_compiler("zero/compile=blocks", "choose zero/compile=none")


def find_compiler(what: str, way_out: str) -> None:
    """Raise a ConfigError if there is no C++ compiler for inductor. ``what``: the setting that needs the compiler.
    ``way_out``: what users can do instead. The error message contains both."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # the import takes a second
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
    """Make torch.compile skip the engine's functions: it traces none of them, and graphs break at their calls."""
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
    """Compiles units of one sharded module, and tracks which units, and which modules that hold units, are compiled.

    Args:
        forwards: forwards of the units by name, the root's ("") first.
        blocks: settings with which to compile all units except the root and units that are compiled already. None: only
            units that users have compiled are compiled.
        refuse: called before a user's later ``compile()`` of a module, with a small function that was compiled with the
            same settings, and the class name of the module. Raises if the settings cannot be used.
    """

    def __init__(
        self,
        module: nn.Module,
        forwards: Mapping[str, UnitForward],
        blocks: Compile | None,
        refuse: Callable[[Callable[..., object], str], None],
    ) -> None:
        keep_out()
        self._root, self._refuse = module, refuse
        units = {name: module.get_submodule(name) for name in forwards}
        self._forwards = {units[name]: forward for name, forward in forwards.items()}
        self._inside = _units_inside(module, units)
        self._own: set[nn.Module] = set()  # units that were compiled directly, not with a module that holds them
        self._later: dict[nn.Module, Kwargs] = {}  # settings of compilations after sharding
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
        """Return whether anything in the module is compiled, by the engine or the user."""
        if any(forward.is_compiled for forward in self._forwards.values()):
            return True
        calls = [vars(inner).get(_CALL) for inner in self._root.modules()]
        # Calls that the engine has replaced are marked as disabled.
        by_torch = any(call is not None and not getattr(call, "_torchdynamo_disable", False) for call in calls)
        return by_torch or any(True for inner in self._root.modules() for _ in _compiled_parts(inner))

    def undo(self) -> None:
        """Restore the modules' own calls, and let torch compile the modules that users compiled after sharding."""
        for module, call in self._calls:
            vars(module).pop(_CALL, None)
            vars(module).pop("compile", None)
            vars(module).update(call)
        for module, settings in self._later.items():
            module.compile(**settings)

    def _compiled(self, module: nn.Module, how: Compile) -> None:
        """Compile the units inside ``module`` with the settings ``how``, with which ``module`` itself was compiled."""
        if module in self._forwards:
            self._own.add(module)
        for unit in self._inside.get(module, ()):
            if unit not in self._own and not any(True for _ in _compiled_parts(unit)):
                self._forwards[unit].compile(how.apply)
            # torch would trace our hooks here, and compile ``nn.Module._call_impl``, whose graph limit is shared.
            vars(unit)[_CALL] = outside_graphs(unit._call_impl)

    def _compile_later(self, module: nn.Module, **settings: Any) -> None:
        """Compile ``module``. Users call this method as ``module.compile`` after sharding."""
        _refuse_split(module)
        how = compile_with(**settings)
        # Before any change; torch may refuse the settings, too. What is compiled here is never called.
        self._refuse(how.apply(lambda: None), type(module).__name__)
        if module in self._inside:
            _refuse_fullgraph(module, how)
        self._later[module] = settings
        if module in self._forwards:
            self._forwards[module].compile(how.apply)
        else:
            vars(module)[_CALL] = how.apply(module._call_impl)
        self._compiled(module, how)


def _compiled_parts(module: nn.Module) -> Iterator[tuple[str, Compile]]:
    """Yield (attribute name, settings) of each compiled call or method that users have set on ``module``."""
    for name, value in vars(module).items():
        of = getattr(getattr(value, "_torchdynamo_orig_callable", None), "__self__", None)
        wraps = vars(module).get("_modules", {}).get("_orig_mod")
        if of is not None and (of is module or of is wraps) and (how := how_compiled(value)) is not None:
            yield name, how
