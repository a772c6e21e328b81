"""backtest: how far predictions are off, by source, and how much slower than the best layout the predicted best is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.constants import all_constants
from meshwright.cost.layout_table import Floats
from meshwright.cost.stack_factors import stacks
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.fitting.given import Calibration
from meshwright.evaluation.fitting.timed_runs import MULTIPLIERS
from meshwright.spec.run.backtest_scores import Backtest, MemoryScore, MisplacedRun, PickingScore, Prediction, Score

_FEWEST = 4
POOLED, OVERALL = "(smaller sources)", "all sources"
_AVERAGED = [name for name in Score.model_fields if name not in ("name", "num_runs")]


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


_SAME = ("source_family", "stack", "model_family", "n_layers", "hidden", "seq_len", "gpu", "n_gpus", "global_batch")
"""Columns that runs of one group share: model, cluster, batch, and the software."""
_LEAST_LAYOUTS, _LEAST_APART = 5, 0.05


_NUM_MISPLACED = 4


@dataclass(frozen=True)
class _Group:
    """Measured layouts of one model, cluster and batch, one element a layout."""

    ids: list[str]
    predicted_s: Floats
    measured_s: Floats

    @property
    def regret(self) -> float:
        return float(self.measured_s[self.predicted_s.argmin()] / self.measured_s.min() - 1)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of layouts of one group that were measured more than 5 % apart."""

    first: list[str]
    second: list[str]
    order: Floats
    """1 where predictions order them as measured, -1 where not."""


def picking_score(runs: Sequence[MeasuredRun], predictions: Sequence[Prediction]) -> PickingScore | None:
    """Return the score over all groups of at least five measured layouts, None without one."""
    groups = _groups(runs, predictions)
    if not groups:
        return None
    worst = max(groups, key=lambda name: groups[name].regret)
    pairs = _pairs(list(groups.values()))
    misplaced = _most_misplaced(pairs, list(groups.values()))
    names = {one.id for one in misplaced}
    is_other = np.array([not names & {a, b} for a, b in zip(pairs.first, pairs.second, strict=True)], np.bool_)
    return PickingScore(
        num_groups=len(groups),
        median_regret=float(np.median([group.regret for group in groups.values()])),
        worst_regret=groups[worst].regret,
        worst_group=worst,
        kendall_tau=_tau(pairs.order),
        most_misplaced=misplaced,
        tau_without_them=_tau(pairs.order[is_other]),
    )


def _groups(runs: Sequence[MeasuredRun], predictions: Sequence[Prediction]) -> dict[str, _Group]:
    """Return the groups by what their layouts share; of a layout measured again and again, the medians."""
    found: dict[str, dict[str, list[tuple[str, float, float]]]] = {}
    for run, prediction in zip(runs, predictions, strict=True):
        predicted, measured = prediction.predicted_step_time_s, prediction.measured_step_time_s
        if predicted is None or measured is None or run.setup is None:
            continue
        name = ", ".join([*(run.row.text(column) for column in _SAME), run.setup.workload.precision])
        configuration = run.row.text("config_group") or run.row.id
        found.setdefault(name, {}).setdefault(configuration, []).append((run.row.id, predicted, measured))
    groups = {}
    for name, layouts in found.items():
        if len(layouts) >= _LEAST_LAYOUTS:
            times = np.array([np.median([each[1:] for each in several], axis=0) for several in layouts.values()])
            groups[name] = _Group([several[0][0] for several in layouts.values()], times[:, 0], times[:, 1])
    return groups


def _pairs(groups: Sequence[_Group]) -> _Pairs:
    firsts, seconds, orders = [], [], []
    for group in groups:
        first, second = np.triu_indices(len(group.ids), 1)
        apart = np.log(group.measured_s[first] / group.measured_s[second])
        is_clear = np.abs(apart) > np.log1p(_LEAST_APART)
        first, second, apart = first[is_clear], second[is_clear], apart[is_clear]
        firsts += [group.ids[index] for index in first]
        seconds += [group.ids[index] for index in second]
        orders.append(np.sign(apart * np.log(group.predicted_s[first] / group.predicted_s[second])))
    return _Pairs(firsts, seconds, np.concatenate(orders))


def _tau(order: Floats) -> float:
    return float(order.mean()) if len(order) else 1.0


def _most_misplaced(pairs: _Pairs, groups: Sequence[_Group]) -> tuple[MisplacedRun, ...]:
    """Return the layouts in the most wrong pairs, those first."""
    both = [*pairs.first, *pairs.second]
    wrong = Counter(name for name, order in zip(both, [*pairs.order, *pairs.order], strict=True) if order < 0)
    often = Counter(both)
    errors = {
        name: predicted / measured - 1
        for group in groups
        for name, predicted, measured in zip(group.ids, group.predicted_s, group.measured_s, strict=True)
    }
    return tuple(
        MisplacedRun(id=name, num_wrong=count, num_pairs=often[name], error=errors[name])
        for name, count in wrong.most_common(_NUM_MISPLACED)
    )
