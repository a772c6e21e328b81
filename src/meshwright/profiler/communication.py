"""Communication: one rank's part in a collective or a message, and when it began for all who take part.

A rank that comes early waits in it for the others. So what is communication begins when the last one is there; before
that it is waiting. Ranks are matched by order: the n-th collective of a group, the n-th message from one rank to
another. The clocks of the ranks are taken as equal, as they are within a host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.profiler.places import Place

_FUNCTIONAL_AXES = ("ep", "tp", "cp")
"""Axes along which the runtime's own functional collectives run; all others are FSDP2's or a pipeline's."""


@dataclass
class Communication:
    """One rank's part."""

    rank: int
    name: str
    axis: str
    group: tuple[int, ...]
    """Global ranks."""
    num_bytes: int
    place: Place
    issued_ns: int
    """When the host asked for it."""
    start_ns: int
    """When this rank was there."""
    end_ns: int
    stream: int
    source: int = -1
    """Global rank that a message comes from; -1 of collectives, and where the profile does not tell."""
    target: int = -1
    began_ns: int = 0
    """When all who take part were there, as far as their profiles are known."""

    @property
    def is_message(self) -> bool:
        """Return whether it is a message whose two ends are known."""
        return self.source >= 0 and self.target >= 0


def axis_of(name: str, description: str | None, fsdp_mark: str | None, groups: Mapping[str, Sequence[int]]) -> str:
    """Return the mesh axis of a collective by what is known of it, "" where it is along none.

    `description` is that of its process group, where anything tells it. A mesh takes torch's group of all ranks for an
    axis that spans them, so that `groups` does not list the axis.
    """
    if description is not None and description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    if fsdp_mark is not None:
        if "allreduce" in name:
            return "dp_replicate"
        return "expert_dp_shard" if "experts" in fsdp_mark else "fsdp"
    if name.split(".")[-1] in ("send", "recv_") and description is None:
        return "pp"
    if description is None and not name.startswith("_c10d_functional"):
        return ""
    unlisted = [axis for axis in _FUNCTIONAL_AXES if f"mesh_{axis}" not in groups]
    listed = [axis for axis in _FUNCTIONAL_AXES if len(groups.get(f"mesh_{axis}", ())) > 1]
    return next(iter(unlisted or listed), "")


def begin_together(all_ranks: Iterable[Communication]) -> None:
    """Fill in when each communication began for all who take part; a message ends for both when it is received."""
    collectives: dict[tuple[str, tuple[int, ...]], dict[int, list[Communication]]] = defaultdict(_by_rank)
    messages: dict[tuple[str, int, int], dict[int, list[Communication]]] = defaultdict(_by_rank)
    for one in sorted(all_ranks, key=lambda one: one.issued_ns):
        one.began_ns = one.start_ns
        if one.is_message:
            messages[one.axis, one.source, one.target][one.rank].append(one)
        elif one.source == one.target:
            collectives[one.axis, one.group][one.rank].append(one)
    for by_rank in (*collectives.values(), *messages.values()):
        for parts in zip(*by_rank.values(), strict=False):
            _meet(parts)


def _by_rank() -> dict[int, list[Communication]]:
    return defaultdict(list)


def _meet(parts: Sequence[Communication]) -> None:
    began_ns = max(part.start_ns for part in parts)
    if parts[0].is_message and len(parts) == 2:
        received_ns = next(part.end_ns for part in parts if part.rank == part.target)
        for part in parts:
            part.end_ns = received_ns
    for part in parts:
        part.began_ns = min(began_ns, part.end_ns)
