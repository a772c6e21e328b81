"""Proof: how close each layout came to one process, name by name, and whether that is close enough."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout

PlantedAxis = Literal["tp", "cp", "pp", "ep", "dp"]
"""The axes that a proof can break on purpose."""

FAULTS: Mapping[PlantedAxis, str] = {
    "tp": "gradients of what every tp rank holds are not summed over tp",
    "cp": "each rank turns queries and keys by the positions of the next cp rank",
    "pp": "every stage but the first gets the activations of the microbatch before",
    "ep": "rows come back from their experts in the place of the row before",
    "dp": "every data-parallel rank sees the samples of the first",
}
"""Description of the fault of each axis; prover/record.py injects it."""

ProofPrecision = Literal["float32", "float64", "mixed"]
"""What a proof computes in; mixed is bfloat16 over float32 masters, with gradients summed in float32."""

DifferenceKind = Literal["loss", "gradient", "weight"]
"""What a proof compares."""


class Difference(Frozen):
    """The worst distance of one kind between a layout and one process."""

    kind: DifferenceKind
    """What was compared; gradients are those before clipping, weights those after the last step."""
    name: str
    """The parameter that it was found in, by its name in the plain model; "" of the loss, "all" of a norm over all."""
    step: NonNegativeInt
    """The optimizer step at which it was worst; 0 is before the first one."""
    relative: NonNegativeFloat
    """Distance over the size of what one process gave."""
    bar: PositiveFloat
    """The largest relative distance that rounding explains."""

    @property
    def share(self) -> float:
        """Return how much of what rounding explains the distance takes: more than 1 is a mistake."""
        return self.relative / self.bar


class LayoutProof(Frozen):
    """What one layout gave, compared with one process."""

    layout: Layout
    differences: Annotated[tuple[Difference, ...], Field(strict=False)] = ()
    """The worst of the losses, of the gradients and of the updated weights, in this order; none where it failed."""
    problem: str | None = None
    """What is wrong beyond a distance: ranks that failed, parameters that are missing, copies that differ."""
    repeats: bool | None = None
    """Whether a second run of the same ranks gave the same bits; None where there was none."""
    took_s: NonNegativeFloat
    """Seconds from the start of its ranks to their end."""

    @property
    def holds(self) -> bool:
        """Return whether the layout trains what one process trains."""
        return (
            self.problem is None
            and self.repeats is not False
            and all(difference.share <= 1 for difference in self.differences)
        )

    @property
    def worst(self) -> Difference | None:
        """Return the difference that comes closest to its bar, or lies furthest above it."""
        return max(self.differences, key=lambda difference: difference.share, default=None)


class Change(Frozen):
    """One value of a job that a proof replaced."""

    key: str
    """Dotted key; a field of the architecture where model.options holds it."""
    original: str
    """As the job has it."""
    proven: str
    """As it was run."""


class Proof(Frozen):
    """One process and several layouts of one job."""

    job: Job
    """The job as it was run, but for the layout."""
    changes: Annotated[tuple[Change, ...], Field(strict=False)] = ()
    """What was made smaller, or fit for a comparison."""
    num_steps: PositiveInt
    """Optimizer steps that were compared."""
    num_parameters: PositiveInt
    """Parameters of the model as it was run."""
    precision: ProofPrecision
    """What everything was computed in."""
    planted: PlantedAxis | None = None
    """The axis that was broken on purpose."""
    layouts: Annotated[tuple[LayoutProof, ...], Field(strict=False)]
    """Each layout's outcome, in the order asked for."""
    date: str
    """Day of the proof, YYYY-MM-DD."""
    versions: dict[str, str]
    """Versions of meshwright, Python, torch and others."""
    took_s: NonNegativeFloat
    """Seconds in all."""

    @property
    def holds(self) -> bool:
        """Return whether every layout trains what one process trains."""
        return all(one.holds for one in self.layouts)
