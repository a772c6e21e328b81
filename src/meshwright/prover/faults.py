"""FAULTS: what a proof can break on purpose, one fault for each axis; plant.py does it."""

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
"""What is done to each axis."""


def degree(layout: Layout, axis: PlantedAxis) -> int:
    """Return over how many ranks an axis splits: a fault in one of degree 1 changes nothing."""
    value: int = getattr(layout, axis)
    return value
