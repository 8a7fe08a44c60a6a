"""Export a sharded model to a Hugging Face folder, or yield the tensors that such a folder would hold.

Each rank writes its ranges of tensors. Only tensors that must be converted are gathered. An object store does not
accept ranges, so all tensors for an object store are gathered, one after another, and rank 0 uploads them."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.durable import naming
from lightning_zero.checkpoint.hugging_face.files import (
    Files,
    Group,
    Outgoing,
    Writer,
    alone,
    folder_of,
    outgoing,
    written,
)
from lightning_zero.checkpoint.sharded.items import by_home
from lightning_zero.comm.agreements import broadcast_object, together
from lightning_zero.engine import Engine, engine_of
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, joined
from lightning_zero.engine.units.master_storage import MasterStorage, opened
from lightning_zero.engine.units.packed import prefixes_beside
from lightning_zero.engine.whole.state_dicts import sharded_state_dict
from lightning_zero.engine.whole.values import TensorParts, in_whole
from lightning_zero.engine.whole.whole_params import show_gathered
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.remote import Place, RemotePath, names_in, place

T = TypeVar("T")
# Files of tokenizers and processors.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


class _Piece(NamedTuple):
    name: str
    start: int
    storage: MasterStorage | None
    values: Callable[[], Tensor]


@outside_autograd
def export(engine: Engine, path: str | os.PathLike[str], dtype: torch.dtype | None, shard_nbytes: int) -> None:
    """Write the model of ``engine`` to the folder ``path`` for ``from_pretrained``. Collective. ``dtype``: the dtype of
    floating-point tensors; None: the dtype that each had before sharding. ``shard_nbytes``: the largest size of a file.
    Raises ConfigError if ``path`` is not empty or some ranks do not see it. If the folder cannot be written, all ranks
    raise an error that names the folder and the cause."""
    with naming(target := place(path), folder=True):
        _Export(engine, target, dtype, shard_nbytes).run()


def stream(module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each tensor that ``export`` would write, for an inference engine. Collective.

    All ranks must iterate over all tensors, and not during a training step. A tensor is on the device, and valid until
    the next tensor is yielded. ``dtype`` is the dtype of floating-point tensors; ``None``: the dtype that each had
    before sharding. Raises RuntimeError if ``module`` is not sharded."""
    engine = engine_of(module)
    if engine is None:
        raise RuntimeError(f"lightning_zero.stream: expected a sharded module, got {type(module).__name__}.")
    return _Tensors(engine, dtype).stream()


class _Tensors:
    """Yields the tensors of an engine's model with the names, layouts and dtypes of Hugging Face files. ``dtype``: the
    dtype of floating-point tensors; None: the dtype that each had before sharding."""

    def __init__(self, engine: Engine, dtype: torch.dtype | None) -> None:
        self._engine, self._dtype = engine, dtype
        self._infos = {fqn: info for bucket in engine.buckets for info in bucket.params for fqn in info.fqns}
        self._gathered: tuple[Bucket, Tensor] | None = None

    @outside_autograd
    def _plan(self) -> tuple[dict[str, Any], dict[str, Tensor], Outgoing]:
        """Return the engine's sharded state dict, a meta tensor with the dtype in the files for each of its tensors,
        and the export plan. Collective."""
        state = sharded_state_dict(self._engine)
        like = {key: self._like(key, value) for key, value in state.items() if isinstance(value, Tensor)}
        first: dict[int, Tensor] = {}  # one object for each object of ``state``, so that tied parameters stay tied
        tied = {key: first.setdefault(id(state[key]), value) for key, value in like.items()}
        plan = self._outgoing(tied)
        if plan.reads:
            params = {key: self._infos[key].param for key in plan.reads if key in self._infos}
            with show_gathered(self._engine, params.values()):
                for key in plan.reads:
                    tied[key] = params.get(key, state[key]).detach().to(like[key].dtype)
                plan = self._outgoing(tied)
        if plan.adapters:
            renamed = broadcast_object(self._engine._group, plan.renamed, 0, self._engine.comm.waits)
            plan = plan._replace(renamed=renamed)
        return state, like, plan

    def _outgoing(self, state: Mapping[str, Tensor]) -> Outgoing:
        with self._engine.passes.fence.lowered():  # PEFT asks modules for the names in their state dicts
            act = partial(outgoing, self._engine.module, state, asks=self._engine.comm.rank == 0)
            found: Outgoing = self._together("its names", act)
            return found

    def _like(self, key: str, value: Tensor) -> Tensor:
        """Return a meta tensor with the shape and dtype that the tensor ``key`` will have in the files."""
        info = self._infos.get(key)
        own = info.dtype if info is not None else value.dtype
        packed = f"{key}.".startswith(prefixes_beside(self._engine.module))
        wanted = self._dtype if self._dtype is not None and own.is_floating_point and not packed else own
        return torch.empty(value.shape, dtype=wanted, device="meta")

    @outside_autograd
    def _gather(self, key: str, state: Mapping[str, Any]) -> Tensor:
        """Return the unsharded tensor ``key`` of ``state``. The bucket of a parameter stays gathered until a parameter
        of another bucket is needed. Collective."""
        if key not in self._infos:
            return state[key]  # type: ignore[no-any-return]
        found = self._engine.units.place_of(self._infos[key].param)
        if self._gathered is None or self._gathered[0] is not found.bucket:
            self._gathered = None  # first, so that two are never held
            with self._engine.comm.set_place("export or lightning_zero.stream, of which all ranks take all tensors"):
                self._gathered = found.bucket, found.bucket.full_master()
        return joined(self._engine.comm, found.info, found.bucket.part_of(self._gathered[1], found.info))

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        state, like, plan = self._plan()
        order = {key: number for number, key in enumerate(self._infos)}  # bucket by bucket
        for name, key in sorted(plan.renamed.items(), key=lambda item: order.get(item[1], -1)):
            yield name, self._gather(key, state).detach().to(like[key].dtype)
        for group in plan.groups:
            values = {key: self._gather(key, state).clone() for key in group.members}
            for name, value in group.convert(values).items():
                yield name, value.to(group.results[name].dtype)

    def _together(self, what: str, act: Callable[[], Any]) -> Any:
        engine = self._engine
        return together(engine._group, engine.comm.waits, f"exporting a model: {what}", act, patient=True)


class _Export(_Tensors):
    def __init__(self, engine: Engine, path: Place, dtype: torch.dtype | None, shard_nbytes: int) -> None:
        super().__init__(engine, dtype)
        self._path, self._shard_nbytes = path, shard_nbytes
        self._is_remote = isinstance(path, RemotePath)

    def run(self) -> None:
        state, like, plan = self._plan()
        with contextlib.ExitStack() as stack:  # the writer exits before the folder gets its name
            files, made, begun = self._together("a folder", lambda: self._begin(stack, plan, like))
            folder = Path(broadcast_object(self._engine._group, made, 0, self._engine.comm.waits))
            writer = self._together("its files", lambda: begun or self._open(stack, files, folder))
            self._together("tensors", lambda: self._write_own(writer, plan, state))
            turned = {name: key for name, key in plan.renamed.items() if self._is_gathered(state[key])}
            groups = files.in_order([*plan.groups, *alone(turned, like)])
            for number, group in enumerate(self._shown(groups, "groups of tensors")):
                values = {key: self._gather(key, state) for key in group.members}
                convert = partial(self._convert, writer, group, values, number)
                self._together("tensors that are kept otherwise", convert)
            # Before the folder gets its name, the files of all ranks must be on the disk.
            close = partial(self._engine.comm.long_work.call, writer.close, f"{self._path.name}, to the disk")
            self._together("its files on the disk", close)
            self._together("its end", lambda: self._end(stack, plan, folder))

    def _shown(self, items: Sequence[T], what: str) -> Iterator[T]:
        return self._engine.comm.long_work.items(items, f"exporting to {self._path.name}, in {what}")

    def _is_gathered(self, value: Any) -> bool:
        """Return whether ``value`` must be gathered before it is written: any tensor for an object store, else only a
        sharded tensor that is not row-major (tensors in files are row-major)."""
        return self._is_remote or (isinstance(value, TensorParts) and list(value.order) != sorted(value.order))

    # -- steps on all ranks ---------------------------------------------------------------------------------------

    def _begin(self, stack: Any, plan: Outgoing, like: Mapping[str, Tensor]) -> tuple[Files, str, Writer | None]:
        # PEFT reads the adapters of one file.
        files = Files(plan.files(like), self._shard_nbytes if not plan.adapters else sys.maxsize)
        if self._path.is_file() or (self._path.is_dir() and any(self._path.iterdir())):
            raise ConfigError(
                f"export: expected a new or empty folder, got {self._path}, which has files. Give another folder, or "
                "empty this one."
            )
        if self._engine.comm.rank:
            return files, "", None
        folder, writer = stack.enter_context(written(files, self._path))
        return files, str(folder), writer

    def _open(self, stack: Any, files: Files, folder: Path) -> Writer:
        if not self._is_remote and not folder.is_dir():
            raise ConfigError(
                f"export: expected a folder that all ranks see, got {folder.parent}, where rank "
                f"{self._engine.comm.rank} does not see the folder that rank 0 has made. Export to a file system that "
                "all nodes share."
            )
        return stack.enter_context(Writer(files, folder))

    def _write_own(self, writer: Writer, plan: Outgoing, state: Mapping[str, Any]) -> None:
        pieces = self._shown(self._pieces(plan, state), "pieces")
        for storage, own in itertools.groupby(pieces, key=lambda piece: piece.storage):
            with opened(storage) if storage is not None else contextlib.nullcontext():
                for piece in own:
                    writer.write(piece.name, piece.start, piece.values())

    def _pieces(self, plan: Outgoing, state: Mapping[str, Any]) -> list[_Piece]:
        found: list[_Piece] = []
        for name, key in plan.renamed.items():
            value = state[key]
            if self._is_gathered(value):
                continue
            if not isinstance(value, TensorParts):
                if self._engine.comm.rank == 0:
                    found.append(_Piece(name, 0, None, lambda v=value: v.reshape(-1)))  # type: ignore[misc]
                continue
            for part in value.parts:
                for piece in in_whole(part, value.of_whole):
                    found.append(_Piece(name, piece.start, piece.storage, lambda p=piece: p.source.tensor))  # type: ignore[misc]
        return by_home(found)

    def _convert(self, writer: Writer, group: Group, values: dict[str, Tensor], number: int) -> None:
        if self._engine.comm.rank == (number % self._engine.comm.world_size if not self._is_remote else 0):
            writer.write_all(group.convert({key: v.cpu() for key, v in values.items()}))

    def _end(self, stack: contextlib.ExitStack, plan: Outgoing, folder: Path) -> None:
        self._gathered = None
        if self._engine.comm.rank == 0:
            dtype = self._dtype or next((i.dtype for i in self._infos.values() if i.dtype.is_floating_point), None)
            write_extras(plan.model, folder, dtype, self._engine.config.init_from, plan.adapters)
        stack.close()


def write_extras(
    model: Any, folder: Path, dtype: torch.dtype | None, source: str | None, adapters: Sequence[str] = ()
) -> None:
    """Write the configuration of ``model``, a transformers or PEFT model (None: write no configuration), to ``folder``.
    ``dtype``: the model's dtype to write (None: unchanged). Copy tokenizer files from ``source``, the folder from which
    the model was loaded, or else from the folder that ``model`` names. ``adapters``: if ``model`` is a PEFT model, the
    names of its adapters; then only the configurations of these adapters are written."""
    for adapter in adapters:
        config = copy.copy(model.peft_config[adapter])
        config.inference_mode, task = True, None
        if config.task_type is None:  # then PEFT finds the base model's class by its name
            base = model._get_base_model_class(is_prompt_tuning=config.is_prompt_learning)
            task = {"base_model_class": base.__name__, "parent_library": base.__module__}
        config.save_pretrained(folder / folder_of(adapter), auto_mapping_dict=task)
    if model is not None and not adapters:
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
    for origin in (source, getattr(getattr(model, "config", None), "_name_or_path", None)):
        if origin and (found := _companions(origin)) is not None:
            for name in set(found) - set(os.listdir(folder)):
                (folder / name).write_bytes(found[name])
            return


def _companions(origin: str) -> dict[str, bytes] | None:
    """Return the contents of the tokenizer and processor files in the folder ``origin``, by file name. Return None if
    there is no such folder. If reading fails, warn and return None."""
    try:
        source = place(os.path.expanduser(origin))
        if not source.is_dir():
            return None
        own = [source / name for name in names_in(source) if any(fnmatch.fnmatch(name, form) for form in COMPANIONS)]
        return {path.name: path.read_bytes() for path in own if path.is_file()}
    except Exception as error:
        warnings.warn(f"tokenizer files in {origin} could not be copied: {error}", stacklevel=2)
        return None
