"""Convert a checkpoint of this package, or of Lightning's strategies, with one tensor in memory at a time.

usage: python -m lightning_zero.checkpoint convert IN OUT to=... [dtype=...] [shard_size=...] [prefix=...]
  to=full          one file, as Lightning saves it under DDP
  to=sharded       a folder in the format of torch.distributed.checkpoint
  to=safetensors   a folder that Hugging Face's from_pretrained loads
  dtype=bf16       of floating-point weights (fp32, bf16, fp16, fp64); default: unchanged
  shard_size=5GB   most bytes of a safetensors file
  prefix=model.    removed from names in safetensors files; default: the prefix of the transformers model, if any
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.checkpoint.archive import Skeleton, add_up, archive_at, write_values
from lightning_zero.checkpoint.hugging_face.export import write_extras
from lightning_zero.checkpoint.hugging_face.files import RECORD, Files, alone, model_of, outgoing, parse_dtype, written
from lightning_zero.checkpoint.sharded.save import save_folder
from lightning_zero.engine.whole.state_dicts import versioned
from lightning_zero.pretrained import some
from lightning_zero.pretrained.stored import StoredTensor
from lightning_zero.ranks.progress import LongWork
from lightning_zero.settings import ConfigError, parse_bytes
from lightning_zero.tiers.remote import Place, is_folder, place
from lightning_zero.trainer.saves.checkpoint_io import ZeroCheckpointIO, load
from lightning_zero.trainer.saves.sharded_checkpoints import MODULE, OPTIMIZERS, divide, read


def main(arguments: list[str]) -> int:
    """Run ``python -m lightning_zero.checkpoint convert`` with ``arguments`` and return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    paths = [a for a in arguments if "=" not in a or os.sep in a.partition("=")[0]]
    options = dict(a.split("=", 1) for a in arguments if a not in paths)
    try:
        if len(paths) != 2 or not set(options) <= {"to", "dtype", "shard_size", "prefix"}:
            raise ConfigError(f"convert: expected IN OUT to=..., got {' '.join(arguments)}. Run convert --help.")
        convert(*paths, **options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # ImportError: s3fs, ... is missing
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    path = place(paths[1])
    path = path.resolve() if isinstance(path, Path) else path
    files: list[Any] = [path] if path.is_file() else list(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    print(f"Wrote {path}: {options['to']}, {sum(sizes):,} bytes in {len(sizes)} file(s).")
    return 0


def convert(
    source: str, target: str, to: str = "", dtype: str | None = None, shard_size: str = "", prefix: str | None = None
) -> None:
    """Write the checkpoint ``source`` to the new path ``target``. The module's docstring explains the other arguments.

    Raises ConfigError for a setting that cannot work and for a ``source`` that is incomplete or would run code. Raises
    OSError or RuntimeError, which name the file and the cause, if reading or writing fails.
    """
    if to not in ("full", "sharded", "safetensors"):
        raise ConfigError(f"convert: expected to=full|sharded|safetensors, got {to!r}. Change to=.")
    if to != "safetensors" and (shard_size or prefix is not None):
        raise ConfigError(f"convert: shard_size= and prefix= have no effect with to={to}. Drop them.")
    wanted, nbytes = parse_dtype("dtype", dtype), parse_bytes("shard_size", shard_size or "5GB")
    out = place(target)
    if os.path.lexists(target) or out.is_file() or out.is_dir():
        raise ConfigError(
            f"convert: expected an OUT that does not exist, got {target}, which exists. Change OUT, or remove {target}."
        )
    folder = is_folder(source)
    if not folder and not place(source).is_file():
        raise ConfigError(f"convert: expected a checkpoint, got {source}, which does not exist. Change IN.")
    checkpoint = read(source, None) if folder else load(ZeroCheckpointIO(), source, None)
    if MODULE not in checkpoint:
        raise ConfigError(f"convert: expected a checkpoint of Lightning, got {source}, which has no state_dict.")
    if to != "safetensors" and not all(map(_is_of_torch, checkpoint.get(OPTIMIZERS, ()))):
        raise ConfigError(
            f"convert: expected optimizers with torch's state_dict(), got one with its own in {source}. Resume from "
            f"{source} itself, or set to=safetensors."
        )
    if wanted is not None and any(".quant_state.bitsandbytes__" in key for key in checkpoint[MODULE]):
        raise ConfigError(
            f"convert: expected no dtype= for {source}, which has 4-bit weights, stored as bytes. Drop dtype=."
        )
    for top in {MODULE, "current_model_state", OPTIMIZERS} & set(checkpoint):  # the second: Lightning's averages
        checkpoint[top] = _stored(checkpoint[top], wanted if top != OPTIMIZERS else None)
    if to == "safetensors":
        _to_safetensors(checkpoint, out, nbytes, prefix)
    elif to == "sharded":
        save_folder(*divide(checkpoint), target, long_work=LongWork(shows=True))
    else:
        _to_full(checkpoint, out)


def _is_of_torch(state: Any) -> bool:
    if not isinstance(state, dict) or not state.keys() <= {"state", "param_groups"}:
        return False
    # See [Note: state of optimizers inside].
    return not any(str(name).endswith(".state") for entry in state.get("state", {}).values() for name in entry)


def _stored(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return ``tree`` with a StoredTensor, read and cast when written, for each tensor. Tied tensors stay tied."""
    made: dict[Any, StoredTensor] = {}

    def stored(value: Tensor) -> StoredTensor:
        in_memory = not isinstance(value, StoredTensor) and value.numel()
        place = (value.data_ptr(), value.dtype, value.shape, value.stride()) if in_memory else id(value)
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        read = lambda low, high, _: value.reshape(-1)[low:high].to(wanted)  # noqa: E731
        return made.setdefault(place, StoredTensor(value.shape, wanted, read))

    return _mapped(Tensor, stored, tree)


def _mapped(kind: type[Any], act: Callable[[Any], Any], tree: Any) -> Any:
    made = tree_map_only(kind, act, tree)
    return versioned(made, tree) if hasattr(tree, "_metadata") else made


def _by_number(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with parameters' keys replaced by their indices, as torch's optimizers save them."""
    state = {"state": {}, "param_groups": [], **state}
    numbers = {key: n for n, key in enumerate(key for group in state["param_groups"] for key in group["params"])}
    groups = [{**group, "params": [numbers[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbers[key]: entry for key, entry in state["state"].items()}, "param_groups": groups}


def _to_full(checkpoint: dict[str, Any], target: Place) -> None:
    if OPTIMIZERS in checkpoint:
        checkpoint[OPTIMIZERS] = [_by_number(state) for state in checkpoint[OPTIMIZERS]]
    with FakeTensorMode():
        fakes = {v: torch.empty(v.shape, dtype=v.dtype) for v in tree_leaves(checkpoint) if isinstance(v, StoredTensor)}
    with archive_at(target, sum(fake.nbytes for fake in fakes.values())) as (fd, write):
        content = {key: _mapped(StoredTensor, fakes.__getitem__, value) for key, value in checkpoint.items()}
        skeleton = Skeleton(content, fd)
        done = skeleton.fill()
        holes = [(skeleton.holes[fake.untyped_storage()._cdata], value) for value, fake in fakes.items()]
        holes.sort(key=lambda item: item[0].start)
        for hole, value in LongWork(shows=True).items(holes, f"writing {target.name}, in tensors"):
            own = write_values(write, hole, 0, value.whole().reshape(-1))
            skeleton.describe(hole.name, add_up(hole.name, hole.nbytes, own))
            done += own
        skeleton.finish(done)


def _to_safetensors(checkpoint: dict[str, Any], target: Place, shard_nbytes: int, prefix: str | None) -> None:
    state = {key: value for key, value in checkpoint[MODULE].items() if isinstance(value, StoredTensor)}
    record = (checkpoint.get(RECORD) if prefix is None else None) or {}
    model = model_of(record) if record else None
    prefix = prefix if prefix is not None else record["prefix"] if model is not None else ""
    own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    if not own:
        raise ConfigError(
            f"convert: expected names that begin with prefix={prefix!r}, got names such as {next(iter(state), '')!r}. "
            "Change prefix=."
        )
    if lost := [key for key in state if not key.startswith(prefix)]:
        print(f"left out, as their names do not begin with prefix={prefix!r}: {some(lost)}", file=sys.stderr)
    metas = {value: torch.empty(value.shape, dtype=value.dtype, device="meta") for value in own.values()}
    like = {name: metas[value] for name, value in own.items()}
    plan = outgoing(model if model is not None else torch.nn.Module(), like)
    files = Files(plan.files(like), shard_nbytes)
    groups = files.in_order([*plan.groups, *alone(plan.renamed, like)])
    with written(files, target) as (folder, writer):
        for group in LongWork(shows=True).items(groups, f"writing {target.name}, in tensors"):
            writer.write_all(group.convert({key: own[key].whole() for key in group.members}))
        dtype = next((value.dtype for value in like.values() if value.is_floating_point()), None)
        write_extras(model, folder, dtype, record.get("source"))
