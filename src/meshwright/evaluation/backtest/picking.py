"""picking_score: how much slower than the best measured layout the predicted best is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.arrays import Floats
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.spec.run.backtest_scores import MisplacedRun, PickingScore, Prediction

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
