"""Compute which ranks form groups, and this rank's index in each group. All arithmetic on ranks is in this file.

:class:`Ranks` has this rank's index in each group, and the divisor of sums of gradients. A :class:`Topology` decides
which ranks share shards: all ranks (flat), or the ranks of one node (hybrid sharding).

::

    flat, 2 nodes x 2 ranks      node, 2 nodes x 2 ranks
    shards   : 0 1 2 3           shards   : 0 1 | 2 3      gathers and reduce-scatters stay within a node
    replicas : -                 replicas : 0 2 | 1 3      reduced shards are summed across nodes

Under ``node_backward`` all ranks share shards, and each node keeps a copy of every dropped unit for the backward.

Where ranks of several nodes share shards, exchanged gradients are summed in two levels: by the ranks of a node, then
between nodes (the design of ZeRO++: Wang et al. 2023, arXiv:2306.10209).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_zero.settings import ConfigError, HybridShard, ZeroConfig

PARALLEL_KEYS = ("sequence_parallel", "tensor_parallel", "expert_parallel")
EXCHANGE_MAX_RANKS = 64  # with more ranks the messages of an all-to-all would be too small


class Topology(NamedTuple):
    """The groups of ranks that share shards, keep gathered units, or sum gradients on a node. Equal on all ranks."""

    shard_groups: tuple[tuple[int, ...], ...]  # ranks that share shards, in shard order
    node_groups: tuple[tuple[int, ...], ...] = ()  # empty: units are not kept
    apart: bool = False  # each shard group has parameters of its own; False: a copy of the same parameters
    sum_groups: tuple[tuple[int, ...], ...] = ()  # adjacent ranks of a shard group, on one node; empty: one level

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the index of the shard group of ``rank``, and the index of ``rank`` in that group."""
        return next((number, group.index(rank)) for number, group in enumerate(self.shard_groups) if rank in group)

    @property
    def same_params(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that have the same parameters: one of all ranks, unless ``apart``."""
        return self.shard_groups if self.apart else (tuple(sorted(sum(self.shard_groups, ()))),)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that take part in the same operation, in order, and this rank's index among them. ``size`` 0: no group."""

    ranks: tuple[int, ...]
    index: int
    size: int


class Ranks(NamedTuple):
    """This rank's index in each group of ranks, and the divisor of gradient sums. Other code only reads the values."""

    rank: int
    world_size: int
    topology: Topology
    batch: Group  # one rank for each batch that ranks compute at a time: ``index`` is that of this rank's batch
    same_batch: Group  # adjacent ranks that get one batch: those of ``sequence`` or ``tensor``
    sequence: Group  # adjacent ranks that divide each sequence of their batch
    tensor: Group  # adjacent ranks that have parts of large matrices
    expert: Group  # adjacent ranks that divide the experts of a mixture
    parts: Group  # adjacent ranks among which ``tensor`` or ``expert`` divides these parameters; size 1: undivided
    shard: Group  # ranks that share shards, in shard order
    replicate: Group  # ranks that have the same shards: ``index`` is that of this rank's replica
    node: Group  # ranks of a node that together keep gathered units for the backward; size 0: units are not kept
    sum: Group  # ranks of a node that sum exchanged gradients first; size 0: all ranks sum them at once
    across: Group  # ranks, one of each node, that add up these sums
    # What a sum of gradients is divided by. Whole parameters: all ranks, since those with the same batch add equal
    # gradients, or gradients of their parts of a sequence that count ``size`` times. Parameters in parts: all batches,
    # since the ranks with one part of a matrix have each batch once, and experts receive the tokens of all ranks.
    grad_divisor: int

    @classmethod
    def locate(cls, rank: int, topology: Topology, config: ZeroConfig | None = None) -> Ranks:
        """Return the groups of ``rank``. ``config`` has the sizes of sequence, tensor and expert parallelism, which are
        1 if it is None. Raises ConfigError if a size does not divide the number of ranks."""
        world_size = sum(map(len, topology.shard_groups))
        check_groups(config, world_size)
        sequence, tensor, expert = (_adjacent(rank, getattr(config, key, 1)) for key in PARALLEL_KEYS)
        same_batch = sequence if sequence.size > 1 else tensor  # settings refuse both
        batch = _group_of(rank, range(same_batch.index, world_size, same_batch.size))
        parts = _adjacent(rank, len(topology.shard_groups) if topology.apart else 1)
        shard = _group_of(rank, *topology.shard_groups)
        copies = [rank] if topology.apart else [group[shard.index] for group in topology.shard_groups]
        node, first = _group_of(rank, *topology.node_groups), _group_of(rank, *topology.sum_groups)
        across = _group_of(rank, [group[first.index] for group in topology.sum_groups if group[0] in shard.ranks])
        of_shards = shard, _group_of(rank, copies), node, first, across
        grad_divisor = batch.size if topology.apart else world_size
        return cls(
            rank, world_size, topology, batch, same_batch, sequence, tensor, expert, parts, *of_shards, grad_divisor
        )


def _group_of(rank: int, *groups: Sequence[int]) -> Group:
    ranks = next((tuple(group) for group in groups if rank in group), ())
    return Group(ranks, ranks.index(rank) if ranks else 0, len(ranks))


def _adjacent(rank: int, size: int) -> Group:
    first = rank - rank % size
    return _group_of(rank, range(first, first + size))


def flat(world_size: int) -> Topology:
    return Topology((tuple(range(world_size)),))


def by_part(all_ranks: Topology, parts: int) -> Topology:
    """Return the topology of parameters that are split into ``parts`` parts, one on each of ``parts`` adjacent ranks.
    Every ``parts``-th rank has the same part, and these ranks share its shards. ``all_ranks``: the flat topology."""
    (ranks,) = all_ranks.shard_groups
    sum_groups = [group[part::parts] for part in range(parts) for group in all_ranks.sum_groups]
    return Topology(tuple(ranks[part::parts] for part in range(parts)), apart=True, sum_groups=_levels(sum_groups))


def over_nodes(names: Sequence[str], hybrid: HybridShard = HybridShard.flat, *, exchanges: bool = False) -> Topology:
    """Return the topology for ``zero.hybrid_shard=hybrid``. Raises ConfigError if the nodes lack what ``hybrid``
    requires: equal numbers of ranks, or several nodes of several ranks.

    Args:
        names: the node of each rank.
        exchanges: whether an all-to-all reduces gradients. If several nodes share shards, each node's ranks sum first.
    """
    nodes = tuple(tuple(r for r, n in enumerate(names) if n == node) for node in dict.fromkeys(names))
    if hybrid is not HybridShard.flat and not is_even(names):
        counts = ", ".join(f"{count} on {name}" for name, count in Counter(names).items())
        raise ConfigError(
            f"zero.hybrid_shard={hybrid.name}: expected the same number of ranks on every node, got {counts}. "
            "Start as many on each, or set zero.hybrid_shard=flat."
        )
    keeps = hybrid is HybridShard.node_backward
    if keeps:
        check_nodes(len(nodes), len(nodes[0]))
    found = flat(len(names)) if hybrid is not HybridShard.node else Topology(nodes)
    runs = [tuple(g) for shards in found.shard_groups for _, g in itertools.groupby(shards, key=names.__getitem__)]
    in_levels = exchanges and len(found.shard_groups[0]) <= EXCHANGE_MAX_RANKS and len(runs) > len(found.shard_groups)
    return found._replace(node_groups=nodes if keeps else (), sum_groups=_levels(runs) if in_levels else ())


def _levels(groups: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return ``groups`` if all have the same number of ranks and more than one rank; else an empty tuple."""
    sizes = {len(group) for group in groups}
    return tuple(groups) if len(sizes) == 1 and sizes != {1} else ()


def check_nodes(nodes: int, ranks: int) -> None:
    """Raise ConfigError if ``node_backward`` would have no effect on ``nodes`` nodes of ``ranks`` ranks."""
    if nodes > 1 and ranks > 1:
        return
    got, why = ("one node", "gathers stay on it anyway") if nodes == 1 else ("one", "there is nobody to gather from")
    raise ConfigError(
        f"zero.hybrid_shard=node_backward: expected several nodes of several ranks each, got {got}"
        f"{'' if nodes == 1 else ' rank on each'} ({why}). Set zero.hybrid_shard=flat."
    )


def is_even(names: Sequence[str]) -> bool:
    """Return whether all nodes have the same number of ranks."""
    return len(set(Counter(names).values())) == 1


def rounds_of(rank: int, world_size: int) -> list[list[int]]:
    """Return groups that contain ``rank``. All-reduces in these groups, one after another, equal one all-reduce over
    all ranks. In the mixed radix whose bases are the groups' sizes, the ranks of a group differ in one digit. A ring
    all-reduce of 1,024 ranks takes 2,046 successive hops; five exchanges among four ranks each take 5."""
    found, stride = list[list[int]](), 1
    while stride < world_size:
        left = world_size // stride
        base = next(base for base in (4, *range(2, left + 1)) if left % base == 0)
        first = rank - rank // stride % base * stride
        found.append([first + digit * stride for digit in range(base)])
        stride *= base
    return found


def check_groups(config: ZeroConfig | None, world_size: int) -> None:
    """Raise ConfigError if the size of sequence, tensor or expert parallelism does not divide ``world_size``."""
    for key in PARALLEL_KEYS:
        if world_size % (size := getattr(config, key, 1)):
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ConfigError(
                f"zero.{key}: expected a number that divides the {world_size} rank(s) of the run ({divisors}), got "
                f"{size}. Change zero.{key}, trainer.devices or trainer.num_nodes."
            )
