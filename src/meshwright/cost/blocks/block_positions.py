"""BlockPosition: the block groups of all models side by side, each position priced for all configurations at once."""

from dataclasses import dataclass

import numpy as np

from meshwright.cost.blocks.block_table import BLOCK, FIRST, LAST
from meshwright.cost.blocks.work import Work
from meshwright.cost.layout_table import Floats, Ints


@dataclass(frozen=True)
class BlockPosition:
    """The block group at one position of every model, one element a configuration."""

    kind: int
    row: Ints
    """Its row of the BlockTable."""
    count: Floats
    """Blocks; 0 where a model has no group there."""


def block_positions(work: Work) -> list[BlockPosition]:
    """Return each position and kind of block group that any model has."""
    blocks = work.blocks
    order = np.lexsort((np.arange(len(blocks.key)), blocks.key))
    place = np.zeros(len(blocks.key), np.int64)
    keys = blocks.key[order]
    starts = np.r_[0, np.flatnonzero(np.diff(keys)) + 1]
    place[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    positions = []
    for number in range(int(place.max()) + 1):
        for kind in (BLOCK, FIRST, LAST):
            rows = np.flatnonzero((place == number) & (blocks.kind == kind))
            if not len(rows):
                continue
            row_of_key = np.full(len(work.setup_index), -1)
            row_of_key[blocks.key[rows]] = rows
            row = row_of_key[work.key_of_config]
            count = np.where(row >= 0, blocks.count[row], 0.0)
            positions.append(BlockPosition(kind, np.maximum(row, 0), count))
    return positions
