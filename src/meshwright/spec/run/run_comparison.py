"""RunSummary and RunComparison: a run in figures, each with the attempt that it is of, and two runs side by side."""

from math import isfinite
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AllowInfNan, BeforeValidator, PlainSerializer

from meshwright.spec.frozen import Frozen
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.run import Manifest
from meshwright.spec.run.run_report import RunMetrics, timed_attempt_of, timed_rows

_NOT_COMPARED = ("name", "run")
"""Parts of a job that say where a run is written, not what it computes."""
_MOST_LOSSES = 8

Integers = NDArray[np.int64]


def _read_loss(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _written_loss(value: float) -> float | str:
    return value if isfinite(value) else str(value)


Loss = Annotated[
    float,
    AllowInfNan(True),
    BeforeValidator(_read_loss),
    PlainSerializer(_written_loss, return_type=float | str, when_used="json"),
]
"""A loss as the run had it; one that is not finite is a string in JSON, which has no number for it."""


class AttemptSteps(Frozen):
    """The steps of a run that one attempt trained, and no later one did again."""

    attempt: int
    """From 1."""
    first_step: int
    last_step: int
    num_ranks: int
    layout: str
    """The keys of its concrete layout, such as "dp_shard=2,microbatch_size=2"."""


class RunSummary(Frozen):
    """One run in figures. Ranks, medians and memory are of one attempt, the newest with enough steps to be timed."""

    name: str
    num_steps: int
    num_ranks: int
    last_loss: Loss
    first_not_finite: int | None
    """First step whose loss is nan or infinite; None where none is."""
    num_not_finite: int
    """Steps whose loss is nan or infinite."""
    validation_loss: Loss | None
    """The last one; None where none was computed."""
    validation_step: int | None
    """The step that it was computed after."""
    timed_steps: str
    """Steps that the medians are taken over, such as "steps 24 to 40"."""
    are_few: bool
    """Whether no attempt has enough steps to leave out the first of them, which compile and allocate."""
    median_step_s: float
    median_tokens_per_s: float | None
    """None of data that has no tokens."""
    peak_memory_bytes: float | None
    """Rank 0's peak; None where it was not recorded."""
    attempts: tuple[AttemptSteps, ...]
    """Which attempt trained which steps, oldest first."""


class LossPair(Frozen):
    """The losses of both runs at one step."""

    step: int
    a: Loss
    b: Loss
    a_attempt: int
    """Attempt of A that trained the step, from 1."""
    b_attempt: int


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
    """The job of each run's newest attempt, and layout and versions of the attempt that its medians are of."""
    num_common_steps: int
    first_difference: int | None
    """First common step whose losses are not bitwise equal, where nan equals nan; None where all are."""
    first_other_layout: int | None
    """First common step that the runs trained in different layouts; None where all were trained in the same."""
    num_other_layout: int
    """Common steps that the runs trained in different layouts."""
    losses: tuple[LossPair, ...]
    """Of a few common steps, evenly spaced, with the last one and the first that differs."""


def compare_runs(
    names: tuple[str, str], manifests: tuple[Manifest, Manifest], metrics: tuple[RunMetrics, RunMetrics]
) -> RunComparison:
    """Return how the runs differ."""
    one, other = metrics
    common, first, second = np.intersect1d(one.step, other.step, return_indices=True)
    of_a, of_b = one.loss[first], other.loss[second]
    apart = np.flatnonzero((of_a != of_b) & ~(np.isnan(of_a) & np.isnan(of_b)))
    is_other_layout = _layouts(manifests[0], one.attempt[first]) != _layouts(manifests[1], other.attempt[second])
    summaries = [run_summary(*each) for each in zip(names, manifests, metrics, strict=True)]
    return RunComparison(
        a=summaries[0],
        b=summaries[1],
        changed_settings=_changed(*(_settings(*each) for each in zip(manifests, metrics, strict=True))),
        num_common_steps=len(common),
        first_difference=int(common[apart[0]]) if len(apart) else None,
        first_other_layout=int(common[is_other_layout.argmax()]) if is_other_layout.any() else None,
        num_other_layout=int(is_other_layout.sum()),
        losses=tuple(
            LossPair(
                step=int(common[at]),
                a=float(of_a[at]),
                b=float(of_b[at]),
                a_attempt=int(one.attempt[first[at]]),
                b_attempt=int(other.attempt[second[at]]),
            )
            for at in _shown(len(common), apart)
        ),
    )


def _shown(num_steps: int, apart: Integers) -> Integers:
    """Return positions of a few steps, evenly spaced, with the last one and the first of those `apart`."""
    spaced = np.linspace(0, num_steps - 1, min(num_steps, _MOST_LOSSES)).round().astype(np.int64)
    return np.union1d(spaced, apart[:1])


def _layouts(manifest: Manifest, attempts: Integers) -> NDArray[np.object_]:
    """Return the layout of each of `attempts`, numbers from 1."""
    found = np.empty(len(attempts), np.object_)
    found[:] = [manifest.attempts[number - 1].layout for number in attempts]
    return found


def run_summary(name: str, manifest: Manifest, metrics: RunMetrics) -> RunSummary:
    """Return a run with at least one finished step in figures."""
    rows = timed_rows(metrics, manifest.job)
    tokens_per_s = float(np.median(metrics.tokens_per_s[rows]))
    not_finite = metrics.steps_not_finite
    peak_bytes = float(np.fmax.reduce(metrics.memory_bytes[metrics.attempt == metrics.timed_attempt]))
    return RunSummary(
        name=name,
        num_steps=len(metrics),
        num_ranks=timed_attempt_of(manifest, metrics).layout.num_ranks,
        last_loss=float(metrics.loss[-1]),
        first_not_finite=int(not_finite[0]) if len(not_finite) else None,
        num_not_finite=len(not_finite),
        validation_loss=float(metrics.validation_loss[-1]) if len(metrics.validation_loss) else None,
        validation_step=int(metrics.validation_step[-1]) if len(metrics.validation_step) else None,
        timed_steps=metrics.words_of(rows),
        are_few=not metrics.is_timed,
        median_step_s=float(np.median(metrics.step_s[rows])),
        median_tokens_per_s=None if np.isnan(tokens_per_s) else tokens_per_s,
        peak_memory_bytes=None if np.isnan(peak_bytes) else peak_bytes,
        attempts=tuple(_attempt_steps(number, manifest, metrics) for number in np.unique(metrics.attempt)),
    )


def _attempt_steps(number: int, manifest: Manifest, metrics: RunMetrics) -> AttemptSteps:
    steps, layout = metrics.step[metrics.attempt == number], manifest.attempts[number - 1].layout
    return AttemptSteps(
        attempt=int(number),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        num_ranks=layout.num_ranks,
        layout=layout_text(layout),
    )


def _changed(a: dict[str, Any], b: dict[str, Any]) -> tuple[ChangedKey, ...]:
    pairs = {key: (a.get(key), b.get(key)) for key in (*a, *b)}
    return tuple(ChangedKey(key=key, a=of_a, b=of_b) for key, (of_a, of_b) in pairs.items() if of_a != of_b)


def _settings(manifest: Manifest, metrics: RunMetrics) -> dict[str, Any]:
    """Return every key of the job by its dotted name, the layout as it was run, and the versions that ran it."""
    job = {name: part for name, part in manifest.job.to_dict().items() if name not in _NOT_COMPARED}
    timed = timed_attempt_of(manifest, metrics)
    job |= {"layout": timed.layout.to_dict(), "versions": timed.versions}
    return {
        f"{section}.{name}": value
        for section, part in job.items()
        if isinstance(part, dict)
        for name, value in part.items()
    }
