"""MXFP4 weights, as GPT-OSS's experts are published: 4-bit floats and one power of two for each 32 of a row.

A matrix of each expert is stored as NAME_blocks [experts, out, in / 32, 16], two values a byte, the first in the low
half, and NAME_scales [experts, out, in / 32], exponents with a bias of 127 (OCP Microscaling Formats 1.0). The weight
that they mean is NAME [experts, in, out].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.safetensors.safetensors_header import StoredEntry
from meshwright.errors import CheckpointError

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


class PackedNames(NamedTuple):
    """Where one weight is stored, and its shape."""

    blocks: str
    scales: str
    shape: tuple[int, int, int]


def find_packed(entries: Mapping[str, StoredEntry], folder: Path) -> dict[str, PackedNames]:
    """Return the MXFP4 weights by name; raises CheckpointError for blocks and scales of shapes that do not match."""
    found = {}
    for blocks in entries:
        name = blocks.removesuffix(_BLOCKS)
        scales = f"{name}{_SCALES}"
        if name == blocks or name in entries or scales not in entries:
            continue
        shape, other = entries[blocks].shape, entries[scales].shape
        is_u8 = entries[blocks].dtype == entries[scales].dtype == "U8"
        if not is_u8 or len(shape) != 4 or shape != (*other, _BLOCK_BYTES):
            raise CheckpointError(
                f"{folder}: {blocks} {list(shape)} and {scales} {list(other)} are no MXFP4, which is U8 of "
                f"[experts, out, blocks, {_BLOCK_BYTES}] and [experts, out, blocks]: copy the whole folder again"
            )
        num_experts, num_out, num_blocks, _ = shape
        found[name] = PackedNames(blocks, scales, (num_experts, num_blocks * 2 * _BLOCK_BYTES, num_out))
    return found


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weight [experts, in, out] in bfloat16, which holds all but the smallest powers exactly."""
    values = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - _EXPONENT_BIAS
    return torch.ldexp(values[codes.int()], exponents).to(torch.bfloat16).flatten(-2).mT
