"""Block-fp8 weights, as DeepSeek-V3 is published: float8_e4m3fn values and one scale for each block of a matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.safetensors.safetensors_header import StoredEntry
from meshwright.errors import CheckpointError, ConfigError
from meshwright.spec.model.hf.hf_quantization import BLOCK_KEY, QUANTIZATION

_STORED_AS = "F8_E4M3"
_SUFFIX = "_scale_inv"
_SCALE_DTYPES = ("F32", "BF16")


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
