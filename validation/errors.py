"""python -m validation.errors: writes docs/accuracy.md, the errors of every prediction on the published runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import numpy as np

from meshwright.evaluation.backtest.left_out import by_folds, by_stack
from meshwright.evaluation.backtest.predict_runs import load_runs, predict_runs
from meshwright.evaluation.backtest.score import backtest, shipped_sizes
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.spec.run.backtest_scores import Backtest, MemoryScore, PickingScore, Prediction, Score
from meshwright.units import format_bytes
from validation.doubled import doubled
from validation.fit import PUBLISHED_RUNS

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
_NUM_DRAWS = 10
_PEERS = (
    ("Calculon, constants as published, on the 8 points it was tuned on", "3.65 % mean", "Isaev et al., SC23"),
    ("the same on vTrain's multi-node runs", "12.9 % mean", "its published code and constants"),
    ("the same on BLOOM's prequel", "30.5 % mean", "its published code and constants"),
    ("the same on small single-node runs", "35.7 % mean", "its published code and constants"),
    ("vTrain, from profiles of each kernel, one node", "8.4 % mean", "Bang et al., MICRO 2024"),
    ("vTrain, from profiles of each kernel, many nodes", "14.7 % mean", "Bang et al., MICRO 2024"),
    ("SimuMax v1.2 on its own B200 runs", "5.6 % mean; memory 0.46 %", "its repository"),
)
"""What others reach: who, error of step time, where that is from."""

_HEAD = """# How accurate predictions are

Written by `python -m validation.errors` from [validation/published_runs.csv](../validation/published_runs.csv): runs
that other people measured and published, each predicted from its configuration alone. An error is predicted over
measured step time, less 1. A source's median and mean are of absolute errors; "all sources" is the mean over sources,
each of which counts equally, those of fewer than four runs as one. Bias is the mean error: positive means predicted too
slow. Null model: one model FLOP rate for each device and precision, fitted without the rows that are left out.

The formulas were developed with these runs known, so the error for new runs is somewhat larger than that of runs which
were left out of the fit. `meshwright backtest RUNS.csv` scores a file of your own.
"""


@click.command()
@click.option("--print", "as_print", is_flag=True, help="Print the page in place of writing it.")
def main(as_print: bool) -> None:
    """Write docs/accuracy.md: takes about five minutes."""
    text = "\n".join(page())
    if as_print:
        click.echo(text)
    else:
        PAGE.write_text(text, encoding="utf-8")


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    runs = load_runs(PUBLISHED_RUNS)
    predictions = predict_runs(runs)
    shipped = backtest("shipped constants", runs, predictions, shipped_sizes({}))
    known = by_folds(runs, predictions)
    unseen, unknown, *draws = by_stack(runs, predictions, _NUM_DRAWS)
    met = _mean(draws)
    yield from (_HEAD, "## In short", "")
    yield from _summary({"shipped": shipped, "known": known, "unseen": unseen, "unknown": unknown, "met": met})
    yield from (
        "",
        "## What others reach",
        "",
        "Each on runs of its own choice; those of the second to fourth row are of the origin of vtrain-multi, "
        "bloom-prequel and vtrain-single below.",
        "",
    )
    yield from _table(("who", "step time", "where"), _PEERS)
    for report in (known, unseen, unknown, met, shipped):
        yield from ("", f"## Step time: {report.title}", "")
        yield from _sources(report)
    yield from ("", "## Memory", "", *_memory(shipped), "", *_doubled(runs))
    yield from ("", "## Picking a layout", "", *_picking(known.picking, shipped.picking))
    yield from ("", "## What is not predicted", "", *_unsupported(predictions))
    yield ""


def _mean(draws: Sequence[Backtest]) -> Backtest:
    """Return the mean of several draws of the runs that are given."""
    names = [score.name for score in draws[0].sources if all(_named(draw, score.name) for draw in draws)]
    sources = tuple(_mean_score([_named(draw, name) for draw in draws]) for name in names)
    overall = _mean_score([draw.overall for draw in draws])
    title = f"stack met in five runs, the others predicted (mean of {len(draws)} draws)"
    return draws[0].replace(title=title, sources=sources, overall=overall)


def _named(report: Backtest, name: str) -> Score | None:
    return next((score for score in report.sources if score.name == name), None)


def _mean_score(scores: Sequence[Score | None]) -> Score:
    records = [score.to_dict() for score in scores if score is not None]
    means = {key: float(np.mean([record[key] for record in records])) for key in records[0] if key != "name"}
    return Score.from_dict({**means, "name": records[0]["name"], "num_runs": round(means["num_runs"])})


def _summary(reports: dict[str, Backtest]) -> Iterator[str]:
    header = ("what is known of a run's stack", "n", "median", "mean", "bias", "in the 80 % interval", "null median")
    rows = []
    for report in reports.values():
        score = report.overall
        assert score is not None, "no run was timed"
        covered = np.average([one.coverage for one in report.sources], weights=[one.num_runs for one in report.sources])
        name = f"{report.title} (fitted on them)" if report is reports["shipped"] else report.title
        errors = _percent(score.median), _percent(score.mean), f"{100 * score.bias:+.1f} %"
        rows.append((name, str(score.num_runs), *errors, f"{covered:.0%} of runs", _percent(score.null_median)))
    yield from _table(header, rows)
    shipped = reports["shipped"]
    num_of_stacks = shipped.num_stack_constants // 3
    yield ""
    yield (
        f"{shipped.num_constants} constants on {shipped.num_fitted_runs} runs: "
        f"{shipped.num_constants - shipped.num_stack_constants} of hardware, kernels and libraries, each with a prior "
        f"and bounds, and 3 for each of {num_of_stacks} stacks. {shipped.num_unsupported} of {shipped.num_rows} rows "
        "cannot be modelled."
    )


def _sources(report: Backtest) -> Iterator[str]:
    header = (
        "source",
        "n",
        "median",
        "mean",
        "bias",
        "<= 5 %",
        "<= 10 %",
        "<= 20 %",
        "covered",
        "null median",
        "null mean",
    )
    scores = [*report.sources, *([report.overall] if report.overall else [])]
    yield from _table(header, [_cells(score) for score in scores])


def _cells(score: Score) -> tuple[str, ...]:
    within = (score.within_5, score.within_10, score.within_20, score.coverage)
    return (
        score.name,
        str(score.num_runs),
        _percent(score.median),
        _percent(score.mean),
        f"{100 * score.bias:+.1f} %",
        *("-" if share is None else f"{share:.0%}" for share in within),
        _percent(score.null_median),
        _percent(score.null_mean),
    )


def _memory(report: Backtest) -> Iterator[str]:
    def cells(score: MemoryScore) -> tuple[str, ...]:
        return (
            score.kind,
            str(score.num_runs),
            _percent(score.median),
            _percent(score.mean),
            f"{100 * score.bias:+.1f} %",
        )

    yield "Peak of the fullest rank, by what the source says that it measured; where it does not, reserved is compared."
    yield ""
    yield from _table(("kind", "n", "median", "mean", "bias"), [cells(score) for score in report.memory])
    yield ""
    yield f"{report.fits:.1%} of the runs are predicted to fit their devices, as they did."


def _doubled(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    found = doubled(runs)
    yield (
        "Each model at twice its largest measured microbatch, without recomputation: "
        f"{sum(one.fits for one in found)} of {len(found)} are predicted to fit."
    )
    yield ""
    rows = [
        (
            one.model,
            one.device,
            str(one.microbatch_size),
            format_bytes(one.reserved_bytes),
            format_bytes(one.usable_bytes),
            "yes" if one.fits else "no",
        )
        for one in found
    ]
    yield from _table(("model", "device", "microbatch", "reserved", "usable", "fits"), rows)


def _picking(known: PickingScore | None, shipped: PickingScore | None) -> Iterator[str]:
    yield "Groups of at least five measured layouts of one model, cluster, batch and software."
    yield ""
    rows = [
        (
            name,
            str(score.num_groups),
            _percent(score.median_regret),
            _percent(score.worst_regret),
            f"{score.kendall_tau:.2f}",
        )
        for name, score in (("folds, stack known", known), ("shipped constants", shipped))
        if score is not None
    ]
    yield from _table(("", "groups", "median regret", "worst regret", "Kendall tau, pairs > 5 % apart"), rows)
    if shipped is not None and shipped.most_misplaced:
        count = len(shipped.most_misplaced)
        yield ""
        yield f"The {count} runs in the most wrong pairs; without them tau is {shipped.tau_without_them:.2f}."
        yield ""
        misplaced = [
            (one.id, f"{one.num_wrong} of {one.num_pairs}", f"{100 * one.error:+.1f} %")
            for one in shipped.most_misplaced
        ]
        yield from _table(("run", "wrong pairs", "error"), misplaced)


def _unsupported(predictions: Sequence[Prediction]) -> Iterator[str]:
    rows = [(one.id, one.unsupported_reason.split("[type=")[0]) for one in predictions if one.unsupported_reason]
    yield from _table(("row", "why"), rows) if rows else ("Nothing.",)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
