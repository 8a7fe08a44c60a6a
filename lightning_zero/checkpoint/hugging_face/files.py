"""Find the names and layouts that a module's tensors have in a Hugging Face folder, and write safetensors files from
several processes, in any order.

Names lose the prefix that the model has in its LightningModule. Tensors that transformers converts at loading are
converted back, and tied parameters appear once. For a PEFT model PEFT's own functions decide what is written.

::

    8 bytes: length of the header | header: JSON of names, dtypes, shapes, places | values, row-major

The safetensors library can write only tensors that are all in memory. Here the position of each tensor is computed from
all names and shapes, files are made in full length, and each rank writes its ranges of the tensors."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.archive import WriteAt
from lightning_zero.checkpoint.durable import naming, write_at, written_aside
from lightning_zero.planning.layout import round_up
from lightning_zero.pretrained.conversions import hugging_face_model
from lightning_zero.pretrained.folder import DTYPES, INDEX, SINGLE
from lightning_zero.settings import ConfigError
from lightning_zero.tiers import remote
from lightning_zero.tiers.pages import byte_view

ADAPTERS = "adapter_model.safetensors"
RECORD = "lightning_zero_hugging_face"  # in a checkpoint: which transformers model it holds


class Group(NamedTuple):
    """Tensors of a module that have another layout in the files. ``members``: their keys in the module. ``results``:
    the tensors in the files, by name. ``convert``: maps values of members, by key, to values of results, by name."""

    members: tuple[str, ...]
    results: dict[str, Tensor]  # on meta
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Outgoing(NamedTuple):
    """A plan for an export. ``model``: the module's transformers or PEFT model, or None. ``renamed``: for each tensor
    that is not converted, name in the files -> key in the module's state dict. ``groups``: the converted tensors.
    ``adapters``: names of a PEFT model's adapters; names of tensors of an adapter other than "default" begin with the
    adapter's folder. ``reads``: keys of tensors whose values PEFT needs before the plan can be complete."""

    model: Any
    renamed: dict[str, str]
    groups: list[Group]
    adapters: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def files(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors to export, by file, then by name. ``state``: the module's tensors by key, all on meta."""
        tensors = {name: state[key] for name, key in self.renamed.items()}
        tensors |= {name: value for group in self.groups for name, value in group.results.items()}
        if not self.adapters:
            return {SINGLE: tensors}
        found: dict[str, dict[str, Tensor]] = {}
        for folder in sorted(map(folder_of, self.adapters), reverse=True):  # "" last, which takes the rest
            own = [name for name in tensors if name.startswith(folder)]
            found[f"{folder}{ADAPTERS}"] = {name.removeprefix(folder): tensors.pop(name) for name in own}
        return found


def alone(renamed: Mapping[str, str], state: Mapping[str, Tensor]) -> list[Group]:
    """Return, for each tensor of ``renamed`` (name in the files -> key in ``state``), a group that converts nothing."""
    named = lambda name, key, values: {name: values[key]}  # noqa: E731
    return [Group((key,), {name: state[key]}, partial(named, name, key)) for name, key in renamed.items()]


def folder_of(adapter: str) -> str:
    return "" if adapter == "default" else f"{adapter}/"


def outgoing(module: nn.Module, state: Mapping[str, Tensor], *, asks: bool = True) -> Outgoing:
    """Return a plan for the export of ``module`` with the state dict ``state``, whose tensors may be on meta. If the
    plan has ``reads``, call again with a ``state`` that has values for these keys, while the module's parameters have
    these values too. ``asks``: whether PEFT may ask the hub for the original model's vocabulary, in order to decide
    whether embeddings are exported; False: embeddings are not exported."""
    if (peft := sys.modules.get("peft")) is not None:
        for name, inner in module.named_modules():
            if isinstance(inner, peft.PeftModel):
                return _adapters(inner, f"{name}." if name else "", state, "auto" if asks else False)
    model, prefix = hugging_face_model(module)
    own = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
    own = _once(own, state, model)
    if model is None:
        return Outgoing(None, own, [])
    return _in_form_of_files(model, own, state)


def _adapters(model: Any, prefix: str, state: Mapping[str, Tensor], embeddings: Any) -> Outgoing:
    own = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
    # One object for each name. What PEFT selects it passes on; other results it has computed.
    given = {name: state[key] if not state[key].is_meta else _on_meta(state[key]) for name, key in own.items()}
    names = {id(value): own[name] for name, value in given.items()}
    select = importlib.import_module("peft").get_peft_model_state_dict
    renamed: dict[str, str] = {}
    computed: dict[str, Tensor] = {}
    missing: list[str] = []
    for adapter, config in model.peft_config.items():
        part = "prompt_encoder." if config.is_prompt_learning else getattr(model.base_model, "prefix", "")
        reads = [name for name in own if part in name and adapter in name.split(".")]
        waits = any(given[name].is_meta for name in reads)
        found: dict[str, Tensor] = {}
        if not (waits and config.is_prompt_learning):  # these read the modules
            with contextlib.suppress(NotImplementedError) if waits else contextlib.nullcontext():  # on meta
                found = select(model, state_dict=given, adapter_name=adapter, save_embedding_layers=embeddings)
        made = {name: value for name, value in found.items() if id(value) not in names}
        if waits and (not found or any(value.is_meta for value in made.values())):
            missing += [own[name] for name in reads]
            continue
        folder = folder_of(adapter)
        renamed |= {f"{folder}{name}": names[id(value)] for name, value in found.items() if name not in made}
        if config.is_prompt_learning:
            made = {name: value.to(given[reads[0]].dtype) for name, value in made.items()}
        computed |= {f"{folder}{name}": value.detach().clone() for name, value in made.items()}
    groups = [Group((), {name: _on_meta(value) for name, value in computed.items()}, lambda _: computed)]
    return Outgoing(model, renamed, groups if computed else [], tuple(model.peft_config), tuple(missing))


def _once(own: Mapping[str, str], state: Mapping[str, Tensor], model: Any) -> dict[str, str]:
    """Return ``own`` (name in the files -> key in ``state``) with one name for each tied tensor: the first that is not
    in the model's ``_tied_weights_keys``, or the first if all are."""
    tied = getattr(model, "_tied_weights_keys", None)
    tied = set(tied) if tied else set()
    names: dict[int, list[str]] = {}
    for name, key in own.items():
        names.setdefault(id(state[key]), []).append(name)
    kept = [next((n for n in same if n not in tied), same[0]) for same in names.values()]
    return {name: own[name] for name in kept}


def _in_form_of_files(model: Any, own: Mapping[str, str], state: Mapping[str, Tensor]) -> Outgoing:
    meta = {name: _on_meta(state[key]) for name, key in own.items()}
    names = {id(value): name for name, value in meta.items()}
    revert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda values: values  # noqa: E731
    with contextlib.suppress(ImportError):  # with older transformers the form of files is the model's own
        loading = importlib.import_module("transformers.core_model_loading")
        revert = partial(loading.revert_weight_conversion, model)
    made = revert(dict(meta))
    renamed = {name: own[names[id(value)]] for name, value in made.items() if id(value) in names}
    plain = set(renamed.values())
    left = [name for name, key in own.items() if key not in plain]
    together: dict[tuple[str, ...], list[str]] = {}  # by the file names that each would give alone
    for name in left:
        together.setdefault(tuple(sorted(revert({name: meta[name]}))), []).append(name)
    groups = []
    for members in together.values():
        results = revert({name: meta[name] for name in members})
        groups.append(Group(tuple(own[name] for name in members), results, _converter(members, own, revert)))
    return Outgoing(model, renamed, groups)


def _converter(members: Sequence[str], own: Mapping[str, str], revert: Any) -> Any:
    return lambda values: revert({name: values[own[name]] for name in members})


def _on_meta(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def record_of(module: nn.Module, source: str | None) -> dict[str, str] | None:
    """Describe the transformers model in ``module`` by plain values, with which a checkpoint can be converted without
    the user's code. Return None if there is no such model or it has adapters. ``source``: the model's folder."""
    model, prefix = hugging_face_model(module)
    if model is None or prefix.endswith("base_model.model."):  # with adapters
        return None
    config = json.dumps(model.config.to_diff_dict(), default=str)
    origin = source or getattr(model.config, "_name_or_path", "") or ""
    return {"prefix": prefix, "class": type(model).__name__, "config": config, "source": str(origin)}


def model_of(record: Mapping[str, str]) -> Any:
    """Build on meta and return the model that ``record``, a result of :func:`record_of`, describes. Return None if
    transformers is not installed or lacks the model's class."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return None
    kind = getattr(transformers, record["class"], None)
    if kind is None:
        return None
    config = kind.config_class.from_dict(json.loads(record["config"]))
    with torch.device("meta"):
        return kind(config)


# -- files ------------------------------------------------------------------------------------------------------------

NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 1 << 22
_ALIGN = 8

_SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def parse_dtype(key: str, value: str | torch.dtype | None) -> torch.dtype | None:
    """Return ``value``, a floating-point dtype or its name (such as ``bf16``), as a dtype; None for None. Raises
    ConfigError for another value. ``key``: the argument to name in the error."""
    found = _SHORT.get(value, getattr(torch, value, None)) if isinstance(value, str) else value
    if value is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise ConfigError(f"{key}: expected one of {', '.join(_SHORT)}, got {value!r}. Change {key}.")


class Place(NamedTuple):
    file: str
    start: int  # bytes
    dtype: torch.dtype


class Files:
    """Assigns each of ``tensors`` (on meta, by file, then by name) a position in a safetensors file. A file of more
    than ``shard_nbytes`` is split; a larger tensor has a file by itself. ``places``: the positions by name. If the file
    of a tensor is in a folder, the name begins with the folder and "/"."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], shard_nbytes: int) -> None:
        self.names: list[str] = []
        self.places: dict[str, Place] = {}
        self.heads: dict[str, tuple[bytes, int]] = {}  # header and size of each file
        for file, own in tensors.items():
            self._divide(file, own, shard_nbytes)

    def _divide(self, file: str, tensors: Mapping[str, Tensor], shard_nbytes: int) -> None:
        self._nbytes, left = sum(tensor.nbytes for tensor in tensors.values()), shard_nbytes
        groups: list[dict[str, Tensor]] = [{}]
        for name, tensor in sorted(tensors.items()):
            if groups[-1] and tensor.nbytes > left:
                groups.append({})
                left = shard_nbytes
            groups[-1][name] = tensor
            left -= tensor.nbytes
        base = file.removesuffix(".safetensors")
        names = [f"{base}-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        names = names if len(groups) > 1 else [file]
        self.names += names
        for name, group in zip(names, groups, strict=True):
            self._lay_out(name, group)

    def _lay_out(self, file: str, group: Mapping[str, Tensor]) -> None:
        # Wide elements first, so that all are aligned without gaps, which the format forbids.
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in sorted(group.items(), key=lambda item: -item[1].dtype.itemsize):
            if tensor.dtype not in NAMES:
                raise ConfigError(
                    f"{name}: expected a dtype that safetensors supports, got {tensor.dtype}. Change dtype=."
                )
            places = [offset, offset + tensor.nbytes]
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
            offset += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (round_up(len(text), _ALIGN) - len(text))
        head = struct.pack("<Q", len(text)) + text
        self.heads[file] = head, len(head) + offset
        folder = file.rpartition("/")[0]
        for name, tensor in group.items():
            self.places[f"{folder}/{name}" if folder else name] = Place(
                file, len(head) + header[name]["data_offsets"][0], tensor.dtype
            )

    def make(self, folder: Path) -> None:
        """Create all files in ``folder`` in full length, with headers but no values. Add an index for several files."""
        for name, (head, size) in self.heads.items():
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("wb") as file:
                file.write(head)
                file.truncate(size)
        self.make_index(folder)

    def make_index(self, folder: remote.Place) -> None:
        if len(self.names) > 1:
            index = {
                "metadata": {"total_size": self._nbytes},
                "weight_map": {name: place.file for name, place in sorted(self.places.items())},
            }
            (folder / INDEX).write_bytes((json.dumps(index, indent=2) + "\n").encode())

    def in_order(self, groups: Iterable[Group]) -> list[Group]:
        """Return ``groups`` in the order of their tensors in the files."""
        return sorted(groups, key=lambda group: min((self.places[name][:2] for name in group.results), default=("", 0)))


class Writer:
    """A context manager that writes ranges of tensors into existing files in ``folder``. Each process makes one."""

    def __init__(self, files: Files, folder: Path) -> None:
        self._files, self._folder = files, folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def close(self) -> None:
        for fd in self._open.values():
            os.fsync(fd)
        self.__exit__()

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write ``values`` [n], cast to the file's dtype, to elements ``[start, start + n)`` of ``name``, flattened."""
        place = self._files.places[name]
        write, dtype = self._opened(place.file), place.dtype
        for low in range(0, values.numel(), CHUNK):
            part = values[low : low + CHUNK].detach().to(device="cpu", dtype=dtype).contiguous()
            write(byte_view(part), place.start + (start + low) * dtype.itemsize)

    def write_all(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.write(name, 0, value.reshape(-1))

    def _opened(self, file: str) -> WriteAt:
        if file not in self._open:
            self._open[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CLOEXEC)
        return partial(write_at, self._open[file])


class _Uploads(Writer):
    """Writes files into a folder of an object store, each from first to last byte; they appear when ``stack`` exits."""

    def __init__(self, files: Files, folder: remote.RemotePath, stack: contextlib.ExitStack) -> None:
        super().__init__(files, Path())
        self._target, self._stack = folder, stack
        self._uploads: dict[str, remote.Upload] = {}

    def _opened(self, file: str) -> WriteAt:
        head, nbytes = self._files.heads[file]
        if (upload := self._uploads.get(file)) is None:
            upload = self._uploads[file] = self._stack.enter_context((self._target / file).uploading(nbytes))
            upload.write(head)

        def write(data: memoryview, offset: int) -> None:
            upload.write_at(data, offset)
            if upload.tell() == nbytes:
                upload.close()  # it needs memory no longer

        return write

    def finish(self) -> None:
        """Write the headers of files that have no values. Raise RuntimeError if values of a file are missing."""
        for file, (_, nbytes) in self._files.heads.items():
            self._opened(file)
            if (found := self._uploads[file].tell()) != nbytes:
                raise RuntimeError(f"{file}: only {found:,} of {nbytes:,} bytes were written")


@contextlib.contextmanager
def written(files: Files, target: remote.Place) -> Iterator[tuple[Path, Writer]]:
    """Yield a local folder for small files, and a writer of ``files``. When the body ends, all these files are in the
    new folder ``target``; if the body fails, none is. An object store gets small files first, and the index last."""
    if not isinstance(target, remote.RemotePath):
        with written_aside(target, folder=True) as part, Writer(files, part.path) as writer:
            files.make(part.path)
            yield part.path, writer
        return
    with naming(target, folder=True), tempfile.TemporaryDirectory() as made:
        small = Path(made)
        with contextlib.ExitStack() as stack:
            uploads = _Uploads(files, target, stack)
            yield small, uploads
            uploads.finish()
            for path in small.rglob("*"):
                if path.is_file():
                    (target / str(path.relative_to(small))).write_bytes(path.read_bytes())
        files.make_index(target)
