"""Largest differences of losses, gradients and updated weights between a layout and one process.

A parameter's gradient is compared as a whole, by its 2-norm relative to that of one process. Where that norm is tiny
(gradients that cancel), rounding dominates; the least norm that counts is a thousandth of the typical parameter's, that
of all gradients over the root of the number of parameters. Weights are compared by their updates, like gradients: in
the weights themselves a wrong update would vanish. Rounding of the weights in each step is allowed for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.prover.assemble import Array, Incomparable, Tensors, WholeRecord
from meshwright.spec.run.proof import Difference, DifferenceKind, ProofPrecision

_LEAST_SHARE = 1e-3


class _Quantity(NamedTuple):
    """Compared quantity: fields of a Difference."""

    kind: DifferenceKind
    name: str
    step: int


@dataclass(frozen=True)
class Tolerances:
    """The largest relative differences that rounding explains."""

    loss: float
    gradient: float
    weight: float


TOLERANCES: Mapping[ProofPrecision, Tolerances] = {
    "float32": Tolerances(loss=2e-6, gradient=1e-5, weight=1e-5),
    "float64": Tolerances(loss=1e-11, gradient=1e-11, weight=1e-11),
    # bfloat16 rounds by 2**-9 = 0.2 % in each layer, and a token between two experts may go to the other: up to 8 % of
    # a gradient in a mixture, 1 % in a dense model (2026-11-22). Planted faults are an order of magnitude above.
    "mixed": Tolerances(loss=2e-3, gradient=0.2, weight=0.2),
}


def compare(
    record: WholeRecord, reference: WholeRecord, tolerances: Tolerances
) -> tuple[Difference, Difference, Difference]:
    """Return the worst difference of losses, of gradients and of weights; raises Incomparable for other names."""
    steps = range(1, len(reference.losses) + 1)
    losses = [
        _difference(_Quantity("loss", "", step), abs(loss - one), abs(one), tolerances.loss)
        for step, loss, one in zip(steps, record.losses, reference.losses, strict=True)
    ]
    gradients = [
        difference
        for step, tensors, ones in zip(steps, record.gradients, reference.gradients, strict=True)
        for difference in _gradients(tensors, ones, step, tolerances.gradient)
    ]
    norms = [
        _difference(_Quantity("gradient", "all", step), abs(norm - one), one, tolerances.gradient)
        for step, norm, one in zip(steps, record.grad_norms, reference.grad_norms, strict=True)
    ]
    weights = _weights(record, reference, tolerances.weight)
    return _max(losses), _max([*gradients, *norms]), _max(weights)


def _weights(record: WholeRecord, reference: WholeRecord, bar: float) -> list[Difference]:
    """Return the error of each parameter's update relative to its size."""
    start, end = record.initial_weights, record.weights
    _require_same_names(start, reference.initial_weights)
    _require_same_names(end, reference.weights)
    # Initial weights are bitwise equal under all layouts.
    unlike = [name for name, weight in reference.initial_weights.items() if not np.array_equal(start[name], weight)]
    if unlike:
        raise Incomparable(f"initial weight {unlike[0]} is not that of one process{_more(unlike)}")
    num_steps = len(record.losses)
    ways = {name: weight - reference.initial_weights[name] for name, weight in reference.weights.items()}
    least = _least(ways)
    differences = []
    for name, weight in reference.weights.items():
        rounding = num_steps * float(np.finfo(weight.dtype).eps) * _norm(weight)
        size = max(_norm(ways[name]), least, rounding / bar)
        differences.append(_difference(_Quantity("weight", name, num_steps), _norm(end[name] - weight), size, bar))
    return differences


def _gradients(tensors: Tensors, references: Tensors, step: int, bar: float) -> list[Difference]:
    _require_same_names(tensors, references)
    least = _least(references)
    return [
        _difference(
            _Quantity("gradient", name, step), _norm(tensors[name] - reference), max(_norm(reference), least), bar
        )
        for name, reference in references.items()
    ]


def _least(references: Tensors) -> float:
    return _LEAST_SHARE * math.sqrt(sum(_norm(one) ** 2 for one in references.values()) / len(references))


def _difference(what: _Quantity, distance: float, size: float, bar: float) -> Difference:
    relative = 0.0
    if distance:
        # Infinite relative to zeros, but JSON has no infinity.
        relative = min(distance / size if size else math.inf, sys.float_info.max)
    return Difference(kind=what.kind, name=what.name, step=what.step, relative=relative, bar=bar)


def _require_same_names(tensors: Tensors, references: Tensors) -> None:
    missing = [name for name in references if name not in tensors]
    if missing:
        raise Incomparable(f"no rank holds {missing[0]}{_more(missing)}")
    unknown = [name for name in tensors if name not in references]
    if unknown:
        raise Incomparable(f"one process has no {unknown[0]}{_more(unknown)}")
    for name, reference in references.items():
        if tensors[name].shape != reference.shape:
            raise Incomparable(f"{name} is {tensors[name].shape}, and {reference.shape} in one process")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _norm(tensor: Array) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64)))


def _max(differences: list[Difference]) -> Difference:
    return max(differences, key=lambda difference: difference.share)
