"""Show whole parameters: inside of ``gather()``, and on the host between two Trainer runs (such as after a fit).

Between runs each host has one copy in shared memory (memfd), which all ranks of the host map::

    each rank       -- writes its part of the masters     --> the shared memory of its host
    each rank       -- maps the memory copy-on-write      --> parameters are plain tensors; a write stays on its rank
    the next run    -- compares parameters with the copy  --> of changed parameters, rank 0's values go into the shards

Meanwhile shards, optimizer state and units do not change, and a save reads the shards.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from lightning_zero.engine.build import Core
from lightning_zero.engine.host_copy import HostCopy, nbytes_of
from lightning_zero.engine.passes.sharded_grad import ShardedGrad
from lightning_zero.engine.passes.writes import checksum_of_buffer, refuse_unequal
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket, Place, Shown
from lightning_zero.engine.units.master_storage import opened
from lightning_zero.engine.units.param import ParamInfo, values_changed
from lightning_zero.optimizers.state_trees import same_bits
from lightning_zero.planning.memory import on_the_way_nbytes, reason_not_to_fit
from lightning_zero.ranks.posts import machine
from lightning_zero.settings import ConfigError
from lightning_zero.tiers.limits import available_host_memory

CALLS = "trainer.save_checkpoint(path) saves it, and `with lightning_zero.gather(model):`, on all ranks, shows it whole"


def take_writes_over(engine: Core) -> None:
    """Wait for steps, then copy users' writes to parameters into the masters. Raise RuntimeError on all ranks if ranks
    have written different values in a run. Collective."""
    engine.passes.wait_for_all()
    _take_over(engine)
    engine.passes.writes.take_all_over()
    engine.passes.writes.confirm_if_any()


def take_shown_over(engine: Core) -> None:
    """Before a save, do what :func:`take_writes_over` does, and also copy users' writes inside a gather() that has not
    ended. Collective."""
    take_writes_over(engine)
    for write_back in engine.passes.writes.write_backs:
        write_back()


@outside_autograd
def masters_changed(engine: Core, changed: set[Bucket] | None = None) -> None:
    """Update compute parameters on all ranks after masters of ``changed`` (None: all) have changed. Collective."""
    buckets = [bucket for bucket in engine.buckets if changed is None or bucket in changed]
    for bucket in engine.comm.long_work.items(buckets, "parameters from masters, in buckets"):
        with opened(bucket.storage):
            bucket.copy_master_to_params()
    engine.passes.masters_changed(set(buckets))


def gathered_buckets(engine: Core) -> list[Bucket]:
    """Return the buckets whose parameters are whole masters at present, inside ``gather()`` or between Trainer runs."""
    return [bucket for bucket in engine.buckets if bucket.shown is Shown.PLAIN]


def _back_to_shards(engine: Core, shown: Collection[Bucket]) -> None:
    for bucket in shown:
        # The masters have users' writes by now, or an exception has discarded the writes.
        engine.passes.writes.forget(bucket)
        bucket.hide_whole()


# -- gather() ---------------------------------------------------------------------------------------------------------


class _Full(NamedTuple):
    values: Tensor
    grad: Tensor | None


@contextlib.contextmanager
def show_gathered(
    engine: Core, params: Iterable[nn.Parameter], *, from_rank: int | None = None, grads: bool = False
) -> Iterator[None]:
    """Context manager in which parameters of the buckets of ``params`` have the full masters as values. See
    ``lightning_zero.gather``. Collective."""
    # A rank in another call must not take a later message of gather() for a message of that call.
    engine.passes.meet("gather(), which all ranks must enter")
    engine.passes.between.close()
    with set_aside(engine):
        yield from _shown(engine, params, from_rank, grads)
    engine.passes.refresh()


def _shown(engine: Core, params: Iterable[nn.Parameter], from_rank: int | None, grads: bool) -> Iterator[None]:
    wanted = {engine.units.place_of(p).bucket for p in params}
    if (from_rank is not None or grads) and wanted & set(gathered_buckets(engine)):
        raise RuntimeError(
            "gather(from_rank=) and gather(grads=True) cannot be nested in another gather() of the same parameters. "
            "Give these arguments to the outer one."
        )
    if from_rank is not None and any(info.split is not None for bucket in wanted for info in bucket.params):
        raise RuntimeError(
            "gather(from_rank=): expected parameters that a rank has whole, got split ones. Write this rank's part on "
            "all ranks, or load a state dict."
        )
    buckets = [b for b in engine.buckets if b in wanted and b.shown is not Shown.PLAIN]
    shown: dict[Bucket, _Full] = {}
    put_back: Callable[[], None] = lambda: None  # noqa: E731
    engine.passes.writes.write_backs.append(partial(_write_back, engine, shown, from_rank))
    try:
        _show_full(engine, buckets, grads, shown)
        if buckets and len(gathered_buckets(engine)) == len(engine.buckets):
            put_back = engine.hooks.lift_off()
        yield
        _refuse_replaced(engine)
        engine.passes.writes.write_backs[-1]()
    finally:  # also if showing failed: a bucket that stays plain cannot be stepped
        engine.passes.writes.write_backs.pop()
        put_back()
        _hide_full(engine, shown)


def _refuse_replaced(engine: Core) -> None:
    """Raise RuntimeError if users changed a parameter's shape or replaced a parameter, so that it would not train."""
    now = dict(engine.module.named_parameters(remove_duplicate=False))
    for bucket in engine.buckets:
        for info in bucket.params:
            for fqn in info.fqns:
                if now.get(fqn, info.param) is not info.param:
                    raise RuntimeError(
                        f"{fqn} was replaced by another parameter inside gather(), which is not sharded and would not "
                        "be trained. Write to the parameter (param.copy_(value), load_state_dict(assign=False))."
                    )
            info.check_shape(info.param.shape)


@outside_autograd
def _show_full(engine: Core, buckets: list[Bucket], grads: bool, shown: dict[Bucket, _Full]) -> None:
    """Point the parameters of ``buckets`` at full masters and, with ``grads``, ``param.grad`` at full gradients. Add
    the tensors to ``shown``. Collective."""
    take_writes_over(engine)
    engine.passes.sharded_grads.forget_cleared(takes=True)
    if grads:
        engine.passes.sharded_grads.refuse_undivided()
        engine.passes.reducer.refuse_unreduced(Place(bucket, info) for bucket in buckets for info in bucket.params)
    for bucket in buckets:
        full = bucket.full_master()
        grad = bucket.grad if grads else None
        full_grad = bucket.gathered([(0, grad)], grad.dtype, "gradients") if grad is not None else None
        shown[bucket] = _Full(full, full_grad)
        bucket.show_whole(Shown.PLAIN, (bucket.part_of(full, info) for info in bucket.params))
        for info in bucket.params:
            if full_grad is not None and info.param.grad is not None:
                part = bucket.part_of(full_grad, info)
                info.param.grad = part.to(info.param.dtype) if part.dtype != info.param.dtype else part


@outside_autograd
def _write_back(engine: Core, shown: dict[Bucket, _Full], from_rank: int | None) -> None:
    """Update the shards with users' writes inside gather(). Collective. Raises RuntimeError on all ranks, and copies
    nothing, if written values differ between ranks."""
    changed = {bucket: _take_written(bucket, full, from_rank) for bucket, full in shown.items()}
    if from_rank is None:
        _compare(engine, shown)
    for bucket, (full, full_grad) in shown.items():
        values_changed_here, grads_changed_here = changed[bucket]
        if values_changed_here and not bucket.plan.trainable:
            engine.passes.writes.note_rounded(bucket, bucket.params[0], in_gather=True)
        bucket.write_whole(full, masters=values_changed_here)  # equal values need no write to a file
        if grads_changed_here:
            assert full_grad is not None and bucket.grad is not None
            bucket.grad.copy_(full_grad[slice(*bucket.owned_range)])


def _take_written(bucket: Bucket, shown: _Full, from_rank: int | None) -> tuple[bool, bool]:
    """Update ``shown`` with tensors that users have assigned to ``param.data`` and ``param.grad``. With ``from_rank``,
    broadcast that rank's values. Return (values have changed, gradients have changed) for this rank's shard."""
    full, full_grad = shown
    replaced = []
    for info in bucket.params:
        # The user may have assigned another tensor to ``.data``: copy its values to ``full``.
        part = bucket.part_of(full, info)
        if info.param.data_ptr() != part.data_ptr() and info.param.shape == info.shape:
            part.copy_(info.param.data)
            replaced.append(info)
        if full_grad is not None and info.param.grad is not None:
            bucket.part_of(full_grad, info).copy_(info.param.grad)
    for values in shown:
        if from_rank is not None and values is not None:
            bucket.comm.broadcast(values, from_rank)
    values_changed(replaced if from_rank is None else bucket.params)
    own = slice(*bucket.owned_range)
    with opened(bucket.storage) as master:
        changed = not same_bits(master, full[own].to(master.device))
    if full_grad is None or (grad := bucket.grad) is None:
        return changed, False
    return changed, not same_bits(grad, full_grad[own].to(grad.device))


def _compare(engine: Core, shown: dict[Bucket, _Full]) -> None:
    """Raise RuntimeError on all ranks if ranks that share shards have different values in ``shown``. Collective."""
    # Where each rank has all masters, ranks may have values of their own, as under DDP.
    buckets = [bucket for bucket in shown if bucket.plan.shards_master and bucket.comm.shard.size > 1]
    if not buckets:
        return
    what = "gather(), whose end all ranks must reach"
    if engine.passes.key is not None:
        engine.passes.meet(what)
    sums = [[0 if full is None else checksum_of_buffer(full) for full in shown[bucket]] for bucket in buckets]
    table = engine.comm.gather_checked(sums, what, patient=True)
    groups = engine.comm.ranks.topology.same_params
    written = [
        (Place(bucket, info), bucket.part_of(values, info))
        for number, bucket in enumerate(buckets)
        for kind, values in enumerate(shown[bucket])
        if values is not None and any(len({table[rank][number][kind] for rank in ranks}) > 1 for ranks in groups)
        for info in bucket.params
    ]
    refuse_unequal(engine.comm, written, "inside gather()")


@outside_autograd
def _hide_full(engine: Core, shown: dict[Bucket, _Full]) -> None:
    _back_to_shards(engine, shown)
    for bucket, full in shown.items():
        if full.grad is not None:
            engine.passes.sharded_grads.place(info for info in bucket.params if info.param.grad is not None)


# -- between runs: memory ---------------------------------------------------------------------------------------------


def _gathers(engine: Core, hosts: Sequence[str]) -> bool:
    """Return whether ranks that share shards are on several hosts, so that no host has all shards."""
    groups = engine.comm.ranks.topology.shard_groups
    return any(len({hosts[rank] for rank in group}) > 1 for group in groups)


def _does_not_fit(engine: Core, hosts: Sequence[str], available: Sequence[int]) -> str | None:
    """Return None if a copy of the module fits into the memory of each host, otherwise a text that says why not. The
    result is equal on all ranks. ``hosts``, ``available``: each rank's host, and the bytes available there."""
    gathers = engine.comm.device.type == "cpu" and _gathers(engine, hosts)
    nbytes = nbytes_of(engine.buckets)
    on_the_way = on_the_way_nbytes([bucket.plan for bucket in engine.buckets], gathers=gathers)
    for host in dict.fromkeys(hosts):
        left = [free for name, free in zip(hosts, available, strict=True) if name == host]
        ranks = ", ".join(str(rank) for rank, name in enumerate(hosts) if name == host)
        found = reason_not_to_fit(nbytes + on_the_way * len(left), min(left), f"the host of ranks {ranks}")
        if found is not None:
            return found
    return None


def _make(engine: Core, hosts: Sequence[str]) -> tuple[HostCopy | None, str]:
    """Allocate a copy in each host's shared memory, and map it on all ranks of the host. Return (copy, "") or, on all
    ranks if one of them has failed, (None, reason). Collective."""
    comm = engine.comm
    leader = hosts.index(hosts[comm.rank])
    nbytes, fd, failed, copy = nbytes_of(engine.buckets), -1, "", None
    try:
        if comm.rank == leader:
            try:
                fd = os.memfd_create("lightning_zero", os.MFD_CLOEXEC)
                os.posix_fallocate(fd, 0, nbytes)  # if there is no room, fail now: a write would get SIGBUS
            except (OSError, AttributeError) as error:
                failed = f"rank {comm.rank} could not have {nbytes:,} bytes of shared memory ({error})"
        places = comm.gather_checked((os.getpid(), fd, failed), "where the whole module is")
        failed = next((row[2] for row in places if row[2]), "")
        if not failed:
            pid, number, _ = places[leader]
            try:
                if comm.rank != leader:
                    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                copy = HostCopy(engine.buckets, fd)
            except OSError as error:  # the processes cannot see each other's files
                failed = f"rank {comm.rank} could not map the memory of rank {leader} ({error})"
            failed = next((text for text in comm.gather_checked(failed, "mapping the whole module") if text), "")
        return (None, failed) if failed else (copy, "")
    finally:
        if fd >= 0:
            os.close(fd)


def _fill(engine: Core, copy: HostCopy, hosts: Sequence[str]) -> None:
    """Fill the host's copy with the masters: each rank writes its shard or, if shards are spread over hosts or masters
    are replicated, an equal share of the whole masters. Collective."""
    comm = engine.comm
    here = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
    gathers = _gathers(engine, hosts)
    originals = iter(copy.params)
    for bucket in engine.comm.long_work.items(engine.buckets, "making the module whole, in buckets"):
        targets = [info.flattened(next(originals).original) for info in bucket.params]
        if bucket.plan.shards_master and not gathers:
            if here[0] in comm.shard.ranks:  # under hybrid sharding several groups of a host hold the same shards
                with opened(bucket.storage) as master:
                    _write(bucket, targets, master, bucket.owned_range)
            continue
        place, numel = here.index(comm.rank), bucket.layout.numel
        low, high = place * numel // len(here), (place + 1) * numel // len(here)
        full = bucket.full_master()
        _write(bucket, targets, full[low:high], (low, high))
        del full
    comm.gather_checked(None, "the whole module is there")
    copy.equals_masters(engine.buckets)


def _write(bucket: Bucket, targets: Sequence[Tensor], values: Tensor, part: tuple[int, int]) -> None:
    """Write ``values`` to ``targets``, one flat tensor per parameter. ``part``: their (start, stop) in the bucket."""
    for f in bucket.layout.cut(*part):
        targets[f.index][f.offset : f.offset + f.numel].copy_(values[f.start : f.start + f.numel])


# -- between runs: shown, and hidden -----------------------------------------------------------------------------------


@outside_autograd
def show_whole(engine: Core) -> bool:
    """Point parameters at whole values on the host, between Trainer runs, and return True. Collective. Do nothing and
    return False if ``zero.gather_after_fit`` is false, if tensor or expert parallelism splits parameters, on meta,
    inside `gather()` or, with a warning, if a host lacks memory."""
    copy = engine.host_copy
    if copy is not None and copy.is_shown:
        return True
    if engine.config.splits:
        return False
    if engine.config.gather_after_fit is False or gathered_buckets(engine) or engine.comm.device.type == "meta":
        return False
    take_writes_over(engine)
    known = copy is not None and copy.still_equals(engine.buckets)
    table = engine.comm.gather_checked(
        (machine(), available_host_memory(), known), "making the module whole", patient=True
    )
    if not all(row[2] for row in table):
        copy = engine.host_copy = None  # free the old copy first: there may be no room for two
        hosts = [row[0] for row in table]
        refusal = _does_not_fit(engine, hosts, [row[1] for row in table])
        if refusal is None:
            copy, refusal = _make(engine, hosts)
        if copy is None:
            if engine.comm.rank == 0:
                stays = f"the module stays sharded after this run: {refusal}. {CALLS}."
                warnings.warn(
                    f"{stays} Set zero.gather_after_fit=false to have it so without this warning.", stacklevel=2
                )
            return False
        _fill(engine, copy, hosts)
    assert copy is not None
    _show(engine, copy)
    return True


def _show(engine: Core, copy: HostCopy) -> None:
    copy.grads = []
    values = iter(copy.params)
    for bucket in engine.buckets:
        for info in bucket.params:
            if isinstance(info.param.grad, ShardedGrad):
                copy.grads.append((info.param, info.param.grad))
            info.param.grad = None
        bucket.show_whole(Shown.PLAIN, (next(values).value for _ in bucket.params))
    copy.put_back = engine.hooks.lift_off(keep_engine=True)
    engine.hooks.idle = True
    if engine.comm.device.type != "cpu":
        engine.module.to("cpu")  # moves buffers, as Lightning does after a run
    engine.host_copy, copy.is_shown = copy, True


def show_again(engine: Core) -> bool:
    """Point parameters at ``engine.host_copy`` again, unless the copy differs from this rank's masters or parameters
    are whole already. Return whether parameters were pointed at the copy. Sends no message."""
    copy = engine.host_copy
    if copy is None or copy.is_shown or gathered_buckets(engine) or not copy.still_equals(engine.buckets):
        return False
    _show(engine, copy)
    return True


@outside_autograd
def _take_over(engine: Core) -> None:
    """If any rank has written to a parameter between runs, copy rank 0's values of the parameter into the shards. (DDP
    too broadcasts rank 0's parameters at the start of a run.) Collective."""
    copy = engine.host_copy
    if copy is None or not copy.is_shown:
        return
    written = {number: tuple(value.shape) for number, value in copy.written().items()}
    table = engine.comm.gather_checked(written, "what was written to the module between runs")
    for number, shape in (item for found in table for item in found.items()):
        copy.params[number].info.check_shape(shape)
    shown = [copy.params[number] for number in sorted({number for found in table for number in found})]
    if not shown:
        return
    _warn_of_dtypes(engine, [param.info for param in shown])
    for bucket, info, original, value in shown:
        values = info.param.data.detach().to(engine.comm.device, info.dtype, copy=True)
        bucket.comm.broadcast(values)
        bucket.write(info, values)
        original.copy_(values)
        if not same_bits(info.flattened(value), info.flattened(original)):  # else this rank still shares the pages
            value.copy_(values)
        if info.param.data_ptr() != value.data_ptr():
            info.param.data.copy_(values)
    masters_changed(engine, {param.bucket for param in shown})
    engine.passes.wait_for_all()
    copy.equals_masters(engine.buckets)


@outside_autograd
def take_reshaped(engine: Core) -> dict[nn.Parameter, Tensor]:
    """Find parameters to which users have assigned ``.data`` of another shape between runs (as
    ``resize_token_embeddings`` does). Return their new values, for use when the module is sharded again, and restore
    their old ``.data``. Sends no message."""
    copy = engine.host_copy
    found = {}
    for _, info, _, value in copy.params if copy is not None and copy.is_shown else ():
        if info.param.shape != info.shape:
            found[info.param] = info.param.data
            info.param.data = value
    return found


def _warn_of_dtypes(engine: Core, written: Sequence[ParamInfo]) -> None:
    converted = [info for info in written if info.param.dtype != info.dtype]
    if converted and engine.comm.rank == 0:
        now, before = converted[0].param.dtype, converted[0].dtype
        warnings.warn(
            f"{converted[0].fqn} (and {len(converted) - 1} other parameters) was converted to {now} between runs: its "
            f"values are kept, and it continues in {before}. Trainer(precision=) sets the dtype of computation.",
            stacklevel=2,
        )


@outside_autograd
def shard_again(engine: Core, *, keep: bool = True) -> bool:
    """Undo :func:`show_whole`, and copy users' writes into the shards. Return whether parameters were whole.
    Collective. ``keep``: keep the host copy, which the next ``show_whole`` reuses if masters have not changed."""
    copy = engine.host_copy
    was_shown = copy is not None and copy.is_shown
    if copy is not None and was_shown:
        _take_over(engine)
        _hide(engine, copy)
    if not keep:
        engine.host_copy = None
    return was_shown


def _hide(engine: Core, copy: HostCopy) -> None:
    copy.is_shown = False
    copy.put_back()
    engine.hooks.idle = False
    for unit in engine.units:
        for info in unit.infos:
            info.param.grad = None  # from backwards that users ran between runs
    _back_to_shards(engine, engine.buckets)
    for param, grad in copy.grads:
        param.grad = grad
    if engine.comm.device.type != "cpu":
        with engine.passes.fence.lowered():
            engine.module.to(engine.comm.device)


@contextlib.contextmanager
def set_aside(engine: Core) -> Iterator[None]:
    """Context manager in which the module is sharded. On exit the module becomes whole if it was before. Collective."""
    was_whole = shard_again(engine)
    try:
        yield
    except BaseException:
        if was_whole:
            show_again(engine)  # not collective: other ranks may not have raised
        raise
    if was_whole:
        show_whole(engine)


# -- between runs: is there enough memory? ---------------------------------------------------------------------------


def check_free_memory(engine: Core) -> None:
    """Raise ConfigError if ``zero.gather_after_fit=true`` and a host cannot hold a copy of the module. Collective."""
    if engine.config.gather_after_fit is True and engine.host_copy is None:
        table = engine.comm.gather_checked((machine(), available_host_memory()), "room for the whole module")
        _refuse(_does_not_fit(engine, [row[0] for row in table], [row[1] for row in table]))


def check_free_memory_here(nbytes: int) -> None:
    """Raise ConfigError if this host lacks ``nbytes`` for a copy of the module. Call before ranks' processes start."""
    _refuse(reason_not_to_fit(nbytes, available_host_memory(), "this host"))


def _refuse(why: str | None) -> None:
    if why is not None:
        raise ConfigError(
            f"zero.gather_after_fit=true: {why}. Set zero.gather_after_fit=null: the module then stays sharded; "
            f"{CALLS}."
        )
