"""Fabric: what joins a cluster's devices, as numbers that communication formulas divide by.

    bytes per second = datasheet rate of one device and direction x achievable fraction
    seconds          = base + steps x seconds per step + bytes / bytes per second

The latency of each step is what makes small messages slow; no bandwidth grows with the message size besides. Fractions
and latencies are FabricConstants: NCCL's own for its Simple protocol (src/graph/tuning.cc at 5067397), rates as
nccl-tests usually reports them. Ignored: other protocols (LL, LL128), which only messages below a few MB notice, and
how many switches lie between two nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.spec.cluster import Cluster
from meshwright.spec.figure import Figure

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FabricConstants:
    """Achievable shares of datasheet rates, and latencies; the defaults are priors that a fit may replace."""

    intra_efficiency: float = 0.79
    """Share of the link inside a domain that a ring reaches with large messages."""
    inter_efficiency: float = 0.92
    """Share of the network cards' rate that a ring reaches with large messages."""
    nvls_efficiency: float = 0.68
    """Share of the link that a reduction inside the switch reaches (475 GB/s bus bandwidth on 8 H100)."""
    all_to_all_efficiency: float = 0.9
    """Bandwidth of an all-to-all as a share of a ring's."""
    oversubscription: float = 1.0
    """Bandwidth of all network cards over that of the spine: above 1 where the spine is the bottleneck."""
    base_s: float = 8.4e-6
    """Seconds to start a collective."""
    intra_step_s: float = 3.4e-6
    """Seconds of one step from device to device inside a domain."""
    inter_step_s: float = 14e-6
    """Seconds of one step from domain to domain."""
    nvls_s: float = 25e-6
    """Seconds of the smallest all-reduce inside the switch."""
    all_to_all_intra_s: float = 30e-6
    """Seconds of the smallest all-to-all inside a domain."""
    all_to_all_inter_s: float = 80e-6
    """Seconds that the network adds to an all-to-all, however small."""
    all_to_all_peer_s: float = 0.4e-6
    """Seconds for each peer of an all-to-all."""


@dataclass(frozen=True)
class Fabric:
    """One cluster's links, or many clusters' as arrays with one element a case; an unknown link is nan."""

    cluster: NDArray[np.str_]
    """Catalogue name, for messages."""
    domain_size: Floats
    """Devices that reach each other without a network card: an NVLink domain, or a node."""
    intra_bytes_per_s: Floats
    """What one device sends inside its domain, to all peers together."""
    intra_bytes_per_s_per_peer: Floats
    """What it sends to one peer; inf behind a switch, where only the total counts."""
    nvls_bytes_per_s: Floats
    """What one device sends in an all-reduce inside the switch; 0 where the switch cannot add."""
    inter_bytes_per_s: Floats
    """One device's share of its node's network cards."""
    all_to_all_efficiency: Floats
    base_s: Floats
    intra_step_s: Floats
    inter_step_s: Floats
    nvls_s: Floats
    all_to_all_intra_s: Floats
    all_to_all_inter_s: Floats
    all_to_all_peer_s: Floats

    def shared(self, inter: ArrayLike = 1.0, intra: ArrayLike = 1.0) -> Fabric:
        """Return what one of several collectives gets that run at once: `inter` over the network, `intra` inside."""
        return replace(
            self,
            intra_bytes_per_s=self.intra_bytes_per_s / np.asarray(intra, np.float64),
            intra_bytes_per_s_per_peer=self.intra_bytes_per_s_per_peer / np.asarray(intra, np.float64),
            nvls_bytes_per_s=self.nvls_bytes_per_s / np.asarray(intra, np.float64),
            inter_bytes_per_s=self.inter_bytes_per_s / np.asarray(inter, np.float64),
        )

    def take(self, rows: NDArray[Any]) -> Fabric:
        """Return the cases at `rows` (positions or a mask)."""
        return Fabric(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def fabric_of(cluster: Cluster, constants: FabricConstants, has_nvls: bool = False) -> Fabric:
    """Return the links of `cluster`, every field a 0-d array; `has_nvls` says whether its switch can add."""
    link = cluster.intra_node
    total = np.nan if link is None else link.bytes_per_s.value
    peer = np.inf if link is None else _value_or(link.bytes_per_s_per_peer, np.inf)
    network = cluster.inter_node_bytes_per_s_per_device
    network_share = constants.inter_efficiency / constants.oversubscription
    values = {
        "domain_size": cluster.domain_size,
        "intra_bytes_per_s": total * constants.intra_efficiency,
        "intra_bytes_per_s_per_peer": peer * constants.intra_efficiency,
        "nvls_bytes_per_s": total * constants.nvls_efficiency if has_nvls else 0.0,
        "inter_bytes_per_s": np.nan if network is None else network * network_share,
    }
    taken_over = {field.name for field in fields(Fabric)} & {field.name for field in fields(FabricConstants)}
    values |= {name: getattr(constants, name) for name in taken_over}
    arrays = {name: np.asarray(value, np.float64) for name, value in values.items()}
    return Fabric(cluster=np.asarray(cluster.name), **arrays)


def stack_fabrics(fabrics: Sequence[Fabric], index: NDArray[Any]) -> Fabric:
    """Return `fabrics` as one, with one element for each of `index`: the position of that case's fabric."""
    return Fabric(**{f.name: np.array([getattr(one, f.name) for one in fabrics])[index] for f in fields(Fabric)})


def _value_or(figure: Figure | None, other: float) -> float:
    return other if figure is None else figure.value
