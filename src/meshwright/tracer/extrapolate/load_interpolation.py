"""LoadInterpolation: the step of a rank with another number of tokens, interpolated between two traced ranks.

All sizes of a step are affine in the rows that a rank's experts receive: dims of tensors, FLOPs of grouped matmuls,
bytes read, written and live, and bytes exchanged with each rank. Two ranks of one pipeline rank with different loads
determine both coefficients. The bytes of an all-to-all are the maximum of what a rank sends, equal on all ranks, and
what it receives, so they are taken from its tensors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.spec.trace.trace import NONE, Ints, Signature, TensorShape, Trace
from meshwright.spec.trace.trace_order import in_order

_ALL_TO_ALL = ("alltoall", "all_to_all")
_SAME = ("kind", "stream", "scope", "phase", "action", "group", "work", "event")


class DifferentPrograms(Exception):
    """Two ranks run different operations, so that none can be interpolated; the message says where."""


class LoadInterpolation:
    """Two traced ranks of one pipeline rank, and the rows that each receives."""

    def __init__(self, heavy: Trace, light: Trace, num_rows: tuple[int, int]) -> None:
        assert num_rows[0] > num_rows[1]
        self._heavy, self._light, self._num_rows = in_order(heavy), in_order(light), num_rows
        self._require_same_program()
        columns = np.stack([self._heavy.records.signature, self._light.records.signature])
        pairs, where = np.unique(columns, axis=1, return_inverse=True)
        self._pairs: list[list[int]] = pairs.T.tolist()
        self._signature = np.where(columns[0] == NONE, NONE, where.ravel() - (self._pairs[0][0] == NONE))
        self._pairs = [pair for pair in self._pairs if pair[0] != NONE]

    def between(self, num_rows: int) -> Trace:
        """Return the heavier rank's trace for a load of `num_rows`."""
        heavy, light = self._heavy, self._light
        weight = (num_rows - self._num_rows[1]) / (self._num_rows[0] - self._num_rows[1])
        signatures = tuple(_mixed(heavy.signatures[one], light.signatures[two], weight) for one, two in self._pairs)
        num_bytes = _between(heavy.records.num_bytes, light.records.num_bytes, weight)
        carried = np.array([*(_carried(one) for one in signatures), NONE])[self._signature]
        return replace(
            heavy,
            signatures=signatures,
            records=replace(
                heavy.records,
                signature=self._signature,
                num_bytes=np.where(carried == NONE, num_bytes, carried),
            ),
            storages=replace(
                heavy.storages, num_bytes=_between(heavy.storages.num_bytes, light.storages.num_bytes, weight)
            ),
        )

    def _require_same_program(self) -> None:
        for name in _SAME:
            if not np.array_equal(getattr(self._heavy.records, name), getattr(self._light.records, name)):
                raise DifferentPrograms(f"their records differ in {name}")
        for part in ("storages", "uses"):
            for name, column in vars(getattr(self._heavy, part)).items():
                if name != "num_bytes" and not np.array_equal(column, getattr(getattr(self._light, part), name)):
                    raise DifferentPrograms(f"their {part} differ in {name}")


def _mixed(heavy: Signature, light: Signature, weight: float) -> Signature:
    if heavy == light:
        return heavy
    shapes = {
        name: tuple(
            TensorShape(
                dtype=one.dtype, dims=tuple(_number(*dims, weight) for dims in zip(one.dims, two.dims, strict=True))
            )
            for one, two in zip(getattr(heavy, name), getattr(light, name), strict=True)
        )
        for name in ("inputs", "outputs")
    }
    counts = {
        name: _number(getattr(heavy, name), getattr(light, name), weight)
        for name in ("flops", "read_bytes", "written_bytes")
    }
    pairs = {
        name: tuple(_number(*bytes_, weight) for bytes_ in zip(getattr(heavy, name), getattr(light, name), strict=True))
        for name in ("sends", "receives")
    }
    return heavy.replace(**shapes, **counts, **pairs)


def _number(heavy: int, light: int, weight: float) -> int:
    return light + round((heavy - light) * weight)


def _between(heavy: Ints, light: Ints, weight: float) -> Ints:
    return np.asarray(light + np.rint((heavy - light) * weight).astype(np.int64))


def _carried(signature: Signature) -> int:
    """Return the bytes of an all-to-all; -1 for other operators."""
    if not any(name in signature.op for name in _ALL_TO_ALL):
        return NONE
    return max(signature.read_bytes, signature.written_bytes)
