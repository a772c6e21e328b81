"""Rates: what one rank gets of the links when its whole group communicates, its sibling groups doing the same.

    inside   min(all peers together, peers in the domain x rate to one peer)
    network  the device's share of its node's cards / spine
    spine    max(1, o x crossing)

A network may be oversubscribed o times between pods of P devices; crossing is the part of a pod's traffic that leaves
it. A ring or a pipeline leaves a pod once in each of `stride` sibling groups, by whole domains at least: crossing is
max(stride, domain) / P, at most 1, for a group wider than a pod. So rings of neighbours do not notice the spine, and
the outermost axis does in full. Of an all-to-all all but the pod's own part leaves: crossing is 1 - P / width. Of P2P
it is the number of ranks that send out of one pod at the same time, over P (point_to_point.py).

Of these links a group takes in full the one that sets its pace, and of the other as much as has to keep up: its shares,
each at most 1. Where every pair of a domain has a link of its own (bytes_per_s_per_peer), these are of the links to the
group's members.

Source: rings over all rails as NCCL builds them; the rest is counting. Ignored: collisions of flows within a pod.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.arrays import Bools, Floats
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.communication.group import RankGroup


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
