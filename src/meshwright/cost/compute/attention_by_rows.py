"""AttentionByRows: what attention costs whose scores are held a block of queries at a time
(parallelism/context/blockwise_attention.py).

    products   scores and what they weigh, forward; backward scores again and four gradients: tiles of float32
               (matmul.py), or their bytes / memory rate
    passes     over the scores in float32: 9 forward (scale 2, hide 2, logsumexp 1, difference 2, exponential 2), 15
               backward (scale 4, hide 2, differences 4, exponential 2, product 3)
    sums       of the gradients of keys and values, read, added to and written for each block

No score is left out for a mask. Counted in its operators of 2026-11-23. Ignored: the masks, one for all heads; casts of
keys and values, and what is read and written of a query's own, small next to its scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.compute.matmul import MatmulSizes, tile_flops
from meshwright.cost.layout_table import Floats, Passes
from meshwright.spec.model.op import ATTENTION_SCORES_AT_ONCE

_WIDE = 4.0
"""Bytes of an element in float32."""
_SCORE_PASSES = (9.0, 15.0)
_SUM_PASSES = 3.0
_KERNELS = (12.0, 24.0)
"""Of one block, besides products."""


@dataclass(frozen=True)
class AttentionByRows:
    """Attention of some queries to some keys; one element a configuration."""

    sequences: Floats
    queries: Floats
    """Of one sequence."""
    keys: Floats
    heads: Floats
    kv_heads: Floats
    width: Floats
    """Of a head, mean of keys' and values'."""

    @property
    def scores(self) -> Floats:
        """Return the pairs of a query and a key, of all heads and sequences."""
        return self.sequences * self.heads * self.queries * self.keys

    @property
    def num_blocks(self) -> Floats:
        """Return the blocks that the queries are taken in."""
        return np.ceil(self.scores / ATTENTION_SCORES_AT_ONCE)

    def products_s(self, flops_per_s: Floats, bytes_per_s: Floats, num_sms: Floats, small_tile: ArrayLike) -> Passes:
        """Return the seconds of matrix products at the rate of float32."""
        groups = self.sequences * self.kv_heads
        rows = self.scores / np.maximum(self.num_blocks * groups * self.keys, 1)

        def seconds(m: Floats, n: Floats, k: Floats) -> Floats:
            tiles = tile_flops(MatmulSizes(m, n, k, groups), num_sms, small_tile)
            moved = _WIDE * groups * (m * k + k * n + m * n)
            return self.num_blocks * np.maximum(tiles / flops_per_s, moved / bytes_per_s)

        scores, of_rows = seconds(rows, self.keys, self.width), seconds(rows, self.width, self.keys)
        of_keys = seconds(self.keys, self.width, rows)
        return scores + of_rows, 2 * scores + of_rows + 2 * of_keys

    def passes_s(self, bytes_per_s: Floats, kernel_s: float) -> Passes:
        """Return the seconds of all other kernels, and of the starts of all."""
        forward, backward = (
            _WIDE * passes * self.scores / bytes_per_s + kernel_s * kernels * self.num_blocks
            for passes, kernels in zip(_SCORE_PASSES, _KERNELS, strict=True)
        )
        sums = 2 * self.sequences * self.keys * self.kv_heads * self.width
        return forward, backward + _WIDE * _SUM_PASSES * sums * self.num_blocks / bytes_per_s
