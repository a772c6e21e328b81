"""Fewer and earlier collectives in the graph of a model (layout.compile = "model"): buckets, and the order of its ops.

    bucket    all-gathers, reduce-scatters or all-reduces that follow each other, up to `num_elements`, are one:
              their tensors are joined before it and cut after it, as FSDP2 does for each of its units
    gather    of a bucket starts before the graph waits for the bucket that is used `prefetch` before it
    reduce    of a bucket starts when its last gradient exists; the graph waits for it when the next one has started

Both are pure functions of the graph, which is the same on all ranks, so that collectives are in one order everywhere.
Without the pass each parameter has a collective of its own, which the graph waits for at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode

_ops, _aten = torch.ops._c10d_functional, torch.ops.aten
_GATHER, _SCATTER, _SUM = (
    _ops.all_gather_into_tensor.default,
    _ops.reduce_scatter_tensor.default,
    _ops.all_reduce.default,
)
_WAIT = _ops.wait_tensor.default


class Buckets(NamedTuple):
    """Which collectives are joined, and how early they start."""

    groups: tuple[str, ...]
    """Names of the groups whose collectives are those of data parallelism."""
    num_elements: int
    """Most elements of the gathered tensors of a bucket; a larger tensor is a bucket of its own."""
    num_shards: int
    """Ranks that share parameters: sums over replicas are of shards, with so many fewer elements."""
    prefetch: int
    """Buckets that are gathered ahead of the one that is used."""

    def __call__(self, graph: fx.Graph) -> None:
        """Join and order the collectives of `graph` in place."""
        nodes = [node for node in graph.nodes if is_of_groups(node, self.groups)]
        for op in (_GATHER, _SCATTER, _SUM):
            most = self.num_elements // (self.num_shards if op is _SUM else 1)
            for bucket in _buckets([node for node in nodes if node.target is op], most):
                _join(graph, bucket)
        starts = [node for node in graph.nodes if is_of_groups(node, self.groups)]
        _Order(graph, starts, self.prefetch).apply()
        graph.eliminate_dead_code()
        graph.lint()


def is_of_groups(node: fx.Node, groups: Iterable[str]) -> bool:
    """Return whether a node starts a collective of parameters or gradients over one of `groups`."""
    if node.target not in (_GATHER, _SCATTER, _SUM) or node.args[-1] not in groups or _wait_of(node) is None:
        return False
    return node.target is not _GATHER or _is_of_inputs(node)


def _is_of_inputs(gather: fx.Node) -> bool:
    """Return whether a gather waits for no other collective, so that it can start before any."""
    waiting = [gather]
    while waiting:
        node = waiting.pop()
        if node.target is _WAIT:
            return False
        waiting += node.all_input_nodes
    return True


def _wait_of(start: fx.Node) -> fx.Node | None:
    users = list(start.users)
    return users[0] if len(users) == 1 and users[0].target is _WAIT else None


def _buckets(starts: Sequence[fx.Node], most: int) -> Iterator[list[fx.Node]]:
    """Yield the collectives of each bucket of `most` elements, in order; those of one group, op and type."""
    open_: dict[Any, list[fx.Node]] = {}
    size: dict[Any, int] = {}
    for start in starts:
        key = (start.args[1:], _value(start.args[0]).dtype)
        whole = max(_value(start.args[0]).numel(), _value(start).numel())
        if key in open_ and size[key] + whole > most:
            yield open_.pop(key)
        if key not in open_:
            open_[key], size[key] = [], 0
        open_[key].append(start)
        size[key] += whole
    yield from open_.values()


def _join(graph: fx.Graph, starts: list[fx.Node]) -> None:
    """Replace the collectives by one, before the first reader of any, and after all that they read."""
    if len(starts) == 1:
        return
    op, ranks = starts[0].target, _num_ranks(starts[0])
    # Only _Order makes the graph's order valid again.
    add = _Adder(graph, before=starts[0])
    inputs = [start.args[0] for start in starts]
    rows = 1 if op is _GATHER else ranks
    parts = [add(_aten.reshape.default, one, [rows, -1]) for one in inputs]
    joined = add(_aten.reshape.default, add(_aten.cat.default, parts, 1), [-1])
    start = add(op, joined, *starts[0].args[1:])
    done = add(_WAIT, start)
    rows = ranks if op is _GATHER else 1
    by_rank = add(_aten.reshape.default, done, [rows, -1])
    offset = 0
    for old in starts:
        wait, shape = _wait_of(old), list(_value(old).shape)
        assert wait is not None
        width = _value(old).numel() // rows
        part = add(_aten.slice.Tensor, by_rank, 1, offset, offset + width)
        wait.replace_all_uses_with(add(_aten.reshape.default, part, shape))
        offset += width
    for old in starts:
        graph.erase_node(*old.users)
        graph.erase_node(old)


def _num_ranks(start: fx.Node) -> int:
    """Return the ranks of a gather's or a scatter's group; 1 for a sum, whose tensors are whole on each rank."""
    if start.target is _SUM:
        return 1
    ranks: Any = start.args[1] if start.target is _GATHER else start.args[2]
    return int(ranks)


class _Adder:
    """Callable that adds a node, with the fake tensor that it has as its value."""

    def __init__(self, graph: fx.Graph, before: fx.Node) -> None:
        self._graph, self._before = graph, before
        self._mode = detect_fake_mode([before.meta["val"]])

    def __call__(self, op: Callable[..., Any], *args: Any) -> fx.Node:
        """Return the node."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(op, args)
        assert self._mode is not None
        with self._mode:
            node.meta["val"] = op(*fx.map_arg(args, _value))
        return node


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


@dataclass
class _Order:
    """The order of a graph's nodes: gathers early, waits late, everything else as it was."""

    graph: fx.Graph
    starts: list[fx.Node]
    prefetch: int
    _done: dict[fx.Node, None] = field(default_factory=dict)
    _num_gathers: int = 0

    def __post_init__(self) -> None:
        self._gathers = [start for start in self.starts if start.target is _GATHER]
        waits = {start: _wait_of(start) for start in self.starts}
        self._gather_of = {waits[start]: number for number, start in enumerate(self._gathers)}
        self._reductions = {start: waits[start] for start in self.starts if start.target is not _GATHER}
        self._pending: dict[Any, fx.Node] = {}
        # In the graph's order, which is equal on all ranks, as that of a set is not.
        self._waits = dict.fromkeys(wait for wait in self._reductions.values() if wait is not None)
        self._late = _readers(self._waits)

    def apply(self) -> None:
        """Reorder the graph."""
        gathers = set(self._gathers)
        for node in list(self.graph.nodes):
            if node not in self._late and node not in gathers:
                self._add(node)
        for op in (_SCATTER, _SUM):
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
