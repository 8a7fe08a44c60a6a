"""Choose which modules are units. Only names and sizes are read, never values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_zero.settings import MIB, ConfigError, UnitConfig, nearest

# Units chosen by size hold at most 1/SHARE of the model, if their modules can be divided. Models below LEAST_NBYTES
# stay whole: messages would cost more than they save.
SHARE = 8
LEAST_NBYTES = MIB


def choose_units(module: nn.Module, config: UnitConfig) -> list[str]:
    """Return the names of the modules that become units, in the order of ``named_modules``, without the root. They are
    modules of the classes ``config.classes``, else of ``_no_split_modules`` (Hugging Face), else repeated blocks of
    ModuleList and Sequential. Without ``classes``, blocks above ``max_bytes`` are divided. If repeated blocks hold less
    than half of the model, the rest is divided by size (:data:`SHARE`). Raises ConfigError if the model lacks a class
    of ``config.classes``."""
    if config.classes:
        names = _by_class(module, config.classes, required=True)
    else:
        hinted = sorted({c for m in module.modules() for c in (getattr(m, "_no_split_modules", None) or ())})
        names = _by_class(module, hinted, required=False)
        by_name = bool(names)
        blocks, names = names or _repeated_blocks(module), []
        for name in blocks:
            block = module.get_submodule(name)
            if _nbytes(block) > config.max_bytes and not any(True for _ in block.parameters(recurse=False)):
                names += [f"{name}.{inner}" for inner in _by_size(block, config.max_bytes)]
            else:
                names.append(name)
        if not by_name:
            names = _with_rest(module, names, config)
    return [name for name in names if _nbytes(module.get_submodule(name)) > 0]


def _with_rest(module: nn.Module, names: list[str], config: UnitConfig) -> list[str]:
    """Return the units ``names``, with more units chosen by size if ``names`` hold less than half of a large model."""
    total = _nbytes(module)
    if 2 * sum(_nbytes(module.get_submodule(name)) for name in names) >= total:
        return names
    most = min(config.max_bytes, max(total // SHARE, LEAST_NBYTES))
    if total <= most:
        return names
    uses, found = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False)), set(names)
    for name in _by_size(module, most, taken=names):
        inside = Counter(id(p) for _, p in module.get_submodule(name).named_parameters(remove_duplicate=False))
        if any(uses[key] == count for key, count in inside.items()):  # shared parameters belong to the root
            found.add(name)
    return [name for name, _ in module.named_modules() if name in found]


def _by_class(module: nn.Module, classes: list[str], *, required: bool) -> list[str]:
    wanted = set(classes)
    found = [(name, type(m).__name__) for name, m in module.named_modules() if type(m).__name__ in wanted]
    missing = sorted(wanted - {cls for _, cls in found})
    if required and missing:
        present = sorted({type(m).__name__ for m in module.modules()})
        close = nearest(missing[0], present)
        right = ",".join(close if close and name == missing[0] else name for name in classes)
        change = f"Write zero.unit.classes=[{right}]" if close else "Change zero.unit.classes"
        raise ConfigError(
            f"zero.unit.classes: expected class names of modules in the model, got {missing[0]!r}, which does not "
            f"occur. The model has {', '.join(present)}. {change}."
        )
    return [name for name, _ in found if name]  # the root is a unit in any case


def _repeated_blocks(module: nn.Module) -> list[str]:
    """Return the names of repeated blocks: children of a ModuleList or Sequential that has several children of the same
    class. A block inside of another block is left out."""
    chosen: list[str] = []
    for name, container in module.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        if any(name == c or name.startswith(c + ".") for c in chosen):
            continue
        children = [(f"{name}.{key}" if name else key, child) for key, child in container.named_children()]
        children = [(key, child) for key, child in children if any(True for _ in child.parameters())]
        kinds = [type(child) for _, child in children]
        for key, child in children:
            is_block = any(True for _ in child.children())  # a bare Linear is not a block
            if is_block and not _is_plain_list(child) and kinds.count(type(child)) > 1:
                chosen.append(key)
    return chosen


def _is_plain_list(module: nn.Module) -> bool:
    """Return whether the module is a container that is never called, so that its hooks would never run."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _by_size(module: nn.Module, max_bytes: int, taken: Collection[str] = ()) -> list[str]:
    """Divide ``module`` into submodules of at most ``max_bytes`` if possible. Return their names, except ``taken``."""
    result: list[str] = []
    for name, child in module.named_children():
        size = _nbytes(child)
        inside = [t.removeprefix(f"{name}.") for t in taken if t.startswith(f"{name}.")]
        if size == 0 or name in taken:
            continue
        # A module with parameters may use its children's parameters without calling them (MultiheadAttention and
        # out_proj), so it stays whole. So does a module with parametrized weights.
        divisible = (
            any(_nbytes(c) for c in child.children())
            and not any(True for _ in child.parameters(recurse=False))
            and not is_parametrized(child)
        )
        if _is_plain_list(child) or ((size > max_bytes or inside) and divisible):
            result += [f"{name}.{inner}" for inner in _by_size(child, max_bytes, inside)]
        elif not inside:
            result.append(name)
    return result


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def owner_of(users: Iterable[str], units: Iterable[str]) -> str:
    """Return the innermost unit that contains all modules in ``users``, which share a parameter; "" for the root."""
    split = [name.split(".") if name else [] for name in users]
    common = split[0]
    for parts in split[1:]:
        length = next((i for i, (a, b) in enumerate(zip(common, parts, strict=False)) if a != b), None)
        common = common[: min(len(common), len(parts)) if length is None else length]
    candidates = set(units)
    for depth in range(len(common), 0, -1):
        if (name := ".".join(common[:depth])) in candidates:
            return name
    return ""
