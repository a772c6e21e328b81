"""sequence_copies: what our trainer copies around tp's collectives, to join and to cut sequences.

    all-gather        the parts arrive one after the other, and are joined along the sequence
    reduce-scatter    the sequence is cut into the ranks' parts, which lie one after the other

Each reads and writes the whole sequence once (parallelism/collectives.py), in backward as in forward. What a
column-parallel matmul reads is gathered, and copied, once more in backward (parallelism/tensor/layers.py), unless its
block recomputes it anyway; in a compiled block that copy is part of what it recomputes. Async tp has none: its matmuls
work part by part. Counted in traced steps on torch 2.13, 2026-11-23. Ignored: that a compiled block also normalises one
of its inputs again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost.compute.recompute import Recomputed
from meshwright.cost.layout_table import LayoutTable
from meshwright.cost.training_setup import Floats
from meshwright.cost.work import BLOCK, BlockTable, Bools, Ints

_READ_AND_WRITE = 2.0


class SequenceCopies(NamedTuple):
    """Elements that one microbatch moves in one block, or before or after them; one element a configuration."""

    forward: Floats
    backward: Floats
    again: Floats
    """Of what backward recomputes."""


def sequence_copies(
    blocks: BlockTable, row: Ints, layouts: LayoutTable, again: Recomputed, is_own: Bools
) -> SequenceCopies:
    """Return what is copied for `row` of each configuration; nothing where the software is another."""
    is_block, is_compiled = blocks.kind[row] == BLOCK, layouts.compiles_blocks
    copies = np.where(is_own & ~(is_block & layouts.async_tp), _READ_AND_WRITE, 0.0)
    sequence = copies * blocks.tokens[row] * blocks.width[row]
    one_way = sequence * blocks.num_tp_collectives[row]
    regathered = sequence * blocks.num_tp_inputs[row] * (1 - again.memory)
    # Half are gathers, half scatters; recomputation stops before a block's last scatter.
    recomputed = (again.memory / 2 + again.collectives / 4) * one_way
    return SequenceCopies(
        forward=one_way,
        backward=one_way + np.where(is_compiled, 0.0, regathered),
        again=recomputed + np.where(is_compiled, regathered, 0.0),
    )
