"""``python -m lightning_zero.checkpoint convert IN OUT to=...``: one process, which holds one tensor at a time.

::

    IN            a file or folder of ours, or of Lightning's strategies
    full          one file, as under DDP
    sharded       a folder in the format of torch.distributed.checkpoint
    safetensors   a folder of Hugging Face
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import Skeleton, write_values
from lightning_zero.checkpoint.crc import Piece
from lightning_zero.checkpoint.durable import write_at, written_aside
from lightning_zero.checkpoint.hugging_face.extras import write_extras
from lightning_zero.checkpoint.hugging_face.files import CHUNK, Files, Wanted, Writer, parse_dtype
from lightning_zero.checkpoint.hugging_face.names import Outgoing, outgoing
from lightning_zero.checkpoint.hugging_face.record import RECORD, model_of
from lightning_zero.checkpoint.sharded.save import ShardedSaver
from lightning_zero.config import ConfigError, parse_bytes
from lightning_zero.engine.whole.sharded_state import Part, TensorParts
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO, load
from lightning_zero.trainer.saves.sharded_checkpoints import MODULE, OPTIMIZERS, divide, read

USAGE = """usage: python -m lightning_zero.checkpoint convert IN OUT to=... [dtype=...] [shard_size=...] [prefix=...]

  to=full          one file, as Lightning saves it under DDP
  to=sharded       a folder in the format of torch.distributed.checkpoint
  to=safetensors   a folder that Hugging Face's from_pretrained loads
  dtype=bf16       of weights in floating point (fp32, bf16, fp16, fp64); default: as they are
  shard_size=5GB   of a safetensors file, at most
  prefix=model.    of names, which safetensors files lose; default: that of the model of transformers, if there was one
"""
FORMS = ("full", "sharded", "safetensors")
WEIGHTS = (MODULE, "current_model_state")
MADV_PAGEOUT = 21  # of Linux
SMALL = 1 << 18  # elements: a tensor of fewer is taken as it is

Advance = Callable[[int], None]


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    try:
        source, target, options = _parsed(arguments)
        convert(source, target, **options)
    except (ConfigError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _parsed(arguments: list[str]) -> tuple[str, str, dict[str, Any]]:
    paths = [a for a in arguments if not a.partition("=")[1] or os.sep in a.partition("=")[0]]
    options = dict(a.split("=", 1) for a in arguments if a not in paths)
    if len(paths) != 2:
        raise ConfigError(f"convert: expected IN and OUT, got {' '.join(paths) or 'nothing'}. See convert --help.")
    for key in options:
        if key not in ("to", "dtype", "shard_size", "prefix"):
            raise ConfigError(f"convert: there is no {key}=; there are to, dtype, shard_size and prefix.")
    if options.get("to") not in FORMS:
        raise ConfigError(f"convert: expected to={'|'.join(FORMS)}, got {options.get('to')!r}. Give to=.")
    if options["to"] != "safetensors" and (ignored := {"shard_size", "prefix"} & set(options)):
        raise ConfigError(f"convert: {min(ignored)}= has no effect with to={options['to']}. Drop it.")
    return paths[0], paths[1], options


def convert(
    source: str, target: str, to: str, dtype: str | None = None, shard_size: str = "5GB", prefix: str | None = None
) -> None:
    """Write the checkpoint ``source`` in another form to ``target``, at which there is nothing yet.

    Raises:
        ConfigError: a setting that cannot work; ``source`` is no whole checkpoint, or would run code.
        OSError: the system's, or a RuntimeError of another cause: with file and cause.
    """
    wanted, nbytes = parse_dtype("dtype", dtype), parse_bytes("shard_size", shard_size)
    if os.path.lexists(target):
        raise ConfigError(f"convert: expected nothing at {target}, got something. Give another OUT, or remove it.")
    if not os.path.exists(source):
        raise ConfigError(f"convert: expected a checkpoint, got {source}: there is nothing. Change IN.")
    folder = os.path.isdir(source)
    checkpoint = read(source, None) if folder else load(ZeroCheckpointIO(), source, None)
    if MODULE not in checkpoint:
        raise ConfigError(f"convert: expected a checkpoint of Lightning, got {source}, which has no state_dict.")
    with _progress(checkpoint, to) as advance:
        if to == "safetensors":
            _to_safetensors(checkpoint, Path(target), wanted, nbytes, prefix, advance)
        elif to == "sharded":
            _to_sharded(checkpoint, Path(target), wanted, advance)
        else:
            _to_full(checkpoint, Path(target), wanted, advance)


class _progress:
    """A bar of bytes of tensors."""

    def __init__(self, checkpoint: Mapping[str, Any], to: str) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, disable=not sys.stderr.isatty())
        tops = [checkpoint[MODULE]] if to == "safetensors" else list(checkpoint.values())
        self._task = self._bar.add_task(f"to {to}", total=sum(value.nbytes for value in _large(tops)))

    def __enter__(self) -> Advance:
        self._bar.start()
        return lambda nbytes: self._bar.advance(self._task, nbytes)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _large(value: Any) -> list[Tensor]:
    """Tensors that are to be handled one at a time, each once."""
    found: dict[int, Tensor] = {}

    def look(entry: Any) -> None:
        if isinstance(entry, StoredTensor) or (isinstance(entry, Tensor) and entry.numel() >= SMALL):
            found.setdefault(id(entry), entry)
        elif isinstance(entry, Mapping):
            for inner in entry.values():
                look(inner)
        elif isinstance(entry, (list, tuple)):
            for inner in entry:
                look(inner)

    look(value)
    return list(found.values())


def _replaced(value: Any, by: Mapping[int, Any]) -> Any:
    if id(value) in by:
        return by[id(value)]
    if isinstance(value, Mapping):
        return {key: _replaced(entry, by) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(entry, by) for entry in value)
    return value


def _once(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state``, with one object for tensors that share their memory: tied parameters."""
    seen: dict[Any, Any] = {}

    def one(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, StoredTensor) and value.numel():
            return seen.setdefault((value.data_ptr(), value.shape, value.stride()), value)
        return value

    return {key: one(value) for key, value in state.items()}


def _pieces(value: Tensor) -> Any:
    """Start and values of adjacent elements, row-major, a few at a time."""
    whole = None if isinstance(value, StoredTensor) or value.is_contiguous() else value.contiguous().view(-1)
    for low in range(0, value.numel(), CHUNK):
        high = min(low + CHUNK, value.numel())
        if isinstance(value, StoredTensor):
            yield low, value.read(low, high)
        else:
            yield low, (whole if whole is not None else value.view(-1))[low:high]
    let_go(value)


def let_go(value: Tensor) -> None:
    """Give the pages of a mapped file back, which would count as memory of this process until its end."""
    if isinstance(value, StoredTensor) or not value.numel():
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which would keep what was read
        if trim is not None:
            trim(0)
        return
    low = -(-value.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    high = (value.data_ptr() + value.untyped_storage().nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if high > low:  # advice only: nothing is lost, whatever memory it is, and an older kernel does nothing
        ctypes.CDLL(None).madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), MADV_PAGEOUT)


def _cast(state: Mapping[str, Any], dtype: torch.dtype | None) -> dict[int, torch.dtype]:
    """By ``id`` of the tensor, the dtype that it is to have, where that is another one."""
    if dtype is None:
        return {}
    weights = [value for top in WEIGHTS for value in state.get(top, {}).values() if isinstance(value, Tensor)]
    return {id(value): dtype for value in weights if value.is_floating_point()}


# -- full --------------------------------------------------------------------------------------------------------------


def _to_full(checkpoint: dict[str, Any], target: Path, dtype: torch.dtype | None, advance: Advance) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for top in WEIGHTS:
        if top in checkpoint:
            checkpoint[top] = _once(checkpoint[top])
    if OPTIMIZERS in checkpoint:
        checkpoint[OPTIMIZERS] = [_by_number(state) for state in checkpoint[OPTIMIZERS]]
    cast = _cast(checkpoint, dtype)
    large = _large(checkpoint)
    with FakeTensorMode():
        fakes = {id(v): torch.empty(v.shape, dtype=cast.get(id(v), v.dtype), device="cpu") for v in large}
    small = {key: value.to(dtype) for key, value in _small_casts(checkpoint, cast, fakes).items()}
    content = _replaced(checkpoint, {**fakes, **small})
    with written_aside(target) as part:
        skeleton = Skeleton(content, part.fd)
        done: list[Piece] = skeleton.fill()
        for value in large:
            fake = fakes[id(value)]
            hole = skeleton.holes[fake.untyped_storage()._cdata]
            for start, values in _pieces(value):
                done += write_values(partial(write_at, part.fd), hole, start * fake.dtype.itemsize, values, fake.dtype)
            advance(value.nbytes)
        skeleton.finish(done)


def _small_casts(checkpoint: Mapping[str, Any], cast: Mapping[int, torch.dtype], fakes: Any) -> dict[int, Tensor]:
    tensors = (value for top in WEIGHTS for value in checkpoint.get(top, {}).values())
    return {id(value): value for value in tensors if id(value) in cast and id(value) not in fakes}


def _by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by numbers of parameters, as torch's optimizers have it."""
    numbers: dict[Any, int] = {}
    groups = []
    for group in state.get("param_groups", []):
        own = []
        for key in group["params"]:
            numbers[key] = len(numbers)
            own.append(numbers[key])
        groups.append({**group, "params": own})
    return {"state": {numbers[key]: entry for key, entry in state.get("state", {}).items()}, "param_groups": groups}


# -- sharded -----------------------------------------------------------------------------------------------------------


def _to_sharded(checkpoint: dict[str, Any], target: Path, dtype: torch.dtype | None, advance: Advance) -> None:
    for top in WEIGHTS:
        if top in checkpoint:
            checkpoint[top] = _once(checkpoint[top])
    cast = _cast(checkpoint, dtype)
    values = {id(value): value for value in _large(checkpoint)}
    values |= _small_casts(checkpoint, cast, values)

    def parts(value: Tensor) -> TensorParts:
        wanted = cast.get(id(value), value.dtype)

        def whole() -> Tensor:
            flat = torch.empty(value.numel(), dtype=wanted)
            for start, piece in _pieces(value):
                flat[start : start + len(piece)].copy_(piece)
            advance(value.nbytes)
            return flat

        return TensorParts(value.shape, wanted, [Part(0, value.numel(), whole, None)], range(value.dim()))

    state, extra = divide(_replaced(checkpoint, {key: parts(value) for key, value in values.items()}))
    ShardedSaver(0).save(state, extra, target, None, None)


# -- safetensors -------------------------------------------------------------------------------------------------------


def _to_safetensors(
    checkpoint: dict[str, Any],
    target: Path,
    dtype: torch.dtype | None,
    shard_nbytes: int,
    prefix: str | None,
    advance: Advance,
) -> None:
    state = {key: value for key, value in _once(checkpoint[MODULE]).items() if isinstance(value, Tensor)}
    cast = _cast({MODULE: state}, dtype)
    record = checkpoint.get(RECORD) if prefix is None else None
    model = model_of(record) if record is not None else None
    source = record["source"] if record is not None else None
    if prefix is None:
        prefix = record["prefix"] if record is not None and model is not None else ""
    own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    if not own:
        some = next(iter(state), "none")
        raise ConfigError(f"convert: expected names that begin with prefix={prefix!r}, got {some}. Change prefix=.")
    first: dict[int, Tensor] = {}
    like = {
        name: first.setdefault(
            id(value), torch.empty(value.shape, dtype=cast.get(id(value), value.dtype), device="meta")
        )
        for name, value in own.items()
    }
    plan = outgoing(model if model is not None else torch.nn.Module(), like)
    wanted = [Wanted(name, tuple(like[key].shape), like[key].dtype) for name, key in plan.renamed.items()]
    wanted += [Wanted(n, tuple(v.shape), v.dtype) for group in plan.groups for n, v in group.results.items()]
    files = Files(sorted(wanted), shard_nbytes)
    with written_aside(target, folder=True) as part:
        files.make(part.path)
        with Writer(files, part.path) as writer:
            _write_all(writer, plan, own, advance)
            writer.close()
        found = next((value.dtype for value in like.values() if value.is_floating_point()), None)
        write_extras(model, part.path, found, source, adapters=False)


def _like(value: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(value.shape, dtype=dtype, device="meta")


def _write_all(writer: Writer, plan: Outgoing, own: Mapping[str, Tensor], advance: Advance) -> None:
    for name, key in plan.renamed.items():
        for start, values in _pieces(own[key]):
            writer.write(name, start, values)
        advance(own[key].nbytes)
    for group in plan.groups:
        whole = {k: v.whole() if isinstance(v := own[k], StoredTensor) else v for k in group.members}
        for name, value in group.convert(whole).items():
            writer.write_whole(name, value)
        for key in group.members:
            let_go(own[key])
            advance(own[key].nbytes)
