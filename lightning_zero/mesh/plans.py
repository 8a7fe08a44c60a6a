"""Split the parameters of a module among the ranks that share a batch."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_zero.mesh.local_leaves import StaysLocal, localize, sizes_of
from lightning_zero.planning.topology import Ranks, flat
from lightning_zero.settings import ConfigError, TensorStyle, ZeroConfig


@functools.cache
def device_mesh(device_type: str, size: int, name: str = "tensor_parallel") -> DeviceMesh:
    """Return the mesh of all ranks with dimensions ``data_parallel`` and ``name``. ``size`` adjacent ranks form a group
    along ``name``. The first call is collective."""
    names = ("data_parallel", name)
    return init_device_mesh(device_type, (dist.get_world_size() // size, size), mesh_dim_names=names)


def mesh_for(config: ZeroConfig, device: torch.device) -> DeviceMesh | None:
    """Return the mesh for a module's ``configure_model`` (as Lightning's ``ModelParallelStrategy`` does): that of
    ``zero.tensor_parallel`` or else ``zero.expert_parallel``; None without both. The first call is collective."""
    for key in ("tensor_parallel", "expert_parallel"):
        if (size := getattr(config, key)) > 1:
            return device_mesh(device.type, size, key)
    return None


def split_module(module: nn.Module, config: ZeroConfig, device: torch.device) -> None:
    """Split ``module`` in place by the settings ``zero.tensor_parallel`` and ``zero.expert_parallel``. The module's
    parameters become plain leaves. Collective.

    The plan is given by the module's DTensors (made in ``configure_model``) if there are any, else by
    ``zero.tensor_plan``, else by attributes ``tensor_plan`` of modules, else by the plans of transformers models in
    ``module``. Raises ConfigError if there is no plan, or if the plan does not fit the module."""
    tensor, expert = config.tensor_parallel, config.expert_parallel
    sizes = {key: size for key, size in (("tensor_parallel", tensor), ("expert_parallel", expert)) if size > 1}
    if before := sizes_of(module):
        if not before.items() <= sizes.items():
            raise ConfigError(
                f"an earlier run has split the module by {before}: expected the same zero.tensor_parallel and "
                f"zero.expert_parallel, got {tensor} and {expert}. Build the module again and load a checkpoint."
            )
        return
    if not config.splits:
        return
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ranks = Ranks.locate(rank, flat(world_size), config)
    mesh = device_mesh(device.type, tensor)["tensor_parallel"]
    stays_local: dict[str, StaysLocal] = {}
    is_split = any(isinstance(param, DTensor) for param in module.parameters())
    plan = (config.tensor_plan or _own_plan(module)) if tensor > 1 else {}
    if is_split and config.tensor_plan:
        raise ConfigError(
            f"zero.tensor_plan: expected none for a module that configure_model has split, got {len(plan)} names. "
            "Drop one."
        )
    if (is_split or plan) and tensor > 1 and expert > 1:
        raise ConfigError(
            f"{config.splits}: expected one of the two with DTensors of configure_model or a tensor plan (ranks that "
            "share a batch would send the same tokens twice), got both. Drop one; both go with transformers' plans."
        )
    if not is_split:
        ties = _untie(module)
        if plan:
            _by_plan(module, mesh, plan)
        else:
            experts = device_mesh(device.type, expert, "expert_parallel")["expert_parallel"]
            stays_local = _by_transformers(module, mesh, experts, config.splits)
        _tie_again(ties)
    localize(module, {"tensor_parallel": ranks.tensor, "expert_parallel": ranks.expert}, stays_local.get)


# -- plans ------------------------------------------------------------------------------------------------------------


def _own_plan(module: nn.Module) -> dict[str, TensorStyle]:
    return {
        f"{name}.{key}" if name else key: TensorStyle(style)
        for name, inner in module.named_modules()
        for key, style in getattr(inner, "tensor_plan", {}).items()
    }


class _SummedGradients(ParallelStyle):
    """Sums over the ranks gradients of replicated parameters that each rank uses for only its heads or features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, param in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(param.detach(), device_mesh, [Replicate()])
            module.register_parameter(key, nn.Parameter(whole, requires_grad=param.requires_grad))
        module.register_forward_pre_hook(self._lower)
        return module

    @staticmethod
    def _lower(module: nn.Module, args: object) -> None:
        for key in module._parameters:
            if isinstance(param := getattr(module, key), DTensor):
                module.__dict__[key] = param.to_local(grad_placements=[Partial()])


_STYLES: dict[TensorStyle, Callable[[], ParallelStyle]] = {
    TensorStyle.colwise: ColwiseParallel,
    TensorStyle.rowwise: RowwiseParallel,
    TensorStyle.colwise_gather_output: partial(ColwiseParallel, output_layouts=Replicate()),
    TensorStyle.embedding_rowwise: partial(RowwiseParallel, input_layouts=Replicate()),
    TensorStyle.replicated_with_grad_allreduce: _SummedGradients,
}


def _by_plan(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, TensorStyle]) -> None:
    for pattern, style in plan.items():
        before = _count(module)
        try:
            with warnings.catch_warnings(action="ignore"):  # of a name without a module: an error of ours, below
                parallelize_module(module, mesh, {pattern: _STYLES[style]()})
        except (NotImplementedError, RuntimeError, KeyError) as error:
            raise ConfigError(
                f"zero.tensor_plan: expected {style.name} for nn.Linear or nn.Embedding, each split once, got "
                f"{pattern!r}: {type(error).__name__}: {error}"
            ) from error
        if _count(module) == before:
            raise ConfigError(
                f"zero.tensor_plan: expected names of linear layers and embeddings, '*' for a part between dots, got "
                f"{pattern!r}, which splits nothing. There are {', '.join(_patterns(module))}."
            )


def _patterns(module: nn.Module) -> list[str]:
    """Return the names of linear layers and embeddings, with ``*`` for numbers."""
    named = ((name, inner) for name, inner in module.named_modules() if isinstance(inner, (nn.Linear, nn.Embedding)))
    return list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name, _ in named))


def _count(module: nn.Module) -> int:
    return sum(isinstance(param, DTensor) for param in module.parameters())


def _by_transformers(module: nn.Module, mesh: DeviceMesh, experts: DeviceMesh, asked: str) -> dict[str, StaysLocal]:
    """Split the transformers models in ``module``. Return, by module name, functions that return whether this module
    computes with plain tensors."""
    models = {name: inner for name, inner in module.named_modules() if hasattr(type(inner), "_resolve_parallel_plans")}
    outer = tuple(f"{name}." for name in models if name)  # a model inside of another is split with it
    models = {name: m for name, m in models.items() if not (name.startswith(outer) or (name and "" in models))}
    if not models:
        raise ConfigError(
            f"{asked}: expected a model of transformers (5.23 or later) with a tp_plan or ep_plan, DTensors made in "
            "configure_model, or a zero.tensor_plan, got none of these. Set for example "
            "'+zero.tensor_plan={layers.*.q_proj: colwise, layers.*.o_proj: rowwise}'."
        )
    found: dict[str, StaysLocal] = {}
    for name, model in models.items():
        found |= {
            f"{name}.{inner}" if name else inner: s for inner, s in _by_their_plans(model, mesh, experts, asked).items()
        }
    return found


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
    modules = dict(model.named_modules())
    for name in [name for name, style in plan.items() if style == TensorStyle.replicated_with_grad_allreduce.name]:
        del plan[name]  # its hooks would add up the sums of several micro-batches
        if name in modules:
            _SummedGradients()._apply(modules[name], mesh)
    apply_tensor_parallelism(model, mesh, plan)
    if expert_plan:
        apply_expert_parallelism(model, experts, mesh, expert_plan, "all_to_all")
    plan |= expert_plan
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


def _untie(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Make tied parameters separate objects that share memory. Return the places (module, name) of each of them."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for inner in module.modules():
        for key, param in inner._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((inner, key))
    ties = [found for found in places.values() if len(found) > 1]
    for (first, name), *others in ties:
        param = first._parameters[name]
        assert param is not None
        for inner, key in others:  # over the same memory
            inner._parameters[key] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
    return ties


def _tie_again(ties: list[list[tuple[nn.Module, str]]]) -> None:
    """Tie again the parameters that :func:`_untie` has separated. Raise ConfigError if they are split differently."""
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
