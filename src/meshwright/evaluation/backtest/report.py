"""backtest: everything that is to be said of some predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.cost.constants import all_constants
from meshwright.cost.stacks import stacks
from meshwright.evaluation.backtest.picking import picking_score
from meshwright.evaluation.backtest.score import memory_scores, overall, scores
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.fitting.given import Calibration
from meshwright.evaluation.fitting.timed_runs import MULTIPLIERS
from meshwright.spec.run.backtest_scores import Backtest, Prediction


@dataclass(frozen=True)
class Sizes:
    """How much was fitted."""

    num_constants: int
    num_stack_constants: int
    """Of these, constants of single stacks."""
    num_fitted_runs: int


def shipped_sizes(calibrations: Mapping[str, Calibration]) -> Sizes:
    """Return how much stands behind the shipped constants, and those calibrated on given runs."""
    fitted = [stack for stack in stacks().values() if stack.num_runs and stack.name not in calibrations]
    num_of_stacks = len(MULTIPLIERS) * (len(fitted) + len(calibrations))
    num_free = sum(constant.spread > 0 for constant in all_constants().values())
    num_given = sum(calibration.num_runs for calibration in calibrations.values())
    return Sizes(num_free + num_of_stacks, num_of_stacks, sum(stack.num_runs for stack in fitted) + num_given)


def backtest(title: str, runs: Sequence[MeasuredRun], predictions: Sequence[Prediction], sizes: Sizes) -> Backtest:
    """Return the scores of `predictions`, which are of `runs` in their order."""
    sources = scores(predictions)
    answers = [prediction.fits for prediction in predictions if prediction.fits is not None]
    return Backtest(
        title=title,
        num_rows=len(runs),
        num_unsupported=sum(prediction.predicted_step_time_s is None for prediction in predictions),
        num_constants=sizes.num_constants,
        num_stack_constants=sizes.num_stack_constants,
        num_fitted_runs=sizes.num_fitted_runs,
        overall=overall(sources),
        sources=sources,
        memory=memory_scores(predictions),
        fits=sum(answers) / len(answers) if answers else None,
        picking=picking_score(runs, predictions),
    )
