"""Routing of tokens to experts, for traces in which no tensor holds numbers, and steps under other loads of experts.

Share of all tokens that the experts of each rank receive: equal (balanced), proportional to 1 / (i + 1)^exponent for
the i-th rank (zipf; Zipf's law), or all on the first one (worst). A token goes to each expert at most once, so a rank
receives no more copies of it than it has experts; the excess goes to the next ranks. Shares are the same in every layer
and microbatch, so the first rank has the most work and memory. Every rank sends the same number of tokens.

LoadInterpolation: the step of a rank with another number of tokens, interpolated between two traced ranks.
All sizes of a step are affine in the rows that a rank's experts receive: dims of tensors, FLOPs of grouped matmuls,
bytes read, written and live, and bytes exchanged with each rank. Two ranks of one pipeline rank with different loads
determine both coefficients. The bytes of an all-to-all are the maximum of what a rank sends, equal on all ranks, and
what it receives, so they are taken from its tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.errors import ConfigError
from meshwright.spec.trace.trace import NONE, Ints, Signature, TensorShape, Trace
from meshwright.spec.trace.trace_order import in_order

if TYPE_CHECKING:
    from torch import Tensor

Routing = Callable[[Any, str, int, int, int], list[int]]
"""Replaces parallelism.host_sync, whose tensor has an element for each rank, twice: sent and received rows."""


def parse_routing(text: str) -> Routing:
    """Return the routing of `text`.

    Raises ConfigError for any other.
    """
    if text.endswith(".json"):
        return _given(Path(text))
    return _by_law(exponent_of(text))


def exponent_of(text: str) -> float:
    """Return the exponent of the routing `text`; raises ConfigError for an unknown one."""
    name, _, parameter = text.partition(":")
    try:
        exponent = {"balanced": 0.0, "worst": np.inf}[name] if not parameter else float(parameter)
    except (KeyError, ValueError):
        exponent = -1.0
    if not exponent >= 0 or (parameter and name != "zipf"):
        raise ConfigError(
            f"routing = {text!r}: must be balanced, worst, zipf:1.2 (any exponent of 0 or more), or a .json file "
            "with the rows that a real run sent and received"
        )
    return exponent


def rows_arriving(text: str, rows_sent: int, num_ranks: int, most: int) -> tuple[int, ...] | None:
    """Return the rows that each rank of a group receives if all send `rows_sent`; None for a .json file."""
    if text.endswith(".json"):
        return None
    return tuple(num_ranks * sent for sent in shared_out(rows_sent, num_ranks, exponent_of(text), most))


def read_as(routing: Routing, read: Callable[[Tensor], None]) -> Routing:
    """Return `routing` with a call of `read` for each tensor, since the host reads it."""

    def routed(tensor: Tensor, kind: str, total: int, rank: int, most: int) -> list[int]:
        read(tensor)
        return routing(tensor, kind, total, rank, most)

    return routed


@lru_cache(maxsize=256)
def shared_out(total: int, num_ranks: int, exponent: float, most: int) -> tuple[int, ...]:
    """Return the share of each rank of `total`: integers up to `most` with that sum; exponent 0 is an even share."""
    assert total <= num_ranks * most, "there are experts enough for all copies of a token"
    shares: list[int] = []
    left = total
    for rank in range(num_ranks):
        # Weights of the remaining ranks relative to this one; rounding favours the first ranks.
        weights = ((rank + 1) / np.arange(rank + 1, num_ranks + 1)) ** exponent
        shares.append(min(most, math.ceil(round(left / float(weights.sum()), 6))))
        left -= shares[-1]
    return tuple(shares)


def _by_law(exponent: float) -> Routing:
    def routed(tensor: Tensor, kind: str, total: int, rank: int, most: int) -> list[int]:
        num_ranks = len(tensor) // 2
        sent = shared_out(total, num_ranks, exponent, most)
        return [*sent, *num_ranks * [sent[rank]]]

    return routed


def _given(file: Path) -> Routing:
    """Return the routing of a file: a list of the rows that each call read, in order."""
    try:
        rows = iter(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"routing = {str(file)!r} must be a .json file with a list of the rows that each call read ({error}): "
            "name one, or use balanced, worst or zipf:1.2"
        ) from error

    def routed(tensor: Tensor, kind: str, total: int, rank: int, most: int) -> list[int]:
        found: list[int] = next(rows)
        return found

    return routed


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
