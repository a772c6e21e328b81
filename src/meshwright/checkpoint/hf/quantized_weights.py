"""Quantized weights as they are published: block-fp8 of DeepSeek-V3, MXFP4 of GPT-OSS's experts.

Block-fp8: float8_e4m3fn values and one scale for each block of a matrix.

MXFP4: 4-bit floats and one power of two for each 32 of a row. A matrix of each expert is stored as NAME_blocks
[experts, out, in / 32, 16], two values a byte, the first in the low half, and NAME_scales [experts, out, in / 32],
exponents with a bias of 127 (OCP Microscaling Formats 1.0). The weight that they mean is NAME [experts, in, out].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.safetensors.safetensors_header import StoredEntry
from meshwright.errors import CheckpointError, ConfigError
from meshwright.spec.model.hf.hf_quantization import BLOCK_KEY, QUANTIZATION

_STORED_AS = "F8_E4M3"
_SUFFIX = "_scale_inv"
_SCALE_DTYPES = ("F32", "BF16")

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class BlockScales:
    """Scales of one matrix, by block row and block column; blocks at the edges may be smaller."""

    scales: Tensor
    block: tuple[int, int]
    """Rows and columns of a block."""

    def apply(self, values: Tensor, first_row: int) -> Tensor:
        """Return the rows `values` of the matrix, of which the first is `first_row`, times their scales, in float32."""
        rows = torch.arange(first_row, first_row + values.shape[0]) // self.block[0]
        columns = torch.arange(values.shape[1]) // self.block[1]
        return values.float() * self.scales.float()[rows][:, columns]


def block_of(config: Mapping[str, Any], source: str) -> tuple[int, int]:
    """Return rows and columns of a block; raises ConfigError where `config` does not name them."""
    block = (config.get(QUANTIZATION) or {}).get(BLOCK_KEY)
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ConfigError(
            f"{source} has {QUANTIZATION}.{BLOCK_KEY} = {block!r}, but the weights are in block-fp8: it must be two "
            "whole numbers, such as [128, 128]; take the whole config.json of the model"
        )
    return block[0], block[1]


def find_scales(entries: Mapping[str, StoredEntry], config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the name of the scales of each block-fp8 matrix; raises CheckpointError for scales of another shape."""
    found = {
        name: f"{name}{_SUFFIX}"
        for name, entry in entries.items()
        if entry.dtype == _STORED_AS and f"{name}{_SUFFIX}" in entries
    }
    for name, scales in found.items():
        rows, columns = block_of(config, str(folder / "config.json"))
        shape, stored = entries[name].shape, entries[scales]
        expected = (-(-shape[0] // rows), -(-shape[1] // columns)) if len(shape) == 2 else None
        if stored.shape != expected or stored.dtype not in _SCALE_DTYPES:
            raise CheckpointError(
                f"{folder}: {scales} is {stored.dtype} {list(stored.shape)}, but {name} of {list(shape)} in blocks of "
                f"{rows} x {columns} needs F32 {list(expected or ())}: copy the whole folder again"
            )
    return found


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
