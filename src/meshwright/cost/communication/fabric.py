"""Fabric: what joins a cluster's devices, as numbers that communication formulas divide by.

    bytes per second = datasheet rate of one device and direction x achievable share
    seconds          = base + steps x seconds per step + bytes / bytes per second

The latency of each step is what makes small messages slow; no bandwidth grows with the message size besides. Shares are
the catalogue's where it has them. Latencies are NCCL's own for its Simple protocol (src/graph/tuning.cc at 5067397).
Ignored: the other protocols (LL, LL128), which only messages below a few MB notice; slower steps over PCI Express; how
many switches lie between two nodes.

Timings of a cluster's own collectives replace the formulas (MeasuredCollectives):

    seconds = latency + bytes x seconds per byte, both read at the number of ranks

between the fewest and the most ranks that were measured, interpolated in the logarithm of their number; nan beyond,
where the formulas hold. Source: the points in the cluster's catalogue entry, as `meshwright calibrate` writes them.
Ignored: what other groups of the machine did at the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.cost.communication.nccl_ctas import CTAS_PER_CARD, ctas_of
from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import Floats, Ints
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.device import CollectiveKind, CollectivePoint, Figure

_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
_MOST_RANKS = 72
"""The largest domain there is: only links inside a domain are looked up."""


@dataclass(frozen=True)
class MeasuredCollectives:
    """The measurements of one or more clusters; nan where there are none."""

    latency_s: Floats
    """[cluster, kind, ranks]: seconds of the smallest message."""
    s_per_byte: Floats
    """[cluster, kind, ranks]: seconds of each further byte."""

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was measured."""
        return bool(np.isnan(self.latency_s).all())

    def read(self, kind: CollectiveKind, num_ranks: Floats, cluster: Ints) -> tuple[Floats, Floats]:
        """Return latency and seconds per byte of `kind` for each of `num_ranks`, on the clusters at these positions."""
        ranks = np.where(num_ranks <= _MOST_RANKS, num_ranks, 0).astype(np.int64)
        at = (cluster, _KINDS.index(kind), ranks)
        return self.latency_s[at], self.s_per_byte[at]


def measured_collectives(points: Sequence[CollectivePoint]) -> MeasuredCollectives:
    """Return the measurements of one cluster by number of ranks."""
    latency_s = np.full((1, len(_KINDS), _MOST_RANKS + 1), np.nan)
    s_per_byte = latency_s.copy()
    for row, kind in enumerate(_KINDS):
        of_kind = sorted((point for point in points if point.kind == kind), key=lambda point: point.num_ranks)
        if of_kind:
            ranks = [point.num_ranks for point in of_kind]
            latency_s[0, row, 2:] = _over_ranks(ranks, [point.latency_s.value for point in of_kind])
            s_per_byte[0, row, 2:] = _over_ranks(ranks, [1 / point.bytes_per_s.value for point in of_kind])
    return MeasuredCollectives(latency_s, s_per_byte)


def join_measured(parts: Sequence[MeasuredCollectives]) -> MeasuredCollectives:
    """Return the measurements of all clusters, in order."""
    return MeasuredCollectives(
        np.concatenate([part.latency_s for part in parts]), np.concatenate([part.s_per_byte for part in parts])
    )


def _over_ranks(ranks: list[int], values: list[float]) -> Floats:
    wanted = np.log2(np.arange(2, _MOST_RANKS + 1))
    return np.asarray(np.interp(wanted, np.log2(ranks), values, left=np.nan, right=np.nan), np.float64)


@dataclass(frozen=True)
class FabricConstants:
    """Achievable shares of datasheet rates, and latencies in seconds: fabric.* of constants.toml says what each is."""

    intra_efficiency: float = fixed_constant("fabric.intra_efficiency")
    inter_efficiency: float = fixed_constant("fabric.inter_efficiency")
    nvls_efficiency: float = fixed_constant("fabric.nvls_efficiency")
    all_to_all_efficiency: float = fixed_constant("fabric.all_to_all_efficiency")
    base_s: float = fixed_constant("fabric.base_s")
    intra_step_s: float = fixed_constant("fabric.intra_step_s")
    inter_step_s: float = fixed_constant("fabric.inter_step_s")
    nvls_s: float = fixed_constant("fabric.nvls_s")
    all_to_all_intra_s: float = fixed_constant("fabric.all_to_all_intra_s")
    all_to_all_inter_s: float = fixed_constant("fabric.all_to_all_inter_s")
    all_to_all_peer_s: float = fixed_constant("fabric.all_to_all_peer_s")


@dataclass(frozen=True)
class Fabric:
    """One cluster's links, or many clusters' as arrays with one element a configuration; an unknown link is nan."""

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
    oversubscription: Floats
    """How many times less the network carries between pods than within one."""
    nonblocking_devices: Floats
    """Devices of a pod; inf where the network has none."""
    all_to_all_efficiency: Floats
    base_s: Floats
    intra_step_s: Floats
    inter_step_s: Floats
    nvls_s: Floats
    all_to_all_intra_s: Floats
    all_to_all_inter_s: Floats
    all_to_all_peer_s: Floats
    measured: MeasuredCollectives
    """What was measured inside a domain: one table for each cluster, not for each configuration."""
    measured_at: Ints
    """Position of the configuration's cluster in `measured`."""
    measured_slowdown: Floats
    """Collectives that share what was measured with one."""
    usual_ctas: Floats
    """CTAs, of one SM each, that a collective's kernel takes inside a domain; 0 where unknown (nccl_ctas.py)."""
    saturating_ctas: Floats
    """Those of them that the links inside a domain need for their full rate."""
    max_ctas: Floats
    """Limit on a kernel's CTAs (layout.communication_sms), by which the rates are reduced already; inf for none."""

    def shared(self, inter: ArrayLike = 1.0, intra: ArrayLike = 1.0) -> Fabric:
        """Return what one of several collectives gets that run at once: `inter` over the network, `intra` inside."""
        inside, network = np.asarray(intra, np.float64), np.asarray(inter, np.float64)
        return replace(
            self,
            intra_bytes_per_s=self.intra_bytes_per_s / inside,
            intra_bytes_per_s_per_peer=self.intra_bytes_per_s_per_peer / inside,
            nvls_bytes_per_s=self.nvls_bytes_per_s / inside,
            inter_bytes_per_s=self.inter_bytes_per_s / network,
            measured_slowdown=self.measured_slowdown * inside,
        )

    def limited(self, max_ctas: ArrayLike) -> Fabric:
        """Return what kernels of at most `max_ctas` CTAs reach, 0 for no limit (nccl_ctas.py)."""
        given = np.asarray(max_ctas, np.float64)
        if not given.any():
            return self
        ctas = np.where(given > 0, given, np.inf)
        inside = np.maximum(1.0, self.saturating_ctas / ctas)
        card = np.where(self.usual_ctas > 0, np.maximum(1.0, CTAS_PER_CARD / ctas), 1.0)
        return replace(self.shared(inter=card, intra=inside), max_ctas=ctas)

    def take(self, rows: NDArray[Any]) -> Fabric:
        """Return the configurations at `rows` (positions or a mask); one cluster for all configurations stays that."""
        if self.domain_size.ndim == 0:
            return self
        return replace(self, **{name: getattr(self, name)[rows] for name in _ARRAYS})


_ARRAYS = [field.name for field in fields(Fabric) if field.name != "measured"]
_TAKEN_OVER = {field.name for field in fields(Fabric)} & {field.name for field in fields(FabricConstants)}


def fabric_of(cluster: Cluster, constants: FabricConstants) -> Fabric:
    """Return the links of `cluster`, every field a 0-d array."""
    values: dict[str, float] = {name: getattr(constants, name) for name in _TAKEN_OVER}
    values |= _inside(cluster.intra_node, constants) | _network(cluster, constants)
    usual, saturating = ctas_of(cluster)
    values |= {"domain_size": cluster.domain_size, "measured_slowdown": 1.0}
    values |= {"usual_ctas": usual, "saturating_ctas": saturating, "max_ctas": np.inf}
    return Fabric(
        cluster=np.asarray(cluster.name),
        measured=measured_collectives(cluster.intra_node.collectives if cluster.intra_node else ()),
        measured_at=np.asarray(0),
        **{name: np.asarray(value, np.float64) for name, value in values.items()},
    )


def stack_fabrics(fabrics: Sequence[Fabric], index: NDArray[Any]) -> Fabric:
    """Return `fabrics` of one cluster each as one, with one element for each of `index`: positions in `fabrics`."""
    arrays = {name: np.array([getattr(one, name) for one in fabrics])[index] for name in _ARRAYS}
    arrays["measured_at"] = np.asarray(index)
    return Fabric(measured=join_measured([one.measured for one in fabrics]), **arrays)


def _inside(link: Link | None, constants: FabricConstants) -> dict[str, float]:
    if link is None:
        return {"intra_bytes_per_s": np.nan, "intra_bytes_per_s_per_peer": np.nan, "nvls_bytes_per_s": 0.0}
    share = _value_or(link.efficiency, constants.intra_efficiency)
    nvls_share = constants.nvls_efficiency if link.reduces_in_switch else 0.0
    return {
        "intra_bytes_per_s": link.bytes_per_s.value * share,
        "intra_bytes_per_s_per_peer": _value_or(link.bytes_per_s_per_peer, np.inf) * share,
        "nvls_bytes_per_s": link.bytes_per_s.value * nvls_share,
    }


def _network(cluster: Cluster, constants: FabricConstants) -> dict[str, float]:
    link, bytes_per_s = cluster.inter_node, cluster.inter_node_bytes_per_s_per_device
    if link is None or bytes_per_s is None:
        return {"inter_bytes_per_s": np.nan, "oversubscription": 1.0, "nonblocking_devices": np.inf}
    oversubscription = _value_or(link.oversubscription, 1.0)
    # Oversubscribed without pods: what leaves a domain competes already.
    pod = link.nonblocking_devices or (np.inf if oversubscription == 1 else cluster.domain_size)
    return {
        "inter_bytes_per_s": bytes_per_s * _value_or(link.efficiency, constants.inter_efficiency),
        "oversubscription": oversubscription,
        "nonblocking_devices": pod,
    }


def _value_or(figure: Figure | None, other: float) -> float:
    return other if figure is None else figure.value
