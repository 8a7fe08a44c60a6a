"""Folders of Hugging Face, in and out: a Llama at stage 3, beside transformers alone and FSDP2 with DCP.

In: from a model on meta to one that can be trained. Its extra memory is the peak beyond what the model holds then. Out:
a folder that ``from_pretrained`` loads, on the disk (what a side does not make durable itself is fsynced for it, within
its seconds). Tensors are compared with those of the files, both times.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.checkpoint.measure import plain_write, rest, size_of
from benchmarks.checkpoint.ranks import Turn, Window, take_turn, trim
from benchmarks.checkpoint.tables import MARGIN_NBYTES, MIB, median

SIZE = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12,
}  # fmt: skip  # 97.5 M parameters
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
COLUMNS = {
    "ranks": "ranks",
    "side": "side",
    "in_s": "in s",
    "in_vs_dcp": "x DCP in",
    "in_mib": "in, MiB",
    "out_s": "out s",
    "out_vs_dcp": "x DCP out",
    "of_disk": "of disk",
    "out_mib": "out, MiB",
    "bound_mib": "tensor + 64 MiB",
}
PEER = "FSDP2, HuggingFaceStorage"


class _Way(ABC):
    """A model, in and out."""

    def __init__(self, source: str, sizes: Mapping[str, int]) -> None:
        self._source, self._sizes = source, sizes

    @abstractmethod
    def read(self) -> None:
        """On all ranks."""

    @abstractmethod
    def write(self, path: str) -> None:
        """On all ranks; files are on the disk when it returns."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Whole values, on rank 0."""


class _Ours(_Way):
    def read(self) -> None:
        import lightning_zero

        self._model = _make(self._sizes, "meta")
        self._engine = lightning_zero.shard(self._model, stage=3, device="cpu", init_from=self._source)

    def write(self, path: str) -> None:
        from lightning_zero.checkpoint.hugging_face.export import export

        export(self._engine, path, None, 5 * 10**9)

    def state(self) -> dict[str, Tensor]:
        return self._engine.state_dict()


class _Transformers(_Way):
    def read(self) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(self._source)

    def write(self, path: str) -> None:
        if dist.get_rank() == 0:
            self._model.save_pretrained(path)
            sync(path)
        dist.barrier()

    def state(self) -> dict[str, Tensor]:
        return dict(self._model.state_dict())


class _Fsdp2(_Way):
    def read(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import HuggingFaceStorageReader
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._model = _make(self._sizes, "meta")
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._model.to_empty(device="cpu")
        dcp.load(self._model.state_dict(), storage_reader=HuggingFaceStorageReader(self._source))

    def write(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        state = self._model.state_dict()
        writer = HuggingFaceStorageWriter(
            path, fqn_to_index_mapping=dict.fromkeys(state, 1), save_distributed=True, enable_consolidation=True
        )
        dcp.save(state, storage_writer=writer)
        if dist.get_rank() == 0:
            sync(path)
        dist.barrier()

    def state(self) -> dict[str, Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(self._model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


WAYS: dict[str, Callable[..., _Way]] = {"init_from, export": _Ours, PEER: _Fsdp2, "transformers": _Transformers}


def _make(sizes: Mapping[str, int], device: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, tie_word_embeddings=False))


@dataclass
class _Found:
    side: str
    in_s: float = 0.0
    out_s: float = 0.0
    plain_s: float = 0.0
    nbytes: int = 0
    largest_nbytes: int = 0
    held: float = 0.0  # the moment at which the model was there, and nothing else
    error: str = ""
    windows: dict[str, Window] = field(default_factory=dict)


def _make_source(rank: int, world: int, path: str, sizes: Mapping[str, int]) -> None:
    torch.manual_seed(0)
    _make(sizes, "cpu").save_pretrained(path)


def _turn(rank: int, world: int, side: str, source: str, folder: str, sizes: Mapping[str, int]) -> _Found:
    _quiet()
    found, target = _Found(side), str(Path(folder, "out"))
    way = WAYS[side](source, sizes)
    # What is imported at the first use is no memory of the tensors, and its seconds are not theirs.
    warm = WAYS[side](str(Path(source, "tiny")), TINY)
    warm.read()
    warm.write(str(Path(folder, "warm")))
    del warm
    rest()
    started = time.perf_counter()
    way.read()
    found.in_s = time.perf_counter() - started
    found.windows["in"] = Window("in", started, started + found.in_s)
    trim()
    found.held = time.perf_counter()
    if state := way.state():
        found.largest_nbytes = max(value.nbytes for value in state.values())
        found.error = _differs("what was read", state, _values(source)) if rank == 0 else ""
    del state
    found.plain_s = plain_write(folder, size_of(str(Path(source, "model.safetensors"))), rank, world)
    rest()
    started = time.perf_counter()
    way.write(target)
    found.out_s = time.perf_counter() - started
    found.windows["out"] = Window("out", started, started + found.out_s)
    if rank == 0:
        found.nbytes = sum(p.stat().st_size for p in Path(target).glob("*.safetensors"))
        found.error = found.error or _differs("what was written", _values(target), _values(source))
    return found


def _quiet() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def sync(path: str) -> None:
    """Have all files of a folder on the disk."""
    for file in Path(path).rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def _values(path: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {key: value for file in Path(path).glob("*.safetensors") for key, value in load_file(file).items()}


def _differs(what: str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    wrong = [key for key in expected.keys() | state.keys() if key not in state or key not in expected]
    wrong += [key for key in expected.keys() & state.keys() if not torch.equal(state[key].cpu(), expected[key])]
    return f"{what} has other values in {', '.join(sorted(wrong)[:3])}" if wrong else ""


def rows(ranks: Sequence[int], rounds: int, folder: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Rows of all ways with each number of ranks; none where transformers is missing."""
    if importlib.util.find_spec("transformers") is None:
        print(json.dumps({"side": "transformers", "skipped": "transformers is not installed"}), flush=True)
        return []
    importlib.import_module("transformers.models.llama.modeling_llama")  # once, before there are ranks
    sizes = TINY if tiny else SIZE
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=folder) as source:
        take_turn(_make_source, 1, source, sizes)
        take_turn(_make_source, 1, str(Path(source, "tiny")), TINY)
        for world in ranks:
            turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
            for number in range(rounds):
                for side in [*WAYS][number % len(WAYS) :] + [*WAYS][: number % len(WAYS)]:
                    with tempfile.TemporaryDirectory(dir=folder) as own:
                        turns[side].append(take_turn(_turn, world, side, source, own, sizes))
            own_rows = [_row(side, own_turns, turns[PEER]) for side, own_turns in turns.items()]
            for row in own_rows:
                print(json.dumps(row), flush=True)
            found += own_rows
    return found


def _row(side: str, turns: Sequence[Turn], peers: Sequence[Turn]) -> dict[str, Any]:
    first: _Found = turns[0].found[0]
    seconds = functools.partial(_slowest, turns)
    row: dict[str, Any] = {
        "ranks": len(turns[0].found),
        "side": side,
        "in_s": median(seconds("in_s")),
        "out_s": median(seconds("out_s")),
        "in_mib": round(max(_extra(turn, "in") for turn in turns) / MIB, 1),
        "out_mib": round(max(_extra(turn, "out") for turn in turns) / MIB, 1),
        "of_disk": median(t.found[0].nbytes / max(f.out_s for f in t.found) / _rate(t) for t in turns),
        "bound_mib": round((first.largest_nbytes + MARGIN_NBYTES) / MIB, 1),
    }
    for key in ("in", "out"):
        pairs = zip(seconds(f"{key}_s"), _slowest(peers, f"{key}_s"), strict=True)
        row[f"{key}_vs_dcp"] = median(own / other for own, other in pairs)
    if errors := sorted({found.error for turn in turns for found in turn.found} - {""}):
        row["error"] = "; ".join(errors)
    return row


def _rate(turn: Turn) -> float:
    return turn.found[0].nbytes / max(found.plain_s for found in turn.found)


def _slowest(turns: Sequence[Turn], figure: str) -> list[float]:
    return [max(getattr(found, figure) for found in turn.found) for turn in turns]


def _extra(turn: Turn, what: str) -> int:
    """The most bytes of a rank: while it reads beyond what the model holds then, while it writes beyond before."""
    most = 0
    for memory, found in zip(turn.memory, turn.found, strict=True):
        window = found.windows[what]
        most = max(most, memory.peak(window) - memory.before(found.held if what == "in" else window.start))
    return most
