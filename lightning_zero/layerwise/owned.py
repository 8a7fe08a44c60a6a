"""Hold the tensors that an optimizer steps whole on this rank, and their state.

During a step a *full parameter* replaces a parameter in the optimizer's param groups. A full parameter is a plain
Parameter of the same shape and strides, and has values during a step only. It is the key of the optimizer state. The
owner (every rank, if masters are replicated) holds this state, on the tier of the bucket's masters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.master_storage import FlatSlice, opened
from lightning_zero.engine.units.param import ParamInfo, strides_of
from lightning_zero.optimizers.inner import JoinedState
from lightning_zero.optimizers.state_trees import Leaf, leaves_of, map_leaves, map_tree
from lightning_zero.planning.placement import Tier
from lightning_zero.pretrained.stored import StoredTensor


@dataclass(eq=False, slots=True)
class WholeTensor:
    """A parameter that is stepped whole, not in slices, by the rank that owns it."""

    bucket: Bucket
    info: ParamInfo
    owner: int  # the rank of its shard group that steps it and saves its state
    group: int
    place: int  # index in the param group
    together: bool = False  # one rank owns all tensors of the optimizer
    full_param: nn.Parameter | None = None  # on ranks that step it

    @property
    def key(self) -> nn.Parameter:
        """Return the full parameter, the key of the optimizer's state. Only ranks that step the tensor have one."""
        assert self.full_param is not None
        return self.full_param

    @property
    def travels(self) -> bool:
        """Return whether the tensor's shards are on several ranks."""
        return self.bucket.plan.shards_master and self.bucket.comm.shard.size > 1

    @property
    def is_broadcast(self) -> bool:
        """Return whether all ranks have the tensor's masters, and get new values from the owner."""
        return self.together and not self.bucket.plan.shards_master and self.bucket.comm.shard.size > 1

    @property
    def is_owner(self) -> bool:
        return self.owner == self.bucket.comm.shard.index

    @property
    def is_here(self) -> bool:
        return self.is_owner or not (self.together or self.bucket.plan.shards_master)


Key = tuple[Bucket, int]  # bucket and slot
_NESTED = "__bnb_optimizer_quant_state__"
FlatStates = dict[int, tuple[Tensor, Tensor]]  # id of a state tensor -> (the tensor, its flat view in a storage)


class Owned:
    """Holds all tensors that one optimizer steps whole, on any rank, and the state of tensors that this rank steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.follow(optimizer)
        self.tensors: dict[Key, WholeTensor] = {}
        self._flat_states: dict[Bucket, dict[WholeTensor, FlatStates]] = {}  # only of state that is off the device
        self._stepped: set[Key] = set()
        self._at_rest: dict[WholeTensor, dict[str, Tensor]] = {}  # state off the device, while a step uses a copy of it

    def follow(self, optimizer: Optimizer) -> None:
        """Keep the state in ``optimizer`` from now on."""
        self.states = JoinedState(optimizer)

    # -- which tensors --------------------------------------------------------------------------------------------

    def replace_tensors(self, wanted: Sequence[WholeTensor]) -> None:
        """Replace the tensors by ``wanted``, after param groups have changed. A tensor that was here before keeps its
        object and state. Tensors that have been stepped stay here too, because a later call may want them again."""
        found = {key: tensor for key, tensor in self.tensors.items() if key in self._stepped}
        found |= {(tensor.bucket, tensor.info.slot): tensor for tensor in wanted}
        for key, tensor in found.items():
            known = self.tensors.get(key)
            if known is not None:
                known.group, known.place = tensor.group, tensor.place
                found[key] = known
        self.tensors = found
        for tensor in found.values():
            self._make_full_param(tensor)

    def _make_full_param(self, tensor: WholeTensor) -> None:
        if not tensor.is_here:
            if tensor.full_param is not None:
                self.states.pop(tensor.full_param)
                tensor.full_param = None
        elif tensor.full_param is None:
            param = tensor.info.param
            grows = param.is_floating_point() or param.is_complex()
            tensor.full_param = nn.Parameter(_nothing(tensor), requires_grad=grows)
            tensor.full_param.__dict__.update(param.__dict__)  # users' attributes of parameters, which a class may read

    def here(self, bucket: Bucket) -> Iterator[WholeTensor]:
        """Yield the tensors of a bucket that this rank steps."""
        for info in bucket.params:
            tensor = self.tensors.get((bucket, info.slot))
            if tensor is not None and tensor.full_param is not None:
                yield tensor

    def buckets(self) -> list[Bucket]:
        return list(dict.fromkeys(bucket for bucket, _ in self.tensors))

    def stepped(self, tensors: Iterable[WholeTensor]) -> None:
        self._stepped |= {(tensor.bucket, tensor.info.slot) for tensor in tensors}

    def has_stepped(self, bucket: Bucket) -> bool:
        """Return whether any of the bucket's tensors has been stepped. The answer is the same on all ranks."""
        return any(other is bucket for other, _ in self._stepped)

    # -- values of a step -----------------------------------------------------------------------------------------

    def show(self, tensor: WholeTensor, values: Tensor, grad: Tensor | None, *, state: bool) -> None:
        """Let the full parameter of ``tensor`` have ``values`` [shape] and ``grad`` for a step. With ``state``, if the
        state is stored off the device of ``values``, copy the state to that device."""
        tensor.key.data = values
        tensor.key.grad = grad
        found = self.state(tensor) if state else {}
        if found and values.device.type != "cpu" and tensor.bucket.plan.storage_tier is not Tier.device:
            self._at_rest[tensor] = dict(leaves_of(found))
            self.states.set(tensor.key, map_leaves(found, lambda _, leaf: leaf.to(values.device)))

    def hide(self, tensor: WholeTensor) -> None:
        tensor.key.data = _nothing(tensor)
        tensor.key.grad = None

    # -- state at rest --------------------------------------------------------------------------------------------

    def state(self, tensor: WholeTensor) -> dict[str, Any]:
        return self.states.get(tensor.key)

    def move_to_tier(self, bucket: Bucket) -> None:
        """Move the bucket's optimizer state on this rank to the tier of the masters. The bucket's storage must be open
        (``with opened(bucket.storage)``)."""
        if bucket.plan.storage_tier is Tier.device:
            return
        before = self._flat_states.get(bucket, {})
        now: dict[WholeTensor, FlatStates] = {}
        for tensor in self.here(bucket):
            known_of = before.get(tensor, {})
            state, at_rest = self.state(tensor), self._at_rest.pop(tensor, {})
            # At first a copy: parameters may share a tensor, or the class may keep it (a table of bitsandbytes).
            if not known_of or any(not _is_alone(leaf) for _, leaf in leaves_of(state)):
                state = map_leaves(state, partial(_alone, at_rest, not known_of))
                self.states.set(tensor.key, state)
            now[tensor] = {}
            for _, leaf in leaves_of(state):
                known = known_of.get(id(leaf))
                if known is None or known[1].untyped_storage()._cdata != leaf.untyped_storage()._cdata:
                    known = leaf, flat_view(leaf)
                now[tensor][id(leaf)] = known
        self._flat_states[bucket] = now
        every = [pair for flat_states in now.values() for pair in flat_states.values()]
        bucket.storage.attach_state(self, [flat_state for _, flat_state in every])
        for leaf, flat_state in every:
            if flat_state.untyped_storage()._cdata != leaf.untyped_storage()._cdata:  # the storage has moved it
                leaf.data = flat_state.as_strided(leaf.shape, leaf.stride(), flat_state.storage_offset())

    def leaves(self, bucket: Bucket) -> Iterator[tuple[WholeTensor, str, Tensor]]:
        """Yield (tensor, path in the tensor's state, state tensor) for each state tensor of the bucket on this rank."""
        for tensor in self.here(bucket):
            for name, leaf in leaves_of(self.state(tensor)):
                yield tensor, name, leaf

    def entries(self, bucket: Bucket) -> dict[int, dict[str, Any]]:
        """Return {slot: state} for the bucket's state that this rank saves, with a :class:`Leaf` for each tensor."""
        found: dict[int, dict[str, Any]] = {}
        for tensor in self.here(bucket):
            if tensor.is_owner and (state := self.state(tensor)):
                found[tensor.info.slot] = map_tree(state, _told)
        return found

    def parts(self, bucket: Bucket) -> Iterator[tuple[WholeTensor, str, Tensor, FlatSlice]]:
        """Yield (tensor, path in the tensor's state, state tensor, flat slice) for each state tensor of the bucket that
        this rank saves. The slice is the state tensor in memory order. The bucket's storage may be closed."""
        flat_states = self._flat_states.get(bucket, {})
        for tensor, name, leaf in self.leaves(bucket):
            if tensor.is_owner:
                known = flat_states.get(tensor, {}).get(id(leaf))
                flat = known[1] if known is not None else flat_view(leaf)
                yield tensor, name, leaf, FlatSlice(flat, 0, leaf.numel())

    def clear(self) -> None:
        for bucket in self.buckets():
            for tensor in self.here(bucket):
                self.states.pop(tensor.key)
            with opened(bucket.storage):
                self.move_to_tier(bucket)
        self.tensors, self._stepped, self._flat_states = {}, set(), {}

    def fill(self, bucket: Bucket, states: Mapping[Key, Mapping[str, Any]], dtype_of: DtypeOf) -> None:
        """Load the state of the bucket's tensors from ``states``, which has whole tensors, in memory or in files.
        ``dtype_of``: returns the dtype in which a state is kept, or None to keep the dtype in ``states``."""
        with opened(bucket.storage, changed=True) as master:
            for key in [(bucket, info.slot) for info in bucket.params]:
                if key in states and key in self.tensors:
                    self._stepped.add(key)
            for tensor in self.here(bucket):
                state = states.get((bucket, tensor.info.slot))
                self.states.pop(tensor.key)
                if state:
                    self.states.set(tensor.key, _taken(state, tensor, master.device, dtype_of))
            self.move_to_tier(bucket)

    # -- another plan of the bucket ---------------------------------------------------------------------------------

    def forget(self, bucket: Bucket) -> None:
        """Drop the state of ``bucket``, whose storage is gone. Make or remove full parameters as the new plan needs."""
        self._flat_states.pop(bucket, None)
        for info in bucket.params:
            if (tensor := self.tensors.get((bucket, info.slot))) is not None:
                if tensor.full_param is not None:
                    self.states.pop(tensor.full_param)
                self._make_full_param(tensor)


DtypeOf = Callable[[WholeTensor, str], torch.dtype | None]


def _nothing(tensor: WholeTensor) -> Tensor:
    """Return a tensor of the parameter's shape that needs the memory of only one element."""
    bucket = tensor.bucket
    return torch.zeros((), dtype=bucket.dtypes.master, device=bucket.comm.device).expand(tensor.info.shape)


def flat_view(tensor: Tensor) -> Tensor:
    """Return a flat view [numel] of ``tensor`` in memory order. Return a copy if its memory has gaps or overlaps."""
    if strides_of(tensor) != tensor.stride():
        tensor = tensor.contiguous()
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _leaf(name: str, tensor: Tensor) -> Leaf:
    return Leaf(name, tuple(tensor.shape), strides_of(tensor), tensor.dtype)


def _told(name: str, value: Any) -> Any:
    """Return what ranks send for ``value``: a :class:`Leaf` for a tensor of more than one element, else a copy."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return _leaf(name, value) if value.numel() > 1 else value.detach().cpu().clone()


def _is_alone(leaf: Tensor) -> bool:
    """Return whether the tensor ``leaf`` is on the host, without gaps, and alone in its storage."""
    alone = leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
    return alone and strides_of(leaf) == leaf.stride() and leaf.device.type == "cpu"


def _alone(before: Mapping[str, Tensor], is_first: bool, name: str, leaf: Tensor) -> Tensor:
    """Return ``leaf`` itself if :func:`_is_alone` holds and ``is_first`` is False. Otherwise return a copy on the host,
    in the memory of ``before[name]`` if shape, strides and dtype are equal."""
    if _is_alone(leaf) and not is_first:
        return leaf
    at_rest = before.get(name)
    if at_rest is not None and _leaf("", at_rest) == _leaf("", leaf):
        return at_rest.copy_(leaf.detach())
    # Without gaps, with its dimensions in the same memory order.
    return torch.empty_strided(leaf.shape, strides_of(leaf), dtype=leaf.dtype, device="cpu").copy_(leaf.detach())


def _taken(state: Mapping[str, Any], tensor: WholeTensor, device: torch.device, dtype_of: DtypeOf) -> dict[str, Any]:
    def take(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        value = leaf.whole() if isinstance(leaf, StoredTensor) else leaf
        if value.numel() <= 1:
            return value.clone()
        if value.shape == tensor.info.shape:
            strides = tensor.info.strides
        else:  # tensors in files are contiguous
            strides = torch.empty(value.shape, device="meta").stride() if leaf is not value else strides_of(value)
        # Not codes, of which a trial with small tensors may have shown none (bitsandbytes).
        dtype = (dtype_of(tensor, name) if value.is_floating_point() else None) or value.dtype
        return torch.empty_strided(value.shape, strides, dtype=dtype, device=device).copy_(value.detach())

    # The state_dict() of bitsandbytes nests tensors, to hide them from FSDP.
    state = {k: v for k, v in state.items() if k != _NESTED} | dict(state.get(_NESTED, {}))
    return {name: map_tree(value, take, name) for name, value in state.items()}
