"""Hops: the pairs of ranks that a channel of messages stands for, and the borders of pods that they cross.

A channel has one representative sender and one receiver; every rank of their classes sends at the same time along its
own group (siblings.py). The hop around the end of a pipeline or a ring is one between the positions of its own two
ranks, however far they are apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.communication.fabric import Fabric
from meshwright.simulator.checks.siblings import groups_of_axis
from meshwright.simulator.engine.matching import Channel
from meshwright.spec.trace.trace import Ints
from meshwright.spec.trace.traces import Traces

PodWays = tuple[tuple[int, float], ...]
"""Ways between a pod and the spine, out (2 x the pod's number) or in (2 x its number + 1), each with its traffic over
that of the busiest.
"""


@dataclass(frozen=True)
class Spine:
    """How much of the spine the ranks of one channel use when all of them communicate."""

    crossing: float
    """Devices of the busiest pod that send out of it, or receive from outside, over the devices of a pod."""
    ways: PodWays


NO_SPINE = Spine(0.0, ())


def hops_of(channel: Channel, traces: Traces) -> Ints:
    """Return the (sender, receiver) of every pair of ranks that a channel of messages stands for [hops, 2]."""
    sender, receiver = channel.ranks
    if len(channel.group) == 0:
        return np.array([channel.ranks])
    distance = channel.group.index(receiver) - channel.group.index(sender)
    groups = groups_of_axis(channel.group, traces)
    pairs = np.stack([groups.ravel(), np.roll(groups, -distance, axis=1).ravel()], axis=1)
    is_ours = (traces.class_of_rank[pairs] == channel.members).all(axis=1)
    return np.asarray(pairs[is_ours])


def spine_of_hops(hops: Ints, fabric: Fabric) -> Spine:
    """Return what these hops use of the spine."""
    pod_size = float(fabric.nonblocking_devices)
    pods = (hops // pod_size).astype(np.int64)
    across = pods[pods[:, 0] != pods[:, 1]]
    if not len(across):
        return NO_SPINE
    ways, counts = np.unique(2 * across + [0, 1], return_counts=True)
    return Spine(counts.max() / pod_size, tuple(zip(ways.tolist(), (counts / counts.max()).tolist(), strict=True)))


def pod_ways_of(ranks: Ints, fabric: Fabric) -> PodWays:
    """Return the ways out of and into each pod of `ranks`, all used alike; none where there is one pod."""
    pods = np.unique(ranks // float(fabric.nonblocking_devices)).astype(np.int64).tolist()
    return tuple((2 * pod + way, 1.0) for pod in pods for way in (0, 1)) if len(pods) > 1 else ()
