"""Rates: what one rank gets of the links when its whole group communicates, its sibling groups doing the same.

    inside   min(all peers together, peers in the domain x rate to one peer)
    network  the device's share of its node's cards / spine
    spine    min(o, max(1, o x crossing)) for a group wider than a pod, else 1

A network may be oversubscribed o times between pods of P devices; crossing is the part of a pod's traffic that leaves
it. A ring or a pipeline leaves a pod once in each of `stride` sibling groups, by whole domains at least: crossing is
max(stride, domain) / P. So rings of neighbours do not notice the spine, and the outermost axis does in full. Of an
all-to-all all but the pod's own part leaves: crossing is 1 - P / width.

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
    crossing = np.maximum(group.stride, fabric.domain_size) / fabric.nonblocking_devices
    return _network_bytes_per_s(crossing, group, fabric)


def spread_bytes_per_s(group: Group, fabric: Fabric) -> Floats:
    """Return a rank's share of the network when every rank sends to every other; inf for a group inside one domain."""
    crossing = 1 - np.minimum(fabric.nonblocking_devices, group.width) / group.width
    return _network_bytes_per_s(crossing, group, fabric)


def _network_bytes_per_s(crossing: Floats, group: Group, fabric: Fabric) -> Floats:
    spine = np.clip(fabric.oversubscription * crossing, 1, fabric.oversubscription)
    slowdown = np.where(group.width > fabric.nonblocking_devices, spine, 1.0)
    return np.where(group.num_domains > 1, fabric.inter_bytes_per_s / slowdown, np.inf)
