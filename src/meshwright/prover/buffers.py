"""Persistent buffers of each rank after the last step, compared with those of one process: a checkpoint keeps them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.prover.differences import LEAST_SHARE, Record, RecordedShard, RecordedShards


def buffer_problem(records: Sequence[Record], reference: Record, bar: float) -> str | None:
    """Return which buffer of which rank is not that of one process, and how many more; None if all are.

    Floating-point ones may differ by `bar`, relative to the 2-norm of the buffer, or to a thousandth of the typical
    one's where that is more: in what cancels, rounding dominates. Others have to be equal. Not compared is a buffer of
    another shape than that of one process: a rank's own part, of which nothing says where it belongs.
    """
    names: dict[str, str] = {}
    for rank, record in enumerate(records):
        for name, relative in _wrong(record.buffers, reference.buffers, bar):
            names.setdefault(name, f"buffer {name} of rank {rank} is not that of one process: {relative}")
    if not names:
        return None
    return next(iter(names.values())) + (f"; and {len(names) - 1} more" if len(names) > 1 else "")


def _wrong(buffers: RecordedShards, references: RecordedShards, bar: float) -> Iterator[tuple[str, str]]:
    """Yield the buffers that differ, and by how much."""
    norms = [_norm(one.values) for one in references.values() if one.values.dtype.kind in "fc"]
    least = LEAST_SHARE * float(np.sqrt(np.mean(np.square(norms)))) if norms else 0.0
    for name, one in buffers.items():
        if name not in references or references[name].shape != one.shape:
            continue
        expected = _same_part(references[name], one)
        is_float = expected.dtype.kind in "fc"
        differs = ~((one.values == expected) | (np.isnan(one.values) & np.isnan(expected) if is_float else False))
        if not is_float and differs.any():
            yield name, f"{int(differs.sum())} of {differs.size} elements differ"
        elif differs.any():
            distance = float(np.linalg.norm((one.values[differs] - expected[differs]).ravel()))
            size = max(_norm(expected), least)
            # Not "more than": what is not finite is wrong.
            if not distance <= bar * size:
                yield name, f"differs by {distance / size:.1e} of its size" if size else "one process has zeros"


def _same_part(reference: RecordedShard, shard: RecordedShard) -> np.ndarray[Any, Any]:
    """Return the elements of a whole tensor that `shard` holds."""
    parts = zip(shard.offsets, shard.values.shape, strict=True)
    return reference.values[tuple(slice(start, start + size) for start, size in parts)]


def _norm(values: np.ndarray[Any, Any]) -> float:
    """Return the 2-norm of the finite elements: masks hold infinities."""
    return float(np.linalg.norm(values[np.isfinite(values)].ravel()))
