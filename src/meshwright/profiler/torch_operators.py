"""role_of: which of a profile's events are the operators that a trace records, too, and which only lead to them."""

from __future__ import annotations

from enum import Enum, auto
from functools import cache

import torch


class Role(Enum):
    """What an event of the host stands for."""

    OPERATOR = auto()
    COLLECTIVE = auto()
    """The call of a collective or a message, not the communication itself."""
    PASSAGE = auto()
    """Nothing by itself: autograd's nodes, views, waits, and operators that torch writes in terms of others."""


@cache
def role_of(name: str) -> Role:
    """Return what an event such as aten::mm stands for.

    An operator that this torch does not know counts as an operator: its code may be elsewhere.
    """
    namespace, has_namespace, operator = name.partition("::")
    if not has_namespace or operator == "wait_tensor" or namespace in ("autograd", "torch", "profiler", "FSDP"):
        return Role.PASSAGE
    if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return Role.COLLECTIVE
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:
        return Role.OPERATOR
    overloads = [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]
    # Some names have overloads on strings and lists, which are no operators on a device.
    overloads = [overload for overload in overloads if "Tensor" in str(overload._schema)]
    return Role.PASSAGE if all(_leads_elsewhere(overload) for overload in overloads) else Role.OPERATOR


def _leads_elsewhere(overload: torch._ops.OpOverload) -> bool:
    """Return whether an operator only makes a view, or is written in terms of others."""
    returns = overload._schema.returns
    is_view = bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return is_view or overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def trace_name(name: str) -> str:
    """Return aten.mm for aten::mm: what a trace calls the operator, without its overload."""
    return name.replace("::", ".", 1)
