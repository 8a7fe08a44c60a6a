"""Plan where each role of a bucket (parameters, masters, gradients, state) is kept, from its stage and offload setting.

The *storage* is the memory of masters and optimizer state. :class:`ParamsRest` says where compute parameters are kept
between uses::

    stage, offload, precision            | full buffer       | storage               | params_rest
    0-2, fp32                            | parameters        | (a view of it)        | full_is_master
    0-2, bf16, or with offload           | parameters, a copy| masters, state        | full
    3, masters beside their parameters   | only while in use | masters, state        | storage
    3, parameters on another tier, files | only while in use | masters, state        | shard
    3, frozen parameters                 | only while in use | parameters            | storage
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from lightning_zero.planning.layout import BucketLayout, lay_out
from lightning_zero.planning.placement import ON_DEVICE, REPLICATED, Placement, StageRow, Tier, TierRow
from lightning_zero.planning.topology import EXCHANGE_MAX_RANKS
from lightning_zero.settings import StateDtype


class Role(Enum):
    """What memory is used for. Memory of the first four roles stays allocated between steps, other memory does not."""

    compute_param = "compute_param"
    master_param = "master_param"
    grad = "grad"
    optim_state = "optim_state"
    gathered = "gathered"  # parameters of units in use, and prefetched ones
    reducing = "reducing"  # unsharded gradients: filling, or in a reduction
    staging = "staging"  # buffers for transfers between tiers
    activation = "activation"  # the batch, and what a micro-batch needs beside parameters and gradients
    whole_copy = "whole_copy"  # the module between runs, one copy per host


RESTING = (Role.compute_param, Role.master_param, Role.grad, Role.optim_state)


class ParamsRest(Enum):
    """Where the compute parameters of a bucket are kept between uses."""

    full_is_master = "in the full buffer, which is the memory of the masters too"
    full = "in the full buffer, brought up to date from the masters after a step"
    storage = "in the storage of masters alone, from which each gather casts them"
    shard = "in a shard of their own, on the tier of compute_param"


class Itemsizes(NamedTuple):
    """Bytes per element of each role. Compute and master parameters of equal size have the same dtype."""

    compute: int
    master: int
    reduce: int  # of a gradient while it is summed
    grad: int
    wire: int = 0  # of a gradient in a message; 0: the same as reduce
    exchanged: bool = False  # gradients may be reduced by an all-to-all if the group is small enough
    state: StateDtype = StateDtype.fp32  # of resting optimizer state


@dataclass(frozen=True, slots=True)
class BucketShape:
    """The sizes of a bucket before it is sharded over ranks."""

    unit: int  # index of its unit; 0 is the root
    numels: tuple[int, ...]  # elements of its parameters, in order
    itemsizes: Itemsizes
    trainable: bool = True
    whole: bool = False  # replicated and on the device at every stage
    built: tuple[int, ...] | None = None  # bytes of each parameter in its original dtype; None: as masters
    beside: int = 0  # bytes of what decodes packed parameters; each rank has all of it
    parts: int = 1  # groups of ranks that have different parts of its parameters

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def built_nbytes(self) -> tuple[int, ...]:
        return self.built if self.built is not None else tuple(n * self.itemsizes.master for n in self.numels)


@dataclass(frozen=True)  # without slots, for cached_property
class BucketPlan:
    """A bucket with its layout over the ranks and the placement and tier of each role."""

    unit: int
    layout: BucketLayout
    row: StageRow
    tiers: TierRow
    itemsizes: Itemsizes
    trainable: bool = True
    even_alone: bool = False  # run collectives on a single rank too
    beside: int = 0  # bytes of what decodes packed parameters; each rank's device has all of it
    whole: bool = False  # replicated and on the device at every stage

    @property
    def _divided(self) -> bool:
        return self.layout.world_size > 1 or self.even_alone

    @cached_property
    def params_rest(self) -> ParamsRest:
        tiers = self.tiers
        whole = not self._divided and tiers.compute_param is Tier.device
        if self.row.compute_param is Placement.replicated or whole:
            apart = self.trainable and not (self.one_dtype and tiers.master is Tier.device)
            return ParamsRest.full if apart else ParamsRest.full_is_master
        # Parameters in files rest apart from the masters: otherwise each gather would read the optimizer state too.
        one_tier = tiers.master is tiers.compute_param is not Tier.nvme
        return ParamsRest.storage if one_tier or not self.trainable else ParamsRest.shard

    @cached_property
    def reshards(self) -> bool:
        """Return whether compute parameters are gathered for each use and dropped after it."""
        return self.params_rest in (ParamsRest.storage, ParamsRest.shard)

    @property
    def brought_to_gather(self) -> int:
        """Return the bytes that a rank copies to the device for each gather; 0 if its shard is on the device."""
        away = self.reshards and self.tiers.compute_param is not Tier.device
        return away * self.owned_numel * self.sent_itemsize

    @property
    def sent_itemsize(self) -> int:
        """Return the bytes per element in which parameters are copied to the device: those of the master dtype if
        masters in host memory are copied (the device then casts), else those of the compute dtype."""
        as_master = self.trainable and self.tiers.master is Tier.host and self.tiers.compute_param is not Tier.nvme
        return self.itemsizes.master if as_master else self.itemsizes.compute

    @cached_property
    def gathers_after_step(self) -> bool:
        """Return whether compute parameters stay gathered and are updated from the masters after each step."""
        return not self.reshards and ((self._divided and self.shards_master) or self.steps_on_host)

    @property
    def copies_master(self) -> bool:
        """Return whether the full buffer of parameters is a copy of the masters' storage, not the same memory."""
        return self.params_rest is not ParamsRest.full_is_master

    @property
    def params_are_masters(self) -> bool:
        """Return whether every rank always holds the complete masters as its parameters."""
        return not self.copies_master and not self.gathers_after_step

    @property
    def storage_tier(self) -> Tier:
        if not self.copies_master:
            return Tier.device
        return self.tiers.master if self.trainable else self.tiers.compute_param

    @property
    def storage_role(self) -> Role:
        """Return the role of the values in the storage: ``compute_param`` if they are also the compute parameters, in
        the same dtype; else ``master_param``."""
        if not self.copies_master or (self.params_rest is ParamsRest.storage and self.one_dtype):
            return Role.compute_param
        return Role.master_param if self.trainable else Role.compute_param

    @property
    def storage_itemsize(self) -> int:
        return self.itemsizes.master if self.trainable else self.itemsizes.compute

    @property
    def one_dtype(self) -> bool:
        return self.itemsizes.compute == self.itemsizes.master

    @cached_property
    def shards_master(self) -> bool:
        """Return whether a rank steps only its shard, so that gradients are reduce-scattered."""
        return self.row.master is Placement.sharded

    @cached_property
    def accumulates_locally(self) -> bool:
        """Return whether a rank adds up the gradients of all micro-batches of a step before gradients are reduced."""
        return self.row.grad is Placement.replicated

    @cached_property
    def steps_on_host(self) -> bool:
        return self.tiers.steps_on_host

    @cached_property
    def gathers_from_host(self) -> bool:
        return self.tiers.gathers_from_host

    @property
    def grads_on_host(self) -> bool:
        return self.tiers.grad is not Tier.device

    @property
    def owned_numel(self) -> int:
        """Return how many elements of the masters, and so of the optimizer state, a rank holds."""
        return self.layout.shard_numel if self.shards_master else self.layout.numel

    def owned_range(self, rank: int) -> tuple[int, int]:
        """Return the range of the bucket's elements whose masters and optimizer state ``rank`` holds."""
        return self.layout.shard_range(rank) if self.shards_master else (0, self.layout.numel)

    def state_numel(self, rank: int) -> int:
        """Return how many elements have optimizer state on ``rank``: its masters without the bucket's final padding."""
        low, high = self.owned_range(rank)
        return max(0, min(high, self.layout.used_numel) - low)

    def state_nbytes(self, numel: int) -> int:
        """Return the bytes of one optimizer state tensor of ``numel`` elements between steps."""
        return numel * (2 if self.itemsizes.state is StateDtype.bf16 else self.itemsizes.master)

    def exchanges(self, micro_batches: int = 1) -> bool:
        """Return whether gradients are reduced by an all-to-all, in a step of ``micro_batches`` backwards."""
        sizes = self.itemsizes
        # A local sum of gradients fits the wire dtype only if it was summed in the dtype of autograd's gradients.
        as_made = micro_batches == 1 or not self.accumulates_locally or sizes.grad == sizes.compute
        return sizes.exchanged and self._divided and self.layout.world_size <= EXCHANGE_MAX_RANKS and as_made

    def wire_itemsize(self, micro_batches: int = 1) -> int:
        """Return the bytes per element of a gradient in a message, in a step of ``micro_batches`` backwards."""
        return (self.itemsizes.wire if self.exchanges(micro_batches) else 0) or self.itemsizes.reduce

    def reduces_apart(self, micro_batches: int) -> bool:
        """Return whether gradients are reduced in a buffer other than that in which micro-batches accumulate."""
        waits = micro_batches > 1 and self.accumulates_locally
        return not (waits and self.wire_itemsize(micro_batches) == self.itemsizes.grad)

    @property
    def full_nbytes(self) -> int:
        """Return the bytes of all compute parameters of the bucket when gathered, with padding."""
        return self.layout.numel * self.itemsizes.compute


def place(
    shape: BucketShape, row: StageRow, tiers: TierRow, world_size: int, *, even_alone: bool = False
) -> BucketPlan:
    """Plan the bucket ``shape`` over ``world_size`` ranks, at the stage ``row`` and with the offload setting ``tiers``.
    ``even_alone``: run the bucket's collectives on a single rank too."""
    # A split bucket of one rank, beside sharded ones in its unit, is dropped and gathered with them after its step.
    even_alone |= shape.parts > 1 and tiers.steps_on_host
    return BucketPlan(
        shape.unit,
        lay_out(shape.numels, world_size // shape.parts),
        REPLICATED._replace(grad=row.grad) if shape.whole else row,
        ON_DEVICE if shape.whole else tiers,
        shape.itemsizes,
        shape.trainable,
        even_alone,
        shape.beside,
        shape.whole,
    )
