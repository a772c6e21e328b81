"""Communication ops in a profile, when each started on all of its ranks, and which events are operators at all.

A rank that arrives early waits for the others. Communication starts when the last rank has arrived; before that a rank
waits. Ops are matched across ranks by order: the n-th collective of a group, the n-th message from one rank to another.
The clocks of the ranks are assumed equal, as within one host.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache

import torch

from meshwright.profiler.chrome_trace import StepLocation

_MARKS = ("autograd", "torch", "profiler", "FSDP", "DDP", "module")
"""Namespaces of marks, which are no operators."""
_FUNCTIONAL_AXES = ("ep", "tp", "cp")
"""Axes of the runtime's functional collectives; other axes belong to FSDP2 or the pipeline."""


@dataclass
class CommunicationOp:
    """One rank's part in a collective or a message."""

    rank: int
    name: str
    axis: str
    group: tuple[int, ...]
    """Global ranks."""
    num_bytes: int
    place: StepLocation
    issued_ns: int
    """Time of the call on the host."""
    start_ns: int
    """When this rank arrived."""
    end_ns: int
    stream: int
    source: int = -1
    """Global rank of the sender; -1 for collectives, and if unknown."""
    target: int = -1
    began_ns: int = 0
    """When all ranks with a profile had arrived."""

    @property
    def is_message(self) -> bool:
        """Return whether it is a P2P message with a known sender and receiver."""
        return self.source >= 0 and self.target >= 0


def axis_of(name: str, description: str | None, fsdp_mark: str | None, groups: Mapping[str, Sequence[int]]) -> str:
    """Return the mesh axis of a collective, "" for none.

    `description` is that of its process group, None if unknown. `groups` does not list an axis that spans all ranks,
    for which a mesh uses torch's default group.
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


def align_starts(all_ranks: Iterable[CommunicationOp]) -> None:
    """Set when each op started on all of its ranks; a message ends on both ranks when it is received."""
    collectives: dict[tuple[str, tuple[int, ...]], dict[int, list[CommunicationOp]]] = defaultdict(_by_rank)
    messages: dict[tuple[str, int, int], dict[int, list[CommunicationOp]]] = defaultdict(_by_rank)
    for one in sorted(all_ranks, key=lambda one: one.issued_ns):
        one.began_ns = one.start_ns
        if one.is_message:
            messages[one.axis, one.source, one.target][one.rank].append(one)
        elif one.source == one.target:
            collectives[one.axis, one.group][one.rank].append(one)
    for by_rank in (*collectives.values(), *messages.values()):
        for parts in zip(*by_rank.values(), strict=False):
            _align(parts)


def _by_rank() -> dict[int, list[CommunicationOp]]:
    return defaultdict(list)


def _align(parts: Sequence[CommunicationOp]) -> None:
    began_ns = max(part.start_ns for part in parts)
    if len(parts[0].group) == 1:
        # A rank alone waits for no other rank: for its own threads at most.
        began_ns = parts[0].issued_ns
    if parts[0].is_message and len(parts) == 2:
        received_ns = next(part.end_ns for part in parts if part.rank == part.target)
        for part in parts:
            part.end_ns = received_ns
    for part in parts:
        part.began_ns = min(began_ns, part.end_ns)


class EventRole(Enum):
    """Role of a host event."""

    OPERATOR = auto()
    COLLECTIVE = auto()
    """The call of a collective or a message, not the communication itself."""
    WRAPPER = auto()
    """No work of its own: autograd nodes, views, waits, and composite operators."""


@cache
def role_of(name: str) -> EventRole:
    """Return the role of an event such as aten::mm; OPERATOR for one that this torch does not know."""
    namespace, has_namespace, operator = name.partition("::")
    if not has_namespace or operator == "wait_tensor" or namespace in _MARKS:
        return EventRole.WRAPPER
    if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return EventRole.COLLECTIVE
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:
        return EventRole.OPERATOR
    overloads = [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]
    # Overloads on strings and lists run nothing on a device.
    overloads = [overload for overload in overloads if "Tensor" in str(overload._schema)]
    return EventRole.WRAPPER if all(_is_wrapper(overload) for overload in overloads) else EventRole.OPERATOR


def _is_wrapper(overload: torch._ops.OpOverload) -> bool:
    """Return whether an operator only makes a view, or is composed of others."""
    returns = overload._schema.returns
    is_view = bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return is_view or overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def trace_name(name: str) -> str:
    """Return an operator's name in a trace, without its overload: aten.mm for aten::mm."""
    return name.replace("::", ".", 1)
