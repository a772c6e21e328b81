"""Instances: the groups that one channel stands for, and which of them each rank of a class is in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.simulator.checks.siblings import sibling_groups
from meshwright.simulator.engine.hops import hops_of
from meshwright.simulator.engine.matching import Channel
from meshwright.spec.trace.timeline import Floats
from meshwright.spec.trace.trace import Ints
from meshwright.spec.trace.traces import Traces


@dataclass(frozen=True)
class Side:
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
    """Of one channel."""

    ranks: Ints
    """Of each instance: a group's, or sender and receiver of messages [instances, ranks]."""
    sides: tuple[Side, ...]
    """Of each of the channel's members."""

    def __len__(self) -> int:
        return len(self.ranks)


def instances_of(channel: Channel, traces: Traces) -> Instances:
    """Return the groups of a channel; one that holds all ranks of its classes where they cannot be distinguished."""
    if channel.is_message:
        ranks = hops_of(channel, traces)
        parts = [ranks[:, :1], ranks[:, 1:]]
    else:
        ranks = sibling_groups(channel.group or channel.ranks, traces)
        parts = [ranks] * len(channel.members)
    classes = [np.flatnonzero(traces.class_of_rank == member) for member in channel.members]
    sides = [_side(own, part) for own, part in zip(classes, parts, strict=True)]
    if any(side is None for side in sides):
        return Instances(ranks[:1], tuple(Side(np.zeros(len(own), np.int64), np.arange(len(own))) for own in classes))
    return Instances(ranks, tuple(side for side in sides if side is not None))


def _side(own: Ints, part: Ints) -> Side | None:
    """Return where a class's ranks are; None unless each instance has equally many of them."""
    instance_of = {rank: number for number, row in enumerate(part.tolist()) for rank in row}
    found = np.array([instance_of.get(rank, -1) for rank in own.tolist()])
    counts = np.bincount(found + 1, minlength=len(part) + 1)
    if counts[0] or len(set(counts[1:].tolist())) != 1:
        return None
    return Side(found, np.argsort(found, kind="stable"))
