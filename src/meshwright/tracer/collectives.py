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
_MESH_PREFIX = "mesh_"


@dataclass(frozen=True)
class FoundCollective:
    """A collective or a message."""

    kind: RecordKind
    group: tuple[tuple[int, ...], str] | None
    """Global ranks of its group, in order, and the mesh axis that it is; None where the operator names no group."""
    peer: int = NONE
    """Global rank at the other end of a message."""


def collective_of(func: Any, args: Any) -> FoundCollective | None:
    """Return what collective the operator is, None of any other."""
    if func.namespace not in _NAMESPACES:
        return None
    found = group_of(args)
    ranks = None if found is None else tuple(dist.get_process_group_ranks(found))
    group = None if found is None or ranks is None else (ranks, _axis(found))
    if func._opname in ("send", "recv_"):
        kind = RecordKind.SEND if func._opname == "send" else RecordKind.RECEIVE
        peer = next((leaf for leaf in tree_leaves(args) if type(leaf) is int), NONE)
        return FoundCollective(kind, group, NONE if ranks is None or peer == NONE else ranks[peer])
    return FoundCollective(RecordKind.COLLECTIVE, group)


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


def _axis(group: ProcessGroup) -> str:
    """Return what torch's DeviceMesh wrote on the group: the name of its axis."""
    is_of_mesh = group.group_desc.startswith(_MESH_PREFIX)
    return group.group_desc.removeprefix(_MESH_PREFIX) if is_of_mesh else ""


def _by_name(name: str) -> ProcessGroup | None:
    try:
        return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return None
