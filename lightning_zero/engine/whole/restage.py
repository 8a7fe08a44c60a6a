"""Move a sharded module to another stage or offload setting, bucket by bucket, without a checkpoint file.

Buckets, and the groups of ranks that share shards, stay the same. The values of a bucket stay on their tier or move to
another tier. If the range that a rank owns changes, values are cut or gathered. Only one bucket at a time is in memory
with both old and new values.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lightning_zero.comm.share import Share, share_of_machine
from lightning_zero.engine.build import Core
from lightning_zero.engine.steps.runs import ParamStates
from lightning_zero.engine.torch_modes import outside_autograd
from lightning_zero.engine.units.bucket import Bucket
from lightning_zero.engine.units.capacity import Held, make_tiers
from lightning_zero.engine.units.describe import BucketGroup, UnitGroup, refuse_cuda_graphs
from lightning_zero.engine.units.master_storage import opened
from lightning_zero.engine.whole.values import Entries, all_entries, full_entries
from lightning_zero.engine.whole.whole_params import gathered_buckets, take_writes_over
from lightning_zero.optimizers.state_trees import State
from lightning_zero.planning.buckets import BucketPlan
from lightning_zero.planning.placement import STAGES
from lightning_zero.settings import ConfigError, Offload, ZeroConfig


@dataclass(frozen=True, slots=True)
class Move:
    """Moves a bucket's values from the range that this rank owns now to the range that it owns under ``plan``."""

    bucket: Bucket
    plan: BucketPlan

    def move_values(self, values: Tensor) -> Tensor:
        """Return the values of the range that this rank owns under ``plan``, gathered from the ``values`` that ranks
        own now. Collective."""
        if self.bucket.plan.shards_master:
            values = self.bucket.gathered([(0, values)], values.dtype, "optimizer state")
        return values[slice(*self.plan.owned_range(self.bucket.comm.shard.index))]


Follow = Callable[[int, Move], None]  # called with a bucket's index and move, to move values that other objects hold


@outside_autograd
def restage(engine: Core, config: ZeroConfig, follow: Sequence[Follow], instances: Collection[int]) -> None:
    """Move all buckets to ``config``: see ``Engine.restage``. ``instances``: file tier numbers in use. Collective."""
    if not _agree(engine, config):
        return
    for sharded in engine.optimizers:
        sharded.check_stage(STAGES[config.stage.name])
    passes, comm = engine.passes, engine.comm
    passes.leave()
    take_writes_over(engine)
    engine.passes.sharded_grads.forget_cleared(takes=True)
    _agree_on_grads(engine)
    comm.together("restaging: the model", partial(refuse_cuda_graphs, engine.module, config))
    share = share_of_machine(comm) if config.offload.name is not Offload.none else Share()
    tiers, plans = make_tiers(_describe(engine), config, comm, instances, share, engine.tiers, _held(engine))
    known = [all_entries(engine, sharded) for sharded in engine.optimizers]
    comm.streams.accelerator.synchronize()  # kernels may still read the values that move
    comm.streams.drop_held()
    before, engine.tiers = engine.tiers, tiers
    try:
        # Lift the budgets, which limit values at rest. A large budget still means: do not check available memory.
        tiers.set_budgets(None if config.offload.host_budget is None else sys.maxsize, None)
        _move_all(engine, plans, known, follow)
        for sharded in engine.optimizers:
            sharded.replanned()
        tiers.set_budgets(config.offload.host_budget, config.offload.nvme_budget)
        if tiers.nvme is not None:
            tiers.nvme.trim()
        before.close(but=tiers)
        engine.passes.after_step.use_cores(share.cpus)
    except BaseException as error:
        weakref.finalize(engine, before.close)  # the old tiers still hold some values
        engine.passes.after_step.failed = RuntimeError(
            f"the module was being restaged when this was raised: {type(error).__name__}: {error}\nSome of its "
            "values are where they were and others where they are to be, so that training cannot go on. Build the "
            "module anew, and go on from the last checkpoint."
        )
        raise
    engine.config = config
    passes.plans_changed(config)
    engine.units.connect()


# -- before any change ------------------------------------------------------------------------------------------------


def _agree(engine: Core, config: ZeroConfig) -> bool:
    """Return whether ``config`` changes the settings of any rank. Collective. Raises ConfigError if ranks got different
    stages, offloads or budgets, or if a rank is inside a pass or ``gather()``."""
    own = _say_settings(config), config != engine.config, _in_the_way(engine)
    table: list[tuple[str, bool, str | None]] = engine.comm.all_gather_objects(own, "restaging the module")
    first = table[0][0]
    for rank, (settings, _, refusal) in enumerate(table):
        if refusal is not None:
            raise ConfigError(f"restage: {refusal} (So says rank {rank}.)")
        if settings != first:
            raise ConfigError(
                f"restage: expected the same stage and offload on all ranks, got {first} on rank 0 and {settings} on "
                f"rank {rank}. Pass the same arguments on all ranks."
            )
    return any(changes for _, changes, _ in table)


def _agree_on_grads(engine: Core) -> None:
    """Raise a ConfigError on all ranks unless all ranks have gradients of the same buckets. Collective."""
    grads = [bucket.grad_store.is_there for bucket in engine.buckets]
    table = engine.comm.all_gather_objects(grads, "restaging: gradients")
    for rank, found in enumerate(table):
        if found != table[0]:
            raise ConfigError(
                f"restage: expected gradients of the same parameters on all ranks, got others on rank {rank} than on "
                "rank 0. Clear them on all ranks or on none (optimizer.zero_grad()) before it."
            )


def _say_settings(config: ZeroConfig) -> str:
    """Return a text with the settings that all ranks must have in common in a restage. Folders may differ by node."""
    offload = config.offload
    budgets = [offload.device_budget, offload.host_budget, offload.nvme_budget]
    budgeted = "" if budgets == [None] * 3 else f" and budgets {budgets}"
    return f"stage {config.stage.name.name} with offload {offload.name.name}{budgeted}"


def _in_the_way(engine: Core) -> str | None:
    if (what := engine.passes.under_way()) is not None:
        return (
            f"expected to be called between steps, got a call {what}. Call it in on_train_batch_end, "
            "on_train_epoch_end, or between two fits."
        )
    if gathered_buckets(engine):
        return (
            "expected to be called outside of gather(), got a call inside of it. Leave the "
            "`with lightning_zero.gather(...)` block first."
        )
    return None


def _describe(engine: Core) -> list[UnitGroup]:
    return [
        UnitGroup(unit.name, [BucketGroup(b.params, b.dtypes, b.plan.trainable, b.plan.whole) for b in unit.buckets])
        for unit in engine.units
    ]


def _held(engine: Core) -> list[Held]:
    counts = {sharded: sharded.states_per_element() for sharded in engine.optimizers}
    listed = {sharded: set(sharded.buckets()) for sharded in engine.optimizers}
    held = []
    for bucket in engine.buckets:
        own = [of for of in engine.optimizers if bucket in listed[of] or of.has_stepped(bucket)]
        now = sum(counts[sharded] for sharded in own if sharded.has_stepped(bucket))
        later = sum(counts[sharded] for sharded in own)
        whole = partial(lambda own, bucket, plan: sum(each.whole_state(bucket, plan) for each in own), own, bucket)
        held.append(Held(bucket.plan, now, later, whole(None), whole))
    return held


# -- the move ---------------------------------------------------------------------------------------------------------


def _move_all(engine: Core, plans: Sequence[BucketPlan], known: Sequence[Entries], follow: Sequence[Follow]) -> None:
    number = 0
    for unit in engine.units:
        for bucket in unit.buckets:
            move = Move(bucket, plans[number])
            if move.plan != bucket.plan or move.plan.tiers.uses_host_or_files:
                for other in follow:
                    other(number, move)
                with engine.comm.set_place(f"restaging {bucket.label}"):
                    _move(engine, move, [own.get(number, {}) for own in known])
            number += 1
        unit.restaged()
    engine.comm.streams.accelerator.synchronize()


def _move(engine: Core, move: Move, known: Sequence[Mapping[int, State]]) -> None:
    bucket, plan, tiers, comm = move.bucket, move.plan, engine.tiers, engine.comm
    # Whether masters and state move to a new storage: the same on all ranks.
    old, new = ((p.shards_master, p.copies_master, p.storage_tier) for p in (bucket.plan, plan))
    keeps_storage = old == new and bucket.is_on(plan.storage_tier, tiers)
    keeps_grad = (
        keeps_storage and bucket.plan.grads_on_host == plan.grads_on_host and bucket.is_on(plan.tiers.grad, tiers)
    )
    storage, came_whole = bucket.storage, not bucket.plan.reshards
    with opened(storage) as master:
        # Messages first: the calls below may fail on one rank alone.
        values, grad = master, None
        states: list[ParamStates] = [{} for _ in known]
        if not keeps_storage:
            values = move.move_values(master)
            for number, (sharded, entries) in enumerate(zip(engine.optimizers, known, strict=True)):
                full = full_entries(bucket, sharded, entries, lambda _, values: values)
                states[number] = {(bucket, slot): entry for slot, entry in full.items()}
        if not keeps_grad and bucket.grad is not None:
            grad = move.move_values(bucket.grad)

        def move_in() -> None:
            bucket.rest_as(plan, tiers, values, keeps_storage=keeps_storage, grad=grad, keeps_grad=keeps_grad)
            if not keeps_storage:
                for sharded, found in zip(engine.optimizers, states, strict=True):
                    sharded.reload(bucket, found)

        comm.together(f"restaging {bucket.label}", move_in)
        bucket.show_at_rest(values, came_whole=came_whole)
    if not keeps_storage:
        comm.streams.accelerator.synchronize()
        storage.free()
