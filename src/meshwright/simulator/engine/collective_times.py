"""Duration and link load of communication ops, by the formulas of the cost library for the exact ranks.

    seconds = latency + bytes / rate            alone on its links
    load    = rate / capacity                   of the link inside the domain and of the network, each at most 1

The bottleneck link is fully used, the other one in proportion. Where every pair of a domain's devices has a direct
link, a rank has one link to each peer. Between pods of an oversubscribed network, each pod has two links to the spine,
in and out, which all its devices share; of P2P only the pod borders between its own two ranks count. A broadcast or
scatter costs as much as an all-gather. Sources and what is ignored: cost/communication/collective.py, all_to_all.py,
pipeline_p2p.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.achieved_rates import is_blackwell
from meshwright.cost.communication.all_to_all import all_to_all_s
from meshwright.cost.communication.collective import (
    RankGroup,
    all_gather_s,
    all_reduce_s,
    joins_pairs,
    neighbour_crossing,
    neighbour_shares,
    reduce_scatter_s,
    require_links,
    slowdown_share,
    spread_crossing,
    spread_shares,
)
from meshwright.cost.communication.fabric import Fabric, FabricConstants, fabric_of
from meshwright.cost.communication.pipeline_p2p import hop_s
from meshwright.cost.compute.op_table import CollectiveOp, torch_op
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import Floats
from meshwright.cost.stack_factors import OURS, StackFactors, Stacks, is_omni_path, load_stack
from meshwright.errors import UnsupportedError
from meshwright.simulator.engine.channel_instances import PodWays, hops_of, pod_ways_of, spine_of_hops
from meshwright.simulator.engine.matching import Channel, CommOps
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.trace.traces import Traces

_FORMULAS = {
    "all-gather": all_gather_s,
    "reduce-scatter": reduce_scatter_s,
    "all-reduce": all_reduce_s,
    "all-to-all": all_to_all_s,
}


@dataclass(frozen=True)
class CommOpTimes:
    """Durations and loads; one element a communication op."""

    latency_s: Floats
    """Before the first byte arrives."""
    wire_s: Floats
    """Transfer time of its bytes, alone on their links."""
    inside: Floats
    """Load of each member's link inside the domain meanwhile."""
    network: Floats
    """Load of each member's network card."""
    spine: Floats
    """Load of the busiest link between a pod and the spine."""
    pod_ways: Mapping[int, PodWays] = field(default_factory=dict)
    """By channel; a channel inside pods has none."""
    peers: Mapping[int, Peers] = field(default_factory=dict)
    """By channel, where every pair of devices has a direct link; else a rank's peers share one."""
    slows: Floats = field(default_factory=lambda: np.ones(1))
    """By how much less each slows down computation than usual, 1 for all without a limit on its SMs."""


def comm_op_times(
    traces: Traces, comm_ops: CommOps, cluster: Cluster, communication_sms: int | None = None
) -> CommOpTimes:
    """Return the times of all comm ops on `cluster`, whose kernels take at most so many SMs; None for no limit.

    Raises UnsupportedError for an unknown operator, or for ranks that communicate over a link without a rate.
    """
    fabric = reached_fabric(cluster).limited(communication_sms or 0)
    columns, slows = np.zeros((5, len(comm_ops))), np.ones(len(comm_ops))
    pod_ways, peers = {}, {}
    for number, channel in enumerate(comm_ops.channels):
        at = channel.first + np.arange(channel.num_comm_ops)
        priced = _message_times if channel.is_message else _collective_times
        columns[:, at], ways = priced(channel, traces, fabric)
        slows[at] = slowdown_share(_group_of(channel, traces, fabric), fabric)
        if ways:
            pod_ways[number] = ways
        if joins_pairs(fabric):
            peers[number] = peers_of(channel, traces, int(fabric.domain_size))
    latency_s, wire_s, inside, network, spine = columns
    return CommOpTimes(latency_s, wire_s, inside, network, spine, pod_ways, peers, slows)


def reached_fabric(cluster: Cluster) -> Fabric:
    """Return the cluster's links at the rates that our stack achieves: the planner's constants."""
    return our_stack_on(cluster).slowed(fabric_of(cluster, FabricConstants()), fitted_constants())


def our_stack_on(cluster: Cluster) -> Stacks:
    """Return the factors of our own stack on the cluster's devices."""
    stack, device = load_stack(OURS), cluster.device
    return Stacks(
        StackFactors(np.array(stack.compute), np.array(stack.communication), np.array(stack.overhead)),
        is_tuned=np.array(stack.is_tuned or bool(device.matmul_points)),
        is_newest=np.array(is_blackwell(device)),
        is_omni_path=np.array(is_omni_path(cluster)),
    )


def group_at(ranks: tuple[int, ...], fabric: Fabric) -> RankGroup:
    """Return the position of these ranks in the cluster, one device a rank in their order."""
    places = np.sort(np.array(ranks))
    num_domains = len(np.unique(places // int(fabric.domain_size)))
    stride = (places[-1] - places[0]) / max(len(places) - 1, 1)
    return RankGroup(np.array(float(len(places))), np.array(float(num_domains)), np.array(max(stride, 1.0)))


def _group_of(channel: Channel, traces: Traces, fabric: Fabric) -> RankGroup:
    """Return the position of a channel's ranks; of messages the pairs that are farthest apart."""
    if not channel.is_message:
        return group_at(channel.ranks, fabric)
    hops = hops_of(channel, traces)
    domains = hops // int(fabric.domain_size)
    crosses = bool((domains[:, 0] != domains[:, 1]).any())
    return RankGroup(np.array(2.0), np.array(1.0 + crosses), np.array(float(np.abs(np.diff(hops)).max())))


def kind_of(op: str) -> str:
    """Return what kind of collective an operator is; raises UnsupportedError for an unknown one."""
    collective = torch_op(op)
    if isinstance(collective, CollectiveOp):
        return collective.kind
    raise UnsupportedError(f"collective {op}: no cost formula; known are {', '.join(_FORMULAS)}: use one of them")


def _message_times(channel: Channel, traces: Traces, fabric: Fabric) -> tuple[Floats, PodWays]:
    """Return the columns of CommOpTimes [5, comm_ops] of a channel of messages, and its links between pods."""
    num_bytes, hops, group = _num_bytes(channel, traces), hops_of(channel, traces), _group_of(channel, traces, fabric)
    crosses = bool(group.num_domains > 1)
    require_links(group, fabric)
    spine = spine_of_hops(hops, fabric)
    latency_s, whole_s = (hop_s(size, group, spine.crossing, fabric) for size in (np.zeros_like(num_bytes), num_bytes))
    shares = (float(not crosses), *_network_shares(float(crosses), spine.crossing, fabric))
    return np.stack(np.broadcast_arrays(latency_s, whole_s - latency_s, *shares)), spine.ways


def _collective_times(channel: Channel, traces: Traces, fabric: Fabric) -> tuple[Floats, PodWays]:
    """Return the same for a channel of collectives."""
    num_bytes, kinds = _num_bytes(channel, traces), _kinds(channel, traces)
    group = _group_of(channel, traces, fabric)
    require_links(group, fabric)
    columns = np.zeros((5, len(num_bytes)))
    for kind in np.unique(kinds):
        at = np.flatnonzero(kinds == kind)
        columns[:, at] = _priced(str(kind), num_bytes[at], group, fabric)
    is_member = np.isin(traces.class_of_rank, channel.members)
    return columns, pod_ways_of(np.flatnonzero(is_member), fabric) if columns[4].any() else ()


def _num_bytes(channel: Channel, traces: Traces) -> Floats:
    """Return the bytes of each of a channel's comm ops; of an uneven all-to-all the maximum over ranks."""
    num_bytes = np.zeros(channel.num_comm_ops)
    for rank, rows in zip(channel.members, channel.rows, strict=True):
        own = traces.traces[rank].records.num_bytes[rows]
        num_bytes[: len(own)] = np.maximum(num_bytes[: len(own)], own)
    return num_bytes


def _kinds(channel: Channel, traces: Traces) -> NDArray[np.str_]:
    member = int(np.argmax([len(rows) for rows in channel.rows]))
    rows, trace = channel.rows[member], traces.traces[channel.members[member]]
    used, where = np.unique(trace.records.signature[rows], return_inverse=True)
    return np.array([kind_of(trace.signatures[at].op) for at in used.tolist()])[where.ravel()]


def _priced(kind: str, num_bytes: Floats, group: RankGroup, fabric: Fabric) -> Floats:
    """Return latency, transfer time, and loads inside domains, between domains and between pods [5, comm_ops]."""
    formula = _FORMULAS[kind]
    whole_s = np.broadcast_to(formula(num_bytes, group, fabric), num_bytes.shape)
    latency_s = np.minimum(formula(np.zeros_like(num_bytes), group, fabric), whole_s)
    return np.stack(np.broadcast_arrays(latency_s, whole_s - latency_s, *_loads(kind, group, fabric)))


def _loads(kind: str, group: RankGroup, fabric: Fabric) -> tuple[float, float, float]:
    """Return the load of each member's link inside the domain, of its network card and of its pod's link."""
    if kind == "all-to-all":
        shares, crossing = spread_shares(group, fabric), spread_crossing(group, fabric)
    else:
        shares, crossing = neighbour_shares(group, fabric), neighbour_crossing(group, fabric)
    inside, network = (float(share) for share in shares)
    return inside, *_network_shares(network, float(crossing), fabric)


def _network_shares(share: float, crossing: float, fabric: Fabric) -> tuple[float, float]:
    """Return the loads of a rank's network card and of its pod's link, given that of the slower of the two."""
    on_spine = float(fabric.oversubscription) * crossing
    return share / max(1.0, on_spine), share * min(1.0, on_spine)


Peers = tuple[tuple[int, ...], ...]
"""For each member of a channel its peers in the same domain."""


def peers_of(channel: Channel, traces: Traces, domain_size: int) -> Peers:
    """Return for each member the other ranks of its own group inside its domain, not those of sibling groups."""
    found = []
    for member, rows in zip(channel.members, channel.rows, strict=True):
        trace = traces.traces[member]
        if not len(rows):
            others: tuple[int, ...] = ()
        elif channel.is_message:
            others = (int(trace.records.peer[rows[0]]),)
        else:
            others = trace.groups[trace.records.group[rows[0]]]
        inside = member // domain_size
        found.append(tuple(other for other in others if other != member and other // domain_size == inside))
    return tuple(found)
