"""choose: the newest copy in memory that the nodes can still put together, from what each of them holds; no torch."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.checkpoint.memory.nodes import Nodes


class Held(NamedTuple):
    """What one node holds of one copy."""

    step: int
    save_id: str
    num_files: int
    """Ranks that wrote it."""
    files: frozenset[int]
    """Ranks whose manifest and data this node has."""


class ChosenCopy(NamedTuple):
    """A copy whose files are all held by some node."""

    step: int
    save_id: str
    sources: tuple[int, ...]
    """Node from which each rank's file is read, by the rank that wrote it."""


def choose(holdings: Sequence[Sequence[Held]], nodes: Nodes) -> ChosenCopy | None:
    """Return the newest copy of which every file is on some node, by `holdings[node]`; None if there is none.

    A file is read on the node of the rank of its number, where that has it: on the layout that wrote it nothing moves.
    """
    holders: dict[tuple[int, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    num_files: dict[tuple[int, str], int] = {}
    for node, of_node in enumerate(holdings):
        for held in of_node:
            key = held.step, held.save_id
            num_files[key] = held.num_files
            for file in held.files:
                holders[key][file].append(node)
    for key in sorted(num_files, reverse=True):
        by_file = holders[key]
        if all(file in by_file for file in range(num_files[key])):
            sources = tuple(_nearest(file, by_file[file], nodes) for file in range(num_files[key]))
            return ChosenCopy(*key, sources)
    return None


def without(holdings: Sequence[Sequence[Held]], save_id: str, damaged: Sequence[tuple[int, int]]) -> list[list[Held]]:
    """Return `holdings` without the files of one copy that are `damaged`, as (node, file)."""
    return [
        [
            held._replace(files=held.files - {file for where, file in damaged if where == node})
            if held.save_id == save_id
            else held
            for held in of_node
        ]
        for node, of_node in enumerate(holdings)
    ]


def _nearest(file: int, holders: Sequence[int], nodes: Nodes) -> int:
    own = nodes.node_of(file) if file < len(nodes.hosts) else -1
    return own if own in holders else holders[0]
