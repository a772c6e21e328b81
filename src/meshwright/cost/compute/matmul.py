"""Matmul: seconds of (m, k) x (k, n), from the tiles that the device's processors work through in waves.

    tile_flops = min over tiles (bm, bn) and splits s of
                 waves x (k / s + prologue) x 2 bm bn x SMs / tile efficiency
    waves      = mean of tiles / SMs rounded up, and not (persistent kernels share the last wave in part)
    seconds    = max(tile_flops / rate, bytes / memory rate)

`rate` is what a device reaches on large matmuls. tile_flops equals 2 m n k for a large matmul whose sides divide.
Source: "Matrix multiplication background" and "tile and wave quantization" in NVIDIA's deep-learning performance guide;
the menu is CUTLASS's usual one. Ignored: L2 hits, the choice a library really makes, clocks that fall under load.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import Bools, Floats

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
