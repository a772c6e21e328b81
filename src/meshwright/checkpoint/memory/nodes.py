"""Nodes: which ranks share a machine, and which node keeps the copies of which."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Nodes:
    """The ranks by node, numbered in the order of their first ranks; node n keeps copies of node n - 1."""

    hosts: tuple[str, ...]
    """Name of the machine of each rank, by rank."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the host name of each node."""
        return tuple(dict.fromkeys(self.hosts))

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return self.names.index(self.hosts[rank])

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node, in order."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.names[node]]

    def is_leader(self, rank: int) -> bool:
        """Return whether this rank does what is done once on its node."""
        return self.hosts.index(self.hosts[rank]) == rank

    def target_of(self, rank: int) -> int | None:
        """Return the rank of the next node to which `rank` sends its files; None where there is one node."""
        if len(self.names) == 1:
            return None
        node = self.node_of(rank)
        of_next = self.ranks_of((node + 1) % len(self.names))
        return of_next[self.ranks_of(node).index(rank) % len(of_next)]

    def sources_of(self, rank: int) -> list[int]:
        """Return the ranks whose files `rank` receives, in order."""
        return [source for source in range(len(self.hosts)) if self.target_of(source) == rank]

    def member_for(self, node: int, number: int) -> int:
        """Return the rank that does the work of this number on `node`, so that its ranks share it."""
        ranks = self.ranks_of(node)
        return ranks[number % len(ranks)]

    def kept_on(self, node: int, num_bytes: Sequence[int]) -> int:
        """Return the bytes of one copy on `node`: of its ranks and of those that it keeps for the node before.

        `num_bytes` is what each rank writes, by rank.
        """
        kept = {node, (node - 1) % len(self.names)}
        return sum(size for rank, size in enumerate(num_bytes) if self.node_of(rank) in kept)
