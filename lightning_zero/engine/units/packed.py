"""Packed weights: the 4-bit parameters of bitsandbytes (`Params4bit`), whose packed bytes can have any storage dtype.

Buckets keep the packed bytes in their storage dtype and never cast them. The tensors that decode the bytes (scales, a
code book) are in the parameter's `quant_state`. Each rank has them whole; state dicts name them `weight.absmax` etc.
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
    """Raise ConfigError if `param` is 4-bit and is trainable, not quantized yet, or repacked by a forward on a CPU."""
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
    """Yield (quantization state, attribute name, tensor) for each tensor in `quant_state` and its nested `state2`."""
    state = getattr(param, "quant_state", None)
    while hasattr(state, "__dict__"):
        yield from ((state, key, value) for key, value in [*vars(state).items()] if isinstance(value, Tensor))
        state = getattr(state, "state2", None)


def replicate_beside(module: nn.Module, comm: Communicator) -> None:
    """Broadcast rank 0's tensors that decode packed parameters to all ranks' engine devices. Collective."""
    for inner in module.modules():
        for param in filter(is_packed, inner.parameters(recurse=False)):
            for owner, key, value in tensors_beside(param):
                own = value.to(comm.device, copy=True).contiguous()
                comm.broadcast(own)
                setattr(owner, key, own)
            if hasattr(inner, "support_avx512bf16_for_cpu"):  # else a forward on such a CPU packs the bytes anew
                inner.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def prefixes_beside(module: nn.Module) -> tuple[str, ...]:
    """Return the prefixes (`"fc.weight."`) of the state dict keys of the tensors that decode packed parameters."""
    return tuple(f"{name}." for name, p in module.named_parameters(remove_duplicate=False) if is_packed(p))


def load_beside(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: list[str]) -> None:
    """Pre-hook of one module's `load_state_dict`: load the tensors that decode packed parameters, which bitsandbytes
    saves but does not load. Add a message to `load_state_dict`'s list of errors if `state` has packed bytes of another
    dtype, or lacks the tensors that decode the bytes."""
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
