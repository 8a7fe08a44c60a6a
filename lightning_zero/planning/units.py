"""Which modules are units. Names and sizes only: no parameter is read."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_zero.config import ConfigError, UnitConfig


def choose_units(module: nn.Module, config: UnitConfig) -> list[str]:
    """Names of the modules that become units, in the order of ``named_modules``; the root is not among them.

    By ``config.classes`` if given; else by ``_no_split_modules`` (Hugging Face); else the repeated blocks of
    ModuleList and Sequential containers; else by size: modules below ``max_bytes`` whose parent is above it.

    Raises:
        ConfigError: a class of ``zero.unit.classes`` does not occur in the model.
    """
    if config.classes:
        names = _by_class(module, config.classes, required=True)
    else:
        hinted = sorted({c for m in module.modules() for c in (getattr(m, "_no_split_modules", None) or ())})
        names = _by_class(module, hinted, required=False) or _repeated_blocks(module)
        names = _divide_large(module, names, config.max_bytes)
        if not names and _nbytes(module) > config.max_bytes:
            names = _by_size(module, config.max_bytes)
    sizes = {name: _nbytes(module.get_submodule(name)) for name in names}
    return [name for name in names if sizes[name] > 0 and sizes[name] >= config.min_bytes]


def _by_class(module: nn.Module, classes: Iterable[str], *, required: bool) -> list[str]:
    wanted = set(classes)
    found = [(name, type(m).__name__) for name, m in module.named_modules() if name and type(m).__name__ in wanted]
    missing = sorted(wanted - {cls for _, cls in found})
    if required and missing:
        present = sorted({type(m).__name__ for m in module.modules()})
        raise ConfigError(
            f"zero.unit.classes: expected class names of modules in the model, got {missing[0]!r}, which does not "
            f"occur. The model has {', '.join(present)}. Change zero.unit.classes."
        )
    return [name for name, _ in found]


def _repeated_blocks(module: nn.Module) -> list[str]:
    """Children of containers that hold a class at least twice. Blocks inside a chosen block stay with it."""
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
            is_block = any(True for _ in child.children())  # a bare Linear is no block
            if is_block and not _is_plain_list(child) and kinds.count(type(child)) > 1:
                chosen.append(key)
    return chosen


def _is_plain_list(module: nn.Module) -> bool:
    """Containers that are never called: hooks on them would not fire."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _divide_large(module: nn.Module, names: list[str], max_bytes: int) -> list[str]:
    result: list[str] = []
    for name in names:
        block = module.get_submodule(name)
        if _nbytes(block) > max_bytes and not any(True for _ in block.parameters(recurse=False)):
            result += [f"{name}.{inner}" for inner in _by_size(block, max_bytes)]
        else:
            result.append(name)
    return result


def _by_size(module: nn.Module, max_bytes: int) -> list[str]:
    result: list[str] = []
    for name, child in module.named_children():
        size = _nbytes(child)
        if size == 0:
            continue
        # A module with parameters of its own uses them, and maybe its children's, without calling the children
        # (MultiheadAttention and its out_proj): it stays whole.
        divisible = any(_nbytes(c) for c in child.children()) and not any(True for _ in child.parameters(recurse=False))
        if _is_plain_list(child) or (size > max_bytes and divisible):
            result += [f"{name}.{inner}" for inner in _by_size(child, max_bytes)]
        else:
            result.append(name)
    return result


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def owner_of(users: Iterable[str], units: Iterable[str]) -> str:
    """The unit that owns a parameter used by the modules ``users``: their lowest common ancestor unit ("": root)."""
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
