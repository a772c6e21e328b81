"""Rates: what one rank gets of the links when its whole group communicates, its sibling groups doing the same.

    inside   min(all peers together, peers in the domain x rate to one peer)
    network  the device's share of its node's cards / spine
    spine    max(1, o x crossing)

A network may be oversubscribed o times between pods of P devices; crossing is the part of a pod's traffic that leaves
it. A ring or a pipeline leaves a pod once in each of `stride` sibling groups, by whole domains at least: crossing is
max(stride, domain) / P, at most 1, for a group wider than a pod. So rings of neighbours do not notice the spine, and
the outermost axis does in full. Of an all-to-all all but the pod's own part leaves: crossing is 1 - P / width. Of P2P
it is the number of ranks that send out of one pod at the same time, over P (point_to_point.py).

Source: rings over all rails as NCCL builds them; the rest is counting. Ignored: collisions of flows within a pod.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.fabric import Fabric, Floats
from meshwright.cost.group import Group


def inside_bytes_per_s(group: Group, fabric: Fabric) -> Floats:
    """Return what a rank sends to its group inside the domain; inf for the only member there, who sends nothing."""
    peers = np.ceil(group.ranks_per_domain) - 1
    to_peers = np.maximum(peers, 1) * fabric.intra_bytes_per_s_per_peer
    return np.where(peers > 0, np.minimum(fabric.intra_bytes_per_s, to_peers), np.inf)


def neighbour_bytes_per_s(group: Group, fabric: Fabric) -> Floats:
    """Return a rank's share of the network when groups send along a chain; inf for a group inside one domain."""
    return _across_domains(neighbour_crossing(group, fabric), group, fabric)


def spread_bytes_per_s(group: Group, fabric: Fabric) -> Floats:
    """Return a rank's share of the network when every rank sends to every other; inf for a group inside one domain."""
    return _across_domains(spread_crossing(group, fabric), group, fabric)


def neighbour_crossing(group: Group, fabric: Fabric) -> Floats:
    """Return the part of a pod's traffic that leaves it when groups send along a chain; 0 for a group inside a pod."""
    crossing = np.minimum(np.maximum(group.stride, fabric.domain_size) / fabric.nonblocking_devices, 1.0)
    return np.where(group.width > fabric.nonblocking_devices, crossing, 0.0)


def spread_crossing(group: Group, fabric: Fabric) -> Floats:
    """Return the same when every rank sends to every other."""
    return 1 - np.minimum(fabric.nonblocking_devices, group.width) / group.width


def network_bytes_per_s(crossing: Floats, fabric: Fabric) -> Floats:
    """Return what each sender gets of the network when a part `crossing` of its pod's traffic leaves the pod."""
    return np.asarray(fabric.inter_bytes_per_s / np.maximum(1.0, fabric.oversubscription * crossing))


def _across_domains(crossing: Floats, group: Group, fabric: Fabric) -> Floats:
    return np.where(group.num_domains > 1, network_bytes_per_s(crossing, fabric), np.inf)
