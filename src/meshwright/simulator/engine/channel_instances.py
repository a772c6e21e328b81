"""Instances of a channel: the groups, or pairs of sender and receiver, that one channel represents.

A channel has one representative of each class; every rank of these classes communicates at the same time within its own
group (rank_classes.py). The hop around the end of a pipeline or a ring is between the positions of its own two ranks,
however far apart they are. Hops and groups that span pods use the links between pods and spine.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.cost.communication.fabric import Fabric
from meshwright.simulator.engine.matching import Channel
from meshwright.simulator.engine.rank_classes import groups_of_axis, sibling_groups
from meshwright.spec.trace.timeline import Floats
from meshwright.spec.trace.trace import Ints
from meshwright.spec.trace.traces import Traces

PodWays = tuple[tuple[int, float], ...]
"""Links of a pod to the spine, out (2 x the pod's number) or in (2 x its number + 1), each with its traffic relative to
the busiest.
"""


@dataclass(frozen=True)
class Spine:
    """Load of the spine when all ranks of one channel communicate."""

    crossing: float
    """Devices of the busiest pod that send out of it, or receive from outside, over the devices of a pod."""
    ways: PodWays


NO_SPINE = Spine(0.0, ())


def hops_of(channel: Channel, traces: Traces) -> Ints:
    """Return the (sender, receiver) of every pair of ranks that a channel of messages represents [hops, 2]."""
    sender, receiver = channel.ranks
    if len(channel.group) == 0:
        return np.array([channel.ranks])
    distance = channel.group.index(receiver) - channel.group.index(sender)
    groups = groups_of_axis(channel.group, traces)
    pairs = np.stack([groups.ravel(), np.roll(groups, -distance, axis=1).ravel()], axis=1)
    is_ours = (traces.class_of_rank[pairs] == channel.members).all(axis=1)
    return np.asarray(pairs[is_ours])


def spine_of_hops(hops: Ints, fabric: Fabric) -> Spine:
    """Return the load that these hops put on the spine."""
    pod_size = float(fabric.nonblocking_devices)
    pods = (hops // pod_size).astype(np.int64)
    across = pods[pods[:, 0] != pods[:, 1]]
    if not len(across):
        return NO_SPINE
    ways, counts = np.unique(2 * across + [0, 1], return_counts=True)
    return Spine(counts.max() / pod_size, tuple(zip(ways.tolist(), (counts / counts.max()).tolist(), strict=True)))


def pod_ways_of(ranks: Ints, fabric: Fabric) -> PodWays:
    """Return the links out of and into each pod of `ranks`, equally loaded; none where there is one pod."""
    pods = np.unique(ranks // float(fabric.nonblocking_devices)).astype(np.int64).tolist()
    return tuple((2 * pod + way, 1.0) for pod in pods for way in (0, 1)) if len(pods) > 1 else ()


@dataclass(frozen=True)
class ChannelSide:
    """The ranks of one class on one side of a channel."""

    instance: Ints
    """Of each of the class's ranks [ranks]."""
    order: Ints
    """The class's ranks sorted by instance, equally many of each [ranks]."""

    def latest(self, at_s: Floats, num_instances: int) -> Floats:
        """Return when the last of the class's ranks arrives at each instance [instances]."""
        return np.asarray(at_s[self.order].reshape(num_instances, -1).max(axis=1))


@dataclass(frozen=True)
class Instances:
    """All instances of one channel."""

    ranks: Ints
    """Of each instance: a group's, or sender and receiver of messages [instances, ranks]."""
    sides: tuple[ChannelSide, ...]
    """Of each of the channel's members."""

    def __len__(self) -> int:
        return len(self.ranks)


def instances_of(channel: Channel, traces: Traces) -> Instances:
    """Return the instances of a channel; a single one of all ranks where the groups cannot be distinguished."""
    if channel.is_message:
        ranks = hops_of(channel, traces)
        parts = [ranks[:, :1], ranks[:, 1:]]
    else:
        ranks = sibling_groups(channel.group or channel.ranks, traces)
        parts = [ranks] * len(channel.members)
    classes = [np.flatnonzero(traces.class_of_rank == member) for member in channel.members]
    sides = [_side(own, part) for own, part in zip(classes, parts, strict=True)]
    if any(side is None for side in sides):
        return Instances(
            ranks[:1], tuple(ChannelSide(np.zeros(len(own), np.int64), np.arange(len(own))) for own in classes)
        )
    return Instances(ranks, tuple(side for side in sides if side is not None))


def _side(own: Ints, part: Ints) -> ChannelSide | None:
    """Return the instance of each of a class's ranks; None unless each instance has equally many."""
    instance_of = {rank: number for number, row in enumerate(part.tolist()) for rank in row}
    found = np.array([instance_of.get(rank, -1) for rank in own.tolist()])
    counts = np.bincount(found + 1, minlength=len(part) + 1)
    if counts[0] or len(set(counts[1:].tolist())) != 1:
        return None
    return ChannelSide(found, np.argsort(found, kind="stable"))
