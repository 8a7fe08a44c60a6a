"""Export a sharded model: each rank writes its ranges; only tensors that need conversion are gathered."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_zero.checkpoint.durable import Part, naming, written_aside
from lightning_zero.checkpoint.hugging_face.extras import write_extras
from lightning_zero.checkpoint.hugging_face.files import Files, Writer
from lightning_zero.checkpoint.hugging_face.names import ADAPTERS, Group, Outgoing, outgoing
from lightning_zero.checkpoint.sharded.items import unflattened
from lightning_zero.comm.agreements import broadcast_object, together
from lightning_zero.config import ConfigError
from lightning_zero.engine import Engine
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.home import Home, opened
from lightning_zero.engine.whole.state_dicts import sharded_state_dict
from lightning_zero.engine.whole.values import TensorParts
from lightning_zero.planning.boxes import boxes
from lightning_zero.pretrained.folder import SINGLE

T = TypeVar("T")


class _Piece(NamedTuple):
    name: str
    start: int
    home: Home | None
    values: Callable[[], Tensor]


@outside_autograd
def export(engine: Engine, path: str | os.PathLike[str], dtype: torch.dtype | None, shard_nbytes: int) -> None:
    """Write the model of ``engine`` to the folder ``path`` for ``from_pretrained``. Collective.

    ``dtype``: of floating-point tensors; ``None``: as before sharding. ``shard_nbytes``: upper limit of a file. Raises
    ConfigError if ``path`` is not empty or some ranks do not see it. If it cannot be written, all ranks raise, with
    folder and cause."""
    with naming(Path(path), folder=True):
        _Export(engine, Path(path), dtype, shard_nbytes).run()


class _Export:
    def __init__(self, engine: Engine, path: Path, dtype: torch.dtype | None, shard_nbytes: int) -> None:
        self._engine, self._path, self._dtype = engine, path, dtype
        self._shard_nbytes = shard_nbytes
        self._gathered: tuple[Any, Tensor] | None = None

    def run(self) -> None:
        state = sharded_state_dict(self._engine)
        like = {key: self._like(key, value) for key, value in state.items() if isinstance(value, Tensor)}
        plan = self._together("its names", lambda: outgoing(self._engine.module, _same(state, like)))
        with contextlib.ExitStack() as stack:  # the writer exits before the folder gets its name
            files, part = self._together("a folder", lambda: self._begin(stack, plan, like))
            folder = Path(self._broadcast(str(part.path) if part is not None else ""))
            writer = self._together("its files", lambda: self._open(stack, files, folder))
            self._together("tensors", lambda: self._write_own(writer, plan, state))
            for number, group in enumerate(self._shown(plan.groups, "groups of tensors")):
                values = {key: self._gather(key) for key in group.members}
                convert = partial(self._convert, writer, group, values, number)
                self._together("tensors that are kept otherwise", convert)
            # Before the folder gets its name, the files of all ranks must be on the disk.
            close = partial(self._engine.long_work.call, writer.close, f"{self._path.name}, to the disk")
            self._together("its files on the disk", close)
            self._together("its end", lambda: self._end(stack, plan, folder))

    def _like(self, key: str, value: Tensor) -> Tensor:
        """Return a meta tensor with the shape and dtype that the files will have."""
        info = self._infos.get(key)
        own = info.dtype if info is not None else value.dtype
        wanted = self._dtype if self._dtype is not None and own.is_floating_point else own
        return torch.empty(value.shape, dtype=wanted, device="meta")

    @property
    def _infos(self) -> dict[str, Any]:
        return {fqn: info for bucket in self._engine.buckets for info in bucket.params for fqn in info.fqns}

    def _shown(self, items: Sequence[T], what: str) -> Iterator[T]:
        return self._engine.long_work.items(items, f"exporting to {self._path.name}, in {what}")

    # -- steps on all ranks ---------------------------------------------------------------------------------------

    def _begin(self, stack: Any, plan: Outgoing, like: Mapping[str, Tensor]) -> tuple[Files, Part | None]:
        files = Files(plan.tensors(like), self._shard_nbytes, ADAPTERS if plan.adapters else SINGLE)
        if self._path.exists() and (not self._path.is_dir() or any(self._path.iterdir())):
            raise ConfigError(f"export: expected a new or empty folder, got {self._path}. Give another one.")
        part = None
        if self._engine.rank == 0:
            part = stack.enter_context(written_aside(self._path, folder=True))
            files.make(part.path)
        return files, part

    def _open(self, stack: Any, files: Files, folder: Path) -> Writer:
        if not folder.is_dir():
            raise ConfigError(
                f"export: expected a folder that all ranks see, got {folder.parent}, where rank {self._engine.rank} "
                "does not see what rank 0 has made. Export to a file system that all nodes share."
            )
        return stack.enter_context(Writer(files, folder))

    def _write_own(self, writer: Writer, plan: Outgoing, state: Mapping[str, Any]) -> None:
        with contextlib.ExitStack() as stack:
            home: Home | None = None
            for piece in self._shown(self._pieces(plan, state), "pieces"):
                if piece.home is not home:
                    stack.close()
                    home = piece.home
                    if home is not None:
                        stack.enter_context(opened(home))
                writer.write(piece.name, piece.start, piece.values())

    def _pieces(self, plan: Outgoing, state: Mapping[str, Any]) -> list[_Piece]:
        found: list[_Piece] = []
        for name, key in plan.renamed.items():
            value = state[key]
            if not isinstance(value, TensorParts):
                if self._engine.rank == 0:
                    found.append(_Piece(name, 0, None, lambda v=value: v.reshape(-1)))  # type: ignore[misc]
                continue
            for part in value.parts:
                if list(value.order) == sorted(value.order):
                    found.append(_Piece(name, part.start, part.home, lambda part=part: part.source.tensor))  # type: ignore[misc]
                else:
                    found += _turned(name, value, part)
        places: dict[int, int] = {}
        for piece in found:
            places.setdefault(id(piece.home), len(places))
        return sorted(found, key=lambda piece: places[id(piece.home)])

    def _gather(self, key: str) -> Tensor:
        """Gather a whole parameter on the host. Collective."""
        place = self._engine.place_of(self._infos[key].param)
        if self._gathered is None or self._gathered[0] is not place.bucket:
            self._gathered = None  # first, so that two are never held
            self._gathered = place.bucket, place.bucket.full_master()
        return place.bucket.part_of(self._gathered[1], place.info)

    def _convert(self, writer: Writer, group: Group, values: dict[str, Tensor], number: int) -> None:
        if number % self._engine.world_size == self._engine.rank:
            for name, value in group.convert({key: v.cpu() for key, v in values.items()}).items():
                writer.write_whole(name, value)

    def _end(self, stack: contextlib.ExitStack, plan: Outgoing, folder: Path) -> None:
        self._gathered = None
        if self._engine.rank == 0:
            dtype = self._dtype or next((i.dtype for i in self._infos.values() if i.dtype.is_floating_point), None)
            write_extras(plan.model, folder, dtype, self._engine.config.init_from, adapters=plan.adapters)
        stack.close()

    def _together(self, what: str, act: Callable[[], Any]) -> Any:
        engine = self._engine
        return together(engine._group, engine.comm.waits, f"exporting a model: {what}", act, patient=True)

    def _broadcast(self, value: str) -> str:
        return broadcast_object(self._engine._group, value, 0, self._engine.comm.waits)


def _turned(name: str, value: TensorParts, part: Any) -> list[_Piece]:
    """Return the pieces of a parameter that is not row-major in memory: rows of its boxes."""
    strides = torch.empty(value.shape, device="meta").stride()
    found: list[_Piece] = []
    for box in boxes(value.shape, part.start, part.start + part.source.numel, value.order):
        low = box.start - part.start

        def rows(low: int = low, box: Any = box) -> Tensor:
            flat = part.source.tensor[low : low + box.numel]
            return unflattened(flat, box.sizes, tuple(value.order)).reshape(-1, box.sizes[-1])

        base = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        sizes = box.sizes[:-1]
        for number in range(box.numel // box.sizes[-1]):
            place, rest = base, number
            for size, stride in zip(reversed(sizes), reversed(strides[:-1]), strict=True):
                place, rest = place + rest % size * stride, rest // size
            found.append(_Piece(name, place, part.home, lambda n=number, r=rows: r()[n]))  # type: ignore[misc]
    return found


def _same(state: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``like`` with one object for each object of ``state``, so that tied parameters stay tied."""
    first: dict[int, Tensor] = {}
    return {key: first.setdefault(id(state[key]), value) for key, value in like.items()}
