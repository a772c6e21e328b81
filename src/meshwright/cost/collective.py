"""All-gather, reduce-scatter and all-reduce of a group: rings, trees, and reductions inside the switch.

    ring   base + (n - m) x intra_step + (m - 1) x inter_step + S (n - 1) / n / B, twice all but base for an all-reduce
    B      min(link inside the domain, r x one device's share of the network)
    tree   base + 2 ((r - 1) x intra_step + log2(m) x inter_step) + 2 S (n - 1) / n / (.92 B)
    NVLS   nvls + S (1 + 1 / n) / NVLS rate, in one domain only

for n ranks in m domains with r = n / m members each, and S bytes of the whole tensor: what an all-gather returns, a
reduce-scatter is given, an all-reduce is given and returns. The members of a domain split the ring's traffic over their
shares of the network cards (multi-rail); the other devices of the node use theirs for groups beside this one. An
all-reduce takes the fastest of the three.

Source: NCCL's own cost model (src/graph/tuning.cc at 5067397). SimAI's published table of ring bandwidths (16 to 1,024
ranks, 16 MiB to 1 GiB) is met within 25 % with S the whole tensor; taken as S per rank it would be off by 100 times.
Ignored: PAT, which gathers one rank a node in log2(n) steps; NVLS between domains and for anything but all-reduce.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.fabric import Fabric, Floats
from meshwright.cost.group import Group

_TREE_BANDWIDTH = 0.92
"""Of a ring's bandwidth."""


def all_gather_s(total_bytes: ArrayLike, group: Group, fabric: Fabric) -> Floats:
    """Return the seconds in which every rank gets the whole tensor of `total_bytes`."""
    return _none_if_alone(fabric.base_s + _ring_pass_s(total_bytes, group, fabric), group)


def reduce_scatter_s(total_bytes: ArrayLike, group: Group, fabric: Fabric) -> Floats:
    """Return the seconds in which every rank gets its part of the sum of tensors of `total_bytes`."""
    return all_gather_s(total_bytes, group, fabric)


def all_reduce_s(total_bytes: ArrayLike, group: Group, fabric: Fabric) -> Floats:
    """Return the seconds in which every rank gets the sum of tensors of `total_bytes`; 0 bytes are a barrier."""
    ring_s = fabric.base_s + 2 * _ring_pass_s(total_bytes, group, fabric)
    switch_s = _switch_all_reduce_s(total_bytes, group, fabric)
    fastest_s = np.minimum(np.minimum(ring_s, _tree_all_reduce_s(total_bytes, group, fabric)), switch_s)
    return _none_if_alone(fastest_s, group)


def inside_bytes_per_s(group: Group, fabric: Fabric) -> Floats:
    """Return what one rank sends to its group inside the domain; inf for the only member there, who sends nothing."""
    peers = np.ceil(group.ranks_per_domain) - 1
    to_peers = np.maximum(peers, 1) * fabric.intra_bytes_per_s_per_peer
    return np.where(peers > 0, np.minimum(fabric.intra_bytes_per_s, to_peers), np.inf)


def _ring_pass_s(total_bytes: ArrayLike, group: Group, fabric: Fabric) -> Floats:
    num_network_steps = group.num_domains - 1
    num_inner_steps = group.num_ranks - group.num_domains
    steps_s = num_inner_steps * fabric.intra_step_s + num_network_steps * fabric.inter_step_s
    return np.asarray(steps_s + _bytes_moved(total_bytes, group) / _ring_bytes_per_s(group, fabric))


def _tree_all_reduce_s(total_bytes: ArrayLike, group: Group, fabric: Fabric) -> Floats:
    up_s = (group.ranks_per_domain - 1) * fabric.intra_step_s + np.log2(group.num_domains) * fabric.inter_step_s
    moved_s = _bytes_moved(total_bytes, group) / (_TREE_BANDWIDTH * _ring_bytes_per_s(group, fabric))
    return np.asarray(fabric.base_s + 2 * (up_s + moved_s))


def _switch_all_reduce_s(total_bytes: ArrayLike, group: Group, fabric: Fabric) -> Floats:
    can_add = (group.num_domains == 1) & (fabric.nvls_bytes_per_s > 0)
    num_bytes = np.asarray(total_bytes, np.float64) * (1 + 1 / group.num_ranks)
    return np.where(can_add, fabric.nvls_s + num_bytes / np.where(can_add, fabric.nvls_bytes_per_s, 1.0), np.inf)


def _ring_bytes_per_s(group: Group, fabric: Fabric) -> Floats:
    network = np.where(group.num_domains > 1, group.ranks_per_domain * fabric.inter_bytes_per_s, np.inf)
    return np.asarray(np.minimum(inside_bytes_per_s(group, fabric), network))


def _bytes_moved(total_bytes: ArrayLike, group: Group) -> Floats:
    return np.asarray(np.asarray(total_bytes, np.float64) * (group.num_ranks - 1) / group.num_ranks)


def _none_if_alone(seconds: Floats, group: Group) -> Floats:
    return np.where(group.num_ranks > 1, seconds, 0.0)
