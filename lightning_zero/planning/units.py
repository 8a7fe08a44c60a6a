"""Which modules are units. Names and sizes only: no parameter is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_zero.config import MIB, ConfigError, UnitConfig, nearest

# Units by size hold at most this part of the model, where their modules can be divided: so stage 3 gathers about an
# eighth at a time, and the next one ahead. Smaller than LEAST_NBYTES, messages would cost more than they save.
SHARE = 8
LEAST_NBYTES = MIB


def choose_units(module: nn.Module, config: UnitConfig) -> list[str]:
    """Names of the modules that become units, in the order of ``named_modules``; the root is not among them.

    By ``config.classes`` if given; else by ``_no_split_modules`` (Hugging Face); else the repeated blocks of
    ModuleList and Sequential containers. Blocks above ``max_bytes`` are divided. Where repeated blocks hold less than
    half of the model (a U-Net, a GAN), what is left is divided by size too, see :data:`SHARE`.

    Raises:
        ConfigError: a class of ``zero.unit.classes`` does not occur in the model.
    """
    if config.classes:
        names = _by_class(module, config.classes, required=True)
    else:
        hinted = sorted({c for m in module.modules() for c in (getattr(m, "_no_split_modules", None) or ())})
        names = _by_class(module, hinted, required=False)
        by_name = bool(names)
        names = _divide_large(module, names or _repeated_blocks(module), config.max_bytes)
        if not by_name:
            names = _with_rest(module, names, config)
    sizes = {name: _nbytes(module.get_submodule(name)) for name in names}
    return [name for name in names if sizes[name] > 0 and sizes[name] >= config.min_bytes]


def _with_rest(module: nn.Module, names: list[str], config: UnitConfig) -> list[str]:
    """``names``, and units by size of what they leave to the root, where that is most of a model that is not small."""
    total = _nbytes(module)
    if 2 * sum(_nbytes(module.get_submodule(name)) for name in names) >= total:
        return names
    most = min(config.max_bytes, max(total // SHARE, LEAST_NBYTES))
    if total <= most:
        return names
    found = {*names, *(n for n in _by_size(module, most, taken=names) if _owns(module, n))}
    return [name for name, _ in module.named_modules() if name in found]


def _owns(module: nn.Module, name: str) -> bool:
    """Whether a parameter of the module ``name`` is used by nothing else: one that others use is the root's."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    inside = Counter(id(p) for _, p in module.get_submodule(name).named_parameters(remove_duplicate=False))
    return any(uses[key] == count for key, count in inside.items())


def _by_class(module: nn.Module, classes: list[str], *, required: bool) -> list[str]:
    wanted = set(classes)
    found = [(name, type(m).__name__) for name, m in module.named_modules() if name and type(m).__name__ in wanted]
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


def _by_size(module: nn.Module, max_bytes: int, taken: Collection[str] = ()) -> list[str]:
    """
    Args:
        taken: names of modules that are units already.
    """
    result: list[str] = []
    for name, child in module.named_children():
        size = _nbytes(child)
        inside = [t.removeprefix(f"{name}.") for t in taken if t.startswith(f"{name}.")]
        if size == 0 or name in taken:
            continue
        # A module with parameters of its own uses them, and maybe its children's, without calling the children
        # (MultiheadAttention and its out_proj): it stays whole. So does one whose weights are computed from others.
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
