"""A backtest as a page for a terminal: errors source by source, against a guess, and what could not be predicted."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.pages.tables.page_table import PageTable, labels_of, percent, signed_percent
from meshwright.spec.run.backtest_scores import Backtest, MemoryScore, PickingScore, Prediction, Score

_SHARES = ("within_5", "within_10", "within_20", "coverage")
_MEANS = (
    "within 5: share of runs with an error of at most 5 %; coverage: share within the 80 % interval; null: one model "
    "FLOP rate for each device and precision, which is what a guess would be"
)


def backtest_page(backtest: Backtest) -> Iterator[RenderableType]:
    """Yield the parts of the page."""
    yield f"[bold]{escape(backtest.title)}[/]"
    yield (
        f"{backtest.num_rows} rows, {backtest.num_unsupported} cannot be modelled; {backtest.num_constants} constants "
        f"({backtest.num_stack_constants} of them of single stacks) fitted on {backtest.num_fitted_runs} runs"
    )
    if backtest.overall is None:
        yield "no row has a measured step time to compare with"
    else:
        yield ""
        yield _score_table([*backtest.sources, backtest.overall])
        yield f"[dim]Step time, predicted over measured; sources count equally. {_MEANS}.[/]"
    if backtest.memory:
        yield ""
        yield _memory_table(backtest.memory)
    if backtest.fits is not None:
        yield f"{percent(backtest.fits)} of the runs are predicted to fit their devices, as they did"
    if backtest.picking is not None:
        yield _picking_words(backtest.picking)


def reasons_page(predictions: Sequence[Prediction]) -> Iterator[RenderableType]:
    """Yield what could not be predicted or compared, with the reason."""
    reasons = Counter((one.source, one.unsupported_reason) for one in predictions if one.unsupported_reason)
    if not reasons:
        return
    table = PageTable("rows#", "source", "cannot be modelled or compared because")
    for (source, reason), count in reasons.most_common():
        table.add_row(str(count), escape(source), escape(reason))
    yield ""
    yield table


def _score_table(scores: Sequence[Score]) -> Table:
    table = PageTable("source", *labels_of("num_runs", "median", "mean", "bias", *_SHARES, "null_median", "null_mean"))
    for score in scores:
        is_last = score is scores[-1]
        table.add_row(*_cells(score), style="bold" if is_last else None)
    return table


def _cells(score: Score) -> tuple[str, ...]:
    def share(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else percent(value, digits)

    return (
        escape(score.name),
        str(score.num_runs),
        share(score.median, 1),
        share(score.mean, 1),
        signed_percent(score.bias),
        *(share(getattr(score, name)) for name in _SHARES),
        *(share(value, 1) for value in (score.null_median, score.null_mean)),
    )


def _memory_table(scores: Sequence[MemoryScore]) -> Table:
    table = PageTable("peak memory", *labels_of("num_runs", "median", "mean", "bias"))
    for score in scores:
        errors = percent(score.median), percent(score.mean), signed_percent(score.bias)
        table.add_row(escape(score.kind), str(score.num_runs), *errors)
    return table


def _picking_words(picking: PickingScore) -> str:
    return (
        f"picking among the measured layouts of {picking.num_groups} groups of five and more: regret "
        f"{percent(picking.median_regret)} median, {percent(picking.worst_regret)} worst; Kendall tau "
        f"{picking.kendall_tau:.2f} over pairs more than 5 % apart"
    )
