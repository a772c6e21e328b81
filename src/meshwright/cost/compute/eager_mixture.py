"""What our mixtures of experts move through memory, operator by operator: models/moe.py where it is not compiled.

    rows    K of each token, D wide: taken from tokens, padded (zeros, then rows), back out of padding, into the tokens'
            order, weighed, summed; with ep also into the experts' order and out of it
    width   K F of each token: activation and product, with the activation recomputed in backward
    router  its input, cast to float32

Counted in elements that operators read and write, as op_time.py prices them. Ignored: indices, and rows of padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost.partition import Partition
from meshwright.cost.training_setup import Floats
from meshwright.spec.model.op import GroupedMatmul, Op

_ROW_PASSES = (12.0, 19.0)
"""Reads and writes of all rows, forward and backward: 2 for a gather, 3 where zeros are written first, 3 for a product
or for the sum of two gradients."""
_EXCHANGE_PASSES = 4.0
_WIDTH_PASSES = (5.0, 11.0)
_ROUTER_PASSES = (3.0, 6.0)
"""A cast from 16 bits to 32, backward also the sum of the gradients that the router and the rows give a token."""


def is_eager(ops: Sequence[Op], partition: Partition) -> Floats:
    """Return 1 where a block of `ops` has a mixture that runs operator by operator, else 0, one element a key."""
    has_experts = any(isinstance(op, GroupedMatmul) for op in ops)
    return np.where(partition.has_eager_experts & has_experts, 1.0, 0.0)


def eager_elements(ops: Sequence[Op], partition: Partition) -> tuple[Floats, Floats]:
    """Return what one microbatch's tokens move, forward and backward; 0 where the mixture is compiled."""
    grouped = [op for op in ops if isinstance(op, GroupedMatmul)]
    if not grouped:
        return 0.0 * partition.tokens, 0.0 * partition.tokens
    first = grouped[0]
    copies, dim, width = first.experts_per_token, first.in_features, first.out_features / partition.etp
    tokens = partition.tokens / partition.tp * partition.etp * is_eager(ops, partition)
    exchange = np.where(partition.ep > 1, _EXCHANGE_PASSES, 0.0)

    def moved(rows: float, widths: float, router: float) -> Floats:
        return np.asarray(tokens * (copies * dim * (rows + exchange) + copies * width * widths + dim * (1 + router)))

    forward, backward = zip(_ROW_PASSES, _WIDTH_PASSES, _ROUTER_PASSES, strict=True)
    return moved(*forward), moved(*backward)
