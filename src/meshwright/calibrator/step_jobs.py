"""Small jobs whose steps are profiled, and what of an FSDP step is FSDP's.

Where ranks share parameters the time before an operator holds FSDP's hooks, too, which a step without FSDP has not. So
each job in float32 is profiled twice, sharded and with the whole model on each rank (parallelism/data/replica_sums.py).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.calibrator.profiled_step import ProfiledStep
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


_FEWER_TOKENS = 8
"""Times fewer tokens a sequence in a dtype without kernels, whose steps would take seconds."""


def step_jobs(num_ranks: int, slow_dtypes: Collection[str] = ()) -> Iterator[Job]:
    """Yield each job, for `num_ranks` ranks that shard the model; with short sequences in `slow_dtypes`."""
    for shape in _SHAPES:
        if shape.dtype in slow_dtypes:
            shape = replace(shape, seq_len=shape.seq_len // _FEWER_TOKENS, microbatch_size=1)
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


def whole_jobs(jobs: Sequence[Job], num_ranks: int) -> list[Job]:
    """Return the first of `jobs`, those that run without FSDP where ranks do not share the model, on as many replicas.

    None for one rank, which shares nothing as it is.
    """
    layout = {"dp_shard": 1, "dp_replicate": num_ranks}
    of_float32 = [job for job in jobs if job.precision.compute == "float32"] if num_ranks > 1 else []
    return [job.replace(layout=job.layout.replace(**layout)) for job in of_float32]


def without_hooks(sharded: ProfiledStep, whole: ProfiledStep) -> ProfiledStep:
    """Return a sharded step whose operators take what they take in the step of the same job on whole replicas, and
    whose collectives take the rest: what FSDP's hooks do. Operators of the other step alone are added.
    """
    mean_s = {op.signature: op.mean_s for op in whole.ops}
    ops = [replace(op, mean_s=mean_s.get(op.signature, op.mean_s)) for op in sharded.ops]
    of_hooks_s = sum(op.count * (op.mean_s - own.mean_s) for op, own in zip(sharded.ops, ops, strict=True))
    known = {op.signature for op in ops}
    more = [op for op in whole.ops if op.signature not in known]
    return replace(sharded, ops=ops + more, exchanges_s=max(sharded.exchanges_s + of_hooks_s, 0.0))
