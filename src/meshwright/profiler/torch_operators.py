"""Which events of a profile are operators that a trace records, and which only wrap them."""

from __future__ import annotations

from enum import Enum, auto
from functools import cache

import torch


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
    if not has_namespace or operator == "wait_tensor" or namespace in ("autograd", "torch", "profiler", "FSDP"):
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
