"""Save and restore states of all ranks' random generators: torch's on host and GPU, NumPy's and Python's. A checkpoint
has them as plain tensors with one row per rank, so that the checkpoint loads with ``weights_only=True``."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch import device as Device

from lightning_zero.device import accelerator_of

_PYTHON = struct.Struct("<625I?d")  # 625 ints: the Mersenne Twister; whether it holds a spare normal value; that value
_NUMPY = struct.Struct("<624Ii?d")
_MERSENNE = "MT19937"


class Generators(NamedTuple):
    """The states of one process's random generators, as the generators return them. A run takes the states before each
    batch, so taking them must be cheap."""

    torch: Tensor
    python: Any
    numpy: Any
    cuda: Tensor | None

    @classmethod
    def now(cls, device: Device) -> Generators:
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(legacy=False),
            accelerator_of(device).rng_state(),
        )

    @classmethod
    def seeded(cls, seed: int, device: Device) -> Generators:
        """Return the states that the generators have after they are seeded with ``seed`` (64 bits)."""
        return cls(
            torch.Generator().manual_seed(seed).get_state(),
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(legacy=False),
            accelerator_of(device).seeded_rng_state(seed),
        )

    def restore(self, device: Device) -> None:
        """Set the process's generators, and the generator of ``device``, to these states. NumPy's generator is set only
        if its bit generator is of the same kind as when the state was taken."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None and self.numpy["bit_generator"] == np.random.get_state(legacy=False)["bit_generator"]:
            np.random.set_state(self.numpy)
        if self.cuda is not None:
            accelerator_of(device).set_rng_state(self.cuda)

    def as_tensors(self) -> dict[str, Tensor]:
        """Return the states as uint8 tensors by name: ``torch``, ``python``, ``numpy`` and, on a GPU, ``cuda``. Sizes
        are equal on all ranks whose devices have the same type."""
        version, words, normal = self.python
        assert version == 3, version
        rows = {"torch": self.torch, "python": _bytes(_PYTHON.pack(*words, normal is not None, normal or 0.0))}
        # If the user has replaced NumPy's generator, keep none; place -1 says so.
        words, place, has_normal, normal = [0] * 624, -1, 0, 0.0
        if self.numpy["bit_generator"] == _MERSENNE:
            words, place = self.numpy["state"]["key"].tolist(), self.numpy["state"]["pos"]
            has_normal, normal = self.numpy["has_gauss"], self.numpy["gauss"]
        rows["numpy"] = _bytes(_NUMPY.pack(*words, place, bool(has_normal), normal))
        if self.cuda is not None:
            rows["cuda"] = self.cuda
        return rows

    @classmethod
    def from_tensors(cls, rows: Mapping[str, Tensor]) -> Generators:
        *words, has_normal, normal = _PYTHON.unpack(rows["python"].numpy().tobytes())
        python = (3, tuple(words), normal if has_normal else None)
        *keys, place, has_normal, normal = _NUMPY.unpack(rows["numpy"].numpy().tobytes())
        state = {"key": np.array(keys, dtype=np.uint32), "pos": place}
        numpy = {"bit_generator": _MERSENNE, "state": state, "has_gauss": int(has_normal), "gauss": normal}
        return cls(rows["torch"].clone(), python, numpy if place >= 0 else None, rows.get("cuda"))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def of_rank(table: Mapping[str, Tensor], rank: int, world_size: int, device: Device) -> Generators:
    """Return the generator states with which ``rank`` resumes. ``table``: the saved states by name, each [saved ranks,
    bytes]. If the number of ranks has changed, the returned states are seeded by a hash of saved states; these seeds
    differ between ranks unless all saved ranks had equal states."""
    saved = len(table["torch"])
    rows = {name: part[rank % saved] for name, part in table.items()}
    if saved == world_size:
        return Generators.from_tensors(rows)
    alike = all(torch.equal(part, part[:1].expand_as(part)) for part in table.values())
    digest = hashlib.sha256(b"" if alike else f"{rank} of {world_size}".encode())
    for name in sorted(rows):
        digest.update(rows[name].numpy().tobytes())
    return Generators.seeded(int.from_bytes(digest.digest()[:8], "little"), device)
