"""compare: how far a layout's losses, gradients and updated weights lie from those of one process, at worst.

A parameter's gradient is compared as a whole, by its 2-norm, and against that of one process. Where that is tiny (a
norm whose gradients cancel), rounding in what was summed up is large beside it: a thousandth of the typical parameter's
norm, that of all gradients over the root of the number of parameters, is the least that counts. Weights are compared by
the way that they went, like a gradient: beside the weights themselves a wrong update would vanish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwright.prover.assemble import RanksDisagree, Tensors, WholeRecord
from meshwright.prover.boxes import Array
from meshwright.spec.proof import Difference

_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class Bars:
    """The largest relative differences that rounding explains."""

    loss: float
    gradient: float
    weight: float


FLOAT32_BARS = Bars(loss=2e-6, gradient=1e-5, weight=1e-5)
FLOAT64_BARS = Bars(loss=1e-11, gradient=1e-11, weight=1e-11)


def compare(record: WholeRecord, reference: WholeRecord, bars: Bars) -> tuple[Difference, Difference, Difference]:
    """Return the worst difference of losses, of gradients and of weights; raises RanksDisagree for other names."""
    losses = [
        Difference(name="loss", step=step, relative=abs(loss - one) / abs(one), bar=bars.loss)
        for step, (loss, one) in enumerate(zip(record.losses, reference.losses, strict=True), start=1)
    ]
    gradients = [
        _worst(tensors, ones, step, bars.gradient)
        for step, (tensors, ones) in enumerate(zip(record.gradients, reference.gradients, strict=True), start=1)
    ]
    norms = [
        Difference(name="all, before clipping", step=step, relative=abs(norm - one) / one, bar=bars.gradient)
        for step, (norm, one) in enumerate(zip(record.grad_norms, reference.grad_norms, strict=True), start=1)
    ]
    return (_max(losses), _max([*gradients, *norms]), _weights(record, reference, bars.weight))


def _weights(record: WholeRecord, reference: WholeRecord, bar: float) -> Difference:
    moved = {name: reference.weights[name] - initial for name, initial in reference.initial_weights.items()}
    start = _worst(record.initial_weights, reference.initial_weights, 0, bar)
    # Initial weights depend on no layout, not even in the last bit.
    if start.relative:
        raise RanksDisagree(f"initial weight {start.name} is not that of one process")
    _require_same_names(record.weights, reference.weights)
    end = {name: weight - reference.initial_weights[name] for name, weight in record.weights.items()}
    return _worst(end, moved, len(record.losses), bar)


def _worst(tensors: Tensors, references: Tensors, step: int, bar: float) -> Difference:
    """Return the parameter that lies furthest from its reference."""
    _require_same_names(tensors, references)
    least = _LEAST_SHARE * math.sqrt(sum(_norm(one) ** 2 for one in references.values()) / len(references))
    differences = []
    for name, reference in references.items():
        distance = _norm(tensors[name].astype(np.float64) - reference)
        # Where one process has nothing but zeros, anything else is infinitely wrong, as far as JSON can say.
        size = max(_norm(reference), least, np.finfo(np.float64).tiny)
        differences.append(Difference(name=name, step=step, relative=min(distance / size, 1e300), bar=bar))
    return _max(differences)


def _require_same_names(tensors: Tensors, references: Tensors) -> None:
    missing = [name for name in references if name not in tensors]
    if missing:
        raise RanksDisagree(f"no rank holds {missing[0]}{_more(missing)}")
    unknown = [name for name in tensors if name not in references]
    if unknown:
        raise RanksDisagree(f"one process has no {unknown[0]}{_more(unknown)}")
    for name, reference in references.items():
        if tensors[name].shape != reference.shape:
            raise RanksDisagree(f"{name} is {tensors[name].shape}, and {reference.shape} in one process")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _norm(tensor: Array) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64)))


def _max(differences: list[Difference]) -> Difference:
    return max(differences, key=lambda difference: difference.relative)
