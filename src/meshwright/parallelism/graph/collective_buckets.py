"""Buckets: fewer and earlier collectives in the graph of a model (layout.compile = "model").

All-gathers, reduce-scatters or all-reduces that follow each other, up to `num_elements`, become one: their tensors are
joined before it and cut after it, as FSDP2 does for each of its units. Without the pass each parameter has a collective
of its own, which the graph waits for at once. collective_order.py says when the new ones start.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode

from meshwright.parallelism.graph.collective_order import GATHER, SCATTER, SUM, WAIT, GraphOrder, wait_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class Buckets:
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
        for op in (GATHER, SCATTER, SUM):
            most = self.num_elements // (self.num_shards if op is SUM else 1)
            for bucket in _buckets([node for node in nodes if node.target is op], most):
                _join(graph, bucket)
        starts = [node for node in graph.nodes if is_of_groups(node, self.groups)]
        GraphOrder(graph, starts, self.prefetch).apply()
        graph.eliminate_dead_code()
        graph.lint()


def is_of_groups(node: fx.Node, groups: Iterable[str]) -> bool:
    """Return whether a node starts a collective of parameters or gradients over one of `groups`."""
    if node.target not in (GATHER, SCATTER, SUM) or str(node.args[-1]) not in groups or wait_of(node) is None:
        return False
    return _is_of_inputs(node) if node.target is GATHER else _is_of_outputs(node)


def _is_of_inputs(gather: fx.Node) -> bool:
    """Return whether a gather waits for no other collective, so that it can start before any."""
    waiting = [gather]
    while waiting:
        node = waiting.pop()
        if node.target is WAIT:
            return False
        waiting += node.all_input_nodes
    return True


def _is_of_outputs(reduction: fx.Node) -> bool:
    """Return whether no gradient depends on a reduction, as those do that follow gathered keys (cp).

    The group of cp may have the name of that of parameters.
    """
    waiting, seen = list(reduction.users), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node.target in (SCATTER, GATHER):
            return False
        if node not in seen:
            seen.add(node)
            waiting += node.users
    return True


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
    op: Any = starts[0].target
    ranks = _num_ranks(starts[0])
    # Only GraphOrder makes the graph's order valid again.
    add = _Adder(graph, before=starts[0])
    inputs = [start.args[0] for start in starts]
    rows = 1 if op is GATHER else ranks
    parts = [add(_aten.reshape.default, one, [rows, -1]) for one in inputs]
    joined = add(_aten.reshape.default, add(_aten.cat.default, parts, 1), [-1])
    start = add(op, joined, *starts[0].args[1:])
    done = add(WAIT, start)
    rows = ranks if op is GATHER else 1
    by_rank = add(_aten.reshape.default, done, [rows, -1])
    offset = 0
    for old in starts:
        wait, shape = wait_of(old), list(_value(old).shape)
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
    if start.target is SUM:
        return 1
    ranks: Any = start.args[1] if start.target is GATHER else start.args[2]
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
