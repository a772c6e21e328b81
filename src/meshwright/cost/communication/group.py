"""Group: where the ranks of one mesh axis lie, to the extent that communication depends on it.

Ranks along the innermost axis of a mesh are neighbours, so the members of a group stand `stride` devices apart, the
product of the degrees of the axes inside. With stride s, floor(domain / s) members, at least one, share a domain (an
NVLink domain, or a node). Where that does not divide the group, its ranks are spread evenly: 256 over domains of 72 are
4 times 64. Ignored: groups that straddle a domain's border because stride does not divide it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.cost.arrays import Bools, Floats
from meshwright.cost.communication.fabric import Fabric
from meshwright.errors import UnsupportedError


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

    def take(self, rows: NDArray[Any]) -> RankGroup:
        """Return the configurations at `rows` (positions or a mask)."""
        return RankGroup(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def group_of(stride: ArrayLike, num_ranks: ArrayLike, fabric: Fabric) -> RankGroup:
    """Return the groups of `num_ranks` ranks that stand `stride` devices apart."""
    ranks, apart = np.asarray(num_ranks, np.float64), np.asarray(stride, np.float64)
    per_domain = np.clip(np.floor(fabric.domain_size / apart), 1, ranks)
    return RankGroup(*np.broadcast_arrays(ranks, np.ceil(ranks / per_domain), apart))


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
