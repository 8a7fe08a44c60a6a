"""Split a module over the ranks that share a batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_zero.config import ConfigError, TensorStyle, ZeroConfig
from lightning_zero.mesh.local_leaves import StaysLocal, localize, split_of


@functools.cache
def device_mesh(device_type: str, size: int, name: str = "tensor_parallel") -> DeviceMesh:
    """Return the mesh of all ranks, ``data_parallel`` x ``name``, where ``size`` adjacent ranks have different parts.
    Collective at first."""
    names = ("data_parallel", name)
    return init_device_mesh(device_type, (dist.get_world_size() // size, size), mesh_dim_names=names)


def mesh_for(config: ZeroConfig, device: torch.device) -> DeviceMesh | None:
    """Return the mesh for a module's ``configure_model``, as Lightning's ``ModelParallelStrategy`` gives one: that of
    ``zero.tensor_parallel``, else of ``zero.expert_parallel``; None if there is neither. Collective at first."""
    for key in ("tensor_parallel", "expert_parallel"):
        if (size := getattr(config, key)) > 1:
            return device_mesh(device.type, size, key)
    return None


def check_splits(config: ZeroConfig, world_size: int) -> None:
    """Raise ConfigError if the ranks cannot be divided into groups of ``zero.tensor_parallel`` and
    ``zero.expert_parallel``."""
    for key in ("tensor_parallel", "expert_parallel"):
        if world_size % (size := getattr(config, key)):
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ConfigError(
                f"zero.{key}: expected a number that divides the {world_size} rank(s) of the run ({divisors}), got "
                f"{size}. Change zero.{key}, trainer.devices or trainer.num_nodes."
            )


def split_module(module: nn.Module, config: ZeroConfig, device: torch.device) -> None:
    """Split ``module`` as ``zero.tensor_parallel`` and ``zero.expert_parallel`` say, in place. Its parameters become
    plain leaves. Collective.

    The plan is what its DTensors say if there are any (made in ``configure_model``), else ``zero.tensor_plan``, else
    the attribute ``tensor_plan`` of its modules, else those of its models of transformers. Raises ConfigError if there
    is none, or if it does not fit the module.
    """
    if not config.splits or any(split_of(param) is not None for param in module.parameters()):  # by an earlier run
        return
    check_splits(config, dist.get_world_size() if dist.is_initialized() else 1)
    tensor, expert = config.tensor_parallel, config.expert_parallel
    mesh = device_mesh(device.type, tensor)["tensor_parallel"]
    stays_local: dict[str, StaysLocal] = {}
    if not any(isinstance(param, DTensor) for param in module.parameters()):
        ties = _ties(module)
        plan = (config.tensor_plan or _own_plan(module)) if tensor > 1 else {}
        if plan:
            _by_plan(module, mesh, plan)
        if not plan or expert > 1:
            experts = device_mesh(device.type, expert, "expert_parallel")["expert_parallel"]
            stays_local = _by_transformers(module, mesh, experts, config.splits)
        _tie_again(ties)
    localize(module, {tensor, expert}, stays_local.get)


# -- plans ------------------------------------------------------------------------------------------------------------


def _style(style: TensorStyle) -> ParallelStyle:
    match style:
        case TensorStyle.colwise:
            return ColwiseParallel()
        case TensorStyle.rowwise:
            return RowwiseParallel()
        case TensorStyle.colwise_gather_output:
            return ColwiseParallel(output_layouts=Replicate())
        case TensorStyle.embedding_rowwise:
            return RowwiseParallel(input_layouts=Replicate())


def _own_plan(module: nn.Module) -> dict[str, TensorStyle]:
    return {
        f"{name}.{key}" if name else key: TensorStyle(style)
        for name, inner in module.named_modules()
        for key, style in getattr(inner, "tensor_plan", {}).items()
    }


def _by_plan(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, TensorStyle]) -> None:
    for pattern, style in plan.items():
        before = _count(module)
        parallelize_module(module, mesh, {pattern: _style(style)})
        if _count(module) == before:
            raise ConfigError(
                f"zero.tensor_plan: expected names of linear layers and embeddings, '*' for a part between dots, got "
                f"{pattern!r}, which splits nothing. Names of modules are those of module.named_modules()."
            )


def _count(module: nn.Module) -> int:
    return sum(isinstance(param, DTensor) for param in module.parameters())


def _by_transformers(module: nn.Module, mesh: DeviceMesh, experts: DeviceMesh, asked: str) -> dict[str, StaysLocal]:
    """Split the models of transformers in ``module``. Return, by name, which of their modules compute with plain
    tensors."""
    models = {name: inner for name, inner in module.named_modules() if hasattr(inner, "_resolve_parallel_plans")}
    models = {name: m for name, m in models.items() if not any(_is_in(name, other) for other in models)}
    if not models:
        raise ConfigError(
            f"{asked}: expected a model of transformers (5.23 or later) with a tp_plan or ep_plan, DTensors made in "
            "configure_model, or a zero.tensor_plan, got none of these. Set for example "
            '\'zero.tensor_plan={"layers.*.q_proj": colwise, "layers.*.o_proj": rowwise}\'.'
        )
    found: dict[str, StaysLocal] = {}
    for name, model in models.items():
        found |= {
            f"{name}.{inner}" if name else inner: s for inner, s in _by_their_plans(model, mesh, experts, asked).items()
        }
    return found


def _is_in(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _by_their_plans(model: Any, mesh: DeviceMesh, experts: DeviceMesh, asked: str) -> dict[str, StaysLocal]:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    _check_heads(model, mesh.size())
    try:
        config = DistributedConfig(tp_size=mesh.size(), ep_size=experts.size(), fsdp_size=experts.size())
        plan, expert_plan, _ = model._resolve_parallel_plans(config)
    except ValueError as error:
        raise ConfigError(f"{asked}: {error} Or set zero.tensor_plan.") from error
    for param in model.parameters():  # the plan cuts what each rank has built: all take that of the first
        if not param.is_meta:
            for group in (mesh, experts):
                param.data.copy_(distribute_tensor(param.data, group, [Replicate()]).to_local())
    apply_tensor_parallelism(model, mesh, plan)
    if expert_plan:
        apply_expert_parallelism(model, experts, mesh, expert_plan, "all_to_all")
    plan |= expert_plan
    modules = dict(model.named_modules())
    return {
        name: ALL_PARALLEL_STYLES[style].should_use_local_tensors for name, style in plan.items() if name in modules
    }


def _check_heads(model: Any, parts: int) -> None:
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % parts:
            raise ConfigError(
                f"zero.tensor_parallel: expected a number that divides {key}={heads} of {type(model).__name__} (ranks "
                f"divide the heads), got {parts}. Choose another zero.tensor_parallel."
            )


# -- tied parameters --------------------------------------------------------------------------------------------------


def _ties(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places (module, name) of each parameter that has several."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for inner in module.modules():
        for key, param in inner._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((inner, key))
    return [found for found in places.values() if len(found) > 1]


def _tie_again(ties: list[list[tuple[nn.Module, str]]]) -> None:
    """Tie parameters that a plan has split one by one. Raise ConfigError if it splits them differently."""
    for (first, name), *others in ties:
        param = first._parameters[name]
        for inner, key in others:
            if getattr(inner._parameters[key], "placements", None) != getattr(param, "placements", None):
                raise ConfigError(
                    f"zero.tensor_plan: expected one split of the tied parameter {key} of {type(first).__name__} and "
                    f"{type(inner).__name__}, got two. Give both a style that splits rows (embedding_rowwise and "
                    "colwise_gather_output), or untie them (tie_word_embeddings=False)."
                )
            inner._parameters[key] = param
