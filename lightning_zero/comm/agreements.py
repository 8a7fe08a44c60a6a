"""Sends small host-side messages by which ranks agree, also before a communicator exists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.groups import GROUP_POOL, backend_for
from lightning_zero.comm.transports import all_gather_single
from lightning_zero.ranks.messages import dumps, loads
from lightning_zero.ranks.waits import Waits
from lightning_zero.ranks.watchdog import Watchdog
from lightning_zero.settings import ConfigError

T = TypeVar("T")


class FailedElsewhereError(RuntimeError):
    """Raised when a joint action has failed on another rank. The message names that rank and its error."""


class ApartError(RuntimeError):
    """Raised on all ranks if ranks make different calls at the same time. The message names each rank's call."""


def open_waits(group: Any, device: torch.device, stall_timeout_s: float) -> Waits:
    """Make this rank's :class:`Waits`, which bounds how long this rank waits for other ranks of ``group``. Collective.
    ``device``: where this rank trains; of the same type on all ranks."""
    waits = Waits(group, stall_timeout_s=stall_timeout_s)
    if waits.world_size > 1 and (backend := backend_for(group, device)) != "fake":  # a simulated world
        number = 1 + max(gather_objects(group, Watchdog.last_number, waits, "the start of a run, or of an engine"))
        waits.watch(number, notices_broken_connections=backend != "nccl")
    return waits


def gather_objects(group: Any, value: Any, waits: Waits, what: str, *, patient: bool = False) -> list[Any]:
    """Gather a small object from each rank of ``group``, also before a communicator exists. Blocks. Collective.
    ``what``: the purpose of the objects, in words; if ranks pass different words, all raise an ApartError. ``patient``:
    wait beyond the timeout while any rank works. All ranks raise TypeError if :func:`dumps` refuses a rank's object."""
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    return gather_on(GROUP_POOL.parent(group).agreement, value, waits, what, patient=patient)


def gather_on(group: Any, value: Any, waits: Waits, what: str, *, patient: bool = False) -> list[Any]:
    """Like :func:`gather_objects`, but over ``group``, whose backend must be on the host (gloo), instead of over the
    agreement group of its ranks. Collective."""
    if dist.get_backend(group) == "fake":
        return [value] * dist.get_world_size(group)
    try:
        own = _row((what, value, None))
    except TypeError as error:  # this rank still takes part, because the others would wait for it
        own = _row((what, None, str(error)))
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    work = all_gather_single(sizes, torch.tensor([own.numel()]), group=group, async_op=True)
    waits.wait_work(work, what, patient=patient)
    # Every rank sends as many bytes as the longest object has, and its purpose with the value. So ranks that make
    # different calls still exchange messages of equal size, and all of them notice and raise.
    table = torch.empty(len(sizes), int(sizes.max()), dtype=torch.uint8)
    padded = torch.zeros(table.shape[1], dtype=torch.uint8)
    padded[: own.numel()] = own
    work = all_gather_single(table.view(-1), padded, group=group, async_op=True)
    waits.wait_work(work, what, patient=patient)
    found = [loads(row[:size].numpy().tobytes()) for row, size in zip(table, sizes.tolist(), strict=True)]
    if any(place != what for place, *_ in found):
        places = "\n".join(f"  rank {rank}: {place}" for rank, (place, *_) in enumerate(found))
        raise ApartError(
            f"ranks have come to different places:\n{places}\nAll ranks must make the same calls in the same order "
            "(fit, gather, save_checkpoint ...): look for one that only some ranks make, or that an exception has kept "
            "some ranks from."
        )
    for rank, (_, _, refusal) in enumerate(found):
        if refusal is not None:
            raise TypeError(f"{what}, rank {rank}: {refusal}")
    return [value for _, value, _ in found]


def gather_if_unequal(group: Any, value: Any, waits: Waits, what: str) -> list[Any] | None:
    """Return None if ``value`` has the same ``repr`` on all ranks, else each rank's value. Blocks. Collective."""
    # Compare all digests, not only this rank's with rank 0's: all ranks must decide alike on the second message.
    digest = hashlib.sha256(repr(value).encode()).digest()
    if len(set(gather_objects(group, digest, waits, f"whether {what} are the same on all ranks"))) == 1:
        return None
    return gather_objects(group, value, waits, f"where {what} differ between ranks")


def _row(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)


def barrier(group: Any, waits: Waits, label: str) -> None:
    """Wait until all ranks call this function, even beyond the timeout as long as any rank works. Does not wait for
    devices. Collective. ``label``: the same words on all ranks."""
    if waits.world_size > 1:
        gather_objects(group, None, waits, label, patient=True)


def _offered(group: Any, value: Any, waits: Waits, what: str) -> tuple[Tensor, list[int]]:
    """Encode ``value``. Return this rank's message and the message sizes of all ranks, in bytes. All ranks raise
    TypeError if one rank's value cannot be encoded. Collective."""
    try:
        own = _row(value)
        told: int | str = own.numel()
    except TypeError as error:
        own, told = torch.empty(0, dtype=torch.uint8), str(error)
    sizes = gather_objects(group, told, waits, what, patient=True)
    for rank, size in enumerate(sizes):
        if isinstance(size, str):
            raise TypeError(f"{what}, rank {rank}: {size}")
    return own, sizes


def broadcast_object(group: Any, value: T, src: int, waits: Waits) -> T:
    """Return rank ``src``'s ``value`` on all ranks. Blocks, even beyond the timeout as long as any rank works.
    Collective. All ranks raise TypeError if :func:`dumps` refuses the object."""
    if waits.world_size == 1 or dist.get_backend(group) == "fake":
        return value
    what, sends = f"an object of rank {src}", waits.rank == src
    own, sizes = _offered(group, value if sends else None, waits, what)
    data = own if sends else torch.empty(sizes[src], dtype=torch.uint8)
    work = dist.broadcast(data, group_src=src, group=GROUP_POOL.parent(group).agreement, async_op=True)
    waits.wait_work(work, what, patient=True)
    return value if sends else cast(T, loads(data.numpy().tobytes()))


def gather_rows(group: Any, row: Tensor, waits: Waits, what: str) -> Tensor | None:
    """Gather each rank's ``row`` ([bytes] uint8, on the host, equally long on all ranks) on rank 0. Return a tensor
    [ranks, bytes] there; None on other ranks. Blocks. Collective. ``what``: the purpose, in words."""
    if waits.world_size == 1 or dist.get_backend(group) == "fake":
        return row.expand(waits.world_size, -1)
    table = torch.empty(waits.world_size, len(row), dtype=torch.uint8) if waits.rank == 0 else None
    parts = list(table) if table is not None else None
    work = dist.gather(row, parts, group_dst=0, group=GROUP_POOL.parent(group).agreement, async_op=True)
    waits.wait_work(work, what, patient=True)
    return table


def collect_objects(group: Any, value: Any, waits: Waits, what: str) -> list[Any] | None:
    """Gather one object of each rank on rank 0, in rank order; other ranks get None. Blocks. Collective. ``what``: the
    purpose, in words; the same on all ranks."""
    own, sizes = _offered(group, value, waits, what)
    row = torch.zeros(max(sizes), dtype=torch.uint8)
    row[: own.numel()] = own
    table = gather_rows(group, row, waits, what)
    if table is None:
        return None
    return [loads(found[:size].numpy().tobytes()) for found, size in zip(table, sizes, strict=False)]


def together(
    group: Any,
    waits: Waits,
    what: str,
    act: Callable[[], T],
    undo: Callable[[T], Any] = lambda _: None,
    *,
    patient: bool = False,
) -> T:
    """Run ``act`` on all ranks and return its result. If ``act`` fails on one rank, all ranks raise. Collective.

    A rank on which ``act`` failed raises its own error. All others raise a ConfigError if the error of the first failed
    rank is a ConfigError, else a FailedElsewhereError.

    Args:
        act: must send no message; else the other ranks would wait for a rank on which ``act`` failed.
        undo: called with the result of ``act`` if it succeeded here but failed on another rank, or ranks cannot agree.
        patient: whether ``act`` may take longer than ``stall_timeout_s``.
    """
    try:
        result = act()
    except Exception as error:
        # This rank has failed but still takes part, because the others wait for it in the same gather.
        own = (type(error).__name__ if not isinstance(error, ConfigError) else "", str(error))
        gather_objects(group, own, waits, what, patient=patient)
        raise
    try:
        answers = gather_objects(group, None, waits, what, patient=patient)
    except BaseException:
        undo(result)
        raise
    for rank, found in enumerate(answers):
        if found is not None:
            undo(result)
            kind, text = found
            raise (
                FailedElsewhereError(f"rank {rank} failed with {kind}: {text}")
                if kind
                else ConfigError(f"{text} (So says rank {rank}.)")
            )
    return result


def digest_of(value: object) -> list[int]:
    """Return a digest of ``repr(value)`` as a list of bytes. Take the maxima over ranks of these bytes and pass them to
    :func:`is_same`, which returns whether ``value`` has the same ``repr`` on all ranks."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return [*digest, *(255 - byte for byte in digest)]


def is_same(maxima: Sequence[int]) -> bool:
    half = len(maxima) // 2
    return all(high + other == 255 for high, other in zip(maxima[:half], maxima[half:], strict=True))
