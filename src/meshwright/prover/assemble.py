"""assemble: from what each rank holds to whole tensors, and whether ranks that hold the same thing agree on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.prover.boxes import Array, Box, Boxes, Record

Tensors = dict[str, Array]
"""Whole tensors by name in the plain model."""


@dataclass(frozen=True)
class WholeRecord:
    """A run as one process would have seen it."""

    initial_weights: Tensors
    losses: list[float]
    grad_norms: list[float]
    gradients: list[Tensors]
    weights: Tensors


class RanksDisagree(Exception):
    """Copies of one thing differ between ranks, or a part of it is on none."""


def assemble(records: Sequence[Record]) -> WholeRecord:
    """Return the run that the ranks' `records` are parts of; raises RanksDisagree where they do not fit together."""
    first = records[0]
    for rank, other in enumerate(records):
        if (other.losses, other.grad_norms) != (first.losses, first.grad_norms):
            raise RanksDisagree(f"rank {rank} tells another loss or gradient norm than rank 0")
    gradients = [
        _whole(f"gradient of step {step}", boxes)
        for step, boxes in enumerate(zip(*(one.gradients for one in records), strict=True), start=1)
    ]
    return WholeRecord(
        initial_weights=_whole("initial weight", [one.initial_weights for one in records]),
        losses=first.losses,
        grad_norms=first.grad_norms,
        gradients=gradients,
        weights=_whole("updated weight", [one.weights for one in records]),
    )


def _whole(what: str, boxes_of_ranks: Sequence[Boxes]) -> Tensors:
    by_name: dict[str, list[tuple[int, Box]]] = {}
    for rank, boxes in enumerate(boxes_of_ranks):
        for name, box in boxes.items():
            by_name.setdefault(name, []).append((rank, box))
    return {name: _tensor(f"{what} {name}", parts) for name, parts in by_name.items()}


def _tensor(what: str, parts: Sequence[tuple[int, Box]]) -> Array:
    """Return one whole tensor: each element's value from the first rank that holds it, which all others must equal."""
    _, first = parts[0]
    whole = np.empty(first.shape, first.values.dtype)
    # Who said so; -1 is nobody.
    source = np.full(first.shape, -1, np.int32)
    for rank, box in parts:
        at = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.values.shape, strict=True))
        is_new = source[at] < 0
        differs = ~is_new & (whole[at] != box.values)
        if differs.any():
            other = int(source[at][differs][0])
            raise RanksDisagree(f"{what}: rank {rank} holds another copy of it than rank {other}")
        whole[at] = np.where(is_new, box.values, whole[at])
        source[at] = np.where(is_new, rank, source[at])
    if (source < 0).any():
        raise RanksDisagree(f"{what}: no rank holds {int((source < 0).sum())} of its {source.size} elements")
    return whole
