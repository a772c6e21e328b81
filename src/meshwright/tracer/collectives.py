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
_MESH_PREFIX, _NAMELESS = "mesh_", "dim_"
_SHARDING, _MESSAGES, _FUNCTIONAL = ("fsdp", "efsdp"), ("pp", "cp"), ("ep", "tp", "cp")
_AXES_OF_OPERATOR = {
    "_allgather_base_": _SHARDING,
    "_reduce_scatter_base_": _SHARDING,
    "send": _MESSAGES,
    "recv_": _MESSAGES,
}
"""Axes along which the runtime calls an operator; functional collectives run along the others, the rest along none."""


@dataclass(frozen=True)
class FoundCollective:
    """A collective or a message."""

    kind: RecordKind
    group: tuple[tuple[int, ...], str] | None
    """Global ranks of its group, in order, and the mesh axis that it is; None where the operator names no group."""
    peer: int = NONE
    """Global rank at the other end of a message."""
    is_functional: bool = False
    """Whether it is waited for by an operator on its result, and not by a Work object."""


def collective_of(func: Any, args: Any) -> FoundCollective | None:
    """Return what collective the operator is, None of any other."""
    if func.namespace not in _NAMESPACES:
        return None
    found = group_of(args)
    ranks = None if found is None else tuple(dist.get_process_group_ranks(found))
    group = None if found is None or ranks is None else (ranks, _axis(found, func))
    if func._opname in ("send", "recv_"):
        kind = RecordKind.SEND if func._opname == "send" else RecordKind.RECEIVE
        peer = next((leaf for leaf in tree_leaves(args) if type(leaf) is int), NONE)
        return FoundCollective(kind, group, NONE if ranks is None or peer == NONE else ranks[peer])
    return FoundCollective(RecordKind.COLLECTIVE, group, is_functional=func.namespace != _NAMESPACES[0])


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


def _axis(group: ProcessGroup, func: Any) -> str:
    """Return the mesh axis of a group: the name that torch's DeviceMesh wrote on it.

    For an axis that spans all ranks DeviceMesh takes the group of all ranks. Its axis is then one that the operator
    runs along and that no group is named after, if the runtime's own meshes are there.
    """
    if group.group_desc.startswith(_MESH_PREFIX):
        name = group.group_desc.removeprefix(_MESH_PREFIX)
        # FSDP2 splits its mesh itself for reshard_after_forward = n, and gives it no names.
        return _SHARDING[0] if name.startswith(_NAMELESS) and func._opname in _AXES_OF_OPERATOR else name
    named = {one.group_desc.removeprefix(_MESH_PREFIX) for one in dist.distributed_c10d._world.pg_map}
    if not named & {"pp", "dp_replicate"}:
        return ""
    axes = _AXES_OF_OPERATOR.get(func._opname, _FUNCTIONAL if func.namespace != "c10d" else ())
    return next((axis for axis in axes if axis not in named), "")


def _by_name(name: str) -> ProcessGroup | None:
    try:
        return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return None
