"""Contention: how much longer a rank's other communication takes while FSDP's runs next to it, on links that both use.

    load    = the shares that both take of the busiest link they have in common, at least 1 (collective.py)
    covered = the part of an axis' time in which FSDP communicates, too: its D seconds are the first of a pass
    longer  = covered x (load - 1) x FSDP's bytes' seconds / D, of the seconds in which bytes travel

While both are under way each goes at 1 / load of its speed. What FSDP loses by that, the pass that hides it loses as
well: D seconds of gathers still hide behind D seconds of a pass, which has become longer, and nothing else changes. The
simulator shares links by the same rule (links.py). Of our own software only: others' multipliers were fitted without.
Ignored: pipeline P2P; the ways between pods; groups of n ranks (reshard_after_forward = n); that FSDP's gathers
and reductions slow down each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.cost.communication.collective import RankGroup, all_gather_s, joins_pairs, neighbour_shares
from meshwright.cost.communication.data_parallel import DataParallel, block_collectives_s, replicas_all_reduce_s
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.layout_table import Bools, Floats, Ints, Passes

_TINY = 1e-12
"""Seconds, in place of none."""


@dataclass(frozen=True)
class LinkShares:
    """Shares of each rank's links that communication of a group takes, one element a configuration."""

    group: RankGroup
    inside: Floats
    network: Floats


Span = tuple[Floats, Floats]
"""Seconds from the start of a block's pass to where an axis starts to communicate, and to where it ends."""


@dataclass(frozen=True)
class FsdpTraffic:
    """What FSDP communicates during a block's passes, from their start on: for each of its groups the seconds of
    latency and those in which bytes travel [2, configurations].
    """

    groups: tuple[RankGroup, ...]
    forward: tuple[Floats, ...]
    backward: tuple[Floats, ...]
    """Of a microbatch that is not the last."""
    last_backward: tuple[Floats, ...]
    gathered: Floats
    """Share of microbatches whose forward pass gathers."""
    last: Floats
    """Share of microbatches that are the last."""


def computing_shares(dp: DataParallel, computed: Passes, whole: Passes) -> Passes:
    """Return the shares of both passes in which the device computes, and does not wait for communication."""
    # Multipliers of other software were fitted to whole steps that FSDP slows all along.
    forward, backward = (
        np.where(dp.is_own & (whole_s > 0), computed_s / np.where(whole_s > 0, whole_s, 1.0), 1.0)
        for computed_s, whole_s in zip(computed, whole, strict=True)
    )
    return forward, backward


def fsdp_traffic(dp: DataParallel, row: Ints, fabric: Fabric, contends: Bools) -> FsdpTraffic:
    """Return what FSDP communicates during one block's passes, in the configurations that contend."""
    layouts, last = dp.layouts, 1.0 / dp.num_microbatches
    is_each = layouts.reduces_each_microbatch
    # Where backward has two parts, gradients are reduced after it.
    is_hidden = contends & ~(is_each & layouts.splits_backward)
    parts = tuple(_parts(dp, row, fabric))
    gathers = [np.where(is_hidden, gather_s, 0.0) for _, gather_s, _ in parts]
    again = [np.where(layouts.is_resharded, seconds, 0.0) for seconds in gathers]
    reductions = [np.where(is_hidden, reduction_s, 0.0) for *_, reduction_s in parts]
    # Over replicas, the last group, gradients are summed once a step.
    each = [*(np.where(is_each, seconds, 0.0) for seconds in reductions[:-1]), 0.0 * reductions[-1]]
    return FsdpTraffic(
        groups=tuple(group for group, *_ in parts),
        forward=tuple(gathers),
        backward=tuple(one + other for one, other in zip(again, each, strict=True)),
        last_backward=tuple(one + other for one, other in zip(again, reductions, strict=True)),
        gathered=np.where(layouts.is_resharded, 1.0, last),
        last=last,
    )


def contended_fabrics(
    fsdp: FsdpTraffic, shares: LinkShares, forward: Span, backward: Span, fabric: Fabric
) -> tuple[Fabric, Fabric]:
    """Return the links that FSDP leaves, forward and backward, to an axis that takes `shares` of them in `forward` and
    `backward`.
    """
    if not (shares.group.num_ranks > 1).any():
        return fabric, fabric
    more = [joint_load(shares, ring_shares(group, fabric), fabric) - 1 for group in fsdp.groups]
    forward_by = fsdp.gathered * _longer_by(fsdp.forward, more, forward)
    usual_by, last_by = (_longer_by(fsdp_s, more, backward) for fsdp_s in (fsdp.backward, fsdp.last_backward))
    backward_by = (1 - fsdp.last) * usual_by + fsdp.last * last_by
    in_forward, in_backward = (
        fabric.shared(inter=1 + by, intra=1 + by) if by.any() else fabric for by in (forward_by, backward_by)
    )
    return in_forward, in_backward


def _longer_by(fsdp_s: tuple[Floats, ...], more: list[Floats], span: Span) -> Floats:
    """Return by which share of its seconds what is sent in `span` takes longer, while FSDP's groups communicate."""
    whole, (begin, end) = sum(one.sum(axis=0) for one in fsdp_s), span
    covered = np.clip((whole - begin) / np.maximum(end - begin, _TINY), 0, 1)
    weighed = sum(travelling * load for (_, travelling), load in zip(fsdp_s, more, strict=True))
    return np.asarray(covered * weighed / np.maximum(whole, _TINY))


def _parts(dp: DataParallel, row: Ints, fabric: Fabric) -> Iterator[tuple[RankGroup, Floats, Floats]]:
    """Yield the groups of dense parameters, of experts and of replicas, and their seconds to gather and to reduce."""
    gather, scatter = block_collectives_s(dp, row, fabric, with_experts=False)
    yield _part(dp.shard_group(fabric), gather, scatter, fabric)
    if dp.work.blocks.expert_parameters[row].any():
        whole_gather, whole_scatter = block_collectives_s(dp, row, fabric)
        yield _part(dp.expert_group(fabric), whole_gather - gather, whole_scatter - scatter, fabric)
    replicas, summed = replicas_all_reduce_s(dp, row, fabric)
    yield _part(replicas, np.zeros(len(summed)), summed, fabric)


def _part(group: RankGroup, gather_s: Floats, reduction_s: Floats, fabric: Fabric) -> tuple[RankGroup, Floats, Floats]:
    """Return the group, and its seconds [2, configurations]: of latency, and those in which bytes travel."""
    latency_s = all_gather_s(0.0, group, fabric)
    gather, reduction = (
        np.stack([np.minimum(latency_s, seconds), np.maximum(seconds - latency_s, 0.0)])
        for seconds in (gather_s, reduction_s)
    )
    return group, gather, reduction


def ring_shares(group: RankGroup, fabric: Fabric) -> LinkShares:
    """Return the shares of links that a ring of each group takes."""
    return LinkShares(group, *neighbour_shares(group, fabric))


def joint_load(one: LinkShares, other: LinkShares, fabric: Fabric) -> Floats:
    """Return the load of the busiest link that both use; 1 where it carries both in full, or there is none."""
    overlap_inside = (one.inside > 0) & (other.inside > 0) & (~joins_pairs(fabric) | _have_pairs_in_common(one, other))
    overlap_outside = (one.network > 0) & (other.network > 0)
    inside = np.where(overlap_inside, one.inside + other.inside, 0.0)
    network = np.where(overlap_outside, one.network + other.network, 0.0)
    return np.maximum(1.0, np.maximum(inside, network))


def _have_pairs_in_common(one: LinkShares, other: LinkShares) -> Bools:
    """Return whether a rank has a peer that is in both of its groups: of two axes of a mesh, none."""
    wider_apart = np.maximum(one.group.stride, other.group.stride)
    return np.asarray(wider_apart < np.minimum(one.group.width, other.group.width))
