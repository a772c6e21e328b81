"""RunReport: a run's steps next to what was predicted of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.run.layout_plan import Candidate
from meshwright.spec.run.run import Manifest
from meshwright.spec.run.run_metrics import RunMetrics
from meshwright.spec.step.step_decomposition import StepDecomposition


@dataclass(frozen=True)
class RunReport:
    """What a run measured, and what formulas, a simulation or a profile say of its step."""

    folder: Path
    manifest: Manifest
    metrics: RunMetrics
    expected: Candidate
    """The layout that the run took, with its predicted step and memory."""
    measured_s: float
    """Median of the newest attempt's steps, the first few left out."""
    parts: Mapping[str, StepDecomposition]
    """The step by component: "expected" by formula, "simulated" and "profiled" where they exist."""

    example: str | None = None
    """The machine whose rates the prediction takes, where the one that ran is not calibrated."""

    @property
    def predicted_s(self) -> float:
        """Return the predicted step time."""
        return self.expected.step_s
