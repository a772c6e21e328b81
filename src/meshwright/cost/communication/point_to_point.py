"""Send: one rank to the next of its group, as pipeline stages and rings of keys and values do.

    hop     = base + step + bytes / rate      of the tier that the two ranks' positions cross: domain, pod or spine
    slowest = a hop across whatever border the chain crosses anywhere: it sets the pace of a ring or a full pipeline
    mean    = over the n - 1 hops of the chain, of which ceil(n stride / size) - 1 cross a border of domains or pods:
              what one microbatch takes on its way through an empty pipeline

Each device sends at once with the others of its node, so it has its own share of the network cards and no more. At a
pod's border as many ranks send as stand between two members of a group, `stride`, or all of the pod (group.py).
Source: NCCL's latencies (see fabric.py). Ignored: the way back, on links that carry both directions in full; that two
hops of one pipeline may cross the same border at the same time, which the simulator shows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.arrays import Floats
from meshwright.cost.communication.collective import where_measured
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.communication.group import RankGroup, network_bytes_per_s


def send_s(num_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the seconds of the slowest hop of `num_bytes` between neighbours of the group; 0 in a group of one."""
    return hop_s(num_bytes, group, np.where(_num_pods(group, fabric) > 1, _crossing(group, fabric), 0.0), fabric)


def mean_send_s(num_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the mean seconds of the hops of `num_bytes` from the group's first rank to its last."""
    num_hops = np.maximum(group.num_ranks - 1, 1)
    across_domains = np.minimum(group.num_domains - 1, num_hops) / num_hops
    across_pods = np.minimum(_num_pods(group, fabric) - 1, num_hops) / num_hops
    shares = (1 - across_domains, across_domains - across_pods, across_pods)
    # A link without a known rate has no price, and where no hop crosses it none is needed.
    by_border = zip(shares, hops_by_border_s(num_bytes, group, fabric), strict=True)
    return np.asarray(sum(np.where(share > 0, share * seconds, 0.0) for share, seconds in by_border))


def hops_by_border_s(num_bytes: ArrayLike, group: RankGroup, fabric: Fabric) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of a hop inside of a domain, of one to another domain, and of one to another pod."""
    inside = replace(group, num_domains=np.minimum(group.num_domains, 1))
    return (
        hop_s(num_bytes, inside, 0.0, fabric),
        hop_s(num_bytes, group, 0.0, fabric),
        hop_s(num_bytes, group, _crossing(group, fabric), fabric),
    )


def hop_s(num_bytes: ArrayLike, group: RankGroup, crossing: ArrayLike, fabric: Fabric) -> Floats:
    """Return the seconds of one hop, across domains if `group` lies in more than one.

    `crossing` is the part of a pod's devices that send out of the pod at the same time; 0 inside a pod.
    """
    crosses = group.num_domains > 1
    inside_bytes_per_s = np.minimum(fabric.intra_bytes_per_s, fabric.intra_bytes_per_s_per_peer)
    across_bytes_per_s = network_bytes_per_s(np.asarray(crossing, np.float64), fabric)
    bytes_per_s = np.where(crosses, across_bytes_per_s, inside_bytes_per_s)
    step_s = np.where(crosses, fabric.inter_step_s, fabric.intra_step_s)
    seconds = fabric.base_s + step_s + np.asarray(num_bytes, np.float64) / bytes_per_s
    return where_measured("send", num_bytes, seconds, group, fabric)


def _num_pods(group: RankGroup, fabric: Fabric) -> Floats:
    return np.maximum(np.ceil(group.width / fabric.nonblocking_devices), 1.0)


def _crossing(group: RankGroup, fabric: Fabric) -> Floats:
    """Return which part of a pod's devices send out of it."""
    return np.asarray(np.minimum(group.stride / fabric.nonblocking_devices, 1.0))
