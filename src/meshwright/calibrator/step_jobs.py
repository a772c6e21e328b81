"""Small jobs of many shapes, whose steps calibration profiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.spec.job.job import Job

_NUM_MICROBATCHES = 2


@dataclass(frozen=True)
class _Shape:
    dim: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    seq_len: int
    microbatch_size: int
    dtype: str = "float32"


_SHAPES = (
    _Shape(64, 4, 2, 192, 128, 2),
    _Shape(192, 4, 2, 576, 192, 2),
    _Shape(320, 5, 5, 1024, 384, 1),
    _Shape(96, 6, 2, 256, 768, 1),
    _Shape(512, 8, 4, 1536, 96, 4),
    _Shape(160, 4, 2, 448, 1536, 1),
    _Shape(192, 4, 2, 576, 192, 2, "bfloat16"),
    _Shape(320, 5, 5, 1024, 384, 1, "bfloat16"),
)
"""Widths from CPU-bound to compute-bound, sequences from short to long; none of a preset."""


def step_jobs(num_ranks: int) -> Iterator[Job]:
    """Yield each job, for `num_ranks` ranks that shard the model."""
    for shape in _SHAPES:
        options = {
            **{"dim": shape.dim, "head_dim": shape.dim // shape.num_heads, "ffn_dim": shape.ffn_dim},
            **{"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "num_layers": 2},
        }
        global_batch_size = _NUM_MICROBATCHES * shape.microbatch_size * num_ranks
        yield Job.from_dict(
            {
                "model": {"source": "llama-1m", "options": options},
                "data": {"source": "stdlib"},
                "train": {"steps": 10, "seq_len": shape.seq_len, "global_batch_size": global_batch_size},
                "precision": {"compute": shape.dtype},
                "layout": {"dp_shard": -1, "microbatch_size": shape.microbatch_size},
            }
        )
