"""All-gather, reduce-scatter and all-reduce of a group: rings, trees, and reductions inside the switch.

    ring   base + (n - m) x intra_step + (m - 1) x inter_step + S (n - 1) / n / B, twice all but base for an all-reduce
    B      min(link inside the domain, r x one device's share of the network)
    tree   base + 2 ((r - 1) x intra_step + log2(m) x inter_step) + 2 S (n - 1) / n / (.92 B)
    NVLS   nvls + S (1 + 1 / n) / NVLS rate, in one domain only

for n ranks in m domains of r = n / m members each, and S bytes of the whole tensor: what an all-gather returns, a
reduce-scatter is given, an all-reduce is given and returns. The members of a domain split the ring's traffic over their
shares of the network cards (multi-rail); the other devices of the node use theirs for groups next to this one. An
all-reduce takes the fastest of the three.

Source: NCCL's own cost model (src/graph/tuning.cc at 5067397). SimAI's published table of ring bandwidths (16 to 1,024
ranks, 16 MiB to 1 GiB) is met within 25 % with S the whole tensor; taken as S per rank it would be off by 100 times.
Ignored: PAT, which gathers one rank a node in log2(n) steps; NVLS between domains and for anything but all-reduce.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.arrays import Floats
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.communication.group import RankGroup, inside_bytes_per_s, neighbour_bytes_per_s
from meshwright.cost.constants import fixed_constant
from meshwright.spec.machine.figure import CollectiveKind

_TREE_BANDWIDTH = fixed_constant("tree_bandwidth")


def all_gather_s(total_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the seconds in which every rank gets the whole tensor of `total_bytes`."""
    return where_measured("all-gather", total_bytes, _ring_s(total_bytes, group, fabric), group, fabric)


def reduce_scatter_s(total_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the seconds in which every rank gets its part of the sum of tensors of `total_bytes`."""
    return where_measured("reduce-scatter", total_bytes, _ring_s(total_bytes, group, fabric), group, fabric)


def all_reduce_s(total_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the seconds in which every rank gets the sum of tensors of `total_bytes`; 0 bytes are a barrier."""
    ring_s = _ring_s(total_bytes, group, fabric, num_passes=2)
    tree_s = _tree_all_reduce_s(total_bytes, group, fabric)
    switch_s = _switch_all_reduce_s(total_bytes, group, fabric)
    fastest_s = np.minimum(np.minimum(ring_s, tree_s), switch_s)
    return where_measured("all-reduce", total_bytes, fastest_s, group, fabric)


def where_measured(
    kind: CollectiveKind, num_bytes: ArrayLike, formula_s: Floats, group: RankGroup, fabric: Fabric
) -> Floats:
    """Return what was measured inside a domain, `formula_s` where nothing was, and 0 in a group of one."""
    if not fabric.measured.is_empty:
        latency_s, s_per_byte = fabric.measured.read(kind, group.num_ranks, fabric.measured_at)
        measured_s = latency_s + np.asarray(num_bytes, np.float64) * s_per_byte * fabric.measured_slowdown
        formula_s = np.where(np.isnan(measured_s) | (group.num_domains > 1), formula_s, measured_s)
    return np.where(group.num_ranks > 1, formula_s, 0.0)


def _ring_s(total_bytes: ArrayLike, group: RankGroup, fabric: Fabric, num_passes: int = 1) -> Floats:
    num_network_steps = group.num_domains - 1
    num_inner_steps = group.num_ranks - group.num_domains
    steps_s = num_inner_steps * fabric.intra_step_s + num_network_steps * fabric.inter_step_s
    moved_s = _bytes_moved(total_bytes, group) / _ring_bytes_per_s(group, fabric)
    return np.asarray(fabric.base_s + num_passes * (steps_s + moved_s))


def _tree_all_reduce_s(total_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    up_s = (group.ranks_per_domain - 1) * fabric.intra_step_s + np.log2(group.num_domains) * fabric.inter_step_s
    moved_s = _bytes_moved(total_bytes, group) / (_TREE_BANDWIDTH * _ring_bytes_per_s(group, fabric))
    return np.asarray(fabric.base_s + 2 * (up_s + moved_s))


def _switch_all_reduce_s(total_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    can_add = (group.num_domains == 1) & (fabric.nvls_bytes_per_s > 0)
    num_bytes = np.asarray(total_bytes, np.float64) * (1 + 1 / group.num_ranks)
    return np.where(can_add, fabric.nvls_s + num_bytes / np.where(can_add, fabric.nvls_bytes_per_s, 1.0), np.inf)


def _ring_bytes_per_s(group: RankGroup, fabric: Fabric) -> Floats:
    network = group.ranks_per_domain * neighbour_bytes_per_s(group, fabric)
    return np.minimum(inside_bytes_per_s(group, fabric), network)


def _bytes_moved(total_bytes: ArrayLike, group: RankGroup) -> Floats:
    return np.asarray(np.asarray(total_bytes, np.float64) * (group.num_ranks - 1) / group.num_ranks)
