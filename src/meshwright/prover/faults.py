"""Faults that a proof can inject, one per axis; plant.py implements them."""

from collections.abc import Mapping

from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.proof import PlantedAxis

FAULTS: Mapping[PlantedAxis, str] = {
    "tp": "gradients of what every tp rank holds are not summed over tp",
    "cp": "each rank turns queries and keys by the positions of the next cp rank",
    "pp": "every stage but the first gets the activations of the microbatch before",
    "ep": "rows come back from their experts in the place of the row before",
    "dp": "every data-parallel rank sees the samples of the first",
}
"""Description of the fault of each axis."""


def degree(layout: Layout, axis: PlantedAxis) -> int:
    """Return the degree of an axis; a fault in one of degree 1 has no effect."""
    value: int = getattr(layout, axis)
    return value
