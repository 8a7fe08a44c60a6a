"""Packed weights: the 4-bit parameters of bitsandbytes (`Params4bit`), which hold bytes in any dtype.

The bytes are in buckets of the bytes' dtype and are never cast. The tensors that decode the bytes (scales, a code book)
are in the parameter's `quant_state`: whole on each rank, and in state dicts as `weight.absmax` and similar names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.pretrained.stored import KeptTensor
from lightning_zero.settings import ConfigError


def is_packed(param: Tensor) -> bool:
    return getattr(param, "quant_state", None) is not None


def refuse_unpackable(param: nn.Parameter, fqn: str) -> None:
    """Raise ConfigError for a 4-bit parameter that is not frozen, not quantized yet, or repacked for a CPU."""
    state = getattr(param, "quant_state", param)
    if state is None:
        found, how = "one without", "Move the module to its device before it is sharded: that quantizes it"
    elif getattr(state, "packing_format_for_cpu", False):
        found, how = "bytes that a forward on a CPU has packed anew", "Shard the module before it is evaluated"
    elif state is not param and param.requires_grad:
        found, how = "one that requires a gradient", "Freeze it, and train adapters"
    else:
        return
    raise ConfigError(f"parameter {fqn}: expected a frozen 4-bit weight with its quant_state, got {found}. {how}.")


def tensors_beside(param: Tensor) -> Iterator[tuple[object, str, Tensor]]:
    """Yield (quantization state, name, tensor) of each tensor in the parameter's `quant_state`, nested ones too."""
    state = getattr(param, "quant_state", None)
    while hasattr(state, "__dict__"):
        yield from ((state, key, value) for key, value in [*vars(state).items()] if isinstance(value, Tensor))
        state = getattr(state, "state2", None)


def replicate_beside(module: nn.Module, comm: Communicator) -> None:
    """Replace the tensors that decode packed parameters by rank 0's values, on the engine's device. Collective."""
    for inner in module.modules():
        for param in filter(is_packed, inner.parameters(recurse=False)):
            for owner, key, value in tensors_beside(param):
                own = value.to(comm.device, copy=True).contiguous()
                comm.broadcast(own)
                setattr(owner, key, own)
            if hasattr(inner, "support_avx512bf16_for_cpu"):  # else a forward on such a CPU packs the bytes anew
                inner.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def prefixes_beside(module: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of state dict keys of the tensors that decode packed parameters."""
    return tuple(f"{name}." for name, p in module.named_parameters(remove_duplicate=False) if is_packed(p))


def load_beside(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: list[str]) -> None:
    """Pre-hook of one module's `load_state_dict`: load the tensors that decode packed parameters. bitsandbytes saves
    these tensors but does not load them. Report an error if packed bytes have another dtype or the tensors that decode
    them are missing."""
    for key, param in module.named_parameters(recurse=False):
        name, value = prefix + key, state.get(prefix + key)
        old: Any = getattr(param, "quant_state", None)
        if old is None or value is None or isinstance(value, KeptTensor):
            continue
        beside = [other for other in state if other.startswith(f"{name}.")]
        found = {other.removeprefix(f"{name}."): state.pop(other).clone() for other in beside}
        if not found or value.dtype != param.dtype:
            rest[-1].append(
                f"{name}: expected packed bytes in {param.dtype} and their quant_state, got {value.dtype} and "
                f"{', '.join(found) or 'none'}. Change quant_storage, or load a checkpoint of the quantized model."
            )
            continue
        vars(old).update(vars(type(old).from_dict(found, old.absmax.device)))
