"""collective_of: which of torch's operators are collectives and messages, and among which ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._pytree import tree_leaves

from meshwright.spec.trace import NONE, RecordKind

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@dataclass(frozen=True)
class FoundCollective:
    """A collective or a message."""

    kind: RecordKind
    ranks: tuple[int, ...] | None
    """Global ranks of its group, in order; None where the operator names none."""
    peer: int = NONE
    """Global rank at the other end of a message."""


def collective_of(func: Any, args: Any) -> FoundCollective | None:
    """Return what collective the operator is, None of any other."""
    if func.namespace not in _NAMESPACES:
        return None
    group = group_of(args)
    ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
    if func._opname in ("send", "recv_"):
        kind = RecordKind.SEND if func._opname == "send" else RecordKind.RECEIVE
        peer = next((leaf for leaf in tree_leaves(args) if type(leaf) is int), NONE)
        return FoundCollective(kind, ranks, NONE if ranks is None or peer == NONE else ranks[peer])
    return FoundCollective(RecordKind.COLLECTIVE, ranks)


def group_of(args: Any) -> ProcessGroup | None:
    """Return the process group among an operator's arguments: a name, or a boxed group."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, ProcessGroup):
            return leaf
        if isinstance(leaf, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(leaf)
            except RuntimeError:
                continue
        if isinstance(leaf, str) and (group := _by_name(leaf)) is not None:
            return group
    return None


def _by_name(name: str) -> ProcessGroup | None:
    try:
        return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return None
