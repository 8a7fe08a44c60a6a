"""Nodes, and which ranks share shards: all of them (flat), or those of one node (hybrid sharding).

::

    flat, 2 nodes x 2 ranks      node, 2 nodes x 2 ranks
    shards   : 0 1 2 3           shards   : 0 1 | 2 3      gathers and reduce-scatters stay within a node
    replicas : -                 replicas : 0 2 | 1 3      reduced shards are summed across nodes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lightning_zero.config import ConfigError


class Topology(NamedTuple):
    """How the ranks of a group are divided.

    Attributes:
        shard_groups: ranks that share shards, in the order of the shards.
        nodes: the node of each rank, as a number in the order in which nodes occur.
    """

    shard_groups: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]

    @property
    def shard_size(self) -> int:
        return len(self.shard_groups[0])

    @property
    def replicas(self) -> int:
        return len(self.shard_groups)

    def shard_group_of(self, rank: int) -> tuple[int, ...]:
        return next(group for group in self.shard_groups if rank in group)

    def replicate_group_of(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same shards as ``rank``, itself among them."""
        place = self.shard_group_of(rank).index(rank)
        return tuple(group[place] for group in self.shard_groups)

    def share_from_other_nodes(self, rank: int, ranks: Sequence[int]) -> float:
        """The fraction of ``ranks`` that are on other nodes than ``rank``."""
        return sum(self.nodes[other] != self.nodes[rank] for other in ranks) / len(ranks)


def flat(names: Sequence[str]) -> Topology:
    """All ranks share shards. ``names``: the node of each rank."""
    return Topology((tuple(range(len(names))),), _numbers(names))


def by_node(names: Sequence[str]) -> Topology:
    """The ranks of each node share shards; nodes hold replicas.

    Raises:
        ConfigError: nodes have different numbers of ranks.
    """
    if not is_even(names):
        counts = ", ".join(f"{count} on {name}" for name, count in Counter(names).items())
        raise ConfigError(
            f"zero.comm.hierarchy=node: expected the same number of ranks on every node, got {counts}. Start as many "
            "on each, or set zero.comm.hierarchy=flat."
        )
    numbers = _numbers(names)
    groups = tuple(tuple(r for r, n in enumerate(numbers) if n == node) for node in range(max(numbers) + 1))
    return Topology(groups, numbers)


def is_even(names: Sequence[str]) -> bool:
    """Whether all nodes have the same number of ranks."""
    return len(set(Counter(names).values())) == 1


def _numbers(names: Sequence[str]) -> tuple[int, ...]:
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(order[name] for name in names)
