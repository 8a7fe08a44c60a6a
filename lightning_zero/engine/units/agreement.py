"""Checks that all ranks have the same model, and first values of the same, before anything is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from lightning_zero.comm.agreements import gather_objects
from lightning_zero.config import ConfigError
from lightning_zero.engine.units.describe import UnitGroup
from lightning_zero.engine.units.param_info import ParamInfo
from lightning_zero.ranks.waits import Waits

_Described = tuple[str, str, tuple[int, ...]]  # name, what it is, strides


def agree_on_model(units: Sequence[UnitGroup], group: Any, waits: Waits) -> None:
    """Check that all ranks have the same parameters in the same order, and take rank 0's strides. On all ranks.

    Parameters whose memory is ordered otherwise on some rank are laid out as on rank 0.

    Args:
        group: all ranks of the engine; None for one.

    Raises:
        ConfigError: with the first parameter that differs; on all ranks.
    """
    infos = [info for unit in units for bucket in unit.buckets for info in bucket.params]
    own = [_describe(unit, info) for unit in units for bucket in unit.buckets for info in bucket.params]
    digest = hashlib.sha256(repr(own).encode()).digest()
    # Every rank sees all digests, so all of them come to the same conclusion: either all go into the second message or
    # none does. A comparison with rank 0's digest alone would leave rank 0 out of it.
    if len(set(gather_objects(group, digest, waits, "whether all ranks have one model"))) == 1:
        return
    table: list[list[_Described]] = gather_objects(group, own, waits, "where the models of ranks differ")
    for rank, other in enumerate(table):
        for mine, others in zip_longest(table[0], other):
            if mine is None or others is None or mine[:2] != others[:2]:
                raise ConfigError(
                    f"expected the same model on all ranks, got on rank 0 {_say(mine)}, and in its place on rank "
                    f"{rank} {_say(others)}. Build the module without looking at the rank."
                )
    for info, (_, _, strides) in zip(infos, table[0], strict=True):
        info.strides = strides


def agree_on_sources(names: Iterable[str], group: Any, waits: Waits) -> None:
    """Check that all ranks have first values of the same tensors. A node's copy of a folder may lack a file, and its
    ranks would wait for values that nobody sends. On all ranks.

    Raises:
        ConfigError: with the first name that some rank lacks; on all ranks.
    """
    own = sorted(names)
    digest = hashlib.sha256(repr(own).encode()).digest()
    if len(set(gather_objects(group, digest, waits, "whether all ranks have the same first values"))) == 1:
        return
    table: list[list[str]] = gather_objects(group, own, waits, "where the first values of ranks differ")
    rank = next(rank for rank, other in enumerate(table) if other != table[0])
    name = min(set(table[0]) ^ set(table[rank]))
    has, lacks = (0, rank) if name in table[0] else (rank, 0)
    raise ConfigError(
        f"zero.init_from: expected first values of the same tensors on all ranks, got {name} on rank {has} and none on "
        f"rank {lacks}. Give a folder that is the same on all nodes."
    )


def _describe(unit: UnitGroup, info: ParamInfo) -> _Described:
    frozen = "" if info.param.requires_grad else ", frozen"
    what = f"of shape {tuple(info.shape)}, {info.dtype}{frozen}, in unit {unit.name or '(root)'}"
    return " = ".join(info.fqns), what, info.strides


def _say(described: _Described | None) -> str:
    return f"{described[0]} {described[1]}" if described else "no parameter"
