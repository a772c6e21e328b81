"""Send: one rank to the next of its group, as pipeline stages and rings of keys and values do.

    seconds = base + step + bytes / rate

where step and rate are the network's if the group leaves its domain anywhere: the slowest neighbours set the pace.
Each device sends at once with the others of its node, so it has its own share of the network cards and no more.
Source: NCCL's latencies (see fabric.py). Ignored: the way back, on links that carry both directions in full.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.collective import where_measured
from meshwright.cost.fabric import Fabric, Floats
from meshwright.cost.group import Group
from meshwright.cost.link_rate import neighbour_bytes_per_s


def send_s(num_bytes: ArrayLike, group: Group, fabric: Fabric) -> Floats:
    """Return the seconds of sending `num_bytes` to the next rank of the group; 0 in a group of one."""
    crosses = group.num_domains > 1
    inside_bytes_per_s = np.minimum(fabric.intra_bytes_per_s, fabric.intra_bytes_per_s_per_peer)
    bytes_per_s = np.where(crosses, neighbour_bytes_per_s(group, fabric), inside_bytes_per_s)
    step_s = np.where(crosses, fabric.inter_step_s, fabric.intra_step_s)
    seconds = fabric.base_s + step_s + np.asarray(num_bytes, np.float64) / bytes_per_s
    return where_measured("send", num_bytes, seconds, group, fabric)
