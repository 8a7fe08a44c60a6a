"""Replace DTensor parameters by plain parameters, because the engine's buckets cannot hold DTensors.

A parallel style of torch or transformers makes DTensors of a module's parameters. :func:`localize` replaces each by a
plain leaf with this rank's part. During the module's forward, an attribute of the module with the parameter's name is a
DTensor over the leaf and hides the parameter. So styles work unchanged, and gradients reach the leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.mesh.split import Run, Split
from lightning_zero.planning.topology import Group
from lightning_zero.settings import ConfigError

_SPLITS: WeakIdKeyDictionary = WeakIdKeyDictionary()

StaysLocal = Callable[[nn.Module], bool]


class _Layout(NamedTuple):
    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    strides: tuple[int, ...]
    by: str  # the name of the mesh


def split_of(tensor: Tensor) -> Split | None:
    """Return how the parameter ``tensor`` is split; None for other tensors, of which every rank has all elements."""
    found: Split | None = _SPLITS.get(tensor)
    return found


def sizes_of(module: nn.Module) -> dict[str, int]:
    """Return the number of ranks among which parameters of ``module`` are split, by setting (``tensor_parallel``)."""
    return {split.by: split.parts for param in module.parameters() if (split := split_of(param)) is not None}


def saved_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter or buffer before it was split."""
    split = _SPLITS.get(tensor)
    return split.shape if split is not None else tuple(tensor.shape)


def localize(
    module: nn.Module, groups: Mapping[str, Group], stays_local: Callable[[str], StaysLocal | None] = lambda _: None
) -> None:
    """Replace the DTensor parameters of ``module`` by plain leaves, in place.

    Args:
        groups: the ranks among which parameters may be split, by setting. Meshes have the settings' names.
        stays_local: called with a module's name. Returns a function that is called before each forward and returns
            whether the module computes with plain tensors in this forward; None if it never does.

    Raises ConfigError for a DTensor over a mesh that is not one of ``groups``, and for parts of unequal size."""
    made: dict[int, nn.Parameter] = {}
    for name, inner in module.named_modules():
        layouts: dict[str, _Layout] = {}
        prefix = f"{name}." if name else ""
        for key, param in list(inner._parameters.items()):
            if isinstance(param, DTensor):
                layouts[key] = _layout(f"{prefix}{key}", param, groups)
                if id(param) not in made:
                    made[id(param)] = _leaf(f"{prefix}{key}", param, layouts[key])
                inner._parameters[key] = made[id(param)]
        for key, buffer in inner._buffers.items():
            if isinstance(buffer, DTensor):
                if not isinstance(buffer.placements[0], Replicate):
                    raise ConfigError(
                        f"buffer {prefix}{key} is split: expected a whole one, as all ranks get rank 0's buffers. Cut "
                        "it in forward."
                    )
                inner._buffers[key] = buffer.to_local()
        if layouts:
            inner.register_forward_pre_hook(partial(_lift, layouts, stays_local(name)), prepend=True)
            inner.register_forward_hook(partial(_lower, tuple(layouts)), always_call=True)


def _layout(name: str, param: DTensor, groups: Mapping[str, Group]) -> _Layout:
    mesh, sizes = param.device_mesh, {key: group.size for key, group in groups.items() if group.size > 1}
    (by,) = mesh.mesh_dim_names if mesh.ndim == 1 and mesh.mesh_dim_names is not None else [""]
    if by not in sizes or mesh.mesh.tolist() != [*groups[by].ranks]:
        wanted = " or ".join(f"self.device_mesh[{key!r}]" for key in sizes)
        raise ConfigError(
            f"parameter {name} is a DTensor over ranks {mesh.mesh.tolist()} (mesh {by!r}): expected {wanted}, of "
            f"{' or '.join(map(str, sizes.values()))} adjacent ranks. Pass that to parallelize_module, and leave data "
            "parallelism to lightning_zero."
        )
    return _Layout(mesh, param.placements[0], param.shape, param.stride(), by)


def _leaf(name: str, param: DTensor, layout: _Layout) -> nn.Parameter:
    leaf = nn.Parameter(param._local_tensor.detach().contiguous(), requires_grad=param.requires_grad)
    # Not ``isinstance(placement, Shard)``: the placement of tensors that join several matrices is no subclass of it.
    if not isinstance(layout.placement, Replicate):
        _SPLITS[leaf] = split = _split(layout)
        if len({split.shape_of(part) for part in range(split.parts)}) > 1:
            raise ConfigError(
                f"parameter {name}: expected a multiple of the {split.parts} ranks in dimension {split.dim} "
                f"of {split.shape}, along which it is split. Pad it (an embedding and its head: to a "
                "larger vocabulary), or leave its module out by zero.tensor_plan."
            )
    return leaf


def _split(layout: _Layout) -> Split:
    dim = layout.placement.dim % len(layout.shape)  # type: ignore[attr-defined]
    size = layout.shape[dim]
    numbers = torch.arange(size).view([size if d == dim else 1 for d in range(len(layout.shape))])
    chunks, _ = layout.placement._split_tensor(numbers, layout.mesh.size(), with_padding=False)  # type: ignore[attr-defined]
    runs = tuple(_runs(chunk.flatten().tolist()) for chunk in chunks)
    runs += ((),) * (layout.mesh.size() - len(runs))  # ranks without any, which are refused
    return Split(tuple(layout.shape), dim, runs, layout.mesh.get_local_rank(), layout.by)


def _runs(indices: list[int]) -> tuple[Run, ...]:
    found: list[Run] = []
    for index in indices:
        if found and index == found[-1].first + found[-1].size:
            found[-1] = Run(found[-1].first, found[-1].size + 1)
        else:
            found.append(Run(index, 1))
    return tuple(found)


def _lift(layouts: dict[str, _Layout], stays_local: StaysLocal | None, module: nn.Module, args: object) -> None:
    if stays_local is not None and stays_local(module):
        return
    for key, layout in layouts.items():
        leaf = module._parameters[key]
        assert leaf is not None
        module.__dict__[key] = DTensor.from_local(
            leaf, layout.mesh, [layout.placement], run_check=False, shape=layout.shape, stride=layout.strides
        )


def _lower(keys: tuple[str, ...], module: nn.Module, args: object, output: object) -> None:
    for key in keys:
        module.__dict__.pop(key, None)
