"""StepGuard: which updates of a run are skipped, and when it returns to a checkpoint.

A spike is a loss or gradient norm x with x > mean + deviations x standard deviation of the last `window` updates that
were taken. Values that are not finite never enter the window. A decision depends on what is equal on every rank and
is kept in checkpoints, so that all ranks, and a resumed run, decide alike.
"""

import math
import statistics
from collections import deque
from typing import Any, Literal

from meshwright.errors import NonFiniteError
from meshwright.spec.job.guards_section import GuardsSection

Decision = Literal["take", "skip", "roll back", "restore", "again"]
"""roll back leaves out the data since the checkpoint; restore, after corruption, computes the same steps again; again:
another replica was lost in the step, which is done again."""


class StepGuard:
    """Decides about each step of a run; its state is part of a checkpoint."""

    def __init__(self, section: GuardsSection) -> None:
        self._section = section
        self._losses: deque[float] = deque(maxlen=section.window)
        self._norms: deque[float] = deque(maxlen=section.window)
        self._num_skips = 0
        self.num_rollbacks = 0
        self.left_out_steps = 0
        """Steps whose data the run has left out by its rollbacks: that of step s is the data of s + left_out_steps."""
        self.reason = ""
        """Why the last step was not taken."""

    def decide(self, step: int, loss: float, grad_norm: float) -> Decision:
        """Return what is to be done with the update of `step`; raises NonFiniteError where it stops the run."""
        self.reason = self._reason(loss, grad_norm)
        if not self.reason:
            self._num_skips = 0
            self._losses.append(loss)
            self._norms.append(grad_norm)
            return "take"
        self._num_skips += 1
        if self._num_skips < self._section.max_skips:
            return "skip"
        if self.num_rollbacks == self._section.max_rollbacks:
            raise NonFiniteError(
                f"step {step}: {self.reason}, and {self._num_skips} updates in a row were skipped, after "
                f"{self.num_rollbacks} rollbacks: guards.max_rollbacks = {self._section.max_rollbacks} allows no more: "
                "look at the data, lower optimizer.learning_rate, or raise guards.spike_deviations"
            )
        return "roll back"

    @property
    def is_skipping(self) -> bool:
        """Return whether the last step was not taken: the model may be spoiled already."""
        return self._num_skips > 0

    def rolled_back(self, num_steps: int) -> None:
        """Leave out the data of so many steps from now on, having restored a checkpoint's state."""
        self._num_skips = 0
        self.num_rollbacks += 1
        self.left_out_steps += num_steps

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this, as JSON does."""
        return {
            "losses": list(self._losses),
            "grad_norms": list(self._norms),
            "num_skips": self._num_skips,
            "num_rollbacks": self.num_rollbacks,
            "left_out_steps": self.left_out_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state, but for the rollbacks since."""
        self._losses = deque(state.get("losses", ()), maxlen=self._section.window)
        self._norms = deque(state.get("grad_norms", ()), maxlen=self._section.window)
        self._num_skips = state.get("num_skips", 0)
        self.num_rollbacks = max(self.num_rollbacks, state.get("num_rollbacks", 0))
        self.left_out_steps = max(self.left_out_steps, state.get("left_out_steps", 0))

    def _reason(self, loss: float, grad_norm: float) -> str:
        """Return why an update is not to be taken; "" where it is."""
        for name, value, window in (("loss", loss, self._losses), ("gradient norm", grad_norm, self._norms)):
            if not math.isfinite(value):
                return f"{name} {value} is not finite"
            if (limit := self._limit(window)) is not None and value > limit:
                return f"{name} {value:.4g} is a spike: recent updates allow {limit:.4g}"
        return ""

    def _limit(self, window: deque[float]) -> float | None:
        """Return from where on a value is a spike; None where nothing is, or too little is known."""
        deviations = self._section.spike_deviations
        if deviations is None or 2 * len(window) < self._section.window:
            return None
        return statistics.fmean(window) + deviations * statistics.pstdev(window)
