"""picking_score: had somebody followed the predictions, how much slower than the best would their layouts be?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost.case import Floats
from meshwright.planner.measured.read import MeasuredRun
from meshwright.spec.backtest import PickingScore, Prediction

_SAME = ("source_family", "stack", "model_family", "n_layers", "hidden", "seq_len", "gpu", "n_gpus", "global_batch")
"""Columns that runs of one group share: model, cluster, batch, and the software."""
_FEWEST, _LEAST_APART = 5, 0.05


def picking_score(runs: Sequence[MeasuredRun], predictions: Sequence[Prediction]) -> PickingScore | None:
    """Return the score over all groups of at least five measured layouts, None without one."""
    groups = _groups(runs, predictions)
    if not groups:
        return None
    regrets = {name: _regret(*times) for name, times in groups.items()}
    worst = max(regrets, key=regrets.__getitem__)
    orders = np.concatenate([_orders(*times) for times in groups.values()])
    return PickingScore(
        num_groups=len(groups),
        median_regret=float(np.median(list(regrets.values()))),
        worst_regret=regrets[worst],
        worst_group=worst,
        kendall_tau=float(orders.mean()) if len(orders) else 1.0,
    )


def _groups(runs: Sequence[MeasuredRun], predictions: Sequence[Prediction]) -> dict[str, tuple[Floats, Floats]]:
    """Return predicted and measured seconds of each group; of a layout measured again and again, their medians."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run, prediction in zip(runs, predictions, strict=True):
        predicted, measured = prediction.predicted_step_time_s, prediction.measured_step_time_s
        if predicted is None or measured is None or run.setting is None:
            continue
        name = ", ".join([*(run.row.text(column) for column in _SAME), run.setting.workload.precision])
        configuration = run.row.text("config_group") or run.row.id
        found.setdefault(name, {}).setdefault(configuration, []).append((predicted, measured))
    return {
        name: (times[:, 0], times[:, 1])
        for name, layouts in found.items()
        if len(times := np.array([np.median(pairs, axis=0) for pairs in layouts.values()])) >= _FEWEST
    }


def _regret(predicted: Floats, measured: Floats) -> float:
    return float(measured[predicted.argmin()] / measured.min() - 1)


def _orders(predicted: Floats, measured: Floats) -> Floats:
    """Return 1 for each pair that is ordered as measured, -1 for the others; pairs measured within 5 % left out."""
    first, second = np.triu_indices(len(measured), 1)
    apart = np.log(measured[first] / measured[second])
    is_clear = np.abs(apart) > np.log1p(_LEAST_APART)
    return np.asarray(np.sign(apart * np.log(predicted[first] / predicted[second]))[is_clear], np.float64)
