"""Matmul: seconds of (m, k) x (k, n), from tiles worked through in waves; AttentionByRows, which is made of them.

    tile_flops = min over tiles (bm, bn) and splits s of
                 waves x (k / s + prologue) x 2 bm bn x SMs / tile efficiency
    waves      = mean of tiles / SMs rounded up, and not (persistent kernels share the last wave in part)
    seconds    = max(tile_flops / rate, bytes / memory rate)

`rate` is what a device reaches on large matmuls. tile_flops equals 2 m n k for a large matmul whose sides divide.
Source: "Matrix multiplication background" and "tile and wave quantization" in NVIDIA's deep-learning performance guide;
the menu is CUTLASS's usual one. Ignored: L2 hits, the choice a library really makes, clocks that fall under load.

AttentionByRows: attention whose scores are held a block of queries at a time (blockwise_attention.py):

    products   scores and what they weigh, forward; backward scores again and four gradients: tiles of float32,
               as above, or their bytes / memory rate
    passes     over the scores in float32: 9 forward (scale 2, hide 2, logsumexp 1, difference 2, exponential 2), 15
               backward (scale 4, hide 2, differences 4, exponential 2, product 3)
    sums       of the gradients of keys and values, read, added to and written for each block

No score is left out for a mask. Counted in its operators of 2026-11-23. Ignored: the masks, one for all heads; casts of
keys and values, and what is read and written of a query's own, small next to its scores.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import Bools, Floats, Passes
from meshwright.spec.model.op import ATTENTION_SCORES_AT_ONCE

_LARGEST_TILE = 256 * 128
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    *((m, n, fixed_constant(f"tile.{m}x{n}")) for m, n in ((128, 128), (128, 64), (64, 64))),
)
"""Rows and columns of a tile, and the share of the best rate that its arithmetic reaches."""
_SPLITS = (1, 2, 4, 8)
_PROLOGUE, _BLACKWELL_PROLOGUE = fixed_constant("tile_prologue"), fixed_constant("tile_prologue.blackwell")
_SPLIT_PROLOGUE = fixed_constant("split_prologue")
_ROUNDED_SHARE = fixed_constant("rounded_waves")
_ALIGNED_BYTES = 128
_ROUTED_TILES = 0.5
"""What rounding up to tiles adds to each group in the mean, where the rows of groups are anything."""


class MatmulSizes(NamedTuple):
    """`groups` matmuls of (m, k) x (k, n) in one kernel."""

    m: Floats
    n: Floats
    k: Floats
    groups: Floats
    is_routed: Bools | bool = False
    """Whether m is the mean of groups that differ, as the rows of experts do."""


def tile_flops(sizes: MatmulSizes, num_sms: Floats, small_tile: ArrayLike) -> Floats:
    """Return FLOPs at the best rate that take as long as the matmuls do.

    `small_tile` multiplies the efficiency of all tiles but the largest: newer devices need large ones. Never below
    2 groups m n k.
    """
    prologue = np.where(np.asarray(small_tile) < 1, _BLACKWELL_PROLOGUE, _PROLOGUE)
    m, n, k, groups, is_routed = sizes
    best = np.full(np.broadcast(m, n, k, groups, num_sms).shape, np.inf)
    for rows, columns, share in _TILES:
        efficiency = share if rows * columns == _LARGEST_TILE else share * np.asarray(small_tile, np.float64)
        row_tiles = np.where(is_routed, np.maximum(m / rows + _ROUTED_TILES, 1.0), np.ceil(m / rows))
        tiles = groups * row_tiles * np.ceil(n / columns)
        for split in _SPLITS:
            waves = tiles * split / num_sms
            waves = _ROUNDED_SHARE * np.ceil(waves) + (1 - _ROUNDED_SHARE) * np.maximum(waves, 1)
            depth = k / split + prologue * (_SPLIT_PROLOGUE if split > 1 else 1.0)
            best = np.minimum(best, waves * depth * 2 * rows * columns * num_sms / efficiency)
    return best


def matmul_bytes(m: Floats, n: Floats, k: Floats, groups: Floats, element_bytes: Floats) -> Floats:
    """Return the bytes that the matmul reads and writes at least: inputs in `element_bytes` each, output in 16 bits."""
    return groups * ((m * k + k * n) * element_bytes + m * n * 2.0)


def is_misaligned(n: Floats, k: Floats, element_bytes: Floats) -> Floats:
    """Return 1 where a row of an operand is no multiple of 128 bytes, which costs the fast path; 0 elsewhere."""
    step = _ALIGNED_BYTES / element_bytes
    return np.asarray((np.mod(n, step) != 0) | (np.mod(k, step) != 0), np.float64)


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
