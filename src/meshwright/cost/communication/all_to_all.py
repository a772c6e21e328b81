"""All-to-all: every rank sends a different chunk to every other, as tokens do on their way to experts and back.

    seconds = intra + [inter, if it leaves the domain] + peer x (n - 1) + imbalance x max(inside, across)
    inside, across = bytes that a rank sends within its domain, and over the network, each over its rate

Plain, k copies of each token leave, one for each expert: of them (r - 1) / n stay in the domain and (n - r) / n cross,
for n ranks in m domains of r. Deduplicated (as DeepEP does), a token crosses once for each domain where it has an
expert, and spreads to that domain's ranks inside. k experts drawn at random lie in m (1 - (1 - 1/m)^k) domains.

Latencies are read off the published table of SimAI (8 to 128 ranks, 16 MiB to 1 GiB), which this matches within 18 %.
Ignored: that the k experts are distinct (8 of 256 hit 1 % more of 8 domains), and congestion of the spine beyond the
constant all_to_all_efficiency.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.communication.collective import RankGroup, inside_bytes_per_s, spread_bytes_per_s, where_measured
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.layout_table import Floats


@dataclass(frozen=True)
class Routing:
    """How tokens go to experts; each field is a scalar or has one element per configuration."""

    experts_per_token: ArrayLike
    """Experts that each token goes to."""
    is_deduplicated: ArrayLike = False
    """Whether a token crosses the network once for each domain, not for each expert."""
    max_domains_per_token: ArrayLike = np.inf
    """Most NVLink domains that one token is routed to."""
    imbalance: ArrayLike = 1.0
    """Tokens of the busiest rank over the mean; 1 with forced load balancing."""


def all_to_all_s(bytes_per_rank: ArrayLike, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the seconds in which each rank spreads its `bytes_per_rank` evenly over the group, itself included."""
    per_peer = np.asarray(bytes_per_rank, np.float64) / group.num_ranks
    inside = per_peer * (group.ranks_per_domain - 1)
    across = per_peer * (group.num_ranks - group.ranks_per_domain)
    return _exchange_s(inside, across, group, fabric)


def token_exchange_s(token_bytes: ArrayLike, routing: Routing, group: RankGroup, fabric: Fabric) -> Floats:
    """Return the seconds of one way to the experts (or back), `token_bytes` being one copy of all tokens of a rank."""
    num_copies = np.asarray(routing.experts_per_token, np.float64)
    token_bytes = np.asarray(token_bytes, np.float64) * np.asarray(routing.imbalance, np.float64)
    is_deduplicated = np.asarray(routing.is_deduplicated, np.bool_)
    # Each copy goes to a random rank of the group.
    plain_inside = num_copies * (group.ranks_per_domain - 1) / group.num_ranks
    plain_across = num_copies * (1 - 1 / group.num_domains)
    num_ranks_hit = _num_hit(group.num_ranks, num_copies)
    num_domains_hit = np.minimum(_num_hit(group.num_domains, num_copies), routing.max_domains_per_token)
    once_inside = num_ranks_hit * (1 - 1 / group.ranks_per_domain)
    once_across = num_domains_hit * (1 - 1 / group.num_domains)
    inside = token_bytes * np.where(is_deduplicated, once_inside, plain_inside)
    across = token_bytes * np.where(is_deduplicated, once_across, plain_across)
    return _exchange_s(inside, across, group, fabric)


def _exchange_s(inside_bytes: Floats, across_bytes: Floats, group: RankGroup, fabric: Fabric) -> Floats:
    crosses = group.num_domains > 1
    latency_s = fabric.all_to_all_intra_s + np.where(crosses, fabric.all_to_all_inter_s, 0.0)
    latency_s = latency_s + fabric.all_to_all_peer_s * (group.num_ranks - 1)
    inside_s = inside_bytes / inside_bytes_per_s(group, fabric)
    across_s = across_bytes / spread_bytes_per_s(group, fabric)
    seconds = latency_s + np.maximum(inside_s, across_s) / fabric.all_to_all_efficiency
    # Measured points count the whole buffer of a rank, with the chunk that it keeps.
    brought = inside_bytes * group.num_ranks / np.maximum(group.num_ranks - 1, 1)
    return where_measured("all-to-all", brought, seconds, group, fabric)


def _num_hit(num_bins: Floats, num_draws: Floats) -> Floats:
    return np.asarray(num_bins * (1 - (1 - 1 / num_bins) ** num_draws))
