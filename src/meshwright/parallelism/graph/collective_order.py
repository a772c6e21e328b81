"""GraphOrder: the order of a graph's nodes in which gathers start early, and reductions are waited for late.

    gather    starts before the graph waits for the one that is used `prefetch` before it
    reduce    starts when its input exists; the graph waits for it when the next one of its kind has started

All other nodes stay in their order, each after what it reads. The order is a function of the graph alone, and so equal
on all ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

_ops = torch.ops._c10d_functional
GATHER, SCATTER, SUM = (
    _ops.all_gather_into_tensor.default,
    _ops.reduce_scatter_tensor.default,
    _ops.all_reduce.default,
)
WAIT = _ops.wait_tensor.default


def wait_of(start: fx.Node) -> fx.Node | None:
    """Return the wait for a collective, if that alone reads it."""
    users = list(start.users)
    return users[0] if len(users) == 1 and users[0].target is WAIT else None


@dataclass
class GraphOrder:
    """The order of a graph's nodes: gathers early, waits late, everything else as it was."""

    graph: fx.Graph
    starts: list[fx.Node]
    prefetch: int
    _done: dict[fx.Node, None] = field(default_factory=dict)
    _num_gathers: int = 0

    def __post_init__(self) -> None:
        self._gathers = [start for start in self.starts if start.target is GATHER]
        waits = {start: wait_of(start) for start in self.starts}
        self._gather_of = {waits[start]: number for number, start in enumerate(self._gathers)}
        self._reductions = {start: waits[start] for start in self.starts if start.target is not GATHER}
        self._pending: dict[Any, fx.Node] = {}
        # In the graph's order, which is equal on all ranks, as that of a set is not.
        self._waits = dict.fromkeys(wait for wait in self._reductions.values() if wait is not None)
        self._late = _readers(self._waits)

    def apply(self) -> None:
        """Reorder the graph."""
        gathers = set(self._gathers)
        for node in list(self.graph.nodes):
            if node.op != "output" and node not in self._late and node not in gathers:
                self._add(node)
        for op in (SCATTER, SUM):
            if op in self._pending:
                self._add_with_readers(self._pending[op])
        for node in self._late:
            self._add(node)
        (output,) = self.graph.find_nodes(op="output")
        for node in self._done:
            output.prepend(node)

    def _add(self, wanted: fx.Node) -> None:
        """Add a node after all that it reads; a wait for a gather after the gathers that start before it."""
        stack = [wanted]
        while stack:
            node = stack[-1]
            needed = [one for one in self._needed(node) if one not in self._done]
            if needed:
                stack += reversed(needed)
                continue
            stack.pop()
            if node not in self._done and node.op != "output":
                self._done[node] = None
                self._after(node)

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        number = self._gather_of.get(node)
        if number is None:
            return list(node.all_input_nodes)
        return self._gathers[: number + 1 + self.prefetch][self._first_open() :]

    def _first_open(self) -> int:
        while self._num_gathers < len(self._gathers) and self._gathers[self._num_gathers] in self._done:
            self._num_gathers += 1
        return self._num_gathers

    def _after(self, start: fx.Node) -> None:
        """After a reduction has started, wait for the one of its kind before it."""
        wait = self._reductions.get(start)
        if wait is None:
            return
        before, self._pending[start.target] = self._pending.get(start.target), wait
        if before is not None:
            self._add_with_readers(before)

    def _add_with_readers(self, wait: fx.Node) -> None:
        """Add a wait, and what can be computed from its result, up to the next wait."""
        if wait in self._done:
            return
        ready = [wait]
        while ready:
            node = ready.pop(0)
            is_other = node in self._waits and node is not wait
            if node.op != "output" and not is_other and all(one in self._done for one in node.all_input_nodes):
                self._add(node)
                ready += node.users


def _readers(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return `nodes` and all that read them, directly or not, inputs before their readers; the output is none."""
    waiting, found = list(nodes), dict[fx.Node, None]()
    while waiting:
        node = waiting.pop(0)
        if node not in found and node.op != "output":
            found[node] = None
            waiting += node.users
    return found
