"""Save modules and parameters inside other entries of a checkpoint (hyperparameters, states of callbacks) with their
values.

::

    rank 0      finds entries that hold sharded modules or parameters, and pickles these entries without values
    all ranks   learn which values are needed, and make tensors for these values
    rank 0      unpickles the entries, with these tensors instead of the parameters
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.engine.whole.state_dicts import gathered, parts_by_value, parts_of
from lightning_zero.engine.whole.values import FakeTensors, TensorParts, Value
from lightning_zero.engine.whole.whole_params import take_shown_over
from lightning_zero.optimizers.state_trees import same

HELD = "lightning_zero_held"  # in a folder: values of the parameters in meta.pt; in meta.pt: these parameters
Make = Callable[[Engine, Sequence[Value]], Mapping[Value, object]]


class SavedParameter:
    """Stands for ``param`` in a pickle: unpickles as a plain ``nn.Parameter`` with the values of ``tensor``, which may
    be fake. For :class:`TensorParts` the values are zeros, which the reader of the folder replaces."""

    def __init__(self, param: nn.Parameter, tensor: Tensor) -> None:
        values: object = tensor
        if isinstance(tensor, TensorParts):
            values = _Calls(partial(torch.zeros, tuple(tensor.shape), dtype=tensor.dtype))
        self._arguments = values, param.requires_grad, OrderedDict[int, object]()
        self._state = vars(param)

    def __reduce__(self) -> tuple[Any, ...]:  # as torch reduces an nn.Parameter
        if self._state:
            return torch._utils._rebuild_parameter_with_state, (*self._arguments, self._state)  # type: ignore[attr-defined]
        return torch._utils._rebuild_parameter, self._arguments  # type: ignore[attr-defined]


class _Calls:
    """Is pickled as a call of ``make``, so that unpickling returns the result of this call."""

    def __init__(self, make: partial[object]) -> None:
        self._make = make

    def __reduce__(self) -> tuple[partial[object], tuple[()]]:
        return self._make, ()


def put_values(engine: Engine, content: dict[str, Any], make: Make) -> None:
    """On rank 0, replace parameters of ``engine`` in ``content`` by the objects that ``make`` returns, and modules with
    such parameters by copies. Collective.

    ``make(engine, values)`` returns an object to pickle for each value. All ranks call it if there are any values.
    """
    take = lambda: _Taken.of(engine, content) if engine.comm.rank == 0 else None  # noqa: E731
    taken = engine.comm.together("modules in a checkpoint", take)
    wanted = engine.comm.gather_checked(sorted(taken.wanted) if taken else [], "modules in a checkpoint")[0]
    if wanted:
        take_shown_over(engine)
        made = make(engine, wanted)
        put = lambda: taken.put(made) if taken else {}  # noqa: E731
        content.update(engine.comm.together("modules in a checkpoint", put))


def fake_values(fakes: FakeTensors, engine: Engine, wanted: Sequence[Value]) -> dict[Value, object]:
    """Return a parameter without values for each of ``wanted``. Reuse tensors that ``fakes`` has already made."""
    known = dict(fakes.made)
    found: dict[Value, object] = {}
    for value in wanted:
        info = engine.buckets[value.bucket].params[value.slot]
        tensor = known[value] if value in known else fakes.tensor(value, info, info.dtype)
        found[value] = SavedParameter(info.param, tensor)
    return found


def whole_values(content: Mapping[str, Any], engine: Engine, wanted: Sequence[Value]) -> dict[Value, object]:
    """Gather ``wanted`` on rank 0, and return a parameter for each of these values; {} on other ranks. A tensor in
    ``content`` with the parameter's name and values is used instead, so that a file holds it once. Collective."""
    whole = gathered(engine, wanted=engine.comm.rank == 0, only=set(wanted))
    found: dict[Value, object] = {}
    for value in wanted:
        info = engine.buckets[value.bucket].params[value.slot]
        if (own := whole.pop(id(info.param), None)) is not None:
            shared = (other for other in _named(content, info.fqns) if same(other, own))
            found[value] = SavedParameter(info.param, next(shared, own))
    return found


def values_in_folder(content: dict[str, Any], engine: Engine, wanted: Sequence[Value]) -> dict[Value, object]:
    """Return a parameter of zeros for each of ``wanted``. Put each such parameter into ``content[HELD]``, by name, with
    its values (:class:`TensorParts`, if possible those in the state dict), which the reader copies into it."""
    parts = parts_by_value(engine)
    found: dict[Value, object] = {}
    for value in wanted:
        info = engine.buckets[value.bucket].params[value.slot]
        shared = (t for t in _named(content, info.fqns) if isinstance(t, TensorParts) and t.of == value)
        tensor = next(shared, parts_of(engine, parts, value, info))
        found[value] = SavedParameter(info.param, tensor)
        content.setdefault(HELD, {})[info.fqn] = tensor, found[value]
    return found


def _named(content: Mapping[str, Any], names: Sequence[str]) -> list[Tensor]:
    states = [state for state in content.values() if isinstance(state, Mapping)]
    found = [state.get(name) for state in states for name in names]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


# -- pickling ---------------------------------------------------------------------------------------------------------


class _Looking(pickle.Pickler):
    """Pickler that writes nothing, and finds out whether an object holds parameters of ``engine``, also in modules."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[arg-type]
        self._engine = engine
        self.found = False

    def write(self, data: Any) -> int:
        return len(data)

    def persistent_id(self, obj: Any) -> object:
        if isinstance(obj, nn.Module):
            self.found |= self._engine.hooks.guards(obj)
        elif isinstance(obj, nn.Parameter):
            self.found |= self._engine.units.owns(obj)
        return True if self.found or isinstance(obj, Tensor) else None

    @classmethod
    def finds(cls, engine: Engine, value: object) -> bool:
        looking = cls(engine)
        with contextlib.suppress(Exception):  # the save itself raises for an object that cannot be pickled
            looking.dump(value)
        return looking.found


class _Taken(pickle.Pickler):
    """Entries of a checkpoint, pickled without tensors. ``wanted``: the parameters of ``engine`` in these entries."""

    def __init__(self, engine: Engine) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self._units, self._numbers = engine.units, {bucket: n for n, bucket in enumerate(engine.buckets)}
        self._buffers = {id(buffer) for buffer in engine.module.buffers()}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by ``id``: the tensor, and what is saved for it
        self.wanted: set[Value] = set()

    @classmethod
    def of(cls, engine: Engine, content: Mapping[str, Any]) -> _Taken | None:
        entries = {key: value for key, value in content.items() if _Looking.finds(engine, value)}
        if not entries:
            return None
        taken, put_back = cls(engine), engine.hooks.lift_off()
        try:
            taken.dump(entries)
        finally:
            put_back()
        return taken

    def persistent_id(self, obj: Any) -> object:
        if not isinstance(obj, Tensor):
            return None
        if isinstance(obj, nn.Parameter) and self._units.owns(obj):
            place = self._units.place_of(obj)
            value = Value(self._numbers[place.bucket], place.info.slot)
            self.wanted.add(value)
            return tuple(value)
        saved = obj.detach().to("cpu", copy=True) if id(obj) in self._buffers else obj
        return id(self._kept.setdefault(id(obj), (obj, saved))[0])

    def put(self, made: Mapping[Value, object]) -> dict[str, Any]:
        kept = self._kept

        class Putting(pickle.Unpickler):
            def persistent_load(self, pid: Any) -> object:
                return made[Value(*pid)] if isinstance(pid, tuple) else kept[pid][1]

        self._file.seek(0)
        entries: dict[str, Any] = Putting(self._file).load()
        return entries
