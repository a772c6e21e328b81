"""Grids of sizes that calibration measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from meshwright.spec.machine.device import CollectiveKind, MemoryOp
from meshwright.units import KiB, MiB


@dataclass(frozen=True)
class SizeGrid:
    """Sizes to measure; an operation is measured at every combination of its sizes."""

    dtypes: tuple[str, ...]
    """dtypes of matmuls, attention and memory-bound operations."""
    matmul_rows: tuple[int, ...]
    """Tokens of a linear layer."""
    matmul_widths: tuple[int, ...]
    """Inputs, and outputs, of a linear layer."""
    seq_lens: tuple[int, ...]
    """Sequence lengths of attention."""
    head_dims: tuple[int, ...]
    """Widths of a head."""
    num_heads: int
    """Heads of attention, times sequences."""
    num_elements: tuple[int, ...]
    """Elements of memory-bound operations."""
    collective_bytes: tuple[int, ...]
    """Bytes of the whole tensor of collectives."""
    block_widths: tuple[int, ...]
    """Widths of FSDP-sharded blocks of about 15 x width^2 parameters."""

    @property
    def num_points(self) -> int:
        """Return the approximate number of measurements, which share the time equally."""
        matmuls = len(self.matmul_rows) * len(self.matmul_widths) ** 2
        attentions = 2 * len(self.seq_lens) * len(self.head_dims)
        memory_ops = 2 * len(get_args(MemoryOp)) * len(self.num_elements)
        collectives = len(get_args(CollectiveKind)) * len(self.collective_bytes)
        return len(self.dtypes) * (matmuls + attentions + memory_ops) + collectives


CPU_SIZES = SizeGrid(
    dtypes=("float32", "bfloat16"),
    matmul_rows=(64, 512),
    matmul_widths=(128, 512, 2048),
    seq_lens=(128, 256, 512, 1024),
    head_dims=(32, 64, 128),
    num_heads=4,
    num_elements=(16 * KiB, 128 * KiB, 512 * KiB, 2 * MiB),
    collective_bytes=(4 * KiB, 64 * KiB, 1 * MiB, 16 * MiB),
    block_widths=(32, 128, 256),
)
"""For a rank on one or a few CPU cores: small models, caches of KiB and MiB."""

CUDA_SIZES = SizeGrid(
    dtypes=("float32", "bfloat16"),
    matmul_rows=(256, 1024, 4096, 16384),
    matmul_widths=(256, 1024, 4096, 16384),
    seq_lens=(512, 2048, 8192),
    head_dims=(64, 128),
    num_heads=64,
    num_elements=(64 * KiB, 1 * MiB, 16 * MiB, 64 * MiB),
    collective_bytes=(64 * KiB, 1 * MiB, 16 * MiB, 256 * MiB),
    block_widths=(32, 512, 2048),
)
"""For an accelerator."""
