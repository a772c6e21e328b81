"""Menu: the sizes that calibrate measures, and how they fill the time it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from meshwright.spec.machine.measured import CollectiveKind, MemoryOp
from meshwright.units import KiB, MiB


@dataclass(frozen=True)
class Menu:
    """Sizes to measure; every combination of those of one operation is a point, so that points form a grid."""

    dtypes: tuple[str, ...]
    """Formats of matrix products, of attention and of what moves numbers."""
    matmul_rows: tuple[int, ...]
    """Tokens of a linear layer."""
    matmul_widths: tuple[int, ...]
    """Inputs, and outputs, of a linear layer."""
    seq_lens: tuple[int, ...]
    """Positions that attention is measured on."""
    head_dims: tuple[int, ...]
    """Widths of a head."""
    num_heads: int
    """Heads of all sequences that attention is measured on at once."""
    num_elements: tuple[int, ...]
    """Of what moves numbers."""
    collective_bytes: tuple[int, ...]
    """Of the whole tensor."""
    block_widths: tuple[int, ...]
    """Of blocks that FSDP shards, whose parameters are about 15 x width^2."""

    @property
    def num_points(self) -> int:
        """Return about how many things are measured: each gets an equal share of the time."""
        matmuls = len(self.matmul_rows) * len(self.matmul_widths) ** 2
        attentions = 2 * len(self.seq_lens) * len(self.head_dims)
        memory_ops = 2 * len(get_args(MemoryOp)) * len(self.num_elements)
        collectives = len(get_args(CollectiveKind)) * len(self.collective_bytes)
        return len(self.dtypes) * (matmuls + attentions + memory_ops) + collectives


CPU_MENU = Menu(
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
"""For a rank on a core or a few: small models, caches of KiB and MiB."""

CUDA_MENU = Menu(
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
