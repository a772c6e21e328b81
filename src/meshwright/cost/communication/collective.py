"""RankGroup, where the ranks of one mesh axis lie, and its all-gather, reduce-scatter and all-reduce.

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

RankGroup: where the ranks of one mesh axis lie, and what one of them gets of the links when all communicate.
Ranks along the innermost axis of a mesh are neighbours, so the members of a group stand `stride` devices apart, the
product of the degrees of the axes inside. With stride s, floor(domain / s) members, at least one, share a domain (an
NVLink domain, or a node). Where that does not divide the group, its ranks are spread evenly: 256 over domains of 72 are
4 times 64. Ignored: groups that straddle a domain's border because stride does not divide it.

    inside   min(all peers together, peers in the domain x rate to one peer)
    network  the device's share of its node's cards / spine
    spine    max(1, o x crossing)

A network may be oversubscribed o times between pods of P devices; crossing is the part of a pod's traffic that leaves
it. A ring or a pipeline leaves a pod once in each of `stride` sibling groups, by whole domains at least: crossing is
max(stride, domain) / P, at most 1, for a group wider than a pod. So rings of neighbours do not notice the spine, and
the outermost axis does in full. Of an all-to-all all but the pod's own part leaves: crossing is 1 - P / width. Of P2P
it is the number of ranks that send out of one pod at the same time, over P (pipeline_p2p.py).

Of these links a group takes in full the one that sets its pace, and of the other as much as has to keep up: its shares,
each at most 1. Where every pair of a domain has a link of its own (bytes_per_s_per_peer), these are of the links to the
group's members.

Source: rings over all rails as NCCL builds them; the rest is counting. Ignored: collisions of flows within a pod.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.communication.nccl_ctas import CTAS_PER_CARD
from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import Bools, Floats
from meshwright.errors import UnsupportedError
from meshwright.spec.machine.device import CollectiveKind

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


def async_all_reduce_s(total_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the seconds that an all-reduce adds to computation on the same cores, which continues until it is waited
    for; those of the whole all-reduce where that was not measured.
    """
    return where_measured("async-all-reduce", total_bytes, all_reduce_s(total_bytes, group, fabric), group, fabric)


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


@dataclass(frozen=True)
class RankGroup:
    """The groups of one axis, one element a configuration."""

    num_ranks: Floats
    """Ranks of one group."""
    num_domains: Floats
    """Domains that one group lies in."""
    stride: Floats
    """Devices from one member to the next."""

    @property
    def ranks_per_domain(self) -> Floats:
        """Return the members of a group in one domain, the mean where they are not equally many."""
        return self.num_ranks / self.num_domains

    @property
    def width(self) -> Floats:
        """Return the devices from the first member's to the one after the last's stride."""
        return self.num_ranks * self.stride


def group_of(stride: ArrayLike, num_ranks: ArrayLike, fabric: Fabric) -> RankGroup:
    """Return the groups of `num_ranks` ranks that stand `stride` devices apart."""
    ranks, apart = np.asarray(num_ranks, np.float64), np.asarray(stride, np.float64)
    per_domain = np.clip(np.floor(fabric.domain_size / apart), 1, ranks)
    return RankGroup(*np.broadcast_arrays(ranks, np.ceil(ranks / per_domain), apart))


def slowdown_share(group: RankGroup, fabric: Fabric) -> Floats:
    """Return by how much less a group's kernels slow down computation than usual ones: 1 without a limit on them."""
    in_domain = np.ceil(group.ranks_per_domain)
    across = np.minimum(fabric.usual_ctas, CTAS_PER_CARD * in_domain)
    usual = np.maximum(np.where(group.num_domains > 1, across, fabric.usual_ctas), 1.0)
    return np.where(fabric.usual_ctas > 0, np.minimum(fabric.max_ctas, usual) / usual, 1.0)


def lacks_link(group: RankGroup, fabric: Fabric) -> Bools:
    """Return which groups need a link without a rate; whatever they communicate takes nan seconds."""
    inside = (group.ranks_per_domain > 1) & np.isnan(fabric.intra_bytes_per_s)
    across = (group.num_domains > 1) & np.isnan(fabric.inter_bytes_per_s)
    return np.asarray(inside | across)


def require_links(group: RankGroup, fabric: Fabric) -> None:
    """Raise UnsupportedError naming the first cluster whose groups need a link without a rate."""
    lacking, clusters, num_domains = np.broadcast_arrays(lacks_link(group, fabric), fabric.cluster, group.num_domains)
    if not lacking.any():
        return
    first = lacking.ravel().argmax()
    name, across = clusters.ravel()[first], num_domains.ravel()[first] > 1
    network_is_unknown = across and np.isnan(np.broadcast_to(fabric.inter_bytes_per_s, lacking.shape).ravel()[first])
    what = "inter_node and num_nics_per_node" if network_is_unknown else "intra_node"
    raise UnsupportedError(
        f"cluster {name}: devices of one group must talk over a link whose rate is unknown: "
        f"set {what} in the cluster's catalogue entry, or choose another cluster.name"
    )


def inside_bytes_per_s(group: RankGroup, fabric: Fabric) -> Floats:
    """Return what a rank sends to its group inside the domain; inf for the only member there, who sends nothing."""
    peers = np.ceil(group.ranks_per_domain) - 1
    to_peers = np.maximum(peers, 1) * fabric.intra_bytes_per_s_per_peer
    return np.where(peers > 0, np.minimum(fabric.intra_bytes_per_s, to_peers), np.inf)


def joins_pairs(fabric: Fabric) -> Bools:
    """Return whether every pair of a domain's devices has a link of its own; with a switch a device has one for all."""
    return np.isfinite(fabric.intra_bytes_per_s_per_peer)


def neighbour_bytes_per_s(group: RankGroup, fabric: Fabric) -> Floats:
    """Return a rank's share of the network when groups send along a chain; inf for a group inside one domain."""
    return _across_domains(neighbour_crossing(group, fabric), group, fabric)


def spread_bytes_per_s(group: RankGroup, fabric: Fabric) -> Floats:
    """Return a rank's share of the network when every rank sends to every other; inf for a group inside one domain."""
    return _across_domains(spread_crossing(group, fabric), group, fabric)


def neighbour_shares(group: RankGroup, fabric: Fabric) -> tuple[Floats, Floats]:
    """Return which share of its link inside the domain, and of its network card, a rank takes as part of a ring."""
    # A ring passes the same bytes over both, the network's split over the members of a domain.
    network_s = 1 / (neighbour_bytes_per_s(group, fabric) * group.ranks_per_domain)
    return _shares(1 / inside_bytes_per_s(group, fabric), network_s)


def spread_shares(group: RankGroup, fabric: Fabric) -> tuple[Floats, Floats]:
    """Return the same when every rank sends to every other: bytes to peers of the same domain stay inside."""
    stays, leaves = group.ranks_per_domain - 1, group.num_ranks - group.ranks_per_domain
    return _shares(stays / inside_bytes_per_s(group, fabric), leaves / spread_bytes_per_s(group, fabric))


def neighbour_crossing(group: RankGroup, fabric: Fabric) -> Floats:
    """Return the part of a pod's traffic that leaves it when groups send along a chain; 0 for a group inside a pod."""
    crossing = np.minimum(np.maximum(group.stride, fabric.domain_size) / fabric.nonblocking_devices, 1.0)
    return np.where(group.width > fabric.nonblocking_devices, crossing, 0.0)


def spread_crossing(group: RankGroup, fabric: Fabric) -> Floats:
    """Return the same when every rank sends to every other."""
    return 1 - np.minimum(fabric.nonblocking_devices, group.width) / group.width


def network_bytes_per_s(crossing: Floats, fabric: Fabric) -> Floats:
    """Return what each sender gets of the network when a part `crossing` of its pod's traffic leaves the pod."""
    return np.asarray(fabric.inter_bytes_per_s / np.maximum(1.0, fabric.oversubscription * crossing))


def _across_domains(crossing: Floats, group: RankGroup, fabric: Fabric) -> Floats:
    return np.where(group.num_domains > 1, network_bytes_per_s(crossing, fabric), np.inf)


def _shares(inside_s: Floats, network_s: Floats) -> tuple[Floats, Floats]:
    slower_s = np.maximum(inside_s, network_s)
    is_used = slower_s > 0
    slower_s = np.where(is_used, slower_s, 1.0)
    return np.where(is_used, inside_s / slower_s, 0.0), np.where(is_used, network_s / slower_s, 0.0)
