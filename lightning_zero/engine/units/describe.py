"""Describe units before anything is sharded: which unit owns which parameter, and which parameters share a bucket.

A description holds sizes and dtypes only. Plans of memory are made from a description, and all ranks check that their
descriptions are equal.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import FunctionType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_zero.comm.agreements import gather_if_unequal
from lightning_zero.engine.units.bucket import Dtypes
from lightning_zero.engine.units.packed import is_packed, refuse_unpackable, tensors_beside
from lightning_zero.engine.units.param import ParamInfo, classes_of, find_owner, strides_of
from lightning_zero.mesh.local_leaves import split_of
from lightning_zero.planning.buckets import BucketShape, Itemsizes
from lightning_zero.planning.layout import split_by_bytes
from lightning_zero.planning.placement import STAGES, Placement
from lightning_zero.planning.units import choose_units, owner_of
from lightning_zero.ranks.waits import Waits
from lightning_zero.settings import ConfigError, DType, Precision, Recompute, ZeroConfig

# A parameter of the root unit with at least this many bytes gets a bucket of its own: embedding and head are at
# opposite ends of the model, and the head's gradient need not wait for the embedding's.
ROOT_SPLIT_NBYTES = 1024 * 1024

_DTYPES = {DType.fp32: torch.float32, DType.bf16: torch.bfloat16}
# Choices of zero/precision that gather and use parameters in a lower dtype than that of the masters.
AUTOCAST_DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
# Choices of zero/precision with one dtype for everything.
TRUE_DTYPES = {Precision.bf16_true: torch.bfloat16, Precision.fp16_true: torch.float16, Precision.fp64: torch.float64}


@dataclass(frozen=True, slots=True)
class BucketGroup:
    params: list[ParamInfo]
    dtypes: Dtypes
    trainable: bool
    whole: bool  # stays replicated at every stage

    @property
    def parts(self) -> int:
        """Return over how many ranks tensor or expert parallelism splits the parameters; 1 if it does not."""
        split = self.params[0].split
        return split.parts if split is not None else 1

    def shape(self, unit: int) -> BucketShape:
        numels = tuple(info.numel for info in self.params)
        built = tuple(info.numel * info.dtype.itemsize for info in self.params)
        beside = sum(tensor.nbytes for info in self.params for _, _, tensor in tensors_beside(info.param))
        compute, master, reduce, grad, wire = (dtype.itemsize for dtype in self.dtypes[:5])
        sizes = Itemsizes(compute, master, reduce, grad, wire, self.dtypes.exchanged, self.dtypes.state)
        return BucketShape(unit, numels, sizes, self.trainable, self.whole, built, beside, self.parts)


@dataclass(frozen=True, slots=True)
class UnitGroup:
    name: str  # fqn of the module, "" for the root
    buckets: list[BucketGroup]


def describe_units(module: nn.Module, config: ZeroConfig, precision: Precision) -> list[UnitGroup]:
    """Return a description of each unit of `module` with its buckets, the root first. The module can be on meta. Raises
    ConfigError for unknown units, lazy parameters, parameters that wrap other tensors (DTensors, quantized weights),
    4-bit weights that cannot be sharded, and CUDA graphs over parameters that are gathered and dropped."""
    refuse_scripted(module)
    refuse_cuda_graphs(module, config)
    names = choose_units(module, config.unit)
    patterns = config.precision.fp32_modules
    named = {name for name, _ in module.named_modules()}
    if lost := [p for p in patterns if ("." in p or p in named) and not [*fp32_modules(module, [p])]]:
        key = "zero.precision.fp32_modules"
        raise ConfigError(
            f"{key}: expected a class, or a module's name before a dot ('teacher.*'), got {lost[0]!r}. Change {key}."
        )
    of_modules = [[*m.parameters(recurse=False)] for m in fp32_modules(module, patterns)]
    fp32 = {id(p) for params in of_modules for p in params} | {id(p) for p in _parts_of_weights(module)}
    # Norms lie in one bucket of the root, replicated on the device: else each unit would send tiny messages for them.
    of_norms = [params for params in of_modules if precision in AUTOCAST_DTYPES and all(p.dim() == 1 for p in params)]
    norms = {id(p) for params in of_norms for p in params}
    owners: dict[str, list[tuple[nn.Parameter, list[str]]]] = {name: [] for name in ["", *names]}
    known = set(names)
    names_of: dict[nn.Parameter, list[str]] = {}
    at: dict[tuple[int, int], nn.Parameter] = {}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(param, []).append(fqn)
    for param, fqns in names_of.items():
        if is_lazy(param):
            raise ConfigError(
                f"parameter {fqns[0]} has no shape yet: its module is lazy. Run a batch through the module before it "
                "is sharded (in __init__ or configure_model), or give the module its sizes."
            )
        if isinstance(param, DTensor):
            raise ConfigError(
                f"parameter {fqns[0]} is a DTensor: expected the number of its ranks in zero.tensor_parallel "
                "or zero.expert_parallel. Set it, or pass the plain module."
            )
        if type(param).__torch_dispatch__ is not nn.Parameter.__torch_dispatch__:
            # The engine sets `.data`: that would change the wrapper only, and modules use the inner tensors.
            raise ConfigError(
                f"parameter {fqns[0]} is a {type(param).__name__}, a wrapper whose values are in other tensors (as "
                "in quantized and float8 weights of torchao): gathered, loaded and trained values would not reach "
                "them. Shard the plain module and quantize it after training, train in float8 with "
                "zero/precision=float8, or use bitsandbytes' Linear4bit for a frozen 4-bit base."
            )
        refuse_unpackable(param, fqns[0])
        other = at.setdefault((param.untyped_storage()._cdata, int(param.storage_offset())), param)
        trains = param.requires_grad or other.requires_grad
        if other is not param and trains and param.numel() > 1 and find_owner(param) is None:
            raise ConfigError(
                f"parameters {names_of[other][0]} and {fqns[0]} are two objects over one memory: expected one object "
                "(`a.weight = b.weight` in place of `a.weight.data = b.weight.data`). Sharded, each would train alone."
            )
        owner = owner_of((fqn.rpartition(".")[0] for fqn in fqns), known)
        owners["" if id(param) in norms else owner].append((param, fqns))
    _refuse_aliases(module, names_of)
    return [UnitGroup(name, _group(name, owners[name], fp32, norms, config, precision)) for name in ["", *names]]


def _refuse_aliases(module: nn.Module, names_of: Mapping[nn.Parameter, Sequence[str]]) -> None:
    """Raise ConfigError if a buffer or an attribute shares the memory of a parameter that is trained."""
    trained: dict[int, list[tuple[range, str]]] = {}
    for param, fqns in names_of.items():
        if param.requires_grad and param.numel() > 1 and find_owner(param) is None:
            trained.setdefault(param.untyped_storage()._cdata, []).append((_span(param), fqns[0]))
    for name, inner in module.named_modules():
        computed = {hook.name for hook in inner._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
        for key, value in (*inner._buffers.items(), *vars(inner).items()):
            if type(value) is not Tensor or value.layout is not torch.strided or key in computed:
                continue
            own = _span(value)
            for span, fqn in trained.get(value.untyped_storage()._cdata, ()):
                if max(own.start, span.start) < min(own.stop, span.stop):
                    raise ConfigError(
                        f"{f'{name}.{key}' if name else key} shares the memory of parameter {fqn}: expected memory "
                        "of its own, because values that training gives the parameter would not reach it. Register "
                        "`.clone()` of it, or return the parameter from a property."
                    )


def _span(tensor: Tensor) -> range:
    """Return the byte offsets in its storage that `tensor` spans, gaps between its elements included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return range(start, start + (last + 1) * tensor.element_size() * bool(tensor.numel()))


def refuse_scripted(module: nn.Module) -> None:
    """Raise ConfigError for modules of torch.jit.script, on which torch allows no hooks."""
    for name, inner in module.named_modules():
        if isinstance(inner, torch.jit.RecursiveScriptModule):
            raise ConfigError(
                f"{name or type(inner).__name__}: expected a module with a forward in Python, got one of "
                "torch.jit.script (or torch.jit.load), which takes no hooks. Leave torch.jit.script out, or use "
                "torch.compile; export after training."
            )


def refuse_cuda_graphs(module: nn.Module, config: ZeroConfig) -> None:
    """Raise ConfigError if a part of `module` is compiled with CUDA graphs and parameters are sharded (stage 3)."""
    for name, inner in module.named_modules():
        for value in (*vars(inner).values(), inner.forward):
            refuse_cuda_graph(value, name or type(inner).__name__, config)


def refuse_cuda_graph(function: object, name: str, config: ZeroConfig) -> None:
    """Raise ConfigError if `function`, of module `name`, is compiled with CUDA graphs at stage 3."""
    row = STAGES[config.stage.name]
    if row.compute_param is not Placement.sharded:
        return
    ask = getattr(function, "get_compiler_config", None) if isinstance(function, FunctionType) else None
    compiled = ask() if ask is not None else None
    if isinstance(compiled, dict) and compiled.get("triton.cudagraphs"):
        raise ConfigError(
            f"{name} is compiled with CUDA graphs (torch.compile with "
            'mode="reduce-overhead" or "max-autotune"): a graph replays kernels on the addresses that it was '
            "recorded with, and gathered parameters are somewhere else each time. Compile with "
            'mode="default" or "max-autotune-no-cudagraphs", or choose zero/stage=zero2.'
        )


def bucket_shapes(units: Sequence[UnitGroup]) -> list[BucketShape]:
    return [bucket.shape(index) for index, unit in enumerate(units) for bucket in unit.buckets]


def fp32_modules(module: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the modules for which one of `patterns` matches the class's name, or the module's name followed by a dot.
    Under mixed precision parameters of these modules keep fp32."""
    for name, inner in module.named_modules():
        if any(fnmatch.fnmatchcase(type(inner).__name__, p) or fnmatch.fnmatchcase(f"{name}.", p) for p in patterns):
            yield inner


def recomputes(block: nn.Module, config: ZeroConfig) -> bool:
    """Return whether the unit `block` is recomputed under `config`. An embedding or linear layer split by tensor
    parallelism is not, because a recomputation would not call the hooks that make its DTensors."""
    is_split = any(split_of(param) is not None for param in block.parameters(recurse=False))
    return config.activation_checkpointing is not Recompute.none and not is_split


def _parts_of_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters from which weights are computed (spectral and weight norm, parametrizations). Such parameters
    keep fp32, because the computation is inexact in low precision and fails with buffers of another dtype."""
    for inner in module.modules():
        if isinstance(inner, ParametrizationList):
            yield from inner.parameters()
        for hook in inner._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm | WeightNorm):  # torch's older, hook-based form
                yield from (p for name, p in inner.named_parameters(recurse=False) if name.startswith(f"{hook.name}_"))


def _group(
    unit: str,
    members: Sequence[tuple[nn.Parameter, list[str]]],
    fp32: set[int],
    norms: set[int],
    config: ZeroConfig,
    precision: Precision,
) -> list[BucketGroup]:
    # Buckets are the same at every stage: norms are summed by bucket, so other buckets would change their last bits.
    groups: dict[tuple[Dtypes, bool, bool, int], list[ParamInfo]] = {}
    for param, fqns in members:
        dtypes = _dtypes(param, id(param) in fp32, config, precision)
        # See [Note: placeholders].
        whole = param.numel() <= 1 or not (param.is_floating_point() or is_packed(param)) or id(param) in norms
        dtype = dtypes.master if precision in TRUE_DTYPES else param.dtype
        if find_owner(param) is not None:
            raise ConfigError(
                f"parameter {fqns[0]} is sharded already, as part of another module. Shard it once, or end the other's "
                "sharding before: engine.release(), after a run trainer.strategy.engine.release()."
            )
        strides = strides_of(param)
        split, version = split_of(param), param._version
        info = ParamInfo(param, tuple(fqns), param.shape, strides, dtype, classes_of(param), split, version=version)
        parts = split.parts if split is not None else 1
        groups.setdefault((dtypes, param.requires_grad, whole, parts), []).append(info)
    buckets: list[BucketGroup] = []
    for (dtypes, trainable, whole, _), infos in groups.items():
        for part in _split(infos, dtypes.reduce.itemsize, config.reduce_bucket_bytes, is_root=not unit):
            for slot, info in enumerate(part):
                info.slot = slot
            buckets.append(BucketGroup(part, dtypes, trainable, whole))
    return buckets


def _split(infos: list[ParamInfo], itemsize: int, limit: int, *, is_root: bool) -> list[list[ParamInfo]]:
    large = [i for i in infos if is_root and i.numel * itemsize >= ROOT_SPLIT_NBYTES]
    small = [i for i in infos if i not in large]
    parts = [[i] for i in large]
    parts += [[small[k] for k in part] for part in split_by_bytes([i.numel * itemsize for i in small], limit)]
    return parts


def _dtypes(param: nn.Parameter, keeps_fp32: bool, config: ZeroConfig, precision: Precision) -> Dtypes:
    own, asked, state = param.dtype, config.precision, config.optimizer.state_dtype
    is_bytes = not own.is_floating_point or own.itemsize == 1 or is_packed(param)  # which a cast would change
    if is_bytes or precision is Precision.fp32:
        return Dtypes(own, own, own, own, own, state=state)
    if precision in TRUE_DTYPES:
        compute = master = grad = TRUE_DTYPES[precision]
    else:
        compute = own if keeps_fp32 or own.itemsize > 4 else AUTOCAST_DTYPES[precision]
        master = torch.promote_types(own, torch.float32)
        grad = _DTYPES[asked.grad_dtype] if asked.grad_dtype else master
    reduce = _DTYPES[asked.reduce_dtype] if asked.reduce_dtype else master
    exchanged = (compute, reduce) == (torch.bfloat16, torch.float32)
    return Dtypes(compute, master, reduce, grad, compute if exchanged else reduce, exchanged, state)


def agree_on_model(units: Sequence[UnitGroup], group: dist.ProcessGroup | None, waits: Waits) -> None:
    """Check that parameters' names, shapes, dtypes and order are equal on all ranks. Use rank 0's strides. Collective.
    `group`: all ranks of the engine (None: one rank). Raises ConfigError on all ranks with the first difference."""
    infos = [info for unit in units for bucket in unit.buckets for info in bucket.params]
    own = [(_describe(u, info), info.saved_strides) for u in units for bucket in u.buckets for info in bucket.params]
    if (table := gather_if_unequal(group, own, waits, "models")) is None:
        return
    for rank, other in enumerate(table):
        for (mine, _), (others, _) in zip_longest(table[0], other, fillvalue=("no parameter", ())):
            if mine != others:
                raise ConfigError(
                    f"expected the same model on all ranks, got on rank 0 {mine}, and in its place on rank "
                    f"{rank} {others}. Build the module without looking at the rank."
                )
    for info, (_, strides) in zip(infos, table[0], strict=True):
        if info.split is None:  # parts are row-major
            info.strides = strides


def agree_on_sources(names: Iterable[str], group: dist.ProcessGroup | None, waits: Waits) -> None:
    """Raise ConfigError on all ranks unless all ranks have initial values (`zero.init_from`) for tensors of the same
    `names`. Collective."""
    table: list[list[str]] | None = gather_if_unequal(group, sorted(names), waits, "names of first values")
    if table is None:
        return
    rank = next(rank for rank, other in enumerate(table) if other != table[0])
    name = min(set(table[0]) ^ set(table[rank]))
    has, lacks = (0, rank) if name in table[0] else (rank, 0)
    raise ConfigError(
        f"zero.init_from: expected first values of the same tensors on all ranks, got {name} on rank {has} and none on "
        f"rank {lacks}. Give a folder that is the same on all nodes."
    )


def _describe(unit: UnitGroup, info: ParamInfo) -> str:
    names, frozen = " = ".join(info.fqns), "" if info.param.requires_grad else ", frozen"
    return f"{names} of shape {info.saved_shape}, {info.dtype}{frozen}, in unit {unit.name or '(root)'}"
