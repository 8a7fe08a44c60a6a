"""Load a module's first values from a Hugging Face folder (``zero.init_from``).

::

    stored       tensors in files, of which each rank reads the parts it needs
    folder       reads ranges of the safetensors files of a folder
    names        matches the folder's tensors with parameters and buffers
    conversions  converts tensors that transformers stores differently in files and in memory
    first        finds how a module makes its first values
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from lightning_zero.pretrained.folder import SafetensorsFolder
from lightning_zero.pretrained.names import match
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.settings import ConfigError

SHOWN = 5  # names in a message


def sources_from(path: str, module: nn.Module, *, warn: bool, only_meta: bool = False) -> dict[str, StoredTensor]:
    """Return the tensors in the folder ``path``, by the names of the parameters and buffers of ``module``.

    ``warn``: warn of missing and unused tensors. ``only_meta``: leave out tensors for which ``module`` has values.
    Raises ConfigError if files are absent or damaged, no tensor belongs to ``module``, or one has another shape.
    """
    folder = SafetensorsFolder(path)
    found = match(module, folder)
    if not found.sources:
        raise ConfigError(
            f"zero.init_from: expected tensors of this module in {path}, got none: there it is "
            f"{some(folder.keys)}, here {some([name for name, _ in module.named_parameters()])}. Give the folder of "
            "this model."
        )
    if only_meta:
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        lacking = {name for name, value in tensors if value.is_meta}
        return {name: source for name, source in found.sources.items() if name in lacking}
    if warn and found.missing:
        warnings.warn(
            f"zero.init_from={path} has no {some(found.missing)}: these keep their initial values.", stacklevel=2
        )
    if warn and found.unused:
        warnings.warn(f"zero.init_from={path} has {some(found.unused)}, which the module does not have.", stacklevel=2)
    return found.sources


def some(names: Iterable[str]) -> str:
    """Return the first of ``names`` as text, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
