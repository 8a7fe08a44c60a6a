"""Keeps what ``torch.compile`` makes of a sharded module inside of our hooks.

A compiled call of a unit would hold our hooks too: traced into the graph, they would run once and never again, and the
graph would be made for placeholders. So what is compiled of a unit is its ``forward``, and hooks, ours and the user's,
are called around it as always::

    unit.compile()                     before sharding or after it: its forward is compiled
    container.compile(), of modules    units inside are compiled each for itself, and are called from outside of the
      around units; of the root;       graphs of what is around them. With ``fullgraph``, each unit is one graph; the
      torch.compile(module)            module around them cannot be
    zero.compile=blocks                as if each unit but the root had been compiled

Under activation checkpointing the forward that is computed again is the compiled one.

The engine's own functions are called in the middle of what is compiled: a backward inside of a compiled step calls our
hooks. torch looks into no file of the engine but those that are part of what modules compute.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pkgutil import iter_modules
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_zero.config import Compile as Blocks
from lightning_zero.config import CompileConfig, ConfigError
from lightning_zero.engine.passes.recompute import WRAPPED
from lightning_zero.engine.torch_modes import outside_graphs

COMPILED = "_lightning_zero_compiled"  # marks a forward that was compiled here
_TRACED = ("containers", "output_dtypes")  # files that are part of what modules compute
_CALL = "_compiled_call_impl"  # where ``nn.Module.compile`` keeps the compiled call of a module


class Compile(NamedTuple):
    """How ``torch.compile`` was called, or is to be.

    Attributes:
        apply: compiles a function so.
        in_pieces: compiles it so, but its graph may have breaks.
        inductor: torch's own compiler is asked for.
        fullgraph: breaks are errors.
    """

    apply: Callable[[Any], Any]
    in_pieces: Callable[[Any], Any]
    inductor: bool
    fullgraph: bool


def compile_with(**settings: Any) -> Compile:
    """As ``torch.compile(function, **settings)`` does."""

    def apply(function: Any, **more: Any) -> Any:
        given = {**settings, **more}
        if isinstance(options := given.get("options"), dict):
            given["options"] = dict(options)  # torch takes entries out of it
        return torch.compile(function, **given)

    is_inductor = settings.get("backend", "inductor") == "inductor"
    return Compile(apply, partial(apply, fullgraph=False), is_inductor, settings.get("fullgraph", False))


def how_compiled(function: Any) -> Compile | None:
    """How ``function``, or a module, was compiled; None where it was not."""
    context: Any = vars(function).get("dynamo_ctx") if isinstance(function, nn.Module) else None
    if context is None and isinstance(function, types.FunctionType) and hasattr(function, "_torchdynamo_orig_callable"):
        # torch keeps no other way from a compiled function to what it was compiled with.
        context = inspect.getclosurevars(function).nonlocals.get("self")
    backend = getattr(context, "callback", None)
    if not callable(backend):
        return None  # torch.compiler.disable
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend

    def in_pieces(function: Any) -> Any:
        # With the very backend, which ``torch.compile`` would wrap again: graphs are shared where backends are equal.
        return torch._dynamo.optimize(backend=backend, dynamic=context._dynamic)(function)

    inductor = getattr(backend, "compiler_name", "") == "inductor"
    fullgraph = bool(getattr(context, "fullgraph", False))
    return Compile(context, in_pieces if fullgraph else context, inductor, fullgraph)


def from_settings(config: CompileConfig) -> Compile | None:
    """What ``zero/compile`` asks for."""
    if config.name is Blocks.none:
        return None
    return compile_with(**config.arguments)


def needs_compiler(module: nn.Module) -> bool:
    """Whether something in ``module`` is compiled by inductor."""
    found = (how for inner in module.modules() for _, how in _compiled_parts(inner))
    return any(how.inductor for how in found)


def check_compiled_blocks(blocks: Sequence[object], config: CompileConfig) -> None:
    """
    Raises:
        ConfigError: ``zero/compile`` asks for blocks to be compiled, and there are none.
    """
    if config.name is not Blocks.none and not blocks:
        raise ConfigError(
            f"zero/compile={config.name.name}: the model has no blocks that were found to be units. Name them in "
            "zero.unit.classes, or set zero/compile=none and compile the model (torch.compile)."
        )


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
        if name != passes.__name__ and name.rpartition(".")[2] not in _TRACED:
            trace_rules.add(name)


class CompiledModules:
    """What is compiled of the units of one sharded module, and of the modules around them.

    Args:
        module: the root.
        units: names of the units, the root's ("") first.
        blocks: compile each unit but the root so that nothing else has compiled; None: do not.
        refuse: is called with a function that was compiled as a module is to be, and with the module's class; it may
            raise.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[str], blocks: Compile | None, refuse: Callable[[Any, str], None]
    ) -> None:
        keep_out()
        self._refuse = refuse
        self._units = {name: module.get_submodule(name) for name in units}
        self._around: dict[nn.Module, list[nn.Module]] = {}  # modules around units -> the units inside, innermost too
        for name, inner in module.named_modules():
            prefix = f"{name}." if name else ""
            inside = [unit for key, unit in self._units.items() if key != name and key.startswith(prefix)]
            if inside or name in self._units:
                self._around[inner] = inside
        names = ("forward", _CALL)
        self._before = [(m, {n: vars(m)[n] for n in names if n in vars(m)}) for m in self._around]
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self._has_compiled = False
        self._own: set[nn.Module] = set()  # units that were compiled themselves, not with what is around them
        self._later: dict[nn.Module, Mapping[str, Any]] = {}  # what was compiled after sharding
        for inner in self._around:
            self._take_over(inner)
        if blocks is not None:
            for name, unit in self._units.items():
                if name and unit not in self._own and not hasattr(vars(unit).get("forward"), COMPILED):
                    self._compile_unit(unit, blocks)
        for inner in self._around:
            vars(inner)["compile"] = types.MethodType(self._compile_later, inner)

    @property
    def are_there(self) -> bool:
        """Whether anything of the sharded module is compiled, by whomever."""
        return self._has_compiled or any(
            True for inner in self._units[""].modules() for _ in [*_compiled_parts(inner), *_calls_compiled(inner)]
        )

    def undo(self) -> None:
        """Give the modules back as they were, and what was compiled since compiled in torch's own way."""
        for module, before in self._before:
            for name in ("forward", _CALL):
                vars(module).pop(name, None)
            vars(module).pop("compile", None)
            vars(module).update(before)
        for module, name, value in self._replaced:
            vars(module)[name] = value
        for module, settings in self._later.items():
            module.compile(**settings)

    def _is_unit(self, module: nn.Module) -> bool:
        return any(module is unit for unit in self._units.values())

    def _take_over(self, module: nn.Module) -> None:
        """Follow what was compiled of ``module`` before it was sharded."""
        for name, how in list(_compiled_parts(module)):
            is_call = name == _CALL
            if self._is_unit(module):
                self._own.add(module)
                if is_call:
                    vars(module).pop(_CALL)
                    self._compile_unit(module, how)
            inside = self._around[module]
            if inside and how.fullgraph and not (is_call and self._is_unit(module)):
                compiled = vars(module)[name]
                self._replaced.append((module, name, compiled))
                vars(module)[name] = how.in_pieces(compiled._torchdynamo_orig_callable)
            self._compile_inside(module, how)

    def _compile_inside(self, module: nn.Module, how: Compile) -> None:
        for unit in self._around[module]:
            if unit not in self._own and not any(True for _ in _compiled_parts(unit)):
                self._compile_unit(unit, how)
            # The graphs around it end where it is called, and torch would go on to compile what is inside of the call:
            # our hooks, and ``nn.Module._call_impl``, which is one function for all modules, with few graphs allowed.
            vars(unit)[_CALL] = outside_graphs(unit._call_impl)

    def _compile_unit(self, module: nn.Module, how: Compile) -> None:
        """Compile the forward of a unit, or compile it otherwise than before."""
        self._has_compiled = True

        def compiled(forward: Any) -> Any:
            plain = getattr(forward, COMPILED, forward)
            made = how.in_pieces(plain) if self._around[module] else how.apply(plain)
            if made is not plain:  # torch.compile(disable=True) gives back what it was given
                setattr(made, COMPILED, plain)
            return made

        if hasattr(outer := vars(module).get("forward"), WRAPPED):
            getattr(outer, WRAPPED)(compiled)
        else:
            vars(module)["forward"] = compiled(module.forward)

    def _compile_later(self, module: nn.Module, **settings: Any) -> None:
        """``module.compile(**settings)``, after sharding."""
        how = compile_with(**settings)
        self._refuse(how.apply(_probe), type(module).__name__)  # before anything has changed; torch may refuse them too
        self._later[module] = settings
        if self._is_unit(module):
            self._own.add(module)
            self._compile_unit(module, how)
        else:
            vars(module)[_CALL] = how.in_pieces(module._call_impl)
        self._compile_inside(module, how)


def _probe() -> None:
    """A function to try settings of torch.compile with. It is never called."""


def _calls_compiled(module: nn.Module) -> Iterator[str]:
    """The compiled call of a module that we have not replaced."""
    call = vars(module).get(_CALL)
    if call is not None and not getattr(call, "_torchdynamo_disable", False):
        yield _CALL


def _compiled_parts(module: nn.Module) -> Iterator[tuple[str, Compile]]:
    """What is compiled of a module itself: its call, or methods of its own that were replaced on the instance."""
    for name, value in vars(module).items():
        if hasattr(value, COMPILED):
            continue
        of = getattr(getattr(value, "_torchdynamo_orig_callable", None), "__self__", None)
        wraps = vars(module).get("_modules", {}).get("_orig_mod")
        if of is not None and (of is module or of is wraps) and (how := how_compiled(value)) is not None:
            yield name, how
