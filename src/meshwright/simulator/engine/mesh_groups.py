"""Sibling groups: the groups of one mesh axis, of which a trace names only that of its own rank.

    members of a group stand `stride` apart, and `stride` groups lie next to each other, so that they tile the ranks
    a group that is no such part of a mesh: shifted copies of it whose ranks are of the same classes, if none overlap

Source: torch's DeviceMesh numbers ranks row by row.
"""

from __future__ import annotations

import numpy as np

from meshwright.spec.trace.trace import Ints
from meshwright.spec.trace.traces import Traces


def sibling_groups(group: tuple[int, ...], traces: Traces) -> Ints:
    """Return the groups of the same axis and of the same classes, each member in the same place [groups, members]."""
    ranks = np.array(group)
    rows = _of_mesh(ranks, traces.world_size)
    rows = _shifted(ranks, traces.world_size) if rows is None else rows
    alike = rows[(traces.class_of_rank[rows] == traces.class_of_rank[ranks]).all(axis=1)]
    return alike if len(np.unique(alike)) == alike.size else ranks[None]


def groups_of_axis(group: tuple[int, ...], traces: Traces) -> Ints:
    """Return the groups of the group's mesh axis, whatever the classes of their ranks [groups, members]."""
    rows = _of_mesh(np.array(group), traces.world_size)
    return sibling_groups(group, traces) if rows is None else rows


def mesh_groups(group: tuple[int, ...], world_size: int) -> Ints:
    """Return the groups of the group's mesh axis; the group alone if it is no part of a mesh [groups, members]."""
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
