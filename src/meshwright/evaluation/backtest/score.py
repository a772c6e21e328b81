"""score: how far predictions are off, source by source; sources count equally, however many runs they published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from meshwright.spec.run.backtest_scores import MemoryScore, Prediction, Score

_FEWEST = 4
POOLED, OVERALL = "(smaller sources)", "all sources"
_AVERAGED = (
    "median",
    "mean",
    "bias",
    "within_5",
    "within_10",
    "within_20",
    "coverage",
    "null_median",
    "null_mean",
)


def scores(predictions: Sequence[Prediction]) -> tuple[Score, ...]:
    """Return the score of each source by name, those of fewer than four compared runs as one."""
    compared = [prediction for prediction in predictions if prediction.error is not None]
    counts = Counter(prediction.source for prediction in compared)
    by_name: dict[str, list[Prediction]] = {}
    for prediction in compared:
        name = prediction.source if counts[prediction.source] >= _FEWEST else POOLED
        by_name.setdefault(name, []).append(prediction)
    return tuple(_score(name, by_name[name]) for name in sorted(by_name))


def overall(sources: Sequence[Score]) -> Score | None:
    """Return the mean of the sources' scores, None without any."""
    if not sources:
        return None

    def average(name: str) -> float | None:
        values = [getattr(source, name) for source in sources if getattr(source, name) is not None]
        return float(np.mean(values)) if values else None

    averages = {name: average(name) for name in _AVERAGED}
    return Score.from_dict({"name": OVERALL, "num_runs": sum(source.num_runs for source in sources), **averages})


def memory_scores(predictions: Sequence[Prediction]) -> tuple[MemoryScore, ...]:
    """Return the errors of predicted memory by kind."""
    by_kind: dict[str, list[float]] = {}
    for prediction in predictions:
        if prediction.predicted_peak_bytes is not None and prediction.measured_peak_bytes is not None:
            error = prediction.predicted_peak_bytes / prediction.measured_peak_bytes - 1
            by_kind.setdefault(prediction.memory_kind or "not stated", []).append(error)
    return tuple(
        MemoryScore(
            kind=kind,
            num_runs=len(errors),
            median=float(np.median(np.abs(errors))),
            mean=float(np.mean(np.abs(errors))),
            bias=float(np.mean(errors)),
        )
        for kind, errors in sorted(by_kind.items())
    )


def _score(name: str, predictions: Sequence[Prediction]) -> Score:
    predicted, measured, width, null = (
        np.array([getattr(one, field) for one in predictions], np.float64)
        for field in ("predicted_step_time_s", "measured_step_time_s", "relative_error", "null_step_time_s")
    )
    errors = predicted / measured - 1
    off, null_off = np.abs(errors), np.abs(null / measured - 1)
    return Score(
        name=name,
        num_runs=len(predictions),
        median=float(np.median(off)),
        mean=float(off.mean()),
        bias=float(errors.mean()),
        within_5=float((off <= 0.05).mean()),
        within_10=float((off <= 0.10).mean()),
        within_20=float((off <= 0.20).mean()),
        coverage=float((np.abs(measured / predicted - 1) <= width).mean()),
        null_median=float(np.median(null_off)),
        null_mean=float(null_off.mean()),
    )
