"""RunComparison: two training runs side by side: their settings, losses and speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.spec.frozen import Frozen
from meshwright.spec.run.run import Manifest
from meshwright.spec.run.run_report import RunMetrics

_NOT_COMPARED = ("name", "run")
"""Parts of a job that say where a run is written, not what it computes."""
_MOST_LOSSES = 8


class RunSummary(Frozen):
    """One run in figures."""

    name: str
    num_steps: int
    num_ranks: int
    last_loss: float
    validation_loss: float | None
    """The last one; None where none was computed."""
    timed_steps: str
    """Steps that the medians are taken over, such as "steps 24 to 40"."""
    median_step_s: float
    median_tokens_per_s: float | None
    """None of data that has no tokens."""
    peak_memory_bytes: float
    """Rank 0's peak."""


class LossPair(Frozen):
    """The losses of both runs at one step."""

    step: int
    a: float
    b: float


class ChangedKey(Frozen):
    """A key of the job, or of the concrete layout, that the runs differ in; None where it was not set."""

    key: str
    a: Any
    b: Any


class RunComparison(Frozen):
    """Two runs side by side."""

    a: RunSummary
    b: RunSummary
    changed_settings: tuple[ChangedKey, ...]
    num_common_steps: int
    first_difference: int | None
    """First common step whose losses are not bitwise equal; None where all are."""
    losses: tuple[LossPair, ...]
    """Of a few common steps, evenly spaced, the last one included."""


def compare_runs(
    names: tuple[str, str], manifests: tuple[Manifest, Manifest], metrics: tuple[RunMetrics, RunMetrics]
) -> RunComparison:
    """Return how the runs differ."""
    one, other = metrics
    common, first, second = np.intersect1d(one.step, other.step, return_indices=True)
    a, b = one.loss[first], other.loss[second]
    apart = np.flatnonzero(a != b)
    shown = np.unique(np.linspace(0, max(len(common) - 1, 0), _MOST_LOSSES).round().astype(np.int64))[: len(common)]
    summaries = [run_summary(*each) for each in zip(names, manifests, metrics, strict=True)]
    return RunComparison(
        a=summaries[0],
        b=summaries[1],
        changed_settings=_changed(*manifests),
        num_common_steps=len(common),
        first_difference=int(common[apart[0]]) if len(apart) else None,
        losses=tuple(LossPair(step=int(common[at]), a=float(a[at]), b=float(b[at])) for at in shown),
    )


def run_summary(name: str, manifest: Manifest, metrics: RunMetrics) -> RunSummary:
    """Return a run with at least one finished step in figures."""
    tokens_per_s = float(np.median(metrics.tokens_per_s[metrics.timed]))
    return RunSummary(
        name=name,
        num_steps=len(metrics),
        num_ranks=manifest.attempts[-1].layout.num_ranks,
        last_loss=float(metrics.loss[-1]),
        validation_loss=float(metrics.validation_loss[-1]) if len(metrics.validation_loss) else None,
        timed_steps=metrics.timed_words,
        median_step_s=metrics.median_step_s,
        median_tokens_per_s=None if np.isnan(tokens_per_s) else tokens_per_s,
        peak_memory_bytes=float(metrics.memory_bytes.max()),
    )


def _changed(a: Manifest, b: Manifest) -> tuple[ChangedKey, ...]:
    settings = [_settings(one) for one in (a, b)]
    pairs = {key: [one.get(key) for one in settings] for key in (*settings[0], *settings[1])}
    return tuple(ChangedKey(key=key, a=of_a, b=of_b) for key, (of_a, of_b) in pairs.items() if of_a != of_b)


def _settings(manifest: Manifest) -> dict[str, Any]:
    """Return every key of the job by its dotted name, the layout as it was run, and the versions that ran it."""
    job = {name: part for name, part in manifest.job.to_dict().items() if name not in _NOT_COMPARED}
    newest = manifest.attempts[-1]
    job |= {"layout": newest.layout.to_dict(), "versions": newest.versions}
    return {
        f"{section}.{name}": value
        for section, part in job.items()
        if isinstance(part, dict)
        for name, value in part.items()
    }
