"""Decide which ranks share shards: all (flat), or those of one node (hybrid sharding).

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
from typing import NamedTuple

from lightning_zero.settings import ConfigError, ZeroConfig

EXCHANGE_MAX_RANKS = 64  # with more ranks the messages of an all-to-all would be too small


class Topology(NamedTuple):
    """The groups of ranks that share shards, that together keep gathered units, and that sum gradients first."""

    shard_groups: tuple[tuple[int, ...], ...]  # ranks that share shards, in shard order
    node_groups: tuple[tuple[int, ...], ...] = ()  # empty: units are not kept
    apart: bool = False  # each shard group has parameters of its own; False: a copy of the same parameters
    sum_groups: tuple[tuple[int, ...], ...] = ()  # adjacent ranks of a shard group, on one node; empty: one level

    @property
    def shard_size(self) -> int:
        return len(self.shard_groups[0])

    def shard_group_of(self, rank: int) -> tuple[int, ...]:
        return next(group for group in self.shard_groups if rank in group)

    def node_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that keep units for the backward together with ``rank``; empty if units are not kept."""
        return next((group for group in self.node_groups if rank in group), ())

    def replicate_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same shards as ``rank``, including ``rank``."""
        place = self.shard_group_of(rank).index(rank)
        return (rank,) if self.apart else tuple(group[place] for group in self.shard_groups)

    def sum_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this node that sum exchanged gradients first; empty if all sum them at once."""
        return next((group for group in self.sum_groups if rank in group), ())

    def across_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks, one of each node, that add up what the ranks of their nodes have summed."""
        place, shards = self.sum_group_of(rank).index(rank), self.shard_group_of(rank)
        return tuple(group[place] for group in self.sum_groups if group[0] in shards)

    @property
    def same_params(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that have the same parameters: one of all ranks, unless ``apart``."""
        return self.shard_groups if self.apart else (tuple(sorted(sum(self.shard_groups, ()))),)


def flat(world_size: int) -> Topology:
    return Topology((tuple(range(world_size)),))


def by_part(all_ranks: Topology, parts: int) -> Topology:
    """Let each ``parts``-th rank share shards, for parameters of which adjacent ranks have different parts."""
    (ranks,) = all_ranks.shard_groups
    sum_groups = [group[part::parts] for part in range(parts) for group in all_ranks.sum_groups]
    return Topology(tuple(ranks[part::parts] for part in range(parts)), apart=True, sum_groups=_levels(sum_groups))


def in_levels(topology: Topology, names: Sequence[str]) -> Topology:
    """Let ranks that share shards sum exchanged gradients within nodes first. ``names``: the node of each rank."""
    found = [tuple(g) for shards in topology.shard_groups for _, g in itertools.groupby(shards, key=names.__getitem__)]
    return topology._replace(sum_groups=_levels(found) if len(found) > len(topology.shard_groups) else ())


def _levels(groups: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return ``groups`` if all have the same number of ranks, more than one; else nothing."""
    sizes = {len(group) for group in groups}
    return tuple(groups) if len(sizes) == 1 and sizes != {1} else ()


def by_node(names: Sequence[str], hybrid_shard: str = "node") -> Topology:
    """Let the ranks of a node share shards. ``names``: each rank's node. Raises ConfigError if nodes are unequal."""
    if not is_even(names):
        counts = ", ".join(f"{count} on {name}" for name, count in Counter(names).items())
        raise ConfigError(
            f"zero.hybrid_shard={hybrid_shard}: expected the same number of ranks on every node, got {counts}. "
            "Start as many on each, or set zero.hybrid_shard=flat."
        )
    return Topology(tuple(tuple(r for r, n in enumerate(names) if n == node) for node in dict.fromkeys(names)))


def within_nodes(names: Sequence[str]) -> Topology:
    """Shard over all ranks, but keep units for the backward within nodes. Raises ConfigError if that has no effect, as
    with one node. ``names``: the node of each rank."""
    nodes = by_node(names, "node_backward").shard_groups
    check_nodes(len(nodes), len(nodes[0]))
    return Topology(flat(len(names)).shard_groups, nodes)


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
    """Return the groups of ``rank`` that combine a small message of all ranks, one after the other.

    Read ranks as numbers whose digits have these groups' sizes as bases: the ranks of a group differ in one digit. A
    ring of 1,024 ranks takes 2,046 hops, one behind the other; five exchanges among four ranks take 5.
    """
    found, stride = list[list[int]](), 1
    while stride < world_size:
        left = world_size // stride
        base = next(base for base in (4, *range(2, left + 1)) if left % base == 0)
        first = rank - rank // stride % base * stride
        found.append([first + digit * stride for digit in range(base)])
        stride *= base
    return found


# -- ranks that share a sequence --------------------------------------------------------------------------------------


def sequence_group_of(rank: int, size: int) -> range:
    """Return the ``size`` adjacent ranks that share a sequence with ``rank``. These groups do not affect the shards."""
    first = rank - rank % size
    return range(first, first + size)


def check_groups(config: ZeroConfig, world_size: int) -> None:
    """Raise ConfigError if the ranks cannot be divided into groups as sequence, tensor and expert parallelism ask."""
    for key in ("sequence_parallel", "tensor_parallel", "expert_parallel"):
        if world_size % (size := getattr(config, key)):
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ConfigError(
                f"zero.{key}: expected a number that divides the {world_size} rank(s) of the run ({divisors}), got "
                f"{size}. Change zero.{key}, trainer.devices or trainer.num_nodes."
            )
