"""Groups of one mesh axis, of which a trace names only that of its own rank.

    mesh axis      members of a group are `stride` apart, and `stride` groups interleave, so that they tile the ranks
    other groups   shifted copies whose ranks are of the same classes, if none overlap

Source: torch's DeviceMesh numbers ranks in row-major order.
"""

from __future__ import annotations

import numpy as np

from meshwright.spec.trace.trace import Ints
from meshwright.spec.trace.traces import Traces


def sibling_groups(group: tuple[int, ...], traces: Traces) -> Ints:
    """Return the groups of the same axis and the same classes, members in the same order [groups, members]."""
    ranks = np.array(group)
    rows = _of_mesh(ranks, traces.world_size)
    rows = _shifted(ranks, traces.world_size) if rows is None else rows
    alike = rows[(traces.class_of_rank[rows] == traces.class_of_rank[ranks]).all(axis=1)]
    return alike if len(np.unique(alike)) == alike.size else ranks[None]


def groups_of_axis(group: tuple[int, ...], traces: Traces) -> Ints:
    """Return the groups of the group's mesh axis, of any classes [groups, members]."""
    rows = _of_mesh(np.array(group), traces.world_size)
    return sibling_groups(group, traces) if rows is None else rows


def mesh_groups(group: tuple[int, ...], world_size: int) -> Ints:
    """Return the groups of the group's mesh axis; the group alone if it is not part of a mesh [groups, members]."""
    rows = _of_mesh(np.array(group), world_size)
    return np.array([group]) if rows is None else rows


def _of_mesh(group: Ints, world_size: int) -> Ints | None:
    first, strides = int(group.min()), np.unique(np.diff(np.sort(group)))
    if len(group) == 1:
        return np.arange(world_size)[:, None]
    if len(strides) != 1:
        return None
    stride, width = int(strides[0]), int(strides[0]) * len(group)
    if first % width >= stride or world_size % width:
        return None
    firsts = (np.arange(0, world_size, width)[:, None] + np.arange(stride)).reshape(-1, 1)
    return np.asarray(firsts + (group - first))


def _shifted(group: Ints, world_size: int) -> Ints:
    return np.arange(-group.min(), world_size - group.max())[:, None] + group
