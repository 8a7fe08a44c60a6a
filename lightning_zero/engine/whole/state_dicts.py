"""Make state dicts of a sharded module and its optimizers (with full, fake or partial tensors), and load them."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero.comm.agreements import gather_if_unequal
from lightning_zero.engine.build import Core
from lightning_zero.engine.passes.containers import Args, Kwargs
from lightning_zero.engine.passes.writes import checksum
from lightning_zero.engine.steps.optimizer import Stepper
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place, joined
from lightning_zero.engine.units.master_storage import MasterStorage
from lightning_zero.engine.units.packed import prefixes_beside
from lightning_zero.engine.units.param import ParamInfo
from lightning_zero.engine.whole.values import (
    COPY,
    Copies,
    Entries,
    FakeTensors,
    OnRank0,
    Part,
    TensorParts,
    Value,
    all_entries,
    full_entries,
    own_entries,
    own_fragments,
    parts_for_folder,
)
from lightning_zero.engine.whole.whole_params import masters_changed, take_shown_over
from lightning_zero.mesh.split import Split
from lightning_zero.optimizers.inner import has_own_state_dict, load_own_state_dict, own_state_dict
from lightning_zero.optimizers.state_trees import Leaf, Saved, State, with_leaves
from lightning_zero.pretrained.stored import KeptTensor, StoredTensor
from lightning_zero.settings import ConfigError

Storages = Sequence[MasterStorage]  # of one copy of the masters of all buckets
Parts = Mapping[Value, Sequence[Part]]

# -- the module, out of shards ----------------------------------------------------------------------------------------


@outside_autograd
def module_state(
    engine: Core, *, only_rank_0: bool = True, fakes: FakeTensors | None = None, trainable_only: bool = False
) -> State:
    """Return the module's state dict, with full or with fake tensors: see ``Engine.state_dict``. Collective."""
    if fakes is None:  # in a save, an earlier message has shown that all ranks are here
        engine.comm.gather_checked(None, "the module's state_dict(), which all ranks must call")
    take_shown_over(engine)
    wanted = not only_rank_0 or engine.comm.rank == 0
    values = gathered(engine, wanted=wanted) if fakes is None else {}
    if fakes is not None and wanted:
        values = _tensors(engine, lambda value, info: fakes.tensor(value, info, info.dtype), trainable_only)
    # An override of ``state_dict`` may raise on one rank, while the others go on to the next message.
    act = partial(_state_dict_with, engine, values if wanted else _elsewhere(engine, trainable_only), trainable_only)
    return engine.comm.together("the module's state_dict()", act)


def _elsewhere(engine: Core, trainable_only: bool) -> dict[int, Tensor]:
    return _tensors(engine, lambda _, info: OnRank0.like(info, info.dtype), trainable_only)


def fake_copy(engine: Core, fakes: FakeTensors, storages: Storages, *, trainable_only: bool = False) -> State:
    """Return ``module.state_dict()`` with fake tensors that refer to ``storages``, a copy of all buckets' masters. On
    ranks other than 0 the tensors are :class:`OnRank0`."""
    name = f"copy {len(fakes.copies)}"
    fakes.copies[name] = storages

    def tensor(value: Value, info: ParamInfo) -> Tensor:
        return fakes.tensor(value._replace(optimizer=COPY, name=name), info, info.dtype)

    values = _elsewhere(engine, trainable_only) if engine.comm.rank else _tensors(engine, tensor, trainable_only)
    return _state_dict_with(engine, values, trainable_only)


@outside_autograd
def sharded_state_dict(engine: Core, storages: Storages | None = None, *, trainable_only: bool = False) -> State:
    """Return ``module.state_dict()`` with :class:`TensorParts` of the masters or, if ``storages`` are given, of the
    copy of all masters in ``storages``. Collective."""
    take_shown_over(engine)
    parts = parts_by_value(engine, {} if storages is None else {"copy": storages})

    def tensor(value: Value, info: ParamInfo) -> Tensor:
        if storages is not None:
            value = value._replace(optimizer=COPY, name="copy")
        return parts_of(engine, parts, value, info, storages)

    return _state_dict_with(engine, _tensors(engine, tensor, trainable_only), trainable_only)


def parts_of(engine: Core, parts: Parts, value: Value, info: ParamInfo, copies: Storages | None = None) -> TensorParts:
    """Return a :class:`TensorParts` for ``value``, in the dtype of the parameter's masters or, if given, of ``copies``
    (storages of a copy of all masters)."""
    storage = engine.buckets[value.bucket].storage if copies is None else copies[value.bucket]
    dtype = storage.master.dtype
    return TensorParts(info.saved_shape, dtype, parts.get(value, ()), info.saved_strides, info.split, value)


def parts_by_value(engine: Core, copies: Copies | None = None) -> dict[Value, list[Part]]:
    found: dict[Value, list[Part]] = {}
    for part in own_fragments(engine, copies):
        found.setdefault(part.value, []).append(part)
    return found


def _tensors(engine: Core, tensor: Callable[[Value, ParamInfo], Tensor], trainable_only: bool) -> dict[int, Tensor]:
    """Call ``tensor(value, info)`` for each parameter. Return {``id`` of the parameter: result}."""
    return {
        id(info.param): tensor(Value(number, info.slot), info)
        for number, bucket in enumerate(engine.buckets)
        for info in bucket.params
        if info.param.requires_grad or not trainable_only
    }


def gathered(engine: Core, *, wanted: bool, only: Container[Value] | None = None) -> dict[int, Tensor]:
    """Gather parameters (all, or those in ``only``) to the host, in their original dtypes. Return {``id`` of the
    parameter: whole tensor}, or an empty dict if ``wanted`` is False on this rank. Collective."""
    result: dict[int, Tensor] = {}
    for number, bucket in enumerate(engine.comm.long_work.items(engine.buckets, "gathering weights, in buckets")):
        infos = [info for info in bucket.params if only is None or Value(number, info.slot) in only]
        full = bucket.full_master() if infos else None
        for info in infos:
            assert full is not None
            values = joined(engine.comm, info, bucket.part_of(full, info))
            if wanted:
                result[id(info.param)] = values.to(device="cpu", dtype=info.dtype, copy=True)
    return result


def _state_dict_with(engine: Core, values: Mapping[int, Tensor], trainable_only: bool) -> State:
    """Return ``module.state_dict()`` with ``values[id(param)]`` in place of each parameter."""
    # With torch functions, so that a parameter tells if an override of ``state_dict`` uses its values.
    with engine.passes.fence.lowered("state_dict()"), torch._C._EnableTorchFunction():
        state = engine.module.state_dict(keep_vars=True)
    by_id = {id(info.param): info for b in engine.buckets for info in b.params}
    by_storage = {_identity(info.param): info for info in by_id.values()}

    def info_of(entry: object) -> ParamInfo | None:
        if not isinstance(entry, Tensor):
            return None
        # By memory: an override of ``state_dict`` may have detached the parameter. See [Note: placeholders].
        return by_id.get(id(entry)) or by_storage.get(_identity(entry))

    left_out = prefixes_beside(engine.module) if trainable_only else ()
    result = type(state)()
    for key, entry in state.items():
        info = info_of(entry)
        if key.startswith(left_out):
            continue
        if info is None:
            result[key] = entry.detach().to("cpu", copy=True) if isinstance(entry, Tensor) else entry
        elif info.param.requires_grad or not trainable_only:
            result[key] = values[id(info.param)]
    if hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result


def _identity(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


# -- optimizers, out of shards ----------------------------------------------------------------------------------------


def sharded_optimizer(engine: Core, optimizer: Optimizer) -> Stepper:
    """Return the stepper of ``optimizer``. Raise a ConfigError if ``engine`` has none."""
    for sharded in engine.optimizers:
        if sharded.optimizer is optimizer:
            return sharded
    raise ConfigError("this optimizer does not step the sharded module. Add it by engine.add_optimizer(optimizer).")


@outside_autograd
def optimizer_state(
    engine: Core, optimizer: Optimizer, *, only_rank_0: bool = True, fakes: FakeTensors | None = None
) -> State:
    """Return the optimizer's full ``state_dict()`` on the host. Collective. By default only rank 0's tensors have
    values; with ``fakes`` none have. Raises ConfigError if ``optimizer`` does not step the engine's shards."""
    sharded = sharded_optimizer(engine, optimizer)
    engine.passes.wait_for_all()
    wanted, index = not only_rank_0 or engine.comm.rank == 0, engine.optimizers.index(sharded)
    own = has_own_state_dict(optimizer)
    if own:  # the class may compute with values
        fakes = None
    # A rank that owns nothing of a parameter does not know its state, but must take part in the gathers.
    known = all_entries(engine, sharded)
    states: dict[tuple[int, int], State] = {}
    if fakes is None:
        states.update(whole_states(engine, sharded, known, wanted=wanted))
    if fakes is not None or not wanted:
        stand_ins = fakes if wanted else FakeTensors() if own else None
        for number, slots in sorted(known.items()):
            for slot, entry in slots.items():
                value = Value(number, slot, index)
                states[number, slot] = with_leaves(entry, partial(_leaf, stand_ins, value))
    if own:
        by_param = _by_param(engine, states)

        def ask() -> State:
            with torch._C._EnableTorchFunction():
                return own_state_dict(sharded.optimizer, by_param)

        return engine.comm.together("the optimizer's state_dict()", ask)
    bucket_numbers = {bucket: number for number, bucket in enumerate(engine.buckets)}
    places = [place for group in sharded.places() for place in group]
    numbers = {(bucket_numbers[place.bucket], place.info.slot): number for number, place in enumerate(places)}
    state = {number: states[place] for place, number in numbers.items() if place in states}
    return {
        "state": state,
        "param_groups": _groups(sharded, lambda place: numbers[bucket_numbers[place.bucket], place.info.slot]),
    }


def _by_param(engine: Core, states: Mapping[tuple[int, int], State]) -> dict[nn.Parameter, State]:
    return {engine.buckets[number].params[slot].param: state for (number, slot), state in states.items()}


def whole_states(
    engine: Core, sharded: Stepper, known: Entries, *, wanted: bool = True, device: torch.device | str = "cpu"
) -> dict[tuple[int, int], State]:
    """Gather an optimizer's state to `device`. Return {(index of the bucket, slot): state}, with None in place of
    tensors if `wanted` is False on this rank. Collective. `known`: a result of :func:`all_entries`."""
    states = dict[tuple[int, int], State]()
    for number, bucket in enumerate(
        engine.comm.long_work.items(engine.buckets, "gathering optimizer state, in buckets")
    ):

        def keep(info: ParamInfo, part: Tensor) -> Tensor | None:
            whole = joined(engine.comm, info, part)
            return whole.to(device, copy=True) if wanted else None

        full = full_entries(bucket, sharded, known.get(number, {}), keep)
        states |= {(number, slot): entry for slot, entry in full.items()}
    return states


def _leaf(fakes: FakeTensors | None, value: Value, leaf: Leaf) -> Tensor:
    if fakes is None:
        return OnRank0.like(leaf, leaf.dtype)
    return fakes.tensor(value._replace(name=leaf.name), leaf, leaf.dtype)


@outside_autograd
def sharded_optimizer_state(engine: Core, optimizer: Optimizer) -> State:
    """Return the state of ``optimizer`` by parameter name, with :class:`TensorParts` for tensors. A value that a
    parameter has once (a step count) is wrapped in :class:`Unsharded`, and only the rank with the parameter's first
    element has it. Collective."""
    sharded = sharded_optimizer(engine, optimizer)
    engine.passes.wait_for_all()
    index, parts = engine.optimizers.index(sharded), parts_by_value(engine)
    stepped = {place.info.fqn for group in sharded.places() for place in group}
    state: dict[str, object] = {}
    for number, entries in own_entries(engine, sharded, once=True).items():
        for slot, entry in entries.items():
            if (name := engine.buckets[number].params[slot].fqn) in stepped:
                split = engine.buckets[number].params[slot].split
                state[name] = parts_for_folder(entry, partial(_leaf_parts, parts, Value(number, slot, index), split))
    return {"state": state, "param_groups": _groups(sharded, lambda place: place.info.fqn)}


def _leaf_parts(parts: Parts, value: Value, split: Split | None, leaf: Leaf) -> TensorParts:
    return TensorParts(leaf.shape, leaf.dtype, parts.get(value._replace(name=leaf.name), ()), leaf.strides, split)


def _groups(sharded: Stepper, key_of: Callable[[Place], object]) -> list[State]:
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [key_of(place) for place in places]}
        for group, places in zip(sharded.optimizer.param_groups, sharded.places(), strict=True)
    ]


# -- the module, into shards ------------------------------------------------------------------------------------------


class _CopyIntoShards(TorchFunctionMode):
    """Mode in which ``param.copy_(value)``, as called by ``Module.load_state_dict``, writes to this rank's shards."""

    def __init__(self, engine: Core) -> None:
        super().__init__()
        self.engine = engine
        self._versions = self._users_versions()
        self.failed: OSError | None = None  # the error of reading a value
        self.on_copy: Callable[[nn.Parameter], object] = lambda param: None

    def _users_versions(self) -> dict[str, int]:
        # See [Note: version counters].
        return {fqn: info.param._version - info.version for fqn, info in _infos(self.engine).items()}

    def refuse_writes(self) -> None:
        """Raise RuntimeError if a hook of the load has written to a parameter in place: the write would be lost."""
        written = [fqn for fqn, version in self._users_versions().items() if version != self._versions[fqn]]
        if written:
            raise RuntimeError(
                f"{', '.join(written)}: a hook of load_state_dict() has written to the parameter in place, which a "
                "sharded module would lose. Change the state dict, or write after the load, inside `with "
                "lightning_zero.gather(module):`, on all ranks."
            )

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is Tensor.copy_ and isinstance(args[1], KeptTensor):
            return args[0]
        if func is Tensor.copy_ and isinstance(args[0], nn.Parameter) and self.engine.units.owns(args[0]):
            place = self.engine.units.place_of(args[0])
            if args[1] is args[0]:  # a hook, or on_load_checkpoint, has put in the parameter, which keeps its values
                return args[0]
            if isinstance(args[1], nn.Parameter) and self.engine.units.owns(args[1]):
                self.engine.passes.fence.refuse_use(self.engine.units.place_of(args[1]).info, "copy_")
            try:
                outside_autograd(place.bucket.write)(place.info, args[1])
            except OSError as error:
                self.failed = error
                raise
            self.on_copy(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


def load_module(engine: Core, state: Saved, *, strict: bool = True) -> _IncompatibleKeys:
    """Load a full ``state`` into the shards: see ``Engine.load_state_dict``. Collective."""
    if engine.passes.writes.write_backs:
        raise RuntimeError(
            "loading weights: expected a call outside of gather(), got one inside of it, whose end would write the old "
            "values back. Leave the block first, or call module.load_state_dict(state) in it."
        )
    own: Counter[int] = Counter()  # bytes of each parameter's master that this rank owns, by ``id`` of the parameter
    _refuse_other_values(engine, state)
    own_state = parts_of_saved(engine, state)

    def total() -> int:
        for bucket in engine.buckets:
            for fragment in bucket.owned_fragments():
                nbytes = fragment.numel * bucket.storage.master.element_size()
                own[id(bucket.params[fragment.index].param)] += nbytes
        return own.total()

    with loading_into_shards(engine) as copies, engine.comm.long_work.bytes("loading weights", total) as did:
        copies.on_copy = lambda param: did(own.pop(id(param), 0))  # counts tied parameters once

        def load() -> _IncompatibleKeys:
            try:
                found = engine.module.load_state_dict(own_state, strict=strict)
                copies.refuse_writes()
                return found
            except RuntimeError:  # torch's summary of all errors
                if copies.failed is not None:
                    raise copies.failed from None
                raise

        # If one rank cannot read its part, all must raise: others would wait for it in the next collective.
        return engine.comm.together("loading a checkpoint", load, patient=True)


def _infos(engine: Core) -> dict[str, ParamInfo]:
    return {fqn: info for bucket in engine.buckets for info in bucket.params for fqn in info.fqns}


def _refuse_other_values(engine: Core, state: Saved) -> None:
    """Raise RuntimeError on all ranks if ranks load different values of a parameter. Collective."""
    infos = {fqn: info for fqn, info in _infos(engine).items() if info.split is None}
    own = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and not isinstance(value, StoredTensor | KeptTensor) and not value.is_meta
        if key in infos and value is not infos[key].param
    }
    refuse_unequal_loads(engine, own)


def refuse_unequal_loads(engine: Core, tensors: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError on all ranks if ranks load different ``tensors``. Collective. Compares about eight elements of
    each tensor, enough for random values. A full comparison would read all of a memory-mapped file."""
    own = {key: checksum(value.detach().flatten()[:: value.numel() // 8 + 1]) for key, value in tensors.items()}
    found = gather_if_unequal(engine._group, sorted(own.items()), engine.comm.waits, "values that are loaded")
    if found is not None:
        table = [dict(items) for items in found]
        unequal = sorted({key for values in table for key in values if len({other.get(key) for other in table}) > 1})
        raise RuntimeError(
            f"loading {', '.join(unequal)}: expected the same values on all ranks, got different ones. Draw values "
            "that are not in the checkpoint (on_load_checkpoint) from a generator with the same seed on all ranks, or "
            "broadcast them."
        )


def parts_of_saved(engine: Core, state: Saved) -> State:
    """Return ``state`` with this rank's parts in place of whole tensors of split parameters."""
    infos = _infos(engine)
    return versioned({key: infos[key].part_of_saved(v) if key in infos else v for key, v in state.items()}, state)


def versioned(entries: Saved, of: object) -> State:
    """Return ``entries`` with the ``_metadata`` (versions of modules) of the state dict ``of``."""
    made = OrderedDict(entries)
    made._metadata = getattr(of, "_metadata", None)  # type: ignore[attr-defined]
    return made


def keeping_frozen(module: nn.Module, state: Saved) -> State:
    """Return ``state`` with a :class:`KeptTensor` for each frozen parameter that ``state`` lacks. A load keeps the
    values of these parameters."""
    params = module.named_parameters(remove_duplicate=False)
    lacking = {fqn: p for fqn, p in params if not p.requires_grad and fqn not in state}
    return versioned({**state, **{fqn: KeptTensor(p.shape, p.dtype) for fqn, p in lacking.items()}}, state)


@contextlib.contextmanager
def loading_into_shards(engine: Core) -> Iterator[_CopyIntoShards]:
    """Context manager: ``module.load_state_dict`` writes to shards. Ranks must load the same values. Collective."""
    engine.passes.wait_for_all()
    # First, because earlier writes of the user, if taken over later, would replace the loaded values.
    engine.passes.writes.take_all_over()
    with engine.passes.fence.lowered("load_state_dict()"), _CopyIntoShards(engine) as copies:
        yield copies
        # Read what modules have put in the place of their own tensors (states of metrics): the folder may go.
        for module in engine.module.modules():
            for held in (vars(module), module._buffers):
                held.update([(name, v.whole()) for name, v in held.items() if isinstance(v, StoredTensor)])
    masters_changed(engine)


# -- optimizers, into shards ------------------------------------------------------------------------------------------


def load_optimizer_state(engine: Core, optimizer: Optimizer, state: Saved) -> None:
    """Load an optimizer's full state dict into shards. Raise ConfigError if its param groups do not fit. Collective."""
    sharded = sharded_optimizer(engine, optimizer)
    engine.passes.wait_for_all()
    check_optimizer(engine, optimizer, state, "the checkpoint")
    states: dict[tuple[Bucket, int], Saved] = {}
    if _is_own(optimizer, state):
        places = {place.info.param: place for group in sharded.places() for place in group}
        dtypes = {param: place.bucket.dtypes.master for param, place in places.items()}
        present = _by_param(engine, whole_states(engine, sharded, all_entries(engine, sharded)))
        try:
            own = load_own_state_dict(sharded.optimizer, state, dtypes, present)
        except Exception as error:
            kind = type(optimizer).__name__
            raise ConfigError(
                f"the checkpoint: expected a state that {kind}.load_state_dict() takes, got {error!r}. Build the "
                "optimizer as it was when the checkpoint was saved."
            ) from error
        for param, entry in own.items():
            bucket, info = places[param]
            states[bucket, info.slot] = {name: info.part_of_saved(value) for name, value in entry.items()}
    else:
        for group, saved, place, found in _pairs(optimizer, sharded, state):
            group.update({k: copy.deepcopy(v) for k, v in saved.items() if k != "params"})
            if place is not None and found:
                states[place.bucket, place.info.slot] = found
    with torch.inference_mode(False), torch.no_grad():
        sharded.load_param_states(states, engine.comm.long_work)


def check_optimizer(engine: Core, optimizer: Optimizer, state: Saved, what: str) -> None:
    """Raise a ConfigError if :func:`load_optimizer_state` would refuse ``state``. ``what``: a name for its source."""
    sharded = sharded_optimizer(engine, optimizer)
    if _is_own(optimizer, state):
        return
    saved, own = state["param_groups"], optimizer.param_groups
    kind = type(optimizer).__name__
    sizes = [len(g["params"]) for g in saved], [len(g["params"]) for g in own]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{what}: its optimizer has param groups of {sizes[0]} parameters, this {kind} of {sizes[1]}. Build the "
            "optimizer as it was when the checkpoint was saved."
        )
    settings = optimizer.defaults.keys() - LATER
    for theirs, ours in zip(saved, own, strict=True):
        # Extra settings on one side alone come from another version of torch, a scheduler, or the user's group names.
        lacks, has = sorted(settings - theirs.keys()), sorted(theirs.keys() - ours.keys() - LATER)
        if lacks and has:
            raise ConfigError(
                f"{what}: its optimizer is no {kind}: it has the settings {', '.join(has)} and not {', '.join(lacks)}. "
                "Build the optimizer as it was when the checkpoint was saved."
            )
    sharded.check_groups(saved)
    for _, _, place, found in _pairs(optimizer, sharded, state, what):
        if place is not None and found:
            sharded.check_state(place, found, what)


def _is_own(optimizer: Optimizer, state: Saved) -> bool:
    """Return whether ``state`` is of the class's own ``state_dict()``, which a folder does not hold."""
    if not has_own_state_dict(optimizer) or not isinstance(state, dict):
        return has_own_state_dict(optimizer)
    return not any(isinstance(key, str) for group in state.get("param_groups", ()) for key in group["params"])


# Settings that later versions of torch have added to optimizers, or that schedulers add.
LATER = frozenset(
    ("foreach", "fused", "maximize", "capturable", "differentiable", "decoupled_weight_decay", "initial_lr", "params")
)


def _pairs(
    optimizer: Optimizer, sharded: Stepper, state: Saved, what: str = "the checkpoint"
) -> Iterator[tuple[State, Saved, Place | None, Saved | None]]:
    """For each param group yield (group, saved group, None, None), then (group, saved group, place, state) for each of
    its parameters."""
    for group, saved, places in zip(optimizer.param_groups, state["param_groups"], sharded.places(), strict=True):
        yield group, saved, None, None
        for number, place in _matched(saved["params"], places, what):
            found = state["state"].get(number)
            if found and place.info.split is not None:
                found = {name: place.info.part_of_saved(value) for name, value in found.items()}
            yield group, saved, place, found


def _matched(saved: Sequence[object], places: Sequence[Place], what: str) -> list[tuple[object, Place]]:
    """Pair the keys in ``saved`` with the parameters at ``places``: by name if keys are names, otherwise by order."""
    if not all(isinstance(key, str) for key in saved):
        return list(zip(saved, places, strict=True))
    names = set(saved)
    missing = [place.info.fqn for place in places if not any(fqn in names for fqn in place.info.fqns)]
    if missing:
        raise ConfigError(
            f"{what}: its optimizer has no {missing[0]} in the param group where this optimizer has it (nor "
            f"{len(missing) - 1} others). Build the optimizer as it was when the checkpoint was saved."
        )
    return [(next(fqn for fqn in place.info.fqns if fqn in names), place) for place in places]
