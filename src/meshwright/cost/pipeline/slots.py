"""Slots: the block groups of all configurations' models side by side, each position priced for all at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.training_setup import Floats
from meshwright.cost.work import BLOCK, FIRST, LAST, Ints, Work


@dataclass(frozen=True)
class Slot:
    """The block group at one position of every configuration's model, one element a configuration."""

    kind: int
    owner: Ints
    count: Floats
    """Blocks; 0 where a model has no group there."""


def slots_of(work: Work) -> list[Slot]:
    """Return a slot for each position and kind of block group that any model has."""
    owners = work.owners
    order = np.lexsort((np.arange(len(owners.key)), owners.key))
    position = np.zeros(len(owners.key), np.int64)
    keys = owners.key[order]
    starts = np.r_[0, np.flatnonzero(np.diff(keys)) + 1]
    position[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    slots = []
    for slot in range(int(position.max()) + 1):
        for kind in (BLOCK, FIRST, LAST):
            rows = np.flatnonzero((position == slot) & (owners.kind == kind))
            if not len(rows):
                continue
            owner = np.full(len(work.setup_index), -1)
            owner[owners.key[rows]] = rows
            of_config = owner[work.key_of_config]
            count = np.where(of_config >= 0, owners.count[of_config], 0.0)
            slots.append(Slot(kind, np.maximum(of_config, 0), count))
    return slots
